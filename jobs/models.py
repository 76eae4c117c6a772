"""What was bought (Product, Order) and how its run goes (Job, Attempt, JobEvent, MetricPoint).

`Job.state` is written by `lifecycle` alone. The Job's row is the queue.
"""

from __future__ import annotations

import uuid
from decimal import Decimal

from django.conf import settings
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import F, Q, Value
from django.db.models.functions import Coalesce, NullIf
from django.utils.translation import gettext_lazy as _

from billing.models import Hold, NodeSpec, Quote
from console.accounts.models import Organization
from jobs.states import ACTIVE, ENDED, EndReason, JobState, OnHang
from runtime.specs import Controller
from storage.models import DatasetVersion, Image, Workspace


class Product(models.Model):
    """Something that can be bought: a way of selling training."""

    name = models.SlugField(_("name"), unique=True)
    title = models.CharField(_("title"), max_length=100)
    description = models.TextField(_("description"), blank=True)
    mode = models.CharField(_("mode of sale"), max_length=8, choices=Quote.Modes.choices, default=Quote.Modes.METERED)
    reference_seconds_per_epoch = models.DecimalField(
        _("reference seconds per epoch"),
        max_digits=10,
        decimal_places=2,
        default=Decimal(60),
        validators=[MinValueValidator(Decimal("0.01"))],
        help_text=_("On one node. The estimate of a first run; later runs of the same code are estimated from it."),
    )
    headroom = models.DecimalField(
        _("headroom of the ceiling"),
        max_digits=4,
        decimal_places=2,
        default=Decimal(2),
        validators=[MinValueValidator(Decimal(1))],
        help_text=_("The ceiling covers the p90 estimate times this, where the customer names none."),
    )
    max_epochs = models.PositiveIntegerField(_("most epochs"), default=10_000)
    max_nodes = models.PositiveSmallIntegerField(_("most nodes"), default=64)
    max_seconds = models.PositiveIntegerField(_("longest run (seconds)"), default=7 * 24 * 3600)
    position = models.PositiveSmallIntegerField(_("position in lists"), default=100)
    is_active = models.BooleanField(_("offered"), default=True)

    class Meta:
        verbose_name = _("product")
        verbose_name_plural = _("products")
        ordering = ("position", "name")

    def __str__(self) -> str:
        return self.name


class Order(models.Model):
    """A quote that was bought, once. The idempotency key makes a repeated request find this row again."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    organization = models.ForeignKey(Organization, models.PROTECT, related_name="orders")
    quote = models.OneToOneField(Quote, models.PROTECT, related_name="order")
    hold = models.OneToOneField(Hold, models.PROTECT, related_name="order")
    product = models.ForeignKey(Product, models.PROTECT, related_name="orders")
    idempotency_key = models.CharField(max_length=255)
    placed_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(_("placed"), auto_now_add=True)

    class Meta:
        verbose_name = _("order")
        verbose_name_plural = _("orders")
        ordering = ("-created_at",)
        constraints = (
            models.UniqueConstraint(fields=["organization", "idempotency_key"], name="one_order_per_idempotency_key"),
        )

    def __str__(self) -> str:
        return str(self.id)


LEAST_NODES = Coalesce(NullIf(F("min_nodes"), Value(0)), F("nodes"))
"""`Job.least_nodes` in SQL."""


class Job(models.Model):
    """The run that an order bought, over all its attempts."""

    class States(models.TextChoices):
        """Labels for `states.JobState`."""

        QUEUED = JobState.QUEUED, _("Queued")
        STARTING = JobState.STARTING, _("Starting")
        RUNNING = JobState.RUNNING, _("Running")
        STOPPING = JobState.STOPPING, _("Stopping")
        SUCCEEDED = JobState.SUCCEEDED, _("Succeeded")
        FAILED = JobState.FAILED, _("Failed")
        CANCELLED = JobState.CANCELLED, _("Cancelled")

    class Reasons(models.TextChoices):
        """Labels for `states.EndReason`."""

        COMPLETED = EndReason.COMPLETED, _("Completed")
        CODE_FAILED = EndReason.CODE_FAILED, _("The code failed")
        OUT_OF_MEMORY = EndReason.OUT_OF_MEMORY, _("Out of memory")
        DISK_FULL = EndReason.DISK_FULL, _("Disk full")
        HUNG = EndReason.HUNG, _("It hung")
        CANCELLED = EndReason.CANCELLED, _("Cancelled")
        TIME_LIMIT = EndReason.TIME_LIMIT, _("Time limit reached")
        NO_CAPACITY = EndReason.NO_CAPACITY, _("No capacity")
        NODE_LOST = EndReason.NODE_LOST, _("A node was lost")
        PLATFORM_ERROR = EndReason.PLATFORM_ERROR, _("Platform error")

    class HangPolicies(models.TextChoices):
        """Labels for `states.OnHang`."""

        STOP = OnHang.STOP, _("End the run")
        RETRY = OnHang.RETRY, _("Try again, as one of the retries")
        IGNORE = OnHang.IGNORE, _("Do not watch for hangs")

    class Controllers(models.TextChoices):
        """Labels for `runtime.specs.Controller`."""

        GLOO = Controller.GLOO, _("Gloo")
        MPI = Controller.MPI, _("MPI")

    organization = models.ForeignKey(Organization, models.PROTECT, related_name="jobs")
    order = models.OneToOneField(Order, models.PROTECT, related_name="job")
    name = models.CharField(_("name"), max_length=100)
    framework = models.CharField(_("framework"), max_length=16)
    image = models.ForeignKey(Image, models.PROTECT, related_name="+")
    workspace = models.ForeignKey(Workspace, models.PROTECT, related_name="+")
    code_path = models.CharField(_("script"), max_length=1000)
    arguments = models.JSONField(_("arguments"), default=list)
    epochs = models.PositiveIntegerField(_("epochs"))
    lr = models.CharField(_("learning rate"), max_length=32)
    batch_size = models.PositiveIntegerField(_("batch size"))
    node_spec = models.ForeignKey(NodeSpec, models.PROTECT, related_name="+")
    nodes = models.PositiveSmallIntegerField(_("nodes"))
    workers_per_node = models.PositiveSmallIntegerField(_("processes per node"))
    dataset_versions: models.ManyToManyField[DatasetVersion, JobDataset] = models.ManyToManyField(
        DatasetVersion, through="JobDataset", related_name="+"
    )
    deadline_seconds = models.PositiveIntegerField()
    """The time that all attempts share, on all nodes; fewer nodes may take longer (`usage.left_seconds`)."""
    retries = models.PositiveSmallIntegerField(_("retries"), default=0)
    """How often a fault of the code is tried again; the platform's own faults do not count."""
    retry_backoff_seconds = models.PositiveIntegerField(_("wait before a retry (seconds)"), default=0)
    """Before the first retry; doubled before each following."""
    on_hang = models.CharField(
        _("when it hangs"), max_length=8, choices=HangPolicies.choices, default=HangPolicies.STOP
    )
    min_nodes = models.PositiveSmallIntegerField(_("least nodes"), default=0)
    """An elastic run starts and goes on with as few; 0: all are needed."""
    controller = models.CharField(_("controller"), max_length=8, choices=Controllers.choices, default=Controllers.GLOO)
    collective_timeout_seconds = models.PositiveIntegerField(_("timeout of a collective (seconds)"), default=0)
    stall_check_seconds = models.PositiveIntegerField(_("stall check (seconds)"), default=0)
    builtin_script = models.CharField(max_length=16, blank=True)
    """A script of the platform's own instead of the workspace's: see `checks`."""
    code_key = models.CharField(max_length=64, db_index=True, help_text=_("What earlier runs are compared by."))
    rerun_of = models.ForeignKey("self", models.SET_NULL, null=True, blank=True, related_name="reruns")
    traceparent = models.CharField(max_length=55, blank=True, default="", db_default="")
    """Which request bought it, where traces are on: what its runs do belongs to that request's trace."""

    state = models.CharField(_("state"), max_length=10, choices=States.choices, default=States.QUEUED)
    reason = models.CharField(_("reason"), max_length=16, choices=Reasons.choices, blank=True)
    detail = models.TextField(_("detail"), blank=True)
    queued_at = models.DateTimeField(_("queued"))
    not_before = models.DateTimeField(null=True, blank=True)
    """A retry waits until then."""
    started_at = models.DateTimeField(_("started"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished"), null=True, blank=True)
    cancel_requested_at = models.DateTimeField(null=True, blank=True)
    waiting_code = models.CharField(max_length=32, blank=True)
    waiting_data = models.JSONField(default=dict, blank=True)
    epoch = models.PositiveIntegerField(_("epochs done"), default=0)
    progress = models.FloatField(_("progress"), default=0.0)

    class Meta:
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        ordering = ("-id",)
        indexes = (
            models.Index(
                fields=["queued_at", "id"],
                name="jobs_open",
                condition=~Q(state__in=sorted(ENDED)),
            ),
            models.Index(fields=["organization", "-id"], name="jobs_of_an_organization"),
            # The queue: in order, in order for each node spec, and by how many nodes are needed. Ended jobs, of which
            # there may be millions, are in none of them.
            models.Index(fields=["queued_at", "id"], name="jobs_queued", condition=Q(state=JobState.QUEUED)),
            models.Index(
                fields=["node_spec", "queued_at", "id"],
                name="jobs_queued_for_a_spec",
                condition=Q(state=JobState.QUEUED),
            ),
            models.Index("node_spec", LEAST_NODES, name="jobs_queued_by_nodes", condition=Q(state=JobState.QUEUED)),
            models.Index(fields=["id"], name="jobs_active", condition=Q(state__in=sorted(ACTIVE))),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(state__in=sorted(ENDED), finished_at__isnull=False)
                | ~Q(state__in=sorted(ENDED)) & Q(finished_at__isnull=True),
                name="ended_job_has_an_end",
            ),
        )

    def __str__(self) -> str:
        return f"job {self.pk}"

    @property
    def is_ended(self) -> bool:
        """Whether nothing can follow."""
        return JobState(self.state) in ENDED

    @property
    def least_nodes(self) -> int:
        """With how many nodes it may start."""
        return self.min_nodes or self.nodes


class JobDataset(models.Model):
    """A dataset version that a job mounts; `position` keeps the order chosen."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="job_datasets")
    version = models.ForeignKey(DatasetVersion, models.PROTECT, related_name="+")
    position = models.PositiveSmallIntegerField()

    class Meta:
        ordering = ("position",)
        constraints = (models.UniqueConstraint(fields=["job", "version"], name="one_mount_per_version"),)

    def __str__(self) -> str:
        return f"{self.job} {self.version}"


class Attempt(models.Model):
    """One try at running a job: `job-<id>-<number>` is the name the backend knows it by."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="attempts")
    number = models.PositiveSmallIntegerField()
    backend = models.CharField(max_length=32)
    """The cluster's name; `local` of old ones is the first cluster."""
    granted_nodes = models.PositiveSmallIntegerField()
    """How many nodes it was started with: fewer than bought where the order allows that and room was short."""
    claimed_at = models.DateTimeField()
    submitted_at = models.DateTimeField(null=True, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    reason = models.CharField(max_length=16, choices=Job.Reasons.choices, blank=True)
    detail = models.TextField(blank=True)
    failure = models.JSONField(null=True, blank=True)
    nodes = models.JSONField(default=list, blank=True)
    """What the backend last said of each node: see `runtime.specs.NodeStatus`."""
    spans = models.JSONField(default=list, blank=True)
    """How many nodes ran when, by the backend's clock: see `runtime.specs.Span`."""
    progress_at = models.DateTimeField(null=True, blank=True)
    checkpoint_at = models.DateTimeField(null=True, blank=True)
    restarts = models.PositiveSmallIntegerField(default=0)
    """How often the ranks were started again inside it, because a node was lost."""
    cursor = models.JSONField(default=dict, blank=True)
    """How far `telemetry` has read this attempt's files."""

    class Meta:
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        ordering = ("number",)
        indexes = (models.Index(fields=["job"], name="attempts_open", condition=Q(finished_at=None)),)
        constraints = (models.UniqueConstraint(fields=["job", "number"], name="one_attempt_per_number"),)

    def __str__(self) -> str:
        return self.run_name

    @property
    def run_name(self) -> str:
        """The run's name at the backend."""
        return f"job-{self.job_id}-{self.number}"


class JobEvent(models.Model):
    """Something that happened to a job, in order; written in the transaction that made it true."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="events")
    attempt = models.PositiveSmallIntegerField(null=True, blank=True)
    kind = models.CharField(max_length=32)
    data = models.JSONField(default=dict, blank=True)
    actor = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("job event")
        verbose_name_plural = _("job events")
        ordering = ("id",)

    def __str__(self) -> str:
        return f"{self.job} {self.kind}"


class MetricPoint(models.Model):
    """One value of one curve, as the customer's code reported it."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="metrics")
    attempt = models.PositiveSmallIntegerField()
    name = models.CharField(max_length=100)
    step = models.BigIntegerField()
    epoch = models.FloatField(null=True, blank=True)
    value = models.FloatField()
    at = models.DateTimeField()

    class Meta:
        verbose_name = _("metric point")
        verbose_name_plural = _("metric points")
        constraints = (models.UniqueConstraint(fields=["job", "name", "attempt", "step"], name="one_value_per_step"),)

    def __str__(self) -> str:
        return f"{self.job} {self.name}[{self.step}]={self.value}"


class ClusterStatus(models.Model):
    """Whether a cluster answers, as the last sweep found it. `clusters` writes it."""

    name = models.CharField(max_length=32, unique=True)
    answers = models.BooleanField()
    since = models.DateTimeField()
    """When it began, or ceased, to answer."""
    checked_at = models.DateTimeField()
    detail = models.TextField(blank=True)
    """What it said instead of an answer: one English sentence, for administrators."""

    class Meta:
        verbose_name = _("cluster")
        verbose_name_plural = _("clusters")
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class Room(models.Model):
    """What the last pass over the queue saw of a node spec: why its jobs wait is read from here. `queue` writes it."""

    node_spec = models.OneToOneField(NodeSpec, models.CASCADE, related_name="room")
    free = models.PositiveIntegerField(default=0)
    """How many more nodes of it could start."""
    most = models.PositiveIntegerField(default=0)
    """How many an otherwise empty cluster could run."""
    answers = models.BooleanField(default=True)
    """Whether its cluster does."""
    held_from = models.DateTimeField(null=True, blank=True)
    held_from_job = models.BigIntegerField(null=True, blank=True)
    """Room is kept free for this job, queued then: what came after it waits, though it would fit."""

    class Meta:
        verbose_name = _("room for a node spec")
        verbose_name_plural = _("room for node specs")

    def __str__(self) -> str:
        return f"{self.node_spec}: {self.free} of {self.most}"

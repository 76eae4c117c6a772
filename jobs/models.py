"""Products, orders, jobs with their attempts, events and metrics, and the state of clusters.

Only `lifecycle` writes `Job.state`. The rows of queued jobs are the queue. Newer columns have a `db_default`, because
processes of the previous release write rows too during an upgrade.
"""

from __future__ import annotations

import uuid
from decimal import Decimal

from django.conf import settings
from django.contrib.postgres.indexes import GinIndex
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import F, Q, Value
from django.db.models.functions import Coalesce, NullIf
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from billing.models import Hold, NodeSpec, Quote
from console.accounts.models import Membership, Organization
from jobs.states import ACTIVE, ENDED, EndReason, JobState, OnHang
from runtime.specs import Controller, LocalRankArgument, LrScaling
from storage.models import DatasetVersion, Image, ModelVersion, Workspace


class Product(models.Model):
    """A product on sale: training with one way of pricing, such as metered or at a fixed price."""

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
        help_text=_("On one node. Sets the estimate of a first run; later runs of the same code use measurements."),
    )
    headroom = models.DecimalField(
        _("headroom of the ceiling"),
        max_digits=4,
        decimal_places=2,
        default=Decimal(2),
        validators=[MinValueValidator(Decimal(1))],
        help_text=_(
            "If the customer sets no time limit, the longest time of a run is its p90 estimate times this. A fixed "
            "price includes 1.5 times the reference seconds of its epochs, times this; a longer run costs more."
        ),
    )
    max_epochs = models.PositiveIntegerField(_("maximum epochs"), default=10_000)
    max_nodes = models.PositiveSmallIntegerField(_("maximum nodes"), default=64)
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
    """A bought quote. The idempotency key makes a repeated request return this row."""

    id = models.UUIDField("ID", primary_key=True, default=uuid.uuid4, editable=False)
    organization = models.ForeignKey(
        Organization, models.PROTECT, related_name="orders", verbose_name=_("organization")
    )
    quote = models.OneToOneField(Quote, models.PROTECT, related_name="order", verbose_name=_("quote"))
    hold = models.OneToOneField(Hold, models.PROTECT, related_name="order", verbose_name=_("hold"))
    product = models.ForeignKey(Product, models.PROTECT, related_name="orders", verbose_name=_("product"))
    idempotency_key = models.CharField(_("idempotency key"), max_length=255)
    placed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("ordered by")
    )
    created_at = models.DateTimeField(_("ordered"), auto_now_add=True)

    class Meta:
        verbose_name = _("order")
        verbose_name_plural = _("orders")
        ordering = ("-created_at",)
        indexes = (models.Index(fields=["-created_at", "-id"], name="orders_by_time"),)
        constraints = (
            models.UniqueConstraint(fields=["organization", "idempotency_key"], name="one_order_per_idempotency_key"),
        )

    def __str__(self) -> str:
        return str(self.id)


class ScriptSnapshot(models.Model):
    """A script as it was ordered, stored once per organization and content."""

    organization = models.ForeignKey(Organization, models.CASCADE, related_name="+")
    sha256 = models.CharField(max_length=64)
    size_bytes = models.PositiveBigIntegerField()
    content = models.BinaryField(null=True)
    """The script's bytes; None if there are more than `storage.files.TEXT_LIMIT`, or the organization was closed."""

    class Meta:
        verbose_name = _("script snapshot")
        verbose_name_plural = _("script snapshots")
        constraints = (models.UniqueConstraint(fields=["organization", "sha256"], name="one_snapshot_per_content"),)

    def __str__(self) -> str:
        return self.sha256


class PackageLayer(models.Model):
    """Python packages that an organization's runs can import in addition to those of an image: see `packages`."""

    class States(models.TextChoices):
        """States of a layer."""

        PENDING = "pending", _("Installing")
        READY = "ready", _("Installed")
        FAILED = "failed", _("Failed")
        REMOVED = "removed", _("Removed")

    organization = models.ForeignKey(
        Organization, models.PROTECT, related_name="package_layers", verbose_name=_("organization")
    )
    image = models.ForeignKey(Image, models.PROTECT, related_name="+", verbose_name=_("image"))
    key = models.CharField(_("key"), max_length=64)
    """Identifies image and requirements: what `layer_key` of `runtime.packages.layers` returns, or for Kubernetes
    `layer_key` of `runtime.packages.cluster_builder`."""
    cluster = models.CharField(_("cluster"), max_length=63, blank=True, default="", db_default="")
    """The Kubernetes cluster that installs the packages, on its own storage; empty: the console's machine."""
    image_digest = models.CharField(max_length=71, blank=True, default="", db_default="", editable=False)
    """Digest of the image when the packages were ordered: "sha256:" and 64 digits. Empty: unknown."""
    requirements = models.TextField(_("requirements"))
    """One per line, in their normal form."""
    state = models.CharField(_("state"), max_length=8, choices=States.choices, default=States.PENDING)
    reason = models.TextField(_("reason"), blank=True)
    """Why the installation failed, in the installer's words. Empty if it did not fail, or the platform was at fault."""
    log = models.TextField(_("output"), blank=True)
    size_bytes = models.BigIntegerField(_("size"), default=0)
    faults = models.PositiveSmallIntegerField(_("platform faults"), default=0)
    """How often the platform failed to install these packages; see `packages.MAX_FAULTS`."""
    requested_at = models.DateTimeField(_("requested"))
    used_at = models.DateTimeField(_("last used"))

    class Meta:
        verbose_name = _("package layer")
        verbose_name_plural = _("package layers")
        constraints = (models.UniqueConstraint(fields=["organization", "key"], name="one_package_layer_per_key"),)
        indexes = (models.Index(fields=["requested_at"], name="layers_pending", condition=Q(state="pending")),)

    def __str__(self) -> str:
        return self.key[:12]


LEAST_NODES = Coalesce(NullIf(F("min_nodes"), Value(0)), F("nodes"))
"""The property `Job.least_nodes` as an SQL expression."""


CHECK_SCRIPT, NOTEBOOK_SCRIPT = "smoke", "notebook"
"""Values of `Job.builtin_script`: the platform's scripts `smoke.py` of checks and `notebook.py` of notebooks, which are
in `runtime/launcher`."""


STOPPED = _("Stopped")
"""How people read the state and the end reason of a cancelled notebook: stopping is how its owner ends it."""


class Job(models.Model):
    """The run that an order bought, with all its attempts."""

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
        CODE_FAILED = EndReason.CODE_FAILED, _("Code failed")
        OUT_OF_MEMORY = EndReason.OUT_OF_MEMORY, _("Out of memory")
        DISK_FULL = EndReason.DISK_FULL, _("Disk full")
        HUNG = EndReason.HUNG, _("Hung")
        CANCELLED = EndReason.CANCELLED, _("Cancelled")
        TIME_LIMIT = EndReason.TIME_LIMIT, _("Time limit reached")
        NO_CAPACITY = EndReason.NO_CAPACITY, _("No capacity")
        NODE_LOST = EndReason.NODE_LOST, _("Node lost")
        PLATFORM_ERROR = EndReason.PLATFORM_ERROR, _("Platform error")
        PACKAGES_FAILED = EndReason.PACKAGES_FAILED, _("Packages not installed")

    class HangPolicies(models.TextChoices):
        """Labels for `states.OnHang`."""

        STOP = OnHang.STOP, _("End the run")
        RETRY = OnHang.RETRY, _("Retry, as one of the retries")
        IGNORE = OnHang.IGNORE, _("Turn off hang detection")

    class LocalRankArguments(models.TextChoices):
        """Labels for `runtime.specs.LocalRankArgument`."""

        AUTO = LocalRankArgument.AUTO, _("Automatic")
        UNDERSCORE = LocalRankArgument.UNDERSCORE, "--local_rank=N"
        DASH = LocalRankArgument.DASH, "--local-rank=N"
        NONE = LocalRankArgument.NONE, _("None")

    class LrScalings(models.TextChoices):
        """Labels for `runtime.specs.LrScaling`."""

        NONE = LrScaling.NONE, _("As entered")
        LINEAR = LrScaling.LINEAR, _("Linear: × processes")

    class Controllers(models.TextChoices):
        """Labels for `runtime.specs.Controller`."""

        GLOO = Controller.GLOO, _("Gloo")
        MPI = Controller.MPI, _("MPI")

    organization = models.ForeignKey(Organization, models.PROTECT, related_name="jobs", verbose_name=_("organization"))
    order = models.OneToOneField(Order, models.PROTECT, related_name="job", verbose_name=_("order"))
    # Copied from the order, for the filter by member. Without an index for this key alone, because the index
    # `jobs_of_a_member` begins with it.
    placed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        models.SET_NULL,
        null=True,
        editable=False,
        related_name="+",
        db_index=False,
        verbose_name=_("ordered by"),
    )
    name = models.CharField(_("name"), max_length=100)
    framework = models.CharField(_("framework"), max_length=16)
    image = models.ForeignKey(Image, models.PROTECT, related_name="+")
    # Without an index for this key alone, because the index `jobs_of_a_workspace` begins with it.
    workspace = models.ForeignKey(Workspace, models.PROTECT, related_name="+", db_index=False)
    code_path = models.CharField(_("script"), max_length=1000)
    arguments = models.JSONField(_("arguments"), default=list)
    expands_arguments = models.BooleanField(default=False, db_default=False)
    """Whether variables in the arguments are expanded: see `runtime.launcher.variables`. False in older jobs."""
    environment = models.JSONField(
        _("environment variables"), default=dict, db_default=Value({}, models.JSONField()), blank=True
    )
    secrets = models.JSONField(
        _("secrets"), default=list, db_default=Value([], models.JSONField()), blank=True, help_text=_("Names only.")
    )
    local_rank_argument = models.CharField(
        _("local rank argument"),
        max_length=10,
        choices=LocalRankArguments.choices,
        default=LocalRankArguments.AUTO,
        db_default=LocalRankArguments.AUTO,
    )
    epochs = models.PositiveIntegerField(_("epochs"))
    lr = models.CharField(_("learning rate"), max_length=32)
    """As the customer wrote it, such as "1e-3", because the code receives it as text."""
    lr_scaling = models.CharField(
        _("learning rate scaling"),
        max_length=8,
        choices=LrScalings.choices,
        default=LrScalings.NONE,
        db_default=LrScalings.NONE,
    )
    warmup_epochs = models.PositiveIntegerField(_("warm-up epochs"), default=0, db_default=0)
    """Only passed on to the customer's code, which raises the learning rate itself during these epochs."""
    batch_size = models.PositiveIntegerField(_("batch size"))
    node_spec = models.ForeignKey(NodeSpec, models.PROTECT, related_name="+", verbose_name=_("node spec"))
    nodes = models.PositiveSmallIntegerField(_("nodes"))
    workers_per_node = models.PositiveSmallIntegerField(_("processes per node"))
    dataset_versions: models.ManyToManyField[DatasetVersion, JobDataset] = models.ManyToManyField(
        DatasetVersion, through="JobDataset", related_name="+"
    )
    deadline_seconds = models.PositiveIntegerField(_("time limit (seconds)"))
    """How long all attempts together may run on all nodes. While an elastic run has fewer nodes, its time counts for
    less: see `usage.left_seconds`."""
    retries = models.PositiveSmallIntegerField(_("retries"), default=0)
    """How often a failure of the code is retried. Retries after platform faults are not counted here."""
    retry_backoff_seconds = models.PositiveIntegerField(_("wait before a retry (seconds)"), default=0)
    """Wait before the first retry; doubled before each further one."""
    on_hang = models.CharField(
        _("if the run hangs"), max_length=8, choices=HangPolicies.choices, default=HangPolicies.STOP
    )
    min_nodes = models.PositiveSmallIntegerField(_("minimum nodes"), default=0)
    """Smallest number of nodes on which an elastic run starts and continues; 0: all nodes."""
    controller = models.CharField(_("controller"), max_length=8, choices=Controllers.choices, default=Controllers.GLOO)
    """What starts the ranks: the launcher (`gloo`), or the image's mpirun (`mpi`)."""
    collective_timeout_seconds = models.PositiveIntegerField(_("collective timeout (seconds)"), default=0)
    """How long a collective operation may take before it fails; 0: the framework's default."""
    stall_check_seconds = models.PositiveIntegerField(_("stall check (seconds)"), default=0)
    """After this time Horovod warns that ranks wait for others; 0: Horovod's default."""
    requirements_path = models.CharField(_("requirements file"), max_length=1000, blank=True, default="", db_default="")
    packages = models.ForeignKey(PackageLayer, models.PROTECT, null=True, blank=True, related_name="jobs")
    """The packages of the requirements file, as it was when the job was ordered."""
    awaits_packages = models.BooleanField(default=False, db_default=False)
    """Whether the queued job waits until its packages are installed."""
    builtin_script = models.CharField(max_length=16, blank=True)
    """The script of the platform that the job runs instead of a customer's: see `checks` and `notebooks`."""
    code_key = models.CharField(max_length=64, help_text=_("Identifies earlier runs of the same code."))
    """The same in all trainings of a script in a workspace (`Purchase.code_key`), and in all checks of an image."""
    tags = models.JSONField(_("tags"), default=list, db_default=Value([], models.JSONField()), blank=True)
    notes = models.TextField(_("notes"), default="", db_default="", blank=True)
    keep_until = models.DateTimeField(_("kept until"), null=True, blank=True)
    """Until when the customer wants the job's files kept; None: for `results.DEFAULT_RETENTION` after its end."""
    deletion_notice = models.ForeignKey(
        "DeletionNotice", models.SET_NULL, null=True, blank=True, editable=False, related_name="jobs"
    )
    """The notice that announced the deletion of the job's files; None: not announced yet."""
    script = models.ForeignKey(ScriptSnapshot, models.PROTECT, null=True, editable=False, related_name="+")
    """The script when the job was ordered; None for checks and notebooks, huge scripts, and orders of version 0.2."""
    image_digest = models.CharField(max_length=71, blank=True, default="", db_default="", editable=False)
    """Digest of the customer's image when the job was ordered, which all attempts use. Empty: they use the tag, or the
    image is a built-in one."""
    image_identity = models.CharField(max_length=600, blank=True, default="", db_default="", editable=False)
    """Identifies the image's content when the job was ordered: see `Backend.image_identity`. `reruns` compares it with
    the image now. Unlike `image_digest`, it exists for built-in images too, and does not choose what a run executes."""
    runs_snapshot = models.BooleanField(default=False, db_default=False, editable=False)
    """Whether the job runs a copy of `script` instead of the file in the workspace, which may have changed."""
    from_checkpoint = models.ForeignKey(
        "self", models.SET_NULL, null=True, blank=True, related_name="+", verbose_name=_("from the checkpoint of")
    )
    """The job whose checkpoints are copied into this job's checkpoint folder before its first attempt."""
    checkpoints_copied_at = models.DateTimeField(null=True, blank=True)
    """When they were copied; None: not yet, or the copy was deleted."""
    rerun_of = models.ForeignKey("self", models.SET_NULL, null=True, blank=True, related_name="reruns")
    traceparent = models.CharField(_("trace context"), max_length=55, blank=True, default="", db_default="")
    """Trace context (W3C) of the request that bought the job; the spans of its runs belong to that trace."""

    state = models.CharField(_("state"), max_length=10, choices=States.choices, default=States.QUEUED)
    reason = models.CharField(_("reason"), max_length=16, choices=Reasons.choices, blank=True)
    """Why the job ended; empty while it is open."""
    detail = models.TextField(_("detail"), blank=True)
    """The message of the failure that ended the job, or the reason why an administrator stopped it; else empty."""
    queued_at = models.DateTimeField(_("queued"))
    """When the job was ordered. A retry does not change it, so the job keeps its place in the queue."""
    not_before = models.DateTimeField(_("next attempt"), null=True, blank=True)
    """When the next attempt may start; set while a retry waits."""
    started_at = models.DateTimeField(_("started"), null=True, blank=True)
    """When the latest attempt started; None while a retry waits."""
    finished_at = models.DateTimeField(_("finished"), null=True, blank=True)
    cancel_requested_at = models.DateTimeField(_("cancellation requested"), null=True, blank=True)
    waiting_code = models.CharField(_("waiting for"), max_length=32, blank=True)
    """Why the queued or starting job does not run yet: see `waiting`."""
    waiting_data = models.JSONField(default=dict, blank=True)
    """The values that the sentence for `waiting_code` needs."""
    epoch = models.PositiveIntegerField(_("epochs done"), default=0)
    progress = models.FloatField(_("progress"), default=0.0)
    """Share of the training that is done, from 0 to 1."""

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
            # For the sort orders and filters of the list of jobs: see `job_search`.
            # With `name`, a search by name reads only this index, not `job_search.WINDOW` jobs all over the table.
            models.Index(fields=["organization", "queued_at", "id"], include=["name"], name="jobs_by_order_and_name"),
            models.Index(fields=["organization", "state", "queued_at", "id"], name="jobs_in_a_state"),
            models.Index(fields=["organization", "node_spec", "queued_at", "id"], name="jobs_on_a_node_spec"),
            models.Index(fields=["workspace", "queued_at", "id"], name="jobs_of_a_workspace"),
            models.Index(fields=["placed_by", "organization", "queued_at", "id"], name="jobs_of_a_member"),
            models.Index(fields=["organization", "code_key", "-id"], name="jobs_of_a_code"),
            # For `estimates`, which every quote calls. The index has all columns of that query. With fewer columns,
            # PostgreSQL would scan the latest jobs of all organizations, because it expects to find matching ones soon.
            # Its condition compares with no constant. PostgreSQL uses an index with a condition such as `state = …`
            # only if the query has that constant, and in a prepared statement it does not know the query's values.
            models.Index(
                fields=["organization", "code_key", "node_spec", "workers_per_node", "builtin_script", "state", "-id"],
                name="ended_jobs_of_a_code",
                condition=Q(started_at__isnull=False, finished_at__isnull=False),
            ),
            GinIndex(fields=["tags"], name="jobs_by_tag", opclasses=["jsonb_path_ops"]),
            # For the scheduler: the queue in order, the queue of a node spec, and the queue by the number of nodes.
            # These indexes leave out ended jobs, of which there may be millions.
            models.Index(fields=["queued_at", "id"], name="jobs_queued", condition=Q(state=JobState.QUEUED)),
            models.Index(
                fields=["node_spec", "queued_at", "id"],
                name="jobs_queued_for_a_spec",
                condition=Q(state=JobState.QUEUED),
            ),
            models.Index("node_spec", LEAST_NODES, name="jobs_queued_by_nodes", condition=Q(state=JobState.QUEUED)),
            models.Index(fields=["packages"], name="jobs_awaiting_packages", condition=Q(awaits_packages=True)),
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
    def is_check(self) -> bool:
        """Whether this is a free check of an image."""
        return self.builtin_script == CHECK_SCRIPT

    @property
    def is_notebook(self) -> bool:
        """Whether this is a notebook: it runs until it is stopped or idle, and has no progress."""
        return self.builtin_script == NOTEBOOK_SCRIPT

    @property
    def state_title(self) -> str:
        """The state as people read it."""
        return title_of_state(self.state, is_notebook=self.is_notebook)

    @property
    def reason_title(self) -> str:
        """Why the job ended, as people read it; empty for an open job."""
        return title_of_reason(self.reason, is_notebook=self.is_notebook)

    @property
    def is_ended(self) -> bool:
        """Whether the state is final."""
        return JobState(self.state) in ENDED

    @property
    def least_nodes(self) -> int:
        """Return the number of nodes that the job needs to start: `min_nodes`, or all nodes if that is 0."""
        return self.min_nodes or self.nodes


def title_of_state(state: str, *, is_notebook: bool) -> str:
    """Return a job's state as people read it. A notebook that its owner stopped was not cancelled."""
    return str(STOPPED if is_notebook and state == JobState.CANCELLED else Job.States(state).label)


def title_of_reason(reason: str, *, is_notebook: bool) -> str:
    """Return why a job or an attempt ended, as people read it; empty while it is open."""
    if not reason:
        return ""
    return str(STOPPED if is_notebook and reason == EndReason.CANCELLED else Job.Reasons(reason).label)


class SavedView(models.Model):
    """A search of the list of jobs that a member keeps under a name."""

    membership = models.ForeignKey(Membership, models.CASCADE, related_name="job_views")
    name = models.CharField(_("name"), max_length=60)
    query = models.JSONField()
    """The parameters of the list's URL: see `job_search.JobSearch.parameters`."""

    class Meta:
        verbose_name = _("saved view")
        verbose_name_plural = _("saved views")
        ordering = ("name",)
        constraints = (models.UniqueConstraint(fields=["membership", "name"], name="one_view_per_name"),)

    def __str__(self) -> str:
        return self.name


class DeletionNotice(models.Model):
    """An email to an organization's members about job files that are deleted soon. `expiry` writes and sends it."""

    organization = models.ForeignKey(Organization, models.CASCADE, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    mailed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = _("deletion notice")
        verbose_name_plural = _("deletion notices")
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"{self.organization} {self.created_at:%Y-%m-%d}"


class JobDataset(models.Model):
    """A dataset version that a job mounts, in the chosen order."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="job_datasets")
    version = models.ForeignKey(DatasetVersion, models.PROTECT, related_name="+")
    position = models.PositiveSmallIntegerField()

    class Meta:
        ordering = ("position",)
        constraints = (models.UniqueConstraint(fields=["job", "version"], name="one_mount_per_version"),)

    def __str__(self) -> str:
        return f"{self.job} {self.version}"


class JobModel(models.Model):
    """A model version that a job mounts, in the chosen order."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="job_models")
    version = models.ForeignKey(ModelVersion, models.PROTECT, related_name="+")
    position = models.PositiveSmallIntegerField()

    class Meta:
        ordering = ("position",)
        constraints = (models.UniqueConstraint(fields=["job", "version"], name="one_mount_per_model_version"),)

    def __str__(self) -> str:
        return f"{self.job} {self.version}"


class Attempt(models.Model):
    """One attempt at running a job. Its name on the cluster is `job-<id>-<number>`."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="attempts")
    number = models.PositiveSmallIntegerField(_("number"))
    backend = models.CharField(max_length=32)
    """The name of a cluster, not the kind of a backend. It may be "" or a former name of the first cluster, see
    `clusters.resolve_cluster_name`, or the name of a cluster that the settings no longer list."""
    granted_nodes = models.PositiveSmallIntegerField()
    """Number of nodes at the start; fewer than bought if the job is elastic and capacity was short."""
    claimed_at = models.DateTimeField(_("claimed"))
    submitted_at = models.DateTimeField(null=True, blank=True)
    """When the cluster accepted the run; None: not known yet."""
    started_at = models.DateTimeField(_("started"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished"), null=True, blank=True)
    reason = models.CharField(_("reason"), max_length=16, choices=Job.Reasons.choices, blank=True)
    detail = models.TextField(_("detail"), blank=True)
    failure = models.JSONField(null=True, blank=True)
    """The first cause, as `runtime.specs.Failure`; None if nothing failed."""
    nodes = models.JSONField(default=list, blank=True)
    """Last reported status of each node: see `runtime.specs.NodeStatus`."""
    spans = models.JSONField(default=list, blank=True)
    """Number of running nodes over time, by the backend's clock: see `runtime.specs.Span`."""
    progress_at = models.DateTimeField(null=True, blank=True)
    """The run's last sign of progress, by the backend's clock."""
    checkpoint_at = models.DateTimeField(null=True, blank=True)
    """When the run last changed its checkpoint folder, by the backend's clock."""
    restarts = models.PositiveSmallIntegerField(default=0)
    """How often the ranks were restarted within the attempt after a node was lost."""
    move_requested_at = models.DateTimeField(null=True, blank=True)
    """When an administrator asked to end the attempt and start another one; see `lifecycle.request_move`."""
    cursor = models.JSONField(default=dict, blank=True)
    """What `telemetry.ingest` keeps from one read of the attempt's output to the next, such as its position."""

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
        """Return the run's name on the cluster."""
        return f"job-{self.job_id}-{self.number}"

    @property
    def current_nodes(self) -> int:
        """Return on how many nodes the run is now, or was at its end. Before its start: how many were granted."""
        return int(self.spans[-1]["nodes"]) if self.spans else self.granted_nodes


class JobEvent(models.Model):
    """Something that happened to a job; written in the same transaction as the change."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="events")
    attempt = models.PositiveSmallIntegerField(_("attempt"), null=True, blank=True)
    """The attempt's number; None: the event is about the job as a whole."""
    kind = models.CharField(_("kind"), max_length=32)
    """The new state if the event is a change of state, else what happened: see `messages.event_sentence`."""
    data = models.JSONField(default=dict, blank=True)
    """The values that the event's sentence needs."""
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+", verbose_name=_("who")
    )
    """The member who caused the event; None if it was the platform or an administrator."""
    created_at = models.DateTimeField(_("when"), auto_now_add=True)

    class Meta:
        verbose_name = _("job event")
        verbose_name_plural = _("job events")
        ordering = ("id",)

    def __str__(self) -> str:
        return f"{self.job} {self.kind}"


class MetricPoint(models.Model):
    """One value of one curve, reported by the customer's code. Points never replace each other."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="metrics")
    attempt = models.PositiveSmallIntegerField()
    """The attempt's number."""
    name = models.CharField(max_length=100)
    step = models.BigIntegerField()
    """The reported step; many scripts restart the count in each epoch."""
    position = models.BigIntegerField(db_default=0)
    """The step without the restarts of the count, so that it only grows along the curve (`points.next_position`)."""
    epoch = models.FloatField(null=True, blank=True)
    value = models.FloatField()
    at = models.DateTimeField()
    """When the point was reported. The code can report any past time, even one before its attempt."""

    class Meta:
        verbose_name = _("metric point")
        verbose_name_plural = _("metric points")
        indexes = (models.Index(fields=["job", "name"], name="metric_points_of_a_curve"),)

    def __str__(self) -> str:
        return f"{self.job} {self.name}[{self.step}]={self.value}"


class ClusterStatus(models.Model):
    """Whether a cluster answered the last reconciliation. `clusters.record_status` writes it."""

    name = models.CharField(_("name"), max_length=32, unique=True)
    answers = models.BooleanField(_("online"))
    since = models.DateTimeField(_("since"))
    """When `answers` last changed."""
    checked_at = models.DateTimeField(_("last checked"))
    detail = models.TextField(_("detail"), blank=True)
    """The error if the cluster does not answer: one English sentence, for administrators."""
    drained_since = models.DateTimeField(_("drained since"), null=True, blank=True)
    """When an administrator drained the cluster: no run starts there, started runs continue. None: not drained."""
    drain_reason = models.CharField(_("reason"), max_length=200, blank=True, default="", db_default="")
    """Why the cluster is drained; shown to customers whose jobs wait."""

    class Meta:
        verbose_name = _("cluster")
        verbose_name_plural = _("clusters")
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class CapacitySnapshot(models.Model):
    """The capacity for a node spec at the last scheduling pass, written by `scheduler` and read by `waiting`."""

    node_spec = models.OneToOneField(NodeSpec, models.CASCADE, related_name="capacity_snapshot")
    free = models.PositiveIntegerField(default=0)
    """How many more nodes of the spec could start."""
    most = models.PositiveIntegerField(default=0)
    """The maximum: how many nodes of the spec an empty cluster could run."""
    answers = models.BooleanField(default=True)
    """Whether the spec's cluster answered."""
    drain_reason = models.CharField(max_length=200, blank=True, default="", db_default="")
    """Why the spec's cluster is drained; empty if it is not."""
    # The columns keep the names of version 0.2, which must run on the same schema during an upgrade.
    kept_for_job = models.BigIntegerField(null=True, blank=True, db_column="held_from_job")
    """Id of the job for which capacity is kept free; None: none is kept. Jobs that were queued later wait even if
    they fit."""
    kept_for_job_queued_at = models.DateTimeField(null=True, blank=True, db_column="held_from")
    """When that job was queued."""

    class Meta:
        db_table = "jobs_room"  # the table's name in version 0.1, which must run on the same schema during an upgrade
        verbose_name = _("node spec capacity")
        verbose_name_plural = _("node spec capacities")

    def __str__(self) -> str:
        return f"{self.node_spec}: {self.free} of {self.most}"


class Sweep(models.Model):
    """A purchase of many jobs with different parameters, within the ceiling of one quote. See `jobs.sweeps`."""

    class States(models.TextChoices):
        """The states of a sweep. STOPPING: no more trials start; the open ones are cancelled if a person stopped it."""

        RUNNING = "running", _("Running")
        STOPPING = "stopping", _("Stopping")
        ENDED = "ended", pgettext_lazy("state", "Ended")

    class Reasons(models.TextChoices):
        """Why a sweep ended, or is stopping."""

        COMPLETED = "completed", _("All trials have ended")
        CEILING = "ceiling", _("Another trial could exceed the ceiling")
        STOPPED = "stopped", _("Stopped")
        FAILING = "failing", _("The first trials failed")
        UNAVAILABLE = "unavailable", _("No more trials could be ordered")

    organization = models.ForeignKey(
        Organization, models.PROTECT, related_name="sweeps", verbose_name=_("organization")
    )
    quote = models.OneToOneField(Quote, models.PROTECT, related_name="sweep", verbose_name=_("quote"))
    hold = models.OneToOneField(Hold, models.PROTECT, related_name="sweep", verbose_name=_("hold"))
    extends = models.ForeignKey(
        "self", models.PROTECT, null=True, blank=True, related_name="extensions", verbose_name=_("extends")
    )
    """The first sweep of the same search, which this sweep extends; None if this one is the first."""
    product = models.ForeignKey(Product, models.PROTECT, related_name="+", verbose_name=_("product"))
    name = models.CharField(_("name"), max_length=100)
    idempotency_key = models.CharField(_("idempotency key"), max_length=255)
    placed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+", verbose_name=_("ordered by")
    )
    state = models.CharField(_("state"), max_length=8, choices=States.choices, default=States.RUNNING)
    reason = models.CharField(_("reason"), max_length=12, choices=Reasons.choices, blank=True)
    waiting = models.TextField(_("waiting for"), blank=True)
    """Why the last attempt to order a trial was refused, such as the limit of open jobs; empty if it succeeded. A
    sentence in the buyer's language."""
    created_at = models.DateTimeField(_("ordered"), auto_now_add=True)
    ended_at = models.DateTimeField(_("ended"), null=True, blank=True)

    class Meta:
        verbose_name = _("sweep")
        verbose_name_plural = _("sweeps")
        ordering = ("-id",)
        indexes = (models.Index(fields=["id"], name="sweeps_open", condition=Q(ended_at=None)),)
        constraints = (
            models.UniqueConstraint(fields=["organization", "idempotency_key"], name="one_sweep_per_idempotency_key"),
            models.CheckConstraint(
                condition=Q(state="ended", ended_at__isnull=False) | ~Q(state="ended") & Q(ended_at=None),
                name="ended_sweep_has_an_end",
            ),
        )

    def __str__(self) -> str:
        return f"sweep {self.pk}"


class Trial(models.Model):
    """One job of a sweep, with its parameters."""

    class Outcomes(models.TextChoices):
        """How a trial ended. FAILED: the job did not succeed, or did not report the metric."""

        COMPLETED = "completed", _("Completed")
        PRUNED = "pruned", _("Stopped early")
        FAILED = "failed", _("Failed")

    sweep = models.ForeignKey(Sweep, models.PROTECT, related_name="trials")
    number = models.PositiveIntegerField(_("number"))
    """From 0, in the order in which the trials were ordered."""
    job = models.OneToOneField(Job, models.PROTECT, related_name="trial")
    parameters = models.JSONField(_("parameters"))
    sampler_state = models.JSONField(default=dict)
    """The state that sampler and pruner store with the trial (`suggestions.Suggestion.state`)."""
    outcome = models.CharField(_("outcome"), max_length=9, choices=Outcomes.choices, blank=True)
    """Empty while the job is open."""
    value = models.FloatField(_("value"), null=True, blank=True)
    """The last reported value of the sweep's metric, once the trial has ended; None if there is none."""
    is_pruned = models.BooleanField(default=False)
    """Whether the pruner has asked to cancel the job."""

    class Meta:
        verbose_name = _("trial")
        verbose_name_plural = _("trials")
        ordering = ("number",)
        constraints = (models.UniqueConstraint(fields=["sweep", "number"], name="one_trial_per_number"),)

    def __str__(self) -> str:
        return f"{self.sweep} trial {self.number}"

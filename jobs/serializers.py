"""Serializers of the API of jobs. `purchase` has the serializers of requests for quotes and checks."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from billing.api import LineSerializer
from billing.messages import basis_sentence
from billing.models import Quote
from jobs import orders, packages, script_data, selectors
from jobs.availability import StartForecast
from jobs.comparison import Alternative, Comparison, Figures
from jobs.diagnosis import Fix
from jobs.environment import code_settings
from jobs.failures import Explanation
from jobs.launch_preview import LaunchPreview
from jobs.messages import terms_sentences
from jobs.models import Job, Order, PackageLayer, Product
from jobs.purchase import resolved_names
from jobs.snapshots import ScriptState


class ActivationSerializer(serializers.Serializer[Any]):
    """Activation of the service."""

    accept_terms = serializers.BooleanField()


class ServiceSerializer(serializers.Serializer[Any]):
    """A service and whether it is active."""

    service = serializers.CharField()
    is_active = serializers.BooleanField()
    terms_version = serializers.CharField()


class ProductSerializer(serializers.ModelSerializer[Product]):
    """A product."""

    class Meta:
        model = Product
        fields = ("name", "title", "description", "mode", "max_epochs", "max_nodes", "max_seconds")


class QuoteSerializer(serializers.ModelSerializer[Quote]):
    """A quote. Its lines sum to the ceiling."""

    lines = LineSerializer(many=True)
    datasets = serializers.SerializerMethodField(help_text="The versions that the run will read, as `name@version`.")
    models = serializers.SerializerMethodField(help_text="The versions that the run will read, as `name@version`.")
    estimate = serializers.SerializerMethodField()
    learning_rate = serializers.SerializerMethodField(help_text="The learning rate that the code gets as `LR`.")
    global_batch_size = serializers.SerializerMethodField(help_text="The batch size times the number of processes.")
    notes = serializers.SerializerMethodField()
    warnings = serializers.SerializerMethodField(help_text="Datasets that the script reads and that are not chosen.")
    minimum_minor = serializers.IntegerField(
        source="terms.minimum_minor", help_text="A run that used any time costs at least this."
    )
    included_seconds = serializers.IntegerField(
        source="terms.included_seconds",
        default=None,
        allow_null=True,
        help_text="Running time that a fixed price includes; more is charged. Null: metered.",
    )

    refusal = serializers.SerializerMethodField(
        help_text="Why the quote can't be bought now, for example a budget; empty if it can."
    )

    class Meta:
        model = Quote
        fields = (
            "id",
            "currency",
            "mode",
            "lines",
            "datasets",
            "models",
            "estimate",
            "learning_rate",
            "global_batch_size",
            "notes",
            "warnings",
            "refusal",
            "minimum_minor",
            "included_seconds",
            "ceiling_minor",
            "deadline_seconds",
            "expires_at",
        )

    def get_datasets(self, quote: Quote) -> list[str]:
        """Return the dataset versions that the run will read."""
        return selectors.datasets_of(quote)

    def get_models(self, quote: Quote) -> list[str]:
        """Return the model versions that the run will read."""
        return selectors.models_of(quote)

    def get_learning_rate(self, quote: Quote) -> str | None:
        """Return the learning rate that the code gets; None for an image check."""
        code = code_settings(quote.purchase)
        return code.lr if code else None

    def get_global_batch_size(self, quote: Quote) -> int | None:
        """Return the batch size of all processes together; None for an image check."""
        code = code_settings(quote.purchase)
        return code.global_batch_size if code else None

    def get_notes(self, quote: Quote) -> list[str]:
        """Return sentences on how retries, fewer nodes and hangs affect the price."""
        return terms_sentences(quote.purchase)

    def get_warnings(self, quote: Quote) -> list[str]:
        """Return warnings about datasets that the script reads and that were not chosen."""
        return script_data.warnings(quote.organization, quote.purchase)

    def get_refusal(self, quote: Quote) -> str:
        """Return why the quote cannot be bought; empty if it can."""
        return orders.refusal(quote, quote.created_by)

    def get_estimate(self, quote: Quote) -> dict[str, Any]:
        """Return the estimated cost and its basis."""
        basis = quote.basis | {"sentence": basis_sentence(quote.basis)}
        return {"p50_minor": quote.p50_minor, "p90_minor": quote.p90_minor, "basis": basis}


class StartSerializer(serializers.Serializer[StartForecast]):
    """When a run could start: a forecast from the estimates of the open jobs."""

    code = serializers.ChoiceField(
        choices=["now", "waits", "quota", "grows", "drained", "unknown"],
        help_text="`quota`: the organization runs as many nodes as it may. `grows`: the cluster adds nodes on demand. "
        "`drained`: the administrator starts no runs on the cluster. `unknown`: the cluster does not answer.",
    )
    seconds = serializers.FloatField(allow_null=True, help_text="Estimated wait; null if unknown.")
    ahead = serializers.IntegerField(help_text="Jobs in the queue before it.")


class FiguresSerializer(serializers.Serializer[Figures]):
    """Price and time of an alternative."""

    p50_minor = serializers.IntegerField()
    p90_minor = serializers.IntegerField()
    ceiling_minor = serializers.IntegerField()
    deadline_seconds = serializers.IntegerField()
    estimate = serializers.SerializerMethodField()

    def get_estimate(self, figures: Figures) -> dict[str, Any]:
        """Return the times and their basis."""
        return dict(figures.estimate) | {"sentence": basis_sentence(figures.estimate)}


class AlternativeSerializer(serializers.Serializer[Alternative]):
    """The quoted run, or the same run on other nodes."""

    node_spec = serializers.CharField(source="node_spec.name")
    nodes = serializers.IntegerField()
    workers_per_node = serializers.IntegerField()
    is_quoted = serializers.BooleanField(help_text="Whether these are the quote's own nodes and figures.")
    figures = FiguresSerializer(allow_null=True)
    start = StartSerializer(allow_null=True)
    refusal = serializers.CharField(help_text="Why no quote for it is possible; empty if it is.")
    efficiency = serializers.FloatField(allow_null=True, help_text="Share of linear scaling from one node, 0 to 1.")
    is_measured = serializers.BooleanField(
        help_text="Whether earlier runs on different numbers of nodes show the efficiency. Otherwise it is assumed."
    )


class ComparisonSerializer(serializers.Serializer[Comparison]):
    """A quote beside the same run on other nodes."""

    currency = serializers.CharField(source="quote.currency")
    by_nodes = AlternativeSerializer(many=True)
    by_spec = AlternativeSerializer(many=True)


class LaunchPreviewSerializer(serializers.Serializer[LaunchPreview]):
    """The arguments and variables that a rank will get."""

    arguments = serializers.ListField(child=serializers.CharField(), help_text="With the values of their variables.")
    environment = serializers.DictField(child=serializers.CharField())


class OrderRequestSerializer(serializers.Serializer[Any]):
    """A quote to buy."""

    quote = serializers.UUIDField()


class OrderSerializer(serializers.Serializer[Order]):
    """An order and the job it bought."""

    id = serializers.UUIDField()
    job = serializers.IntegerField(source="job.pk")


class ProgressSerializer(serializers.Serializer[Any]):
    """Progress of a job."""

    fraction = serializers.FloatField(help_text="0 to 1.")
    epoch = serializers.IntegerField(help_text="Epochs done.")
    epochs = serializers.IntegerField()
    eta_seconds = serializers.IntegerField(allow_null=True, help_text="Null if unknown.")


class SpanSerializer(serializers.Serializer[Any]):
    """A time range with a constant number of running nodes."""

    nodes = serializers.IntegerField()
    started_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField()


class AttemptSerializer(serializers.Serializer[Any]):
    """One attempt at a job."""

    number = serializers.IntegerField()
    reason = serializers.ChoiceField(Job.Reasons.choices, allow_blank=True)
    detail = serializers.CharField(allow_blank=True)
    failure = serializers.DictField(
        allow_null=True, help_text="The first cause: code, data, node, rank, exit code, last lines."
    )
    claimed_at = serializers.DateTimeField()
    started_at = serializers.DateTimeField(allow_null=True)
    finished_at = serializers.DateTimeField(allow_null=True)
    granted_nodes = serializers.IntegerField(help_text="Number of nodes that it started with.")
    spans = SpanSerializer(many=True, help_text="Number of running nodes over time.")
    restarts = serializers.IntegerField(help_text="Restarts of the ranks within the attempt after a node was lost.")
    progress_at = serializers.DateTimeField(allow_null=True, help_text="Time of the last sign of progress.")
    checkpoint_at = serializers.DateTimeField(allow_null=True, help_text="Time of the newest checkpoint.")
    lost_seconds = serializers.FloatField(allow_null=True, help_text="Run time since the last checkpoint.")
    billed_seconds = serializers.FloatField(help_text="Billed time, as seconds on all nodes of the order.")


class JobSerializer(serializers.Serializer[Job]):
    """A job, with amounts in minor units. The fields describe the schema; `selectors.summary` returns the values."""

    id = serializers.IntegerField()
    name = serializers.CharField()
    tags = serializers.ListField(child=serializers.CharField())
    notes = serializers.CharField(allow_blank=True)
    keep_until = serializers.DateTimeField(
        allow_null=True,
        help_text="When logs, outputs and checkpoints are deleted. Null until the job ends, unless you chose a time.",
    )
    state = serializers.ChoiceField(Job.States.choices)
    reason = serializers.ChoiceField(Job.Reasons.choices, allow_blank=True)
    detail = serializers.CharField(allow_blank=True)
    sentence = serializers.CharField(help_text="Why it ended, and who pays.", allow_blank=True)
    waiting_for = serializers.CharField(
        help_text="Why it waits and its place in the queue; while it starts, what its nodes wait for.", allow_blank=True
    )
    progress = ProgressSerializer()
    attempts = AttemptSerializer(many=True)
    queued_at = serializers.DateTimeField()
    started_at = serializers.DateTimeField(allow_null=True)
    finished_at = serializers.DateTimeField(allow_null=True)
    currency = serializers.CharField()
    cost_minor = serializers.IntegerField(help_text="Cost so far, or final cost.")
    ceiling_minor = serializers.IntegerField()
    deadline_seconds = serializers.IntegerField()
    product = serializers.CharField()
    framework = serializers.CharField()
    image = serializers.CharField()
    image_digest = serializers.CharField(
        allow_blank=True, help_text="Digest of your own image, which all attempts use. Empty: built in, or unknown."
    )
    workspace = serializers.CharField()
    code_path = serializers.CharField()
    arguments = serializers.ListField(child=serializers.CharField())
    datasets = serializers.ListField(child=serializers.CharField(), help_text="Each as `name@version`.")
    requirements = serializers.CharField(help_text="Path of the requirements file; empty: none.", allow_blank=True)
    models = serializers.ListField(child=serializers.CharField(), help_text="Each as `name@version`.")
    environment = serializers.DictField(child=serializers.CharField())
    secrets = serializers.ListField(child=serializers.CharField(), help_text="Names only.")
    local_rank_argument = serializers.ChoiceField(Job.LocalRankArguments.choices)
    epochs = serializers.IntegerField()
    lr = serializers.CharField()
    lr_scaling = serializers.ChoiceField(choices=Job.LrScalings.choices)
    warmup_epochs = serializers.IntegerField()
    batch_size = serializers.IntegerField()
    node_spec = serializers.CharField()
    nodes = serializers.IntegerField()
    workers_per_node = serializers.IntegerField()
    rerun_of = serializers.IntegerField(allow_null=True)
    from_checkpoint = serializers.IntegerField(allow_null=True, help_text="The job whose checkpoints it started from.")
    retries = serializers.IntegerField()
    retry_backoff_seconds = serializers.IntegerField()
    on_hang = serializers.ChoiceField(Job.HangPolicies.choices)
    min_nodes = serializers.IntegerField()
    controller = serializers.ChoiceField(Job.Controllers.choices)
    collective_timeout_seconds = serializers.IntegerField()
    stall_check_seconds = serializers.IntegerField()
    not_before = serializers.DateTimeField(allow_null=True, help_text="A retry starts no earlier.")

    def to_representation(self, instance: Job) -> dict[str, Any]:
        """Return `selectors.summary`, which pages and streams use too."""
        return selectors.summary(instance)


class DiffLineSerializer(serializers.Serializer[Any]):
    """A line of a diff."""

    sign = serializers.CharField(
        trim_whitespace=False, help_text="`+` new, `-` old, a space: unchanged, `@`: lines are left out."
    )
    text = serializers.CharField()


class ConfigurationSerializer(serializers.Serializer[Any]):
    """The script, image and datasets of a job at its order, and their changes since."""

    code_path = serializers.CharField(source="job.code_path")
    script_sha256 = serializers.CharField(
        source="configuration.sha256", help_text="Of the script as ordered; empty if there is no snapshot."
    )
    script = serializers.CharField(
        source="configuration.text",
        allow_null=True,
        help_text="The script's text as ordered; null if it is not stored, for example because it exceeds 1 MiB.",
    )
    script_state = serializers.ChoiceField(
        [state.value for state in ScriptState],
        source="configuration.script_state",
        help_text="How the script in the workspace compares now.",
    )
    diff = DiffLineSerializer(
        source="configuration.diff", many=True, help_text="From the script as ordered to the workspace now."
    )
    arguments = serializers.ListField(child=serializers.CharField(), source="job.arguments")
    image = serializers.CharField(source="job.image.name")
    image_identity = serializers.CharField(
        source="configuration.image_identity",
        help_text="Digest of a built image or registry reference, as ordered; empty if it is unknown.",
    )
    datasets = serializers.SerializerMethodField(help_text="Each as `name@version`.")
    runs_snapshot = serializers.BooleanField(
        source="job.runs_snapshot",
        help_text="Whether it runs a copy of the ordered script: an exact rerun, or a job whose script was changed.",
    )
    changes = serializers.ListField(
        child=serializers.CharField(),
        source="configuration.changes",
        help_text="How a rerun with the latest versions would differ, as sentences.",
    )

    def get_datasets(self, data: dict[str, Any]) -> list[str]:
        """Return the dataset versions that the job reads."""
        return resolved_names(data["configuration"].versions)


class PackagesSerializer(serializers.Serializer[PackageLayer]):
    """The packages of a job's requirements file, as it was at the order."""

    state = serializers.ChoiceField(PackageLayer.States.choices)
    requirements = serializers.SerializerMethodField()
    reason = serializers.CharField(help_text="The installer's reason for a failure.", allow_blank=True)
    size_bytes = serializers.IntegerField()
    log = serializers.SerializerMethodField(help_text="The end of the installer's output.")

    def get_requirements(self, layer: PackageLayer) -> list[str]:
        """Return the requirements in their normal form."""
        return layer.requirements.splitlines()

    def get_log(self, layer: PackageLayer) -> str:
        """Return the output so far."""
        return packages.log_of(layer)


class LogSerializer(serializers.Serializer[Any]):
    """A part of a rank's output."""

    text = serializers.CharField()
    offset = serializers.IntegerField(help_text="The byte of the log with which `text` begins.")
    next_offset = serializers.IntegerField()
    size = serializers.IntegerField(allow_null=True, help_text="Bytes of the log now; null where that is not known.")
    eof = serializers.BooleanField(help_text="Whether the output has ended.")
    times = serializers.ListField(
        child=serializers.ListField(child=serializers.FloatField(), min_length=2, max_length=2),
        required=False,
        help_text="With `timestamps`: [line of `text` from 0, Unix seconds], in order. A time holds up to the line of "
        "the next pair, and is known to about 0.1 s. Empty if the run has no times.",
    )


class LogMatchSerializer(serializers.Serializer[Any]):
    """Where a search of a log ended."""

    offset = serializers.IntegerField(allow_null=True, help_text="The byte where the match begins; null without one.")
    next_offset = serializers.IntegerField(help_text="Where a further search begins.")
    eof = serializers.BooleanField(help_text="Whether all of the log was searched.")


class FixSerializer(serializers.Serializer[Any]):
    """A change that would correct a failure."""

    kind = serializers.ChoiceField([fix.value for fix in Fix])
    changes = serializers.DictField(help_text="Fields for a rerun of the job; may be empty.")
    hourly_minor = serializers.IntegerField(
        allow_null=True, help_text="Price of a node and hour of the node spec in `changes`; null without one."
    )


class DiagnosisSerializer(serializers.Serializer[Any]):
    """Why a job failed."""

    cause = serializers.CharField(source="diagnosis.cause", help_text="A stable name of the cause.")
    title = serializers.CharField(source="diagnosis.title")
    advice = serializers.CharField(source="diagnosis.advice")
    exception = serializers.CharField(source="diagnosis.headline", help_text="As Python prints it; may be empty.")
    file = serializers.CharField(source="diagnosis.frame.file", default="")
    line = serializers.IntegerField(source="diagnosis.frame.line", default=None, allow_null=True)
    function = serializers.CharField(source="diagnosis.frame.function", default="")
    code = serializers.CharField(source="diagnosis.frame.source", default="", help_text="The line of code.")
    rank = serializers.IntegerField(allow_null=True, help_text="The rank that failed first.")
    node = serializers.IntegerField(allow_null=True)
    is_billed = serializers.BooleanField(help_text="Whether the customer pays for the time used.")
    folder = serializers.CharField(help_text="The nearest existing folder of a missing file; may be empty.")
    similar = serializers.ListField(
        source="suggestions", child=serializers.CharField(), help_text="Names in `folder`, most similar first."
    )
    fix = serializers.SerializerMethodField()

    @extend_schema_field(FixSerializer)
    def get_fix(self, explanation: Explanation) -> Any:
        """Return a change that would correct the failure."""
        return FixSerializer(
            {
                "kind": explanation.diagnosis.fix,
                "changes": explanation.changes,
                "hourly_minor": explanation.hourly_minor,
            }
        ).data


class NodeUseSerializer(serializers.Serializer[Any]):
    """Resource usage of one node over time: a list per series, as long as `at`."""

    node = serializers.IntegerField()
    recent_cpu = serializers.FloatField(allow_null=True, help_text="Cores, mean of the last minute.")
    at = serializers.ListField(child=serializers.FloatField(), help_text="Unix seconds.")
    series = serializers.DictField(
        child=serializers.ListField(child=serializers.FloatField(allow_null=True)),
        help_text="cpu (cores), memory (bytes), net_rx, net_tx, disk_read, disk_write (bytes/s), gpu (%), gpu_memory.",
    )


class RankUseSerializer(serializers.Serializer[Any]):
    """One rank of an attempt."""

    rank = serializers.IntegerField()
    node = serializers.IntegerField()
    cpu = serializers.FloatField(allow_null=True, help_text="Cores, mean of the last minute.")
    memory = serializers.FloatField(allow_null=True, help_text="Bytes, maximum of the last minute.")
    steps = serializers.IntegerField()
    seconds_per_step = serializers.FloatField(allow_null=True)
    comm_share = serializers.FloatField(
        allow_null=True, help_text="Share of step time spent waiting for other ranks, 0 to 1."
    )
    is_slow = serializers.BooleanField(help_text="Whether the other ranks wait for it.")


class EfficiencySerializer(serializers.Serializer[Any]):
    """Scaling efficiency of a run."""

    value = serializers.FloatField(help_text="1.0: N nodes do N times the work of one node.")
    nodes = serializers.IntegerField()
    job = serializers.IntegerField(help_text="The one-node run that it is compared with.")
    by = serializers.ChoiceField(["steps", "epochs"])


class TelemetrySerializer(serializers.Serializer[Any]):
    """Resource usage of an attempt, with sentences about it."""

    attempt = serializers.IntegerField(allow_null=True)
    nodes = NodeUseSerializer(many=True)
    ranks = RankUseSerializer(many=True)
    efficiency = EfficiencySerializer(allow_null=True)
    sentences = serializers.ListField(child=serializers.CharField())


class CurveSerializer(serializers.Serializer[Any]):
    """One curve, as lists of equal length: point by point, sorted by attempt and step."""

    name = serializers.CharField()
    better = serializers.CharField(help_text="`lower` or `higher`: which values are better. Empty: unknown.")
    attempt = serializers.ListField(child=serializers.IntegerField())
    step = serializers.ListField(
        child=serializers.IntegerField(), help_text="Continues where the script restarts its count."
    )
    reported_step = serializers.ListField(child=serializers.IntegerField())
    epoch = serializers.ListField(child=serializers.FloatField(allow_null=True), help_text="As reported.")
    seconds = serializers.ListField(child=serializers.FloatField(), help_text="Since the job's first start.")
    cost_minor = serializers.ListField(
        child=serializers.FloatField(), help_text="Cost of the node time used until then, in minor units."
    )
    value = serializers.ListField(child=serializers.FloatField())


class CurvesSerializer(serializers.Serializer[Any]):
    """The curves of a job."""

    job = serializers.IntegerField(source="job_id")
    currency = serializers.CharField()
    is_free = serializers.BooleanField(help_text="Whether the job's node time costs nothing.")
    last = serializers.IntegerField(help_text="Pass it as `after` to get the points since then.")
    kept_every = serializers.IntegerField(help_text="n if only every nth point of a curve is stored; 1: all are.")
    curves = CurveSerializer(many=True)


class CheckItemSerializer(serializers.Serializer[Any]):
    """One test of a check."""

    name = serializers.CharField()
    title = serializers.CharField()
    ok = serializers.BooleanField(allow_null=True, help_text="Null if the run did not reach it.")
    detail = serializers.CharField()
    remedy = serializers.CharField(help_text="What to do if it failed.")


class StackSerializer(serializers.Serializer[Any]):
    """Stack of a rank of a hung run."""

    rank = serializers.IntegerField()
    node = serializers.IntegerField()
    text = serializers.CharField()


class EventSerializer(serializers.Serializer[Any]):
    """An event of a job."""

    id = serializers.IntegerField(source="event.pk")
    kind = serializers.CharField(source="event.kind")
    attempt = serializers.IntegerField(source="event.attempt", allow_null=True)
    actor = serializers.CharField(source="event.actor.email", default=None, allow_null=True)
    details = serializers.DictField(source="event.data")
    sentence = serializers.CharField()
    created_at = serializers.DateTimeField(source="event.created_at")


class TensorBoardSerializer(serializers.Serializer[Any]):
    """The address of a TensorBoard."""

    url = serializers.URLField()

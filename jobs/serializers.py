"""The shapes of the API of jobs: what comes and goes. What is right is decided by `purchase` and the services."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from billing.api import LineSerializer
from billing.models import Quote
from billing.wording import basis_sentence
from jobs import selectors
from jobs.models import Job, Order, Product
from jobs.resilience import MOST_RETRIES
from jobs.sentences import terms_sentences
from jobs.states import OnHang
from runtime.specs import Controller


class ActivationSerializer(serializers.Serializer[Any]):
    """Taking up the service."""

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


class QuoteRequestSerializer(serializers.Serializer[Any]):
    """What to price. Read and checked by `jobs.purchase`, which tells every fault at once; here for the schema."""

    product = serializers.CharField()
    framework = serializers.ChoiceField(["pytorch", "horovod", "tensorflow"])
    image = serializers.CharField()
    workspace = serializers.CharField()
    code_path = serializers.CharField(help_text="Path of the script inside the workspace.")
    arguments = serializers.ListField(child=serializers.CharField(), required=False)
    datasets = serializers.ListField(child=serializers.CharField(), required=False)
    epochs = serializers.IntegerField(min_value=1)
    lr = serializers.CharField(help_text="A number above 0, such as 0.01 or 1e-3.")
    batch_size = serializers.IntegerField(min_value=1, help_text="Of each process.")
    node_spec = serializers.CharField()
    nodes = serializers.IntegerField(min_value=1)
    workers_per_node = serializers.IntegerField(min_value=1)
    max_seconds = serializers.IntegerField(required=False, help_text="The run is ended after this time.")
    ceiling_minor = serializers.IntegerField(required=False, help_text="The run is ended before it costs more.")
    retries = serializers.IntegerField(
        required=False, min_value=0, max_value=MOST_RETRIES, help_text="After a fault of the code; under one ceiling."
    )
    retry_backoff_seconds = serializers.IntegerField(
        required=False, help_text="Before the first retry; doubled before each following."
    )
    on_hang = serializers.ChoiceField(list(OnHang), required=False)
    min_nodes = serializers.IntegerField(
        required=False, help_text="Elastic: with how few nodes it may start and go on; 0 means all."
    )
    controller = serializers.ChoiceField(list(Controller), required=False, help_text="`mpi` is for Horovod.")
    collective_timeout_seconds = serializers.IntegerField(required=False, help_text="0: the framework's own.")
    stall_check_seconds = serializers.IntegerField(required=False, help_text="Horovod's; 0: its own.")


class QuoteSerializer(serializers.ModelSerializer[Quote]):
    """An offer. The lines say what the ceiling is made of and sum to it."""

    lines = LineSerializer(many=True)
    estimate = serializers.SerializerMethodField()
    notes = serializers.SerializerMethodField()

    class Meta:
        model = Quote
        fields = (
            "id",
            "currency",
            "mode",
            "lines",
            "estimate",
            "notes",
            "ceiling_minor",
            "deadline_seconds",
            "expires_at",
        )

    def get_notes(self, quote: Quote) -> list[str]:
        """What retries, fewer nodes and hangs mean for the price."""
        return terms_sentences(quote.purchase)

    def get_estimate(self, quote: Quote) -> dict[str, Any]:
        """What it will probably cost, and where that comes from."""
        basis = quote.basis | {"sentence": basis_sentence(quote.basis)}
        return {"p50_minor": quote.p50_minor, "p90_minor": quote.p90_minor, "basis": basis}


class OrderRequestSerializer(serializers.Serializer[Any]):
    """A quote to buy."""

    quote = serializers.UUIDField()


class OrderSerializer(serializers.Serializer[Order]):
    """An order and the job it bought."""

    id = serializers.UUIDField()
    job = serializers.IntegerField(source="job.pk")


class ProgressSerializer(serializers.Serializer[Any]):
    """How far a job is."""

    fraction = serializers.FloatField(help_text="0 to 1.")
    epoch = serializers.IntegerField(help_text="Epochs done.")
    epochs = serializers.IntegerField()
    eta_seconds = serializers.IntegerField(allow_null=True, help_text="Null where it can't be told.")


class SpanSerializer(serializers.Serializer[Any]):
    """A stretch with one number of nodes."""

    nodes = serializers.IntegerField()
    started_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField()


class AttemptSerializer(serializers.Serializer[Any]):
    """One try at a job."""

    number = serializers.IntegerField()
    reason = serializers.ChoiceField(Job.Reasons.choices, allow_blank=True)
    detail = serializers.CharField(allow_blank=True)
    failure = serializers.DictField(
        allow_null=True, help_text="The first cause: code, data, node, rank, exit code, last lines."
    )
    claimed_at = serializers.DateTimeField()
    started_at = serializers.DateTimeField(allow_null=True)
    finished_at = serializers.DateTimeField(allow_null=True)
    granted_nodes = serializers.IntegerField(help_text="Nodes it started with.")
    spans = SpanSerializer(many=True, help_text="How many nodes ran when.")
    restarts = serializers.IntegerField(help_text="Restarts of the ranks inside it, because a node was lost.")
    progress_at = serializers.DateTimeField(allow_null=True, help_text="The last sign of progress.")
    checkpoint_at = serializers.DateTimeField(allow_null=True, help_text="The newest checkpoint.")
    lost_seconds = serializers.FloatField(allow_null=True, help_text="Work that the next attempt can't go on from.")
    billed_seconds = serializers.FloatField(help_text="As if all nodes that were bought had run.")


class JobSerializer(serializers.Serializer[Job]):
    """A job. Amounts in minor units. Read through `selectors.summary`; the fields are here for the schema."""

    id = serializers.IntegerField()
    name = serializers.CharField()
    state = serializers.ChoiceField(Job.States.choices)
    reason = serializers.ChoiceField(Job.Reasons.choices, allow_blank=True)
    detail = serializers.CharField(allow_blank=True)
    sentence = serializers.CharField(help_text="Why it ended, and who pays.", allow_blank=True)
    waiting_for = serializers.CharField(
        help_text="Why it waits and its place; while it starts, what its nodes wait for.", allow_blank=True
    )
    progress = ProgressSerializer()
    attempts = AttemptSerializer(many=True)
    queued_at = serializers.DateTimeField()
    started_at = serializers.DateTimeField(allow_null=True)
    finished_at = serializers.DateTimeField(allow_null=True)
    currency = serializers.CharField()
    cost_minor = serializers.IntegerField(help_text="So far, or in the end.")
    ceiling_minor = serializers.IntegerField()
    deadline_seconds = serializers.IntegerField()
    product = serializers.CharField()
    framework = serializers.CharField()
    image = serializers.CharField()
    workspace = serializers.CharField()
    code_path = serializers.CharField()
    arguments = serializers.ListField(child=serializers.CharField())
    epochs = serializers.IntegerField()
    lr = serializers.CharField()
    batch_size = serializers.IntegerField()
    node_spec = serializers.CharField()
    nodes = serializers.IntegerField()
    workers_per_node = serializers.IntegerField()
    rerun_of = serializers.IntegerField(allow_null=True)
    retries = serializers.IntegerField()
    retry_backoff_seconds = serializers.IntegerField()
    on_hang = serializers.ChoiceField(Job.HangPolicies.choices)
    min_nodes = serializers.IntegerField()
    controller = serializers.ChoiceField(Job.Controllers.choices)
    collective_timeout_seconds = serializers.IntegerField()
    stall_check_seconds = serializers.IntegerField()
    not_before = serializers.DateTimeField(allow_null=True, help_text="A retry waits until then.")

    def to_representation(self, instance: Job) -> dict[str, Any]:
        """As `selectors.summary` has it, for pages, streams and API alike."""
        return selectors.summary(instance)


class LogSerializer(serializers.Serializer[Any]):
    """A piece of a rank's output."""

    text = serializers.CharField()
    next_offset = serializers.IntegerField()
    eof = serializers.BooleanField(help_text="Whether the output has ended.")


class NodeUseSerializer(serializers.Serializer[Any]):
    """What one node used over time: a list for each series, as long as `at`."""

    node = serializers.IntegerField()
    at = serializers.ListField(child=serializers.FloatField(), help_text="Unix seconds.")
    series = serializers.DictField(
        child=serializers.ListField(child=serializers.FloatField(allow_null=True)),
        help_text="cpu (cores), memory (bytes), net_rx, net_tx, disk_read, disk_write (bytes/s), gpu (%), gpu_memory.",
    )


class RankUseSerializer(serializers.Serializer[Any]):
    """One rank of an attempt."""

    rank = serializers.IntegerField()
    node = serializers.IntegerField()
    cpu = serializers.FloatField(allow_null=True, help_text="Cores, at most of late.")
    memory = serializers.FloatField(allow_null=True, help_text="Bytes, at most of late.")
    steps = serializers.IntegerField()
    seconds_per_step = serializers.FloatField(allow_null=True)
    comm_share = serializers.FloatField(allow_null=True, help_text="Of its steps' time, spent waiting for others.")
    is_slow = serializers.BooleanField(help_text="The others wait for it.")


class EfficiencySerializer(serializers.Serializer[Any]):
    """How well a run scales."""

    value = serializers.FloatField(help_text="1.0: as many times the work of one node as there are nodes.")
    nodes = serializers.IntegerField()
    job = serializers.IntegerField(help_text="The one-node run it is measured against.")
    by = serializers.ChoiceField(["steps", "epochs"])


class TelemetrySerializer(serializers.Serializer[Any]):
    """What an attempt used, and what that means."""

    attempt = serializers.IntegerField(allow_null=True)
    nodes = NodeUseSerializer(many=True)
    ranks = RankUseSerializer(many=True)
    efficiency = EfficiencySerializer(allow_null=True)
    sentences = serializers.ListField(child=serializers.CharField())


class CheckRequestSerializer(serializers.Serializer[Any]):
    """Where to check an image. Read by `purchase.read_choices`; here for the schema."""

    node_spec = serializers.CharField()
    nodes = serializers.IntegerField(min_value=1)
    framework = serializers.CharField(required=False, help_text="The image's first, where absent.")
    workspace = serializers.CharField(required=False)
    datasets = serializers.ListField(child=serializers.CharField(), required=False)
    workers_per_node = serializers.IntegerField(required=False)


class CheckItemSerializer(serializers.Serializer[Any]):
    """One part of a check."""

    name = serializers.CharField()
    title = serializers.CharField()
    ok = serializers.BooleanField(allow_null=True, help_text="Null where the run did not come to it.")
    detail = serializers.CharField()
    remedy = serializers.CharField(help_text="What to do where it is at fault.")


class StackSerializer(serializers.Serializer[Any]):
    """Where a rank stood when its run was found hung."""

    rank = serializers.IntegerField()
    node = serializers.IntegerField()
    text = serializers.CharField()


class EventSerializer(serializers.Serializer[Any]):
    """Something that happened."""

    id = serializers.IntegerField(source="event.pk")
    kind = serializers.CharField(source="event.kind")
    attempt = serializers.IntegerField(source="event.attempt", allow_null=True)
    actor = serializers.CharField(source="event.actor.email", default=None, allow_null=True)
    details = serializers.DictField(source="event.data")
    sentence = serializers.CharField()
    created_at = serializers.DateTimeField(source="event.created_at")

"""API of sweeps: quote, buy, watch, stop, extend, and the receipts of the trials."""

from __future__ import annotations

from typing import Any, ClassVar

from django.urls import path
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.generics import ListAPIView
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api import LineSerializer, ReceiptSerializer
from billing.models import Quote
from billing.quotes import quote_for
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.pagination import NewestFirst
from console.core.schema import results_of
from jobs import orders
from jobs.api_input import idempotency_key, json_object
from jobs.models import Job, Sweep, Trial
from jobs.serializers import OrderRequestSerializer
from jobs.sweeps import purchase, selectors
from jobs.sweeps.plan import ExtensionSerializer, ObjectiveSerializer, SweepQuoteRequestSerializer


class SweepEstimateSerializer(serializers.Serializer[Any]):
    """Estimated cost of all trials together."""

    p50_minor = serializers.IntegerField()
    p90_minor = serializers.IntegerField()


class SweepQuoteSerializer(serializers.ModelSerializer[Quote]):
    """A quote of a sweep. Its lines sum to the ceiling, which all trials together never exceed."""

    lines = LineSerializer(many=True)
    estimate = SweepEstimateSerializer(source="*")
    trials = serializers.IntegerField(source="purchase.sweep.trials", help_text="Maximum number of trials.")
    minimum_minor = serializers.IntegerField(
        source="terms.minimum_minor", help_text="Each trial that used any time costs at least this."
    )
    refusal = serializers.SerializerMethodField(
        help_text="Why the quote can't be bought now, for example a budget; empty if it can."
    )

    class Meta:
        model = Quote
        fields = (
            "id", "currency", "lines", "estimate", "trials", "refusal", "minimum_minor", "ceiling_minor", "expires_at",
        )  # fmt: skip

    def get_refusal(self, quote: Quote) -> str:
        """Return why the quote cannot be bought; empty if it can."""
        return orders.refusal(quote, quote.created_by)


class BestSerializer(serializers.Serializer[Any]):
    """The best completed trial."""

    trial = serializers.IntegerField()
    job = serializers.IntegerField()
    parameters = serializers.DictField()
    value = serializers.FloatField()


class SweepSerializer(serializers.Serializer[Any]):
    """A sweep."""

    id = serializers.IntegerField()
    name = serializers.CharField()
    state = serializers.ChoiceField(choices=Sweep.States.choices)
    reason = serializers.CharField(help_text="Why it ended or is stopping; empty while it runs.")
    waiting_for = serializers.CharField(help_text="Why the next trial can't be ordered; empty if nothing prevents it.")
    objective = ObjectiveSerializer()
    method = serializers.CharField()
    pruner = serializers.CharField()
    concurrency = serializers.IntegerField()
    trials_total = serializers.IntegerField()
    trials_done = serializers.IntegerField()
    best = BestSerializer(allow_null=True)
    currency = serializers.CharField()
    cost_minor = serializers.IntegerField(help_text="Cost of all trials so far.")
    ceiling_minor = serializers.IntegerField()
    extends = serializers.IntegerField(
        allow_null=True,
        help_text="The first sweep of the search, if this sweep extends an earlier one; otherwise null.",
    )
    created_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)

    def to_representation(self, instance: Sweep) -> Any:
        """Return the JSON of a sweep."""
        return super().to_representation(selectors.summary(instance))


class TrialSerializer(serializers.Serializer[Any]):
    """A trial."""

    number = serializers.IntegerField(help_text="From 0.")
    job = serializers.IntegerField(source="job_id")
    state = serializers.ChoiceField(choices=Job.States.choices, help_text="The state of the job.")
    outcome = serializers.ChoiceField(
        choices=Trial.Outcomes.choices, allow_blank=True, help_text="Empty while the job is open."
    )
    parameters = serializers.DictField()
    value = serializers.FloatField(allow_null=True, help_text="The metric's last value so far.")
    cost_minor = serializers.IntegerField()
    is_best = serializers.BooleanField()
    is_efficient = serializers.BooleanField(help_text="No other completed trial is both better and cheaper.")


class SweepReceiptSerializer(serializers.Serializer[Any]):
    """The charge of a sweep: the receipts of its ended trials and their total."""

    sweep = serializers.IntegerField()
    currency = serializers.CharField()
    total_minor = serializers.IntegerField()
    ceiling_minor = serializers.IntegerField()
    trials = ReceiptSerializer(many=True)


class SweepQuotesView(TenantView):
    """Quotes of sweeps."""

    capabilities: ClassVar = {"POST": Capability.RUN}

    @extend_schema(request=SweepQuoteRequestSerializer, responses={201: SweepQuoteSerializer})
    def post(self, request: Request) -> Response:
        """Price a sweep. Nothing is bought. `ceiling_minor` limits all trials together."""
        quote = purchase.quote_sweep(membership=self.membership, data=json_object(request))
        return Response(SweepQuoteSerializer(quote).data, status=201)


class SweepsView(TenantView, ListAPIView[Sweep]):
    """Sweeps."""

    capabilities: ClassVar = {"GET": Capability.VIEW, "POST": Capability.RUN}
    serializer_class = SweepSerializer
    queryset = Sweep.objects.none()  # only tells the API schema the model
    pagination_class = NewestFirst

    def get_queryset(self) -> Any:
        """List the organization's sweeps, newest first."""
        return selectors.sweeps_for(self.organization)

    @extend_schema(
        request=OrderRequestSerializer,
        responses={201: SweepSerializer},
        parameters=[OpenApiParameter("Idempotency-Key", OpenApiTypes.STR, OpenApiParameter.HEADER)],
    )
    def post(self, request: Request) -> Response:
        """Buy a sweep's quote: hold its ceiling and order its first trials. A repeated key returns the same sweep."""
        form = OrderRequestSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        sweep = purchase.place_sweep(
            membership=self.membership,
            quote=quote_for(organization=self.organization, quote_id=form.validated_data["quote"]),
            idempotency_key=idempotency_key(request),
        )
        return Response(SweepSerializer(sweep).data, status=201)


class SweepView(TenantView):
    """Base of views about one sweep."""

    capabilities: ClassVar = {"GET": Capability.VIEW}

    def sweep(self, pk: int) -> Sweep:
        """Return the organization's sweep. Raises NotFound."""
        return selectors.sweep_for(self.organization, pk)


class SweepDetailView(SweepView):
    """One sweep."""

    @extend_schema(responses=SweepSerializer)
    def get(self, _request: Request, pk: int) -> Response:
        """Return state, trials, best trial and cost."""
        return Response(SweepSerializer(self.sweep(pk)).data)


class TrialsView(SweepView):
    """The trials of a sweep."""

    @extend_schema(responses=results_of(TrialSerializer))
    def get(self, _request: Request, pk: int) -> Response:
        """List all trials in order of number."""
        return Response({"results": TrialSerializer(selectors.trial_rows(self.sweep(pk)), many=True).data})


class StopSweepView(SweepView):
    """The stop of a sweep."""

    capabilities: ClassVar = {"POST": Capability.RUN}

    @extend_schema(request=None, responses=SweepSerializer)
    def post(self, _request: Request, pk: int) -> Response:
        """Order no more trials and cancel the open ones. You pay for the time that they used."""
        sweep = purchase.stop_sweep(membership=self.membership, sweep=self.sweep(pk))
        return Response(SweepSerializer(sweep).data)


class ExtendSweepView(SweepView):
    """More trials of a sweep."""

    capabilities: ClassVar = {"POST": Capability.RUN}

    @extend_schema(request=ExtensionSerializer, responses={201: SweepQuoteSerializer})
    def post(self, request: Request, pk: int) -> Response:
        """Price more trials of an ended sweep. They continue its search. Buy the quote as a sweep."""
        quote = purchase.quote_extension(membership=self.membership, sweep=self.sweep(pk), data=json_object(request))
        return Response(SweepQuoteSerializer(quote).data, status=201)


class SweepReceiptView(SweepView):
    """The receipts of a sweep's trials."""

    @extend_schema(responses=SweepReceiptSerializer)
    def get(self, _request: Request, pk: int) -> Response:
        """Return the receipts of the trials that have ended, and their total."""
        sweep = self.sweep(pk)
        receipts = list(selectors.receipts(sweep))
        data = {
            "sweep": sweep.pk,
            "currency": sweep.quote.currency,
            "total_minor": sum(receipt.total_minor for receipt in receipts),
            "ceiling_minor": sweep.quote.ceiling_minor,
            "trials": receipts,
        }
        return Response(SweepReceiptSerializer(data).data)


urlpatterns = [
    path("sweeps/quotes/", SweepQuotesView.as_view(), name="api_sweep_quotes"),
    path("sweeps/", SweepsView.as_view(), name="api_sweeps"),
    path("sweeps/<int:pk>/", SweepDetailView.as_view(), name="api_sweep"),
    path("sweeps/<int:pk>/trials/", TrialsView.as_view(), name="api_sweep_trials"),
    path("sweeps/<int:pk>/stop/", StopSweepView.as_view(), name="api_sweep_stop"),
    path("sweeps/<int:pk>/extend/", ExtendSweepView.as_view(), name="api_sweep_extend"),
    path("sweeps/<int:pk>/receipt/", SweepReceiptView.as_view(), name="api_sweep_receipt"),
]

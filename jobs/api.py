"""The API of jobs: products, quotes, orders, and everything there is to see and do about a job."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponseBase
from django.urls import path
from django.utils.translation import gettext as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.generics import ListAPIView
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api import ReceiptSerializer
from billing.quotes import quote_for
from console.accounts.errors import InvalidInput, NotFound
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.accounts.schema import results_of
from console.accounts.sse import EventStreamRenderer, event_stream, wants_events
from jobs import activation, checks, orders, probes, selectors, streams
from jobs.fields import is_text
from jobs.models import Job
from jobs.serializers import (
    ActivationSerializer,
    CheckItemSerializer,
    CheckRequestSerializer,
    EventSerializer,
    JobSerializer,
    LogSerializer,
    OrderRequestSerializer,
    OrderSerializer,
    ProductSerializer,
    QuoteRequestSerializer,
    QuoteSerializer,
    ServiceSerializer,
    StackSerializer,
    TelemetrySerializer,
)

LONGEST_NUMBER = 15
"""Digits of an offset or rank: far more than any file has bytes, and still a number that the system can seek to."""


class ActivateView(TenantView):
    """The distributed training service."""

    capabilities = {"POST": Capability.MANAGE}

    @extend_schema(request=ActivationSerializer, responses=ServiceSerializer)
    def post(self, request: Request) -> Response:
        """Accept the terms and activate; makes the wallet and the first workspace."""
        accepted = isinstance(request.data, dict) and request.data.get("accept_terms") is True
        row = activation.activate(membership=self.membership, accept_terms=accepted)
        return Response(ServiceSerializer(row).data)


class DeactivateView(TenantView):
    """The distributed training service, ended."""

    capabilities = {"POST": Capability.MANAGE}

    @extend_schema(request=None, responses={204: None})
    def post(self, _request: Request) -> Response:
        """Take no new orders; what runs goes on and is charged, and files, wallet and receipts stay."""
        activation.deactivate(membership=self.membership)
        return Response(status=204)


class ProductsView(TenantView):
    """Products on offer."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(responses=results_of(ProductSerializer))
    def get(self, _request: Request) -> Response:
        """The catalogue."""
        return Response({"results": ProductSerializer(selectors.products(), many=True).data})


class QuotesView(TenantView):
    """Quotes."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(request=QuoteRequestSerializer, responses={201: QuoteSerializer})
    def post(self, request: Request) -> Response:
        """Price a run. Nothing is bought."""
        quote = orders.quote_order(membership=self.membership, data=_object(request))
        return Response(QuoteSerializer(quote).data, status=201)


class QuoteView(TenantView):
    """One quote."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(responses=QuoteSerializer)
    def get(self, _request: Request, quote_id: str) -> Response:
        """A quote as it was made."""
        return Response(QuoteSerializer(quote_for(organization=self.organization, quote_id=quote_id)).data)


class OrdersView(TenantView):
    """Orders."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(
        request=OrderRequestSerializer,
        responses={201: OrderSerializer},
        parameters=[OpenApiParameter("Idempotency-Key", OpenApiTypes.STR, OpenApiParameter.HEADER)],
    )
    def post(self, request: Request) -> Response:
        """Buy a quote: its ceiling is held, its job is queued. The same Idempotency-Key again gives the same order."""
        form = OrderRequestSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        order = orders.place_order(
            membership=self.membership,
            quote=quote_for(organization=self.organization, quote_id=form.validated_data["quote"]),
            idempotency_key=_idempotency_key(request),
        )
        return Response(OrderSerializer(order).data, status=201)


class ProbesView(TenantView):
    """Free probes."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(request=QuoteRequestSerializer, responses={201: OrderSerializer})
    def post(self, request: Request) -> Response:
        """Run what a quote would be asked for on one node for a minute, free: the next quote is measured by it."""
        order = probes.place_probe(
            membership=self.membership, data=_object(request), idempotency_key=_idempotency_key(request)
        )
        return Response(OrderSerializer(order).data, status=201)


class JobsView(TenantView, ListAPIView[Job]):
    """Jobs."""

    capabilities = {"GET": Capability.VIEW}
    serializer_class = JobSerializer
    queryset = Job.objects.none()
    filterset_fields = ("state", "reason", "framework")

    def get_queryset(self) -> Any:
        """The organization's jobs, newest first."""
        return selectors.jobs_for(self.organization).prefetch_related("attempts")


class JobView(TenantView):
    """Base of what is about one job."""

    capabilities = {"GET": Capability.VIEW}

    def job(self, pk: int) -> Job:
        """The job, if it is the organization's. Raises NotFound."""
        return selectors.job_for(self.organization, pk)


class JobDetailView(JobView):
    """One job."""

    @extend_schema(responses=JobSerializer)
    def get(self, _request: Request, pk: int) -> Response:
        """State, reason, why it waits, progress, attempts, cost."""
        return Response(selectors.summary(self.job(pk)))


class CancelView(JobView):
    """Ending a job."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(request=None, responses=JobSerializer)
    def post(self, _request: Request, pk: int) -> Response:
        """Cancel: at once while it waits, by SIGTERM and a grace while it runs."""
        orders.cancel_job(membership=self.membership, job=self.job(pk))
        return Response(selectors.summary(self.job(pk)))


class RerunView(JobView):
    """Running a job again."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(request=QuoteRequestSerializer(partial=True), responses={201: OrderSerializer})
    def post(self, request: Request, pk: int) -> Response:
        """Buy the same run again at today's prices; fields in the body replace those of the job."""
        order = orders.rerun(
            membership=self.membership,
            job=self.job(pk),
            changes=_object(request),
            idempotency_key=_idempotency_key(request),
        )
        return Response(OrderSerializer(order).data, status=201)


class LogsView(JobView):
    """A rank's output."""

    renderer_classes = [JSONRenderer, EventStreamRenderer]

    @extend_schema(
        responses=LogSerializer,
        parameters=[
            OpenApiParameter("rank", OpenApiTypes.INT, default=0),
            OpenApiParameter("offset", OpenApiTypes.INT, default=0, description="In bytes; `next_offset` of the last."),
            OpenApiParameter("attempt", OpenApiTypes.INT, description="The latest where absent."),
        ],
    )
    def get(self, request: Request, pk: int) -> Response | HttpResponseBase:
        """A piece from `offset`; with `Accept: text/event-stream`, everything from there as it comes (events `log`)."""
        job = selectors.job_row(self.organization, pk)
        rank = _number(request, "rank", 0)
        offset = _number(request, "offset", 0)
        if (seen := request.headers.get("Last-Event-ID", "")).isdecimal() and len(seen) < LONGEST_NUMBER:
            offset = int(seen)
        attempt = _number(request, "attempt", 0) or None
        chunk = selectors.log(job, rank, offset, attempt)
        if wants_events(request.headers):
            return event_stream(streams.log_events(job, rank, offset, attempt))
        return Response({"text": chunk.text, "next_offset": chunk.next_offset, "eof": chunk.eof})


class StreamView(JobView):
    """A job, live."""

    renderer_classes = [EventStreamRenderer, JSONRenderer]

    @extend_schema(responses={(200, "text/event-stream"): OpenApiTypes.STR})
    def get(self, _request: Request, pk: int) -> HttpResponseBase:
        """Events `state` (the job) and `metrics` (new points by name) until the job has ended."""
        return event_stream(streams.job_events(selectors.job_row(self.organization, pk)))


class MetricsView(JobView):
    """A job's curves."""

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, _request: Request, pk: int) -> Response:
        """Curves by name, each a list of [step, value]."""
        return Response({"metrics": selectors.metrics(self.job(pk))[0]})


class ImageCheckView(TenantView):
    """Free checks of an image."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(request=CheckRequestSerializer, responses={201: OrderSerializer})
    def post(self, request: Request, name: str) -> Response:
        """Start a free run that checks the image, its collectives and the mounts on the nodes chosen."""
        data = _object(request) | {"image": name}
        order = checks.place_check(membership=self.membership, data=data, idempotency_key=_idempotency_key(request))
        return Response(OrderSerializer(order).data, status=201)


class CheckView(JobView):
    """What a check found."""

    @extend_schema(responses=results_of(CheckItemSerializer))
    def get(self, _request: Request, pk: int) -> Response:
        """The checklist; empty for a run that is no check."""
        job = self.job(pk)
        found = checks.checklist(job) if job.builtin_script else []
        return Response({"results": CheckItemSerializer(found, many=True).data})


class TelemetryView(JobView):
    """What a job's nodes and ranks use."""

    @extend_schema(responses=TelemetrySerializer, parameters=[OpenApiParameter("attempt", OpenApiTypes.INT)])
    def get(self, request: Request, pk: int) -> Response:
        """Nodes over time, ranks with their steps, slow ranks, scaling efficiency; of the latest attempt, or of one."""
        return Response(selectors.telemetry(self.job(pk), _number(request, "attempt", 0) or None))


class StacksView(JobView):
    """Where the ranks of a hung run stood."""

    @extend_schema(responses=results_of(StackSerializer), parameters=[OpenApiParameter("attempt", OpenApiTypes.INT)])
    def get(self, request: Request, pk: int) -> Response:
        """The stack of every rank; empty for an attempt that did not hang."""
        return Response({"results": selectors.stacks(self.job(pk), _number(request, "attempt", 0) or None)})


class EventsView(JobView):
    """What happened to a job."""

    @extend_schema(responses=results_of(EventSerializer))
    def get(self, _request: Request, pk: int) -> Response:
        """Every event, oldest first."""
        return Response({"results": EventSerializer(selectors.events(self.job(pk)), many=True).data})


class EnvironmentView(JobView):
    """What a rank sees."""

    @extend_schema(responses=OpenApiTypes.OBJECT, parameters=[OpenApiParameter("rank", OpenApiTypes.INT, default=0)])
    def get(self, request: Request, pk: int) -> Response:
        """The variables of the environment contract, of one rank; a port of 0 is chosen when the run starts."""
        return Response({"environment": selectors.environment(self.job(pk), _number(request, "rank", 0))})


class ReceiptView(JobView):
    """What a job came to."""

    @extend_schema(responses=ReceiptSerializer)
    def get(self, _request: Request, pk: int) -> Response:
        """The receipt; 404 until the job has ended."""
        receipt = selectors.receipt(self.job(pk))
        if receipt is None:
            raise NotFound(_("The receipt is written when the job has ended."))
        return Response(ReceiptSerializer(receipt).data)


def _object(request: Request) -> dict[str, Any]:
    if not isinstance(request.data, dict):
        raise InvalidInput(_("Send a JSON object."))
    return dict(request.data)


def _idempotency_key(request: Request) -> str:
    key = request.headers.get("Idempotency-Key", "")
    if len(key) > 255:
        raise InvalidInput(fields={"Idempotency-Key": _("Use at most 255 characters.")})
    if not is_text(key) or any(character < " " or character == "\x7f" for character in key):
        raise InvalidInput(fields={"Idempotency-Key": _("Use letters, digits and marks alone, such as a UUID.")})
    return key


def _number(request: Request, name: str, default: int) -> int:
    try:
        number = int(request.query_params.get(name, default))
    except ValueError:
        number = -1
    if not 0 <= number < 10**LONGEST_NUMBER:
        raise InvalidInput(fields={name: _("Give a whole number, 0 or more.")})
    return number


urlpatterns = [
    path("services/distributed-training/activate/", ActivateView.as_view(), name="api_activate"),
    path("services/distributed-training/deactivate/", DeactivateView.as_view(), name="api_deactivate"),
    path("products/", ProductsView.as_view(), name="api_products"),
    path("quotes/", QuotesView.as_view(), name="api_quotes"),
    path("quotes/<uuid:quote_id>/", QuoteView.as_view(), name="api_quote"),
    path("orders/", OrdersView.as_view(), name="api_orders"),
    path("probes/", ProbesView.as_view(), name="api_probes"),
    path("jobs/", JobsView.as_view(), name="api_jobs"),
    path("jobs/<int:pk>/", JobDetailView.as_view(), name="api_job"),
    path("jobs/<int:pk>/cancel/", CancelView.as_view(), name="api_job_cancel"),
    path("jobs/<int:pk>/rerun/", RerunView.as_view(), name="api_job_rerun"),
    path("jobs/<int:pk>/logs/", LogsView.as_view(), name="api_job_logs"),
    path("jobs/<int:pk>/stream/", StreamView.as_view(), name="api_job_stream"),
    path("jobs/<int:pk>/metrics/", MetricsView.as_view(), name="api_job_metrics"),
    path("images/<str:name>/check/", ImageCheckView.as_view(), name="api_image_check"),
    path("jobs/<int:pk>/check/", CheckView.as_view(), name="api_job_check"),
    path("jobs/<int:pk>/telemetry/", TelemetryView.as_view(), name="api_job_telemetry"),
    path("jobs/<int:pk>/stacks/", StacksView.as_view(), name="api_job_stacks"),
    path("jobs/<int:pk>/events/", EventsView.as_view(), name="api_job_events"),
    path("jobs/<int:pk>/environment/", EnvironmentView.as_view(), name="api_job_environment"),
    path("jobs/<int:pk>/receipt/", ReceiptView.as_view(), name="api_job_receipt"),
]

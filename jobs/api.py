"""API of jobs: the service, products, quotes, orders, and everything about one job."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponseBase
from django.urls import path
from django.utils.translation import gettext as _
from django_filters.rest_framework import CharFilter, FilterSet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.generics import ListAPIView
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api import ReceiptSerializer
from billing.quotes import quote_for
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.errors import InvalidInput, NotFound
from console.core.schema import results_of
from console.core.sse import EventStreamRenderer, wants_events
from jobs import (
    activation,
    checks,
    comparison,
    curves,
    failures,
    free_estimates,
    orders,
    reruns,
    selectors,
    streams,
    tensorboards,
)
from jobs.api_input import idempotency_key, json_object
from jobs.details import DetailsSerializer, update_details
from jobs.launch_preview import launch_preview
from jobs.models import Job
from jobs.purchase import CheckRequestSerializer, QuoteRequestSerializer
from jobs.serializers import (
    ActivationSerializer,
    CheckItemSerializer,
    ComparisonSerializer,
    ConfigurationSerializer,
    CurvesSerializer,
    DiagnosisSerializer,
    EventSerializer,
    JobSerializer,
    LaunchPreviewSerializer,
    LogMatchSerializer,
    LogSerializer,
    OrderRequestSerializer,
    OrderSerializer,
    PackagesSerializer,
    ProductSerializer,
    QuoteSerializer,
    ServiceSerializer,
    StackSerializer,
    TelemetrySerializer,
    TensorBoardSerializer,
)

MAX_NUMBER_DIGITS = 15
"""Digits of a whole number in a query, such as an offset: enough for any file, and within the range of a seek."""
MAX_LOG_BYTES = 1 << 20
"""Bytes of a log in one response, because they are held in memory."""
MAX_QUERY_LENGTH = 200
"""Characters of a text that is searched in a log: longer than any line that people look for."""


class ActivateView(TenantView):
    """The distributed training service."""

    capabilities = {"POST": Capability.MANAGE}

    @extend_schema(request=ActivationSerializer, responses=ServiceSerializer)
    def post(self, request: Request) -> Response:
        """Accept the terms and activate; creates the wallet and the first workspace."""
        is_accepted = isinstance(request.data, dict) and request.data.get("accept_terms") is True
        service = activation.activate(membership=self.membership, accept_terms=is_accepted)
        return Response(ServiceSerializer(service).data)


class DeactivateView(TenantView):
    """Deactivation of the service."""

    capabilities = {"POST": Capability.MANAGE}

    @extend_schema(request=None, responses={204: None})
    def post(self, _request: Request) -> Response:
        """Accept no new orders. Open jobs continue and are charged; files, wallet and receipts stay."""
        activation.deactivate(membership=self.membership)
        return Response(status=204)


class ProductsView(TenantView):
    """Products on offer."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(responses=results_of(ProductSerializer))
    def get(self, _request: Request) -> Response:
        """List the products on offer."""
        return Response({"results": ProductSerializer(selectors.products(), many=True).data})


class QuotesView(TenantView):
    """Quotes."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(request=QuoteRequestSerializer, responses={201: QuoteSerializer})
    def post(self, request: Request) -> Response:
        """Price a run. Nothing is bought."""
        quote = orders.quote_order(membership=self.membership, data=json_object(request))
        return Response(QuoteSerializer(quote).data, status=201)


class QuoteView(TenantView):
    """One quote."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(responses=QuoteSerializer)
    def get(self, _request: Request, quote_id: str) -> Response:
        """Return a quote."""
        return Response(QuoteSerializer(quote_for(organization=self.organization, quote_id=quote_id)).data)


class QuoteComparisonView(TenantView):
    """A quote beside its alternatives."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(responses=ComparisonSerializer)
    def get(self, _request: Request, quote_id: str) -> Response:
        """Return what the run would cost, and when it could start, on 1, 2 and 4 nodes and on other node specs.

        Nothing is stored. To buy an alternative, request a quote for it.
        """
        quote = quote_for(organization=self.organization, quote_id=quote_id)
        return Response(ComparisonSerializer(comparison.compare(quote)).data)


class QuoteEnvironmentView(TenantView):
    """Preview of what the code of a quoted run gets."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(
        responses=LaunchPreviewSerializer, parameters=[OpenApiParameter("rank", OpenApiTypes.INT, default=0)]
    )
    def get(self, request: Request, quote_id: str) -> Response:
        """Return the arguments and variables of a rank. Ports are 0, as they are chosen later; secrets are masked."""
        quote = quote_for(organization=self.organization, quote_id=quote_id)
        preview = launch_preview(quote, _whole_number(request, "rank", 0))
        return Response(LaunchPreviewSerializer(preview).data)


class OrdersView(TenantView):
    """Orders."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(
        request=OrderRequestSerializer,
        responses={201: OrderSerializer},
        parameters=[OpenApiParameter("Idempotency-Key", OpenApiTypes.STR, OpenApiParameter.HEADER)],
    )
    def post(self, request: Request) -> Response:
        """Buy a quote: hold its ceiling and queue its job. A repeated Idempotency-Key returns the same order."""
        form = OrderRequestSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        order = orders.place_order(
            membership=self.membership,
            quote=quote_for(organization=self.organization, quote_id=form.validated_data["quote"]),
            idempotency_key=idempotency_key(request),
        )
        return Response(OrderSerializer(order).data, status=201)


class FreeEstimatesView(TenantView):
    """Free estimates."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(request=QuoteRequestSerializer, responses={201: OrderSerializer})
    def post(self, request: Request) -> Response:
        """Run the code on one node for a minute, free; the next quote uses the measurement."""
        order = free_estimates.order_free_estimate(
            membership=self.membership, data=json_object(request), idempotency_key=idempotency_key(request)
        )
        return Response(OrderSerializer(order).data, status=201)


class JobFilter(FilterSet):  # type: ignore[misc]  # django-filter has no types
    """Filters of the list of jobs."""

    name = CharFilter(field_name="name", lookup_expr="icontains", help_text="A part of the name, in any case.")
    tag = CharFilter(method="with_tag", help_text="A tag.")

    class Meta:
        model = Job
        fields = ("state", "reason", "framework")

    def with_tag(self, jobs: QuerySet[Job], _name: str, tag: str) -> QuerySet[Job]:
        """Keep the jobs that have the tag."""
        return jobs.filter(tags__contains=[tag])


class JobsView(TenantView, ListAPIView[Job]):
    """Jobs."""

    capabilities = {"GET": Capability.VIEW}
    serializer_class = JobSerializer
    queryset = Job.objects.none()  # only tells the API schema the model
    filterset_class = JobFilter

    def get_queryset(self) -> Any:
        """List the organization's jobs, newest first."""
        return selectors.jobs_for(self.organization).prefetch_related("attempts")


class JobView(TenantView):
    """Base of views about one job."""

    capabilities = {"GET": Capability.VIEW}

    def job(self, pk: int) -> Job:
        """Return the organization's job. Raises NotFound."""
        return selectors.job_for(self.organization, pk)


class JobDetailView(JobView):
    """One job."""

    # Files that are kept longer count against the storage quota, so a change needs STORE.
    capabilities = {"GET": Capability.VIEW, "PATCH": Capability.STORE}

    @extend_schema(responses=JobSerializer)
    def get(self, _request: Request, pk: int) -> Response:
        """Return state, reason, why it waits, progress, attempts and cost."""
        return Response(selectors.summary(self.job(pk)))

    @extend_schema(request=DetailsSerializer(partial=True), responses=JobSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change name, tags, notes, or how long the files are kept. Fields missing in the body do not change."""
        update_details(job=self.job(pk), user=self.membership.user, data=json_object(request))
        return Response(selectors.summary(self.job(pk)))


class CancelView(JobView):
    """Cancellation of a job."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(request=None, responses=JobSerializer)
    def post(self, _request: Request, pk: int) -> Response:
        """Cancel a job: a waiting one ends at once, a running one gets SIGTERM and a grace period."""
        orders.cancel_job(membership=self.membership, job=self.job(pk))
        return Response(selectors.summary(self.job(pk)))


class TensorBoardView(JobView):
    """TensorBoard of a job."""

    capabilities = {"POST": Capability.VIEW}  # TensorBoard only reads, and costs nothing

    @extend_schema(request=None, responses={201: TensorBoardSerializer})
    def post(self, request: Request, pk: int) -> Response:
        """Start TensorBoard on the job's logs. Only you can open its URL, logged in to the console in a browser."""
        path = tensorboards.open_session(membership=self.membership, jobs=[self.job(pk)])
        return Response({"url": request.build_absolute_uri(path)}, status=201)


class RerunView(JobView):
    """Rerun of a job."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(request=QuoteRequestSerializer(partial=True), responses={201: OrderSerializer})
    def post(self, request: Request, pk: int) -> Response:
        """Buy the same run again at current prices; fields in the body replace those of the job.

        By default the run uses the script in the workspace and the latest versions of the datasets. With `exact` it
        uses those of the job.
        """
        order = orders.rerun(
            membership=self.membership,
            job=self.job(pk),
            changes=json_object(request),
            idempotency_key=idempotency_key(request),
        )
        return Response(OrderSerializer(order).data, status=201)


class LogsView(JobView):
    """A rank's output."""

    renderer_classes = [JSONRenderer, EventStreamRenderer]

    @extend_schema(
        responses=LogSerializer,
        parameters=[
            OpenApiParameter(
                "rank",
                OpenApiTypes.STR,
                default="0",
                description="A number; `all` streams the end of every rank's output together.",
            ),
            OpenApiParameter("offset", OpenApiTypes.INT, default=0, description="In bytes, as in `next_offset`."),
            OpenApiParameter(
                "tail", OpenApiTypes.INT, description="Return the whole lines in this many bytes at the end."
            ),
            OpenApiParameter("limit", OpenApiTypes.INT, default=selectors.LOG_BYTES, description="At most 1 MiB."),
            OpenApiParameter(
                "whole_lines", OpenApiTypes.BOOL, description="Leave out an incomplete line at the beginning."
            ),
            OpenApiParameter("timestamps", OpenApiTypes.BOOL, description="Add `times`: when each line was written."),
            OpenApiParameter("attempt", OpenApiTypes.INT, description="Default: the latest."),
        ],
    )
    def get(self, request: Request, pk: int) -> Response | HttpResponseBase:
        """Return a part from `offset`. With `Accept: text/event-stream`, stream `log` events from there on."""
        job = selectors.job_without_relations(self.organization, pk)
        attempt = _whole_number(request, "attempt", 0) or None
        tail = _whole_number(request, "tail", 0)
        with_times = _is_set(request, "timestamps")
        if request.query_params.get("rank") == "all" and wants_events(request.headers):
            tail = min(tail, selectors.LOG_BYTES)  # of each rank
            return self.event_stream(streams.all_log_events(job, tail, attempt, with_times=with_times))
        rank = _whole_number(request, "rank", 0)
        offset = -tail or _whole_number(request, "offset", 0)  # a negative offset counts from the end
        # A browser that reconnects to an event stream sends the id of the last event, which is the next offset.
        if (last_id := request.headers.get("Last-Event-ID", "")).isdecimal() and len(last_id) < MAX_NUMBER_DIGITS:
            offset = int(last_id)
        limit = min(max(1, _whole_number(request, "limit", selectors.LOG_BYTES)), MAX_LOG_BYTES)
        at_line = offset < 0 or _is_set(request, "whole_lines")  # a tail always begins with a whole line
        # Read even if events are streamed: a stream that has begun can no longer return an error such as NotFound.
        chunk = selectors.log(job, rank, offset, attempt, limit=limit, at_line=at_line, with_times=with_times)
        if wants_events(request.headers):
            return self.event_stream(streams.log_events(job, rank, offset, attempt, with_times=with_times))
        return Response(streams.log_data(chunk))


class LogSearchView(JobView):
    """Search of a rank's output."""

    @extend_schema(
        responses=LogMatchSerializer,
        parameters=[
            OpenApiParameter("q", OpenApiTypes.STR, description="Default: the first error."),
            OpenApiParameter("rank", OpenApiTypes.INT, default=0),
            OpenApiParameter("offset", OpenApiTypes.INT, default=0, description="Where the search begins, in bytes."),
            OpenApiParameter("attempt", OpenApiTypes.INT, description="Default: the latest."),
        ],
    )
    def get(self, request: Request, pk: int) -> Response:
        """Return the next place in the log that contains `q`, ignoring case. Reads at most 64 MiB of the log."""
        query = request.query_params.get("q", "")
        if len(query) > MAX_QUERY_LENGTH:
            raise InvalidInput(fields={"q": _("Use at most %(limit)d characters.") % {"limit": MAX_QUERY_LENGTH}})
        match = selectors.search_log(
            selectors.job_without_relations(self.organization, pk),
            _whole_number(request, "rank", 0),
            query,
            _whole_number(request, "offset", 0),
            _whole_number(request, "attempt", 0) or None,
        )
        return Response(LogMatchSerializer(match).data)


class StreamView(JobView):
    """Live events of a job."""

    renderer_classes = [EventStreamRenderer, JSONRenderer]

    @extend_schema(responses={(200, "text/event-stream"): OpenApiTypes.STR})
    def get(self, _request: Request, pk: int) -> HttpResponseBase:
        """Stream `state` (the job) and `metrics` (new points by name) until the job has ended."""
        return self.event_stream(streams.job_events(selectors.job_without_relations(self.organization, pk)))


class MetricsView(JobView):
    """A job's curves."""

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, _request: Request, pk: int) -> Response:
        """Return curves by name, each a list of [step, value]."""
        return Response({"metrics": selectors.metrics(self.job(pk)).curves})


class CurvesView(JobView):
    """A job's curves with epochs, times and costs."""

    @extend_schema(
        responses=CurvesSerializer,
        parameters=[OpenApiParameter("after", OpenApiTypes.INT, default=0, description="The previous `last`.")],
    )
    def get(self, request: Request, pk: int) -> Response:
        """Return each point with its epoch, time and the money spent. A long curve is thinned to about 1,000 points."""
        job = self.job(pk)
        return Response(CurvesSerializer(curves.curves(job, after=_whole_number(request, "after", 0))).data)


class PackagesView(JobView):
    """Packages of a job's requirements file."""

    @extend_schema(responses=PackagesSerializer)
    def get(self, _request: Request, pk: int) -> Response:
        """Return the requirements, whether they are installed, and the installer's output; 404 without any."""
        layer = self.job(pk).packages
        if layer is None:
            raise NotFound(_("This job has no requirements file."))
        return Response(PackagesSerializer(layer).data)


class ImageCheckView(TenantView):
    """Free checks of an image."""

    capabilities = {"POST": Capability.RUN}

    @extend_schema(request=CheckRequestSerializer, responses={201: OrderSerializer})
    def post(self, request: Request, name: str) -> Response:
        """Start a free run that checks the image, its collectives and the mounts on the nodes chosen."""
        data = json_object(request) | {"image": name}
        order = checks.place_check(membership=self.membership, data=data, idempotency_key=idempotency_key(request))
        return Response(OrderSerializer(order).data, status=201)


class CheckView(JobView):
    """Result of an image check."""

    @extend_schema(responses=results_of(CheckItemSerializer))
    def get(self, _request: Request, pk: int) -> Response:
        """Return the checklist; empty for a job that is not a check."""
        job = self.job(pk)
        items = checks.checklist(job) if job.is_check else []
        return Response({"results": CheckItemSerializer(items, many=True).data})


class TelemetryView(JobView):
    """Resource usage of a job."""

    @extend_schema(responses=TelemetrySerializer, parameters=[OpenApiParameter("attempt", OpenApiTypes.INT)])
    def get(self, request: Request, pk: int) -> Response:
        """Return nodes over time, ranks with their steps, slow ranks and scaling efficiency of an attempt."""
        return Response(selectors.resource_usage_data(self.job(pk), _whole_number(request, "attempt", 0) or None))


class StacksView(JobView):
    """Stacks of a hung run."""

    @extend_schema(responses=results_of(StackSerializer), parameters=[OpenApiParameter("attempt", OpenApiTypes.INT)])
    def get(self, request: Request, pk: int) -> Response:
        """Return the stack of every rank; empty for an attempt that did not hang."""
        return Response({"results": selectors.stacks(self.job(pk), _whole_number(request, "attempt", 0) or None)})


class DiagnosisView(JobView):
    """Diagnosis of a failed job."""

    @extend_schema(responses=DiagnosisSerializer)
    def get(self, _request: Request, pk: int) -> Response:
        """Return why a job failed, the line of code, and what would correct it; 404 for a job that did not fail."""
        explanation = failures.explain(self.job(pk))
        if explanation is None:
            raise NotFound(_("This job has not failed."))
        return Response(DiagnosisSerializer(explanation).data)


class EventsView(JobView):
    """Events of a job."""

    @extend_schema(responses=results_of(EventSerializer))
    def get(self, _request: Request, pk: int) -> Response:
        """List the events, oldest first."""
        return Response({"results": EventSerializer(selectors.events(self.job(pk)), many=True).data})


class ConfigurationView(JobView):
    """The order of a job."""

    @extend_schema(responses=ConfigurationSerializer)
    def get(self, _request: Request, pk: int) -> Response:
        """Return the script, arguments, image and datasets as ordered, and what changed since."""
        job = self.job(pk)
        return Response(ConfigurationSerializer({"job": job, "configuration": reruns.configuration(job)}).data)


class EnvironmentView(JobView):
    """Environment of a rank."""

    @extend_schema(responses=OpenApiTypes.OBJECT, parameters=[OpenApiParameter("rank", OpenApiTypes.INT, default=0)])
    def get(self, request: Request, pk: int) -> Response:
        """Return the variables of the environment contract for one rank. A port shown as 0 is chosen at the start."""
        return Response({"environment": selectors.environment(self.job(pk), _whole_number(request, "rank", 0))})


class ReceiptView(JobView):
    """Receipt of a job."""

    @extend_schema(responses=ReceiptSerializer)
    def get(self, _request: Request, pk: int) -> Response:
        """Return the receipt; 404 until the job has ended."""
        receipt = selectors.receipt(self.job(pk))
        if receipt is None:
            raise NotFound(_("The receipt is available when the job has ended."))
        return Response(ReceiptSerializer(receipt).data)


def _whole_number(request: Request, name: str, default: int) -> int:
    """Return a query parameter that is a whole number of at least 0. Raises InvalidInput."""
    try:
        number = int(request.query_params.get(name, default))
    except ValueError:
        number = -1
    if not 0 <= number < 10**MAX_NUMBER_DIGITS:
        raise InvalidInput(fields={name: _("Enter a whole number of at least 0.")})
    return number


def _is_set(request: Request, name: str) -> bool:
    """Whether a query parameter is switched on."""
    return request.query_params.get(name) in {"1", "true"}


urlpatterns = [
    path("services/distributed-training/activate/", ActivateView.as_view(), name="api_activate"),
    path("services/distributed-training/deactivate/", DeactivateView.as_view(), name="api_deactivate"),
    path("products/", ProductsView.as_view(), name="api_products"),
    path("quotes/", QuotesView.as_view(), name="api_quotes"),
    path("quotes/<uuid:quote_id>/", QuoteView.as_view(), name="api_quote"),
    path("quotes/<uuid:quote_id>/comparison/", QuoteComparisonView.as_view(), name="api_quote_comparison"),
    path("quotes/<uuid:quote_id>/environment/", QuoteEnvironmentView.as_view(), name="api_quote_environment"),
    path("orders/", OrdersView.as_view(), name="api_orders"),
    path("probes/", FreeEstimatesView.as_view(), name="api_probes"),
    path("jobs/", JobsView.as_view(), name="api_jobs"),
    path("jobs/<int:pk>/", JobDetailView.as_view(), name="api_job"),
    path("jobs/<int:pk>/cancel/", CancelView.as_view(), name="api_job_cancel"),
    path("jobs/<int:pk>/tensorboard/", TensorBoardView.as_view(), name="api_job_tensorboard"),
    path("jobs/<int:pk>/rerun/", RerunView.as_view(), name="api_job_rerun"),
    path("jobs/<int:pk>/logs/", LogsView.as_view(), name="api_job_logs"),
    path("jobs/<int:pk>/logs/search/", LogSearchView.as_view(), name="api_job_log_search"),
    path("jobs/<int:pk>/stream/", StreamView.as_view(), name="api_job_stream"),
    path("jobs/<int:pk>/metrics/", MetricsView.as_view(), name="api_job_metrics"),
    path("jobs/<int:pk>/curves/", CurvesView.as_view(), name="api_job_curves"),
    path("jobs/<int:pk>/packages/", PackagesView.as_view(), name="api_job_packages"),
    path("images/<str:name>/check/", ImageCheckView.as_view(), name="api_image_check"),
    path("jobs/<int:pk>/check/", CheckView.as_view(), name="api_job_check"),
    path("jobs/<int:pk>/telemetry/", TelemetryView.as_view(), name="api_job_telemetry"),
    path("jobs/<int:pk>/stacks/", StacksView.as_view(), name="api_job_stacks"),
    path("jobs/<int:pk>/diagnosis/", DiagnosisView.as_view(), name="api_job_diagnosis"),
    path("jobs/<int:pk>/events/", EventsView.as_view(), name="api_job_events"),
    path("jobs/<int:pk>/configuration/", ConfigurationView.as_view(), name="api_job_configuration"),
    path("jobs/<int:pk>/environment/", EnvironmentView.as_view(), name="api_job_environment"),
    path("jobs/<int:pk>/receipt/", ReceiptView.as_view(), name="api_job_receipt"),
]

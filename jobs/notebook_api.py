"""API of notebooks: quote, buy, watch, extend and stop.

OpenID clients with the scope `notebooks` may use it for a person.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.conf import settings
from django.urls import path, reverse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.generics import ListAPIView
from rest_framework.request import Request
from rest_framework.response import Response

from billing.api import LineSerializer
from billing.models import Quote
from billing.quotes import quote_for
from console.accounts.authentication import ClientTokenAuthentication
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.pagination import NewestFirst
from jobs import notebooks, orders, selectors
from jobs.api_input import idempotency_key, json_object
from jobs.models import Job
from jobs.purchase import NotebookExtensionRequestSerializer, NotebookQuoteRequestSerializer
from jobs.serializers import OrderRequestSerializer


class NotebookQuoteSerializer(serializers.ModelSerializer[Quote]):
    """A quote of a notebook. Its lines sum to the ceiling, for the whole time limit."""

    lines = LineSerializer(many=True)
    minimum_minor = serializers.IntegerField(
        source="terms.minimum_minor", help_text="A notebook that used any time costs at least this."
    )
    refusal = serializers.SerializerMethodField(
        help_text="Why the quote can't be bought now, for example a budget; empty if it can."
    )

    class Meta:
        model = Quote
        fields: tuple[str, ...] = (
            "id", "currency", "lines", "refusal", "minimum_minor", "ceiling_minor", "deadline_seconds", "expires_at",
        )  # fmt: skip

    def get_refusal(self, quote: Quote) -> str:
        """Return why the quote cannot be bought; empty if it can."""
        return orders.refusal(quote, quote.created_by)


class NotebookExtensionQuoteSerializer(NotebookQuoteSerializer):
    """A quote that extends a notebook. Lines, ceiling and time limit are those of its whole time."""

    added_minor = serializers.SerializerMethodField(help_text="What is held in addition: how far the ceiling rises.")

    class Meta(NotebookQuoteSerializer.Meta):
        fields = (*NotebookQuoteSerializer.Meta.fields, "added_minor")

    def get_added_minor(self, quote: Quote) -> int:
        """Return the amount that is added to the hold, in minor units."""
        return quote.ceiling_minor - orders.held_minor(quote)


class NotebookSerializer(serializers.ModelSerializer[Job]):
    """A notebook. A notebook is also a job: its id is the number of its receipt and log."""

    reason = serializers.ChoiceField(Job.Reasons.choices, allow_blank=True)
    workspace = serializers.CharField(source="workspace.name")
    image = serializers.CharField(source="image.name")
    node_spec = serializers.CharField(source="node_spec.name")
    url = serializers.SerializerMethodField(
        help_text="Opens JupyterLab in a browser that is logged in; empty while it does not run."
    )
    waiting_for = serializers.SerializerMethodField(help_text="Why it has not started; empty otherwise.")
    currency = serializers.CharField(source="order.quote.currency")
    cost_minor = serializers.SerializerMethodField(help_text="Cost so far, or in total once it has ended.")
    ceiling_minor = serializers.IntegerField(source="order.hold.amount_minor")
    idle_seconds = serializers.IntegerField(source="order.quote.purchase.idle_seconds")

    class Meta:
        model = Job
        fields = (
            "id", "name", "state", "reason", "waiting_for", "url", "workspace", "image", "node_spec", "idle_seconds",
            "deadline_seconds", "currency", "cost_minor", "ceiling_minor", "queued_at", "started_at", "finished_at",
            "placed_by",
        )  # fmt: skip
        read_only_fields = fields
        extra_kwargs: ClassVar = {
            "placed_by": {"help_text": "Who bought it: the number of the account, as `sub` of OpenID. Null: deleted."}
        }

    @extend_schema_field(OpenApiTypes.STR)
    def get_url(self, job: Job) -> str:
        """Return the address of the page that opens JupyterLab; empty if it does not run."""
        if notebooks.socket_of(job) is None:
            return ""
        return f"{settings.TRAINYARD_URL}{reverse('notebook_open', args=[job.pk])}"

    def get_waiting_for(self, job: Job) -> str:
        """Return why the notebook waits, as a sentence."""
        return selectors.waiting_for(job)

    def get_cost_minor(self, job: Job) -> int:
        """Return the cost in minor units."""
        return selectors.cost_minor(job)


class NotebookApiView(TenantView):
    """Base class of the views of notebooks."""

    authentication_classes = (ClientTokenAuthentication, *TenantView.authentication_classes)


class NotebookQuotesView(NotebookApiView):
    """Quotes of notebooks."""

    capabilities: ClassVar = {"POST": Capability.RUN}

    @extend_schema(request=NotebookQuoteRequestSerializer, responses={201: NotebookQuoteSerializer})
    def post(self, request: Request) -> Response:
        """Price a notebook. Nothing is bought."""
        quote = notebooks.quote_notebook(membership=self.membership, data=json_object(request))
        return Response(NotebookQuoteSerializer(quote).data, status=201)


class NotebooksView(NotebookApiView, ListAPIView[Job]):
    """Notebooks."""

    capabilities: ClassVar = {"GET": Capability.VIEW, "POST": Capability.RUN}
    serializer_class = NotebookSerializer
    queryset = Job.objects.none()  # only tells the API schema the model
    pagination_class = NewestFirst

    def get_queryset(self) -> Any:
        """List the organization's notebooks, newest first."""
        return notebooks.notebooks_for(self.organization)

    @extend_schema(
        request=OrderRequestSerializer,
        responses={201: NotebookSerializer},
        parameters=[OpenApiParameter("Idempotency-Key", OpenApiTypes.STR, OpenApiParameter.HEADER)],
    )
    def post(self, request: Request) -> Response:
        """Buy a notebook's quote: hold its ceiling and queue or extend it. A repeated key returns the same notebook."""
        form = OrderRequestSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        order = notebooks.place_notebook(
            membership=self.membership,
            quote=quote_for(organization=self.organization, quote_id=form.validated_data["quote"]),
            idempotency_key=idempotency_key(request),
        )
        return Response(NotebookSerializer(notebooks.notebook_for(self.organization, order.job.pk)).data, status=201)


class NotebookView(NotebookApiView):
    """One notebook."""

    capabilities: ClassVar = {"GET": Capability.VIEW}

    @extend_schema(responses=NotebookSerializer)
    def get(self, _request: Request, pk: int) -> Response:
        """Return state, address and cost."""
        return Response(NotebookSerializer(notebooks.notebook_for(self.organization, pk)).data)


class ExtendNotebookView(NotebookApiView):
    """More time for a notebook."""

    capabilities: ClassVar = {"POST": Capability.RUN}

    @extend_schema(request=NotebookExtensionRequestSerializer, responses={201: NotebookExtensionQuoteSerializer})
    def post(self, request: Request, pk: int) -> Response:
        """Price more time for a running notebook. Buy the quote as a notebook: nothing is held before."""
        job = notebooks.notebook_for(self.organization, pk)
        quote = notebooks.quote_extension(membership=self.membership, job=job, data=json_object(request))
        return Response(NotebookExtensionQuoteSerializer(quote).data, status=201)


class StopNotebookView(NotebookApiView):
    """The stop of a notebook."""

    capabilities: ClassVar = {"POST": Capability.RUN}

    @extend_schema(request=None, responses=NotebookSerializer)
    def post(self, _request: Request, pk: int) -> Response:
        """Stop a notebook. You pay for the time it used. Saved files stay in the workspace."""
        orders.cancel_job(membership=self.membership, job=notebooks.notebook_for(self.organization, pk))
        return Response(NotebookSerializer(notebooks.notebook_for(self.organization, pk)).data)


urlpatterns = [
    path("notebooks/quotes/", NotebookQuotesView.as_view(), name="api_notebook_quotes"),
    path("notebooks/", NotebooksView.as_view(), name="api_notebooks"),
    path("notebooks/<int:pk>/", NotebookView.as_view(), name="api_notebook"),
    path("notebooks/<int:pk>/extend/", ExtendNotebookView.as_view(), name="api_notebook_extend"),
    path("notebooks/<int:pk>/stop/", StopNotebookView.as_view(), name="api_notebook_stop"),
]

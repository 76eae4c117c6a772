"""The REST API of costs, budgets, credit, vouchers and invoices."""

from __future__ import annotations

from typing import Any

from django.db.models import prefetch_related_objects
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import path
from django.utils.translation import gettext as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from billing import budgets, costs, credit, exports, invoice_pdf, invoices
from billing.api.files import CsvRenderer, PdfRenderer
from billing.api.wallet import MAX_LISTED, LineSerializer, wallet_of_view
from billing.models import CreditGrant, Invoice, InvoiceLine
from console.accounts.models import Organization, User
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.errors import InvalidInput
from console.core.schema import results_of

MONTH = OpenApiParameter("month", str, description="For example 2026-11. Default: the current month.")


class ShareSerializer(serializers.Serializer[costs.Share]):
    """The cost of one member, workspace or node spec."""

    name = serializers.CharField()
    amount_minor = serializers.IntegerField()
    runs = serializers.IntegerField()


class CostsSerializer(serializers.Serializer[Any]):
    """A month's costs, in minor units."""

    month = serializers.CharField()
    currency = serializers.CharField()
    spent_minor = serializers.IntegerField()
    held_minor = serializers.IntegerField(help_text="Amount that open jobs hold now.")
    forecast_minor = serializers.IntegerField(allow_null=True, help_text="Only for the current month; otherwise null.")
    days = serializers.DictField(
        child=serializers.IntegerField(), help_text="Spend by day. Days without spend are left out."
    )
    by_member = ShareSerializer(many=True)
    by_workspace = ShareSerializer(many=True)
    by_node_spec = ShareSerializer(many=True)


class BudgetSerializer(serializers.Serializer[Any]):
    """A budget and the money committed this month, in minor units."""

    member = serializers.SerializerMethodField()
    amount_minor = serializers.IntegerField(source="budget.amount_minor")
    charged_minor = serializers.IntegerField()
    held_minor = serializers.IntegerField()
    left_minor = serializers.IntegerField()
    currency = serializers.CharField()

    def get_member(self, state: budgets.BudgetState) -> str | None:
        """Return the member's e-mail address; None for the organization's own budget."""
        return state.budget.user.email if state.budget.user else None


class BudgetRequestSerializer(serializers.Serializer[Any]):
    """A budget to set. Without an amount it is removed."""

    member = serializers.EmailField(
        required=False, allow_null=True, help_text="Address of a member. Null for the whole organization."
    )
    amount_minor = serializers.IntegerField(allow_null=True)


BUDGETS = results_of(BudgetSerializer)


class CreditSerializer(serializers.ModelSerializer[CreditGrant]):
    """A credit grant: its amount, use and expiry."""

    left_minor = serializers.IntegerField(read_only=True)

    class Meta:
        model = CreditGrant
        fields = (
            "id",
            "source",
            "reason",
            "amount_minor",
            "used_minor",
            "reserved_minor",
            "expired_minor",
            "left_minor",
            "expires_at",
            "created_at",
        )


class VoucherSerializer(serializers.Serializer[Any]):
    """A voucher's code."""

    code = serializers.CharField(max_length=64)


class InvoiceSerializer(serializers.ModelSerializer[Invoice]):
    """An invoice or (kind `note`) credit note, in minor units."""

    corrects = serializers.SlugRelatedField[Invoice](slug_field="number", read_only=True, allow_null=True)

    class Meta:
        model = Invoice
        fields = (
            "id",
            "kind",
            "number",
            "currency",
            "period_start",
            "period_end",
            "subtotal_minor",
            "credits_minor",
            "tax_name",
            "tax_percent",
            "tax_inclusive",
            "tax_minor",
            "total_minor",
            "corrects",
            "reason",
            "issued_at",
        )


class InvoiceLineSerializer(serializers.ModelSerializer[InvoiceLine]):
    """A receipt on an invoice."""

    lines = LineSerializer(many=True, source="receipt_lines")

    class Meta:
        model = InvoiceLine
        fields = ("position", "receipt", "title", "amount_minor", "credit_minor", "lines")


class InvoiceDetailSerializer(InvoiceSerializer):
    """An invoice with its lines."""

    lines = InvoiceLineSerializer(many=True)

    class Meta(InvoiceSerializer.Meta):
        fields = (*InvoiceSerializer.Meta.fields, "seller", "customer", "lines")  # type: ignore[assignment]  # more fields


class CostsView(TenantView):
    """Costs."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(parameters=[MONTH], responses=CostsSerializer)
    def get(self, request: Request) -> Response:
        """Return a month's costs by day, member, workspace or node spec."""
        account, month = wallet_of_view(self), costs.parse_month(request.query_params.get("month", ""))
        spends = costs.spending(self.organization, month)
        days = costs.by_day(spends, month, "node_spec").days  # any dimension will do: the amounts are summed below
        spent_minor = sum(spend.amount_minor for spend in spends)
        shares = {f"by_{name}": costs.shares_by(spends, name) for name in costs.DIMENSIONS}
        data = {
            "month": month.name,
            "currency": account.currency,
            "spent_minor": spent_minor,
            "held_minor": account.held_minor,
            "forecast_minor": costs.forecast(self.organization, spent_minor).total_minor if month.is_current else None,
            "days": {day.isoformat(): sum(amounts) for day, amounts in days.items() if any(amounts)},
            **shares,
        }
        return Response(CostsSerializer(data).data)


class CostsFileView(TenantView):
    """Costs as a file."""

    capabilities = {"GET": Capability.VIEW}
    renderer_classes = [JSONRenderer, CsvRenderer]

    @extend_schema(parameters=[MONTH], responses={(200, "text/csv"): OpenApiTypes.STR})
    def get(self, request: Request) -> StreamingHttpResponse:
        """Return a month's receipts as CSV, a row per line."""
        month = costs.parse_month(request.query_params.get("month", ""))
        receipts = costs.receipts(self.organization, month).select_related("hold__placed_by")
        return StreamingHttpResponse(exports.costs_csv(receipts.iterator(chunk_size=500)), content_type="text/csv")


class BudgetsView(TenantView):
    """Budgets."""

    capabilities = {"GET": Capability.VIEW, "PUT": Capability.PAY}

    @extend_schema(responses=BUDGETS)
    def get(self, _request: Request) -> Response:
        """List the budgets with the money committed."""
        return Response({"results": BudgetSerializer(budgets.states(self.organization), many=True).data})

    @extend_schema(request=BudgetRequestSerializer, responses=BUDGETS)
    def put(self, request: Request) -> Response:
        """Set, change or remove a budget."""
        form = BudgetRequestSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        budgets.set_budget(
            membership=self.membership,
            user=_member(self.organization, form.validated_data.get("member")),
            amount_minor=form.validated_data["amount_minor"],
        )
        return self.get(request)


class CreditsView(TenantView):
    """Credit."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(responses=results_of(CreditSerializer))
    def get(self, _request: Request) -> Response:
        """List the credits in the order in which they are spent."""
        return Response({"results": CreditSerializer(credit.lots_of(self.organization), many=True).data})


class VoucherView(TenantView):
    """Vouchers."""

    capabilities = {"POST": Capability.PAY}

    @extend_schema(request=VoucherSerializer, responses={201: CreditSerializer})
    def post(self, request: Request) -> Response:
        """Redeem a voucher code. Returns the credit."""
        form = VoucherSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        lot = credit.redeem(account=wallet_of_view(self), code=form.validated_data["code"], user=self.membership.user)
        return Response(CreditSerializer(lot).data, status=201)


class InvoicesView(TenantView):
    """Invoices."""

    capabilities = {"GET": Capability.PAY, "POST": Capability.PAY}

    @extend_schema(operation_id="invoices_list", responses=results_of(InvoiceSerializer))
    def get(self, _request: Request) -> Response:
        """List the last 100 invoices and credit notes."""
        newest = invoices.invoices_for(self.organization)[:MAX_LISTED]
        return Response({"results": InvoiceSerializer(newest, many=True).data})

    @extend_schema(request=None, responses={201: InvoiceSerializer, 204: None})
    def post(self, _request: Request) -> Response:
        """Issue an invoice for all uninvoiced charges. Returns 204 if there are none."""
        invoice = invoices.issue(organization=self.organization, user=self.membership.user)
        return Response(status=204) if invoice is None else Response(InvoiceSerializer(invoice).data, status=201)


class InvoiceView(TenantView):
    """One invoice."""

    capabilities = {"GET": Capability.PAY}

    @extend_schema(responses=InvoiceDetailSerializer)
    def get(self, _request: Request, pk: int) -> Response:
        """Return an invoice with its lines."""
        invoice = invoices.invoice_for(self.organization, pk)
        prefetch_related_objects([invoice], "lines__receipt")
        return Response(InvoiceDetailSerializer(invoice).data)


class InvoicePdfView(TenantView):
    """One invoice as a file."""

    capabilities = {"GET": Capability.PAY}
    renderer_classes = [JSONRenderer, PdfRenderer]

    @extend_schema(
        parameters=[OpenApiParameter("language", str, description="`en` or `zh-hans`.")],
        responses={(200, "application/pdf"): OpenApiTypes.BINARY},
    )
    def get(self, request: Request, pk: int) -> HttpResponse:
        """Return an invoice as PDF."""
        invoice = invoices.invoice_for(self.organization, pk)
        content = invoice_pdf.pdf(invoice=invoice, language=request.query_params.get("language", "en"))
        return HttpResponse(content, content_type="application/pdf")


class InvoiceCsvView(TenantView):
    """One invoice as a file."""

    capabilities = {"GET": Capability.PAY}
    renderer_classes = [JSONRenderer, CsvRenderer]

    @extend_schema(responses={(200, "text/csv"): OpenApiTypes.STR})
    def get(self, _request: Request, pk: int) -> StreamingHttpResponse:
        """Return an invoice as CSV, a row per receipt line."""
        invoice = invoices.invoice_for(self.organization, pk)
        return StreamingHttpResponse(exports.invoice_csv(invoice), content_type="text/csv")


def _member(organization: Organization, email: str | None) -> User | None:
    """Return the member with this address. Without an address, return None, which means the organization.

    Raises InvalidInput if no member has the address.
    """
    if not email:
        return None
    # Stored addresses are in lower case.
    membership = organization.memberships.filter(user__email=email.lower()).select_related("user").first()
    if membership is None:
        raise InvalidInput(fields={"member": _("No member of your organization has this address.")})
    return membership.user


urlpatterns = [
    path("costs/", CostsView.as_view(), name="api_costs"),
    path("costs/csv/", CostsFileView.as_view(), name="api_costs_csv"),
    path("budgets/", BudgetsView.as_view(), name="api_budgets"),
    path("credits/", CreditsView.as_view(), name="api_credits"),
    path("vouchers/redeem/", VoucherView.as_view(), name="api_vouchers"),
    path("invoices/", InvoicesView.as_view(), name="api_invoices"),
    path("invoices/<int:pk>/", InvoiceView.as_view(), name="api_invoice"),
    path("invoices/<int:pk>/pdf/", InvoicePdfView.as_view(), name="api_invoice_pdf"),
    path("invoices/<int:pk>/csv/", InvoiceCsvView.as_view(), name="api_invoice_csv"),
]

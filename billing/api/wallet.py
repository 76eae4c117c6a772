"""The REST API of the wallet, top-ups, holds, receipts and node specs."""

from __future__ import annotations

from typing import Any

from django.urls import path
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing import credit, payments, selectors
from billing.errors import NoWallet
from billing.messages import line_title
from billing.models import Account, Hold, Receipt, TopUp
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.schema import results_of

MAX_LISTED = 100
"""Largest number of rows in a list without pages, the newest first. The exports have all of them."""


class WalletSerializer(serializers.Serializer[Account]):
    """A wallet; amounts in the currency's minor unit."""

    currency = serializers.CharField()
    posted_minor = serializers.IntegerField(help_text="Balance: payments and credit less charges.")
    held_minor = serializers.IntegerField(help_text="Held for runs that have not ended.")
    available_minor = serializers.IntegerField(help_text="Balance less held amount: can be spent now.")
    credit_minor = serializers.SerializerMethodField(help_text="Promotional credit in the available amount.")

    def get_credit_minor(self, account: Account) -> int:
        """Return the promotional credit, which is spent first."""
        return credit.credit_minor(account)


class TopUpRequestSerializer(serializers.Serializer[Any]):
    """A top-up to start."""

    amount_minor = serializers.IntegerField()
    save_card = serializers.BooleanField(default=False, help_text="Save the card for automatic top-ups.")


class TopUpSerializer(serializers.ModelSerializer[TopUp]):
    """A top-up; pay it at `checkout_url`."""

    class Meta:
        model = TopUp
        fields = ("id", "state", "amount_minor", "currency", "checkout_url", "created_at", "paid_at")


class DiscountSerializer(serializers.Serializer[Any]):
    """The price per node-hour for runs of this many nodes or more."""

    nodes_from = serializers.IntegerField()
    hourly_minor = serializers.DecimalField(14, 4, coerce_to_string=True)


class NodeSpecSerializer(serializers.Serializer[Any]):
    """A node spec with its price per node-hour (minor units, decimal; null if it has none)."""

    name = serializers.CharField(source="spec.name")
    title = serializers.CharField(source="spec.title")
    description = serializers.CharField(source="spec.description")
    cpus = serializers.FloatField(source="spec.cpus")
    memory_mib = serializers.IntegerField(source="spec.memory_mib")
    gpus = serializers.IntegerField(source="spec.gpus")
    gpu_type = serializers.CharField(source="spec.gpu_type")
    hourly_minor = serializers.DecimalField(14, 4, allow_null=True, coerce_to_string=True)
    discounts = DiscountSerializer(many=True, help_text="Prices of runs with more nodes.")
    currency = serializers.CharField()


class LineSerializer(serializers.Serializer[dict[str, Any]]):
    """A line of a quote or receipt. `rule` is a stable code, `title` its translated name."""

    rule = serializers.CharField()
    title = serializers.SerializerMethodField()
    quantity = serializers.CharField()
    unit = serializers.CharField()
    unit_minor = serializers.CharField(help_text="Price of one unit in minor units, with decimals.")
    amount_minor = serializers.IntegerField()
    began_at = serializers.SerializerMethodField(
        help_text="Start of the time range (ISO 8601); empty for lines without one."
    )
    ended_at = serializers.SerializerMethodField(help_text="End of the time range (ISO 8601).")
    nodes = serializers.SerializerMethodField(help_text="Number of running nodes; 0 if it does not apply.")
    evidence = serializers.SerializerMethodField(help_text="Why a line is free: the node, the time and the failure.")

    def get_began_at(self, line: dict[str, Any]) -> str:
        """Return the start of the time range."""
        return str(line.get("began_at", ""))

    def get_ended_at(self, line: dict[str, Any]) -> str:
        """Return the end of the time range."""
        return str(line.get("ended_at", ""))

    def get_nodes(self, line: dict[str, Any]) -> int:
        """Return the number of nodes."""
        return int(line.get("nodes", 0))

    def get_evidence(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return why the line is free, as codes and numbers."""
        return dict(line.get("evidence", {}))

    def get_title(self, line: dict[str, Any]) -> str:
        """Return the translated name of the rule."""
        return line_title(line)


class ReceiptSerializer(serializers.ModelSerializer[Receipt]):
    """A receipt: its lines, their total, and the ceiling."""

    lines = LineSerializer(many=True)

    class Meta:
        model = Receipt
        fields = ("id", "title", "currency", "lines", "total_minor", "ceiling_minor", "created_at")


class HoldSerializer(serializers.ModelSerializer[Hold]):
    """A hold: money reserved for a run."""

    class Meta:
        model = Hold
        fields = ("reference", "amount_minor", "metered_minor", "state", "created_at")


class WalletView(TenantView):
    """The organization's wallet."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(responses=WalletSerializer)
    def get(self, _request: Request) -> Response:
        """Return the balance, the held and the available amount."""
        return Response(WalletSerializer(wallet_of_view(self)).data)


class TopUpView(TenantView):
    """Top-ups. An open one has the address of its payment page, which only members who may pay see."""

    capabilities = {"GET": Capability.PAY, "POST": Capability.PAY}

    @extend_schema(responses=results_of(TopUpSerializer))
    def get(self, _request: Request) -> Response:
        """List the last 100 top-ups."""
        newest = wallet_of_view(self).top_ups.order_by("-created_at")[:MAX_LISTED]
        return Response({"results": TopUpSerializer(newest, many=True).data})

    @extend_schema(request=TopUpRequestSerializer, responses={201: TopUpSerializer})
    def post(self, request: Request) -> Response:
        """Start a top-up. Returns the URL of its payment page."""
        form = TopUpRequestSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        top_up = payments.start_top_up(
            account=wallet_of_view(self),
            amount_minor=form.validated_data["amount_minor"],
            user=self.membership.user,
            save_card=form.validated_data["save_card"],
        )
        return Response(TopUpSerializer(top_up).data, status=201)


class HoldsView(TenantView):
    """Open holds."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(responses=results_of(HoldSerializer))
    def get(self, _request: Request) -> Response:
        """List the open holds."""
        return Response({"results": HoldSerializer(selectors.open_holds(self.organization), many=True).data})


class ReceiptsView(TenantView):
    """Receipts."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(responses=results_of(ReceiptSerializer))
    def get(self, _request: Request) -> Response:
        """List the last 100 receipts."""
        newest = selectors.receipts_for(self.organization)[:MAX_LISTED]
        return Response({"results": ReceiptSerializer(newest, many=True).data})


class NodeSpecsView(TenantView):
    """Node specs on offer."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(responses=results_of(NodeSpecSerializer))
    def get(self, _request: Request) -> Response:
        """List the node specs on offer, in the order of the console's pages."""
        account = selectors.wallet(self.organization)
        currency = account.currency if account else selectors.default_currency()
        return Response({"results": NodeSpecSerializer(selectors.offered_specs(currency), many=True).data})


def wallet_of_view(view: TenantView) -> Account:
    """Return the wallet of the organization that sent the request. Raises NoWallet."""
    account = selectors.wallet(view.organization)
    if account is None:
        raise NoWallet
    return account


urlpatterns = [
    path("wallet/", WalletView.as_view(), name="api_wallet"),
    path("wallet/top-ups/", TopUpView.as_view(), name="api_top_ups"),
    path("wallet/holds/", HoldsView.as_view(), name="api_holds"),
    path("wallet/receipts/", ReceiptsView.as_view(), name="api_receipts"),
    path("node-specs/", NodeSpecsView.as_view(), name="api_node_specs"),
]

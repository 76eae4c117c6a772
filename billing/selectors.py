"""Read-only queries of billing: wallet, entries, holds, receipts, node specs on offer."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from django.conf import settings
from django.db.models import QuerySet

from billing.errors import NotPriced
from billing.models import Account, Entry, Hold, NodeSpec, Receipt
from billing.pricebooks import current_book
from billing.pricing import PriceKind
from console.accounts.models import Organization
from console.core.errors import NotFound


def wallet(organization: Organization) -> Account | None:
    """Return the organization's wallet, or None until the organization activates the service, which creates it."""
    return _wallet_of(organization, Account.objects.all())


def wallet_with_settings(organization: Organization) -> Account | None:
    """Return the wallet with its automatic top-up and storage balance, which pages about money show, in one query."""
    return _wallet_of(organization, Account.objects.select_related("auto_top_up", "storage_balance"))


def _wallet_of(organization: Organization, accounts: QuerySet[Account]) -> Account | None:
    # `get`, because every page reads a wallet: `first` would add an ORDER BY, for which Django hashes each column.
    try:
        return accounts.get(organization=organization, kind=Account.Kinds.WALLET)
    except Account.DoesNotExist:
        return None


def default_currency() -> str:
    """Return the currency of new wallets."""
    return str(settings.CURRENCY)


def wallet_entries(account: Account) -> QuerySet[Entry]:
    """Return a wallet's entries, newest first, with `transaction` loaded."""
    return Entry.objects.filter(account=account).select_related("transaction").order_by("-id")


def open_holds(organization: Organization) -> QuerySet[Hold]:
    """Return the open holds, newest first, with `account` and `quote` loaded."""
    holds = Hold.objects.filter(account__organization=organization, state=Hold.States.HELD)
    return holds.select_related("account", "quote").order_by("-id")


def receipts_for(organization: Organization) -> QuerySet[Receipt]:
    """Return all receipts of an organization, newest first, with `hold` loaded."""
    return Receipt.objects.filter(organization=organization).select_related("hold").order_by("-id")


def receipt_for(organization: Organization, pk: int) -> Receipt:
    """Return one receipt. Raises NotFound if it does not exist or belongs to another organization."""
    receipt = receipts_for(organization).filter(pk=pk).first()
    if receipt is None:
        raise NotFound
    return receipt


@dataclass(frozen=True)
class PriceTier:
    """The price per node-hour in minor units for runs of `nodes_from` nodes or more, up to the next tier."""

    nodes_from: int
    hourly_minor: Decimal


@dataclass(frozen=True)
class OfferedSpec:
    """A node spec with its current price per node-hour in minor units, None if it has no price.

    `hourly_minor` is the price of a run on one node, `discounts` are the prices of runs on more nodes.
    """

    spec: NodeSpec
    hourly_minor: Decimal | None
    currency: str
    discounts: tuple[PriceTier, ...] = ()


def offered_specs(currency: str) -> list[OfferedSpec]:
    """Return the active node specs with their prices, ordered as the operator arranged them."""
    tiers: dict[int | None, list[PriceTier]] = {}  # by node spec id, from the fewest nodes up
    try:
        book = current_book(currency=currency)
    except NotPriced:
        pass  # the specs are shown without a price
    else:
        # Without a product: a price of one product replaces the general price only in quotes for that product.
        for price in book.prices.filter(kind=PriceKind.NODE_HOUR, product="").order_by("nodes_from"):
            tiers.setdefault(price.node_spec_id, []).append(PriceTier(price.nodes_from, price.amount))
    specs = NodeSpec.objects.filter(is_active=True).order_by("position", "name")
    return [_offered_spec(spec, tiers.get(spec.pk, []), currency) for spec in specs]


def _offered_spec(spec: NodeSpec, tiers: list[PriceTier], currency: str) -> OfferedSpec:
    """Return a node spec with the prices of its tiers, given from the fewest nodes up."""
    # `pricebooks.publish` requires a price from one node on for each node spec, so the first tier is the base price.
    return OfferedSpec(spec, tiers[0].hourly_minor if tiers else None, currency, tuple(tiers[1:]))

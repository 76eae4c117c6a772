"""Read-only queries of billing: wallet, entries, holds, receipts, node specs on offer."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from django.conf import settings
from django.db.models import QuerySet, Subquery

from billing.errors import NotPriced
from billing.models import Account, Entry, Hold, NodeSpec, Receipt
from billing.pricebooks import current_book
from billing.pricing import PriceKind
from console.accounts.models import Organization
from console.core.errors import NotFound


def wallet(organization: Organization) -> Account | None:
    """Return the organization's wallet, or None before the service is activated."""
    return Account.objects.filter(organization=organization, kind=Account.Kinds.WALLET).first()


def default_currency() -> str:
    """Return the currency of new wallets."""
    return str(settings.CURRENCY)


def movements(organization: Organization) -> QuerySet[Entry]:
    """Return the wallet's entries, newest first, with `transaction` and `account` loaded."""
    # A subquery, not a join: the index of the account's entries then gives the newest ones without sorting all.
    wallets = Account.objects.filter(organization=organization, kind=Account.Kinds.WALLET)
    entries = Entry.objects.filter(account=Subquery(wallets.values("pk")[:1]))
    return entries.select_related("transaction", "account").order_by("-id")


def open_holds(organization: Organization) -> QuerySet[Hold]:
    """Return the open holds, with their quotes loaded."""
    return Hold.objects.filter(account__organization=organization, state=Hold.States.HELD).select_related(
        "account", "quote"
    )


def receipts_for(organization: Organization) -> QuerySet[Receipt]:
    """Return all receipts, newest first, with their holds loaded."""
    return Receipt.objects.filter(organization=organization).select_related("hold")


def receipt_for(organization: Organization, pk: int) -> Receipt:
    """Return one receipt. Raises NotFound if it belongs to another organization."""
    receipt = receipts_for(organization).filter(pk=pk).first()
    if receipt is None:
        raise NotFound
    return receipt


@dataclass(frozen=True)
class Discount:
    """The price per node-hour in minor units for runs of `nodes_from` nodes or more."""

    nodes_from: int
    hourly_minor: Decimal


@dataclass(frozen=True)
class OfferedSpec:
    """A node spec with its current price per node-hour in minor units, None if it has no price."""

    spec: NodeSpec
    hourly_minor: Decimal | None
    currency: str
    discounts: tuple[Discount, ...] = ()


def offered_specs(currency: str) -> list[OfferedSpec]:
    """Return the active node specs with their prices, in catalogue order."""
    tiers: dict[int | None, list[Discount]] = {}
    try:
        book = current_book(currency=currency)
    except NotPriced:
        pass  # the specs are shown without a price
    else:
        for price in book.prices.filter(kind=PriceKind.NODE_HOUR, product="").order_by("nodes_from"):
            tiers.setdefault(price.node_spec_id, []).append(Discount(price.nodes_from, price.amount))
    return [_offered(spec, tiers.get(spec.pk, []), currency) for spec in NodeSpec.objects.filter(is_active=True)]


def _offered(spec: NodeSpec, tiers: list[Discount], currency: str) -> OfferedSpec:
    return OfferedSpec(spec, tiers[0].hourly_minor if tiers else None, currency, tuple(tiers[1:]))

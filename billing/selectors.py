"""Reads of billing: the wallet, what moved, what is held, receipts, offers. No write happens here."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from django.conf import settings
from django.db.models import QuerySet

from billing.errors import NotPriced
from billing.models import Account, Entry, Hold, NodeSpec, Receipt
from billing.pricebooks import current_book
from billing.pricing import PriceKind
from console.accounts.errors import NotFound
from console.accounts.models import Organization
from console.operations.kept import Kept, given

_WALLET = Kept(lambda: Account.objects.filter(organization=given("organization"), kind=Account.Kinds.WALLET))


def wallet(organization: Organization) -> Account | None:
    """The organization's wallet; None before its service was activated."""
    return _WALLET.first(organization=organization)


def default_currency() -> str:
    """The currency of wallets still to be made."""
    return str(settings.CURRENCY)


def movements(organization: Organization) -> QuerySet[Entry]:
    """What moved in the wallet, newest first; `transaction` is loaded."""
    return (
        Entry.objects.filter(account__organization=organization, account__kind=Account.Kinds.WALLET)
        .select_related("transaction", "account")
        .order_by("-id")
    )


def open_holds(organization: Organization) -> QuerySet[Hold]:
    """What is held now, and for which purchase."""
    return Hold.objects.filter(account__organization=organization, state=Hold.States.HELD).select_related(
        "account", "quote"
    )


def receipts_for(organization: Organization) -> QuerySet[Receipt]:
    """Every receipt, newest first."""
    return Receipt.objects.filter(organization=organization).select_related("hold")


def receipt_for(organization: Organization, pk: int) -> Receipt:
    """One receipt. Raises NotFound for another organization's."""
    receipt = receipts_for(organization).filter(pk=pk).first()
    if receipt is None:
        raise NotFound
    return receipt


@dataclass(frozen=True)
class OfferedSpec:
    """A node spec with its price for one node and hour, in minor units; None where it has none now."""

    spec: NodeSpec
    hourly_minor: Decimal | None
    currency: str


def offered_specs(currency: str) -> list[OfferedSpec]:
    """What can be bought now, in the order of the catalogue."""
    try:
        book = current_book(currency=currency)
    except NotPriced:
        prices = {}
    else:
        prices = {
            price.node_spec_id: price.amount
            for price in book.prices.filter(kind=PriceKind.NODE_HOUR, product="").order_by("-nodes_from")
        }
    return [OfferedSpec(spec, prices.get(spec.pk), currency) for spec in NodeSpec.objects.filter(is_active=True)]

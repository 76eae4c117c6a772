"""Which prices hold when. The one rule: a published book is never edited, only superseded from a date on."""

from __future__ import annotations

from datetime import datetime

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from billing.currencies import SUPPORTED
from billing.errors import BookRefused, NotPriced
from billing.models import NodeSpec, Price, PriceBook
from billing.pricing import PriceKind, PriceRow
from console.operations.kept import Kept, given

NAME_LIMIT = 100
_BOOK = Kept(
    lambda: PriceBook.objects.filter(
        currency=given("currency"), published_at__isnull=False, effective_from__lte=given("at")
    ).order_by("-effective_from")
)
_PRICES = Kept(lambda: Price.objects.filter(book=given("book")).select_related("node_spec"))


def current_book(*, currency: str, at: datetime | None = None) -> PriceBook:
    """The published book that holds at a moment (now). Raises NotPriced when none does."""
    book = _BOOK.first(currency=currency, at=at or timezone.now())
    if book is None:
        raise NotPriced(_("There are no prices in %(currency)s yet. Ask the administrator.") % {"currency": currency})
    return book


def price_rows(book: PriceBook) -> list[PriceRow]:
    """A book's prices as plain data for `pricing`."""
    return [
        PriceRow(
            kind=PriceKind(price.kind),
            amount=price.amount,
            product=price.product,
            node_spec=price.node_spec.name if price.node_spec else "",
            nodes_from=price.nodes_from,
        )
        for price in _PRICES.all(book=book)
    ]


def price_name(price: Price) -> str:
    """A price as an administrator knows it: what it is per, of which product and node spec, from how many nodes."""
    parts = [
        str(Price.Kinds(price.kind).label),
        price.node_spec.name if price.node_spec else "",
        _("product %(name)s") % {"name": price.product} if price.product else _("every product"),
        _("from %(nodes)d nodes") % {"nodes": price.nodes_from} if price.nodes_from > 1 else "",
    ]
    return ", ".join(part for part in parts if part)


def faults(book: PriceBook) -> list[str]:
    """Why a draft can't be published, each naming its price: what is missing, what is there twice. Empty: nothing."""
    if book.currency not in SUPPORTED:
        return [_("No payments can be taken in %(currency)s. Choose another currency.") % {"currency": book.currency}]
    prices = list(book.prices.select_related("node_spec"))
    known = {_key(price) for price in prices}
    specs = {spec.pk: spec for spec in NodeSpec.objects.filter(is_active=True)}
    missing = [
        Price(kind=PriceKind.NODE_HOUR, node_spec=spec)
        for spec in specs.values()
        if (PriceKind.NODE_HOUR, "", spec.pk, 1) not in known
    ]
    # A price from several nodes on says nothing of fewer; and a product sold by the epoch needs each node spec's price.
    for price in prices:
        first = (PriceKind(price.kind), price.product, price.node_spec_id, 1)
        general = (PriceKind(price.kind), "", price.node_spec_id, 1)
        if price.nodes_from > 1 and first not in known and general not in known:
            missing.append(Price(kind=price.kind, product=price.product, node_spec=price.node_spec))
    sold_fixed = {price.product for price in prices if price.kind == PriceKind.FIXED_EPOCH}
    missing += [
        Price(kind=PriceKind.FIXED_EPOCH, product=product, node_spec=spec)
        for product in sorted(sold_fixed)
        for spec in specs.values()
        if not {(PriceKind.FIXED_EPOCH, product, spec.pk, 1), (PriceKind.FIXED_EPOCH, "", spec.pk, 1)} & known
    ]
    missing += _no_longer_priced(book, known, set(specs))
    names = dict.fromkeys(price_name(price) for price in missing)
    return [_("This price is missing: %(price)s.") % {"price": name} for name in names]


def _no_longer_priced(
    book: PriceBook, known: set[tuple[PriceKind, str, int | None, int]], specs: set[int]
) -> list[Price]:
    """What the book that holds now prices by the epoch and the draft does not: it could not be sold any more."""
    holds_now = (
        PriceBook.objects.filter(currency=book.currency, published_at__isnull=False, effective_from__lte=timezone.now())
        .order_by("-effective_from")
        .first()
    )
    return [
        price
        for price in (holds_now.prices.select_related("node_spec") if holds_now else ())
        if price.kind == PriceKind.FIXED_EPOCH and price.node_spec_id in specs
        if price.nodes_from == 1
        and _key(price) not in known
        and (PriceKind.FIXED_EPOCH, "", price.node_spec_id, 1) not in known
    ]


def _key(price: Price) -> tuple[PriceKind, str, int | None, int]:
    return PriceKind(price.kind), price.product, price.node_spec_id, price.nodes_from


@transaction.atomic
def publish(*, book: PriceBook, effective_from: datetime | None = None) -> PriceBook:
    """Make a draft hold from a moment (now, at the earliest).

    Raises BookRefused, at the field where one is at fault.
    """
    book = PriceBook.objects.select_for_update().get(pk=book.pk)
    now = timezone.now()
    starts = effective_from or book.effective_from or now
    if book.published_at:
        raise BookRefused(_("This book is published already. Copy it to change a price."))
    if effective_from and effective_from < now:
        raise BookRefused(_("Choose a date to come: prices can't change for the past."))
    starts = max(starts, now)
    if found := faults(book):
        raise BookRefused(" ".join(found))
    same = PriceBook.objects.filter(currency=book.currency, effective_from=starts, published_at__isnull=False).first()
    if same:
        raise BookRefused(
            _("%(book)s begins at the same moment: two books can't hold at once. Choose another date.") % {"book": same}
        )
    book.effective_from = starts
    book.published_at = now
    book.save(update_fields=["effective_from", "published_at"])
    return book


@transaction.atomic
def copy(*, book: PriceBook) -> PriceBook:
    """A draft with the same prices, to change and publish."""
    name = _("Copy of %(name)s") % {"name": book.name}
    draft = PriceBook.objects.create(name=name[:NAME_LIMIT], currency=book.currency)
    Price.objects.bulk_create(
        Price(
            book=draft,
            kind=price.kind,
            product=price.product,
            node_spec=price.node_spec,
            nodes_from=price.nodes_from,
            amount=price.amount,
        )
        for price in book.prices.select_related("node_spec")
    )
    return draft

"""Price books: drafts, publication, and the book in effect. A published book is never edited, only superseded."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from billing.currencies import SUPPORTED
from billing.errors import BookRefused, NotPriced
from billing.models import NodeSpec, Price, PriceBook
from billing.pricing import PriceKind, PriceRow

NAME_LIMIT = 100
"""Most characters of a book's name: the length of the column."""


def current_book(*, currency: str, at: datetime | None = None) -> PriceBook:
    """Return the published book in effect at a time (default: now). Raises NotPriced if there is none."""
    published = PriceBook.objects.filter(currency=currency, published_at__isnull=False)
    book = published.filter(effective_from__lte=at or timezone.now()).order_by("-effective_from").first()
    if book is None:
        raise NotPriced(
            _("There are no prices in %(currency)s yet. Ask the administrator to add them.") % {"currency": currency}
        )
    return book


def price_rows(book: PriceBook) -> list[PriceRow]:
    """Return a book's prices as plain data for `pricing`."""
    return [
        PriceRow(
            kind=PriceKind(price.kind),
            amount=price.amount,
            product=price.product,
            node_spec=price.node_spec.name if price.node_spec else "",
            nodes_from=price.nodes_from,
        )
        for price in Price.objects.filter(book=book).select_related("node_spec")
    ]


def price_name(price: Price) -> str:
    """Return the translated name of a price: its kind, node spec, product and minimum number of nodes."""
    parts = [
        str(Price.Kinds(price.kind).label),
        price.node_spec.name if price.node_spec else "",
        _("product %(name)s") % {"name": price.product} if price.product else _("every product"),
        _("from %(nodes)d nodes") % {"nodes": price.nodes_from} if price.nodes_from > 1 else "",
    ]
    return ", ".join(part for part in parts if part)


class PriceKey(NamedTuple):
    """The purchases that a price applies to. Unique in a book.

    An empty `product` stands for all products. `node_spec_id` is None for kinds of prices that name no node spec.
    """

    kind: PriceKind
    product: str
    node_spec_id: int | None
    nodes_from: int = 1


def problems(book: PriceBook, *, starts_at: datetime) -> list[str]:
    """Return the reasons why a draft cannot take effect at `starts_at`, each naming its price. Empty if it can."""
    if book.currency not in SUPPORTED:
        return [_("Payments in %(currency)s are not available. Choose another currency.") % {"currency": book.currency}]
    prices = list(book.prices.select_related("node_spec"))
    priced = {_key(price) for price in prices}  # the keys of all prices in the draft
    specs = {spec.pk: spec for spec in NodeSpec.objects.filter(is_active=True)}
    # Each offered node spec needs a node-hour price for all products. The rows of `missing` are never saved: they are
    # for `price_name`, which takes a row and names the missing price in the message.
    missing = [
        Price(kind=PriceKind.NODE_HOUR, node_spec=spec)
        for spec in specs.values()
        if PriceKey(PriceKind.NODE_HOUR, "", spec.pk) not in priced
    ]
    # A price that applies only from several nodes on needs a price from one node on, for runs on fewer nodes.
    missing += [
        Price(kind=price.kind, product=price.product, node_spec=price.node_spec)
        for price in prices
        if price.nodes_from > 1 and not _is_priced(_key(price)._replace(nodes_from=1), priced)
    ]
    # A product with a fixed price on some node spec needs one on every offered node spec.
    fixed_products = {price.product for price in prices if price.kind == PriceKind.FIXED_EPOCH}
    missing += [
        Price(kind=PriceKind.FIXED_EPOCH, product=product, node_spec=spec)
        for product in sorted(fixed_products)
        for spec in specs.values()
        if not _is_priced(PriceKey(PriceKind.FIXED_EPOCH, product, spec.pk), priced)
    ]
    missing += _no_longer_priced(book, priced, set(specs), starts_at)
    names = dict.fromkeys(price_name(price) for price in missing)
    return [_("A price is missing: %(price)s. Add it.") % {"price": name} for name in names]


def _no_longer_priced(book: PriceBook, priced: set[PriceKey], spec_ids: set[int], starts_at: datetime) -> list[Price]:
    """Return the fixed prices of the book that the draft replaces, without those that the draft prices too.

    The products of the returned prices could no longer be sold under the draft. The replaced book is the book in effect
    at `starts_at`. `priced` has the keys of the draft's prices, `spec_ids` the ids of the offered node specs.
    """
    try:
        replaced = current_book(currency=book.currency, at=starts_at)
    except NotPriced:
        return []
    fixed_prices = replaced.prices.filter(kind=PriceKind.FIXED_EPOCH, nodes_from=1, node_spec__in=spec_ids)
    return [price for price in fixed_prices.select_related("node_spec") if not _is_priced(_key(price), priced)]


def _is_priced(key: PriceKey, priced: set[PriceKey]) -> bool:
    """Return whether there is a price for the product of `key`, or in its place a price for all products."""
    return key in priced or key._replace(product="") in priced


def _key(price: Price) -> PriceKey:
    return PriceKey(PriceKind(price.kind), price.product, price.node_spec_id, price.nodes_from)


@transaction.atomic
def publish(*, book: PriceBook, effective_from: datetime | None = None) -> PriceBook:
    """Publish a draft. It takes effect at `effective_from`, or at the draft's own date, or now; never in the past.

    Raises BookRefused.
    """
    book = PriceBook.objects.select_for_update().get(pk=book.pk)
    now = timezone.now()
    starts_at = effective_from or book.effective_from or now
    if book.published_at:
        raise BookRefused(_("This price book is already published. Copy it to change a price."))
    if effective_from and effective_from < now:
        raise BookRefused(_("Choose a date in the future. Past prices can't change."))
    starts_at = max(starts_at, now)  # the draft's own date may have passed
    if sentences := problems(book, starts_at=starts_at):
        raise BookRefused(" ".join(sentences))
    simultaneous = PriceBook.objects.filter(
        currency=book.currency, effective_from=starts_at, published_at__isnull=False
    ).first()
    if simultaneous:
        raise BookRefused(_("%(book)s starts at the same time. Choose another date.") % {"book": simultaneous})
    book.effective_from = starts_at
    book.published_at = now
    book.save(update_fields=["effective_from", "published_at"])
    return book


@transaction.atomic
def copy(*, book: PriceBook) -> PriceBook:
    """Create a draft with the prices of `book` and return it."""
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

"""Which prices hold when. The one rule: a published book is never edited, only superseded from a date on."""

from __future__ import annotations

from datetime import datetime

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from billing.errors import BookRefused, NotPriced
from billing.models import NodeSpec, Price, PriceBook
from billing.pricing import PriceKind, PriceRow

NAME_LIMIT = 100


def current_book(*, currency: str, at: datetime | None = None) -> PriceBook:
    """The published book that holds at a moment (now). Raises NotPriced when none does."""
    book = (
        PriceBook.objects.filter(
            currency=currency, published_at__isnull=False, effective_from__lte=at or timezone.now()
        )
        .order_by("-effective_from")
        .first()
    )
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
        for price in book.prices.select_related("node_spec")
    ]


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
    # By ids: `exclude` over a relation would let each condition be met by another price, of another book even.
    priced = book.prices.filter(kind=PriceKind.NODE_HOUR, product="", nodes_from=1).values("node_spec")
    missing = NodeSpec.objects.filter(is_active=True).exclude(pk__in=priced)
    if names := [spec.name for spec in missing]:
        raise BookRefused(
            _("These node specs have no price per hour for one node: %(names)s.") % {"names": ", ".join(names)}
        )
    if PriceBook.objects.filter(currency=book.currency, effective_from=starts, published_at__isnull=False).exists():
        raise BookRefused(_("Another book begins at the same moment."))
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

"""Offers: priced from the book that holds now, kept as they were made. The one rule: a quote's figures never change."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import pricing
from billing.errors import NotPriced, NoWallet, QuoteExpired, QuoteRefused
from billing.models import Quote
from billing.pricebooks import current_book, price_rows
from billing.selectors import wallet
from billing.wording import money
from console.accounts.errors import NotFound
from console.accounts.models import Organization, User
from console.operations.kept import Kept, given

LEAST_SECONDS = 300
"""A first run of unknown code gets at least this long, so that a wrong estimate doesn't end it at once."""
_QUOTE = Kept(lambda: Quote.objects.filter(organization=given("organization"), pk=given("pk")))


def make_quote(
    *,
    organization: Organization,
    user: User,
    purchase: pricing.Purchase,
    payload: dict[str, Any],
    estimate: pricing.Estimate,
    headroom: Decimal,
    most_seconds: int,
    max_seconds: int | None,
    ceiling_minor: int | None,
) -> Quote:
    """Price a purchase for an organization and keep the offer.

    Raises NoWallet, NotPriced, QuoteRefused (with its field).
    """
    account = wallet(organization)
    if account is None:
        raise NoWallet
    book = current_book(currency=account.currency)
    try:
        offer = pricing.quote(
            price_rows(book),
            purchase,
            estimate,
            headroom=headroom,
            least_seconds=LEAST_SECONDS,
            most_seconds=most_seconds,
            max_seconds=max_seconds,
            ceiling_minor=ceiling_minor,
        )
    except pricing.PricingError as error:
        raise _in_words(error, book.currency) from error
    return Quote.objects.create(
        organization=organization,
        created_by=user,
        book=book,
        currency=book.currency,
        mode=purchase.mode,
        purchase=payload,
        terms=offer.terms.to_json(),
        lines=[line.to_json() for line in offer.lines],
        p50_minor=offer.p50_minor,
        p90_minor=offer.p90_minor,
        basis=dataclasses.asdict(estimate),
        ceiling_minor=offer.ceiling_minor,
        deadline_seconds=offer.deadline_seconds,
        expires_at=timezone.now() + timedelta(seconds=settings.QUOTE_TTL_SECONDS),
    )


def make_free_quote(
    *, organization: Organization, user: User, nodes: int, deadline_seconds: int, payload: dict[str, Any]
) -> Quote:
    """An offer at 0: nothing is held and nothing charged, however long it runs. Raises NoWallet, NotPriced."""
    account = wallet(organization)
    if account is None:
        raise NoWallet
    book = current_book(currency=account.currency)
    terms = pricing.Terms(pricing.Mode.METERED, nodes, 1, Decimal(0), Decimal(0), minimum_minor=0, ceiling_minor=0)
    return Quote.objects.create(
        organization=organization,
        created_by=user,
        book=book,
        currency=book.currency,
        mode=terms.mode,
        purchase=payload,
        terms=terms.to_json(),
        lines=[],
        p50_minor=0,
        p90_minor=0,
        basis=dataclasses.asdict(pricing.Estimate(deadline_seconds, deadline_seconds, "customer")),
        ceiling_minor=0,
        deadline_seconds=deadline_seconds,
        expires_at=timezone.now() + timedelta(seconds=settings.QUOTE_TTL_SECONDS),
    )


def quote_for(*, organization: Organization, quote_id: UUID | str) -> Quote:
    """An organization's quote, expired or not. Raises NotFound for another's."""
    try:
        quote = _QUOTE.get(organization=organization, pk=UUID(str(quote_id)))
    except (Quote.DoesNotExist, ValueError) as error:
        raise NotFound(_("There is no such quote. Ask for a new one.")) from error
    quote.organization = organization
    return quote


def require_valid(quote: Quote) -> None:
    """Raises QuoteExpired where the offer's time is over."""
    if quote.is_expired:
        raise QuoteExpired


def _in_words(error: pricing.PricingError, currency: str) -> NotPriced | QuoteRefused:
    if error.code == "not_priced":
        sentence = _("This choice of product, node spec and nodes has no price. Choose another node spec.")
        return NotPriced(sentence, fields={error.field: sentence})
    sentences = {
        "max_seconds_too_large": _("The longest run of this product is %(limit)s seconds.") % {"limit": error.minimum},
        "ceiling_too_small": _("This ceiling is too small for the choice: it takes %(least)s at least.")
        % {"least": money(error.minimum, currency)},
    }
    return QuoteRefused(fields={error.field: sentences[error.code]})

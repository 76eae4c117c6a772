"""Quotes, priced from the current price book. A stored quote never changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext as _

from billing import pricing
from billing.amounts import money
from billing.errors import NotPriced, NoWallet, QuoteExpired, QuoteRefused
from billing.models import Hold, PriceBook, Quote
from billing.pricebooks import current_book, price_rows
from billing.selectors import wallet
from console.accounts.models import Organization, User
from console.core.errors import NotFound

MIN_DEADLINE_SECONDS = 300
"""Shortest deadline that is computed from an estimate: 5 minutes, so that a wrong estimate does not end a run during
start-up. A time limit or ceiling of the customer can make a deadline shorter."""


@dataclass(frozen=True)
class CurrentPrices:
    """The book in effect (for a sweep's trials: the sweep's book) and its prices, read once for several purchases."""

    book: PriceBook
    rows: list[pricing.PriceRow]


def current_prices(organization: Organization) -> CurrentPrices:
    """Return the prices in effect in the currency of an organization's wallet. Raises NoWallet, NotPriced."""
    account = wallet(organization)
    if account is None:
        raise NoWallet
    book = current_book(currency=account.currency)
    return CurrentPrices(book, price_rows(book))


def price(
    prices: CurrentPrices,
    *,
    purchase: pricing.Purchase,
    estimate: pricing.Estimate,
    headroom: Decimal,
    max_deadline_seconds: int,
    max_seconds: int | None,
    ceiling_minor: int | None,
    included_seconds: int | None = None,
) -> pricing.Offer:
    """Price a purchase as `make_quote` does, without storing a quote. Raises NotPriced, QuoteRefused.

    The operator sets `headroom` and `max_deadline_seconds` for the product. The customer sets `max_seconds` and
    `ceiling_minor`. `included_seconds` is the running time that a fixed price includes. See `pricing.quote`.
    """
    try:
        return pricing.quote(
            prices.rows,
            purchase,
            estimate,
            headroom=headroom,
            min_deadline_seconds=MIN_DEADLINE_SECONDS,
            max_deadline_seconds=max_deadline_seconds,
            max_seconds=max_seconds,
            ceiling_minor=ceiling_minor,
            included_seconds=included_seconds,
        )
    except pricing.PricingError as error:
        raise _translate(error, prices.book.currency) from error


def make_quote(
    *,
    organization: Organization,
    user: User,
    purchase: pricing.Purchase,
    payload: dict[str, Any],
    estimate: pricing.Estimate,
    headroom: Decimal,
    max_deadline_seconds: int,
    max_seconds: int | None,
    ceiling_minor: int | None,
    included_seconds: int | None = None,
    book: PriceBook | None = None,
) -> Quote:
    """Price a purchase for an organization and store the quote.

    `payload` describes the purchase for `jobs`, which reads it again when the quote is bought. It is stored as
    `Quote.purchase`. See `price` for the other parameters. With a `book`, its prices apply instead of the current ones:
    the trials of a sweep keep the sweep's prices. Raises NoWallet, NotPriced, and QuoteRefused, whose `fields` name the
    value to change.
    """
    prices = CurrentPrices(book, price_rows(book)) if book else current_prices(organization)
    offer = price(
        prices,
        purchase=purchase,
        estimate=estimate,
        headroom=headroom,
        max_deadline_seconds=max_deadline_seconds,
        max_seconds=max_seconds,
        ceiling_minor=ceiling_minor,
        included_seconds=included_seconds,
    )
    return _store(
        organization=organization, user=user, book=prices.book, payload=payload, offer=offer, estimate=estimate
    )


def make_sweep_quote(
    *,
    organization: Organization,
    user: User,
    prices: CurrentPrices,
    payload: dict[str, Any],
    offers: Sequence[tuple[pricing.Offer, pricing.Estimate]],
    trials: int,
    ceiling_minor: int | None,
) -> Quote:
    """Store the quote of a sweep of at most `trials` runs.

    `offers` price the corners of the search space: a trial at each combination of extreme values. The quote has the
    terms and the deadline of the most expensive corner. The sweep's ceiling is `trials` times that corner's ceiling, or
    the customer's `ceiling_minor` if that is lower; then fewer trials start. Raises QuoteRefused if `ceiling_minor` is
    too small for one trial.
    """
    most_expensive, estimate = max(offers, key=lambda corner: corner[0].ceiling_minor)
    all_trials = pricing.trials_line(trials, most_expensive.ceiling_minor)
    ceiling = min(all_trials.amount_minor, ceiling_minor or all_trials.amount_minor)
    if ceiling < most_expensive.ceiling_minor:
        error = pricing.PricingError("ceiling_too_small", field="ceiling_minor", limit=most_expensive.ceiling_minor)
        raise _translate(error, prices.book.currency)
    lines = [all_trials]
    if ceiling < all_trials.amount_minor:
        lines.append(pricing.above_ceiling_line(all_trials.amount_minor - ceiling))
    # The costs of most trials lie between those of the corners, so p50 assumes the mean of all corners. p90 assumes the
    # most expensive one.
    mean_p50_minor = sum(offer.p50_minor for offer, _estimate in offers) // len(offers)
    sweep_offer = dataclasses.replace(
        most_expensive,
        lines=tuple(lines),
        p50_minor=min(ceiling, mean_p50_minor * trials),
        p90_minor=min(ceiling, most_expensive.p90_minor * trials),
        ceiling_minor=ceiling,
    )
    return _store(
        organization=organization, user=user, book=prices.book, payload=payload, offer=sweep_offer, estimate=estimate
    )


def make_extension_quote(*, hold: Hold, user: User, payload: dict[str, Any], deadline_seconds: int) -> Quote:
    """Store a quote of the purchase of `hold` with a later deadline, at the prices of the original quote.

    Only purchases that are metered can be extended. The new quote is for the whole purchase, not only for the added
    time; `charges.extend` then holds the difference. `jobs` extends notebooks only, whose estimate is their time limit.
    """
    original = hold.quote
    offer = pricing.quote_extension(pricing.Terms.from_json(original.terms), deadline_seconds=deadline_seconds)
    # `basis` is the stored estimate. Its times are those of the old deadline, but its source still applies.
    source = original.basis["source"]
    estimate = pricing.Estimate(p50_seconds=deadline_seconds, p90_seconds=deadline_seconds, source=source)
    return _store(
        organization=original.organization,
        user=user,
        book=original.book,
        payload=payload,
        offer=offer,
        estimate=estimate,
    )


def _store(
    *,
    organization: Organization,
    user: User,
    book: PriceBook,
    payload: dict[str, Any],
    offer: pricing.Offer,
    estimate: pricing.Estimate,
) -> Quote:
    """Store an offer as a quote, which is valid for `QUOTE_TTL_SECONDS`. `payload` becomes `Quote.purchase`."""
    return Quote.objects.create(
        organization=organization,
        created_by=user,
        book=book,
        currency=book.currency,
        mode=offer.terms.mode,
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
    """Store a quote of price 0, as for the check of an image: nothing is held or charged, however long the run takes.

    A free run has a quote because each order has one. Raises NoWallet, NotPriced.
    """
    account = wallet(organization)
    if account is None:
        raise NoWallet
    terms = pricing.Terms(
        mode=pricing.Mode.METERED,
        nodes=nodes,
        epochs=1,  # without effect, because an epoch costs 0
        hourly=Decimal(0),
        per_epoch=Decimal(0),
        minimum_minor=0,
        ceiling_minor=0,
    )
    return _store(
        organization=organization,
        user=user,
        book=current_book(currency=account.currency),
        payload=payload,
        offer=pricing.Offer(terms, (), p50_minor=0, p90_minor=0, ceiling_minor=0, deadline_seconds=deadline_seconds),
        estimate=pricing.Estimate(p50_seconds=deadline_seconds, p90_seconds=deadline_seconds, source="free"),
    )


def quote_for(*, organization: Organization, quote_id: UUID | str) -> Quote:
    """Return an organization's quote, expired or not. Raises NotFound if it belongs to another organization."""
    try:
        quote = Quote.objects.get(organization=organization, pk=UUID(str(quote_id)))
    except (Quote.DoesNotExist, ValueError) as error:
        raise NotFound(_("This quote does not exist. Request a new one.")) from error
    quote.organization = organization  # the caller's object, so that no query reads it again
    return quote


def require_valid(quote: Quote) -> None:
    """Raise QuoteExpired if the quote has expired."""
    if quote.is_expired:
        raise QuoteExpired


def _translate(error: pricing.PricingError, currency: str) -> NotPriced | QuoteRefused:
    """Map an error of the pricing module to a customer error with a translated message."""
    if error.code == "not_priced":
        sentence = _("There is no price for this product, node spec and number of nodes. Choose another node spec.")
        return NotPriced(sentence, fields={error.field: sentence})
    sentences = {
        "max_seconds_too_large": _("The longest time of this product is %(limit)s seconds. Choose a shorter time.")
        % {"limit": error.limit},
        "ceiling_too_small": _("The ceiling must be at least %(least)s for these settings.")
        % {"least": money(error.limit, currency)},
    }
    return QuoteRefused(fields={error.field: sentences[error.code]})

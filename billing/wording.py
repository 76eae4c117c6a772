"""The words for money: amounts in the reader's language, titles of lines, where an estimate comes from.

The one rule: rows store stable names and figures; sentences are made here, when they are read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from babel.core import Locale
from babel.numbers import format_currency, get_currency_precision
from django.utils.translation import get_language, gettext_lazy, ngettext, to_locale
from django.utils.translation import gettext as _

from billing.currencies import decimals

MOST_DIGITS = 18
"""Of an amount that a customer types."""
TYPED = re.compile(r"(\d{0,20})(?:[.,](\d{0,20}))?")
LINE_TITLES = {
    "time_used": gettext_lazy("Node time"),
    "epochs_completed": gettext_lazy("Epochs, charged when the run completes"),
    "fixed_price": gettext_lazy("Fixed price of the epochs"),
    "minimum": gettext_lazy("Up to the least charge of a run"),
    "above_ceiling": gettext_lazy("Above the ceiling: not charged"),
    "queue": gettext_lazy("Waiting in the queue: free"),
    "pull": gettext_lazy("Fetching the image: free"),
    "start": gettext_lazy("Starting the nodes: free"),
    "hang": gettext_lazy("Hanging, without a sign of progress: free"),
    "platform_fault": gettext_lazy("Platform fault: free"),
}

FAILURES = {
    "insufficient_funds": gettext_lazy("The card has insufficient funds."),
    "expired_card": gettext_lazy("The card has expired."),
    "authentication_required": gettext_lazy("The bank wants its customer to confirm each payment."),
    "lost_card": gettext_lazy("The bank declined the card."),
    "disputed": gettext_lazy("A payment by this card was disputed."),
    "refunded": gettext_lazy("A payment was paid back to this card."),
    "refused": gettext_lazy("The payment service refused the card."),
    "card_gone": gettext_lazy("The card is not saved any more."),
    "customer_gone": gettext_lazy("The saved cards were deleted at the payment service. Save a card again."),
    "unanswered": gettext_lazy("The payment service did not answer."),
}

BASES = {
    "customer": gettext_lazy("From the time you set; there is no earlier run of this script to learn from."),
    "free": gettext_lazy("This run is free, and ended when its time is over."),
    "reference": gettext_lazy(
        "From the product's reference speed; the first run of your script makes the next estimate better."
    ),
}


def to_major(amount_minor: Decimal | int, currency: str) -> Decimal:
    """An amount in the currency's major unit."""
    return Decimal(amount_minor).scaleb(-decimals(currency))


def to_minor(amount: Decimal, currency: str) -> int:
    """A customer's amount in minor units.

    Raises ValueError where it has more decimals than the currency, or is no amount at all (NaN, infinity, 1e999).
    """
    if not amount.is_finite() or amount.adjusted() > MOST_DIGITS:
        raise ValueError("This is no amount of money.")
    scaled = amount.scaleb(decimals(currency))
    if scaled != scaled.to_integral_value():
        raise ValueError(f"{currency} has {decimals(currency)} decimals.")
    return int(scaled)


def typed_minor(text: str, currency: str) -> int:
    """An amount as a person types it, in minor units; a comma may stand for the decimal point.

    Raises ValueError for what is none, or could be two: three digits after the mark are thousands to one reader and a
    fraction to the other, and in most currencies only a fraction of a thousandth would have so many.
    """
    found = TYPED.fullmatch(text.strip())
    whole, fraction = found.groups(default="") if found else ("", "")
    if not whole + fraction or (len(fraction) == len("000") and decimals(currency) < len(fraction)):
        raise ValueError("This is no amount, or could be two.")
    return to_minor(Decimal(f"{whole or 0}.{fraction or 0}"), currency)


def money(amount_minor: Decimal | int, currency: str, *, exact: bool = False) -> str:
    """An amount for people, in the active language; `exact` keeps decimals below the currency's."""
    locale = Locale.parse(to_locale(get_language() or "en"))
    amount, digits = to_major(amount_minor, currency), decimals(currency)
    if exact or digits == get_currency_precision(currency) or amount == amount.to_integral_value():
        return str(format_currency(amount, currency, locale=locale, decimal_quantization=not exact))
    # The reader's habit has fewer decimals than the amount: none is left out.
    pattern = copy.copy(locale.currency_formats["standard"])
    pattern.frac_prec = (digits, digits)
    return str(pattern.apply(amount, locale, currency=currency, currency_digits=False))


def line_title(line: Mapping[str, Any]) -> str:
    """What a line of a quote or receipt is for."""
    return str(LINE_TITLES.get(line["rule"], line["rule"]))


def basis_sentence(basis: Mapping[str, Any]) -> str:
    """Where an estimate comes from, as a sentence."""
    source, runs = basis.get("source"), int(basis.get("runs") or 0)
    if source == "history" and basis.get("measured_nodes"):
        return _scaled_sentence(basis, runs)
    if source == "history":
        return ngettext(
            "From %(runs)d earlier run of the same script on the same nodes.",
            "From %(runs)d earlier runs of the same script on the same nodes.",
            runs,
        ) % {"runs": runs}
    if source == "probe":
        return ngettext(
            "From %(runs)d free probe of this script on one node.",
            "From %(runs)d free probes of this script on one node.",
            runs,
        ) % {"runs": runs}
    return str(BASES.get(str(source), BASES["reference"]))


def _scaled_sentence(basis: Mapping[str, Any], runs: int) -> str:
    told = ngettext(
        "From %(runs)d earlier run of the same script on other numbers of these nodes (%(nodes)s), scaled.",
        "From %(runs)d earlier runs of the same script on other numbers of these nodes (%(nodes)s), scaled.",
        runs,
    ) % {"runs": runs, "nodes": ", ".join(map(str, basis["measured_nodes"]))}
    if basis.get("efficiency") is None:
        return told
    efficiency = _("Measured efficiency: %(percent)d %%.") % {"percent": round(float(basis["efficiency"]) * 100)}
    return f"{told} {efficiency}"


def failure_sentence(code: str) -> str:
    """Why a payment failed, from the provider's code. What a bank does not say is not guessed."""
    return str(FAILURES.get(code, _("The bank declined the card.")))

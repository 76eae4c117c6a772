"""Translated texts about money: formatted amounts, titles of receipt lines, the basis of an estimate.

Rows store codes and figures; this module turns them into sentences when they are shown.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any

from babel.core import Locale
from babel.numbers import format_currency, get_currency_precision
from django.utils.translation import get_language, gettext_lazy, gettext_noop, ngettext, to_locale
from django.utils.translation import gettext as _

from billing.currencies import decimals

MAX_CACHED_AMOUNTS = 4096
"""Number of formatted amounts cached per process, because Babel's formatting dominates the time of large tables."""
MAX_DIGITS = 18
"""Largest number of digits of a typed amount: it then fits PostgreSQL's bigint in every currency."""
TYPED_AMOUNT = re.compile(r"(\d{0,20})(?:[.,](\d{0,20}))?")
"""Integer and fraction of a typed amount; `to_minor` then refuses more digits than MAX_DIGITS."""
LINE_TITLES = {
    "time_used": gettext_lazy("Node time"),
    "epochs_completed": gettext_lazy("Epochs, charged when the run completes"),
    "fixed_price": gettext_lazy("Fixed price of the epochs"),
    "extra_time": gettext_lazy("Node time beyond the fixed price"),
    "minimum": gettext_lazy("Minimum charge"),
    "above_fixed_price": gettext_lazy("Covered by the fixed price"),
    "above_ceiling": gettext_lazy("Above the ceiling: not charged"),
    "trials": gettext_lazy("Trials, at most"),
    "queue": gettext_lazy("Waiting in the queue: free"),
    "pull": gettext_lazy("Fetching the image: free"),
    "start": gettext_lazy("Starting the nodes: free"),
    "hang": gettext_lazy("Hanging without progress: free"),
    "platform_fault": gettext_lazy("Platform fault: free"),
    "after_cancel": gettext_lazy("After cancellation: free"),
    "storage": gettext_lazy("Storage of the day, and what was due before"),
}
"""Title of a quote's or receipt's line by its rule."""

FAILURES = {
    "insufficient_funds": gettext_lazy("The card has insufficient funds."),
    "expired_card": gettext_lazy("The card has expired."),
    "authentication_required": gettext_lazy("The bank requires the cardholder to confirm each payment."),
    "lost_card": gettext_lazy("The bank declined the card."),
    "disputed": gettext_lazy("A payment with this card was disputed."),
    "refunded": gettext_lazy("A payment with this card was refunded."),
    "refused": gettext_lazy("The payment provider refused the card."),
    "card_gone": gettext_lazy("The card is no longer saved."),
    "customer_gone": gettext_lazy("The saved cards were deleted at the payment provider. Add a card again."),
    "unanswered": gettext_lazy("The payment provider did not answer."),
}
"""Sentence for each failure code of a payment: the provider's codes and ours."""

EARLIER_DESCRIPTIONS = (
    gettext_noop("Credit that expired"),
    gettext_noop("Dispute won: back in the wallet"),
    gettext_noop("Disputed payment: taken back by the bank"),
    gettext_noop("Paid from it: a debt that had been written off"),
    gettext_noop("Paid from it: what was owed"),
    gettext_noop("Refund that failed: back in the wallet"),
)
"""Descriptions that earlier versions stored in the ledger. Ledger rows never change, so these stay translated."""

ESTIMATE_BASES = {
    "customer": gettext_lazy("Assumes the longest time that you set. No run of this script has been measured yet."),
    "notebook": gettext_lazy("You pay the time until you stop it, it is idle, or its time limit is reached."),
    "free": gettext_lazy("This run is free. It ends when its time limit is reached."),
    "reference": gettext_lazy("Assumes the product's reference speed. No run of this script has been measured yet."),
}
"""Sentence for each source of an estimate that needs no figures."""
MIN_RUNS_FOR_SHARE = 5
"""Fewest earlier runs from which "90 % of runs" may be claimed. With fewer, the p90 is a multiple of the p50."""


def to_major(amount_minor: Decimal | int, currency: str) -> Decimal:
    """Convert an amount to the currency's major unit."""
    return Decimal(amount_minor).scaleb(-decimals(currency))


def to_minor(amount: Decimal, currency: str) -> int:
    """Convert an amount to minor units.

    Raises ValueError if it has more decimals than the currency, or is NaN, infinite or too large.
    """
    if not amount.is_finite() or amount.adjusted() > MAX_DIGITS:
        raise ValueError("This is no amount of money.")
    scaled = amount.scaleb(decimals(currency))
    if scaled != scaled.to_integral_value():
        raise ValueError(f"{currency} has {decimals(currency)} decimals.")
    return int(scaled)


def parse_amount(text: str, currency: str) -> int:
    """Parse a typed amount with a decimal point or comma into minor units.

    Raises ValueError if it is no amount, or is ambiguous: "1.234" may mean a thousand or a fraction, so three digits
    after the point or comma are accepted only for currencies with three decimals.
    """
    match = TYPED_AMOUNT.fullmatch(text.strip())
    integer, fraction = match.groups(default="") if match else ("", "")
    if not integer + fraction or (len(fraction) == 3 and decimals(currency) < 3):
        raise ValueError("This is no amount, or it is ambiguous.")
    return to_minor(Decimal(f"{integer or 0}.{fraction or 0}"), currency)


@cache
def locale_of(language: str) -> Locale:
    """Return the Babel locale of a Django language code."""
    return Locale.parse(to_locale(language))


def money(amount_minor: Decimal | int, currency: str, *, exact: bool = False) -> str:
    """Format an amount in the active language. `exact` keeps decimals beyond the currency's own."""
    # Decimal("-0") == 0 would share a cache entry with 0; adding 0 drops its sign.
    return _money(amount_minor + 0, currency, exact, get_language() or "en")


@lru_cache(maxsize=MAX_CACHED_AMOUNTS)
def _money(amount_minor: Decimal | int, currency: str, exact: bool, language: str) -> str:
    locale = locale_of(language)
    amount, digits = to_major(amount_minor, currency), decimals(currency)
    if exact or digits == get_currency_precision(currency) or amount == amount.to_integral_value():
        return str(format_currency(amount, currency, locale=locale, decimal_quantization=not exact))
    # CLDR shows fewer decimals than Stripe counts: show all of them.
    pattern = copy.copy(locale.currency_formats["standard"])
    pattern.frac_prec = (digits, digits)
    return str(pattern.apply(amount, locale, currency=currency, currency_digits=False))


def line_title(line: Mapping[str, Any]) -> str:
    """Return the title of a quote's or receipt's line."""
    return str(LINE_TITLES.get(line["rule"], line["rule"]))


def basis_sentence(basis: Mapping[str, Any]) -> str:
    """Return a sentence about the basis of an estimate."""
    source, runs = basis.get("source"), int(basis.get("runs") or 0)
    if source == "history" and basis.get("measured_nodes"):
        return _scaled_sentence(basis, runs)
    if source == "history":
        return ngettext(
            "Based on %(runs)d earlier run of the same script on the same nodes.",
            "Based on %(runs)d earlier runs of the same script on the same nodes.",
            runs,
        ) % {"runs": runs}
    if source == "probe":
        return ngettext(
            "Based on %(runs)d free probe of this script on one node.",
            "Based on %(runs)d free probes of this script on one node.",
            runs,
        ) % {"runs": runs}
    return str(ESTIMATE_BASES.get(str(source), ESTIMATE_BASES["reference"]))


def p90_label(basis: Mapping[str, Any]) -> str:
    """Return the label of an estimate's p90. A share of runs is claimed only from enough runs of the same kind."""
    is_measured = basis.get("source") == "history" and not basis.get("measured_nodes")
    if is_measured and int(basis.get("runs") or 0) >= MIN_RUNS_FOR_SHARE:
        # xgettext: no-python-format, because "% o" is no placeholder here.
        return _("90% of runs cost less than")
    return _("High estimate")


def _scaled_sentence(basis: Mapping[str, Any], runs: int) -> str:
    source = ngettext(
        "Scaled from %(runs)d earlier run of the same script on a different number of these nodes (%(nodes)s).",
        "Scaled from %(runs)d earlier runs of the same script on a different number of these nodes (%(nodes)s).",
        runs,
    ) % {"runs": runs, "nodes": ", ".join(map(str, basis["measured_nodes"]))}
    if basis.get("efficiency") is None:
        return source
    efficiency = _("Measured efficiency: %(percent)d %%.") % {"percent": round(float(basis["efficiency"]) * 100)}
    return f"{source} {efficiency}"


def failure_sentence(code: str) -> str:
    """Return why a payment failed, from the provider's code. Unknown codes get a general sentence."""
    return str(FAILURES.get(code, _("The bank declined the card.")))

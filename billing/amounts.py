"""Amounts of money: convert between major and minor units, parse what a person typed, format for display.

An amount that a person reads or types is in the major unit (dollars), a stored amount is in the minor unit (cents).
"""

from __future__ import annotations

import copy
import re
from decimal import Decimal
from functools import cache, lru_cache

from babel.core import Locale
from babel.numbers import format_currency, get_currency_precision
from django.utils.translation import get_language, to_locale

from billing.currencies import decimals

MAX_CACHED_AMOUNTS = 4096
"""Number of formatted amounts that a process caches. Without a cache, Babel's formatting takes most of the time of a
page with a large table. 4096 is several such pages, in about a megabyte."""
MAX_DIGITS = 18
"""Largest number of digits of an amount in minor units. PostgreSQL's bigint holds every number of 18 digits, but not of
19."""
MINUS = "−"
"""The sign of negative amounts on pages and in messages: it is as wide as "+", and no line breaks after it. CSV files
and the numbers of the API have "-"."""
TYPED_AMOUNT = re.compile(rf"(\d{{0,{MAX_DIGITS}}})(?:[.,](\d{{0,{MAX_DIGITS}}}))?")
"""Integer and fraction of a typed amount."""


def to_major(amount_minor: Decimal | int, currency: str) -> Decimal:
    """Convert an amount to the currency's major unit."""
    return Decimal(amount_minor).scaleb(-decimals(currency))


def to_minor(amount: Decimal, currency: str) -> int:
    """Convert an amount to minor units.

    Raises ValueError if it has more decimals than the currency, or is NaN, infinite or too large.
    """
    # `adjusted` is the power of ten of the first digit: one less than the number of digits before the decimal point.
    if not amount.is_finite() or amount.adjusted() + decimals(currency) >= MAX_DIGITS:
        raise ValueError("This is not an amount of money.")
    scaled = amount.scaleb(decimals(currency))
    if scaled != scaled.to_integral_value():
        raise ValueError(f"{currency} has {decimals(currency)} decimals.")
    return int(scaled)


def parse_amount(text: str, currency: str) -> int:
    """Parse a typed amount with a decimal point or comma into minor units.

    Raises ValueError if the text is not an amount or is ambiguous: "1.234" may mean a thousand or a fraction. Therefore
    three digits after the point or comma are accepted only for currencies with three decimals.
    """
    match = TYPED_AMOUNT.fullmatch(text.strip())
    integer, fraction = match.groups(default="") if match else ("", "")
    if not integer + fraction or (len(fraction) == 3 and decimals(currency) < 3):
        raise ValueError("This is not an amount, or it is ambiguous.")
    return to_minor(Decimal(f"{integer or 0}.{fraction or 0}"), currency)


@cache
def locale_of(language: str) -> Locale:
    """Return the Babel locale of a Django language code."""
    return Locale.parse(to_locale(language))


def money(amount_minor: Decimal | int, currency: str, *, exact: bool = False) -> str:
    """Format an amount in the active language, rounded to the currency's decimals. `exact` keeps all its decimals."""
    # Decimal("-0") == 0 would share a cache entry with 0; adding 0 drops its sign.
    return _format_money(amount_minor + 0, currency, exact, get_language() or "en")


@lru_cache(maxsize=MAX_CACHED_AMOUNTS)
def _format_money(amount_minor: Decimal | int, currency: str, exact: bool, language: str) -> str:
    """Format an amount for `money`. The language is a parameter, so that the cache tells languages apart."""
    locale = locale_of(language)
    amount, digits = to_major(amount_minor, currency), decimals(currency)
    if exact or digits == get_currency_precision(currency) or amount == amount.to_integral_value():
        text = format_currency(amount, currency, locale=locale, decimal_quantization=not exact)
    else:
        # For some currencies, CLDR shows fewer decimals than Stripe counts. An amount that is not whole shows all
        # decimals that Stripe counts.
        pattern = copy.copy(locale.currency_formats["standard"])
        pattern.frac_prec = (digits, digits)
        text = pattern.apply(amount, locale, currency=currency, currency_digits=False)
    return str(text).replace("-", MINUS)

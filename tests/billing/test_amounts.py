"""Amounts of money: formatted, typed and converted."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.utils import translation

from billing import amounts


@pytest.mark.parametrize(
    ("language", "minor", "currency", "text"),
    [
        ("en", 123456, "USD", "$1,234.56"),
        ("en", -5, "USD", "−$0.05"),
        ("en", Decimal("0.8"), "USD", "$0.01"),
        ("zh-hans", 123456, "USD", "US$1,234.56"),
    ],
)
def test_an_amount_is_shown_in_the_readers_language(language, minor, currency, text):
    with translation.override(language):
        assert amounts.money(minor, currency) == text


def test_an_exact_amount_keeps_its_decimals_and_another_is_rounded():
    with translation.override("en"):
        shown = [amounts.money(Decimal("1234.5"), "RSD", exact=is_exact) for is_exact in (True, False)]
    assert shown == ["RSD12.345", "RSD12.34"]


@pytest.mark.parametrize(
    ("typed", "currency", "minor"),
    [
        (" 19.90 ", "USD", 1990),
        ("19,9", "USD", 1990),
        (".5", "USD", 50),
        ("５０", "CNY", 5000),
        ("500.00", "JPY", 500),
        ("1,234", "KWD", 1234),
        ("1.0000", "USD", 100),
    ],
)
def test_a_typed_amount_is_read_in_the_major_unit(typed, currency, minor):
    assert amounts.parse_amount(typed, currency) == minor


REFUSED = {
    "USD": ["1,000", "1.000", "12,345.67", "1 000", "1_000", "1e3", "-5", "", ".", "$5", "NaN", "19.905", "\x00", "²"],
    "JPY": ["1,000", "1.5"],
    "KWD": ["1.2345"],
}


@pytest.mark.parametrize("currency", REFUSED)
def test_a_typed_amount_that_is_ambiguous_or_none_is_refused(currency):
    """A budget of 1,000 must not become one of 1."""
    for typed in REFUSED[currency]:
        with pytest.raises(ValueError, match=r"amount|decimals"):
            amounts.parse_amount(typed, currency)


def test_an_amount_that_the_currency_does_not_have_is_refused():
    for amount in ("0.001", "NaN", "sNaN", "-Infinity", "1e999999", "1e16"):
        with pytest.raises(ValueError, match=r"amount|decimals"):
            amounts.to_minor(Decimal(amount), "USD")


@pytest.mark.parametrize(("digits", "currency"), [(16, "USD"), (18, "JPY"), (15, "KWD")])
def test_the_largest_amount_fits_a_column(digits, currency):
    """Amounts have at most 18 digits in the minor unit of any currency. PostgreSQL's bigint ends at 9.2e18."""
    assert amounts.parse_amount("9" * digits, currency) == 10**18 - 10 ** (18 - digits)
    with pytest.raises(ValueError, match="amount"):
        amounts.parse_amount("1" + "0" * digits, currency)

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
        ("en", Decimal("-0"), "USD", "$0.00"),
        ("en", -5, "USD", "−$0.05"),
        ("en", 10**18, "USD", "$10,000,000,000,000,000.00"),
        ("en", Decimal("0.8"), "USD", "$0.01"),
        ("en", 1234, "ISK", "ISK12.34"),  # CLDR shows no decimals
        ("en", -50, "RSD", "−RSD0.50"),
        ("en", Decimal("1234.5"), "RSD", "RSD12.34"),
        ("zh-hans", 123456, "CNY", "¥1,234.56"),
        ("zh-hans", 123456, "USD", "US$1,234.56"),
        ("zh-hans", 500, "JPY", "JP¥500"),
        ("zh-hans", 1234, "UGX", "UGX12.34"),
    ],
)
def test_an_amount_in_the_readers_language(language, minor, currency, text):
    with translation.override(language):
        assert amounts.money(minor, currency) == text


@pytest.mark.parametrize(("amount", "currency", "text"), [("0.8", "USD", "$0.008"), ("1234.5", "RSD", "RSD12.345")])
def test_an_exact_amount_keeps_its_decimals(amount, currency, text):
    with translation.override("en"):
        assert amounts.money(Decimal(amount), currency, exact=True) == text


@pytest.mark.parametrize(
    ("typed", "currency", "minor"),
    [
        ("50", "USD", 5000),
        (" 19.90 ", "USD", 1990),
        ("19,9", "USD", 1990),
        (".5", "USD", 50),
        ("5.", "USD", 500),
        ("0", "USD", 0),
        ("５０", "CNY", 5000),
        ("500.00", "JPY", 500),
        ("1,234", "KWD", 1234),
        ("1.0000", "USD", 100),
    ],
)
def test_a_typed_amount(typed, currency, minor):
    assert amounts.parse_amount(typed, currency) == minor


@pytest.mark.parametrize(
    ("typed", "currency"),
    [
        *((typed, "USD") for typed in ("1,000", "1.000", "12,345.67", "1 000", "1_000", "1e3", "-5", "", ".", "$5")),
        *((typed, "USD") for typed in ("NaN", "19.905", "9" * 21, "\x00", "²", "٣,٠٠٠")),
        ("1,000", "JPY"),
        ("1.5", "JPY"),
        ("1.2345", "KWD"),
    ],
)
def test_a_typed_amount_that_is_ambiguous_or_none_is_refused(typed, currency):
    """A budget of 1,000 must not become one of 1."""
    with pytest.raises(ValueError, match=r"amount|decimals"):
        amounts.parse_amount(typed, currency)


@pytest.mark.parametrize("amount", ["0.001", "NaN", "sNaN", "-Infinity", "1e999999", "1e16"])
def test_an_amount_that_the_currency_does_not_have_is_refused(amount):
    with pytest.raises(ValueError, match=r"amount|decimals"):
        amounts.to_minor(Decimal(amount), "USD")


@pytest.mark.parametrize(("typed", "currency"), [("9" * 16, "USD"), ("9" * 18, "JPY"), ("9" * 15, "KWD")])
def test_the_largest_amount_fits_a_column(typed, currency):
    """Amounts have at most 18 digits in the minor unit of any currency. PostgreSQL's bigint ends at 9.2e18."""
    assert amounts.parse_amount(typed, currency) == 10**18 - 10 ** (18 - len(typed))
    with pytest.raises(ValueError, match="amount"):
        amounts.parse_amount("1" + "0" * len(typed), currency)

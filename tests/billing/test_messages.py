"""Amounts of money: formatted, typed and converted; titles of lines and the basis of an estimate."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.utils import translation

from billing import messages


@pytest.mark.parametrize(
    ("language", "minor", "currency", "text"),
    [
        ("en", 123456, "USD", "$1,234.56"),
        ("en", Decimal("-0"), "USD", "$0.00"),
        ("en", -5, "USD", "-$0.05"),
        ("en", 10**18, "USD", "$10,000,000,000,000,000.00"),
        ("en", Decimal("0.8"), "USD", "$0.01"),
        ("en", 1234, "ISK", "ISK12.34"),  # CLDR shows no decimals
        ("en", -50, "RSD", "-RSD0.50"),
        ("en", Decimal("1234.5"), "RSD", "RSD12.34"),
        ("zh-hans", 123456, "CNY", "¥1,234.56"),
        ("zh-hans", 123456, "USD", "US$1,234.56"),
        ("zh-hans", 500, "JPY", "JP¥500"),
        ("zh-hans", 1234, "UGX", "UGX12.34"),
    ],
)
def test_an_amount_in_the_readers_language(language, minor, currency, text):
    with translation.override(language):
        assert messages.money(minor, currency) == text


@pytest.mark.parametrize(("amount", "currency", "text"), [("0.8", "USD", "$0.008"), ("1234.5", "RSD", "RSD12.345")])
def test_an_exact_amount_keeps_its_decimals(amount, currency, text):
    assert messages.money(Decimal(amount), currency, exact=True) == text


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
    assert messages.parse_amount(typed, currency) == minor


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
        messages.parse_amount(typed, currency)


@pytest.mark.parametrize(
    ("amount", "currency"),
    [("0.001", "USD"), ("0.5", "JPY"), ("NaN", "USD"), ("sNaN", "USD"), ("-Infinity", "USD"), ("1e999999", "USD")],
)
def test_an_amount_that_the_currency_does_not_have_is_refused(amount, currency):
    with pytest.raises(ValueError, match=r"amount|decimals"):
        messages.to_minor(Decimal(amount), currency)


def test_a_line_has_a_title():
    for rule in messages.LINE_TITLES:
        assert messages.line_title({"rule": rule}) not in {"", rule}
    assert messages.line_title({"rule": "a future rule"}) == "a future rule"


@pytest.mark.parametrize(
    ("basis", "words", "label"),
    [
        ({"source": "history", "runs": 1}, "Based on 1 earlier run of", "High estimate"),
        ({"source": "history", "runs": 7}, "Based on 7 earlier runs of", "90% of runs cost less than"),
        ({"source": "history", "runs": 7, "measured_nodes": [1]}, "Scaled", "High estimate"),
        ({"source": "probe", "runs": 7}, "Based on 7 free probes", "High estimate"),
        ({"source": "customer", "runs": 0}, "Assumes the longest time that you set", "High estimate"),
        ({"source": "reference", "runs": 0}, "No run of this script has been measured yet", "High estimate"),
    ],
)
def test_the_basis_of_an_estimate(basis, words, label):
    """A share of runs is claimed only where enough were measured."""
    assert words in messages.basis_sentence(basis)
    assert messages.p90_label(basis) == label

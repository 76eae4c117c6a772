"""Money in words."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.utils import translation

from billing import wording


@pytest.mark.parametrize(
    ("language", "minor", "currency", "text"),
    [
        ("en", 123456, "USD", "$1,234.56"),
        ("en", 0, "USD", "$0.00"),
        ("en", -5, "USD", "-$0.05"),
        ("en", 500, "JPY", "¥500"),
        ("en", 12345, "KWD", "KWD12.345"),
        ("en", 123456, "CNY", "CN¥1,234.56"),
        ("zh-hans", 123456, "CNY", "¥1,234.56"),
        ("zh-hans", 123456, "USD", "US$1,234.56"),
        ("zh-hans", 500, "JPY", "JP¥500"),
        ("en", 10**18, "USD", "$10,000,000,000,000,000.00"),
    ],
)
def test_an_amount_in_the_readers_language(language, minor, currency, text):
    with translation.override(language):
        assert wording.money(minor, currency) == text


def test_a_price_below_a_cent():
    assert wording.money(Decimal("0.8"), "USD", exact=True) == "$0.008"
    assert wording.money(Decimal("0.8"), "USD") == "$0.01"


@pytest.mark.parametrize(
    ("amount", "currency", "minor"),
    [("19.90", "USD", 1990), ("500", "JPY", 500), ("1.234", "KWD", 1234), ("-1", "USD", -100)],
)
def test_minor_units_and_back(amount, currency, minor):
    assert wording.to_minor(Decimal(amount), currency) == minor
    assert wording.to_major(minor, currency) == Decimal(amount)


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
        ("500", "JPY", 500),
        ("500.00", "JPY", 500),
        ("1,234", "KWD", 1234),
        ("1.0000", "USD", 100),
    ],
)
def test_an_amount_as_people_type_it(typed, currency, minor):
    assert wording.typed_minor(typed, currency) == minor


@pytest.mark.parametrize(
    ("typed", "currency"),
    [
        *(
            (typed, "USD")
            for typed in ("1,000", "1.000", "12,345.67", "1 000", "1_000", "1e3", "-5", "+5", "", ".", "$5")
        ),
        *((typed, "USD") for typed in ("NaN", "Infinity", "19.905", "9" * 21, "9" * 5000, "\x00", "²", "٣,٠٠٠")),
        ("1,000", "JPY"),
        ("1.5", "JPY"),
        ("1.2345", "KWD"),
    ],
)
def test_what_could_be_two_amounts_or_is_none(typed, currency):
    """A budget of 1,000 must not become one of 1."""
    with pytest.raises(ValueError, match=r"amount|decimals"):
        wording.typed_minor(typed, currency)


@pytest.mark.parametrize(
    ("amount", "currency"),
    [
        ("0.001", "USD"),
        ("0.5", "JPY"),
        ("NaN", "USD"),
        ("sNaN", "USD"),
        ("Infinity", "USD"),
        ("-Infinity", "USD"),
        ("1e999999", "USD"),
        ("1e-999999", "USD"),
    ],
)
def test_what_is_no_amount_of_the_currency(amount, currency):
    with pytest.raises(ValueError):  # noqa: PT011  # whichever of the reasons
        wording.to_minor(Decimal(amount), currency)


def test_every_line_has_a_title():
    for rule in ("time_used", "epochs_completed", "fixed_price", "minimum", "above_ceiling", "queue", "start"):
        assert wording.line_title({"rule": rule}) not in {"", rule}
    assert wording.line_title({"rule": "a rule of tomorrow"}) == "a rule of tomorrow"


@pytest.mark.parametrize(
    ("basis", "words"),
    [
        ({"source": "history", "runs": 1}, "From 1 earlier run of"),
        ({"source": "history", "runs": 7}, "From 7 earlier runs of"),
        ({"source": "customer", "runs": 0}, "From the time you set"),
        ({"source": "reference", "runs": 0}, "reference speed"),
    ],
)
def test_where_an_estimate_comes_from(basis, words):
    assert words in wording.basis_sentence(basis)

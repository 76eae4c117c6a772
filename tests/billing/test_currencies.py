"""Amounts: shown, typed and paid in the payment provider's minor units, even where ISO 4217 or CLDR differ."""

from __future__ import annotations

from decimal import Decimal

import pytest
from babel.numbers import list_currencies
from django.core.checks import run_checks
from django.utils import translation

from billing import amounts, currencies, gateway, payments, pricebooks, refunds
from billing.checks import check_payment_settings
from billing.errors import AmountRefused, BookRefused, PaymentRefused, RefundRefused
from billing.models import TopUp
from tests.billing.paying import balance, start_top_up
from tests.factories.accounts import UserFactory
from tests.factories.billing import PriceBookFactory, book, quote, wallet

TABLE = [
    # currency, an amount in the major unit, in the minor unit, the step of payments, in English
    ("USD", "12.34", 1234, 1, "$12.34"),
    ("JPY", "1234", 1234, 1, "¥1,234"),
    ("ISK", "1234", 123400, 100, "ISK1,234"),  # no decimals in ISO 4217 and CLDR, hundredths for Stripe
    ("RSD", "12.34", 1234, 1, "RSD12.34"),  # hundredths for Stripe and in ISO 4217, none in CLDR
    ("KWD", "12.340", 12340, 10, "KWD12.340"),
]
UNSUPPORTED = ["XAU", "XXX", "BTC", "usd", "IRR", "KPW", "", "US"]
"""A metal, no currency, no ISO code, small letters, two currencies that Stripe does not support, and no code."""


@pytest.mark.parametrize(("currency", "major", "minor", "step", "english"), TABLE, ids=[row[0] for row in TABLE])
def test_amounts_of_a_currency_are_converted_rounded_and_shown(currency, major, minor, step, english):
    assert amounts.to_minor(Decimal(major), currency) == minor
    assert amounts.to_major(minor, currency) == Decimal(major)
    assert currencies.step(currency) == step
    assert currencies.round_up_for_payment(minor - step + 1, currency) == minor
    assert currency in currencies.SUPPORTED
    with translation.override("en"):
        assert amounts.money(minor, currency) == english


def test_each_currency_is_real_and_in_one_table():
    parts = (currencies.ZERO_DECIMALS, currencies.WHOLE_ONLY, currencies.THREE_DECIMALS, currencies.TWO_DECIMALS)
    assert sum(map(len, parts)) == len(currencies.SUPPORTED)
    assert set(list_currencies()) | {"XCG"} >= currencies.SUPPORTED  # XCG is new in 2025, and not in every Babel
    assert not currencies.SUPPORTED & set(UNSUPPORTED)


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
        ("1,234", "KWD", 1234),  # a decimal comma: the currency has three decimals
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
def test_a_text_that_is_ambiguous_or_no_amount_is_refused(currency):
    """A customer who types 1,000 must not get a budget of 1."""
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


@pytest.mark.django_db
class TestPayments:
    @pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
    def test_the_provider_charges_credits_and_refunds_the_same_amount(self, provider, settings, row):
        currency, _major, minor, step, _english = row
        settings.TOP_UP_MINIMUM_MINOR = 1
        top_up = start_top_up(minor, currency=currency)
        session = provider.ask("GET", f"checkout/sessions/{top_up.session_id}")
        assert (session["amount_total"], session["currency"]) == (minor, currency.lower())
        provider.pay(top_up.session_id)
        provider.deliver()
        assert balance(top_up) == provider.held(currency) == minor
        refund = {"top_up": top_up, "reason": "A step", "user": UserFactory()}
        if step > 1:
            with pytest.raises(RefundRefused, match=f"multiple of {currency}"):
                refunds.refund(amount_minor=step + 1, **refund)
        assert refunds.refund(amount_minor=step, **refund).state == "succeeded"
        assert provider.held(currency) == minor - step

    @pytest.mark.parametrize(("currency", "amount", "step"), [("ISK", 100_050, "ISK1"), ("KWD", 1235, "KWD0.010")])
    @pytest.mark.usefixtures("provider")
    def test_an_amount_that_is_too_fine_is_refused_before_the_provider_would(self, currency, amount, step):
        with pytest.raises(AmountRefused) as caught:
            start_top_up(amount, currency=currency)
        assert caught.value.fields == {"amount_minor": f"The amount must be a multiple of {step}."}
        assert not TopUp.objects.exists()
        page = {"reference": "r", "title": "t", "customer_id": "", "return_url": "https://t/"}
        with pytest.raises(PaymentRefused):
            gateway.create_checkout(amount_minor=amount, currency=currency, **page)

    def test_the_smallest_amount_and_what_a_quote_lacks_are_rounded_up_to_a_payable_amount(self, settings):
        book("ISK", hourly="123456")
        account = wallet(currency="ISK", balance_minor=50)
        assert payments.shortfall_minor(quote(account), account=account) == 123_500  # 123,406 are missing
        settings.TOP_UP_MINIMUM_MINOR = 501
        with pytest.raises(AmountRefused, match="ISK6 "):
            payments.require_amount(account, 500, field="amount")
        payments.require_amount(account, 600, field="amount")


class TestSettings:
    @pytest.mark.django_db
    @pytest.mark.parametrize("currency", ["XAU", "IRR"])
    def test_an_unsupported_currency_is_refused_at_start_and_in_price_books(self, settings, currency):
        settings.CURRENCY = currency
        errors = [each for each in run_checks() if each.id == "billing.E001"]
        assert [each.msg for each in errors] == [f"CURRENCY is {currency!r}, which Stripe does not support."]
        with pytest.raises(BookRefused, match=f"Payments in {currency}"):
            pricebooks.publish(book=PriceBookFactory(currency=currency))

    @pytest.mark.parametrize(
        ("currency", "least", "most"),
        # The most is below the least; the least is zero; the most is above the provider's maximum; between them is no
        # multiple of the step.
        [("USD", 500, 499), ("USD", 0, 100), ("USD", 500, 100_000_000), ("ISK", 110, 190)],
    )
    def test_limits_that_leave_no_amount_are_refused(self, settings, currency, least, most):
        settings.CURRENCY = currency
        settings.TOP_UP_MINIMUM_MINOR, settings.TOP_UP_MAXIMUM_MINOR = least, most
        (error,) = check_payment_settings()
        assert (error.id, f"TOP_UP_MAXIMUM_MINOR ({most})" in error.msg) == ("billing.E002", True)
        assert currency == "USD" or "multiples of 100" in error.hint

    @pytest.mark.parametrize("key", ["pk_live_1", "whsec_1"])
    def test_a_key_of_another_kind_is_refused_and_not_shown(self, settings, key):
        settings.STRIPE_SECRET_KEY = key
        (error,) = check_payment_settings()
        assert (error.id, key in error.msg) == ("billing.E003", False)

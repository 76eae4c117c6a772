"""Minor units are the payment provider's, even where ISO 4217 or CLDR differ; unsupported amounts are refused early."""

from __future__ import annotations

from decimal import Decimal

import pytest
from babel.numbers import get_currency_precision, list_currencies
from django.core.checks import run_checks
from django.utils import translation

from billing import amounts, currencies, gateway, payments, pricebooks, refunds
from billing.checks import check_payment_settings
from billing.errors import AmountRefused, BookRefused, PaymentRefused, RefundRefused
from billing.models import TopUp
from tests.billing.paying import balance
from tests.factories.accounts import MembershipFactory, UserFactory
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


@pytest.mark.parametrize(("currency", "major", "minor", "step", "english"), TABLE, ids=[row[0] for row in TABLE])
def test_amounts_of_a_currency_are_converted_rounded_and_shown(currency, major, minor, step, english):
    assert amounts.to_minor(Decimal(major), currency) == minor
    assert amounts.to_major(minor, currency) == Decimal(major)
    assert currencies.step(currency) == step
    assert currencies.round_up_for_payment(minor - step + 1, currency) == minor
    assert currency in currencies.SUPPORTED
    with translation.override("en"):
        assert amounts.money(minor, currency) == english


def test_the_differences_between_cldr_and_the_provider_are_known():
    """A new Babel may change a currency: then check this list."""
    differ = {code for code in currencies.SUPPORTED if get_currency_precision(code) != currencies.decimals(code)}
    assert differ == {"AFN", "ALL", "ISK", "LAK", "LBP", "MMK", "RSD", "SOS", "STD", "UGX", "YER"}


def test_each_currency_is_real_and_in_one_table():
    parts = (currencies.ZERO_DECIMALS, currencies.WHOLE_ONLY, currencies.THREE_DECIMALS, currencies.TWO_DECIMALS)
    assert sum(map(len, parts)) == len(currencies.SUPPORTED)
    assert set(list_currencies()) | {"XCG"} >= currencies.SUPPORTED  # XCG is new in 2025, and not in every Babel
    assert not currencies.SUPPORTED & set(UNSUPPORTED)


@pytest.mark.django_db
class TestPayments:
    def start(self, currency, amount):
        member = MembershipFactory()
        account = wallet(member.organization, currency=currency)
        return payments.start_top_up(account=account, amount_minor=amount, user=member.user)

    @pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
    def test_the_provider_charges_credits_and_refunds_the_same_amount(self, provider, settings, row):
        currency, _major, minor, step, _english = row
        settings.TOP_UP_MINIMUM_MINOR = 1
        top_up = self.start(currency, minor)
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
    def test_an_amount_that_is_too_fine_is_refused_before_the_provider_would(self, provider, currency, amount, step):
        with pytest.raises(AmountRefused) as caught:
            self.start(currency, amount)
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
        # Less than the least, an amount of zero, above the provider's maximum, no multiple of the step between them.
        [("USD", 500, 499), ("USD", 0, 100), ("USD", 500, 100_000_000), ("ISK", 110, 190)],
    )
    def test_limits_that_leave_no_amount_are_refused(self, settings, currency, least, most):
        settings.CURRENCY = currency
        settings.TOP_UP_MINIMUM_MINOR, settings.TOP_UP_MAXIMUM_MINOR = least, most
        (error,) = check_payment_settings()
        assert (error.id, f"TOP_UP_MAXIMUM_MINOR ({most})" in error.msg) == ("billing.E002", True)
        assert currency == "USD" or "multiples of 100" in error.hint

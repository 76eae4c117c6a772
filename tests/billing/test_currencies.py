"""Minor units are the payment provider's, even where ISO 4217 or CLDR differ; unsupported amounts are refused early."""

from __future__ import annotations

from decimal import Decimal

import pytest
from babel.numbers import get_currency_precision, list_currencies
from django.core.checks import run_checks
from django.urls import reverse
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
    ("EUR", "12.34", 1234, 1, "€12.34"),
    ("CNY", "12.34", 1234, 1, "CN¥12.34"),
    ("JPY", "1234", 1234, 1, "¥1,234"),
    ("KRW", "1234", 1234, 1, "₩1,234"),
    ("VND", "1234", 1234, 1, "₫1,234"),
    ("XOF", "1234", 1234, 1, "F\u202fCFA1,234"),
    ("CLP", "1234", 1234, 1, "CLP1,234"),
    ("MGA", "1234", 1234, 1, "MGA1,234"),
    # whole for the ISO and CLDR, hundredths for Stripe
    ("ISK", "1234", 123400, 100, "ISK1,234"),
    ("UGX", "1234", 123400, 100, "UGX1,234"),
    # hundredths for Stripe and the ISO, none in CLDR
    ("RSD", "12.34", 1234, 1, "RSD12.34"),
    ("ALL", "12.34", 1234, 1, "ALL12.34"),
    ("LBP", "12.30", 1230, 1, "LBP12.30"),
    ("LAK", "1234", 123400, 1, "LAK1,234"),
    # hundredths, though paid out in whole units
    ("HUF", "12.34", 1234, 1, "HUF12.34"),
    ("TWD", "12.34", 1234, 1, "NT$12.34"),
    ("BHD", "12.340", 12340, 10, "BHD12.340"),
    ("JOD", "12.340", 12340, 10, "JOD12.340"),
    ("KWD", "12.340", 12340, 10, "KWD12.340"),
    ("OMR", "12.340", 12340, 10, "OMR12.340"),
    ("TND", "12.340", 12340, 10, "TND12.340"),
]
UNSUPPORTED = ["XAU", "XXX", "BTC", "usd", "IRR", "KPW", "", "US"]


@pytest.mark.parametrize(("currency", "major", "minor", "step", "english"), TABLE, ids=[row[0] for row in TABLE])
def test_a_currency(currency, major, minor, step, english):
    assert amounts.to_minor(Decimal(major), currency) == minor
    assert amounts.to_major(minor, currency) == Decimal(major)
    assert currencies.step(currency) == step
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
    assert set(list_currencies()) | {"XCG"} >= currencies.SUPPORTED
    assert not currencies.SUPPORTED & set(UNSUPPORTED)


@pytest.mark.parametrize(("amount", "payable"), [(1, 100), (100, 100), (101, 200), (0, 0)])
def test_an_amount_is_rounded_up_to_what_can_be_paid(amount, payable):
    assert currencies.round_up_for_payment(amount, "ISK") == payable
    assert currencies.round_up_for_payment(amount, "USD") == amount


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
        refund = refunds.refund(top_up=top_up, amount_minor=step, reason="A step", user=UserFactory())
        assert refund.state == "succeeded"
        assert provider.held(currency) == minor - step

    @pytest.mark.parametrize(("currency", "amount", "step"), [("ISK", 100_050, "ISK1"), ("KWD", 1235, "KWD0.010")])
    def test_an_amount_that_is_too_fine_is_refused_before_the_provider_would(self, provider, currency, amount, step):
        with pytest.raises(AmountRefused) as caught:
            self.start(currency, amount)
        assert caught.value.fields == {"amount_minor": f"The amount must be a multiple of {step}."}
        assert not TopUp.objects.exists()
        with pytest.raises(PaymentRefused):
            gateway.create_checkout(
                reference="r",
                amount_minor=amount,
                currency=currency,
                title="t",
                customer_id="",
                return_url="https://t/",
            )

    def test_a_refund_that_is_too_fine_is_refused(self, provider):
        top_up = self.start("ISK", 200_000)
        provider.pay(top_up.session_id)
        provider.deliver()
        top_up.refresh_from_db()
        with pytest.raises(RefundRefused, match="multiple of ISK1"):
            refunds.refund(top_up=top_up, amount_minor=150, reason="Fine", user=UserFactory())

    def test_what_a_quote_lacks_is_rounded_up_to_a_payable_amount(self):
        book("ISK", hourly="123456")
        account = wallet(MembershipFactory().organization, currency="ISK", balance_minor=50)
        assert payments.shortfall_minor(quote(account), account=account) == 123_500

    def test_the_smallest_amount_is_payable(self, settings):
        settings.TOP_UP_MINIMUM_MINOR = 501
        account = wallet(currency="KWD")
        with pytest.raises(AmountRefused, match=r"KWD0\.510"):
            payments.require_amount(account, 500, field="amount")
        payments.require_amount(account, 510, field="amount")

    def test_the_form_offers_amounts_of_the_currency(self, client):
        member = MembershipFactory()
        wallet(member.organization, currency="JPY")
        client.force_login(member.user)
        page = client.get(reverse("wallet")).content.decode()
        for amount in (2000, 5000, 10_000, 50_000):
            assert f'data-value="{amount}"' in page

    @pytest.mark.parametrize("currency", ["XAU", "IRR"])
    def test_a_price_book_in_an_unsupported_currency_is_not_published(self, currency):
        with pytest.raises(BookRefused, match=f"Payments in {currency}"):
            pricebooks.publish(book=PriceBookFactory(currency=currency))


class TestSettings:
    @pytest.mark.parametrize("currency", UNSUPPORTED)
    def test_an_unsupported_currency_is_refused_at_start(self, settings, currency):
        settings.CURRENCY = currency
        errors = [each for each in run_checks() if each.id == "billing.E001"]
        assert [each.msg for each in errors] == [f"CURRENCY is {currency!r}, which Stripe does not support."]

    def test_supported_currencies_are_accepted(self, settings):
        for settings.CURRENCY in [row[0] for row in TABLE]:
            assert check_payment_settings() == []

    @pytest.mark.parametrize(
        ("currency", "least", "most"),
        [
            ("USD", 500, 499), ("USD", 0, 100), ("USD", -5, 100), ("USD", 500, 100_000_000), ("ISK", 110, 190),
        ],
    )  # fmt: skip
    def test_limits_that_leave_no_amount_are_refused(self, settings, currency, least, most):
        settings.CURRENCY = currency
        settings.TOP_UP_MINIMUM_MINOR, settings.TOP_UP_MAXIMUM_MINOR = least, most
        (error,) = check_payment_settings()
        assert (error.id, f"TOP_UP_MAXIMUM_MINOR ({most})" in error.msg) == ("billing.E002", True)
        assert currency == "USD" or "multiples of 100" in error.hint

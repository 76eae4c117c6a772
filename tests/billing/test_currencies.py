"""Minor units are the payment provider's, whatever ISO 4217 or CLDR say; what can't be charged is refused early."""

from __future__ import annotations

from decimal import Decimal

import pytest
from babel.numbers import get_currency_precision, list_currencies
from django.core.checks import run_checks
from django.urls import reverse
from django.utils import translation

from billing import currencies, gateway, payments, pricebooks, reversals, wording
from billing.checks import settings_of_money
from billing.errors import AmountRefused, BookRefused, PaymentRefused, RefundRefused
from billing.models import TopUp
from tests.factories.accounts import MembershipFactory, UserFactory
from tests.factories.billing import PriceBookFactory, book, quote, wallet

TABLE = [
    # currency, an amount as people say it, as Stripe counts it, the step of payments, in English
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
def test_the_table(currency, major, minor, step, english):
    assert wording.to_minor(Decimal(major), currency) == minor
    assert wording.to_major(minor, currency) == Decimal(major)
    assert currencies.step(currency) == step
    assert currency in currencies.SUPPORTED
    with translation.override("en"):
        assert wording.money(minor, currency) == english


def test_no_decimals_are_left_out_where_the_readers_habit_has_none():
    with translation.override("en"):
        assert wording.money(1234, "ISK") == "ISK12.34"
        assert wording.money(-50, "RSD") == "-RSD0.50"
        assert wording.money(Decimal("1234.5"), "RSD") == "RSD12.34"
        assert wording.money(Decimal("1234.5"), "RSD", exact=True) == "RSD12.345"
    with translation.override("zh-hans"):
        assert wording.money(1234, "UGX") == "UGX12.34"


def test_where_cldr_and_the_provider_differ_is_known():
    """A new Babel may move a currency: then this list is looked at again."""
    differ = {code for code in currencies.SUPPORTED if get_currency_precision(code) != currencies.decimals(code)}
    assert differ == {"AFN", "ALL", "ISK", "LAK", "LBP", "MMK", "RSD", "SOS", "STD", "UGX", "YER"}


def test_the_tables_are_apart_and_of_real_currencies():
    parts = (currencies.ZERO_DECIMALS, currencies.WHOLE_ONLY, currencies.THREE_DECIMALS, currencies.TWO_DECIMALS)
    assert sum(map(len, parts)) == len(currencies.SUPPORTED)
    assert set(list_currencies()) | {"XCG"} >= currencies.SUPPORTED
    assert not currencies.SUPPORTED & set(UNSUPPORTED)


@pytest.mark.parametrize(("amount", "payable"), [(1, 100), (100, 100), (101, 200), (0, 0)])
def test_what_can_be_paid_and_is_no_less(amount, payable):
    assert currencies.payable(amount, "ISK") == payable
    assert currencies.payable(amount, "USD") == amount


@pytest.mark.django_db
class TestPayments:
    @pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
    def test_the_provider_is_asked_for_and_credits_what_was_meant(self, provider, settings, row):
        currency, _major, minor, step, _english = row
        settings.TOP_UP_MINIMUM_MINOR = 1
        member = MembershipFactory()
        account = wallet(member.organization, currency=currency)
        top_up = payments.start_top_up(account=account, amount_minor=minor, user=member.user)
        session = provider.ask("GET", f"checkout/sessions/{top_up.session_id}")
        assert (session["amount_total"], session["currency"]) == (minor, currency.lower())
        provider.pay(top_up.session_id)
        provider.deliver()
        account.refresh_from_db()
        assert account.posted_minor == provider.held(currency) == minor
        top_up.refresh_from_db()
        made = reversals.refund(top_up=top_up, amount_minor=step, reason="A step", user=UserFactory())
        assert made.state == "succeeded"
        assert provider.held(currency) == minor - step

    @pytest.mark.parametrize(("currency", "amount", "step"), [("ISK", 100_050, "ISK1"), ("KWD", 1235, "KWD0.010")])
    def test_what_is_finer_is_refused_here_before_the_provider_does(self, provider, currency, amount, step):
        member = MembershipFactory()
        account = wallet(member.organization, currency=currency)
        with pytest.raises(AmountRefused) as caught:
            payments.start_top_up(account=account, amount_minor=amount, user=member.user)
        assert caught.value.fields == {"amount_minor": f"Payments are made in steps of {step}."}
        assert not TopUp.objects.exists()
        # what would have come of it
        with pytest.raises(PaymentRefused):
            gateway.create_checkout(
                reference="r", amount_minor=amount, currency=currency, title="t", customer="", return_url="https://t/"
            )

    def test_so_is_a_refund(self, provider):
        member = MembershipFactory()
        account = wallet(member.organization, currency="ISK")
        top_up = payments.start_top_up(account=account, amount_minor=200_000, user=member.user)
        provider.pay(top_up.session_id)
        provider.deliver()
        top_up.refresh_from_db()
        with pytest.raises(RefundRefused) as caught:
            reversals.refund(top_up=top_up, amount_minor=150, reason="Fine", user=UserFactory())
        assert "steps of ISK1" in str(caught.value.message)

    def test_what_a_quote_lacks_is_rounded_up_to_what_can_be_paid(self, provider):
        book("ISK", hourly="123456")
        account = wallet(MembershipFactory().organization, currency="ISK", balance_minor=50)
        offer = quote(account)
        assert offer.ceiling_minor == 123_456
        assert payments.shortfall_minor(offer, account=account) == 123_500

    def test_the_least_amount_is_one_that_can_be_paid(self, settings):
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


@pytest.mark.django_db
@pytest.mark.parametrize("currency", ["XAU", "IRR"])
def test_a_book_in_what_nobody_can_pay_is_not_published(currency):
    with pytest.raises(BookRefused, match=f"No payments can be taken in {currency}"):
        pricebooks.publish(book=PriceBookFactory(currency=currency))


class TestSettings:
    @pytest.mark.parametrize("currency", UNSUPPORTED)
    def test_a_currency_that_cannot_be_charged_is_refused_at_start(self, settings, currency):
        settings.CURRENCY = currency
        found = [each for each in run_checks() if each.id == "billing.E001"]
        assert [each.msg for each in found] == [f"CURRENCY is {currency!r}: no payments can be taken in it."]

    @pytest.mark.parametrize("currency", [row[0] for row in TABLE])
    def test_one_that_can_is_not(self, settings, currency):
        settings.CURRENCY = currency
        assert settings_of_money() == []

    @pytest.mark.parametrize(("least", "most"), [(500, 499), (0, 100), (-5, 100), (500, 100_000_000)])
    def test_limits_that_leave_nothing_to_pay(self, settings, least, most):
        settings.TOP_UP_MINIMUM_MINOR, settings.TOP_UP_MAXIMUM_MINOR = least, most
        (found,) = settings_of_money()
        assert (found.id, f"TOP_UP_MAXIMUM_MINOR {most}" in found.msg) == ("billing.E002", True)

    def test_limits_between_which_no_step_lies(self, settings):
        settings.CURRENCY, settings.TOP_UP_MINIMUM_MINOR, settings.TOP_UP_MAXIMUM_MINOR = "ISK", 110, 190
        (found,) = settings_of_money()
        assert "multiples of 100" in found.hint

"""Hold, meter, settle: each safe to repeat, and for several at once."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, connection

from billing import charges
from billing.errors import InsufficientFunds, NoWallet
from billing.models import Hold, Quote, Receipt, Transaction
from billing.pricing import Usage
from tests.factories.accounts import OrganizationFactory
from tests.factories.billing import book, quote, wallet
from tests.racing import raised, together


@pytest.fixture
def prices(db):
    return book(hourly="360")  # ten seconds are one cent


@pytest.fixture
def account(prices):
    return wallet(balance_minor=1000)


def balance(account):
    account.refresh_from_db()
    return account.posted_minor, account.held_minor


def held(account, seconds=3600):
    offer = quote(account, seconds=seconds)
    return charges.hold(quote=offer, reference=f"order:{offer.pk}")


def settle(hold, seconds, *, completed=True):
    usage = Usage(billable_seconds=seconds, completed=completed)
    return charges.settle(hold=hold, usage=usage, title="#1 train.py")


def test_a_hold_sets_the_ceiling_aside_once(account):
    offer = quote(account)
    first = charges.hold(quote=offer, reference="order:1")
    assert charges.hold(quote=offer, reference="order:1") == first
    assert first.amount_minor == offer.ceiling_minor == 360
    assert balance(account) == (1000, 360)
    assert account.available_minor == 640


def test_a_wallet_that_is_too_small_says_by_how_much(account):
    held(account, seconds=7200)
    with pytest.raises(InsufficientFunds) as caught:
        held(account)
    error = caught.value
    assert (error.available_minor, error.needed_minor, error.missing_minor) == (280, 360, 80)
    assert error.code == "insufficient_funds"
    assert balance(account) == (1000, 720)
    assert Hold.objects.count() == 1


def test_no_wallet(account):
    offer = quote(account)
    Quote.objects.filter(pk=offer.pk).update(organization=OrganizationFactory())
    offer.refresh_from_db()
    with pytest.raises(NoWallet):
        charges.hold(quote=offer, reference="order:1")


def test_metering_moves_no_money_and_stays_within_the_hold(account):
    hold = held(account)
    assert charges.meter(hold=hold, billable_seconds=100) == 10
    assert charges.meter(hold=hold, billable_seconds=10**9) == 360
    hold.refresh_from_db()
    assert hold.metered_minor == 360
    assert balance(account) == (1000, 360)


def test_settling_charges_the_usage_and_gives_the_rest_back(account):
    hold = held(account)
    receipt = settle(hold, 1234)
    assert (receipt.total_minor, receipt.ceiling_minor, receipt.currency) == (123, 360, "USD")
    assert sum(line["amount_minor"] for line in receipt.lines) == 123
    assert balance(account) == (877, 0)
    hold.refresh_from_db()
    assert (hold.state, hold.charged_minor) == (Hold.States.SETTLED, 123)
    assert hold.ended_at is not None
    assert Transaction.objects.filter(reference=f"settle:{hold.reference}").count() == 1


def test_settling_again_gives_the_same_receipt_whatever_is_said(account):
    hold = held(account)
    receipt = settle(hold, 100)
    assert settle(hold, 3000) == receipt
    assert settle(hold, 0) == receipt
    assert balance(account) == (990, 0)


def test_never_more_than_the_ceiling(account):
    receipt = settle(held(account), 10**7)
    assert receipt.total_minor == 360
    assert [line["rule"] for line in receipt.lines] == ["time_used", "above_ceiling"]
    assert balance(account) == (640, 0)


def test_nothing_used_is_a_release(account):
    hold = held(account)
    free = charges.free_line(rule="queue", seconds=12.34)
    receipt = charges.settle(hold=hold, usage=Usage(0, completed=False), title="#1", free_lines=[free])
    assert receipt.lines == [
        {"rule": "queue", "quantity": "12.3", "unit": "seconds", "unit_minor": "0", "amount_minor": 0}
    ]
    assert settle(hold, 100) == receipt
    hold.refresh_from_db()
    assert (hold.state, hold.charged_minor) == (Hold.States.RELEASED, None)
    assert balance(account) == (1000, 0)
    assert not Transaction.objects.filter(reference__startswith="settle:").exists()


def test_a_release_is_not_charged_by_a_late_meter(account):
    hold = held(account)
    settle(hold, 0)
    charges.meter(hold=hold, billable_seconds=1000)
    hold.refresh_from_db()
    assert hold.metered_minor == 0


def test_the_quotes_own_prices_are_charged_after_a_price_change(account):
    hold = held(account)
    book(hourly="36000")
    assert settle(hold, 3600).total_minor == 360


def test_a_free_line_of_negative_time_is_zero():
    assert charges.free_line(rule="start", seconds=-5).quantity == "0.0"


def test_a_crash_before_the_receipt_leaves_the_hold_as_it_was(account, monkeypatch):
    hold = held(account)

    def crash(**_fields):
        raise RuntimeError("the process died here")

    with monkeypatch.context() as patched:
        patched.setattr(Receipt.objects, "create", crash)
        with pytest.raises(RuntimeError):
            settle(hold, 100)
    hold.refresh_from_db()
    assert hold.state == Hold.States.HELD
    assert balance(account) == (1000, 360)
    assert settle(hold, 100).total_minor == 10


@pytest.mark.parametrize("statement", ["UPDATE billing_receipt SET total_minor = 0", "DELETE FROM billing_receipt"])
def test_a_receipt_is_never_edited(account, statement):
    settle(held(account), 100)
    with pytest.raises(IntegrityError, match="append-only"), connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.mark.django_db(transaction=True)
class TestAtOnce:
    def test_a_wallet_covers_as_many_holds_as_it_does(self, account):
        offers = [quote(account, seconds=3000) for _ in range(6)]  # 300 each, of 1000
        outcomes = together(
            *(lambda offer=offer: charges.hold(quote=offer, reference=f"order:{offer.pk}") for offer in offers)
        )
        assert sum(isinstance(outcome, Hold) for outcome in outcomes) == 3
        assert [type(error) for error in raised(outcomes)] == [InsufficientFunds] * 3
        assert balance(account) == (1000, 900)

    def test_one_quote_is_held_once(self, account):
        offer = quote(account, seconds=1000)
        outcomes = together(*[lambda: charges.hold(quote=offer, reference="order:1")] * 4)
        assert {type(error) for error in raised(outcomes)} <= {IntegrityError}
        assert Hold.objects.count() == 1
        assert balance(account) == (1000, 100)

    def test_settling_twice_at_once_settles_once(self, account):
        for _ in range(5):
            before, _held = balance(account)
            hold = held(account, seconds=1000)
            receipts = together(*(lambda hold=hold, n=n: settle(hold, 100 * n).pk for n in (1, 2, 3, 4)))
            assert raised(receipts) == []
            assert len(set(receipts)) == 1
            charged = Receipt.objects.get(hold=hold).total_minor
            assert charged in {10, 20, 30, 40}
            assert balance(account) == (before - charged, 0)

    def test_holds_and_settlements_cross(self, account):
        """Some spend what others give back: nobody waits in a circle, and the sums come out, whoever is first."""
        holds = [held(account, seconds=1500) for _ in range(4)]
        offers = [quote(account, seconds=1000) for _ in range(4)]
        outcomes = together(
            *(lambda hold=hold: settle(hold, 500) for hold in holds),
            *(lambda offer=offer: charges.hold(quote=offer, reference=f"order:{offer.pk}") for offer in offers),
        )
        assert raised(outcomes) == []
        assert balance(account) == (1000 - 4 * 50, 400)

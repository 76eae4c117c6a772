"""Hold, meter, settle: each safe to repeat, and for several at once."""

from __future__ import annotations

import pytest
from django.utils import timezone

from billing import charges, credit
from billing.errors import BudgetExceeded, InsufficientFunds
from billing.models import Account, Budget, CreditGrant, Hold, HoldExtension, Quote, Receipt, Transaction
from billing.pricing import Usage
from billing.quotes import make_extension_quote
from tests.billing.runs import buy, give_credit, posted_and_held, settle
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import book, quote, wallet
from tests.racing import raised, together


@pytest.fixture
def account(db) -> Account:
    """A wallet with 1000; nodes cost 360 an hour."""
    book(hourly="360")
    return wallet(balance_minor=1000)


def test_a_hold_reserves_the_ceiling_once_and_metering_moves_no_money(account):
    offer = quote(account)
    hold = charges.hold(quote=offer, reference="order:1")
    assert charges.hold(quote=offer, reference="order:1") == hold
    assert hold.amount_minor == offer.ceiling_minor == 360
    assert charges.meter(hold=hold, billable_seconds=100) == 10
    assert charges.meter(hold=hold, billable_seconds=10**9) == 360
    hold.refresh_from_db()
    assert hold.metered_minor == 360
    assert posted_and_held(account) == (1000, 360)


def test_settling_charges_the_usage_at_the_quotes_prices_once(account):
    hold = buy(account, 360)
    book(hourly="36000")
    receipt = settle(hold, 123)
    assert (receipt.total_minor, receipt.ceiling_minor, receipt.currency) == (123, 360, "USD")
    assert sum(line["amount_minor"] for line in receipt.lines) == 123
    assert settle(hold, 300) == settle(hold, 0) == receipt
    assert posted_and_held(account) == (877, 0)
    hold.refresh_from_db()
    assert (hold.state, hold.charged_minor) == (Hold.States.SETTLED, 123)
    assert hold.ended_at is not None
    assert Transaction.objects.filter(reference=f"settle:{hold.reference}").count() == 1


def test_settling_without_usage_releases_the_hold(account):
    hold = buy(account, 360)
    free = [charges.free_line(rule="queue", seconds=seconds) for seconds in (12.34, -5)]  # below 0 is 0
    receipt = charges.settle(hold=hold, usage=Usage(0, completed=False), title="#1", free_lines=free)
    assert receipt.lines == [
        {"rule": "queue", "quantity": quantity, "unit": "seconds", "unit_minor": "0", "amount_minor": 0}
        for quantity in ("12.3", "0.0")
    ]
    assert settle(hold, 100) == receipt
    charges.meter(hold=hold, billable_seconds=1000)
    hold.refresh_from_db()
    assert (hold.state, hold.charged_minor, hold.metered_minor) == (Hold.States.RELEASED, None, 0)
    assert posted_and_held(account) == (1000, 0)
    assert not Transaction.objects.filter(reference__startswith="settle:").exists()


def extension(hold: Hold, seconds: int) -> Quote:
    """A quote of the hold's run for `seconds` in all."""
    return make_extension_quote(
        hold=hold, user=hold.quote.created_by, payload=hold.quote.purchase, deadline_seconds=seconds
    )


def extend(hold: Hold, offer: Quote) -> HoldExtension:
    return charges.extend(hold=hold, quote=offer, idempotency_key=str(offer.pk), user=hold.quote.created_by)


def test_an_extended_hold_is_raised_once_and_is_the_new_ceiling(account):
    hold = buy(account, 360)
    book(hourly="36000")  # the prices stay those of the purchase
    offer = extension(hold, 7200)
    assert (offer.ceiling_minor, offer.deadline_seconds) == (720, 7200)
    assert extend(hold, offer) == extend(hold, offer)
    assert posted_and_held(account) == (1000, 720)
    hold.refresh_from_db()
    assert charges.meter(hold=hold, billable_seconds=10**9) == 720
    receipt = settle(hold, 10**6)
    assert (receipt.total_minor, receipt.ceiling_minor) == (720, 720)
    assert posted_and_held(account) == (280, 0)
    with pytest.raises(ValueError, match="cannot be raised"):
        extend(hold, extension(hold, 9000))


@pytest.mark.django_db(transaction=True)
def test_extensions_and_settlements_at_once_take_effect_once(account):
    hold = buy(account, 360)
    offer = extension(hold, 7200)
    assert len({each.pk for each in together(*[lambda: extend(hold, offer)] * 3)}) == 1
    assert posted_and_held(account) == (1000, 720)
    for _ in range(3):
        before, _held = posted_and_held(account)
        receipts = together(*(lambda hold=hold, n=n: settle(hold, 10 * n).pk for n in (1, 2, 3, 4)))
        assert raised(receipts) == []
        (receipt,) = Receipt.objects.filter(pk__in=receipts)
        assert posted_and_held(account) == (before - receipt.total_minor, 0)
        hold = buy(account, 100)


def test_an_extension_needs_the_money_and_the_budget_for_the_difference(account):
    member = MembershipFactory(organization=account.organization)
    hold = buy(account, 360, member=member)
    with pytest.raises(InsufficientFunds) as caught:
        extend(hold, extension(hold, 10_010))
    assert caught.value.needed_minor == 641  # 1001 less the 360 that are held
    Budget.objects.create(organization=account.organization, user=member.user, amount_minor=700)
    with pytest.raises(BudgetExceeded):
        extend(hold, extension(hold, 7200))
    hold.refresh_from_db()
    assert (hold.amount_minor, posted_and_held(account)) == (360, (1000, 360))
    extend(hold, extension(hold, 7000))
    assert posted_and_held(account) == (1000, 700)


def test_an_extension_reserves_credit_which_then_outlives_its_expiry(account):
    lot = give_credit(account, 500, days=1)
    hold = buy(account, 360)
    extend(hold, extension(hold, 7200))
    CreditGrant.objects.filter(pk=lot.pk).update(expires_at=timezone.now())
    credit.remove_all_expired()
    lot.refresh_from_db()
    assert (lot.reserved_minor, lot.expired_minor) == (500, 0)
    settle(hold, 720)
    lot.refresh_from_db()
    assert (lot.used_minor, lot.reserved_minor) == (500, 0)
    assert posted_and_held(account) == (780, 0)

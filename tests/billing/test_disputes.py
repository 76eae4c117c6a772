"""Disputes: the ledger follows the provider's balance transactions, however many, in any order, and once."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core import mail
from django.utils import timezone

from billing import disputes, gateway, ledger, payment_emails, receivables, refunds
from billing.models import AutoTopUp, Dispute, DisputeMovement, StripeEvent
from billing.sandbox import intents
from tests.billing.paying import balance, both_sides_agree, dispute_of, end_dispute, reopen_dispute
from tests.books import BROKEN_BOOKS, broken, cleared
from tests.factories.accounts import UserFactory
from tests.factories.billing import paid_top_up
from tests.provider import DISPUTED

pytestmark = pytest.mark.django_db


@pytest.fixture
def top_up(provider):
    """A top-up of $50 whose cardholder disputed it at once; all events were delivered."""
    return paid_top_up(provider, card=DISPUTED)


def credited_and_disputed(provider):
    """Return a disputed top-up and all its events. Only the event of the payment was delivered."""
    top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
    every = provider.fresh()
    provider.deliver(*[event for event in every if event["type"] == "checkout.session.completed"])
    return top_up, every


def move(provider, amount, **changes):
    """Add a balance transaction of `amount` to the dispute, and send its event, as when the bank moves money."""
    stripe_account, dispute = provider.sandbox.account, dispute_of(provider)
    moved = stripe_account.add_balance_transaction("adjustment", dispute["charge"], amount, "usd")
    stripe_account.change(dispute, balance_transactions=[*dispute["balance_transactions"], dict(moved) | changes])
    stripe_account.emit("charge.dispute.updated", dispute)


def test_each_movement_is_booked_once_and_the_state_follows(provider, top_up):
    """The bank takes the money, returns it, takes it once more and keeps it. An outdated object changes nothing."""
    steps = [
        (lambda: end_dispute(provider, "won"), "won", 5000),
        (lambda: reopen_dispute(provider), "open", 0),
        (lambda: end_dispute(provider, "won"), "won", 5000),
        (lambda: reopen_dispute(provider), "open", 0),
        (lambda: end_dispute(provider, "lost"), "lost", 0),
    ]
    row = Dispute.objects.get()
    assert (row.state, row.withdrawn_minor, row.reason) == (Dispute.States.OPEN, 5000, "fraudulent")
    assert row.evidence_due_at > timezone.now()
    for step, state, left in steps:
        stale = gateway.fetch_object("dispute", row.dispute_id)
        step()
        assert both_sides_agree(provider)
        disputes.apply_dispute(stale, livemode=False)  # by a process that was slow
        row = Dispute.objects.get()
        assert (row.state, row.withdrawn_minor, row.ended_at is not None) == (state, 5000 - left, state != "open")
        assert balance(top_up) == refunds.refundable_minor(top_up) == left
    assert [row.amount_minor for row in DisputeMovement.objects.all()] == [5000, -5000, 5000, -5000, 5000]
    assert broken(BROKEN_BOOKS) == {}


def test_spent_money_is_owed_until_the_dispute_is_won(provider):
    top_up, every = credited_and_disputed(provider)
    account = top_up.account
    ledger.hold(account=account, amount_minor=3500)
    provider.deliver(*every)
    assert (balance(top_up), receivables.owed_minor(account)) == (3500, 3500)
    assert provider.held() == cleared() == 0
    receivables.write_off(account=account, amount_minor=1000, reason="A", user=UserFactory(is_superuser=True))
    end_dispute(provider, "won")
    assert both_sides_agree(provider)
    assert (balance(top_up), receivables.owed_minor(account), receivables.written_off_minor(account)) == (5000, 0, 0)


def test_an_inquiry_moves_nothing(provider):
    top_up = paid_top_up(provider)
    stripe_account = provider.sandbox.account
    (charge,) = stripe_account.store.all("charge")
    inquiry = stripe_account.make(
        "dispute", "du", amount=5000, balance_transactions=[], charge=charge["id"], currency="usd",
        payment_intent=charge["payment_intent"], reason="general", status="warning_needs_response",
    )  # fmt: skip
    for status, event in (("warning_needs_response", "created"), ("warning_closed", "closed")):
        stripe_account.change(inquiry, status=status)
        stripe_account.emit(f"charge.dispute.{event}", inquiry)
        assert both_sides_agree(provider)
        assert balance(top_up) == 5000
    assert Dispute.objects.get().state == Dispute.States.WON  # it was closed, and the bank took nothing


def test_each_withdrawal_is_mailed_and_switches_automatic_top_ups_off(provider):
    top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
    AutoTopUp.objects.create(account=top_up.account, is_on=True, threshold_minor=1, amount_minor=500)

    def deliver() -> tuple[int, bool, str]:
        """Return the number of mails so far, and the state of automatic top-ups. Switch them on again."""
        for _ in range(2):
            provider.deliver()
            payment_emails.send_due()  # the second time nothing is due
        setup = AutoTopUp.objects.get()
        AutoTopUp.objects.update(is_on=True, last_failure="")
        return len(mail.outbox), setup.is_on, setup.last_failure

    assert deliver() == (1, False, "disputed")
    assert "until the bank decides" in mail.outbox[0].body
    assert f", {timezone.now().year}" in mail.outbox[0].body.partition("The payment was made on:")[2]
    end_dispute(provider, "won")
    assert deliver() == (1, True, "")
    # The bank may withdraw the money again much later.
    Dispute.objects.update(opened_at=timezone.now() - timedelta(days=60))
    reopen_dispute(provider)
    assert deliver() == (2, False, "disputed")
    end_dispute(provider, "lost")
    assert deliver() == (2, True, "")


def test_a_dispute_that_is_lost_before_its_mail_is_not_called_undecided(provider):
    _top_up, every = credited_and_disputed(provider)
    end_dispute(provider, "lost")
    provider.deliver(*every)
    payment_emails.send_due()
    (message,) = mail.outbox
    assert "does not come back" in message.body
    assert "until the bank decides" not in message.body


@pytest.mark.parametrize(
    ("changes", "reason"), [({"currency": "eur"}, "currency is 'eur'"), ({"amount": 0}, "amount 0 is")]
)
def test_a_dispute_that_does_not_match_its_top_up_is_quarantined(provider, changes, reason):
    top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
    provider.sandbox.account.change(dispute_of(provider), **changes)
    wrong = [row for row in provider.deliver() if row.type.startswith("charge.dispute")]
    assert {row.state for row in wrong} == {StripeEvent.States.QUARANTINED}
    assert all(reason in row.reason for row in wrong)
    assert balance(top_up) == 5000


@pytest.mark.parametrize("is_refund_known_first", [True, False])
def test_a_payment_can_be_refunded_in_part_and_then_taken_back_whole(provider, is_refund_known_first):
    top_up = paid_top_up(provider)
    provider.ask("POST", "refunds", payment_intent=top_up.payment_intent, amount=2000)
    refunded = [event for event in provider.fresh() if event["type"] == "refund.created"]
    if is_refund_known_first:
        provider.deliver(*refunded)
    (charge,) = provider.sandbox.account.store.all("charge")
    intents.open_dispute(provider.sandbox.account, charge)
    # The sandbox disputes the rest of a payment; here the bank takes the refunded part back, too.
    dispute_of(provider)["amount"] = 5000
    move(provider, -2000)
    provider.deliver()
    assert Dispute.objects.get().withdrawn_minor == 5000
    provider.deliver(*refunded)
    assert both_sides_agree(provider)
    assert (receivables.owed_minor(top_up.account), refunds.refundable_minor(top_up)) == (2000, 0)


class TestAmounts:
    def test_a_part_comes_back_and_a_fee_is_not_charged_to_the_customer(self, provider, top_up):
        move(provider, 2000)
        assert both_sides_agree(provider)
        move(provider, -1500, type="stripe_fee")
        provider.deliver()
        assert (balance(top_up), Dispute.objects.get().withdrawn_minor) == (2000, 3000)
        assert (refunds.refundable_minor(top_up), receivables.owed_minor(top_up.account)) == (2000, 0)

    @pytest.mark.parametrize("amount", [-1, 5001])
    def test_more_than_was_paid_is_quarantined(self, provider, top_up, amount):
        move(provider, amount)
        (row,) = provider.deliver()
        assert row.state == StripeEvent.States.QUARANTINED
        assert f"withdrew {5000 - amount} of a top-up of 5000" in row.reason
        assert (balance(top_up), DisputeMovement.objects.count()) == (0, 1)

    def test_in_the_currency_of_the_providers_account_are_not_used(self, provider):
        """An amount in euros changes with the exchange rate. So the whole top-up is taken, and the whole returned."""
        top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
        dispute = dispute_of(provider)
        first = dict(dispute["balance_transactions"][0]) | {"amount": -4321, "currency": "eur"}
        provider.sandbox.account.change(dispute, balance_transactions=[first])
        seen = []
        # None adds nothing to the first withdrawal. -65 is a second withdrawal, which finds nothing left to take. Only
        # the sign of an amount matters.
        for amount in (None, -65, 4400, -4380):
            if amount:
                move(provider, amount, currency="eur")
            provider.deliver()
            seen.append((balance(top_up), Dispute.objects.get().withdrawn_minor))
        assert seen == [(0, 5000), (0, 5000), (5000, 0), (0, 5000)]
        assert broken(BROKEN_BOOKS) == {}


@pytest.mark.parametrize("case", ["taken", "won between"])
def test_what_version_0_1_booked_is_not_booked_again(provider, case):
    """Version 0.1 booked one withdrawal and one return of a dispute, and stored flags instead of their ids.

    During an upgrade, when both versions work, it may still book the return.
    """
    top_up, every = credited_and_disputed(provider)
    dispute = dispute_of(provider)
    row = Dispute.objects.create(
        dispute_id=dispute["id"], top_up=top_up, amount_minor=5000, is_withdrawn=True, opened_at=timezone.now()
    )
    moved = {"account": top_up.account, "amount_minor": 5000, "kind": "dispute", "description": "Before"}
    receivables.withdraw(**moved, reference=f"dispute:{dispute['id']}")
    assert refunds.refundable_minor(top_up) == 0
    if case == "won between":
        provider.deliver(*every)
        end_dispute(provider, "won")
        row.refresh_from_db()
        assert (row.is_withdrawn, row.is_reinstated) == (True, False)  # so version 0.1 would book the return
        receivables.pay_in(**moved, reference=f"dispute-won:{dispute['id']}", is_return=True)
        Dispute.objects.update(is_reinstated=True)
    provider.deliver(*every)
    assert both_sides_agree(provider)
    row.refresh_from_db()
    assert (balance(top_up), row.withdrawn_minor) == ((0, 5000) if case == "taken" else (5000, 0))
    assert row.is_reinstated == (case != "taken")
    known = {each["id"] for each in dispute["balance_transactions"]}
    assert set(DisputeMovement.objects.values_list("balance_transaction", flat=True)) == known
    assert broken(BROKEN_BOOKS) == {}

"""Disputes: the ledger follows the provider's balance transactions, however many, in any order, and once."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from django.core import mail
from django.utils import timezone

from billing import events, ledger, payment_mails, receivables, reversals
from billing.models import AutoTopUp, Dispute, DisputeMovement, StripeEvent
from billing.sandbox import intents
from tests.billing.test_reversals import agree, balance, cleared
from tests.books import BROKEN_BOOKS, broken
from tests.factories.accounts import UserFactory
from tests.factories.billing import paid_top_up
from tests.provider import DISPUTED, apply
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def theirs(provider):
    """The one dispute, as the provider keeps it."""
    (found,) = provider.provider.book.store.all("dispute")
    return found


def end(provider, verdict):
    return intents.end_dispute(provider.provider.book, theirs(provider), verdict)


def reopen(provider):
    return intents.reopen_dispute(provider.provider.book, theirs(provider))


def move(provider, amount, **changes):
    """Money of the dispute moves by `amount`, and an event says so."""
    book, found = provider.provider.book, theirs(provider)
    moved = book.move("adjustment", found["charge"], amount, "usd")
    book.change(found, balance_transactions=[*found["balance_transactions"], dict(moved) | changes])
    book.emit("charge.dispute.updated", found)


class TestDispute:
    def test_funds_are_frozen(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED)
        assert agree(provider)
        assert balance(top_up) == 0
        row = Dispute.objects.get()
        assert (row.state, row.withdrawn_minor, row.reason) == (Dispute.States.OPEN, 5000, "fraudulent")
        assert row.evidence_due_at > timezone.now()
        assert reversals.refundable_minor(top_up) == 0

    def test_what_was_spent_is_owed(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
        told = provider.fresh()
        provider.deliver(*[event for event in told if event["type"] == "checkout.session.completed"])
        ledger.hold(account=top_up.account, amount_minor=3500)
        provider.deliver(*told)
        assert balance(top_up) == 3500
        assert receivables.owed_minor(top_up.account) == 3500
        assert provider.held() == cleared() == 0

    @pytest.mark.parametrize(("evidence", "state", "left"), [("winning", "won", 5000), ("losing", "lost", 0)])
    def test_its_end(self, provider, evidence, state, left):
        top_up = paid_top_up(provider, card=DISPUTED)
        (theirs,) = provider.ask("GET", "disputes")["data"]
        provider.ask("POST", f"disputes/{theirs['id']}", **{"evidence[uncategorized_text]": f"{evidence}_evidence"})
        assert agree(provider)
        row = Dispute.objects.get()
        assert (row.state, row.withdrawn_minor) == (state, 5000 - left)
        assert row.ended_at is not None
        assert balance(top_up) == left

    def test_one_that_was_won_pays_the_debt_first(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
        told = provider.fresh()
        provider.deliver(*[event for event in told if event["type"] == "checkout.session.completed"])
        ledger.hold(account=top_up.account, amount_minor=5000)
        provider.deliver(*told)
        assert receivables.owed_minor(top_up.account) == 5000
        (theirs,) = provider.ask("GET", "disputes")["data"]
        provider.ask("POST", f"disputes/{theirs['id']}", **{"evidence[uncategorized_text]": "winning_evidence"})
        ledger.unhold(account=top_up.account, amount_minor=5000)
        assert agree(provider)
        assert receivables.owed_minor(top_up.account) == 0
        assert balance(top_up) == 5000

    def test_one_that_is_won_after_its_debt_was_written_off(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
        told = provider.fresh()
        provider.deliver(*[event for event in told if event["type"] == "checkout.session.completed"])
        ledger.hold(account=top_up.account, amount_minor=5000)
        provider.deliver(*told)
        clerk = UserFactory(is_superuser=True)
        receivables.write_off(account=top_up.account, amount_minor=5000, reason="Gone", user=clerk)
        (theirs,) = provider.ask("GET", "disputes")["data"]
        provider.ask("POST", f"disputes/{theirs['id']}", **{"evidence[uncategorized_text]": "winning_evidence"})
        assert agree(provider)
        assert balance(top_up) == 5000  # what is held of it, and nothing on top
        assert receivables.written_off_minor(top_up.account) == 0

    def test_an_inquiry_moves_nothing(self, provider):
        top_up = paid_top_up(provider)
        (charge,) = provider.provider.book.store.all("charge")
        book = provider.provider.book
        inquiry = book.make(
            "dispute", "du", amount=5000, balance_transactions=[], charge=charge["id"], currency="usd",
            payment_intent=charge["payment_intent"], reason="general", status="warning_needs_response",
        )  # fmt: skip
        book.emit("charge.dispute.created", inquiry)
        assert agree(provider)
        assert balance(top_up) == 5000
        book.change(inquiry, status="warning_closed")
        book.emit("charge.dispute.closed", inquiry)
        assert agree(provider)
        assert Dispute.objects.get().state == Dispute.States.WON

    def test_switches_automatic_top_ups_off_once(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
        setup = AutoTopUp.objects.create(account=top_up.account, is_on=True, threshold_minor=1, amount_minor=500)
        told = provider.fresh()
        provider.deliver(*told)
        setup.refresh_from_db()
        assert (setup.is_on, setup.last_failure) == (False, "disputed")
        AutoTopUp.objects.update(is_on=True)  # a person looked at it
        (theirs,) = provider.ask("GET", "disputes")["data"]
        provider.ask("POST", f"disputes/{theirs['id']}/close")
        assert agree(provider)
        setup.refresh_from_db()
        assert setup.is_on

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [({"currency": "eur"}, "currency is 'eur'"), ({"amount": 5001}, "of 5001"), ({"amount": 0}, "of 0")],
    )
    def test_what_does_not_match_is_quarantined(self, provider, changes, reason):
        top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
        (dispute,) = provider.provider.book.store.all("dispute")
        provider.provider.book.change(dispute, **changes)
        rows = provider.deliver()
        wrong = [row for row in rows if row.type.startswith("charge.dispute")]
        assert {row.state for row in wrong} == {StripeEvent.States.QUARANTINED}
        assert all(reason in row.reason for row in wrong)
        assert balance(top_up) == 5000


class TestAgain:
    """The bank takes the money, returns it, and takes it once more."""

    def test_each_movement_is_booked_as_it_comes(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED)
        seen = [balance(top_up)]
        for act in (lambda: end(provider, "won"), lambda: reopen(provider), lambda: end(provider, "won")):
            act()
            assert agree(provider)
            assert agree(provider)  # told again: nothing more
            seen.append(balance(top_up))
        assert seen == [0, 5000, 0, 5000]
        assert [row.amount_minor for row in DisputeMovement.objects.all()] == [5000, -5000, 5000, -5000]
        assert broken(BROKEN_BOOKS) == {}

    def test_its_state_follows(self, provider):
        paid_top_up(provider, card=DISPUTED)
        for act, state, ended in (
            (lambda: end(provider, "won"), "won", True),
            (lambda: reopen(provider), "open", False),
            (lambda: end(provider, "lost"), "lost", True),
        ):
            act()
            assert agree(provider)
            row = Dispute.objects.get()
            assert (row.state, row.ended_at is not None) == (state, ended)
        assert row.withdrawn_minor == 5000

    def test_nothing_of_it_can_be_refunded(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED)
        left = []
        for act in (lambda: end(provider, "won"), lambda: reopen(provider)):
            act()
            assert agree(provider)
            left.append(reversals.refundable_minor(top_up))
        assert left == [5000, 0]

    def test_of_a_payment_that_was_refunded_in_part(self, provider):
        """The bank takes what it likes; what is left to refund is nothing, and no less."""
        top_up = paid_top_up(provider)
        reversals.refund(top_up=top_up, amount_minor=2000, reason="Asked for", user=UserFactory())
        (charge,) = provider.provider.book.store.all("charge")
        intents.open_dispute(provider.provider.book, charge)
        theirs(provider)["amount"] = 5000
        move(provider, -2000)
        assert agree(provider)
        assert receivables.owed_minor(top_up.account) == 2000
        assert reversals.refundable_minor(top_up) == 0

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_told_in_any_order(self, provider, order):
        """Of four movements, with the money spent in between or not: what counts is what moved."""
        top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
        paid = provider.fresh()
        end(provider, "won")
        reopen(provider)
        told = provider.fresh()
        provider.deliver(*[event for event in paid if event["type"] == "checkout.session.completed"])
        parts = [paid, told[: len(told) // 2], told[len(told) // 2 :]]
        for number in order:
            provider.deliver(*parts[number])
            assert broken(BROKEN_BOOKS) == {}
        assert agree(provider)
        assert (balance(top_up), cleared()) == (0, 0)

    def test_only_the_last_is_told(self, provider):
        """Every event but one was lost, and that one is of the first withdrawal."""
        top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
        told = {event["type"]: event for event in provider.fresh()}
        end(provider, "won")
        reopen(provider)
        provider.fresh()
        assert apply(told["charge.dispute.created"]).state == StripeEvent.States.APPLIED
        assert DisputeMovement.objects.count() == 3
        assert balance(top_up) == provider.held() == cleared() == 0

    def test_what_was_spent_meanwhile_is_owed_then_paid(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED)
        end(provider, "won")
        assert agree(provider)
        ledger.hold(account=top_up.account, amount_minor=4000)
        reopen(provider)
        assert agree(provider)
        assert (balance(top_up), receivables.owed_minor(top_up.account)) == (4000, 4000)
        end(provider, "won")
        assert agree(provider)
        assert (balance(top_up), receivables.owed_minor(top_up.account)) == (5000, 0)

    def test_is_told_by_mail_again_and_switches_automatic_top_ups_off(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED)
        assert payment_mails.send_due() == 1
        end(provider, "won")
        provider.deliver()
        assert payment_mails.send_due() == 0
        Dispute.objects.update(opened_at=timezone.now() - timedelta(days=60))
        AutoTopUp.objects.create(account=top_up.account, is_on=True, threshold_minor=1, amount_minor=500)
        reopen(provider)
        for _ in range(2):
            provider.deliver()
            payment_mails.send_due()
        assert len(mail.outbox) == 2
        assert AutoTopUp.objects.get().last_failure == "disputed"


class TestAmounts:
    def test_a_part_comes_back(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED)
        move(provider, 2000)
        assert agree(provider)
        assert (balance(top_up), Dispute.objects.get().withdrawn_minor) == (2000, 3000)
        assert reversals.refundable_minor(top_up) == 2000

    @pytest.mark.parametrize("amount", [-1, 5001])
    def test_more_than_was_paid_is_a_persons_to_look_at(self, provider, amount):
        top_up = paid_top_up(provider, card=DISPUTED)
        move(provider, amount)
        (row,) = provider.deliver()
        assert row.state == StripeEvent.States.QUARANTINED
        assert f"has taken {5000 - amount} of a top-up of 5000" in row.reason
        assert balance(top_up) == 0
        assert DisputeMovement.objects.count() == 1

    def test_a_fee_is_not_the_customers(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED)
        move(provider, -1500, type="stripe_fee")
        provider.deliver()
        assert balance(top_up) == 0
        assert receivables.owed_minor(top_up.account) == 0
        assert Dispute.objects.get().withdrawn_minor == 5000

    def test_an_account_that_is_kept_in_another_currency(self, provider):
        """Its amounts are not ours, and its rates change: the disputed amount is taken, and given back."""
        top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
        book, found = provider.provider.book, theirs(provider)
        book.change(
            found, balance_transactions=[dict(found["balance_transactions"][0]) | {"amount": -4321, "currency": "eur"}]
        )
        seen = []
        for amount in (None, -65, 4400, -4380):
            if amount:
                move(provider, amount, currency="eur")
            provider.deliver()
            seen.append((balance(top_up), Dispute.objects.get().withdrawn_minor))
        assert seen == [(0, 5000), (0, 5000), (5000, 0), (0, 5000)]
        assert broken(BROKEN_BOOKS) == {}


@pytest.mark.django_db(transaction=True)
def test_many_at_once_book_each_movement_once(provider):
    top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
    end(provider, "won")
    reopen(provider)
    told = provider.fresh()
    calls = [lambda event=event: apply(event) for event in told] * 3
    for number in range(0, len(calls), 6):
        assert raised(together(*calls[number : number + 6])) == []
    while events.apply_waiting():
        pass
    assert (balance(top_up), DisputeMovement.objects.count()) == (0, 3)
    assert provider.held() == cleared() == 0


@pytest.mark.parametrize("case", ["taken", "won", "won between"])
def test_what_the_version_before_has_booked_is_not_booked_again(provider, case):
    """It wrote two transactions at most, flags and no ids; and while both versions work it may write the second."""
    top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
    told = provider.fresh()
    provider.deliver(*[event for event in told if event["type"] == "checkout.session.completed"])
    found = theirs(provider)
    row = Dispute.objects.create(
        dispute_id=found["id"], top_up=top_up, amount_minor=5000, is_withdrawn=True, opened_at=timezone.now()
    )
    moved = {"account": top_up.account, "amount_minor": 5000, "kind": "dispute", "description": "Before"}
    receivables.take_back(**moved, reference=f"dispute:{found['id']}")
    assert reversals.refundable_minor(top_up) == 0
    if case == "won between":
        provider.deliver(*told)
    if case != "taken":
        end(provider, "won")
        row.refresh_from_db()
        assert (row.is_withdrawn, row.is_reinstated) == (True, False)  # the version before would book it
        receivables.pay_in(**moved, reference=f"dispute-won:{found['id']}", returns=True)
        Dispute.objects.update(is_reinstated=True)
    provider.deliver(*told)
    assert agree(provider)
    row.refresh_from_db()
    assert (balance(top_up), row.withdrawn_minor) == ((0, 5000) if case == "taken" else (5000, 0))
    assert row.is_reinstated == (case != "taken")
    known = {each["id"] for each in found["balance_transactions"]}
    assert set(DisputeMovement.objects.values_list("balance_transaction", flat=True)) == known
    assert broken(BROKEN_BOOKS) == {}

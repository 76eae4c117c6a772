"""Refunds and disputes: the ledger follows the provider's object, in any order, and once."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from django.utils import timezone

from billing import automatic, events, ledger, receivables, reversals
from billing.errors import RefundRefused
from billing.models import Account, AutoTopUp, Refund, StripeEvent, TopUp
from tests.books import BROKEN_BOOKS, broken
from tests.factories.accounts import UserFactory
from tests.factories.billing import paid_top_up
from tests.provider import DISPUTED, REFUND_FAILS, lost
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def balance(top_up):
    top_up.account.refresh_from_db()
    return top_up.account.posted_minor


def cleared():
    """What our books say the provider holds."""
    return -ledger.platform_account(Account.Kinds.CLEARING, "USD").posted_minor


def agree(provider):
    """Every event is taken in; then both sides hold the same, and nothing waits for a person."""
    provider.deliver()
    assert provider.held() == cleared()
    waiting = {StripeEvent.States.QUARANTINED, StripeEvent.States.PARKED, StripeEvent.States.RECEIVED}
    assert not StripeEvent.objects.filter(state__in=waiting).exists()
    return True


def refund(top_up, amount_minor=2000):
    return reversals.refund(top_up=top_up, amount_minor=amount_minor, reason="Asked for", user=UserFactory())


class TestRefund:
    def test_goes_back_the_way_it_came(self, provider):
        top_up = paid_top_up(provider)
        made = refund(top_up, 2000)
        assert (made.state, made.top_up, made.amount_minor) == (Refund.States.SUCCEEDED, top_up, 2000)
        (theirs,) = provider.ask("GET", "refunds")["data"]
        assert (theirs["id"], theirs["payment_intent"]) == (made.refund_id, top_up.payment_intent)
        assert agree(provider)
        assert balance(top_up) == 3000
        assert reversals.refundable_minor(top_up) == 3000

    def test_more_than_the_balance_is_owed(self, provider):
        top_up = paid_top_up(provider)
        ledger.hold(account=top_up.account, amount_minor=4000)
        refund(top_up, 5000)
        assert agree(provider)
        assert balance(top_up) == 4000
        assert receivables.owed_minor(top_up.account) == 4000

    @pytest.mark.parametrize("amount", [0, -1, 5001, 10**9])
    def test_no_more_than_was_paid(self, provider, amount):
        top_up = paid_top_up(provider)
        with pytest.raises(RefundRefused) as caught:
            refund(top_up, amount)
        assert "$50.00" in str(caught.value.fields["amount_minor"])
        assert not Refund.objects.exists()

    def test_in_parts_until_nothing_is_left(self, provider):
        top_up = paid_top_up(provider)
        refund(top_up, 3000)
        refund(top_up, 2000)
        with pytest.raises(RefundRefused):
            refund(top_up, 1)
        assert agree(provider)
        assert provider.held() == 0

    def test_of_what_was_never_paid(self, provider):
        top_up = paid_top_up(provider)
        TopUp.objects.filter(pk=top_up.pk).update(state=TopUp.States.PENDING)
        top_up.refresh_from_db()
        with pytest.raises(RefundRefused):
            refund(top_up, 1)

    def test_a_provider_that_is_away_is_told_later_once(self, provider):
        top_up = paid_top_up(provider)
        provider.wire.before = lost
        made = refund(top_up)
        assert made.state == Refund.States.CREATED
        assert balance(top_up) == 3000  # it can't be spent meanwhile
        provider.wire.before = lambda *_call: None
        for _ in range(3):
            reversals.tell_waiting()
        made.refresh_from_db()
        assert made.state == Refund.States.SUCCEEDED
        assert agree(provider)
        assert provider.held() == 3000

    def test_an_answer_that_was_lost(self, provider):
        """The provider did it, and nobody heard: the same call again is the same refund."""
        top_up = paid_top_up(provider)
        provider.wire.after = lost
        assert refund(top_up).state == Refund.States.CREATED
        assert provider.held() == 3000
        provider.wire.after = lambda *_call: None
        assert agree(provider)
        assert Refund.objects.get().state == Refund.States.SUCCEEDED
        assert reversals.tell_waiting() == 0

    def test_two_workers_that_tell_at_the_same_moment(self, provider):
        """The sweep asks, hears of no refund, and tells, just before the first worker's call arrives."""
        top_up = paid_top_up(provider)

        def sweep_first(method, path):
            if (method, path) == ("POST", "/v1/refunds"):
                provider.wire.before = lambda *_call: None
                assert reversals.tell_waiting() == 1

        provider.wire.before = sweep_first
        assert refund(top_up, 2000).state == Refund.States.SUCCEEDED
        assert provider.held() == 3000
        assert agree(provider)

    @pytest.mark.parametrize("arrived", [True, False])
    def test_an_answer_that_was_lost_for_longer_than_keys_last(self, provider, arrived):
        top_up = paid_top_up(provider)
        if arrived:
            provider.wire.after = lost
        else:
            provider.wire.before = lost
        refund(top_up)
        provider.wire.after = provider.wire.before = lambda *_call: None
        Refund.objects.update(created_at=timezone.now() - timedelta(days=2))
        for key in list(provider.provider.book.store._objects["key"]):
            provider.provider.book.store.remove("key", key)
        reversals.tell_waiting()
        assert Refund.objects.get().state == Refund.States.SUCCEEDED
        assert provider.held() == 3000
        assert agree(provider)

    def test_one_that_the_provider_refuses_comes_back(self, provider):
        top_up = paid_top_up(provider)
        charge = provider.ask("GET", "charges")["data"][0]["id"]
        provider.ask("POST", "refunds", charge=charge, amount=4000)  # at the Dashboard, not yet told
        made = refund(top_up, 2000)
        assert made.state == Refund.States.FAILED
        assert "no more than" in made.failure
        assert agree(provider)
        assert balance(top_up) == 1000

    def test_one_that_fails_later_comes_back(self, provider):
        top_up = paid_top_up(provider, card=REFUND_FAILS)
        assert refund(top_up, 5000).state == Refund.States.SUCCEEDED
        assert balance(top_up) == 0
        assert agree(provider)
        assert Refund.objects.get().state == Refund.States.FAILED
        assert balance(top_up) == 5000
        assert reversals.refundable_minor(top_up) == 5000

    def test_one_that_failed_pays_the_debt_it_made(self, provider):
        top_up = paid_top_up(provider, card=REFUND_FAILS)
        ledger.hold(account=top_up.account, amount_minor=4000)
        refund(top_up, 5000)
        assert receivables.owed_minor(top_up.account) == 4000
        assert agree(provider)
        assert receivables.owed_minor(top_up.account) == 0
        assert balance(top_up) == 5000

    def test_one_made_at_the_dashboard(self, provider):
        top_up = paid_top_up(provider)
        provider.ask("POST", "refunds", payment_intent=top_up.payment_intent, amount=1500)
        assert agree(provider)
        assert agree(provider)
        assert balance(top_up) == 3500
        assert Refund.objects.get().requested_by is None

    def test_one_made_at_the_dashboard_while_ours_was_not_heard(self, provider):
        """Ours is refused then, and gives back what theirs takes: theirs waits for that, and for no person."""
        top_up = paid_top_up(provider)
        provider.wire.before = lost
        ours = refund(top_up, 3000)
        provider.wire.before = lambda *_call: None
        provider.ask("POST", "refunds", payment_intent=top_up.payment_intent, amount=4000)
        (theirs,) = [row for row in provider.deliver() if row.type == "refund.created"]
        assert (theirs.state, balance(top_up)) == (StripeEvent.States.PARKED, 2000)
        reversals.tell_waiting()
        ours.refresh_from_db()
        assert (ours.state, balance(top_up)) == (Refund.States.FAILED, 5000)
        events.apply(event_pk=theirs.pk)
        assert agree(provider)
        assert balance(top_up) == 1000

    def test_one_that_is_told_before_the_dispute_that_was_won(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED)
        (dispute,) = provider.ask("GET", "disputes")["data"]
        provider.ask("POST", f"disputes/{dispute['id']}", **{"evidence[uncategorized_text]": "winning_evidence"})
        provider.ask("POST", "refunds", payment_intent=top_up.payment_intent, amount=4000)
        told = provider.fresh()
        (early,) = provider.deliver(*[event for event in told if event["type"] == "refund.created"])
        assert early.state == StripeEvent.States.PARKED
        provider.deliver(*told)
        assert agree(provider)
        assert balance(top_up) == 1000

    def test_one_that_failed_before_it_was_heard_of_waits_for_no_room(self, provider):
        """What it gave back at the provider's may be refunded again by then."""
        top_up = paid_top_up(provider, card=REFUND_FAILS)
        provider.ask("POST", "refunds", payment_intent=top_up.payment_intent, amount=4000)
        told = [event for event in provider.fresh() if event["type"].startswith("refund.")]
        book = provider.provider.book
        book.change(next(book.store.all("refund")), status="failed")
        provider.wire.before = lost
        refund(top_up, 3000)
        provider.wire.before = lambda *_call: None
        rows = provider.deliver(*told)
        assert {row.state for row in rows} == {StripeEvent.States.APPLIED}
        assert (balance(top_up), Refund.objects.count()) == (2000, 1)

    def test_more_than_there_ever_was_is_a_persons_to_look_at_in_the_end(self, provider):
        top_up = paid_top_up(provider)
        provider.ask("POST", "refunds", payment_intent=top_up.payment_intent, amount=4000)
        provider.provider.book.change(next(provider.provider.book.store.all("refund")), amount=6000)
        (row,) = [row for row in provider.deliver() if row.type == "refund.created"]
        StripeEvent.objects.filter(pk=row.pk).update(received_at=timezone.now() - timedelta(days=4))
        events.apply(event_pk=row.pk)
        row.refresh_from_db()
        assert row.state == StripeEvent.States.QUARANTINED
        assert "(6000)" in row.reason
        assert balance(top_up) == 5000

    def test_is_not_charged_again_by_a_standing_order(self, provider):
        top_up = paid_top_up(provider)
        AutoTopUp.objects.create(account=top_up.account, is_on=True, threshold_minor=4000, amount_minor=5000)
        refund(top_up, 5000)
        setup = AutoTopUp.objects.get()
        assert (setup.is_on, setup.last_failure) == (False, "refunded")
        assert automatic.sweep() == 0

    def test_two_at_once_pay_back_no_more_than_there_is(self, provider):
        top_up = paid_top_up(provider)
        outcomes = [_try(lambda: refund(top_up, 3000)) for _ in range(2)]
        assert [type(error) for error in raised(outcomes)] == [RefundRefused]
        assert agree(provider)
        assert provider.held() == 2000


@pytest.mark.django_db(transaction=True)
def test_many_at_once_pay_back_no_more_than_there_is(provider):
    top_up = paid_top_up(provider)
    outcomes = together(*[lambda: refund(top_up, 2000)] * 6)
    assert {type(error) for error in raised(outcomes)} == {RefundRefused}
    assert len(raised(outcomes)) == 4
    told = provider.fresh()
    assert raised(together(*[lambda: provider.deliver(*told)] * 3)) == []
    assert provider.held() == cleared() == 1000


@pytest.mark.django_db(transaction=True)
def test_one_that_is_asked_for_many_times_at_once_is_one(provider):
    top_up, clerk, key = paid_top_up(provider), UserFactory(), uuid.uuid4()
    ask = {"top_up": top_up, "amount_minor": 1000, "reason": "Asked for", "user": clerk, "key": key}
    assert {row.pk for row in together(*[lambda: reversals.refund(**ask)] * 5)} == {key}
    provider.deliver(*provider.fresh())
    assert provider.held() == cleared() == 4000
    assert broken(BROKEN_BOOKS) == {}


def test_an_event_of_another_mode_moves_nothing(provider):
    top_up = paid_top_up(provider)
    provider.ask("POST", "refunds", payment_intent=top_up.payment_intent)
    rows = provider.deliver(*[event | {"livemode": True} for event in provider.fresh()])
    refunds = [row for row in rows if row.type.startswith("refund")]
    assert [row.state for row in refunds] == [StripeEvent.States.QUARANTINED]
    assert balance(top_up) == 5000


def _try(call):
    try:
        return call()
    except Exception as error:
        return error

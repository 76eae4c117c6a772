"""Refunds: the ledger follows the provider's object, in any order, and once."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from django.utils import timezone

from billing import auto_topup, events, gateway, ledger, receivables
from billing import refunds as billing_refunds
from billing.errors import RefundRefused
from billing.models import AutoTopUp, Refund, StripeEvent, TopUp
from console.accounts.models import AuditEvent
from tests.billing.paying import balance, both_sides_agree, forget_idempotency_keys
from tests.books import BROKEN_BOOKS, broken, cleared
from tests.factories.accounts import UserFactory
from tests.factories.billing import paid_top_up
from tests.provider import REFUND_FAILS
from tests.racing import raised, together

pytestmark = pytest.mark.django_db


def refund(top_up, amount_minor=2000):
    return billing_refunds.refund(top_up=top_up, amount_minor=amount_minor, reason="Asked for", user=UserFactory())


def test_a_refund_is_limited_to_the_rest_of_a_paid_top_up_and_switches_automatic_top_ups_off(top_up):
    AutoTopUp.objects.create(account=top_up.account, is_on=True, threshold_minor=4000, amount_minor=5000)
    made = refund(top_up, 3000)
    event = AuditEvent.objects.get(action="refund.started")
    assert (event.organization, event.actor) == (top_up.account.organization, made.requested_by)
    assert event.data == {"amount_minor": 3000, "currency": "USD", "reason": "Asked for"}
    setup = AutoTopUp.objects.get()
    assert (setup.is_on, setup.last_failure) == (False, "refunded")
    assert auto_topup.run_due() == 0
    for amount in (0, -1, 2001):
        with pytest.raises(RefundRefused) as caught:
            refund(top_up, amount)
        assert "$20.00" in str(caught.value.fields["amount_minor"])
    TopUp.objects.filter(pk=top_up.pk).update(state=TopUp.States.PENDING)
    with pytest.raises(RefundRefused):
        refund(TopUp.objects.get(), 1)
    assert Refund.objects.count() == 1


def test_a_late_answer_does_not_reopen_a_refund_that_succeeded(top_up):
    row = refund(top_up)
    assert row.state == Refund.States.SUCCEEDED
    stale = gateway.fetch_object("refund", row.refund_id) | {"status": "pending"}
    billing_refunds.apply_refund(stale, livemode=False)
    assert Refund.objects.values("state", "ended_at").get() == {"state": row.state, "ended_at": row.ended_at}


@pytest.mark.parametrize(("when", "is_key_forgotten"), [("before", False), ("after", False), ("after", True)])
def test_a_refund_is_retried_after_a_network_failure_and_made_once(provider, top_up, when, is_key_forgotten):
    with provider.network_failing(when):
        row = refund(top_up)
    assert row.state == Refund.States.CREATED
    assert balance(top_up) == 3000  # the 2000 can't be spent meanwhile
    if is_key_forgotten:
        Refund.objects.update(created_at=timezone.now() - timedelta(days=2))
        forget_idempotency_keys(provider)
    for _ in range(2):
        billing_refunds.submit_waiting()
    assert Refund.objects.get().state == Refund.States.SUCCEEDED
    assert both_sides_agree(provider)
    assert provider.held() == 3000


def test_the_oldest_refund_is_retried_first_if_more_wait_than_one_call_may_submit(provider, top_up, monkeypatch):
    monkeypatch.setattr(billing_refunds, "MAX_SUBMITTED", 1)
    with provider.network_failing():
        oldest, _newer = refund(top_up, 2000), refund(top_up, 1000)
    assert billing_refunds.submit_waiting() == 1
    assert list(Refund.objects.filter(state=Refund.States.SUCCEEDED)) == [oldest]


def test_a_refund_is_made_once_by_two_workers_that_submit_it_at_the_same_moment(provider, top_up):
    """The second worker finds no refund at the provider, and submits it just before the first worker's call arrives."""

    def submit_first(method, path):
        if (method, path) == ("POST", "/v1/refunds"):
            provider.wire.before = lambda *_call: None
            assert billing_refunds.submit_waiting() == 1

    provider.wire.before = submit_first
    assert refund(top_up, 2000).state == Refund.States.SUCCEEDED
    assert provider.held() == 3000
    assert both_sides_agree(provider)


def test_a_refund_that_fails_later_returns_to_the_wallet_and_pays_the_debt_it_made(provider):
    top_up = paid_top_up(provider, card=REFUND_FAILS)
    ledger.hold(account=top_up.account, amount_minor=4000)
    assert refund(top_up, 5000).state == Refund.States.SUCCEEDED
    assert (balance(top_up), receivables.owed_minor(top_up.account)) == (4000, 4000)
    assert both_sides_agree(provider)
    assert Refund.objects.get().state == Refund.States.FAILED
    assert (balance(top_up), receivables.owed_minor(top_up.account)) == (5000, 0)
    assert billing_refunds.refundable_minor(top_up) == 5000


class TestMadeAtTheDashboard:
    def test_waits_while_a_refund_of_ours_that_will_be_refused_takes_the_rest(self, provider, top_up):
        with provider.network_failing():
            console_refund = refund(top_up, 3000)
        provider.ask("POST", "refunds", payment_intent=top_up.payment_intent, amount=4000)
        (dashboard_event,) = [row for row in provider.deliver() if row.type == "refund.created"]
        assert (dashboard_event.state, balance(top_up)) == (StripeEvent.States.PARKED, 2000)
        billing_refunds.submit_waiting()
        console_refund.refresh_from_db()
        assert (console_refund.state, balance(top_up)) == (Refund.States.FAILED, 5000)
        assert "no more than" in console_refund.failure
        events.apply(event_pk=dashboard_event.pk)
        assert both_sides_agree(provider)
        assert balance(top_up) == 1000

    def test_that_failed_before_its_event_came_takes_nothing(self, provider):
        top_up = paid_top_up(provider, card=REFUND_FAILS)
        provider.ask("POST", "refunds", payment_intent=top_up.payment_intent, amount=4000)
        created = [event for event in provider.fresh() if event["type"].startswith("refund.")]
        stripe_account = provider.sandbox.account
        stripe_account.change(next(stripe_account.store.all("refund")), status="failed")
        with provider.network_failing():
            refund(top_up, 3000)  # waits for the provider, and leaves no room for the 4000
        assert {row.state for row in provider.deliver(*created)} == {StripeEvent.States.APPLIED}
        assert (balance(top_up), Refund.objects.count()) == (2000, 1)

    def test_in_another_mode_moves_nothing(self, provider, top_up):
        provider.ask("POST", "refunds", payment_intent=top_up.payment_intent)
        rows = provider.deliver(*[event | {"livemode": True} for event in provider.fresh()])
        assert [row.state for row in rows if row.type == "refund.created"] == [StripeEvent.States.QUARANTINED]
        assert balance(top_up) == 5000


@pytest.mark.django_db(transaction=True)
def test_requests_at_once_with_one_key_make_one_refund_and_others_are_limited_to_the_top_up(provider):
    top_up, clerk, key = paid_top_up(provider), UserFactory(), uuid.uuid4()
    ask = {"top_up": top_up, "amount_minor": 700, "reason": "Asked for", "user": clerk, "key": key}
    assert {row.pk for row in together(*[lambda: billing_refunds.refund(**ask)] * 5)} == {key}
    outcomes = together(*[lambda: refund(top_up, 2000)] * 6)
    assert [type(error) for error in raised(outcomes)] == [RefundRefused] * 4
    fresh = provider.fresh()
    assert raised(together(*[lambda: provider.deliver(*fresh)] * 3)) == []
    assert provider.held() == cleared() == 5000 - 700 - 2 * 2000
    assert broken(BROKEN_BOOKS) == {}

"""The provider's events: stored once, applied once, in any order.

One that cannot be applied yet is parked, and retried. One that contradicts our rows is quarantined: an administrator
must decide.
"""

from __future__ import annotations

from datetime import timedelta
from unittest.mock import Mock

import pytest
from django.utils import timezone

from billing import events, tasks
from billing.models import StripeEvent, TopUp, Transaction
from console.notifications.models import Notification
from tests.billing.paying import balance
from tests.factories.billing import TopUpFactory, paid_top_up, session_event
from tests.provider import DISPUTED, apply, receive
from tests.racing import raised, together

States = StripeEvent.States
QUARANTINED, APPLIED, IGNORED, PARKED = States.QUARANTINED, States.APPLIED, States.IGNORED, States.PARKED
PAID, PAID_LATER, FAILED_LATER, EXPIRED = (
    {"kind": "checkout.session.completed"},
    {"kind": "checkout.session.async_payment_succeeded"},
    {"kind": "checkout.session.async_payment_failed", "payment_status": "unpaid"},
    {"kind": "checkout.session.expired", "payment_status": "unpaid"},
)
UNPAID = PAID | {"payment_status": "unpaid"}
"""The page was completed, but its payment takes days."""
pytestmark = pytest.mark.django_db


class TestApply:
    @pytest.mark.parametrize(
        ("sequence", "credited", "state"),
        [
            pytest.param([PAID, PAID_LATER, PAID, PAID_LATER], 5000, "paid", id="events of one payment credit it once"),
            pytest.param([UNPAID], 0, "pending", id="a slow payment, which takes days, is not credited yet"),
            pytest.param([UNPAID, PAID_LATER], 5000, "paid", id="a slow payment is credited when it is paid"),
            pytest.param([PAID_LATER, UNPAID], 5000, "paid", id="a slow payment is credited in any order of events"),
            pytest.param([UNPAID, FAILED_LATER], 0, "failed", id="a slow payment that fails credits nothing"),
            pytest.param([EXPIRED], 0, "expired", id="an expired page credits nothing"),
            pytest.param([EXPIRED, PAID], 5000, "paid", id="what was paid is credited though the page expired first"),
            pytest.param([PAID, EXPIRED], 5000, "paid", id="what was paid is credited though the page expires later"),
        ],
    )
    def test_events_of_one_top_up_credit_it_once_if_it_was_paid(self, sequence, credited, state):
        top_up = TopUpFactory()
        for changes in sequence:
            assert apply(session_event(top_up, **changes)).state == APPLIED
        assert (balance(top_up), top_up.state) == (credited, state)

    @pytest.mark.parametrize("is_paid", [False, True], ids=["pending", "paid"])
    def test_an_event_that_does_not_match_our_row_is_quarantined(self, is_paid):
        top_up = TopUpFactory()
        if is_paid:
            apply(session_event(top_up))
        before = balance(top_up), top_up.state
        for change, reason in (
            ({"amount_total": 4999}, "amount_total is 4999, not 5000"),
            ({"amount_total": None}, "amount_total is None, not 5000"),
            ({"currency": "jpy"}, "currency is 'JPY', not 'USD'"),
            ({"currency": None}, "currency is 'NONE', not 'USD'"),
            ({"livemode": True}, "livemode is True, not False"),
            ({"livemode": None}, "livemode is None, not False"),
            ({"id": "cs_another"}, "session is 'cs_another'"),
            ({"client_reference_id": None}, "No top-up of ours"),
            ({"client_reference_id": "b3a2b1c4-0000-4000-8000-000000000000"}, "No top-up of ours"),
            ({"client_reference_id": 10**40}, "No top-up of ours"),
            ({"amount_total": 1, "currency": "eur"}, "amount_total is 1, not 5000; currency is 'EUR', not 'USD'"),
        ):
            stored = apply(session_event(top_up, **change))
            assert (stored.state, reason in stored.reason) == (QUARANTINED, True), change
            assert (balance(top_up), top_up.state) == before

    def test_an_event_without_a_session_is_quarantined_and_one_of_an_unknown_type_ignored(self):
        for number, data in enumerate((None, [], "x", {}, {"object": None}, {"object": "cs_1"}, {"object": []})):
            stored = apply({"id": f"evt_{number}", "type": "checkout.session.completed", "data": data})
            assert (stored.state, stored.reason) == (QUARANTINED, "The event carries no Checkout Session.")
        assert apply(session_event(TopUpFactory(), kind="invoice.finalized")).state == IGNORED
        assert not Transaction.objects.exists()

    def test_a_payment_is_dated_by_its_event_unless_its_time_is_unreadable(self):
        top_up = TopUpFactory()
        apply(session_event(top_up) | {"created": 1_700_000_000})
        assert (balance(top_up), top_up.paid_at.timestamp()) == (5000, 1_700_000_000)
        for created in (None, "soon", 10**20, 1e300, []):
            top_up = TopUpFactory()
            assert apply(session_event(top_up) | {"created": created}).state == APPLIED
            assert balance(top_up) == 5000
            assert top_up.paid_at is not None


@pytest.mark.django_db(transaction=True)
def test_deliveries_at_once_of_one_event_and_several_events_of_one_payment_credit_once():
    top_up = TopUpFactory()
    chosen = [session_event(top_up)] * 20 + [session_event(top_up) for _ in range(5)]
    assert raised(together(*[lambda event=event: apply(event) for event in chosen])) == []
    assert balance(top_up) == 5000
    assert Notification.objects.filter(kind="wallet.topped_up").count() == 1


class TestOutOfOrder:
    def test_a_dispute_before_its_payment_fetches_the_payment(self, provider):
        top_up = paid_top_up(provider, card=DISPUTED, deliver=False)
        by_type = {event["type"]: event for event in provider.fresh()}
        for kind in ("charge.dispute.created", "checkout.session.completed", "charge.dispute.funds_withdrawn"):
            assert apply(by_type[kind]).state == APPLIED
            assert balance(top_up) == 0
            assert Transaction.objects.count() == 2  # the payment and its withdrawal

    def test_an_object_of_no_top_up_is_parked_then_quarantined_and_an_unknown_one_at_once(self, provider):
        customer = provider.ask("POST", "customers", name="Somebody")["id"]
        intent = provider.ask(
            "POST", "payment_intents", amount=700, currency="usd", customer=customer, payment_method="tok_visa",
            confirm="true",
        )  # fmt: skip
        provider.ask("POST", "refunds", payment_intent=intent["id"])
        row = apply(next(event for event in provider.fresh() if event["type"] == "refund.created"))
        assert row.state == PARKED
        assert "No top-up has this payment intent" in row.reason
        assert row.retry_at > timezone.now()
        StripeEvent.objects.update(received_at=timezone.now() - events.MAX_PARKED_AGE - timedelta(seconds=1))
        events.apply(event_pk=row.pk)
        row.refresh_from_db()
        assert row.state == QUARANTINED
        forged = {"id": "evt_1", "type": "refund.created", "livemode": False}
        row = apply(forged | {"data": {"object": {"id": "re_unknown", "object": "refund"}}})
        assert row.state == QUARANTINED
        assert "does not know this object" in row.reason

    def test_an_event_waits_longer_and_longer_while_the_provider_does_not_answer(self, provider):
        paid_top_up(provider, card=DISPUTED, deliver=False)
        row = receive(next(event for event in provider.fresh() if event["type"] == "charge.dispute.created"))
        waits = []
        with provider.network_failing():
            for _ in range(len(events.RETRY_SECONDS) + 1):
                events.apply(event_pk=row.pk)
                row.refresh_from_db()
                waits.append(round((row.retry_at - timezone.now()).total_seconds()))
        assert row.state == PARKED
        assert waits == pytest.approx([*events.RETRY_SECONDS, events.RETRY_SECONDS[-1]], abs=2)
        assert events.apply_waiting() == 0  # not before its time
        StripeEvent.objects.update(retry_at=timezone.now())
        assert events.apply_waiting() == 1
        row.refresh_from_db()
        assert (row.state, row.reason, row.retry_at) == (APPLIED, "", None)


class TestBrokenEvents:
    @pytest.mark.parametrize("odd", ["a\0b", "\ud800", "\\u0000", "𝔘"])
    def test_text_that_the_database_cannot_store_stops_neither_the_webhook_nor_the_fetch_of_missed_events(
        self, provider, odd
    ):
        """A payer may type such text at the provider's page. The payment is credited all the same."""
        top_up = paid_top_up(provider, deliver=False)
        session = provider.sandbox.account.store.get("checkout.session", top_up.session_id)
        details = {"customer_details": {"name": odd, odd: [odd]}}
        session |= details
        event = session_event(top_up)
        event["data"]["object"] |= {"id": top_up.session_id, "payment_intent": session["payment_intent"]} | details
        provider.sandbox.account.emit("checkout.session.completed", session)
        assert apply(event).state == APPLIED
        assert events.fetch_undelivered() > 0
        while events.apply_waiting():
            pass
        assert balance(top_up) == 5000
        if odd in {"\\u0000", "𝔘"}:  # which the database can store
            payload = StripeEvent.objects.get(event_id=event["id"]).payload
            assert payload["data"]["object"]["customer_details"] == details["customer_details"]

    def test_a_failure_after_the_money_moved_is_rolled_back(self, monkeypatch):
        top_up = TopUpFactory()
        monkeypatch.setattr(TopUp, "save", Mock(side_effect=RuntimeError("after the money")))
        assert apply(session_event(top_up)).state == PARKED
        assert balance(top_up) == 0
        assert not Transaction.objects.exists()


def test_events_that_never_came_are_fetched_by_the_next_task_when_the_provider_answers(provider, caplog):
    top_ups = [paid_top_up(provider, deliver=False) for _ in range(3)]
    apply(next(event for event in provider.fresh() if event["type"] == "checkout.session.completed"))
    with provider.network_failing():
        tasks.fetch_events()
    assert "did not answer" in caplog.text
    assert events.fetch_undelivered() == len(provider.sandbox.events()) - 1  # all but the event that came
    assert events.fetch_undelivered() == 0
    events.apply_waiting()
    top_ups.append(paid_top_up(provider, deliver=False))
    tasks.fetch_events()
    assert [balance(top_up) for top_up in top_ups] == [5000] * 4


def test_an_event_that_another_worker_closed_meanwhile_is_left_alone(monkeypatch):
    row = receive(session_event(TopUpFactory()))

    def fetch_slowly(event):
        StripeEvent.objects.update(state=IGNORED)
        return event.payload["data"]["object"]

    monkeypatch.setattr(events, "_prepare_object", fetch_slowly)
    events.apply(event_pk=row.pk)
    row.refresh_from_db()
    assert row.state == IGNORED
    assert not Transaction.objects.exists()

"""The provider's events: stored once, acted on once, in any order; parked or quarantined where they can't be."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from billing import events, gateway, payments
from billing.errors import PaymentUnavailable
from billing.models import StripeEvent, TopUp, Transaction
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import TopUpFactory, session_event, wallet
from tests.provider import DISPUTED, apply, lost, receive
from tests.racing import raised, together

QUARANTINED, APPLIED, IGNORED, PARKED, RECEIVED = (
    StripeEvent.States.QUARANTINED,
    StripeEvent.States.APPLIED,
    StripeEvent.States.IGNORED,
    StripeEvent.States.PARKED,
    StripeEvent.States.RECEIVED,
)


def balance(top_up):
    top_up.refresh_from_db()
    top_up.account.refresh_from_db()
    return top_up.account.posted_minor


def paid_page(provider, card="4242 4242 4242 4242"):
    """A top-up whose page was paid; its events wait."""
    member = MembershipFactory()
    account = wallet(member.organization)
    top_up = payments.start_top_up(account=account, amount_minor=5000, user=member.user)
    provider.pay(top_up.session_id, card)
    return top_up


@pytest.mark.django_db
class TestApply:
    def test_a_paid_session_credits_its_top_up(self):
        top_up = TopUpFactory()
        event = session_event(top_up)
        stored = apply(event)
        assert (stored.state, stored.reason) == (APPLIED, "")
        assert stored.applied_at is not None
        assert balance(top_up) == 5000
        assert top_up.state == TopUp.States.PAID
        assert int(top_up.paid_at.timestamp()) == event["created"]
        assert Transaction.objects.filter(reference=f"top-up:{top_up.pk}").count() == 1

    def test_again_and_again(self):
        top_up = TopUpFactory()
        stored = apply(session_event(top_up))
        for _ in range(3):
            events.apply(event_pk=stored.pk)
        assert balance(top_up) == 5000

    def test_other_events_of_the_same_payment_credit_nothing_more(self):
        """Money is keyed on the top-up: events with other ids, of either type, are about the same payment."""
        top_up = TopUpFactory()
        kinds = ["checkout.session.completed", "checkout.session.async_payment_succeeded"]
        for kind in kinds * 2:
            assert apply(session_event(top_up, kind=kind)).state == APPLIED
        assert balance(top_up) == 5000

    def test_a_payment_method_that_takes_days(self):
        top_up = TopUpFactory()
        apply(session_event(top_up, payment_status="unpaid"))
        assert balance(top_up) == 0
        assert top_up.state == TopUp.States.PENDING
        apply(session_event(top_up, kind="checkout.session.async_payment_succeeded"))
        assert balance(top_up) == 5000

    def test_the_same_out_of_order(self):
        top_up = TopUpFactory()
        apply(session_event(top_up, kind="checkout.session.async_payment_succeeded"))
        apply(session_event(top_up, payment_status="unpaid"))
        assert balance(top_up) == 5000
        assert top_up.state == TopUp.States.PAID

    def test_an_expired_page(self):
        top_up = TopUpFactory()
        expired = session_event(top_up, kind="checkout.session.expired", payment_status="unpaid")
        assert apply(expired).state == APPLIED
        assert balance(top_up) == 0
        assert top_up.state == TopUp.States.EXPIRED

    def test_expired_and_paid_out_of_order(self):
        """What was paid is credited, whichever event came first."""
        late, early = TopUpFactory(), TopUpFactory()
        apply(session_event(late, kind="checkout.session.expired", payment_status="unpaid"))
        apply(session_event(late))
        apply(session_event(early))
        apply(session_event(early, kind="checkout.session.expired", payment_status="unpaid"))
        for top_up in (late, early):
            assert balance(top_up) == 5000
            assert top_up.state == TopUp.States.PAID

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"amount_total": 4999}, "amount_total is 4999, not 5000"),
            ({"amount_total": 500_000}, "amount_total is 500000, not 5000"),
            ({"amount_total": None}, "amount_total is None, not 5000"),
            ({"currency": "jpy"}, "currency is 'JPY', not 'USD'"),
            ({"currency": None}, "currency is 'NONE', not 'USD'"),
            ({"livemode": True}, "livemode is True, not False"),
            ({"livemode": None}, "livemode is None, not False"),
            ({"id": "cs_another"}, "session is 'cs_another'"),
            ({"client_reference_id": None}, "No top-up of ours"),
            ({"client_reference_id": "b3a2b1c4-0000-4000-8000-000000000000"}, "No top-up of ours"),
            ({"client_reference_id": "garbage"}, "No top-up of ours"),
            ({"client_reference_id": 10**40}, "No top-up of ours"),
            ({"client_reference_id": ["a"]}, "No top-up of ours"),
            ({"client_reference_id": {"a": 1}}, "No top-up of ours"),
        ],
    )
    def test_what_does_not_match_our_row_is_quarantined(self, change, reason):
        top_up = TopUpFactory()
        stored = apply(session_event(top_up, **change))
        assert stored.state == QUARANTINED
        assert reason in stored.reason
        assert balance(top_up) == 0
        assert top_up.state == TopUp.States.PENDING

    def test_every_mismatch_is_named(self):
        stored = apply(session_event(TopUpFactory(), amount_total=1, currency="eur"))
        assert "amount_total" in stored.reason
        assert "currency" in stored.reason

    @pytest.mark.parametrize("data", [None, [], "x", {}, {"object": None}, {"object": "cs_1"}, {"object": []}])
    def test_an_event_without_a_session(self, data):
        stored = apply({"id": "evt_1", "type": "checkout.session.completed", "data": data})
        assert (stored.state, stored.reason) == (QUARANTINED, "The event carries no Checkout Session.")

    @pytest.mark.parametrize("created", [None, "soon", 10**20, -(10**20), 1e300, [], True])
    def test_a_time_that_cannot_be_read_holds_no_money_up(self, created):
        top_up = TopUpFactory()
        event = session_event(top_up) | {"created": created}
        assert apply(event).state == APPLIED
        assert balance(top_up) == 5000
        assert top_up.paid_at is not None

    def test_an_unknown_type_is_ignored(self):
        top_up = TopUpFactory()
        assert apply(session_event(top_up, kind="invoice.finalized")).state == IGNORED
        assert balance(top_up) == 0

    def test_apply_again_credits_once_the_row_is_right(self):
        top_up = TopUpFactory(session_id="cs_typo")
        stored = apply(session_event(top_up, id="cs_right"))
        assert stored.state == QUARANTINED
        TopUp.objects.filter(pk=top_up.pk).update(session_id="cs_right")
        events.apply(event_pk=stored.pk)  # a worker's: it waits for a person
        assert balance(top_up) == 0
        for _ in range(2):
            events.apply(event_pk=stored.pk, again=True)
        stored.refresh_from_db()
        assert (stored.state, stored.reason) == (APPLIED, "")
        assert balance(top_up) == 5000

    def test_a_quarantined_event_of_a_paid_top_up_changes_nothing(self):
        top_up = TopUpFactory()
        apply(session_event(top_up))
        assert apply(session_event(top_up, amount_total=1)).state == QUARANTINED
        assert balance(top_up) == 5000
        assert top_up.state == TopUp.States.PAID


@pytest.mark.django_db(transaction=True)
class TestAtOnce:
    def test_fifty_deliveries_credit_once(self):
        top_up = TopUpFactory()
        event = session_event(top_up)
        outcomes = []
        for _ in range(2):
            outcomes += together(*[lambda: apply(event).state] * 25)
        assert raised(outcomes) == []
        assert balance(top_up) == 5000

    def test_two_events_of_one_payment_credit_once(self):
        for _ in range(5):
            top_up = TopUpFactory()
            events = [session_event(top_up) for _ in range(4)]
            assert raised(together(*(lambda event=event: apply(event) for event in events))) == []
            assert balance(top_up) == 5000

    def test_payments_into_one_wallet_are_all_credited(self):
        account = wallet()
        top_ups = [TopUpFactory(account=account) for _ in range(8)]
        assert raised(together(*(lambda top_up=top_up: apply(session_event(top_up)) for top_up in top_ups))) == []
        assert balance(top_ups[0]) == 8 * 5000


@pytest.mark.django_db
class TestOutOfOrder:
    def test_a_dispute_before_its_payment_asks_for_the_payment(self, provider):
        """The bank disputed at once, and only that event has come: the page is asked for, and credited, first."""
        top_up = paid_page(provider, DISPUTED)
        told = {event["type"]: event for event in provider.fresh()}
        assert apply(told["charge.dispute.created"]).state == APPLIED
        assert Transaction.objects.filter(reference=f"top-up:{top_up.pk}").count() == 1
        assert balance(top_up) == 0
        assert apply(told["checkout.session.completed"]).state == APPLIED
        assert apply(told["charge.dispute.funds_withdrawn"]).state == APPLIED
        assert balance(top_up) == 0
        assert Transaction.objects.count() == 2

    def test_an_old_event_does_not_turn_back_what_came_later(self, provider):
        """Of a dispute that was won: first the end is told, then the beginning."""
        top_up = paid_page(provider, DISPUTED)
        (dispute,) = provider.provider.book.store.all("dispute")
        provider.ask("POST", f"disputes/{dispute['id']}", **{"evidence[uncategorized_text]": "winning_evidence"})
        for event in reversed(provider.fresh()):
            assert apply(event).state in {APPLIED, IGNORED}
        assert balance(top_up) == 5000
        assert top_up.disputes.get().state == "won"

    def test_what_is_about_nothing_of_ours_is_parked_then_quarantined(self, provider):
        customer = provider.ask("POST", "customers", name="Somebody")["id"]
        intent = provider.ask(
            "POST", "payment_intents", amount=700, currency="usd", customer=customer, payment_method="tok_visa",
            confirm="true",
        )  # fmt: skip
        provider.ask("POST", "refunds", payment_intent=intent["id"])
        told = {event["type"]: event for event in provider.fresh()}
        row = apply(told["refund.created"])
        assert row.state == PARKED
        assert "not (yet) a top-up of ours" in row.reason
        assert row.retry_at > timezone.now()
        StripeEvent.objects.update(received_at=timezone.now() - events.PARKED_AT_MOST - timedelta(seconds=1))
        events.apply(event_pk=row.pk)
        row.refresh_from_db()
        assert row.state == QUARANTINED

    def test_an_object_the_provider_does_not_know_is_quarantined(self, provider):
        forged = {"id": "evt_1", "type": "refund.created", "livemode": False}
        row = apply(forged | {"data": {"object": {"id": "re_unknown", "object": "refund"}}})
        assert row.state == QUARANTINED
        assert "knows nothing of it" in row.reason

    def test_while_the_provider_is_away_it_waits_longer_and_longer(self, provider):
        paid_page(provider, DISPUTED)
        told = {event["type"]: event for event in provider.fresh()}
        provider.wire.before = lost
        row = receive(told["charge.dispute.created"])
        waits = []
        for _ in range(len(events.PARK_SECONDS) + 1):
            events.apply(event_pk=row.pk)
            row.refresh_from_db()
            waits.append(round((row.retry_at - timezone.now()).total_seconds()))
        assert row.state == PARKED
        assert waits == pytest.approx([*events.PARK_SECONDS, events.PARK_SECONDS[-1]], abs=2)
        assert events.apply_waiting() == 0  # not before its time
        provider.wire.before = lambda *_call: None
        StripeEvent.objects.update(retry_at=timezone.now())
        assert events.apply_waiting() == 1
        row.refresh_from_db()
        assert (row.state, row.reason, row.retry_at) == (APPLIED, "", None)


@pytest.mark.django_db
class TestPoison:
    @pytest.mark.parametrize("odd", ["\0", "a\0b", "\ud800", "\udc00\ud800", "\\u0000", "𝔘"])
    def test_text_that_the_database_cannot_keep_holds_up_neither_webhook_nor_sweep(self, provider, odd):
        """A payer typed it at the provider's page: the payment is credited all the same."""
        top_up = paid_page(provider)
        session = provider.provider.book.store.get("checkout.session", top_up.session_id)
        session["customer_details"] = {"name": odd, odd: [odd]}
        event = session_event(top_up)
        event["data"]["object"] |= {"id": top_up.session_id, "payment_intent": session["payment_intent"]}
        event["data"]["object"]["customer_details"] = {"name": odd, odd: [odd]}
        provider.provider.book.emit("checkout.session.completed", session)
        assert apply(event).state == APPLIED
        assert events.fetch_undelivered() > 0
        while events.apply_waiting():
            pass
        assert balance(top_up) == 5000
        kept = StripeEvent.objects.get(event_id=event["id"]).payload["data"]["object"]["customer_details"]
        if odd in {"\\u0000", "𝔘"}:
            assert kept == {"name": odd, odd: [odd]}

    def test_one_poisoned_event_keeps_no_other_from_being_applied(self, monkeypatch, caplog):
        first, poisoned, last = [receive(session_event(TopUpFactory())) for _ in range(3)]
        handle = events.HANDLERS["checkout.session.completed"]

        def choke(found, payload):
            if payload["id"] == poisoned.event_id:
                raise RuntimeError("poison")
            return handle(found, payload)

        monkeypatch.setitem(events.HANDLERS, "checkout.session.completed", choke)
        assert events.apply_waiting() == 3
        assert events.apply_waiting() == 0
        states = [StripeEvent.objects.get(pk=event.pk).state for event in (first, poisoned, last)]
        assert states == [APPLIED, PARKED, APPLIED]
        assert StripeEvent.objects.get(pk=poisoned.pk).reason == "RuntimeError: poison"
        assert f"Payment event {poisoned.pk}" in caplog.text

    def test_what_failed_half_way_left_nothing_behind(self, monkeypatch):
        top_up = TopUpFactory()

        def break_down(*_arguments, **_options):
            raise RuntimeError("after the money")

        monkeypatch.setattr(TopUp, "save", break_down)
        assert apply(session_event(top_up)).state == PARKED
        assert balance(top_up) == 0
        assert not Transaction.objects.exists()


@pytest.mark.django_db
class TestFetchUndelivered:
    def test_stores_what_never_came_and_leaves_the_rest(self, provider):
        top_ups = [paid_page(provider) for _ in range(3)]
        told = [event for event in provider.fresh() if event["type"] == "checkout.session.completed"]
        apply(told[0])
        fresh = events.fetch_undelivered()
        assert fresh == len(provider.provider.events()) - 1
        assert events.fetch_undelivered() == 0
        events.apply_waiting()
        assert [balance(top_up) for top_up in top_ups] == [5000] * 3

    def test_more_than_a_page_of_them(self, provider):
        for number in range(230):
            provider.ask("POST", "customers", name=f"Customer {number}")
        assert events.fetch_undelivered() == 230
        assert StripeEvent.objects.count() == 230

    def test_how_far_it_looks_back(self, monkeypatch):
        asked = []
        monkeypatch.setattr(gateway, "events_since", lambda created: asked.append(created) or iter(()))
        events.fetch_undelivered()
        assert abs(timezone.now().timestamp() - events.FETCH_BACK.total_seconds() - asked[0]) < 60

    def test_a_provider_that_is_away(self, provider):
        provider.wire.before = lost
        with pytest.raises(PaymentUnavailable):
            events.fetch_undelivered()


@pytest.mark.django_db
def test_an_event_is_stored_as_it_came():
    event = session_event(TopUpFactory()) | {"strange": ["\u00e9", None, 1.5]}
    assert events.store(event, json.dumps(event)) is not None
    assert events.store(event, json.dumps(event)) is None
    stored = StripeEvent.objects.get()
    assert (stored.payload, stored.state, stored.type) == (event, RECEIVED, event["type"])


@pytest.mark.django_db
def test_an_event_that_another_worker_closed_meanwhile_is_left_alone(monkeypatch):
    row = receive(session_event(TopUpFactory()))

    def ask_and_be_overtaken(event):
        StripeEvent.objects.update(state=IGNORED)
        return event.payload["data"]["object"]

    monkeypatch.setattr(events, "_found", ask_and_be_overtaken)
    events.apply(event_pk=row.pk)
    row.refresh_from_db()
    assert row.state == IGNORED
    assert not Transaction.objects.exists()

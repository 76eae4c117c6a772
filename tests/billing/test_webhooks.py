"""The provider's way in."""

from __future__ import annotations

import threading
from queue import Empty, Queue

import psycopg
import pytest
from django.db import connection
from kombu.exceptions import OperationalError

from billing import events, tasks, webhooks
from billing.models import StripeEvent, TopUp
from tests.factories.billing import TopUpFactory, session_event, signed
from tests.racing import raised, together


@pytest.fixture
def rings(monkeypatch):
    """How often the bell was rung."""
    rung = []
    monkeypatch.setattr(webhooks.bell, "ring", lambda: rung.append(True))
    return rung


def deliver(client, event, **options):
    body, header = signed(event, **options)
    return client.post(
        "/webhooks/stripe/", data=body, content_type="application/json", headers={"Stripe-Signature": header}
    )


@pytest.mark.django_db(transaction=True)
class TestDelivery:
    def test_is_stored_answered_and_hinted(self, client, rings):
        event = session_event(TopUpFactory())
        assert deliver(client, event).status_code == 200
        stored = StripeEvent.objects.get()
        assert (stored.event_id, stored.payload, stored.state) == (event["id"], event, StripeEvent.States.RECEIVED)
        assert len(rings) == 1

    def test_again_is_the_same_event(self, client, rings):
        event = session_event(TopUpFactory())
        assert [deliver(client, event).status_code for _ in range(3)] == [200, 200, 200]
        assert StripeEvent.objects.count() == 1
        assert len(rings) == 1  # the second and the third are no news

    def test_again_with_another_body_is_the_first_one(self, client, rings):
        """Whoever holds a secret of ours can't make an event say more than it said."""
        top_up = TopUpFactory()
        first = session_event(top_up, payment_status="unpaid")
        dearer = {**first, "data": {"object": first["data"]["object"] | {"payment_status": "paid"}}}
        assert [deliver(client, event).status_code for event in (first, dearer)] == [200, 200]
        stored = StripeEvent.objects.get()
        assert stored.payload == first
        events.apply(event_pk=stored.pk)
        assert deliver(client, dearer).status_code == 200
        events.apply_waiting()
        top_up.refresh_from_db()
        assert top_up.state == TopUp.States.PENDING

    def test_of_an_unknown_type_is_stored(self, client, rings):
        assert deliver(client, {"id": "evt_1", "type": "invoice.finalized"}).status_code == 200
        assert StripeEvent.objects.get().type == "invoice.finalized"

    def test_of_what_nobody_signed_stores_nothing(self, client, rings):
        answer = deliver(client, session_event(TopUpFactory()), secret="whsec_forged")
        assert answer.status_code == 400
        assert answer.json()["code"] == "bad_signature"
        assert answer.json()["message"]
        assert not StripeEvent.objects.exists()
        assert rings == []

    def test_without_a_signature(self, client):
        assert client.post("/webhooks/stripe/", data=b"{}", content_type="application/json").status_code == 400

    def test_with_a_signature_that_is_no_ascii(self, client):
        answer = client.post(
            "/webhooks/stripe/",
            data=b"{}",
            content_type="application/json",
            headers={"Stripe-Signature": "t=1,v1=\xe9"},
        )
        assert answer.status_code == 400

    def test_only_by_post(self, client):
        assert client.get("/webhooks/stripe/").status_code == 405

    def test_whoever_it_is_about_is_looked_at_later(self, client, rings):
        """What is stored is stored, be it for the wrong mode or amount: judging it is not the view's work."""
        event = session_event(TopUpFactory(), livemode=True, amount_total=1)
        assert deliver(client, event).status_code == 200


class TestTheBell:
    def test_one_hint_tells_of_all_that_came_meanwhile(self, monkeypatch):
        sent, free = Queue(), threading.Event()

        def send(task):
            sent.put(task)
            free.wait(20)

        monkeypatch.setattr(webhooks, "send", send)
        bell = webhooks.Bell()
        bell.ring()
        assert sent.get(timeout=20) is tasks.apply_events
        for _ in range(50):
            bell.ring()
        free.set()
        assert sent.get(timeout=20) is tasks.apply_events
        with pytest.raises(Empty):
            sent.get(timeout=10 * webhooks.GAP_SECONDS)

    def test_a_broker_that_is_away_does_not_end_it(self, monkeypatch, caplog):
        tried = Queue()

        def away(*_arguments, **_options):
            tried.put(True)
            raise OperationalError("Redis is away.")

        monkeypatch.setattr(tasks.apply_events, "apply_async", away)
        bell = webhooks.Bell()
        for _ in range(3):
            bell.ring()
            assert tried.get(timeout=20)


@pytest.mark.django_db(transaction=True)
def test_two_hundred_deliveries_at_once_credit_once(client, rings):
    """Through the view, and the task, on 20 threads, each of which also applies what waits."""
    top_up = TopUpFactory()
    event = session_event(top_up)

    def deliver_and_work():
        answers = []
        for _ in range(10):
            answers.append(deliver(client, event).status_code)
            tasks.apply_events()
        return answers

    answers = together(*[deliver_and_work] * 20)
    assert raised(answers) == []
    assert [status for each in answers for status in each] == [200] * 200
    assert StripeEvent.objects.count() == 1
    assert len(rings) == 1
    top_up.refresh_from_db()
    assert top_up.state == TopUp.States.PAID
    top_up.account.refresh_from_db()
    assert top_up.account.posted_minor == 5000


@pytest.mark.django_db(transaction=True)
def test_a_connection_that_broke_costs_no_event(client, rings):
    """The database was restarted since this connection's last request: nothing asks it first, nothing is lost."""
    connection.ensure_connection()
    event = session_event(TopUpFactory())
    address = {name: connection.settings_dict[name.upper()] for name in ("host", "user")}
    with psycopg.connect(**address, dbname=connection.settings_dict["NAME"], autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", (connection.connection.info.backend_pid,))
    answer = deliver(client, event)
    assert answer.status_code == 200
    assert StripeEvent.objects.get().event_id == event["id"]

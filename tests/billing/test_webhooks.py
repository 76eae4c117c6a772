"""The provider's way in."""

from __future__ import annotations

import pytest
from kombu.exceptions import OperationalError

from billing import tasks
from billing.models import StripeEvent
from tests.factories.billing import TopUpFactory, session_event, signed
from tests.racing import together


@pytest.fixture
def hints(monkeypatch):
    """The events that workers were told of."""
    told = []
    monkeypatch.setattr(tasks.apply_event, "apply_async", lambda arguments, **_options: told.append(arguments[0]))
    return told


def deliver(client, event, **options):
    body, header = signed(event, **options)
    return client.post(
        "/webhooks/stripe/", data=body, content_type="application/json", headers={"Stripe-Signature": header}
    )


@pytest.mark.django_db(transaction=True)
class TestDelivery:
    def test_is_stored_answered_and_hinted(self, client, hints):
        event = session_event(TopUpFactory())
        assert deliver(client, event).status_code == 200
        stored = StripeEvent.objects.get()
        assert (stored.event_id, stored.payload, stored.state) == (event["id"], event, StripeEvent.States.RECEIVED)
        assert hints == [stored.pk]

    def test_again_is_the_same_event(self, client, hints):
        event = session_event(TopUpFactory())
        assert [deliver(client, event).status_code for _ in range(3)] == [200, 200, 200]
        assert StripeEvent.objects.count() == 1
        StripeEvent.objects.update(state=StripeEvent.States.APPLIED)
        deliver(client, event)
        assert len(hints) == 3  # an applied event needs no worker

    def test_of_an_unknown_type_is_stored(self, client, hints):
        assert deliver(client, {"id": "evt_1", "type": "invoice.finalized"}).status_code == 200
        assert StripeEvent.objects.get().type == "invoice.finalized"

    def test_of_what_nobody_signed_stores_nothing(self, client, hints):
        answer = deliver(client, session_event(TopUpFactory()), secret="whsec_forged")
        assert answer.status_code == 400
        assert answer.json()["code"] == "bad_signature"
        assert answer.json()["message"]
        assert not StripeEvent.objects.exists()
        assert hints == []

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

    def test_while_the_broker_is_away(self, client, monkeypatch):
        def away(*_arguments, **_options):
            raise OperationalError("Redis is away.")

        monkeypatch.setattr(tasks.apply_event, "apply_async", away)
        assert deliver(client, session_event(TopUpFactory())).status_code == 200
        assert StripeEvent.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_ten_deliveries_at_once_are_one_event(client, hints):
    event = session_event(TopUpFactory())
    answers = together(*[lambda: deliver(client, event).status_code] * 10)
    assert answers == [200] * 10
    assert StripeEvent.objects.count() == 1

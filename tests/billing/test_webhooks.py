"""Webhooks: only a signed, recent event is believed; it is stored once and answered before it is applied."""

from __future__ import annotations

import threading
import time
from unittest.mock import Mock

import pytest
import redis
from kombu.exceptions import OperationalError

from billing import events, gateway, tasks
from billing.errors import BadSignature
from billing.models import StripeEvent, TopUp
from console.observability import context, redis_client
from tests.factories.billing import TopUpFactory, session_event, signed

EVENT = {"id": "evt_1", "type": "checkout.session.completed", "object": "event"}


@pytest.fixture
def keys(settings):
    """Configure Stripe instead of the sandbox. Return the list of signing secrets."""
    settings.PAYMENTS_SANDBOX = False
    settings.STRIPE_WEBHOOK_SECRETS = ["whsec_old", "whsec_new"]
    return settings.STRIPE_WEBHOOK_SECRETS


class TestSignature:
    def test_of_another_time_is_refused(self):
        for age in (-299, 0, 299):  # 300 s of difference are allowed
            assert gateway.verify(*signed(EVENT, at=time.time() - age)) == EVENT
        for age in (-310, 310):
            with pytest.raises(BadSignature):
                gateway.verify(*signed(EVENT, at=time.time() - age))

    def test_by_another_secret_or_of_another_body_is_refused(self):
        body, header = signed(EVENT)
        for given in (signed(EVENT, secret="whsec_another"), (body + b" ", header), (b"\xff\xfe", header)):
            with pytest.raises(BadSignature):
                gateway.verify(*given)

    def test_by_either_secret_is_accepted_during_a_rotation(self, keys):
        for secret in keys:
            assert gateway.verify(*signed(EVENT, secret=secret)) == EVENT
        with pytest.raises(BadSignature):
            gateway.verify(*signed(EVENT, secret=gateway.sandbox_secret()))
        keys.clear()
        with pytest.raises(BadSignature):
            gateway.verify(*signed(EVENT, secret="whsec_old"))

    def test_that_cannot_be_read_or_is_of_no_event_is_refused(self):
        broken = ["", "t=,v1=", "t=1", "v1=abc", "t=abc,v1=abc", "t=1=2,v1=3", f"t={'9' * 5000},v1=abc"]
        for header in (*broken, f"t={int(time.time())},v1=\xe9\xff"):
            with pytest.raises(BadSignature):
                gateway.verify(b"{}", header)
        for body in ("[]", "1", "null", "no json", "{}", '{"id": 1, "type": "x"}', '{"id": "evt_1"}'):
            with pytest.raises(BadSignature):
                gateway.verify(*signed(body))


def test_the_sandboxs_secrets_are_this_installations_own(settings):
    mine = gateway.sandbox_secret(), gateway.sandbox_key()
    settings.SECRET_KEY = "another installation"
    others = gateway.sandbox_secret(), gateway.sandbox_key()
    assert [secret.split("_")[0] for secret in mine] == ["whsec", "sk"]
    assert len({secret.rsplit("_", 1)[1] for secret in mine + others}) == 4


def test_a_live_key_is_recognized(settings):
    for key, live in (("", False), ("sk_test_1", False), ("sk_live_1", True), ("rk_live_1", True)):
        settings.STRIPE_SECRET_KEY = key
        assert gateway.is_live() is live


@pytest.fixture
def sent(monkeypatch):
    """The Celery tasks that are sent. At first Redis says that none is pending."""
    redis_client.client().delete(redis_client.key(tasks.APPLY_PENDING))
    tasks_sent = []
    monkeypatch.setattr(tasks, "send", tasks_sent.append)
    yield tasks_sent
    await_timers()


def await_timers():
    """Wait until every timer has ended that will ask for `apply_events`."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


def deliver(client, event, **options):
    return post(client, *signed(event, **options))


def post(client, body, header):
    headers = {"Stripe-Signature": header} if header else {}
    return client.post("/webhooks/stripe/", data=body, content_type="application/json", headers=headers)


@pytest.mark.django_db
class TestDelivery:
    def test_stores_any_signed_event_once_and_sends_one_task_until_a_worker_begins(self, client, sent):
        event = session_event(TopUpFactory(), livemode=True, amount_total=1, kind="invoice.finalized")
        assert [deliver(client, event).status_code for _ in range(3)] == [200] * 3
        stored = StripeEvent.objects.get()
        assert (stored.event_id, stored.payload, stored.state) == (event["id"], event, StripeEvent.States.RECEIVED)
        assert deliver(client, session_event(TopUpFactory())).status_code == 200
        await_timers()
        assert sent == [tasks.apply_events]
        tasks.apply_events()
        assert not StripeEvent.objects.filter(state=StripeEvent.States.RECEIVED).exists()
        deliver(client, session_event(TopUpFactory()))
        await_timers()
        assert sent == [tasks.apply_events] * 2

    def test_of_a_burst_sends_one_task_with_the_request_id(self, client, sent, monkeypatch):
        monkeypatch.setattr(tasks, "BURST_SECONDS", 3600)
        ids = []
        monkeypatch.setattr(tasks, "send", lambda _task: ids.append(context.task_fields()["request_id"]))
        answers = [deliver(client, session_event(TopUpFactory())) for _ in range(3)]
        (timer,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
        timer.cancel()
        timer.function(*timer.args)
        assert ids == [answers[0]["X-Request-Id"]]

    @pytest.mark.usefixtures("sent")  # no task is sent: the test applies the events
    def test_with_another_body_does_not_change_a_stored_event(self, client):
        """Someone who knows a signing secret must not turn a stored event into a payment."""
        top_up = TopUpFactory()
        first = session_event(top_up, payment_status="unpaid")
        forged = {**first, "data": {"object": first["data"]["object"] | {"payment_status": "paid"}}}
        for event in (first, forged):
            assert deliver(client, event).status_code == 200
            events.apply_waiting()
        assert StripeEvent.objects.get().payload == first
        top_up.refresh_from_db()
        assert top_up.state == TopUp.States.PENDING

    def test_of_an_event_that_is_not_signed_stores_nothing(self, client, sent):
        answer = deliver(client, session_event(TopUpFactory()), secret="whsec_forged")
        assert (answer.status_code, answer.json()["code"]) == (400, "bad_signature")
        assert answer.json()["message"]
        assert [post(client, b"{}", header).status_code for header in ("", "t=1,v1=\xe9")] == [400, 400]
        assert client.get("/webhooks/stripe/").status_code == 405
        assert not StripeEvent.objects.exists()
        await_timers()
        assert sent == []

    def test_needs_neither_a_thread_nor_a_broker_nor_redis(self, client, monkeypatch):
        redis_client.client().delete(redis_client.key(tasks.APPLY_PENDING))
        for target, name, error in (
            (threading.Timer, "start", RuntimeError),
            (tasks.apply_events, "apply_async", OperationalError),
            (redis_client.client(), "set", redis.ConnectionError),
        ):
            with monkeypatch.context() as patches:
                patches.setattr(target, name, Mock(side_effect=error))
                assert deliver(client, session_event(TopUpFactory())).status_code == 200
                await_timers()
                getattr(target, name).assert_called_once()
        assert StripeEvent.objects.count() == 3

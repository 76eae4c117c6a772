"""The sandbox as a server on a free port of loopback: events and their delivery, restarts, keys, the command."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading

import httpx
import pytest
from django.core.management import CommandError, call_command

from billing import events, gateway, payments, sandbox
from billing.errors import PaymentRefused
from billing.models import StripeEvent, TopUp
from billing.sandbox import delivery
from billing.sandbox.provider import decode
from tests.billing.serving import PATIENCE, page, pay
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import wallet
from tests.provider import DISPUTED, GOOD


class TestEvents:
    def test_are_sent_again_until_they_are_taken(self, customer, console, monkeypatch):
        monkeypatch.setattr(delivery, "RETRY_SECONDS", (0.01,))
        console.event("customer.created")
        console.answers = [500, 404, 302]
        gateway.create_customer(reference="2", name="Again", email="b@example.com")
        tries = [console.received.get(timeout=PATIENCE) for _ in range(4)]
        assert [status for status, _body, _signature in tries] == [500, 404, 302, 200]
        assert len({json.loads(body)["id"] for _status, body, _signature in tries}) == 1

    def test_can_be_fetched(self, customer):
        for reference in ("one", "two"):
            pay(page(customer, reference))
        told = [event for event in gateway.events_since(0) if event["type"] == "checkout.session.completed"]
        assert [event["data"]["object"]["client_reference_id"] for event in told] == ["two", "one"]
        assert type(told[0]["data"]["object"]) is dict  # plain data, as it is stored
        json.dumps(told)
        assert list(gateway.events_since(2**40)) == []

    def test_come_in_pages(self, served):
        for number in range(105):
            gateway.create_customer(reference=str(number), name="Many", email="a@example.com")
        assert len(list(gateway.events_since(0))) == 105

    def test_tell_of_the_moment_they_are_about(self, customer, served):
        pay(page(customer), DISPUTED)
        told = {event["type"]: event["data"]["object"] for event in gateway.events_since(0)}
        assert told["payment_intent.created"]["status"] == "requires_payment_method"
        assert told["payment_intent.succeeded"]["status"] == "succeeded"
        assert not any(name.startswith("_") for thing in told.values() for name in thing)


class TestARestart:
    def test_forgets_nothing(self, start):
        with start():
            customer = gateway.create_customer(reference="1", name="Acme", email="a@example.com")
            paid, still_open = page(customer, "paid"), page(customer, "open")
            pay(paid)
        with start() as again:
            assert page(customer, "paid").session_id == paid.session_id
            assert again.session(paid.session_id)["payment_status"] == "paid"
            assert again.balance("usd") == 5000
            made = page(customer, "open")
            assert made.session_id == still_open.session_id
            assert httpx.post(f"{again.book.base_url}/pay/{made.session_id}", data={"card": GOOD}).status_code == 303
            assert again.balance("usd") == 10000

    def test_sends_what_was_not_delivered_before(self, start, console):
        with start("http://127.0.0.1:9/"):  # the console is down
            pay(page(gateway.create_customer(reference="1", name="Acme", email="a@example.com")))
        assert console.received.empty()
        with start():
            assert console.event("checkout.session.completed")

    def test_after_a_crash_in_the_middle_of_a_line(self, start, tmp_path):
        with start():
            customer = gateway.create_customer(reference="1", name="Acme", email="a@example.com")
            pay(page(customer))
        with (tmp_path / "sandbox" / "journal.jsonl").open("a") as journal:
            journal.write('[["checkout.session", "cs_half')
        for _ in range(2):
            with start() as again:
                assert again.balance("usd") == 5000

    def test_the_journal_is_its_owners_alone(self, served, customer, tmp_path):
        assert (tmp_path / "sandbox" / "journal.jsonl").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("key", ["", "Bearer wrong", "Bearer sk_test_sandboxx", "Bearer \xe9", "Bearer sk_live_1"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/events"), ("POST", "/v1/checkout/sessions")])
def test_without_the_key(served, method, path, key):
    headers = {"Authorization": key.encode("latin-1")} if key else {}
    answer = httpx.request(method, served.book.base_url + path, headers=headers)
    assert answer.status_code == 401
    assert ("no live key" in answer.json()["error"]["message"]) == ("_live_" in key)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/pay/cs_unknown"),
        ("POST", "/pay/cs_unknown"),
        ("GET", "/challenge/pi_unknown"),
        ("POST", "/challenge/pi_unknown"),
        ("GET", "/v1/unknown"),
        ("POST", "/v1/unknown"),
        ("GET", "/v1/refunds/re_unknown"),
        ("POST", "/v1/payment_intents/pi_unknown/capture"),
    ],
)
def test_what_is_not_there(served, method, path):
    headers = {"Authorization": f"Bearer {gateway.sandbox_key()}"}
    assert httpx.request(method, served.book.base_url + path, headers=headers).status_code == 404


@pytest.mark.parametrize("amount", ["a lot", 0, -1, 10**12])
def test_a_request_that_makes_no_sense_is_refused(customer, amount):
    with pytest.raises(PaymentRefused):
        page(customer, amount_minor=amount)


def test_the_form_encoding():
    assert decode("a=1&b[c]=2&b[d][0][e]=3&b[d][1][e]=4&f[]=5") == {
        "a": "1", "b": {"c": "2", "d": [{"e": "3"}, {"e": "4"}]}, "f": {"": "5"},
    }  # fmt: skip


def test_it_listens_on_loopback_alone_and_with_no_live_key(served):
    server = sandbox.serve(provider=served, port=0, api_key="sk_test_1")
    try:
        assert server.server_address[0] == "127.0.0.1"
    finally:
        server.server_close()
    with pytest.raises(ValueError, match="live key"):
        sandbox.serve(provider=served, port=0, api_key="sk_live_1")


@pytest.mark.django_db(transaction=True)
def test_from_the_top_up_to_the_credit(served, console, client):
    """Everything but the page is ours: the row, the real client, the payment, the signed webhook, the credit."""
    member = MembershipFactory()
    account = wallet(member.organization)
    top_up = payments.start_top_up(account=account, amount_minor=5000, user=member.user)
    pay(gateway.Checkout(top_up.session_id, top_up.checkout_url))
    for _ in range(5):
        _status, body, signature = console.received.get(timeout=PATIENCE)
        for _again in range(2):
            answer = client.post(
                "/webhooks/stripe/", data=body, content_type="application/json", headers={"Stripe-Signature": signature}
            )
            assert answer.status_code == 200
            events.apply_waiting()
    assert events.fetch_undelivered() == 0
    assert StripeEvent.objects.count() == 5
    account.refresh_from_db()
    top_up.refresh_from_db()
    assert (account.posted_minor, top_up.state) == (5000, TopUp.States.PAID)


class TestTheCommand:
    def test_refuses_to_start_beside_keys(self, settings):
        settings.PAYMENTS_SANDBOX = False
        with pytest.raises(CommandError, match="does not run beside them"):
            call_command("payments_sandbox")

    def test_serves_until_it_is_told_to_stop(self, settings, tmp_path, capsys):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        settings.VAR_DIR, settings.SANDBOX_PORT = tmp_path, port
        settings.SANDBOX_URL = f"http://127.0.0.1:{port}"
        settings.TRAINYARD_URL = "http://127.0.0.1:9"
        found = []

        def visit_and_stop():
            try:
                transport = httpx.HTTPTransport(retries=8)  # it may not listen yet
                with httpx.Client(transport=transport) as visitor:
                    found.append(visitor.get(settings.SANDBOX_URL).status_code)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        visitor = threading.Thread(target=visit_and_stop)
        try:
            # Until the command has set its own, a signal must not end the tests.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            visitor.start()
            call_command("payments_sandbox")
        finally:
            visitor.join(PATIENCE)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        assert found == [404]
        assert f"listens at {settings.SANDBOX_URL}" in capsys.readouterr().out

"""The sandbox as a server on a free port of loopback, spoken to by the gateway's real `stripe` client."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

import httpx
import pytest
from django.core.management import CommandError, call_command

from billing import gateway, payments, sandbox
from billing.errors import PaymentUnavailable
from billing.models import StripeEvent, TopUp
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import wallet

PAGE = Path(sandbox.__file__).with_name("sandbox_page.html").read_text()
GOOD, DECLINED, POOR = "4242 4242 4242 4242", "4000 0000 0000 0002", "4000 0000 0000 9995"
PATIENCE = 20


class Console:
    """Where webhooks go: answers as told, and hands each body and signature on."""

    def __init__(self):
        self.answers: list[int] = []
        self.received: Queue[tuple[int, bytes, str]] = Queue()
        console = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = console.answers.pop(0) if console.answers else 200
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                console.received.put((status, body, self.headers["Stripe-Signature"]))

            def log_message(self, *_arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/webhooks/stripe/"


@contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()


@pytest.fixture
def console():
    made = Console()
    with serving(made.server):
        yield made


@pytest.fixture
def start(tmp_path, settings, console):
    """`with start() as provider:` is the sandbox, serving and delivering; its state outlives it."""

    @contextmanager
    def run():
        provider = sandbox.Sandbox(
            path=tmp_path / "sandbox" / "state.json",
            base_url="",
            webhook_url=console.url,
            secret=gateway.sandbox_secret(),
        )
        server = sandbox.server(sandbox=provider, port=0, api_key=gateway.sandbox_key(), pay_page=PAGE)
        settings.SANDBOX_URL = provider.base_url = f"http://127.0.0.1:{server.server_address[1]}"
        delivery = threading.Thread(target=provider.deliver)
        delivery.start()
        try:
            with serving(server):
                yield provider
        finally:
            provider.stop()
            delivery.join(PATIENCE)
            assert not delivery.is_alive()

    return run


@pytest.fixture
def provider(start):
    with start() as made:
        yield made


def checkout(reference="top-up-1", **changes):
    fields = {
        "reference": reference,
        "amount_minor": 5000,
        "currency": "USD",
        "title": "Wallet of <Acme & Sons>",
        "email": "a@example.com",
        "return_url": "http://127.0.0.1:8000/wallet/",
    }
    return gateway.create_checkout(**fields | changes)


def pay(page, card=GOOD):
    return httpx.post(page.url, data={"card": card})


def delivered(console):
    """The next event that the console took, its signature checked."""
    while True:
        status, body, signature = console.received.get(timeout=PATIENCE)
        if status == 200:
            return gateway.verify(body, signature)


def test_the_page_says_what_is_paid_for(provider):
    page = httpx.get(checkout().url)
    assert page.status_code == 200
    assert "$50.00" in page.text
    assert "Wallet of &lt;Acme &amp; Sons&gt;" in page.text
    assert "no real money" in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "{{" not in page.text


def test_a_card_that_pays(provider, console):
    page = checkout()
    answer = pay(page)
    assert (answer.status_code, answer.headers["Location"]) == (303, "http://127.0.0.1:8000/wallet/?paid=1")
    event = delivered(console)
    session = event["data"]["object"]
    assert event["type"] == "checkout.session.completed"
    assert event["livemode"] is False
    assert session["id"] == page.session_id
    assert session["payment_status"] == "paid"
    assert (session["client_reference_id"], session["amount_total"], session["currency"]) == ("top-up-1", 5000, "usd")


@pytest.mark.parametrize(
    ("card", "sentence"),
    [
        (DECLINED, "Your card was declined."),
        (POOR, "Your card has insufficient funds."),
        ("1234", "test cards only"),
        ("", "test cards only"),
    ],
)
def test_a_card_that_does_not(provider, card, sentence):
    page = checkout()
    answer = pay(page, card)
    assert answer.status_code == 200
    assert sentence in answer.text
    assert provider.session(page.session_id)["payment_status"] == "unpaid"
    assert provider.events(0) == []
    assert pay(page).status_code == 303  # another card may be tried


def test_paying_twice_pays_once(provider, console):
    page = checkout()
    assert [pay(page).status_code for _ in range(3)] == [303, 303, 303]
    assert len(provider.events(0)) == 1
    delivered(console)


def test_one_reference_gives_one_page(provider):
    first = checkout()
    assert checkout() == first
    assert checkout("top-up-2").session_id != first.session_id


def test_a_page_that_is_past_its_time(provider, console, monkeypatch):
    monkeypatch.setattr(sandbox, "SESSION_SECONDS", -1)
    page = checkout()
    answer = pay(page)
    assert "has expired" in answer.text
    assert delivered(console)["type"] == "checkout.session.expired"
    assert provider.session(page.session_id)["payment_status"] == "unpaid"


def test_a_webhook_is_sent_again_until_it_is_answered_with_200(provider, console, monkeypatch):
    monkeypatch.setattr(sandbox, "RETRY_SECONDS", (0.01,))
    console.answers = [500, 404, 302]
    pay(checkout())
    tries = [console.received.get(timeout=PATIENCE) for _ in range(4)]
    assert [status for status, _body, _signature in tries] == [500, 404, 302, 200]
    assert len({json.loads(body)["id"] for _status, body, _signature in tries}) == 1


def test_a_restart_forgets_nothing(start, console):
    with start():
        paid, still_open = checkout("paid"), checkout("open")
        pay(paid)
        delivered(console)
    with start() as again:
        assert checkout("paid").session_id == paid.session_id
        assert again.session(paid.session_id)["payment_status"] == "paid"
        assert len(again.events(0)) == 1
        page = checkout("open")
        assert page.session_id == still_open.session_id
        assert httpx.post(f"{again.base_url}/pay/{page.session_id}", data={"card": GOOD}).status_code == 303
        assert delivered(console)["data"]["object"]["client_reference_id"] == "open"


def test_what_was_not_delivered_before_a_restart_is_after_it(start, console):
    with start() as first:
        first._webhook_url = "http://127.0.0.1:9/"  # the console is down
        pay(checkout())
    with start():
        assert delivered(console)["type"] == "checkout.session.completed"


def test_events_can_be_fetched(provider, console):
    pay(checkout("one"))
    pay(checkout("two"))
    events = list(gateway.events_since(0))
    assert [event["data"]["object"]["client_reference_id"] for event in events] == ["two", "one"]
    assert type(events[0]["data"]["object"]) is dict  # plain data, as it is stored
    json.dumps(events)
    assert list(gateway.events_since(2**40)) == []


@pytest.mark.parametrize("key", ["", "Bearer wrong", "Bearer sk_test_sandboxx", "Bearer \xe9"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/events"), ("POST", "/v1/checkout/sessions")])
def test_without_the_key(provider, method, path, key):
    headers = {"Authorization": key.encode("latin-1")} if key else {}
    answer = httpx.request(method, provider.base_url + path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["message"] == "Invalid API key."


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/pay/cs_unknown"),
        ("POST", "/pay/cs_unknown"),
        ("GET", "/v1/unknown"),
        ("POST", "/v1/refunds"),
    ],
)
def test_what_is_not_there(provider, method, path):
    headers = {"Authorization": f"Bearer {gateway.sandbox_key()}"}
    assert httpx.request(method, provider.base_url + path, headers=headers).status_code == 404


def test_a_request_that_lacks_something_is_refused(provider):
    with pytest.raises(PaymentUnavailable):
        checkout(amount_minor="a lot")


def test_it_listens_on_loopback_alone(provider):
    server = sandbox.server(sandbox=provider, port=0, api_key="", pay_page="")
    try:
        assert server.server_address[0] == "127.0.0.1"
    finally:
        server.server_close()


@pytest.mark.django_db(transaction=True)
def test_from_the_top_up_to_the_credit(provider, console, client):
    """Everything but the page is ours: the row, the real client, the payment, the signed webhook, the credit."""
    member = MembershipFactory()
    account = wallet(member.organization)
    top_up = payments.start_top_up(account=account, amount_minor=5000, user=member.user)
    pay(gateway.Checkout(top_up.session_id, top_up.checkout_url))
    _status, body, signature = console.received.get(timeout=PATIENCE)
    for _ in range(2):
        answer = client.post(
            "/webhooks/stripe/", data=body, content_type="application/json", headers={"Stripe-Signature": signature}
        )
        assert answer.status_code == 200
        payments.apply_event(event_pk=StripeEvent.objects.get().pk)
    assert payments.fetch_undelivered() == 0
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

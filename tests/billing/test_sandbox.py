"""The sandbox over HTTP, through the gateway's real `stripe` client: pages, cards, keys, delivery, restarts.

What its payments, refunds and disputes do is tested without a socket, in the tests of the services that use them.
"""

from __future__ import annotations

import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import stripe
from django.core.management import CommandError, call_command

from billing import gateway, sandbox
from billing.errors import PaymentDeclined, PaymentRefused
from billing.sandbox import checkout, delivery
from billing.sandbox import provider as sandbox_provider
from tests.billing.serving import PATIENCE, browser, create_checkout, pay
from tests.provider import ALWAYS_ASKS_FOR_CONFIRMATION, ASKS_FOR_CONFIRMATION, DECLINED, DISPUTED, GOOD

WALLET = "http://127.0.0.1:8000/wallet/"


def charge(customer, method, reference="1"):
    return gateway.charge_card(
        reference=reference, customer_id=customer, method_id=method, amount_minor=700, currency="USD", title="T"
    )


def setup_page(customer, reference="1"):
    return gateway.create_card_setup(
        reference=reference, customer_id=customer, currency="USD", return_url=f"{WALLET}cards/"
    )


class TestPage:
    def test_shows_the_amount_and_returns_to_the_console_when_it_is_paid(self, customer, served, receiver):
        checkout_page = create_checkout(customer)
        shown = browser.get(checkout_page.url)
        assert shown.status_code == 200
        for text in ("$50.00", "Wallet of &lt;Acme &amp; Sons&gt;", "no real money"):
            assert text in shown.text
        assert "{{" not in shown.text
        assert "default-src 'none'; style-src 'sha256-" in shown.headers["Content-Security-Policy"]
        for card in ("", "4242", "1" * 16, f"card {GOOD}"):
            assert "takes test cards only" in pay(checkout_page, card).text
        assert served.balance("usd") == 0
        for _ in range(3):
            answer = pay(checkout_page)
            assert (answer.status_code, answer.headers["Location"]) == (303, f"{WALLET}?paid=1")
        assert served.balance("usd") == 5000
        event = receiver.next_event("checkout.session.completed")
        session = event["data"]["object"]
        expected = {
            "id": checkout_page.session_id, "payment_status": "paid", "status": "complete",
            "client_reference_id": "top-up-1", "amount_total": 5000, "currency": "usd",
        }  # fmt: skip
        assert event["livemode"] is False
        assert {name: session[name] for name in expected} == expected
        intent = gateway.fetch_object("payment_intent", session["payment_intent"])
        assert (intent["status"], intent["amount_received"]) == ("succeeded", 5000)
        assert intent["metadata"] == {"top_up": "top-up-1"}

    def test_of_the_bank_takes_one_answer(self, customer, served):
        checkout_page = create_checkout(customer)
        for answer, location, balance_minor in (
            ("refuse", checkout_page.url, 0), ("agree", f"{WALLET}?paid=1", 5000),
        ):  # fmt: skip
            challenge = pay(checkout_page, ASKS_FOR_CONFIRMATION).headers["Location"]
            assert "$50.00" in browser.get(challenge).text
            assert browser.post(challenge, data={"answer": answer}).headers["Location"] == location
            assert served.balance("usd") == balance_minor
            assert ("unable to authenticate" in browser.get(checkout_page.url).text) == (answer == "refuse")
            assert browser.post(challenge, data={"answer": "agree"}).status_code == 404

    def test_expires(self, customer, served, receiver, monkeypatch):
        closed_by_the_console = create_checkout(customer, "top-up-1")
        gateway.expire_checkout(closed_by_the_console.session_id)
        monkeypatch.setattr(checkout, "SESSION_SECONDS", -1)
        for checkout_page in (closed_by_the_console, create_checkout(customer, "top-up-2")):
            assert "has expired" in pay(checkout_page).text
            assert receiver.next_event("checkout.session.expired")
        assert served.balance("usd") == 0


def test_cards_are_saved_without_a_payment_and_charged_until_they_are_removed(customer, served, receiver):
    setup = setup_page(customer)
    assert "Save a card" in browser.get(setup.url).text
    assert "declined" in pay(setup, DECLINED).text
    challenge = pay(setup, ASKS_FOR_CONFIRMATION).headers["Location"]
    assert browser.post(challenge, data={"answer": "agree"}).headers["Location"].endswith("?saved=1")
    assert receiver.next_event("setup_intent.succeeded")
    (card,) = gateway.cards(customer)
    assert (card.brand, card.last4, card.expires, card.label) == ("Visa", "3155", "12/34", "Visa •••• 3155")
    assert served.balance("usd") == 0
    assert charge(customer, card.method_id).status == "succeeded"
    other = gateway.create_customer(reference="2", name="Other", email="b@example.com")
    with pytest.raises(PaymentRefused):
        charge(other, card.method_id, "of another customer")
    for _ in range(2):
        gateway.remove_card(card.method_id)
    assert gateway.cards(customer) == []
    with pytest.raises(PaymentRefused):
        charge(customer, card.method_id, "of a removed card")
    challenge = pay(setup_page(customer, "2"), ALWAYS_ASKS_FOR_CONFIRMATION).headers["Location"]
    browser.post(challenge, data={"answer": "agree"})
    (card,) = gateway.cards(customer)
    for _ in range(2):  # the second call has the same key, and gets the same answer
        with pytest.raises(PaymentDeclined) as caught:
            charge(customer, card.method_id, "of a card that needs a confirmation each time")
        assert caught.value.reason == "authentication_required"
    assert served.balance("usd") == 700


def test_a_dispute_is_decided_by_its_evidence(customer, served, receiver):
    for status, evidence in (("won", "winning_evidence"), ("lost", "losing_evidence")):
        pay(create_checkout(customer, status), DISPUTED)
        dispute = receiver.next_event("charge.dispute.created")["data"]["object"]
        with pytest.raises(PaymentRefused):  # the bank has the money
            gateway.refund(reference=f"refund-{status}", payment_intent_id=dispute["payment_intent"], amount_minor=1)
        update = gateway._client().v1.disputes.update
        update(dispute["id"], {"evidence": {"uncategorized_text": evidence}})
        assert gateway.fetch_object("dispute", dispute["id"])["status"] == status
        assert served.balance("usd") == 5000  # of the first payment, which was won
        with pytest.raises(stripe.InvalidRequestError):  # the dispute is decided
            update(dispute["id"], {"evidence": {"uncategorized_text": evidence}})


def test_an_idempotency_key_gives_its_first_answer_for_a_day(customer, served):
    first = create_checkout(customer)
    pay(first)
    assert create_checkout(customer) == first
    assert create_checkout(customer, "top-up-2").session_id != first.session_id
    assert len(list(served.account.store.all("checkout.session"))) == 2
    now = served.account.clock()
    served.account.clock = lambda: now + sandbox_provider.IDEMPOTENCY_KEY_SECONDS + 1
    assert create_checkout(customer).session_id != first.session_id


@pytest.mark.usefixtures("customer")
def test_events_are_sent_until_they_are_accepted(receiver, monkeypatch):
    monkeypatch.setattr(delivery, "RETRY_SECONDS", (0.01,))
    receiver.next_event("customer.created")  # of the fixture `customer`
    receiver.statuses = [500, 404, 302]
    gateway.create_customer(reference="2", name="Another", email="b@example.com")
    tries = [receiver.received.get(timeout=PATIENCE) for _ in range(4)]
    assert [status for status, _body, _signature in tries] == [500, 404, 302, 200]
    assert len({json.loads(body)["id"] for _status, body, _signature in tries}) == 1


def test_a_restart_keeps_everything_and_sends_what_was_not_delivered(start, receiver, tmp_path):
    with start("http://127.0.0.1:9/"):  # nothing listens on this port
        customer = gateway.create_customer(reference="1", name="Acme", email="a@example.com")
        paid, still_open = create_checkout(customer, "paid"), create_checkout(customer, "open")
        pay(paid)
    assert receiver.received.empty()
    journal = tmp_path / "sandbox" / "journal.jsonl"
    assert journal.stat().st_mode & 0o077 == 0
    with journal.open("a") as file:
        file.write('[["checkout.session", "cs_half')  # a crash in the middle of a line
    for session, balance_minor in ((paid, 5000), (still_open, 10_000)):  # the open page is paid after the first restart
        with start() as served:
            assert receiver.next_event("checkout.session.completed")["data"]["object"]["id"] == session.session_id
            assert create_checkout(customer, "paid").session_id == paid.session_id
            assert create_checkout(customer, "open").session_id == still_open.session_id
            assert served.session(paid.session_id)["payment_status"] == "paid"
            assert served.balance("usd") == balance_minor
            address = f"{served.account.base_url}/pay/{still_open.session_id}"
            assert browser.post(address, data={"card": GOOD}).status_code == 303
            assert served.balance("usd") == 10_000


def test_it_listens_on_loopback_only_requires_its_key_and_refuses_live_keys(served, settings):
    right_key = {"Authorization": f"Bearer {gateway.sandbox_key()}"}
    for path in ("/", "/pay/cs_unknown", "/v1/unknown", "/v1/payment_intents/pi_unknown"):
        for method in ("GET", "POST"):
            assert browser.request(method, served.account.base_url + path, headers=right_key).status_code == 404
    for length in ("-1", "one"):  # httpx refuses to send such a header, urllib does not
        wrong_length = Request(f"{served.account.base_url}/pay/cs_unknown", b"", {"Content-Length": length})
        with pytest.raises(HTTPError, match="404"):
            urlopen(wrong_length, timeout=PATIENCE)
    for key in ("", "Bearer wrong", "Bearer \xe9", "Bearer sk_live_1"):
        headers = {"Authorization": key.encode("latin-1")} if key else {}
        for method, path in (("GET", "/v1/events"), ("POST", "/v1/checkout/sessions")):
            answer = browser.request(method, served.account.base_url + path, headers=headers)
            assert answer.status_code == 401
            assert ("no live key" in answer.json()["error"]["message"]) == ("_live_" in key)

    server = sandbox.serve(provider=served, port=0, api_key="sk_test_1")
    server.server_close()
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ValueError, match="live key"):
        sandbox.serve(provider=served, port=0, api_key="sk_live_1")
    settings.PAYMENTS_SANDBOX = False
    with pytest.raises(CommandError, match="does not run beside them"):
        call_command("payments_sandbox")

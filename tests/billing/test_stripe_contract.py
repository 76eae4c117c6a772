"""The same calls with the same client against two doubles of Stripe that were written independently.

Ours, and `localstripe` (a process of its own; GPL, for tests alone). What both can do must look alike: customers, saved
cards, payment intents captured by hand, refunds, the list of events, signed webhooks. localstripe has no Checkout and
no disputes, its idempotency keys do not replay, and it allows to pay back more than was paid: that is not compared.
"""

from __future__ import annotations

import subprocess
import sys
import time

import httpx
import pytest
import stripe

from billing import gateway
from tests.billing.serving import running
from tests.console.processes import free_port, wait_for

LOCALSTRIPE = """
import sys
from aiohttp import web
from localstripe.server import app
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
"""
"""Its own command listens on every interface."""
CARD = {"type": "card", "card": {"number": "4242424242424242", "exp_month": 12, "exp_year": 2034, "cvc": "123"}}


@pytest.fixture
def ours(tmp_path, console):
    with running(tmp_path / "journal.jsonl", console.url) as provider:
        yield stripe.StripeClient(gateway.sandbox_key(), base_addresses={"api": provider.account.base_url})


@pytest.fixture
def theirs(tmp_path, console):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "localstripe.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", LOCALSTRIPE, str(port)], cwd=tmp_path, stdout=log, stderr=log
        )
        try:
            wait_for(lambda: process.poll() is not None or _answers(url))
            assert process.poll() is None, (tmp_path / "localstripe.log").read_text()
            hook = {"url": console.url, "secret": gateway.sandbox_secret()}
            assert httpx.post(f"{url}/_config/webhooks/ours", json=hook).status_code == 200
            yield stripe.StripeClient("sk_test_12345", base_addresses={"api": url})
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture(params=["ours", "theirs"])
def v1(request):
    """The client's version 1, of each double in turn."""
    return request.getfixturevalue(request.param).v1


def _answers(url):
    try:
        return httpx.get(f"{url}/v1/customers", headers={"Authorization": "Bearer sk_test_12345"}).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def customer(v1):
    return v1.customers.create({"name": "Acme", "email": "a@example.com", "metadata": {"organization": "1"}}).id


def attached_method(v1, customer, number="4242424242424242"):
    method = v1.payment_methods.create(CARD | {"card": CARD["card"] | {"number": number}})
    v1.payment_methods.attach(method.id, {"customer": customer})
    return method.id


def uncaptured_intent(v1, customer):
    wanted = {"amount": 1000, "currency": "usd", "customer": customer, "payment_method": attached_method(v1, customer)}
    return v1.payment_intents.create(
        wanted | {"capture_method": "manual", "confirm": True, "metadata": {"top_up": "1"}}
    )


def test_customers_events_and_signed_webhooks(v1, customer, console):
    stored = v1.customers.retrieve(customer)
    assert stored.object == "customer"
    assert stored.id.startswith("cus_")
    assert (stored.name, stored.email, stored.metadata["organization"]) == ("Acme", "a@example.com", "1")
    assert v1.customers.update(customer, {"name": "Acme & Sons"}).name == "Acme & Sons"
    with pytest.raises(stripe.InvalidRequestError) as caught:
        v1.customers.retrieve("cus_unknown")
    assert caught.value.http_status == 404
    listed = v1.events.list({"created": {"gte": int(time.time()) - 60}, "limit": 100})
    event = next(event for event in listed.data if event.type == "customer.created")
    assert event.id.startswith("evt_")
    assert event.to_dict()["data"]["object"]["id"] == customer
    assert v1.events.list({"created": {"gte": 2**33}}).data == []
    assert console.event("customer.created")["data"]["object"]["id"] == customer


def test_a_deleted_customer(v1, customer, console):
    assert v1.customers.delete(customer).to_dict() == {"id": customer, "object": "customer", "deleted": True}
    assert console.event("customer.deleted")["data"]["object"]["id"] == customer
    for call in (
        lambda: attached_method(v1, customer),
        lambda: v1.payment_intents.create({"amount": 500, "currency": "usd", "customer": customer}),
    ):
        with pytest.raises(stripe.InvalidRequestError) as caught:
            call()
        assert caught.value.http_status == 404


def test_saved_cards(v1, customer):
    method = v1.payment_methods.create(CARD)
    assert method.id.startswith("pm_")
    assert (method.type, method.card.brand, method.card.last4, method.customer) == ("card", "visa", "4242", None)
    assert v1.payment_methods.attach(method.id, {"customer": customer}).customer == customer
    listed = v1.payment_methods.list({"customer": customer, "type": "card"})
    assert [each.id for each in listed.data] == [method.id]
    assert v1.payment_methods.detach(method.id).customer is None
    assert v1.payment_methods.list({"customer": customer, "type": "card"}).data == []


def test_a_declined_card(v1, customer):
    method = attached_method(v1, customer, "4000000000000341")
    wanted = {"amount": 1000, "currency": "usd", "customer": customer, "payment_method": method}
    with pytest.raises(stripe.CardError) as caught:
        v1.payment_intents.create(wanted | {"off_session": True, "confirm": True})
    assert (caught.value.http_status, caught.value.code) == (402, "card_declined")


def test_a_payment_that_is_captured_and_refunded_in_parts(v1, customer):
    intent = uncaptured_intent(v1, customer)
    assert intent.id.startswith("pi_")
    assert (intent.status, intent.amount, intent.currency) == ("requires_capture", 1000, "usd")
    captured = v1.payment_intents.capture(intent.id)
    assert (captured.status, captured.metadata["top_up"]) == ("succeeded", "1")
    assert v1.payment_intents.retrieve(intent.id).status == "succeeded"
    first = v1.refunds.create({"payment_intent": intent.id, "amount": 400, "metadata": {"refund": "1"}})
    assert first.id.startswith("re_")
    assert (first.status, first.amount, first.metadata["refund"]) == ("succeeded", 400, "1")
    rest = v1.refunds.create({"payment_intent": intent.id, "amount": 600})
    assert (rest.status, rest.amount) == ("succeeded", 600)


def test_a_payment_that_is_cancelled(v1, customer):
    intent = uncaptured_intent(v1, customer)
    assert v1.payment_intents.cancel(intent.id).status == "canceled"
    assert v1.payment_intents.retrieve(intent.id).status == "canceled"

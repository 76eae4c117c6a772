"""Quotes, orders and jobs over the HTTP API."""

import uuid

import pytest
from django.utils import timezone

from billing.models import Hold, Quote
from jobs import dispatch, reconciliation, telemetry
from jobs.models import Job, Order
from runtime.specs import Outcome
from tests.factories.jobs import Customer


@pytest.fixture
def client(api, customer):
    return api(customer.membership)


def refused(answer, status, code):
    """Return the body of an answer, which must be an error with this status and code."""
    assert answer.status_code == status, answer.content
    body = answer.json()
    assert body["code"] == code
    assert body["message"].strip()
    assert set(body) <= {"code", "message", "fields"}
    return body


def test_a_run_is_bought_followed_and_paid_over_the_api(client, customer, backend):
    quote = client.post("/api/v1/quotes/", customer.form())
    assert quote.status_code == 201
    offer = quote.json()
    assert set(offer) >= {"id", "currency", "lines", "estimate", "ceiling_minor", "expires_at"}
    assert set(offer["estimate"]) == {"p50_minor", "p90_minor", "basis"}
    ceiling_minor = 180  # an hour on two nodes at 90 cents per node-hour
    assert sum(line["amount_minor"] for line in offer["lines"]) == offer["ceiling_minor"] == ceiling_minor
    assert client.get(f"/api/v1/quotes/{offer['id']}/").json() == offer

    answer = client.post("/api/v1/orders/", {"quote": offer["id"]}, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 201
    order = answer.json()
    assert set(order) == {"id", "job"}
    assert client.post("/api/v1/orders/", {"quote": offer["id"]}, headers={"Idempotency-Key": "k"}).json() == order
    job = order["job"]
    path = f"/api/v1/jobs/{job}/"
    data = client.get(path).json()
    assert (data["state"], data["waiting_for"]) == ("queued", "It starts shortly.")
    assert client.get("/api/v1/wallet/").json()["held_minor"] == ceiling_minor
    refused(client.get(f"{path}receipt/"), 404, "not_found")

    dispatch.dispatch_queue()
    name = f"job-{job}-1"
    backend.start(name, at=timezone.now().timestamp() - 600)
    backend.write(name, "epoch 5/10 loss 0.5\n")
    reconciliation.reconcile()
    telemetry.ingest(attempt=Job.objects.get(pk=job).attempts.get())
    data = client.get(path).json()
    # In the fifth epoch, four are finished.
    assert (data["state"], data["progress"]["epoch"], data["progress"]["fraction"]) == ("running", 4, 0.4)
    assert data["cost_minor"] == pytest.approx(30, abs=1)  # 600 seconds on both nodes
    assert client.get(f"{path}logs/", {"rank": 0, "offset": 6}).json() == {
        "text": "5/10 loss 0.5\n", "offset": 6, "next_offset": 20, "size": 20, "eof": False,
    }  # fmt: skip
    # Pairs of step and value. Lines without a step are counted, and this is the first.
    assert client.get(f"{path}metrics/").json() == {"metrics": {"loss": [[1, 0.5]]}}
    assert client.get(f"{path}environment/", {"rank": 1}).json()["environment"]["RANK"] == "1"

    backend.end(name, Outcome.COMPLETED)
    reconciliation.reconcile()
    data = client.get(path).json()
    assert (data["state"], data["reason"], data["progress"]["fraction"]) == ("succeeded", "completed", 1.0)
    receipt = client.get(f"{path}receipt/").json()
    assert receipt["total_minor"] == data["cost_minor"] == pytest.approx(30, abs=1)
    assert [line["rule"] for line in receipt["lines"]] == ["queue", "start", "time_used"]
    assert client.get("/api/v1/wallet/").json() == {
        "currency": "USD", "posted_minor": 100_000 - receipt["total_minor"], "held_minor": 0,
        "available_minor": 100_000 - receipt["total_minor"], "credit_minor": 0,
    }  # fmt: skip
    kinds = [event["kind"] for event in client.get(f"{path}events/").json()["results"]]
    assert kinds == ["ordered", "starting", "running", "succeeded", "settled"]
    rerun = client.post(f"{path}rerun/", {"epochs": 2})
    assert rerun.status_code == 201
    assert client.get(f"/api/v1/jobs/{rerun.json()['job']}/").json()["rerun_of"] == job


def test_a_refused_order_writes_nothing(client, customer):
    quote = customer.quote()
    Quote.objects.update(expires_at=timezone.now())
    refused(client.post("/api/v1/orders/", {"quote": str(quote.pk)}), 409, "quote_expired")
    refused(client.post("/api/v1/orders/", {"quote": str(uuid.uuid4())}), 404, "not_found")
    for body in ({"quote": "x"}, {}):
        assert "quote" in refused(client.post("/api/v1/orders/", body), 400, "invalid")["fields"]
    long, fresh = {"Idempotency-Key": "k" * 256}, {"quote": str(customer.quote().pk)}
    assert "Idempotency-Key" in refused(client.post("/api/v1/orders/", fresh, headers=long), 400, "invalid")["fields"]
    assert not Order.objects.exists()
    assert not Hold.objects.exists()
    assert client.post("/api/v1/orders/", fresh, headers={"Idempotency-Key": "k"}).status_code == 201
    another = {"quote": str(customer.quote().pk)}
    refused(client.post("/api/v1/orders/", another, headers={"Idempotency-Key": "k"}), 409, "idempotency_conflict")
    refused(client.post("/api/v1/orders/", fresh), 400, "quote_bought")


def test_an_insufficient_balance_is_a_402_with_the_missing_amount(api, backend, db):
    poor = Customer(backend, balance_minor=10)
    client = api(poor.membership)
    body = refused(client.post("/api/v1/orders/", {"quote": str(poor.quote().pk)}), 402, "insufficient_funds")
    assert "$1.70" in body["message"], "the ceiling of $1.80 less the balance"

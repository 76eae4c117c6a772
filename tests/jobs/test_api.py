import json
import uuid

import pytest
from django.utils import timezone

from billing.models import Hold, Quote
from jobs import dispatch
from jobs.models import Job, Order
from runtime.specs import Outcome
from tests.factories.accounts import MembershipFactory
from tests.factories.jobs import Customer
from tests.factories.storage import WorkspaceFactory


@pytest.fixture
def client(api, customer):
    return api(customer.membership)


def buy(client, customer, **changes):
    quote = client.post("/api/v1/quotes/", customer.form(**changes)).json()
    return client.post("/api/v1/orders/", {"quote": quote["id"]}, headers={"Idempotency-Key": quote["id"]}).json()[
        "job"
    ]


def refused(answer, status, code):
    assert answer.status_code == status, answer.content
    body = answer.json()
    assert body["code"] == code
    assert body["message"].strip()
    assert set(body) <= {"code", "message", "fields"}
    return body


def test_from_activation_to_receipt(api, backend, db):
    Customer(backend)  # the catalogue
    owner = MembershipFactory()
    client = api(owner)
    refused(client.post("/api/v1/quotes/", {}), 403, "service_inactive")
    refused(client.post("/api/v1/services/distributed-training/activate/", {}), 400, "terms_not_accepted")
    assert client.post("/api/v1/services/distributed-training/activate/", {"accept_terms": True}).json()["is_active"]


def test_a_run_bought_followed_and_paid(client, customer, backend):
    quote = client.post("/api/v1/quotes/", customer.form())
    assert quote.status_code == 201
    offer = quote.json()
    assert set(offer) >= {"id", "currency", "lines", "estimate", "ceiling_minor", "expires_at"}
    assert set(offer["estimate"]) == {"p50_minor", "p90_minor", "basis"}
    assert sum(line["amount_minor"] for line in offer["lines"]) == offer["ceiling_minor"] == 180
    assert client.get(f"/api/v1/quotes/{offer['id']}/").json() == offer

    answer = client.post("/api/v1/orders/", {"quote": offer["id"]}, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 201
    order = answer.json()
    assert set(order) == {"id", "job"}
    assert client.post("/api/v1/orders/", {"quote": offer["id"]}, headers={"Idempotency-Key": "k"}).json() == order
    job = order["job"]
    path = f"/api/v1/jobs/{job}/"
    found = client.get(path).json()
    assert (found["state"], found["waiting_for"]) == ("queued", "It starts in a moment.")
    assert client.get("/api/v1/wallet/").json()["held_minor"] == 180
    refused(client.get(f"{path}receipt/"), 404, "not_found")

    dispatch.dispatch_queue()
    name = f"job-{job}-1"
    backend.start(name, at=timezone.now().timestamp() - 600)
    backend.write(name, "epoch 5/10 loss 0.5\n")
    dispatch.reconcile()
    dispatch.telemetry.ingest(attempt=Job.objects.get(pk=job).attempts.get())
    found = client.get(path).json()
    assert (found["state"], found["progress"]["epoch"], found["progress"]["fraction"]) == ("running", 5, 0.5)
    assert found["cost_minor"] == pytest.approx(30, abs=1)
    assert client.get(f"{path}logs/", {"rank": 0, "offset": 6}).json() == {
        "text": "5/10 loss 0.5\n", "next_offset": 20, "eof": False,
    }  # fmt: skip
    assert client.get(f"{path}metrics/").json() == {"metrics": {"loss": [[1, 0.5]]}}
    assert client.get(f"{path}environment/", {"rank": 1}).json()["environment"]["RANK"] == "1"

    backend.end(name, Outcome.COMPLETED)
    dispatch.reconcile()
    found = client.get(path).json()
    assert (found["state"], found["reason"], found["progress"]["fraction"]) == ("succeeded", "completed", 1.0)
    receipt = client.get(f"{path}receipt/").json()
    assert receipt["total_minor"] == found["cost_minor"] == pytest.approx(30, abs=1)
    assert [line["rule"] for line in receipt["lines"]] == ["queue", "start", "time_used"]
    assert client.get("/api/v1/wallet/").json() == {
        "currency": "USD", "posted_minor": 100_000 - receipt["total_minor"], "held_minor": 0,
        "available_minor": 100_000 - receipt["total_minor"], "credit_minor": 0,
    }  # fmt: skip
    kinds = [event["kind"] for event in client.get(f"{path}events/").json()["results"]]
    assert kinds == ["ordered", "starting", "running", "succeeded", "settled"]
    again = client.post(f"{path}rerun/", {"epochs": 2})
    assert again.status_code == 201
    assert client.get(f"/api/v1/jobs/{again.json()['job']}/").json()["rerun_of"] == job
    assert [row["id"] for row in client.get("/api/v1/jobs/").json()["results"]] == [again.json()["job"], job]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"framework": "mxnet"}, "framework"),
        ({"image": "windows"}, "image"),
        ({"nodes": 0}, "nodes"),
        ({"nodes": 9}, "nodes"),
        ({"nodes": 5, "node_spec": "medium"}, "nodes"),
        ({"lr": "abc"}, "lr"),
        ({"code_path": "../../etc/passwd"}, "code_path"),
        ({"code_path": "no.py"}, "code_path"),
        ({"workspace": "theirs"}, "workspace"),
        ({"max_seconds": []}, "max_seconds"),
        ({"ceiling_minor": 1}, "ceiling_minor"),
        ({"arguments": ["\ud800"]}, "arguments"),
    ],
)
def test_each_bad_value_is_told_at_its_field(client, customer, other, changes, field):
    WorkspaceFactory(organization=other.organization, name="theirs")
    body = json.dumps(customer.form(**changes))
    body = refused(client.post("/api/v1/quotes/", body, content_type="application/json"), 400, "invalid")
    assert list(body["fields"]) == [field]
    assert not Quote.objects.exists()


@pytest.mark.parametrize("body", ["[]", '"x"', "5", "null"])
def test_what_is_no_object_is_refused(client, body):
    for path in ("quotes/", "orders/", "services/distributed-training/activate/"):
        answer = client.post(f"/api/v1/{path}", body, content_type="application/json")
        assert answer.status_code == 400, path
        assert answer.json()["message"]


def test_an_order_that_cannot_be_taken_leaves_nothing(client, customer):
    quote = customer.quote()
    Quote.objects.update(expires_at=timezone.now())
    refused(client.post("/api/v1/orders/", {"quote": str(quote.pk)}), 409, "quote_expired")
    refused(client.post("/api/v1/orders/", {"quote": str(uuid.uuid4())}), 404, "not_found")
    assert "quote" in refused(client.post("/api/v1/orders/", {"quote": "x"}), 400, "invalid")["fields"]
    assert "quote" in refused(client.post("/api/v1/orders/", {}), 400, "invalid")["fields"]
    long = {"Idempotency-Key": "k" * 256}
    fresh = str(customer.quote().pk)
    assert (
        "Idempotency-Key"
        in refused(client.post("/api/v1/orders/", {"quote": fresh}, headers=long), 400, "invalid")["fields"]
    )
    assert not Order.objects.exists()
    assert not Hold.objects.exists()


def test_a_quote_and_a_key_are_good_once(client, customer):
    first, second = (str(customer.quote().pk) for _ in range(2))
    key = {"Idempotency-Key": "k"}
    assert client.post("/api/v1/orders/", {"quote": first}, headers=key).status_code == 201
    refused(client.post("/api/v1/orders/", {"quote": second}, headers=key), 409, "idempotency_conflict")
    refused(client.post("/api/v1/orders/", {"quote": first}), 400, "quote_bought")
    customer.quota(max_open_jobs=1)
    refused(client.post("/api/v1/orders/", {"quote": second}), 409, "quota_exceeded")


def test_a_balance_too_small_is_a_402_that_says_how_much(api, backend, db):
    poor = Customer(backend, balance_minor=10)
    client = api(poor.membership)
    body = refused(client.post("/api/v1/orders/", {"quote": str(poor.quote().pk)}), 402, "insufficient_funds")
    assert "$1.70" in body["message"]


def test_another_organizations_objects_are_not_there(client, other):
    job, quote = other.job(), other.quote()
    refused(client.post("/api/v1/orders/", {"quote": str(quote.pk)}), 404, "not_found")
    refused(client.get(f"/api/v1/quotes/{quote.pk}/"), 404, "not_found")
    for path in ("", "logs/", "stream/", "metrics/", "events/", "environment/", "receipt/"):
        refused(client.get(f"/api/v1/jobs/{job.pk}/{path}"), 404, "not_found")
    for path in ("cancel/", "rerun/"):
        refused(client.post(f"/api/v1/jobs/{job.pk}/{path}", {}), 404, "not_found")
    assert client.get("/api/v1/jobs/").json()["results"] == []


def test_cancel(client, customer):
    job = buy(client, customer)
    assert client.post(f"/api/v1/jobs/{job}/cancel/").json()["state"] == "cancelled"
    refused(client.post(f"/api/v1/jobs/{job}/cancel/"), 409, "already_ended")


@pytest.mark.parametrize(
    ("name", "value"),
    [("offset", "-1"), ("offset", "x"), ("offset", "9" * 30), ("rank", "-1"), ("rank", "1e3"), ("attempt", "-2")],
)
def test_a_number_that_is_none_is_told(client, customer, name, value):
    path = f"/api/v1/jobs/{customer.started().job_id}/logs/"
    assert name in refused(client.get(path, {name: value}), 400, "invalid")["fields"]


def test_ranks_and_attempts_that_are_not_there(client, customer):
    job = customer.started().job_id
    refused(client.get(f"/api/v1/jobs/{job}/logs/", {"rank": 2}), 404, "not_found")
    refused(client.get(f"/api/v1/jobs/{job}/environment/", {"rank": 2}), 404, "not_found")
    assert client.get(f"/api/v1/jobs/{job}/logs/", {"attempt": 99999}).json()["text"] == ""


def test_an_event_stream_has_its_headers(client, customer):
    job = customer.started().job_id
    for path in ("stream/", "logs/"):
        answer = client.get(
            f"/api/v1/jobs/{job}/{path}", headers={"Accept": "text/event-stream", "Last-Event-ID": "9" * 40}
        )
        assert (answer.status_code, answer["Content-Type"]) == (200, "text/event-stream")
        assert answer["Cache-Control"] == "no-cache"


def test_jobs_are_listed_by_state_newest_first_at_a_constant_cost(client, customer, django_assert_max_num_queries):
    jobs = [customer.job(nodes=1).pk for _ in range(6)]
    client.post(f"/api/v1/jobs/{jobs[0]}/cancel/")
    with django_assert_max_num_queries(6):
        rows = client.get("/api/v1/jobs/").json()["results"]
    assert [row["id"] for row in rows] == jobs[::-1]
    assert [row["id"] for row in client.get("/api/v1/jobs/", {"state": "cancelled"}).json()["results"]] == jobs[:1]
    refused(client.get("/api/v1/jobs/", {"state": "flying"}), 400, "invalid")


def test_the_catalogue(client):
    names = [row["name"] for row in client.get("/api/v1/products/").json()["results"]]
    assert names == ["metered", "fixed"]


def test_after_the_service_ended_what_runs_goes_on(client, customer):
    attempt = customer.started()
    assert client.post("/api/v1/services/distributed-training/deactivate/").status_code == 204
    refused(client.post("/api/v1/quotes/", customer.form()), 403, "service_inactive")
    refused(client.post(f"/api/v1/jobs/{attempt.job_id}/rerun/", {}), 403, "service_inactive")
    assert customer.end(attempt, Outcome.COMPLETED).state == "succeeded"
    assert client.get(f"/api/v1/jobs/{attempt.job_id}/receipt/").status_code == 200

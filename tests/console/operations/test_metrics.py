"""What Prometheus gets, read with Prometheus' own reader."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from billing.models import StripeEvent
from console.operations import figures, metrics, signs, store, tally
from console.operations.tally import TASK_SECONDS, TASK_TOTAL, Tally
from jobs import clusters, dispatch
from jobs.models import Attempt, ClusterStatus, Job, JobEvent
from runtime.specs import Outcome
from tests.factories.jobs import Customer
from tests.fakes import FakeBackend

TOKEN = "of-the-operator"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def backend(monkeypatch, tmp_path):
    fake = FakeBackend(root=tmp_path / "runs")
    monkeypatch.setattr("jobs.backend.create", lambda _kind, **_options: fake)
    return fake


@pytest.fixture
def customer(db, backend, shared):
    return Customer(backend)


@pytest.fixture
def scrape(client, settings, monkeypatch):
    """`scrape()` gives name and labels of each sample -> value, as of now."""
    settings.METRICS_TOKEN = TOKEN
    monkeypatch.setattr(metrics, "KEPT_SECONDS", -1.0)
    monkeypatch.setattr(figures, "SETTLED_SECONDS", 0)

    def get():
        answer = client.get("/metrics", headers=HEADERS)
        assert answer.status_code == 200
        families = list(text_string_to_metric_families(answer.content.decode()))
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }

    return get


def earlier(seconds):
    return timezone.now() - timedelta(seconds=seconds)


# --- Who may ask ------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer guessed"}, {"Authorization": f"Token {TOKEN}"}])
def test_without_the_token_there_is_nothing(client, settings, headers):
    settings.METRICS_TOKEN = TOKEN
    answer = client.get("/metrics", headers=headers)
    assert (answer.status_code, answer.content) == (404, b"")


@pytest.mark.django_db
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}])
def test_where_no_token_is_set_nobody_gets_anything(client, settings, headers, owner):
    settings.METRICS_TOKEN = ""
    assert client.get("/metrics", headers=headers).status_code == 404
    client.force_login(owner.user)
    assert client.get("/metrics", headers=headers).status_code == 404


@pytest.mark.django_db
def test_openmetrics_is_spoken_where_it_is_asked_for(client, settings, shared):
    settings.METRICS_TOKEN = TOKEN
    answer = client.get("/metrics", headers=HEADERS | {"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer["Content-Type"].startswith("application/openmetrics-text")
    assert answer.content.endswith(b"# EOF\n")


# --- The queue and what became of it ----------------------------------------------------------------------------------


def test_the_queue_by_cluster_and_node_spec(customer, scrape):
    old, young = customer.job(), customer.job()
    Job.objects.filter(pk=old.pk).update(queued_at=earlier(90))
    found = scrape()
    assert found["trainyard_jobs_queued", "default", "nano"] == 2
    assert 90 <= found["trainyard_queue_oldest_seconds", "default", "nano"] < 120
    # one that must not start yet does not make the queue old
    Job.objects.filter(pk__in=(old.pk, young.pk)).update(not_before=timezone.now() + timedelta(hours=1))
    found = scrape()
    assert found["trainyard_jobs_queued", "default", "nano"] == 2
    assert found["trainyard_queue_oldest_seconds", "default", "nano"] == 0


def test_times_between_states_and_ends_are_added_up_from_events(customer, scrape):
    attempt = customer.started()
    found = scrape()
    assert found["trainyard_jobs_active", "running"] == 1
    assert found["trainyard_nodes_granted",] == 2
    JobEvent.objects.filter(job=attempt.job, kind="running").update(created_at=earlier(100))
    customer.end(attempt, Outcome.CODE_FAILED)
    found = scrape()
    assert found["trainyard_transition_seconds_count", "queued", "starting"] == 1
    assert found["trainyard_transition_seconds_count", "running", "starting"] == 1
    assert found["trainyard_transition_seconds_bucket", "60.0", "failed", "running"] == 0
    assert found["trainyard_transition_seconds_bucket", "300.0", "failed", "running"] == 1
    assert 100 <= found["trainyard_transition_seconds_sum", "failed", "running"] < 120
    assert found["trainyard_dispatch_seconds_count",] == 1
    assert found["trainyard_runs_ended_total", "code_failed", "no"] == 1
    assert scrape()["trainyard_runs_ended_total", "code_failed", "no"] == 1


def test_a_fault_of_the_platform_is_an_end_that_was_tried_again(customer, scrape):
    customer.end(customer.started(), Outcome.NODE_LOST)
    found = scrape()
    assert found["trainyard_runs_ended_total", "node_lost", "yes"] == 1
    assert found["trainyard_transition_seconds_count", "queued", "running"] == 1


def test_figures_are_a_function_of_rows_whatever_became_of_redis(customer, scrape, monkeypatch):
    for _ in range(3):
        customer.end(customer.started(), Outcome.COMPLETED)
    before = scrape()
    store.client().delete(store.key("figures"))
    monkeypatch.setattr(figures, "EVENTS_AT_ONCE", 4)
    found = scrape()
    assert found["trainyard_figures_behind",] == 1
    rounds = 1
    while found["trainyard_figures_behind",]:
        found, rounds = scrape(), rounds + 1
    assert rounds > 2
    kinds = ("trainyard_transition_seconds", "trainyard_runs_ended", "trainyard_dispatch_seconds")
    assert {key: value for key, value in found.items() if key[0].startswith(kinds)} == {
        key: value for key, value in before.items() if key[0].startswith(kinds)
    }


def test_an_event_too_young_to_be_settled_is_counted_later(customer, scrape, monkeypatch):
    monkeypatch.setattr(figures, "SETTLED_SECONDS", 3600)
    customer.end(customer.started(), Outcome.COMPLETED)
    assert ("trainyard_runs_ended_total", "completed", "no") not in scrape()
    monkeypatch.setattr(figures, "SETTLED_SECONDS", 0)
    assert scrape()["trainyard_runs_ended_total", "completed", "no"] == 1


def test_what_is_stuck_between_states_grows_old(customer, scrape, backend):
    attempt = customer.started()
    Attempt.objects.filter(pk=attempt.pk).update(submitted_at=None, claimed_at=earlier(400))
    assert scrape()["trainyard_unsubmitted_oldest_seconds",] >= 400
    Job.objects.filter(pk=attempt.job_id).update(state="stopping", cancel_requested_at=earlier(500))
    assert scrape()["trainyard_stopping_oldest_seconds",] >= 500


def plans(statements):
    """The plans of the statements, with sequential scans made as dear as they are on a large table."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        for statement in statements:
            cursor.execute(f"EXPLAIN {statement}")
            yield statement, "\n".join(row[0] for row in cursor.fetchall())


def test_no_scrape_reads_what_has_ended(customer, scrape):
    customer.end(customer.started(), Outcome.COMPLETED)
    scrape()
    with CaptureQueriesContext(
        connection,
    ) as queries:
        scrape()
    asked = [query["sql"] for query in queries if query["sql"].startswith(("SELECT", "\nSELECT"))]
    large = ("jobs_job ", "jobs_attempt", "jobs_jobevent", "billing_stripeevent")
    looked = [statement for statement in asked if any(table in statement for table in large)]
    assert len(looked) == 6
    for statement, plan in plans(looked):
        scanned = [line for line in plan.splitlines() if "Seq Scan on" in line and "nodespec" not in line]
        assert not scanned, f"{statement}\n{plan}"


# --- Money ------------------------------------------------------------------------------------------------------------


def event(number, state, received, applied=None):
    made = StripeEvent.objects.create(event_id=f"evt_{number}", type="refund.created", payload={}, state=state)
    StripeEvent.objects.filter(pk=made.pk).update(received_at=received, applied_at=applied)


@pytest.mark.django_db
def test_payment_events_that_are_not_done_and_how_late_the_others_were(scrape, shared):
    event(1, "received", earlier(40))
    event(2, "parked", earlier(400))
    event(3, "quarantined", earlier(4000))
    event(4, "applied", earlier(100), earlier(30))
    event(5, "applied", earlier(90_000), earlier(1))
    found = scrape()
    assert [found["trainyard_payment_events", state] for state in ("received", "parked", "quarantined")] == [1, 1, 1]
    assert found["trainyard_payment_events_oldest_seconds", "received"] >= 40
    assert found["trainyard_payment_events_oldest_seconds", "quarantined"] >= 4000
    assert 70 <= found["trainyard_webhook_lag_seconds",] < 80


@pytest.mark.django_db
def test_what_the_check_of_the_books_found(scrape, shared):
    assert not [key for key in scrape() if key[0] == "trainyard_ledger_wrong"]
    signs.give(signs.BOOKS, wrong={"transactions": 0, "balances": 2, "holds": 0})
    assert scrape()["trainyard_ledger_wrong", "balances"] == 2


# --- Clusters, processes, tasks ---------------------------------------------------------------------------------------


def test_capacity_is_what_the_sweep_saw(customer, scrape, backend):
    customer.started()
    dispatch.reconcile()
    found = scrape()
    assert found["trainyard_cluster_up", "default"] == 1
    assert found["trainyard_capacity", "", "cpus", "default"] == 8
    assert found["trainyard_capacity_free", "", "cpus", "default"] == backend.capacity().machines[0].free.cpus < 8
    assert found["trainyard_isolation_gaps", "default"] == 0


def test_a_cluster_that_is_away_is_down_and_a_scrape_does_not_ask_it(customer, scrape, backend):
    dispatch.reconcile()
    backend.available = False
    clusters.note(name="default", answers=False, detail="away")
    backend.capacity = pytest.fail
    assert scrape()["trainyard_cluster_up", "default"] == 0
    assert ClusterStatus.objects.get().answers is False


@pytest.mark.django_db
def test_processes_and_streams_by_their_signs(scrape, shared):
    signs.give(signs.WATCHER, "default")
    signs.give(signs.LIVE, streams=3)
    found = scrape()
    assert found["trainyard_processes", "watcher"] == 1
    assert found["trainyard_processes", "beat"] == 0
    assert found["trainyard_live_streams",] == 3
    assert found["trainyard_last_sign_timestamp_seconds", "default", "watcher"] > 1_700_000_000
    store.client().rpush(metrics.QUEUE, "a message")
    try:
        assert scrape()["trainyard_task_queue_length",] >= 1
    finally:
        store.client().lpop(metrics.QUEUE)


@pytest.mark.django_db
def test_requests_are_counted_by_the_pattern_of_their_address(client, owner, shared, scrape):
    client.force_login(owner.user)
    client.get("/jobs/4711/")
    client.post("/webhooks/stripe/", "{}", content_type="application/json")
    client.get("/static/css/none-1.css")
    client.get("/no/such/address-1")
    client.get("/no/such/address-2")
    assert tally.tally.flush()
    found = scrape()
    assert found["trainyard_http_requests_total", "404", "GET", "jobs/<int:pk>/"] == 1
    assert found["trainyard_http_requests_total", "404", "GET", "unknown"] == 2
    assert found["trainyard_http_requests_total", "400", "POST", "webhooks/stripe/"] == 1
    assert found["trainyard_http_requests_total", "404", "GET", "static/"] == 1
    assert found["trainyard_http_request_seconds_count", "GET", "jobs/<int:pk>/"] == 1
    assert not [key for key in found if "address-1" in " ".join(key) or "4711" in " ".join(key)]


# --- The tally --------------------------------------------------------------------------------------------------------


def test_counts_of_several_processes_come_together(shared, monkeypatch):
    one, other = Tally(), Tally()
    for each, seconds in ((one, 0.01), (one, 0.2), (other, 700.0)):
        each.observe(TASK_SECONDS, seconds, task="jobs.tasks.reconcile")
        each.count(TASK_TOTAL, task="jobs.tasks.reconcile", outcome="success")
    assert one.flush()
    assert other.flush()
    [series] = tally.read(TASK_SECONDS)
    assert series.labels == ("jobs.tasks.reconcile",)
    assert series.counts == (0, 1, 1, 2, 2, 2, 2, 2, 2, 3)
    assert series.total == pytest.approx(700.21)
    assert [each.counts for each in tally.read(TASK_TOTAL)] == [(3,)]


def test_counts_wait_for_a_redis_that_is_away(shared, settings):
    mine, url = Tally(), settings.REDIS_URL
    settings.REDIS_URL = "unix:///nowhere/redis.sock?db=0"
    store.client.cache_clear()
    mine.count(TASK_TOTAL, task="x", outcome="success")
    assert not mine.flush()
    mine.count(TASK_TOTAL, task="x", outcome="success")
    settings.REDIS_URL = url
    store.client.cache_clear()
    assert mine.flush()
    assert [each.counts for each in tally.read(TASK_TOTAL)] == [(2,)]


def test_what_was_counted_is_sent_by_itself(shared, monkeypatch):
    mine, sent = Tally(), threading.Event()
    monkeypatch.setattr(mine, "flush", lambda: sent.set() or True)
    mine.count(TASK_TOTAL, task="x", outcome="success")
    assert sent.wait(10)


def test_a_process_that_was_forked_sends_only_its_own(shared):
    mine = Tally()
    mine.count(TASK_TOTAL, task="x", outcome="success")
    child = os.fork()
    if child == 0:  # pragma: no cover  # another process
        mine.count(TASK_TOTAL, task="y", outcome="success")
        store.client.cache_clear()
        os._exit(0 if mine.flush() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert {each.labels[0]: each.counts for each in tally.read(TASK_TOTAL)} == {"y": (1,)}
    assert mine.flush()
    assert {each.labels[0]: each.counts for each in tally.read(TASK_TOTAL)} == {"x": (1,), "y": (1,)}


def test_labels_without_end_are_not_kept(shared, monkeypatch):
    monkeypatch.setattr(tally, "MOST_SERIES", 10)
    mine = Tally()
    for number in range(100):
        mine.count(TASK_TOTAL, task=str(number), outcome="success")
    assert len(mine._counts) == 10


@pytest.mark.django_db
def test_without_redis_a_scrape_gives_the_rest(scrape, away):
    found = scrape()
    assert found["trainyard_up", "redis"] == 0
    assert found["trainyard_up", "database"] == 1
    assert found["trainyard_jobs_active", "running"] == 0


@pytest.mark.django_db
def test_answers_come_from_memory_for_a_moment(client, settings, shared, monkeypatch):
    settings.METRICS_TOKEN = TOKEN
    monkeypatch.setattr(metrics, "REGISTRY", SimpleNamespace(collect=metrics.Collector().collect))
    client.get("/metrics", headers=HEADERS)
    with CaptureQueriesContext(connection) as queries:
        client.get("/metrics", headers=HEADERS)
    assert not len(queries)

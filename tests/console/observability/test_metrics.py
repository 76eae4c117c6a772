"""The metrics that Prometheus gets, read with Prometheus' own reader."""

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import redis
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from billing.models import StripeEvent
from console.monitoring import db_metrics, metrics
from console.observability import counters, heartbeats, redis_client
from console.observability.counters import TASK_SECONDS, TASK_TOTAL, Buffer
from jobs import clusters, reconciliation
from jobs.models import Attempt, Job, JobEvent
from runtime.specs import Outcome
from tests.factories.jobs import Customer

pytestmark = pytest.mark.django_db
TOKEN = "of-the-operator"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def customer(db, backend, redis_keys):
    """The customer, whose jobs are counted in Redis under a prefix that no other test has."""
    return Customer(backend)


@pytest.fixture
def scrape(client, settings, monkeypatch):
    """`scrape()` returns the present value of each sample by its name and the values of its labels, sorted."""
    settings.METRICS_TOKEN = TOKEN
    monkeypatch.setattr(metrics, "CACHE_SECONDS", -1.0)  # each scrape computes anew
    monkeypatch.setattr(db_metrics, "MIN_EVENT_AGE_SECONDS", 0)  # events count at once

    def get():
        answer = client.get("/metrics", headers=HEADERS)
        assert answer.status_code == 200
        return {
            (sample.name.removeprefix("trainyard_"), *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    return get


def earlier(seconds):
    return timezone.now() - timedelta(seconds=seconds)


def test_without_the_operators_token_there_is_no_such_page(client, settings, owner):
    client.force_login(owner.user)
    for token, sent in ((TOKEN, ""), (TOKEN, "Bearer guessed"), (TOKEN, f"Token {TOKEN}"), ("", ""), ("", "Bearer ")):
        settings.METRICS_TOKEN = token
        answer = client.get("/metrics", headers={"Authorization": sent})
        assert (answer.status_code, answer.content) == (404, b""), (token, sent)


def test_waiting_and_stuck_jobs_grow_old_by_cluster_and_node_spec(customer, scrape):
    old = customer.job()
    customer.job()
    Job.objects.filter(pk=old.pk).update(queued_at=earlier(90))
    samples = scrape()
    assert samples["jobs_queued", "default", "nano"] == 2
    assert 90 <= samples["queue_oldest_seconds", "default", "nano"] < 120
    Job.objects.update(not_before=timezone.now() + timedelta(hours=1))  # in back-off: they do not make the queue old
    samples = scrape()
    assert samples["jobs_queued", "default", "nano"] == 2
    assert samples["queue_oldest_seconds", "default", "nano"] == 0
    attempt = customer.started()
    Attempt.objects.filter(pk=attempt.pk).update(submitted_at=None, claimed_at=earlier(400))
    assert scrape()["unsubmitted_oldest_seconds",] >= 400
    Job.objects.filter(pk=attempt.job_id).update(state="stopping", cancel_requested_at=earlier(500))
    assert scrape()["stopping_oldest_seconds",] >= 500


def test_times_between_states_and_ends_are_added_up_from_events(customer, scrape):
    attempt = customer.started()
    samples = scrape()
    assert samples["jobs_active", "running"] == 1
    assert samples["nodes_granted",] == 2  # the two of the job
    JobEvent.objects.filter(job=attempt.job, kind="running").update(created_at=earlier(100))
    customer.end(attempt, Outcome.CODE_FAILED)
    for samples in (scrape(), scrape()):  # the second must not add the same events again
        assert samples["transition_seconds_count", "queued", "starting"] == 1
        assert samples["transition_seconds_count", "running", "starting"] == 1
        # The run took 100 s: more than 60, less than 300.
        assert samples["transition_seconds_bucket", "60.0", "failed", "running"] == 0
        assert samples["transition_seconds_bucket", "300.0", "failed", "running"] == 1
        assert 100 <= samples["transition_seconds_sum", "failed", "running"] < 120
        assert samples["dispatch_seconds_count",] == 1
        assert samples["runs_ended_total", "code_failed", "no"] == 1  # "no": no retry follows


def test_metrics_are_computed_from_rows_after_redis_lost_its_data(customer, scrape, monkeypatch):
    def of_events(samples):
        kinds = ("transition_seconds", "runs_ended", "dispatch_seconds")
        return {key: value for key, value in samples.items() if key[0].startswith(kinds)}

    for _ in range(3):
        customer.end(customer.started(), Outcome.COMPLETED)
    before = scrape()
    redis_client.client().delete(redis_client.key("figures"))
    monkeypatch.setattr(db_metrics, "MAX_EVENTS_PER_SCRAPE", 4)
    samples, rounds = scrape(), 1
    assert samples["figures_behind",] == 1  # some events are not summed yet
    while samples["figures_behind",]:
        samples, rounds = scrape(), rounds + 1
    assert rounds > 2  # two scrapes of four events each were not enough
    assert of_events(samples) == of_events(before)


def test_an_event_counts_from_a_minimum_age_on_and_shows_whether_a_retry_follows(customer, scrape, monkeypatch):
    monkeypatch.setattr(db_metrics, "MIN_EVENT_AGE_SECONDS", 3600)
    customer.end(customer.started(), Outcome.NODE_LOST)
    assert ("runs_ended_total", "node_lost", "yes") not in scrape()
    monkeypatch.setattr(db_metrics, "MIN_EVENT_AGE_SECONDS", 0)
    samples = scrape()
    assert samples["runs_ended_total", "node_lost", "yes"] == 1
    # From running back to queued: the labels of a sample are sorted by their names, from_state and to_state.
    assert samples["transition_seconds_count", "queued", "running"] == 1


def test_no_scrape_scans_a_large_table(customer, scrape):
    customer.end(customer.started(), Outcome.COMPLETED)
    scrape()
    with CaptureQueriesContext(connection) as queries:
        scrape()
    large = ("jobs_job ", "jobs_attempt", "jobs_jobevent", "billing_stripeevent")
    statements = [
        query["sql"]
        for query in queries
        if query["sql"].lstrip().startswith("SELECT") and any(table in query["sql"] for table in large)
    ]
    assert len(statements) == 6, "the statements that read large tables; check the plan of a new one too"
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")  # the plan for a large table; that of node specs is small
        for statement in statements:
            cursor.execute(f"EXPLAIN {statement}")
            plan = [line for (line,) in cursor.fetchall()]
            assert not [line for line in plan if "Seq Scan on" in line and "nodespec" not in line], statement


@pytest.mark.usefixtures("redis_keys")
def test_payment_events_are_counted_by_state_and_the_lag_is_of_recent_ones(scrape):
    for number, (state, received, applied) in enumerate(
        [
            ("received", earlier(40), None),
            ("parked", earlier(400), None),
            ("quarantined", earlier(4000), None),
            ("applied", earlier(100), earlier(30)),
            ("applied", earlier(90_000), earlier(1)),
        ]
    ):
        row = StripeEvent.objects.create(event_id=f"evt_{number}", type="refund.created", payload={}, state=state)
        StripeEvent.objects.filter(pk=row.pk).update(received_at=received, applied_at=applied)
    samples = scrape()
    assert [samples["payment_events", state] for state in ("received", "parked", "quarantined")] == [1, 1, 1]
    assert samples["payment_events_oldest_seconds", "received"] >= 40
    assert samples["payment_events_oldest_seconds", "quarantined"] >= 4000
    assert 70 <= samples["webhook_lag_seconds",] < 80  # of the fourth event; the last was received too long ago


def test_capacity_comes_from_the_watchers_heartbeat_and_a_scrape_queries_no_cluster(customer, scrape, backend):
    customer.started()
    reconciliation.reconcile()
    free = backend.capacity().machines[0].free.cpus
    samples = scrape()
    assert samples["cluster_up", "default"] == 1
    assert samples["capacity", "", "cpus", "default"] == 8  # "": the label of the GPU type
    assert samples["capacity_free", "", "cpus", "default"] == free < 8
    assert samples["isolation_gaps", "default"] == 0
    clusters.record_status(name="default", answers=False, detail="away")
    backend.capacity = pytest.fail
    assert scrape()["cluster_up", "default"] == 0


@pytest.mark.usefixtures("redis_keys")
def test_a_scrape_counts_processes_streams_queued_tasks_and_errors_of_the_ledger(scrape):
    assert not [key for key in scrape() if key[0] == "ledger_wrong"]
    heartbeats.send(heartbeats.LEDGER, wrong={"transactions": 0, "balances": 2, "holds": 0})
    heartbeats.send(heartbeats.WATCHER, "default")
    heartbeats.send(heartbeats.WEB, streams=3)
    redis_client.client().rpush(metrics.QUEUES[0], "a message")
    try:
        samples = scrape()
    finally:
        redis_client.client().lpop(metrics.QUEUES[0])  # Celery's real queue: `redis_keys` gives it no prefix
    assert samples["ledger_wrong", "balances"] == 2
    assert samples["processes", "watcher"] == 1
    assert samples["processes", "beat"] == 0
    assert samples["live_streams",] == 3
    assert samples["last_sign_timestamp_seconds", "default", "watcher"] > 1_700_000_000  # Unix seconds
    assert samples["task_queue_length",] >= 1


@pytest.mark.usefixtures("redis_keys")
def test_requests_are_counted_by_the_pattern_of_their_path(client, owner, scrape):
    client.force_login(owner.user)
    for path in ("/jobs/4711/", "/static/css/none-1.css", "/no/such/address-1", "/no/such/address-2"):
        client.get(path)
    client.post("/webhooks/stripe/", "{}", content_type="application/json")
    assert counters.buffer.flush()
    samples = scrape()
    assert samples["http_requests_total", "404", "GET", "jobs/<int:pk>/"] == 1
    assert samples["http_requests_total", "404", "GET", "unknown"] == 2
    assert samples["http_requests_total", "400", "POST", "webhooks/stripe/"] == 1
    assert samples["http_requests_total", "404", "GET", "static/"] == 1
    assert samples["http_request_seconds_count", "GET", "jobs/<int:pk>/"] == 1
    assert not [key for key in samples if "address-1" in " ".join(key) or "4711" in " ".join(key)]


@pytest.mark.usefixtures("no_redis")
def test_without_redis_a_scrape_has_what_the_database_tells(scrape):
    samples = scrape()
    assert (samples["up", "redis"], samples["up", "database"], samples["jobs_active", "running"]) == (0, 1, 0)


def test_each_scrape_sums_all_events_if_redis_cannot_cache_the_sums(customer, scrape, monkeypatch):
    def refuse(*_arguments, **_options):
        raise redis.ConnectionError

    customer.end(customer.started(), Outcome.COMPLETED)
    monkeypatch.setattr(redis_client.client(), "get", refuse)
    monkeypatch.setattr(redis_client.client(), "set", refuse)
    for _ in range(2):
        samples = scrape()
        assert samples["runs_ended_total", "completed", "no"] == 1
        assert samples["figures_behind",] == 0


@pytest.mark.usefixtures("redis_keys")
def test_a_scrape_is_answered_from_memory_for_a_moment(client, settings, monkeypatch, django_assert_num_queries):
    settings.METRICS_TOKEN = TOKEN
    # A new collector, which remembers nothing of other tests.
    monkeypatch.setattr(metrics, "REGISTRY", SimpleNamespace(collect=metrics.Collector().collect))
    client.get("/metrics", headers=HEADERS)
    with django_assert_num_queries(0):
        client.get("/metrics", headers=HEADERS)


# Counters


def count(buffer, task):
    buffer.count(TASK_TOTAL, task=task, outcome="success")


def totals():
    return {each.labels[0]: each.counts for each in counters.read_series(TASK_TOTAL)}


@pytest.mark.usefixtures("redis_keys")
def test_counts_of_several_processes_are_added():
    one, other = Buffer(), Buffer()
    for each, seconds in ((one, 0.01), (one, 0.2), (other, 700.0)):
        each.observe(TASK_SECONDS, seconds, task="x")
        count(each, "x")
    assert one.flush()
    assert other.flush()
    [series] = counters.read_series(TASK_SECONDS)
    # Each bucket also counts what the smaller ones do.
    assert (series.labels, series.counts) == (("x",), (0, 1, 1, 2, 2, 2, 2, 2, 2, 3))
    assert series.total_seconds == pytest.approx(700.21)
    assert totals() == {"x": (3,)}


@pytest.mark.usefixtures("redis_keys")
def test_counts_are_kept_until_redis_can_be_reached_again(settings):
    mine, url = Buffer(), settings.REDIS_URL
    settings.REDIS_URL = "unix:///nowhere/redis.sock?db=0"
    redis_client.client.cache_clear()
    count(mine, "x")
    assert not mine.flush()
    count(mine, "x")
    settings.REDIS_URL = url
    redis_client.client.cache_clear()
    assert mine.flush()
    assert totals() == {"x": (2,)}


@pytest.mark.usefixtures("redis_keys")
def test_a_forked_process_sends_its_own_counts_alone(monkeypatch):
    monkeypatch.setattr(counters, "FLUSH_SECONDS", 3600.0)  # this process's thread must not send before it is asked to
    mine = Buffer()
    count(mine, "x")
    child = os.fork()
    if child == 0:  # pragma: no cover  # another process
        count(mine, "y")
        redis_client.client.cache_clear()  # the parent's connection must not be shared
        os._exit(0 if mine.flush() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert totals() == {"y": (1,)}
    assert mine.flush()
    assert totals() == {"x": (1,), "y": (1,)}


@pytest.mark.usefixtures("redis_keys")
def test_counts_are_sent_without_a_call_and_their_series_are_limited(monkeypatch):
    mine, sent = Buffer(), threading.Event()
    monkeypatch.setattr(mine, "flush", lambda: sent.set() or True)
    monkeypatch.setattr(counters, "MAX_BUFFER_KEYS", 10)
    for number in range(100):
        count(mine, str(number))
    assert len(mine._counts) == 10
    assert sent.wait(10)

"""A real worker on the real broker: what a message carries, what is counted, which heartbeats are sent."""

import threading
import uuid

import pytest
from celery.contrib.testing.worker import start_worker

from console.celery import app
from console.observability import celery_signals, context, counters, heartbeats
from tests.console.processes import wait_for


@pytest.fixture
def queue():
    """A queue with a worker of its own."""
    name = f"test-{uuid.uuid4().hex}"
    # The ping check would wait for the result of a task, and the console's settings keep no results. `start_worker`
    # switches Celery's heartbeats off by default; `celery_signals` sends the console's heartbeat with each of them.
    with start_worker(
        app, pool="solo", perform_ping_check=False, queues=[name], loglevel="ERROR", without_heartbeat=False
    ):
        yield name


@pytest.fixture
def record_context():
    """A task that appends its context fields to `seen`, sets `done`, and raises if called with `fail=True`."""
    seen, done = [], threading.Event()

    @app.task(name="tests.record_context")
    def record_context(*, fail=False):
        seen.append(context.fields())
        done.set()
        if fail:
            raise ValueError

    record_context.seen, record_context.done = seen, done
    yield record_context
    app.tasks.pop("tests.record_context")


def counts():
    counters.buffer.flush()
    rows = counters.read_series(counters.TASK_TOTAL)
    return {series.labels: series.counts for series in rows if series.labels[0] == "tests.record_context"}


@pytest.mark.usefixtures("redis_keys")
def test_a_worker_inherits_context_and_counts_tasks_by_outcome_and_sends_heartbeats(record_context, queue):
    with context.bound(request_id="request-1", user=3, organization=5, job=7):
        record_context.apply_async(queue=queue)
    assert record_context.done.wait(20)
    record_context.apply_async(queue=queue, kwargs={"fail": True})
    wait_for(lambda: counts() == {("tests.record_context", "success"): (1,), ("tests.record_context", "failure"): (1,)})
    # `job` is not among context.TASK_FIELDS, so the message does not carry it.
    assert record_context.seen == [
        {"request_id": "request-1", "user": 3, "organization": 5, "task": "tests.record_context"},
        {"task": "tests.record_context"},
    ]
    [timed] = [
        series for series in counters.read_series(counters.TASK_SECONDS) if series.labels == ("tests.record_context",)
    ]
    assert timed.counts[-1] == 2  # the counts of a histogram are cumulative: the last bucket has all tasks
    wait_for(lambda: heartbeats.latest(heartbeats.recent(), heartbeats.WORKER))


@pytest.mark.usefixtures("redis_keys")
def test_beat_sends_a_heartbeat_with_each_message(record_context, monkeypatch):
    queue = f"nobody-{uuid.uuid4().hex}"  # no worker consumes it: only sending matters here
    record_context.apply_async(queue=queue)  # by a process that is not beat
    assert not heartbeats.latest(heartbeats.recent(), heartbeats.BEAT)
    # As the handler of `beat_init` does in a real beat.
    monkeypatch.setitem(celery_signals._process, "program", heartbeats.BEAT)
    record_context.apply_async(queue=queue)
    assert heartbeats.latest(heartbeats.recent(), heartbeats.BEAT)

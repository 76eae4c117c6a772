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
    with start_worker(
        app, pool="solo", perform_ping_check=False, queues=[name], loglevel="ERROR", without_heartbeat=False
    ):
        yield name


@pytest.fixture
def look():
    """A task that keeps its context in `seen`, and fails where `fail=True`."""
    seen, done = [], threading.Event()

    @app.task(name="tests.look")
    def look(*, fail=False):
        seen.append(context.fields())
        done.set()
        if fail:
            raise ValueError

    look.seen, look.done = seen, done
    yield look
    app.tasks.pop("tests.look")


def counts():
    counters.buffer.flush()
    rows = counters.read_series(counters.TASK_TOTAL)
    return {series.labels: series.counts for series in rows if series.labels[0] == "tests.look"}


def test_a_worker_takes_over_the_context_counts_tasks_by_outcome_and_sends_heartbeats(shared, look, queue):
    with context.bound(request_id="request-1", user=3, organization=5, job=7):
        look.apply_async(queue=queue)
    assert look.done.wait(20)
    look.apply_async(queue=queue, kwargs={"fail": True})
    wait_for(lambda: counts() == {("tests.look", "success"): (1,), ("tests.look", "failure"): (1,)})
    assert look.seen == [
        {"request_id": "request-1", "user": 3, "organization": 5, "task": "tests.look"},
        {"task": "tests.look"},
    ]
    [timed] = [series for series in counters.read_series(counters.TASK_SECONDS) if series.labels == ("tests.look",)]
    assert timed.counts[-1] == 2
    wait_for(lambda: heartbeats.latest(heartbeats.recent(), heartbeats.WORKER))


def test_beat_sends_a_heartbeat_with_each_message(shared, look, monkeypatch):
    queue = f"nobody-{uuid.uuid4().hex}"
    look.apply_async(queue=queue)
    assert not heartbeats.latest(heartbeats.recent(), heartbeats.BEAT)
    monkeypatch.setitem(celery_signals._process, "program", heartbeats.BEAT)
    look.apply_async(queue=queue)
    assert heartbeats.latest(heartbeats.recent(), heartbeats.BEAT)

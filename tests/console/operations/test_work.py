"""A real worker on the real broker: what a message carries, what is counted, which signs are given."""

from __future__ import annotations

import threading
import uuid

import pytest
from celery.contrib.testing.worker import start_worker

from console.celery import app
from console.operations import context, signs, tally, tracing, work
from tests.console.processes import wait_for


@pytest.fixture
def queue():
    """A queue of our own, and a worker that serves it."""
    name = f"test-{uuid.uuid4().hex}"
    with start_worker(
        app, pool="solo", perform_ping_check=False, queues=[name], loglevel="ERROR", without_heartbeat=False
    ):
        yield name


@pytest.fixture
def look():
    """A task that tells what it is about; `fail=True`: and then fails."""
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


def test_a_message_carries_its_request_to_the_worker(shared, look, queue):
    with context.bound(request_id="request-1", user=3, organization=5, job=7):
        look.apply_async(queue=queue)
    assert look.done.wait(20)
    assert look.seen == [{"request_id": "request-1", "user": 3, "organization": 5, "task": "tests.look"}]
    look.done.clear()
    look.apply_async(queue=queue)
    assert look.done.wait(20)
    assert look.seen[1] == {"task": "tests.look"}


def test_tasks_are_counted_by_how_they_ended_and_the_worker_gives_signs(shared, look, queue):
    look.apply_async(queue=queue)
    look.apply_async(queue=queue, kwargs={"fail": True})

    def counted():
        tally.tally.flush()
        found = tally.read(tally.TASK_TOTAL)
        return {series.labels: series.counts for series in found if series.labels[0] == "tests.look"}

    wait_for(lambda: counted() == {("tests.look", "success"): (1,), ("tests.look", "failure"): (1,)})
    [timed] = [series for series in tally.read(tally.TASK_SECONDS) if series.labels == ("tests.look",)]
    assert timed.counts[-1] == 2
    wait_for(lambda: signs.newest(signs.seen(), signs.WORKER))


def test_beat_gives_its_sign_when_it_sends(shared, look, monkeypatch):
    look.apply_async(queue=f"nobody-{uuid.uuid4().hex}")
    assert not signs.newest(signs.seen(), signs.BEAT)
    monkeypatch.setattr(work, "_beat", [True])
    look.apply_async(queue=f"nobody-{uuid.uuid4().hex}")
    assert signs.newest(signs.seen(), signs.BEAT)


def test_a_forged_header_binds_nothing():
    assert tracing.sane({"traceparent": "x"}) == ""
    assert context.received({"request_id": "a\nb", "user": {"x": 1}}) == {}

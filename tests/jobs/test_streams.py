"""Live views, on a fake cluster and the real Redis."""

import asyncio
import threading

import pytest
from django.db import connection

from jobs import dispatch, streams, telemetry
from jobs.models import Attempt
from runtime.specs import Outcome
from tests.console.processes import wait_for
from tests.factories.jobs import Customer

pytestmark = pytest.mark.django_db(transaction=True)
SOON = 3.0


@pytest.fixture
def customer(transactional_db, backend, hints):
    return Customer(backend)


@pytest.fixture(autouse=True)
def _no_looking_again(monkeypatch):
    """News must come because something rang, not because it is looked for now and then."""
    monkeypatch.setattr(streams, "LOOK_AGAIN_SECONDS", 60.0)


async def elsewhere(call, *arguments, **options):
    def run():
        try:
            return call(*arguments, **options)
        finally:
            connection.close()

    return await asyncio.to_thread(run)


async def soon(events):
    return await asyncio.wait_for(anext(events), SOON)


async def until(events, happened):
    while not happened(event := await soon(events)):
        pass
    return event


def ears():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ear-")]


def test_news_of_a_job_come_as_they_happen_and_end_with_it(customer, backend):
    job = customer.job()
    name = f"job-{job.pk}-1"

    async def watch():
        events = streams.job_events(job)
        first = await soon(events)
        assert (first.name, first.data["state"]) == ("state", "queued")
        await elsewhere(dispatch.start, job)
        assert (await soon(events)).data["state"] == "starting"
        backend.start(name)
        await elsewhere(dispatch.reconcile_job, job_pk=job.pk)
        await until(events, lambda event: event.data.get("state") == "running")
        backend.write(name, "epoch 1/10 loss 0.5\n")
        attempt = await elsewhere(Attempt.objects.get, job=job)
        await elsewhere(telemetry.ingest, attempt=attempt)
        curves = await until(events, lambda event: event.name == "metrics")
        assert curves.data == {"loss": [[1, 0.5]]}
        await until(events, lambda event: event.name == "state" and event.data["progress"]["epoch"] == 1)
        backend.end(name, Outcome.COMPLETED)
        await elsewhere(dispatch.reconcile_job, job_pk=job.pk)
        last = await until(events, lambda event: event.name == "state" and event.data["finished_at"])
        assert last.data["state"] == "succeeded"
        with pytest.raises(StopAsyncIteration):
            await soon(events)

    asyncio.run(watch())


def test_an_ended_job_is_told_once(customer):
    job = customer.end(customer.started(), Outcome.COMPLETED)

    async def watch():
        return [event.data["state"] async for event in streams.job_events(job)]

    assert asyncio.run(watch()) == ["succeeded"]


def test_without_redis_news_come_by_looking(customer, backend, settings, tmp_path, monkeypatch):
    settings.REDIS_URL = f"unix://{tmp_path}/nobody.sock"
    monkeypatch.setattr(streams, "TRY_AGAIN_SECONDS", 0.05)
    job = customer.job()

    async def watch():
        events = streams.job_events(job)
        assert (await soon(events)).data["state"] == "queued"
        await elsewhere(dispatch.start, job)
        assert (await soon(events)).data["state"] == "starting"
        await events.aclose()

    asyncio.run(watch())


def test_a_watcher_who_leaves_leaves_nothing(customer):
    job = customer.job()

    async def watch():
        before = len(asyncio.all_tasks())
        events = streams.job_events(job)
        await soon(events)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait({waiting})
        await events.aclose()
        assert len(asyncio.all_tasks()) == before

    asyncio.run(watch())


def test_output_comes_as_it_is_written_from_before_the_run_to_its_end(customer, backend):
    job = customer.job()
    name = f"job-{job.pk}-1"

    async def watch():
        events = streams.log_events(job, 1, 0, None)
        coming = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.05)
        await elsewhere(dispatch.start, job)
        backend.start(name)
        backend.write(name, "not this one\n", rank=0)
        backend.write(name, "one\n", rank=1)
        event = await asyncio.wait_for(coming, SOON)
        assert (event.name, event.id) == ("log", "4")
        assert event.data == {"text": "one\n", "next_offset": 4, "eof": False}
        backend.write(name, "two\n", rank=1)
        assert (await soon(events)).data["text"] == "two\n"
        backend.end(name, Outcome.COMPLETED)
        assert (await soon(events)).data == {"text": "", "next_offset": 8, "eof": True}
        with pytest.raises(StopAsyncIteration):
            await soon(events)

    asyncio.run(watch())
    wait_for(lambda: not ears(), 5)


def test_many_readers_share_one_thread_and_none_is_left(customer, backend):
    attempt = customer.started()

    async def watch():
        readers = [streams.log_events(attempt.job, 0, 0, None) for _ in range(60)]
        coming = [asyncio.ensure_future(anext(reader)) for reader in readers]
        await asyncio.sleep(0.5)
        assert len(ears()) == 1
        backend.write(attempt.run_name, "hello\n")
        events = await asyncio.wait_for(asyncio.gather(*coming), 10)
        assert {event.data["text"] for event in events} == {"hello\n"}
        for reader in readers:
            await reader.aclose()

    asyncio.run(watch())
    wait_for(lambda: not ears(), 5)
    assert streams.RUNS._listeners == {}


def test_output_that_nothing_rings_for_is_looked_for(customer, backend, monkeypatch):
    """Storage that other machines write to, over a network, tells nobody of a change."""
    attempt = customer.started()
    monkeypatch.setattr(streams, "LOOK_AGAIN_SECONDS", 0.05)

    def nothing_but_heartbeats():
        never = threading.Event()
        while not never.wait(0.05):
            yield set()

    monkeypatch.setattr(backend, "changes", nothing_but_heartbeats)

    async def watch():
        events = streams.log_events(attempt.job, 0, 0, None)
        coming = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.1)
        backend.write(attempt.run_name, "hello\n")
        assert (await asyncio.wait_for(coming, SOON)).data["text"] == "hello\n"
        backend.end(attempt.run_name, Outcome.COMPLETED)
        assert (await soon(events)).data["eof"]
        with pytest.raises(StopAsyncIteration):
            await soon(events)

    asyncio.run(watch())
    wait_for(lambda: not ears(), 5)


def test_a_cluster_that_cannot_be_followed_is_looked_at(customer, backend, monkeypatch, caplog):
    attempt = customer.started()
    monkeypatch.setattr(streams, "LOOK_AGAIN_SECONDS", 0.05)

    def away():
        raise OSError("no inotify left")

    monkeypatch.setattr(backend, "changes", away)

    async def watch():
        events = streams.log_events(attempt.job, 0, 0, None)
        coming = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.1)
        backend.write(attempt.run_name, "hello\n")
        assert (await asyncio.wait_for(coming, SOON)).data["text"] == "hello\n"
        await events.aclose()

    asyncio.run(watch())
    assert "can't be followed" in caplog.text

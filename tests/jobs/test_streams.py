"""Live views, on a fake cluster and the real Redis."""

import asyncio
import functools
import threading

import pytest
from django.db import connection
from django.test import AsyncClient

from console.accounts import services as accounts
from console.accounts.roles import Role
from console.core import sse
from jobs import orders, reconciliation, streams, telemetry
from jobs.models import Attempt
from runtime.specs import Outcome
from tests.console.processes import wait_for
from tests.factories.accounts import MembershipFactory
from tests.factories.jobs import start

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("sent_tasks")]
SOON = 3.0
"""Seconds within which an announced change must reach a stream."""


@pytest.fixture
def job(customer):
    """A job in the queue."""
    return customer.job()


@pytest.fixture
def attempt(customer):
    """The running attempt of a job."""
    return customer.started()


@pytest.fixture
def token(customer, monkeypatch):
    """A viewer whose membership is checked at each event, and the secret of the viewer's token."""
    monkeypatch.setattr(sse, "RECHECK_SECONDS", 0)
    member = MembershipFactory(organization=customer.organization, role=Role.VIEWER)
    return member, accounts.create_token(membership=member, name="test")[1]


@pytest.fixture(autouse=True)
def _no_polling(monkeypatch):
    """Changes must be announced: polling would hide one that is not."""
    monkeypatch.setattr(streams, "POLL_SECONDS", 60.0)
    monkeypatch.setattr(streams, "ROW_POLL_SECONDS", 60.0)


def in_loop(test):
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(test(**fixtures))

    return run


async def in_thread(call, *arguments, **options):
    """Call on another thread, as another process would, with a database connection of its own."""

    def run():
        try:
            return call(*arguments, **options)
        finally:
            connection.close()

    return await asyncio.to_thread(run)


async def soon(events):
    return await asyncio.wait_for(anext(events), SOON)


async def until(events, condition):
    while not condition(event := await soon(events)):
        pass
    return event


async def assert_ended(events):
    with pytest.raises(StopAsyncIteration):
        await soon(events)


def source_threads():
    """Return the threads that follow clusters for the streams of output."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("changes-")]


@in_loop
async def test_a_stream_sends_changes_as_they_happen_until_the_job_ends(job, backend):
    name = f"job-{job.pk}-1"
    events = streams.job_events(job)
    first = await soon(events)
    assert (first.name, first.data["state"]) == ("state", "queued")
    await in_thread(start, job)
    assert (await soon(events)).data["state"] == "starting"
    backend.start(name)
    await in_thread(reconciliation.reconcile_job, job_pk=job.pk)
    await until(events, lambda event: event.data.get("state") == "running")
    backend.write(name, "epoch 1/10 loss 0.5\nepoch 2/10\n")
    await in_thread(telemetry.ingest, attempt=await in_thread(Attempt.objects.get, job=job))
    curves = await until(events, lambda event: event.name == "metrics")
    assert curves.data == {"loss": [[1, 0.5]]}
    await until(events, lambda event: event.name == "state" and event.data["progress"]["epoch"] == 1)
    backend.end(name, Outcome.COMPLETED)
    await in_thread(reconciliation.reconcile_job, job_pk=job.pk)
    last = await until(events, lambda event: event.name == "state" and event.data["finished_at"])
    assert last.data["state"] == "succeeded"
    await assert_ended(events)
    assert [event.name async for event in streams.job_events(job)] == ["metrics", "state"], (
        "a stream of an ended job sends its last values and ends"
    )


@in_loop
async def test_without_redis_streams_poll(job, settings, tmp_path, monkeypatch):
    settings.REDIS_URL = f"unix://{tmp_path}/none.sock"
    monkeypatch.setattr(streams, "RECONNECT_SECONDS", 0.05)  # each try to reconnect also reads the row
    events = streams.job_events(job)
    assert (await soon(events)).data["state"] == "queued"
    await in_thread(start, job)
    assert (await soon(events)).data["state"] == "starting"
    await events.aclose()


@in_loop
async def test_output_comes_as_it_is_written_from_before_the_run_to_its_end(job, backend):
    name = f"job-{job.pk}-1"
    events = streams.log_events(job, rank=1, offset=0, attempt_number=None)
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.05)  # the stream is waiting before the run starts
    await in_thread(start, job)
    backend.start(name)
    backend.write(name, "of another rank\n", rank=0)
    backend.write(name, "one\n", rank=1)
    event = await asyncio.wait_for(first, SOON)
    assert (event.name, event.id) == ("log", "4")
    assert event.data == {"text": "one\n", "offset": 0, "next_offset": 4, "size": 4, "eof": False}
    backend.write(name, "two\n", rank=1)
    assert (await soon(events)).data["text"] == "two\n"
    backend.end(name, Outcome.COMPLETED)
    assert (await soon(events)).data == {"text": "", "offset": 8, "next_offset": 8, "size": 8, "eof": True}
    await assert_ended(events)
    wait_for(lambda: not source_threads(), 5)


@in_loop
async def test_one_stream_has_the_output_of_all_ranks_from_their_last_lines_on(attempt, backend):
    backend.write(attempt.run_name, "old line\nzero\n", rank=0)
    backend.write(attempt.run_name, "one\n", rank=1)
    tail = 8  # bytes; the last ones of rank 0 begin within "old line"
    events = streams.all_log_events(attempt.job, tail, attempt_number=None, with_times=True)
    seen = [(await soon(events)).data for _rank in range(2)]
    assert {(data["rank"], data["text"]) for data in seen} == {(0, "zero\n"), (1, "one\n")}
    assert [[line for line, _seconds in data["times"]] for data in seen] == [[0], [0]]
    backend.write(attempt.run_name, "later\n", rank=1)
    data = (await soon(events)).data
    assert (data["rank"], data["text"], data["offset"]) == (1, "later\n", 4)
    backend.end(attempt.run_name, Outcome.COMPLETED)
    assert {(await soon(events)).data["eof"] for _rank in range(2)} == {True}
    await assert_ended(events)


@in_loop
async def test_many_readers_share_one_thread_and_none_is_left(attempt, backend):
    readers = [streams.log_events(attempt.job, rank=0, offset=0, attempt_number=None) for _ in range(20)]
    firsts = [asyncio.ensure_future(anext(reader)) for reader in readers]
    await asyncio.sleep(0.5)  # all readers are waiting for output
    assert len(source_threads()) == 1
    backend.write(attempt.run_name, "hello\n")
    events = await asyncio.wait_for(asyncio.gather(*firsts), 10)
    assert {event.data["text"] for event in events} == {"hello\n"}
    for reader in readers:
        await reader.aclose()
    wait_for(lambda: not source_threads(), 5)
    assert streams.OUTPUT_CHANGES._subscribers == {}


def heartbeats_only():
    """Storage that other machines write to over a network announces no change."""
    while not threading.Event().wait(0.05):
        yield set()


def cannot_be_followed():
    raise OSError("no inotify left")


@pytest.mark.parametrize("changes", [heartbeats_only, cannot_be_followed])
@in_loop
async def test_output_without_a_notification_is_polled(attempt, backend, monkeypatch, caplog, changes):
    monkeypatch.setattr(streams, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(backend, "changes", changes)
    events = streams.log_events(attempt.job, rank=0, offset=0, attempt_number=None)
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.1)
    backend.write(attempt.run_name, "hello\n")
    assert (await asyncio.wait_for(first, SOON)).data["text"] == "hello\n"
    backend.end(attempt.run_name, Outcome.COMPLETED)
    assert (await soon(events)).data["eof"]
    await assert_ended(events)
    wait_for(lambda: not source_threads(), 5)
    assert ("can't be followed" in caplog.text) == (changes is cannot_be_followed)


def cancel(customer, attempt):
    orders.cancel_job(membership=customer.membership, job=attempt.job)


def write(customer, attempt):
    customer.backend.write(attempt.run_name, "two\n")


@pytest.mark.parametrize(("path", "change"), [("stream", cancel), ("logs", write)])
@in_loop
async def test_a_stream_ends_with_its_readers_membership(customer, attempt, token, path, change):
    customer.backend.write(attempt.run_name, "one\n")
    member, secret = token
    headers = {"authorization": f"Token {secret}", "accept": sse.MEDIA_TYPE}
    answer = await AsyncClient().get(f"/api/v1/jobs/{attempt.job_id}/{path}/", headers=headers)
    parts = aiter(answer.streaming_content)
    while not (await soon(parts)).startswith(b"event:"):
        pass
    await in_thread(accounts.remove_member, membership=member, actor=None)
    await in_thread(change, customer, attempt)
    await assert_ended(parts)

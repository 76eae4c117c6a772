"""Live views of a job: its state and curves, and one rank's output, as they come.

Hides where news come from: the bell in Redis, and the clusters' own changes, each followed by one thread of this
process for all its streams. The one rule: a stream holds no thread and no database connection between two events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import redis

from console.accounts.sse import Event, reading
from jobs import bell, selectors
from jobs.backend import cluster, cluster_names
from jobs.models import Job
from jobs.states import JobState

logger = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 5.0
"""A ring may be lost with Redis: this often the rows are looked at without one."""
TRY_AGAIN_SECONDS = 1.0
"""How long to wait for a Redis that is away before the rows are looked at and it is asked again."""
HEARTBEAT_SECONDS = 1.0
"""How long a thread that follows stays when nobody listens any more."""

BEFORE_THE_RUN = frozenset({JobState.QUEUED, JobState.STARTING})

Changes = Iterator[set[int] | None]


class Ear:
    """Hears of jobs that changed, for all streams of this process: one thread for each source, while anybody listens.

    `follow` gives, for a source, the jobs that changed as they do, None where changes of any may have been missed, and
    something now and then in any case.
    """

    def __init__(
        self, sources: Callable[[], Iterable[str]], follow: Callable[[str], Iterator[set[int] | None]]
    ) -> None:
        self._sources = sources
        self._follow = follow
        self._lock = threading.Lock()
        self._listeners: dict[int, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._threads: dict[str, threading.Thread] = {}

    @contextlib.contextmanager
    def listening(self, job_pk: int) -> Iterator[asyncio.Event]:
        """An event that is set whenever the job changed, or may have."""
        listener = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._listeners.setdefault(job_pk, set()).add(listener)
            for name in self._sources():
                if name not in self._threads:
                    self._threads[name] = threading.Thread(
                        target=self._hear, args=(name,), name=f"ear-{name}", daemon=True
                    )
                    self._threads[name].start()
        try:
            yield listener[1]
        finally:
            with self._lock:
                self._listeners[job_pk].discard(listener)
                if not self._listeners[job_pk]:
                    del self._listeners[job_pk]

    def _hear(self, source: str) -> None:
        try:
            for changed in self._follow(source):
                with self._lock:
                    if not self._listeners:
                        del self._threads[source]
                        return
                    self._tell(self._listeners if changed is None else changed)
        except Exception:
            # Streams look for themselves every LOOK_AGAIN_SECONDS; the next one to begin starts another thread.
            logger.exception("The changes of %s can't be followed.", source)
            with self._lock:
                del self._threads[source]

    def _tell(self, changed: Iterable[int]) -> None:
        for job_pk in changed:
            for loop, event in self._listeners.get(job_pk, ()):
                with contextlib.suppress(RuntimeError):  # its loop has just been closed
                    loop.call_soon_threadsafe(event.set)


def _runs(cluster_name: str) -> Changes:
    for names in cluster(cluster_name).changes():
        numbers = (name.split("-")[1:2] for name in names)
        yield {int(number[0]) for number in numbers if number and number[0].isdecimal()}


def _rings(_source: str) -> Changes:
    while True:
        try:
            with bell.Listener() as listener:
                yield None  # what rang before somebody listened was missed
                while True:
                    yield listener.wait(HEARTBEAT_SECONDS)
        except (redis.RedisError, OSError):
            time.sleep(TRY_AGAIN_SECONDS)  # Redis is away: its return comes with no event
            yield None


RUNS = Ear(cluster_names, _runs)
"""Hears of every run whose output grew."""
ROWS = Ear(lambda: ["bell"], _rings)
"""Hears of every job whose rows changed."""


async def job_events(job: Job) -> AsyncIterator[Event]:
    """`state` (the job as the API shows it) and `metrics` (new points by name) until the job has ended.

    `job` may be a bare row: it is read anew once nothing about it can be missed.
    """
    last_point, last_state, look = 0, None, _first_look
    with ROWS.listening(job.pk) as rang:
        while True:
            rang.clear()
            job, state, curves, last_point = await reading(_news, look, job, last_point)
            look = selectors.job_again
            if curves:
                yield Event("metrics", curves)
            if state != last_state:
                yield Event("state", state)
                last_state = state
            if state["finished_at"] is not None:
                return
            await _wait(rang)


async def _wait(changed: asyncio.Event) -> None:
    """A ring may be lost: after a while without one the rows are looked at all the same."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOOK_AGAIN_SECONDS):
            await changed.wait()


async def log_events(job: Job, rank: int, offset: int, attempt: int | None) -> AsyncIterator[Event]:
    """`log` ({text, next_offset, eof}) from `offset` until the end of the output."""
    with RUNS.listening(job.pk) as changed:
        while True:
            changed.clear()
            chunk = await reading(selectors.log, job, rank, offset, attempt)
            if chunk.text or chunk.eof:
                yield Event(
                    "log",
                    {"text": chunk.text, "next_offset": chunk.next_offset, "eof": chunk.eof},
                    id=str(chunk.next_offset),
                )
                offset = chunk.next_offset
            if chunk.eof:
                return
            if not chunk.text:
                await _wait(changed)
                job = await reading(selectors.job_row, job.organization, job.pk)


def _first_look(job: Job) -> Job:
    return selectors.job_for(job.organization, job.pk)


def _news(look: Callable[[Job], Job], job: Job, after: int) -> tuple[Job, dict[str, Any], dict[str, Any], int]:
    job = look(job)
    state = selectors.summary(job, selectors.attempts_at(job))
    if job.state in BEFORE_THE_RUN and not any(attempt["started_at"] for attempt in state["attempts"]):
        return job, state, {}, after  # there can be no curves yet
    curves, last = selectors.metrics(job, after)
    return job, state, curves, last

"""Live views of a job: its state and curves, and one rank's output, as they come.

Hides where news come from: the job's bell in Redis, and the cluster's own changes, followed by one thread of this
process for all its streams. The one rule: a stream holds no thread and no database connection between two events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import redis.asyncio
from django.conf import settings

from console.accounts.models import Organization
from console.accounts.sse import Event, reading
from jobs import selectors
from jobs.backend import cluster, cluster_names
from jobs.bell import channel
from jobs.models import Job

logger = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 5.0
"""A ring may be lost with Redis: this often the rows are looked at without one."""
TRY_AGAIN_SECONDS = 1.0
"""How long to wait for a Redis that is away before the rows are looked at and it is asked again."""


class Ear:
    """Hears of every run whose output grew, for all log streams of this process: one thread for each cluster.

    They are there while anybody listens.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[int, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._threads: dict[str, threading.Thread] = {}

    @contextlib.contextmanager
    def listening(self, job_pk: int) -> Iterator[asyncio.Event]:
        """An event that is set whenever any run of the job changed."""
        listener = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._listeners.setdefault(job_pk, set()).add(listener)
            for name in cluster_names():
                if name not in self._threads:
                    self._threads[name] = threading.Thread(
                        target=self._follow, args=(name,), name=f"ear-{name}", daemon=True
                    )
                    self._threads[name].start()
        try:
            yield listener[1]
        finally:
            with self._lock:
                self._listeners[job_pk].discard(listener)
                if not self._listeners[job_pk]:
                    del self._listeners[job_pk]

    def _follow(self, cluster_name: str) -> None:
        try:
            for names in cluster(cluster_name).changes():
                with self._lock:
                    if not self._listeners:
                        del self._threads[cluster_name]
                        return
                    self._tell(names)
        except Exception:
            # Streams look for themselves every LOOK_AGAIN_SECONDS; the next one to begin starts another thread.
            logger.exception("The changes of the cluster %s can't be followed.", cluster_name)
            with self._lock:
                del self._threads[cluster_name]

    def _tell(self, names: set[str]) -> None:
        for name in names:
            number = name.split("-")[1:2]
            for loop, event in self._listeners.get(int(number[0]), ()) if number and number[0].isdecimal() else ():
                with contextlib.suppress(RuntimeError):  # its loop has just been closed
                    loop.call_soon_threadsafe(event.set)


EAR = Ear()


async def job_events(organization: Organization, job_pk: int) -> AsyncIterator[Event]:
    """`state` (the job as the API shows it) and `metrics` (new points by name) until the job has ended."""
    client = redis.asyncio.Redis.from_url(settings.REDIS_URL)
    last_point, last_state = 0, None
    async with contextlib.aclosing(client), client.pubsub() as bell:
        await _ring(bell, job_pk)
        while True:
            state, curves, last_point = await reading(_news, organization, job_pk, last_point)
            if curves:
                yield Event("metrics", curves)
            if state != last_state:
                yield Event("state", state)
                last_state = state
            if state["finished_at"] is not None:
                return
            await _ring(bell, job_pk)


async def _ring(bell: redis.asyncio.client.PubSub, job_pk: int) -> None:
    """Wait for the job's bell. Returns early where it may have been missed: after subscribing, and without Redis."""
    try:
        if not bell.subscribed:
            await bell.subscribe(channel(job_pk))
            return
        await bell.get_message(ignore_subscribe_messages=True, timeout=LOOK_AGAIN_SECONDS)
        # Rings that came meanwhile tell of rows that are about to be read anyway.
        while await bell.get_message(ignore_subscribe_messages=True, timeout=0) is not None:
            continue
    except (redis.RedisError, OSError):
        await asyncio.sleep(TRY_AGAIN_SECONDS)


async def log_events(
    organization: Organization, job: Job, rank: int, offset: int, attempt: int | None
) -> AsyncIterator[Event]:
    """`log` ({text, next_offset, eof}) from `offset` until the end of the output."""
    with EAR.listening(job.pk) as changed:
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
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                        await changed.wait()
                job = await reading(selectors.job_for, organization, job.pk)


def _news(organization: Organization, job_pk: int, after: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    job = selectors.job_for(organization, job_pk)
    curves, last = selectors.metrics(job, after)
    return selectors.summary(job), curves, last

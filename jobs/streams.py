"""Live views of a job as server-sent events: its state and curves, and the output of its ranks.

Redis announces changed rows (`pubsub`), and each cluster announces new output (`Backend.changes`). One thread follows
each of these sources for all streams of this process. A stream holds no thread and no database connection while it
waits for the next event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import redis

from console.core.sse import Event, query_in_thread
from jobs import pubsub, selectors
from jobs.clusters import cluster, cluster_names
from jobs.models import Job
from jobs.states import JobState
from runtime.specs import LogChunk

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""How often a stream reads the output even if no change is announced, because some clusters cannot announce changes."""
ROW_POLL_SECONDS = 15.0
"""How often a stream reads the rows even if no change is announced.

That is rarely needed: a message is lost only if its sender does not reach Redis while this process does. When this
process cannot reach Redis, and when it can again, every stream reads anyway. A read takes about 5 ms of CPU time, so
500 streams that read every 5 seconds would use half a core.
"""
RECONNECT_SECONDS = 1.0
"""Pause before reconnecting to Redis: short enough for a live view, long enough to cost nothing."""
IDLE_CHECK_SECONDS = 1.0
"""How often the thread of a quiet source checks whether the process still has streams. Without streams it ends."""
MAX_RANKS = 64
"""Ranks whose output one stream shows together: more than anyone can follow. Each costs the reading of a file."""
BEFORE_THE_RUN = frozenset({JobState.QUEUED, JobState.STARTING})
"""States in which a job has no curves, unless an earlier attempt has run."""

Changes = Iterator[set[int] | None]
"""Yields sets of ids of jobs that changed. None means that any job may have changed, because messages were missed."""


class ChangeBroadcaster:
    """Passes changes of jobs to the streams of this process, with one thread per source while there are streams.

    `sources()` returns the names of the sources. `follow(source)` yields changes as they happen. It yields an empty set
    about every IDLE_CHECK_SECONDS without changes, so that the thread can end.
    """

    def __init__(self, sources: Callable[[], Iterable[str]], follow: Callable[[str], Changes]) -> None:
        self._sources = sources
        self._follow = follow
        self._lock = threading.Lock()
        # By job id. The event loop is kept too, because an asyncio.Event may be set only on the thread of its loop.
        self._subscribers: dict[int, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._threads: dict[str, threading.Thread] = {}

    @contextlib.contextmanager
    def subscription(self, job_pk: int) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever the job changed or may have changed."""
        subscriber = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._subscribers.setdefault(job_pk, set()).add(subscriber)
            for source in self._sources():
                if source not in self._threads:
                    self._threads[source] = threading.Thread(
                        target=self._broadcast, args=(source,), name=f"changes-{source}", daemon=True
                    )
                    self._threads[source].start()
        try:
            yield subscriber[1]
        finally:
            with self._lock:
                self._subscribers[job_pk].discard(subscriber)
                if not self._subscribers[job_pk]:
                    del self._subscribers[job_pk]

    def _broadcast(self, source: str) -> None:
        """Follow one source, on a thread of its own, until the process has no more streams."""
        try:
            for job_pks in self._follow(source):
                with self._lock:
                    if not self._subscribers:
                        # The lock ensures that a stream that subscribes now starts another thread.
                        del self._threads[source]
                        return
                    self._notify(self._subscribers if job_pks is None else job_pks)
        except Exception:
            # Open streams then only poll (POLL_SECONDS, ROW_POLL_SECONDS). The next subscription starts a new thread.
            logger.exception("The changes of %s can't be followed.", source)
            with self._lock:
                del self._threads[source]

    def _notify(self, job_pks: Iterable[int]) -> None:
        for job_pk in job_pks:
            for loop, event in self._subscribers.get(job_pk, ()):
                with contextlib.suppress(RuntimeError):  # the loop has just been closed
                    loop.call_soon_threadsafe(event.set)


def _output_changes(cluster_name: str) -> Changes:
    """Yield the ids of jobs whose runs have changed. Runs that belong to no job are skipped."""
    for run_names in cluster(cluster_name).changes():
        yield {job_pk for job_pk in map(_job_pk_of, run_names) if job_pk is not None}


def _job_pk_of(run_name: str) -> int | None:
    """Return the id of the job of a run `job-<id>-<attempt>`; None for a name of another form."""
    parts = run_name.split("-")
    return int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() else None


def _row_changes(_source: str) -> Changes:
    """Yield the ids of jobs whose rows have changed, as `pubsub` announces them."""
    while True:
        try:
            with pubsub.Subscriber() as subscriber:
                yield None  # messages sent before the subscription were missed
                while True:
                    yield subscriber.wait(IDLE_CHECK_SECONDS)
        except (redis.RedisError, OSError):
            time.sleep(RECONNECT_SECONDS)  # nothing announces that Redis is back
            yield None  # also lets the thread end while Redis does not answer


OUTPUT_CHANGES = ChangeBroadcaster(cluster_names, _output_changes)
"""Announces jobs whose runs wrote output or changed their status, on any cluster."""
ROW_CHANGES = ChangeBroadcaster(lambda: ["redis"], _row_changes)
"""Announces jobs whose rows changed. Its only source is called `redis`, which names the thread."""


async def job_events(job: Job) -> AsyncIterator[Event]:
    """Yield `state` (the job as the API shows it) and `metrics` (new points by name) until the job has ended.

    `job` needs only its key and organization. It is read again after the subscription, so that no change is missed.
    """
    # The first read loads all related objects; later reads refresh the columns that change.
    last_point, last_state, refresh = 0, None, _load
    with ROW_CHANGES.subscription(job.pk) as change:
        while True:
            change.clear()  # cleared before the read, so that a change during the read sets it again
            view = await query_in_thread(_view, refresh, job, last_point)
            job, last_point, refresh = view.job, view.last_point, selectors.refresh_job
            if view.curves:
                yield Event("metrics", view.curves)
            if view.state != last_state:
                yield Event("state", view.state)
                last_state = view.state
            if view.state["finished_at"] is not None:
                return
            await _wait(change, ROW_POLL_SECONDS)


async def log_events(
    job: Job, rank: int, offset: int, attempt_number: int | None, *, with_times: bool = False
) -> AsyncIterator[Event]:
    """Yield `log` (as LogSerializer) from byte `offset` until the end of the rank's output.

    A negative `offset` counts from the end; the text then begins with a whole line. `attempt_number` None: the latest
    attempt.
    """
    with OUTPUT_CHANGES.subscription(job.pk) as change:
        while True:
            change.clear()
            chunk = await query_in_thread(
                selectors.log, job, rank, offset, attempt_number, at_line=offset < 0, with_times=with_times
            )
            if chunk.text or chunk.eof:
                yield Event("log", log_data(chunk), id=str(chunk.next_offset))
                offset = chunk.next_offset
            if chunk.eof:
                return
            if not chunk.text:
                await _wait(change, POLL_SECONDS)
                # If the cluster has no output, `selectors.log` takes `eof` from the job's state, which may have changed
                # since.
                job = await query_in_thread(selectors.job_without_relations, job.organization, job.pk)


async def all_log_events(
    job: Job, tail: int, attempt_number: int | None, *, with_times: bool = False
) -> AsyncIterator[Event]:
    """Yield `log` (as LogSerializer, with its `rank`) of all ranks as output arrives.

    The first events have the last `tail` bytes of each rank. Of more than MAX_RANKS ranks only the first are shown.
    `attempt_number` None: the latest attempt.
    """
    ranks = min(MAX_RANKS, job.nodes * job.workers_per_node)
    offsets = dict.fromkeys(range(ranks), -max(1, tail))
    with OUTPUT_CHANGES.subscription(job.pk) as change:
        while True:
            change.clear()
            chunks = await query_in_thread(selectors.logs_of_ranks, job, offsets, attempt_number, with_times=with_times)
            for rank, chunk in chunks.items():
                if chunk.text or chunk.eof:
                    yield Event("log", {"rank": rank, **log_data(chunk)})
                    offsets[rank] = chunk.next_offset
                if chunk.eof:
                    del offsets[rank]
            if not offsets:
                return
            if not any(chunk.text for chunk in chunks.values()):
                await _wait(change, POLL_SECONDS)
                # Read again for `eof`, as in `log_events`.
                job = await query_in_thread(selectors.job_without_relations, job.organization, job.pk)


def log_data(chunk: LogChunk) -> dict[str, Any]:
    """Return a chunk of a log as the API shows it."""
    return {
        "text": chunk.text,
        "offset": chunk.offset,
        "next_offset": chunk.next_offset,
        "size": chunk.size,
        "eof": chunk.eof,
        **({} if chunk.times is None else {"times": chunk.times}),
    }


async def _wait(change: asyncio.Event, seconds: float) -> None:
    """Wait for a change, for at most 0.5 to 1.5 times `seconds`.

    The limit is random, because hundreds of streams may have been opened at once, for example after a restart. With the
    same limit they would all read at the same moments, and delay the output of runs.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds * random.uniform(0.5, 1.5)):  # noqa: S311 - spreads the streams' reads
            await change.wait()


@dataclass(frozen=True)
class _JobView:
    """The content of a stream about a job: its state as the API shows it, and the points that were not sent yet.

    `curves` has [step, value] by curve name; `last_point` is the id of the last MetricPoint sent.
    """

    job: Job
    state: dict[str, Any]
    curves: dict[str, list[list[float]]]
    last_point: int


def _load(job: Job) -> Job:
    """Return the job with all related objects that a view needs."""
    return selectors.job_for(job.organization, job.pk)


def _view(refresh: Callable[[Job], Job], job: Job, last_point: int) -> _JobView:
    """Read the job with `refresh`, and its points with ids above `last_point`."""
    job = refresh(job)
    state = selectors.summary(job, selectors.attempts_of(job))
    if job.state in BEFORE_THE_RUN and not any(attempt["started_at"] for attempt in state["attempts"]):
        return _JobView(job, state, {}, last_point)  # there can be no curves yet
    curves, last_point = selectors.metrics(job, last_point)
    return _JobView(job, state, curves, last_point)

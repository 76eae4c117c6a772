"""Live views of a job: its state and curves, and one rank's output, as they come.

Hides where news come from: the job's bell in Redis, and the log file itself (inotify), so that a line reaches the
browser in about a millisecond. The one rule: a stream holds no thread and no database connection between two events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import redis.asyncio
from asgiref.sync import sync_to_async
from django.conf import settings
from watchfiles import awatch

from console.accounts.models import Organization
from console.accounts.sse import Event, reading
from jobs import selectors
from jobs.backend import cluster
from jobs.bell import channel
from jobs.models import Job

LOOK_AGAIN_SECONDS = 5.0
"""A ring may be lost with Redis: this often the rows are looked at without one."""
QUIET_MILLISECONDS = 20
"""How long output is gathered before it is sent."""


async def job_events(organization: Organization, job_pk: int) -> AsyncIterator[Event]:
    """`state` (the job as the API shows it) and `metrics` (new points by name) until the job has ended."""
    client = redis.asyncio.Redis.from_url(settings.REDIS_URL)
    last_point, last_state = 0, None
    async with contextlib.aclosing(client), client.pubsub() as bell:
        await bell.subscribe(channel(job_pk))
        while True:
            state, curves, last_point = await reading(_news, organization, job_pk, last_point)
            if curves:
                yield Event("metrics", curves)
            if state != last_state:
                yield Event("state", state)
                last_state = state
            if state["finished_at"] is not None:
                return
            await bell.get_message(ignore_subscribe_messages=True, timeout=LOOK_AGAIN_SECONDS)


async def log_events(job: Job, rank: int, offset: int, attempt: int | None) -> AsyncIterator[Event]:
    """`log` ({text, next_offset, eof}) from `offset` until the end of the output."""
    changes: AsyncIterator[Any] | None = None
    while True:
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
        if chunk.text:
            continue
        if changes is None:
            changes = await _watch(job, attempt)
            continue  # what was written between the look and the watch
        await anext(changes)
        job = await reading(selectors.job_for, job.organization, job.pk)


def _news(organization: Organization, job_pk: int, after: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    job = selectors.job_for(organization, job_pk)
    curves, last = selectors.metrics(job, after)
    return selectors.summary(job), curves, last


async def _watch(job: Job, attempt: int | None) -> AsyncIterator[Any]:
    """Yields whenever the run's output may have grown; at least every LOOK_AGAIN_SECONDS."""
    folder = await sync_to_async(_log_folder)(job.pk, attempt)
    if folder is None:
        return _ticks()
    return awatch(
        folder,
        debounce=QUIET_MILLISECONDS,
        step=QUIET_MILLISECONDS,
        rust_timeout=int(LOOK_AGAIN_SECONDS * 1000),
        yield_on_timeout=True,
        recursive=False,
    )


def _log_folder(job_pk: int, attempt: int | None) -> str | None:
    attempts = Job.objects.get(pk=job_pk).attempts
    chosen = attempts.filter(number=attempt).first() if attempt else attempts.last()
    if chosen is None:
        return None
    folder = cluster().run_folder(chosen.run_name) / "logs"
    return str(folder) if folder.is_dir() else None


async def _ticks() -> AsyncIterator[Any]:
    while True:
        await asyncio.sleep(1)
        yield None

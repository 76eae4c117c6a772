"""Event streams (server-sent events).

Streams read the database only through `query_in_thread`, on a few threads that they share (`console.serving.streams`),
so hundreds of streams need a handful of connections. Every stream checks repeatedly that its reader still has access.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import close_old_connections
from django.http import StreamingHttpResponse
from rest_framework.renderers import JSONRenderer

HEARTBEAT_SECONDS = 15.0
"""Seconds of silence before a comment is sent, so that proxies keep the connection open."""
RECHECK_SECONDS = 1.0
"""The permission is checked again before an event or heartbeat if the last check is older than this."""
RETRY_MILLISECONDS = 2000
"""Milliseconds before a browser reconnects."""
MEDIA_TYPE = "text/event-stream"

P = ParamSpec("P")
T = TypeVar("T")


class Event(NamedTuple):
    """An event. `data` is a string or JSON data; the browser returns `id` as Last-Event-ID when it reconnects."""

    name: str
    data: Any
    id: str | None = None


class EventStreamRenderer(JSONRenderer):
    """Lets a DRF view accept `text/event-stream`. Views return the stream themselves; errors are JSON."""

    media_type = MEDIA_TYPE
    format = "event-stream"


def wants_events(headers: Mapping[str, str]) -> bool:
    """Return whether a request accepts an event stream."""
    return MEDIA_TYPE in headers.get("Accept", "")


def event_stream(
    events: AsyncIterator[Event | tuple[str, Any]],
    *,
    is_allowed: Callable[[], bool],
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
) -> StreamingHttpResponse:
    """Return the response that sends `events` as they come. When the client leaves, `events` is closed (`aclose`).

    `is_allowed` returns whether the reader still has access; it may read the database. See `access.is_still_allowed`.
    """
    response = StreamingHttpResponse(_frames(events, is_allowed, heartbeat_seconds), content_type=MEDIA_TYPE)
    response["Cache-Control"] = "no-cache"
    response["X-Accel-Buffering"] = "no"
    return response


async def query_in_thread(query: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `query` on a thread that may use the database. Keep it short: streams share these threads."""

    def run() -> T:
        close_old_connections()  # a stream outlives Django's per-request check of the connection
        try:
            return query(*args, **kwargs)
        finally:
            close_old_connections()

    return await sync_to_async(run)()


async def _frames(
    events: AsyncIterator[Event | tuple[str, Any]], is_allowed: Callable[[], bool], heartbeat_seconds: float
) -> AsyncIterator[bytes]:
    """Yield the stream's bytes: each event, and a heartbeat after silence. End when the reader loses access."""
    iterator = aiter(events)
    checked_at = time.monotonic()
    next_event: asyncio.Future[Event | tuple[str, Any]] | None = None  # kept over heartbeats until the event arrives
    try:
        yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
        while True:
            next_event = next_event or asyncio.ensure_future(anext(iterator))
            done, _ = await asyncio.wait({next_event}, timeout=heartbeat_seconds)
            if time.monotonic() - checked_at >= RECHECK_SECONDS:
                if not await query_in_thread(is_allowed):
                    return
                checked_at = time.monotonic()
            if not done:
                yield b": still here\n\n"
                continue
            arrived_event, next_event = next_event, None
            try:
                event = arrived_event.result()
            except StopAsyncIteration:
                return
            yield _frame(Event(*event))
    finally:
        if next_event is not None:
            next_event.cancel()
            await asyncio.wait({next_event})
        if close := getattr(iterator, "aclose", None):
            await close()


def _frame(event: Event) -> bytes:
    text = event.data if isinstance(event.data, str) else json.dumps(event.data, separators=(",", ":"), default=str)
    lines = [f"event: {event.name}"]
    if event.id is not None:
        lines.append(f"id: {event.id}")
    # SSE has three line ends, so a lone carriage return (from a progress bar) would also end a data line.
    lines += [f"data: {line}" for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    return ("\n".join(lines) + "\n\n").encode()

"""Event streams (server-sent events).

A stream reads the database only with `query_in_thread`. All streams share a few threads (`console.serving.streams`), so
hundreds of streams need only a handful of database connections. Each stream regularly checks that its reader still has
access.
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
"""After this time without an event, a comment is sent. Proxies close idle connections, often after 30 or 60 seconds."""
RECHECK_SECONDS = 1.0
"""Access is checked again before an event or heartbeat if the last check is older than this. So a stream with many
events a second reads the database for this only once a second."""
RETRY_MILLISECONDS = 2000
"""How long a browser waits before it reconnects: long enough that a restarted server is not flooded."""
MEDIA_TYPE = "text/event-stream"

P = ParamSpec("P")
T = TypeVar("T")


class Event(NamedTuple):
    """An event. `data` is a string, or a value to send as JSON.

    A browser that reconnects sends the `id` of the last event it received as Last-Event-ID.
    """

    name: str
    data: Any
    id: str | None = None


class EventStreamRenderer(JSONRenderer):
    """Makes DRF accept requests for `text/event-stream`. It never renders a stream: views return `event_stream`."""

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
    """Return a response that sends `events` as they come. When the client disconnects, it calls `events.aclose`.

    `is_allowed` returns whether the reader still has access, such as `console.accounts.access.is_still_allowed`. It
    may read the database.
    """
    response = StreamingHttpResponse(_encode_events(events, is_allowed, heartbeat_seconds), content_type=MEDIA_TYPE)
    response["Cache-Control"] = "no-cache"
    response["X-Accel-Buffering"] = "no"  # nginx would otherwise collect events before it sends them
    return response


async def query_in_thread(query: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `query`, run on a thread that may use the database.

    All streams share few such threads: `console.serving.streams` chooses them for `sync_to_async`.
    """

    def run() -> T:
        close_old_connections()  # Django does this only at the start and end of a request, and a stream lasts longer
        try:
            return query(*args, **kwargs)
        finally:
            close_old_connections()

    return await sync_to_async(run)()


async def _encode_events(
    events: AsyncIterator[Event | tuple[str, Any]], is_allowed: Callable[[], bool], heartbeat_seconds: float
) -> AsyncIterator[bytes]:
    """Yield the stream's bytes: events, and heartbeats while there are none. End when the reader loses access."""
    iterator = aiter(events)
    checked_at = time.monotonic()
    # Waits for the next event. It continues during heartbeats, because cancelling it would end `events`.
    next_event: asyncio.Future[Event | tuple[str, Any]] | None = None
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
            yield _encode_event(Event(*event))
    finally:
        if next_event is not None:
            next_event.cancel()
            await asyncio.wait({next_event})
        if close := getattr(iterator, "aclose", None):
            await close()


def _encode_event(event: Event) -> bytes:
    """Return the bytes of an event."""
    text = event.data if isinstance(event.data, str) else json.dumps(event.data, separators=(",", ":"), default=str)
    lines = [f"event: {event.name}"]
    if event.id is not None:
        lines.append(f"id: {event.id}")
    # In an event stream a lone carriage return ends a line too, and progress bars write them.
    lines += [f"data: {line}" for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    return ("\n".join(lines) + "\n\n").encode()

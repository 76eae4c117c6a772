"""Event streams (server-sent events). Hides their format, their headers, and what keeps proxies and browsers waiting.

The one rule: a stream reads the database through `reading` alone. It runs on one of the few threads that all streams
share (see `console.asgi`), so that hundreds of streams need no more than a handful of connections.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import close_old_connections
from django.http import StreamingHttpResponse
from rest_framework.renderers import JSONRenderer

HEARTBEAT_SECONDS = 15.0
"""A comment is sent after this much silence, so that no proxy in between takes the stream for dead."""
RETRY_MILLISECONDS = 2000
"""How long a browser waits before it connects again."""
MEDIA_TYPE = "text/event-stream"

P = ParamSpec("P")
T = TypeVar("T")


class Event(NamedTuple):
    """One event. `data` is text, or anything that JSON can hold; `id` comes back as Last-Event-ID on reconnection."""

    name: str
    data: Any
    id: str | None = None


class EventStreamRenderer(JSONRenderer):
    """Lets a DRF view accept `text/event-stream`. The stream itself is no DRF Response, and errors are always JSON."""

    media_type = MEDIA_TYPE
    format = "event-stream"


def wants_events(headers: Mapping[str, str]) -> bool:
    """Whether a request's headers ask for an event stream."""
    return MEDIA_TYPE in headers.get("Accept", "")


def event_stream(
    events: AsyncIterator[Event | tuple[str, Any]], *, heartbeat_seconds: float = HEARTBEAT_SECONDS
) -> StreamingHttpResponse:
    """The response that sends `events` as they come. When the client goes away, `events` is closed (`aclose`)."""
    response = StreamingHttpResponse(_frames(events, heartbeat_seconds), content_type=MEDIA_TYPE)
    response["Cache-Control"] = "no-cache"
    response["X-Accel-Buffering"] = "no"
    return response


async def reading(query: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `query` where the database may be used. It must be short: other streams wait for it."""

    def call() -> T:
        close_old_connections()  # a stream outlives what Django checks once per request, such as a database's restart
        try:
            return query(*args, **kwargs)
        finally:
            close_old_connections()

    return await sync_to_async(call)()


async def _frames(events: AsyncIterator[Event | tuple[str, Any]], heartbeat_seconds: float) -> AsyncIterator[bytes]:
    iterator = aiter(events)
    coming: asyncio.Future[Event | tuple[str, Any]] | None = None
    try:
        yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
        while True:
            coming = coming or asyncio.ensure_future(anext(iterator))
            done, _ = await asyncio.wait({coming}, timeout=heartbeat_seconds)
            if not done:
                yield b": still here\n\n"
                continue
            finished, coming = coming, None
            try:
                event = finished.result()
            except StopAsyncIteration:
                return
            yield _frame(Event(*event))
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait({coming})
        if close := getattr(iterator, "aclose", None):
            await close()


def _frame(event: Event) -> bytes:
    text = event.data if isinstance(event.data, str) else json.dumps(event.data, separators=(",", ":"), default=str)
    lines = [f"event: {event.name}"]
    if event.id is not None:
        lines.append(f"id: {event.id}")
    # The format knows three line ends, so a lone carriage return (a progress bar's) would also end a data line.
    lines += [f"data: {line}" for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    return ("\n".join(lines) + "\n\n").encode()

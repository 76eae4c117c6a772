"""Send streaming responses (event streams and downloads) after Django is done with the request.

Event streams share a few threads, because each works only briefly when there is news. Each download has its own
thread, because its iterator may keep a database cursor open between two chunks. Therefore downloads are limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.conf import settings
from django.db import connections
from django.http import StreamingHttpResponse

from console.serving import refusals
from console.serving.exchange import is_event_stream
from console.serving.limits import Limit
from console.serving.refusals import Message, Receive, Send
from console.serving.threads import SharedThreads

STREAM_THREADS = 4
"""How many threads all event streams of a process share. Each thread keeps a database connection, and reads for one
stream take milliseconds."""
MAX_DOWNLOADS = 64
"""How many downloads a process sends at once. Each has a thread, which most of the time waits for its client; few keep
a database connection."""


class Streams:
    """The streaming responses of this process."""

    def __init__(self) -> None:
        self._threads = SharedThreads(STREAM_THREADS, "stream")
        self._organization_limit = Limit(settings.MAX_STREAMS_PER_ORGANIZATION, refusals.TOO_MANY_STREAMS)
        self._download_limit = Limit(MAX_DOWNLOADS, refusals.BUSY)
        # One organization can use at most half of the downloads, so that none alone blocks all others.
        self._organization_download_limit = Limit(max(1, MAX_DOWNLOADS // 2), refusals.TOO_MANY_STREAMS)
        self.open_event_streams = 0
        """How many event streams are being sent; the heartbeat reports it."""

    async def send(
        self, response: StreamingHttpResponse, start: Message, organization_id: Hashable, receive: Receive, send: Send
    ) -> None:
        """Send `start` and the content of `response`, until it ends or the client disconnects. Raises Refused.

        `start` is the ASGI message with status and headers. The stream counts under the limits of its organization;
        `organization_id` is None if there is none, as for pages without log-in.
        """
        is_download = not is_event_stream(response)
        send_response = self._send_file if is_download else self._send_events
        try:
            with ExitStack() as limits:
                if organization_id is not None:
                    limits.enter_context(self._organization_limit.slot(organization_id))
                    if is_download:
                        limits.enter_context(self._organization_download_limit.slot(organization_id))
                await send_response(response, start, receive, send)
        finally:
            # A download's own thread has ended and closed its connections. `close` runs on a shared thread, because it
            # may block: it closes files and sends `request_finished`.
            async with self._threads.assign():
                await sync_to_async(response.close)()

    async def _send_events(self, response: StreamingHttpResponse, start: Message, receive: Receive, send: Send) -> None:
        """Send an event stream. It is an asynchronous iterator, whose queries run on one of the shared threads."""
        self.open_event_streams += 1
        try:
            async with self._threads.assign():
                await send_until_disconnect(aiter(response), start, receive, send)
        finally:
            self.open_event_streams -= 1

    async def _send_file(self, response: StreamingHttpResponse, start: Message, receive: Receive, send: Send) -> None:
        """Send a download, whose iterator runs on a thread of its own. Raises Refused."""
        with self._download_limit.slot("all"), ThreadPoolExecutor(1, thread_name_prefix="download") as thread:
            async with ThreadSensitiveContext(executor=thread):
                try:
                    await send_until_disconnect(_read_chunks(response), start, receive, send)
                finally:
                    await sync_to_async(connections.close_all)()


async def _read_chunks(response: StreamingHttpResponse) -> AsyncIterator[bytes]:
    """Yield the content of a download. Its iterator is synchronous, so it runs in the download's thread."""
    iterator = iter(response)

    def next_chunk() -> bytes | None:
        return next(iterator, None)  # a default, because Python lets no Future raise StopIteration

    while (chunk := await sync_to_async(next_chunk)()) is not None:
        yield chunk


async def send_until_disconnect(chunks: AsyncIterator[bytes], start: Message, receive: Receive, send: Send) -> None:
    """Send a response until it ends or the client disconnects. Raise what `chunks` raises."""

    async def send_all() -> None:
        await send(start)
        async with aclosing(chunks) as open_chunks:  # type: ignore[type-var]  # every caller passes an async generator
            async for chunk in open_chunks:
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    sending, waiting = asyncio.create_task(send_all()), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({sending, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, waiting):
            task.cancel()
        result, _ = await asyncio.gather(sending, waiting, return_exceptions=True)
    if isinstance(result, Exception):
        raise result

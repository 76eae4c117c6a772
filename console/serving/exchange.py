"""The data that the server and the view of one request share.

The server puts an `Exchange` into the request's ASGI scope, so Django's request and handler classes stay unchanged.
With it a view reads an upload's body as it arrives, or tells the server which program responds instead of the view.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Any
from urllib.parse import urlsplit

from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse

from console.serving.refusals import Message, Receive
from runtime.backends.base import ShellTunnel, Tunnel

SCOPE_KEY = "trainyard.exchange"
"""The key of the Exchange in the ASGI scope."""
READ_AHEAD_BYTES = 2 * 1024**2
"""How much of a body is received before the view reads it: enough to keep the connection busy while the view writes."""
BATCH_SECONDS = 0.02
"""How long a read waits for all the bytes that it asks for, before it returns fewer. Few large reads cost less CPU time
than many small ones. If the process dies, the bytes that arrived in this time are lost."""
LOOP_ITERATIONS = 8
"""How many more iterations the event loop gets after a read's timeout, before TimeoutError is raised. On a busy machine
the loop may not have run during the whole timeout, although bytes have arrived. They pass from the socket to a read in
four iterations; this is twice as many."""
LOOP_CHECK_SECONDS = 1.0
"""How often a thread that waits for iterations of the event loop checks whether the body has ended. When the server
stops, its loop makes no more iterations, but the body is ended then."""


@dataclass(frozen=True)
class Upstream:
    """A tool, such as TensorBoard, to which a request is forwarded.

    The tool listens on the Unix socket `socket`. `root` is the absolute URL of its pages. Its own pages and scripts
    are directly under `root`. Paths with a further slash are data from customers' code, which a browser must not
    execute.
    """

    socket: Path
    root: str

    def is_tool_file(self, path: str) -> bool:
        """Return whether a decoded path is that of a page or script of the tool itself, and not of customers' data."""
        return "/" not in path.removeprefix(urlsplit(self.root).path)

    @property
    def content_security_policy(self) -> str:
        """Return the header's value for every response: scripts reach the tool, but no other part of the console."""
        return "; ".join([
            "default-src 'none'",
            f"script-src {self.root}",
            f"style-src {self.root} 'unsafe-inline'",
            f"img-src {self.root} data: blob:",
            f"media-src {self.root}",
            f"font-src {self.root} data:",
            f"connect-src {self.root}",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ])  # fmt: skip


@dataclass(frozen=True)
class NotebookRequest:
    """A request to the host name of a job's notebook. `path` is decoded; `query` is without the question mark."""

    job_id: int
    path: str
    query: str


@dataclass(frozen=True)
class AdmittedShell:
    """A shell that a member may open: how to connect to it (`Backend.shell_socket`), and who the member is."""

    address: Path | ShellTunnel
    organization_id: int
    user_id: int


@dataclass(frozen=True)
class ShellEnd:
    """The end of a shell, for the audit log. `seconds` is how long it was open; `reason` is one of `shells.REASONS`."""

    shell: AdmittedShell
    reason: str
    seconds: int


@dataclass(frozen=True)
class ShellRequest:
    """A question of the server to the view that admits shells, about a shell in a job's node. Nodes count from 0.

    If `is_new`, the view also writes the opening to the audit log. With `end`, it only writes the end there.
    """

    job_id: int
    node: int
    is_new: bool = False
    end: ShellEnd | None = None


@dataclass
class Exchange:
    """The data that the server and the view of one request share. Each kind of request uses one or two attributes.

    A subrequest is a request that the server itself sends to Django (`console.serving.gate`).
    """

    body: IncomingBody | None = None
    """Set by the server for an upload; its view reads it."""
    stream: StreamingHttpResponse | None = None
    """Set by `RequestMiddleware` if the response is a stream. The server sends it after Django is done."""
    upstream: Upstream | None = None
    """Set by the view of a tool. If the view returns 200, the server sends the tool's response instead."""
    notebook: NotebookRequest | None = None
    """Set by the server in a subrequest that asks for admission to a notebook."""
    notebook_socket: Path | Tunnel | None = None
    """Set by the view that admits this request: where the notebook answers."""
    shell: ShellRequest | None = None
    """Set by the server in a subrequest about a shell."""
    admitted_shell: AdmittedShell | None = None
    """Set by the view that admits the shell."""


def exchange_of(request: HttpRequest) -> Exchange | None:
    """Return the request's exchange; None under another server, such as Django's test client."""
    scope: dict[str, Any] = getattr(request, "scope", None) or {}
    return scope.get(SCOPE_KEY)


def is_event_stream(response: HttpResponseBase) -> bool:
    """Return whether a response is a stream of server-sent events."""
    return response.streaming and response.headers.get("Content-Type", "").startswith("text/event-stream")


class _End(enum.Enum):
    """How a body ended."""

    COMPLETE = enum.auto()
    DISCONNECTED = enum.auto()


class IncomingBody:
    """The body of an upload's request, which its view reads in the view's thread while the body arrives.

    A view first calls `begin`, which counts the upload by calling `count_upload` on the server's event loop.
    `count_upload` raises Refused if the sender has too many uploads in progress. The first `read` starts a task that
    receives up to READ_AHEAD_BYTES ahead, so that receiving and the view's work overlap.
    """

    def __init__(self, receive: Receive, count_upload: Callable[[], None]) -> None:
        self._receive, self._count_upload = receive, count_upload
        self._loop = asyncio.get_running_loop()
        self._receiving: Future[None] | None = None
        self.read_timeout_seconds: float | None = None
        """How long a read waits for bytes before it raises TimeoutError. None: as long as the client is connected."""
        self._has_room = asyncio.Event()
        # The view's thread and the event loop share the attributes below, under the condition `_changed`.
        self._changed = Condition()
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._awaited_bytes = 1
        """How many bytes the view waits for."""
        self._end: _End | None = None

    def begin(self) -> None:
        """Count the upload under its sender's limit. Call it after authentication. Raises Refused at the limit."""
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result()

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, and none at the end of the body.

        Raises ConnectionResetError if the client disconnected, once all the bytes that arrived before have been
        returned. Raises TimeoutError if no byte arrived in `read_timeout_seconds`; the caller may read again.
        """
        if self._receiving is None:
            self._receiving = asyncio.run_coroutine_threadsafe(self._receive_ahead(), self._loop)
        with self._changed:
            has_bytes = self._wait_for_bytes(size, timeout=BATCH_SECONDS) or self._wait_for_bytes(
                1, timeout=self.read_timeout_seconds
            )
        if not has_bytes:
            self._receive_pending()  # without the lock, which the event loop needs to add bytes
        with self._changed:
            if not self._chunks and self._end is None:
                raise TimeoutError
            if not self._chunks and self._end is _End.DISCONNECTED:
                raise ConnectionResetError("The client closed the connection.")
            data = self._take_bytes(size)
            is_full = self._buffered_bytes >= READ_AHEAD_BYTES
        if not is_full:
            self._loop.call_soon_threadsafe(self._has_room.set)
        return data

    def add_remaining(self, chunk: bytes, *, is_complete: bool) -> None:
        """Add the last bytes of a connection that was lost, and end the body. Call it on the event loop."""
        self._add_chunk(chunk)
        self._finish(_End.COMPLETE if is_complete else _End.DISCONNECTED)

    def close(self) -> None:
        """Stop receiving. Call it on the event loop, after the view is done."""
        if self._receiving is not None:
            self._receiving.cancel()

    def _wait_for_bytes(self, size: int, timeout: float | None = None) -> bool:
        """Wait until `size` bytes are buffered or the body ended; return False after `timeout` seconds.

        The caller holds the lock of `_changed`.
        """
        self._awaited_bytes = size
        return self._changed.wait_for(lambda: self._buffered_bytes >= size or self._end is not None, timeout)

    def _receive_pending(self) -> None:
        """Give the event loop time to receive bytes that are in the socket; see LOOP_ITERATIONS."""
        iterations = asyncio.run_coroutine_threadsafe(_run_iterations(), self._loop)
        while self._end is None:
            with suppress(TimeoutError):
                iterations.result(timeout=LOOP_CHECK_SECONDS)
                break

    def _take_bytes(self, size: int) -> bytes:
        """Remove and return the first bytes of the buffer, at most `size`."""
        chunks, missing_bytes = [], size
        while self._chunks and missing_bytes:
            chunk = self._chunks.popleft()
            if len(chunk) > missing_bytes:
                self._chunks.appendleft(chunk[missing_bytes:])
                chunk = chunk[:missing_bytes]
            chunks.append(chunk)
            missing_bytes -= len(chunk)
            self._buffered_bytes -= len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)  # `join` would copy a single chunk

    async def _begin(self) -> None:
        """Call `count_upload` on the event loop: limits are not thread-safe."""
        self._count_upload()

    async def _receive_ahead(self) -> None:
        """Receive the body until its end. Pause while the read-ahead buffer is full."""
        end = None
        try:
            while end is None:
                message = await self._receive()
                end = _end_of(message)
                if self._add_chunk(message.get("body", b"")) and end is None:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:  # also if this task is cancelled because the server stops: else the view would wait for ever
            self._finish(end or _End.DISCONNECTED)

    def _finish(self, end: _End) -> None:
        """End the body, unless it has already ended, and wake the view."""
        with self._changed:
            self._end = self._end or end
            self._changed.notify()

    def _add_chunk(self, chunk: bytes) -> bool:
        """Add received bytes; return whether the read-ahead buffer is full."""
        with self._changed:
            if chunk:
                self._chunks.append(chunk)
                self._buffered_bytes += len(chunk)
                if self._buffered_bytes >= self._awaited_bytes:
                    self._changed.notify()
            return self._buffered_bytes >= READ_AHEAD_BYTES


async def _run_iterations() -> None:
    """Let the event loop make LOOP_ITERATIONS iterations."""
    for _iteration in range(LOOP_ITERATIONS):
        await asyncio.sleep(0)


def _end_of(message: Message) -> _End | None:
    """Return how a message of the server ends the body; None if more follows."""
    if message["type"] == "http.disconnect":
        return _End.DISCONNECTED
    return None if message.get("more_body", False) else _End.COMPLETE

"""The data that the server and a view share: an upload's body, a streaming response, or the program that responds.

They are in the ASGI scope, so Django's request and handler classes stay unchanged.
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
from runtime.backends.base import Tunnel

SCOPE_KEY = "trainyard.exchange"
"""The key of the Exchange in the ASGI scope."""
READ_AHEAD_BYTES = 2 * 1024**2
"""How much of a body is received before the view reads it: enough to keep the connection busy while the view writes."""


@dataclass(frozen=True)
class Upstream:
    """A tool to which a request is forwarded: the socket where it listens, and the URL `root` of its pages.

    The tool's own pages and scripts are directly under `root`. Paths with a further slash are data from customers'
    code, which a browser must not execute.
    """

    socket: Path
    root: str

    def is_own(self, path: str) -> bool:
        """Return whether a decoded path is that of a page or script of the tool itself."""
        return "/" not in path.removeprefix(urlsplit(self.root).path)

    @property
    def content_security_policy(self) -> str:
        """Return the policy of every response: its scripts can reach the tool, but no other part of the console."""
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

    job: int
    path: str
    query: str


@dataclass(frozen=True)
class AdmittedShell:
    """A shell that a member may open: the socket of its node, and the member by their row ids."""

    socket: Path
    organization: int
    user: int


@dataclass(frozen=True)
class ShellEnd:
    """The end of a shell: who had opened it, why it ended, and after how many seconds."""

    shell: AdmittedShell
    reason: str
    seconds: int


@dataclass(frozen=True)
class ShellRequest:
    """A request to admit a shell in a job's node. `is_new`: the shell is being opened. `end`: it has ended."""

    job: int
    node: int
    is_new: bool = False
    end: ShellEnd | None = None


@dataclass
class Exchange:
    """What the server and the view of one request share.

    The view of an upload reads `body`. The server sends `stream` after Django is done. The view of a tool sets
    `upstream`: if the view returns 200, the server sends the tool's response instead. Likewise the view that admits a
    request to a notebook reads `notebook` and sets `notebook_socket`, where the notebook answers. The view that admits
    a shell reads `shell` and sets `admitted_shell`.
    """

    body: IncomingBody | None = None
    stream: StreamingHttpResponse | None = None
    upstream: Upstream | None = None
    notebook: NotebookRequest | None = None
    notebook_socket: Path | Tunnel | None = None
    shell: ShellRequest | None = None
    admitted_shell: AdmittedShell | None = None


def exchange_of(request: HttpRequest) -> Exchange | None:
    """Return the request's exchange; None under another server, such as Django's test client."""
    scope: dict[str, Any] = getattr(request, "scope", None) or {}
    return scope.get(SCOPE_KEY)


def is_event_stream(response: HttpResponseBase) -> bool:
    """Return whether a response is a stream of server-sent events."""
    return response.streaming and response.headers.get("Content-Type", "").startswith("text/event-stream")


BATCH_SECONDS = 0.02
"""How long a read waits for as many bytes as it asks for, before it returns fewer. Few large reads take less time than
many small ones; if the process dies, only the bytes that arrived in this time are lost."""


LOOP_ITERATIONS = 8
"""Iterations of the event loop before a read times out. Arrived bytes need four from the socket to a read. On a busy
machine the loop may not have run for long."""


LOOP_CHECK_SECONDS = 1.0
"""How often a thread that waits for the event loop checks whether the body ended."""


class _End(enum.Enum):
    """How a body ended."""

    COMPLETE = enum.auto()
    DISCONNECTED = enum.auto()


class IncomingBody:
    """The body of a request, read by a view in its thread as it arrives.

    `begin` calls `admit` on the server's event loop, before the body is read. `admit` may raise Refused. The first
    `read` starts a task that receives up to READ_AHEAD_BYTES ahead, so that receiving and the view's work overlap.
    """

    def __init__(self, receive: Receive, admit: Callable[[], None]) -> None:
        self._receive, self._admit = receive, admit
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
        """Admit the upload. Call it once the sender is authenticated. Raises Refused at the sender's limit."""
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result()

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, and none at the end. Raises ConnectionResetError if the client disconnected.

        Bytes that arrived before it disconnected are returned first. Raises TimeoutError after `read_timeout_seconds`
        without any; the caller may read again.
        """
        if self._receiving is None:
            self._receiving = asyncio.run_coroutine_threadsafe(self._receive_ahead(), self._loop)
        with self._changed:
            has_bytes = self._wait(size, timeout=BATCH_SECONDS) or self._wait(1, timeout=self.read_timeout_seconds)
        if not has_bytes:
            self._receive_pending()
        with self._changed:
            if not self._buffered_bytes and self._end is None:
                raise TimeoutError
            if not self._chunks and self._end is _End.DISCONNECTED:
                raise ConnectionResetError("The client closed the connection.")
            data = self._take(size)
            self._buffered_bytes -= len(data)
            is_full = self._buffered_bytes >= READ_AHEAD_BYTES
        if not is_full:
            self._loop.call_soon_threadsafe(self._has_room.set)
        return data

    def add_remaining(self, chunk: bytes, *, is_complete: bool) -> None:
        """Add the bytes that arrived before the connection was lost. Call it on the event loop."""
        self._add(chunk)
        self._finish(_End.COMPLETE if is_complete else _End.DISCONNECTED)

    def close(self) -> None:
        """Stop receiving. Call it on the event loop, after the view is done."""
        if self._receiving is not None:
            self._receiving.cancel()

    def _wait(self, size: int, timeout: float | None = None) -> bool:
        """Wait until `size` bytes arrived, or the body ended. The caller holds the condition."""
        self._awaited_bytes = size
        return self._changed.wait_for(lambda: self._buffered_bytes >= size or self._end is not None, timeout)

    def _receive_pending(self) -> None:
        """Wait until the event loop has received bytes that arrived, or the body ended, as when the server stops."""
        iterations = asyncio.run_coroutine_threadsafe(_run_iterations(), self._loop)
        while self._end is None:
            with suppress(TimeoutError):
                iterations.result(timeout=LOOP_CHECK_SECONDS)
                break

    def _take(self, size: int) -> bytes:
        """Remove and return the first bytes, at most `size`."""
        taken, missing = [], size
        while self._chunks and missing:
            chunk = self._chunks.popleft()
            if len(chunk) > missing:
                self._chunks.appendleft(chunk[missing:])
                chunk = chunk[:missing]
            taken.append(chunk)
            missing -= len(chunk)
        return taken[0] if len(taken) == 1 else b"".join(taken)  # without a copy if there is one chunk

    async def _begin(self) -> None:
        self._admit()

    async def _receive_ahead(self) -> None:
        end = None
        try:
            while end is None:
                message = await self._receive()
                end = _end_of(message)
                if self._add(message.get("body", b"")) and end is None:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:  # also if the server stops: the view must not wait for ever
            self._finish(end or _End.DISCONNECTED)

    def _finish(self, end: _End) -> None:
        with self._changed:
            self._end = self._end or end
            self._changed.notify()

    def _add(self, chunk: bytes) -> bool:
        """Add received bytes; return whether the read-ahead buffer is full."""
        with self._changed:
            if chunk:
                self._chunks.append(chunk)
                self._buffered_bytes += len(chunk)
                if self._buffered_bytes >= self._awaited_bytes:
                    self._changed.notify()
            return self._buffered_bytes >= READ_AHEAD_BYTES


async def _run_iterations() -> None:
    for _iteration in range(LOOP_ITERATIONS):
        await asyncio.sleep(0)


def _end_of(message: Message) -> _End | None:
    """Return how a message of the server ends the body; None if more follows."""
    if message["type"] == "http.disconnect":
        return _End.DISCONNECTED
    return None if message.get("more_body", False) else _End.COMPLETE

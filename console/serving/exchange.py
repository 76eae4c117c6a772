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
class ShellOpening:
    """A shell that a member may open: the socket of its node, and the member by their row ids."""

    socket: Path
    organization: int
    user: int


@dataclass(frozen=True)
class ShellEnd:
    """The end of a shell: who had opened it, why it ended, and after how many seconds."""

    opening: ShellOpening
    why: str
    seconds: int


@dataclass(frozen=True)
class ShellRequest:
    """A question about a shell in a job's node: may it be open? `is_new`: it is opened now. `end`: it has ended."""

    job: int
    node: int
    is_new: bool = False
    end: ShellEnd | None = None


@dataclass
class Exchange:
    """What the server and the view of one request share.

    The view of an upload reads `body`. The server sends `stream` after Django is done. The view of a tool sets
    `upstream`: if the view returns 200, the server sends the tool's response instead. Likewise the view that admits a
    request to a notebook reads `notebook` and sets `notebook_socket`, where the notebook listens. The view that admits
    a shell reads `shell` and sets `shell_opening`.
    """

    body: IncomingBody | None = None
    stream: StreamingHttpResponse | None = None
    upstream: Upstream | None = None
    notebook: NotebookRequest | None = None
    notebook_socket: Path | None = None
    shell: ShellRequest | None = None
    shell_opening: ShellOpening | None = None


def exchange_of(request: HttpRequest) -> Exchange | None:
    """Return the request's exchange; None under another server, such as Django's test client."""
    scope: dict[str, Any] = getattr(request, "scope", None) or {}
    return scope.get(SCOPE_KEY)


def is_event_stream(response: HttpResponseBase) -> bool:
    """Return whether a response is a stream of server-sent events."""
    return response.streaming and response.headers.get("Content-Type", "").startswith("text/event-stream")


GATHER_SECONDS = 0.02
"""How long a read waits for as many bytes as it asks for, before it returns fewer. Few large reads take less time than
many small ones; if the process dies, only the bytes that arrived in this time are lost."""


TURNS_OF_LOOP = 8
"""How often the event loop looks for arrived bytes before a body counts as quiet: bytes need four turns from the socket
to a read. A busy machine may let the loop wait, and bytes with it."""


LOOP_SECONDS = 1.0
"""How often a thread that waits for the event loop checks whether the body ended."""


class _End(enum.Enum):
    """How a body ended."""

    COMPLETE = enum.auto()
    CLIENT_LEFT = enum.auto()


class IncomingBody:
    """The body of a request, read by a view in its thread as it arrives.

    `begin` calls `admit` on the server's event loop, before the body is read. `admit` may raise Refused. The first
    `read` starts a task that receives up to READ_AHEAD_BYTES ahead, so that receiving and the view's work overlap.
    """

    def __init__(self, receive: Receive, admit: Callable[[], None]) -> None:
        self._receive, self._admit = receive, admit
        self._loop = asyncio.get_running_loop()
        self._receiving: Future[None] | None = None
        self.quiet_seconds: float | None = None
        """A read raises TimeoutError after so long without bytes. None: it waits as long as the client is connected."""
        self._has_room = asyncio.Event()
        # The view's thread and the event loop share the attributes below, under the condition `_changed`.
        self._changed = Condition()
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._wanted = 1
        """How many bytes the view waits for."""
        self._end: _End | None = None

    def begin(self) -> None:
        """Admit the upload. Call it once the sender is authenticated. Raises Refused at the sender's limit."""
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result()

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, and none at the end. Raises ConnectionResetError if the client left.

        Bytes that arrived before the client left are returned first. Raises TimeoutError after `quiet_seconds` without
        any; then reading may go on.
        """
        if self._receiving is None:
            self._receiving = asyncio.run_coroutine_threadsafe(self._receive_ahead(), self._loop)
        with self._changed:
            has_bytes = self._wait(size, timeout=GATHER_SECONDS) or self._wait(1, timeout=self.quiet_seconds)
        if not has_bytes:
            self._let_loop_look()
        with self._changed:
            if not self._size and self._end is None:
                raise TimeoutError
            if not self._pieces and self._end is _End.CLIENT_LEFT:
                raise ConnectionResetError("The client closed the connection.")
            data = self._take(size)
            self._size -= len(data)
            is_full = self._size >= READ_AHEAD_BYTES
        if not is_full:
            self._loop.call_soon_threadsafe(self._has_room.set)
        return data

    def add_last(self, piece: bytes, *, is_complete: bool) -> None:
        """Add the bytes that arrived before the connection was lost. Call it on the event loop."""
        self._add(piece)
        self._finish(_End.COMPLETE if is_complete else _End.CLIENT_LEFT)

    def close(self) -> None:
        """Stop receiving. Call it on the event loop, after the view is done."""
        if self._receiving is not None:
            self._receiving.cancel()

    def _wait(self, size: int, timeout: float | None = None) -> bool:
        """Wait until `size` bytes arrived, or the body ended. The caller holds the condition."""
        self._wanted = size
        return self._changed.wait_for(lambda: self._size >= size or self._end is not None, timeout)

    def _let_loop_look(self) -> None:
        """Wait until the event loop has looked for arrived bytes, or the body ended, as when the server stops."""
        turned = asyncio.run_coroutine_threadsafe(_turn_loop(), self._loop)
        while self._end is None:
            with suppress(TimeoutError):
                turned.result(timeout=LOOP_SECONDS)
                break

    def _take(self, size: int) -> bytes:
        """Remove and return the first bytes, at most `size`."""
        taken, missing = [], size
        while self._pieces and missing:
            piece = self._pieces.popleft()
            if len(piece) > missing:
                self._pieces.appendleft(piece[missing:])
                piece = piece[:missing]
            taken.append(piece)
            missing -= len(piece)
        return taken[0] if len(taken) == 1 else b"".join(taken)  # without a copy if there is one piece

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
            self._finish(end or _End.CLIENT_LEFT)

    def _finish(self, end: _End) -> None:
        with self._changed:
            self._end = self._end or end
            self._changed.notify()

    def _add(self, piece: bytes) -> bool:
        """Add received bytes; return whether the read-ahead buffer is full."""
        with self._changed:
            if piece:
                self._pieces.append(piece)
                self._size += len(piece)
                if self._size >= self._wanted:
                    self._changed.notify()
            return self._size >= READ_AHEAD_BYTES


async def _turn_loop() -> None:
    for _turn in range(TURNS_OF_LOOP):
        await asyncio.sleep(0)


def _end_of(message: Message) -> _End | None:
    """Return how a message of the server ends the body; None if more follows."""
    if message["type"] == "http.disconnect":
        return _End.CLIENT_LEFT
    return None if message.get("more_body", False) else _End.COMPLETE

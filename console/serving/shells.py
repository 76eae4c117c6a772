"""Connect a page's terminal with a shell in a node of a running job, by a websocket of the console's own host.

Django admits the websocket by the member's session, again while it is open, and writes each opening and end to the
audit log. What the shell sends is customers' data: it goes to the page's terminal as bytes, which draws it as text.

Messages of the browser: bytes are input; a text is a JSON object, `{"rows": 24, "columns": 80}` after a change of
the terminal's size, or `{"seen": 1024}` with the number of bytes that the terminal has drawn so far. The server stops
reading the shell while MAX_UNACKNOWLEDGED_BYTES are not drawn, so that neither side holds more.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import urlsplit

from django.conf import settings

from console.serving import gate, proxy
from console.serving.exchange import AdmittedShell, Exchange, ShellEnd, ShellRequest
from console.serving.gate import Scope, header, pinned
from console.serving.limits import Limit
from console.serving.refusals import Receive, Refusal, Refused, Send
from runtime.launcher.shell import HEADER, INPUT, RESIZE, SIZE

GATE_PATH = "/shell-gate/"
"""The path of the view that admits shells. It refuses requests that come to this path from outside."""
MAX_SHELLS = 8
"""Most shells of one organization in this process."""
CHECK_SECONDS = 10.0
"""The interval of checks whether an open shell is still admitted: its member may have logged out, or the job ended."""
IDLE_SECONDS = 1800.0
"""A shell without input for this long is closed: it may be forgotten on a screen. The page names the 30 minutes."""
READ_BYTES = 32 * 1024
"""How much of a shell's output is passed on at once."""
MAX_UNACKNOWLEDGED_BYTES = 256 * 1024
"""How much output may be on its way to the screen: enough for a redraw of it on a slow connection."""
MAX_INPUT_BYTES = 32 * 1024
"""The largest message of the browser, which sends pasted text in parts."""
TERMINAL_SIZES = frozenset(range(1, 1001))
"""How many rows, and how many columns, a terminal may have."""
RETRY_SECONDS = 1.0
"""How long to wait before the end of a shell is recorded once more, if the console was busy."""
TOO_MANY_SHELLS = Refusal(429, "too_many_shells", "Your organization has too many shells open. Close some.")
# Codes that close the websocket. The page shows a sentence for each.
ENDED, INVALID, NOT_ADMITTED, IDLE, TOO_MANY = 1000, 1003, 1008, 4000, 4001
DISCONNECTED = 1001  # "going away": the browser has closed the connection, or the server stops
REASONS = {ENDED: "ended", INVALID: "invalid", NOT_ADMITTED: "not_admitted", IDLE: "idle", DISCONNECTED: "left"}
"""What the audit log stores as the reason of the end, by code."""
_PATH = re.compile(r"/jobs/([1-9][0-9]{0,17})/nodes/([0-9]{1,4})/shell/socket")


def node_of(scope: Scope) -> tuple[int, int] | None:
    """Return the job and node whose shell a websocket asks for; None for every other path."""
    match = _PATH.fullmatch(scope["path"])
    return (int(match[1]), int(match[2])) if match else None


class Shells:
    """Connects with shells."""

    def __init__(self, run_django: gate.RunDjango) -> None:
        self._run_django = run_django
        self._open = Limit(MAX_SHELLS, TOO_MANY_SHELLS)

    async def serve(self, job: int, node: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Connect a websocket with a new shell until one side ends, or it is no longer admitted. Raises Refused."""
        await receive()  # websocket.connect
        shell = await self._admit(scope, ShellRequest(job, node)) if _is_same_origin(scope) else None
        if shell is None:
            await send({"type": "websocket.close", "code": NOT_ADMITTED})
            return
        if not self._open.acquire(shell.organization):
            await send({"type": "websocket.accept"})  # without it, the browser would not learn the code
            await send({"type": "websocket.close", "code": TOO_MANY})
            return
        try:
            code = await self._connect(shell, ShellRequest(job, node), scope, receive, send)
        finally:
            self._open.release(shell.organization)
        await send({"type": "websocket.close", "code": code})

    async def _connect(
        self, shell: AdmittedShell, request: ShellRequest, scope: Scope, receive: Receive, send: Send
    ) -> int:
        """Open a shell and serve it to its end; return the code to close the websocket with. Raises Refused."""
        with pinned(shell.socket) as path:
            try:
                reader, writer = await asyncio.open_unix_connection(path, limit=READ_BYTES)
            except OSError as error:
                raise Refused(proxy.ENDED) from error
        try:
            if await self._admit(scope, replace(request, is_new=True)) is None:
                return NOT_ADMITTED
            started_at, code = time.monotonic(), DISCONNECTED
            try:
                await send({"type": "websocket.accept"})
                terminal = Terminal(reader, writer, receive, send)
                code = await terminal.run(lambda: self._admit(scope, request))
            finally:
                writer.close()  # the shell hangs up
                end = ShellEnd(shell, REASONS[code], round(time.monotonic() - started_at))
                # Shielded, because the log must have the end also if the server stops.
                await asyncio.shield(self._record_end(scope, replace(request, end=end)))
        finally:
            writer.close()
        return code

    async def _admit(self, scope: Scope, request: ShellRequest) -> AdmittedShell | None:
        """Return the shell that the browser may open; None if it may not, or no longer. Raises Refused."""
        exchange = Exchange(shell=request)
        messages = await gate.send_subrequest(
            self._run_django, scope, exchange, path=GATE_PATH, host=header(scope, b"host"),
            cookie=header(scope, b"cookie"), scheme=urlsplit(settings.TRAINYARD_URL).scheme,
        )  # fmt: skip
        return exchange.admitted_shell if messages[0]["status"] == HTTPStatus.OK else None

    async def _record_end(self, scope: Scope, request: ShellRequest) -> None:
        """Have Django write the end of a shell to the audit log; try again while the console is busy."""
        while True:
            with suppress(Refused):
                await self._admit(scope, request)
                return
            await asyncio.sleep(RETRY_SECONDS)


class Terminal:
    """The traffic between a browser and one shell."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receive: Receive, send: Send
    ) -> None:
        self._reader, self._writer, self._receive, self._send = reader, writer, receive, send
        self._sent_bytes = 0
        self._acknowledged_bytes = 0
        self._was_acknowledged = asyncio.Event()
        self._input_at = time.monotonic()

    async def run(self, admit: Callable[[], Awaitable[AdmittedShell | None]]) -> int:
        """Pass bytes on until one side ends; return the code to close the websocket with.

        `admit` returns None once the shell may no longer be open. It may raise Refused while the console is busy.
        """
        coroutines = (self._to_browser(), self._to_shell(), self._enforce_limits(admit))
        tasks = [asyncio.create_task(each) for each in coroutines]
        try:
            done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return done.pop().result()

    async def _to_browser(self) -> int:
        try:
            while data := await self._reader.read(READ_BYTES):
                self._sent_bytes += len(data)
                try:
                    await self._send({"type": "websocket.send", "bytes": data})
                except OSError:  # the browser has disconnected
                    return DISCONNECTED
                while self._sent_bytes - self._acknowledged_bytes > MAX_UNACKNOWLEDGED_BYTES:
                    self._was_acknowledged.clear()
                    await self._was_acknowledged.wait()
        except OSError:  # the run was killed
            return ENDED
        return ENDED

    async def _to_shell(self) -> int:
        while (message := await self._receive())["type"] == "websocket.receive":
            text = message.get("text")
            frame = _input_frame(message["bytes"]) if text is None else self._control_frame(text)
            if frame is None:
                return INVALID
            if text is None:
                self._input_at = time.monotonic()
            try:
                self._writer.write(frame)
                await self._writer.drain()
            except OSError:
                return ENDED
        return DISCONNECTED

    def _control_frame(self, text: str) -> bytes | None:
        """Return the frame that a message of the page's script becomes, which may be empty; None if it is invalid."""
        try:
            match json.loads(text):
                case {"seen": int(seen)} if self._acknowledged_bytes <= seen <= self._sent_bytes:
                    self._acknowledged_bytes = seen
                    self._was_acknowledged.set()
                    return b""
                case {"rows": int(rows), "columns": int(columns)} if {rows, columns} <= TERMINAL_SIZES:
                    return HEADER.pack(RESIZE, SIZE.size) + SIZE.pack(rows, columns)
        except (ValueError, RecursionError):
            return None
        return None

    async def _enforce_limits(self, admit: Callable[[], Awaitable[AdmittedShell | None]]) -> int:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if time.monotonic() - self._input_at > IDLE_SECONDS:
                return IDLE
            with suppress(Refused):  # the console is busy: the next check is soon enough
                if await admit() is None:
                    return NOT_ADMITTED


def _input_frame(data: bytes) -> bytes | None:
    return None if len(data) > MAX_INPUT_BYTES else HEADER.pack(INPUT, len(data)) + data


def _is_same_origin(scope: Scope) -> bool:
    """Return whether a page of the console opened the websocket. Django checks the host itself."""
    console = urlsplit(settings.TRAINYARD_URL)
    return header(scope, b"origin") in {
        f"{console.scheme}://{console.netloc}",
        f"{console.scheme}://{header(scope, b'host')}",
    }

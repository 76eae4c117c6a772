"""Connect the terminal in a page with a shell in a node of a running job, by a websocket on the console's host.

Django checks the member's session before the websocket opens, and again and again while it is open. It also writes
each opening and end to the audit log. The shell's output is customers' data: the browser receives it as bytes, which
the terminal in the page only draws as text.

The browser sends two kinds of messages. Binary messages are input for the shell. Text messages are JSON objects:
`{"rows": 24, "columns": 80}` after a change of the terminal's size, or `{"seen": 1024}`, the number of bytes that the
terminal has drawn so far. The server stops reading the shell while more than MAX_UNACKNOWLEDGED_BYTES are sent but not
drawn, so that a fast shell fills the memory of neither the browser nor this process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from enum import IntEnum
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from django.conf import settings

from console.serving import gate, proxy
from console.serving.exchange import AdmittedShell, Exchange, ShellEnd, ShellRequest
from console.serving.gate import Scope, header, verified_socket
from console.serving.limits import Limit
from console.serving.refusals import Receive, Refusal, Refused, Send
from runtime.backends.base import ShellTunnel
from runtime.errors import BackendUnavailable, RuntimeFault
from runtime.launcher.shell import HEADER, INPUT, RESIZE, SIZE

logger = logging.getLogger(__name__)

GATE_PATH = "/shell-gate/"
"""The path of the view that admits shells. It reads the ShellRequest that this module passes to Django within the
process (`gate.send_subrequest`), so it answers 404 to a browser."""
MAX_SHELLS = 8
"""How many shells one organization may have open in this process: one for each of a few people and nodes."""
CHECK_SECONDS = 10.0
"""How often Django is asked whether an open shell is still admitted. After a log-out it stays open for this long."""
IDLE_SECONDS = 1800.0
"""A shell without input for this long is closed, because its owner may have left the screen unattended. The page's text
names these 30 minutes too."""
READ_BYTES = 32 * 1024
"""How much of a shell's output is sent in one message."""
MAX_UNACKNOWLEDGED_BYTES = 256 * 1024
"""How much output may be sent but not yet drawn: several times the bytes of a full screen, so that drawing need not
wait for the next message. The page acknowledges every 64 KiB, so this must be larger."""
MAX_INPUT_BYTES = 32 * 1024
"""The largest binary message of the browser. The page splits pasted text into messages of 16 KiB."""
TERMINAL_SIZES = frozenset(range(1, 1001))
"""How many rows, and how many columns, a terminal may have. The largest screens have about 500 columns."""
RETRY_SECONDS = 1.0
"""How long to wait before the end of a shell is sent to Django again, if the console was busy."""
TOO_MANY_SHELLS = Refusal(429, "too_many_shells", "Your organization has too many shells open. Close some.")
CLUSTER_UNAVAILABLE = Refusal(503, "backend_unavailable", "The cluster does not respond. Try again later.")


class CloseCode(IntEnum):
    """Why a shell's websocket is closed. The page shows a sentence for each code.

    RFC 6455 reserves the codes from 4000 on for applications.
    """

    ENDED = 1000
    DISCONNECTED = 1001
    """The browser has closed the connection, or the server stops."""
    INVALID = 1003
    """The browser sent a message that is not in the module's docstring, or is too large."""
    NOT_ADMITTED = 1008
    IDLE = 4000
    TOO_MANY = 4001
    CLUSTER_UNAVAILABLE = 4002


REASONS = {
    CloseCode.ENDED: "ended",
    CloseCode.INVALID: "invalid",
    CloseCode.NOT_ADMITTED: "not_admitted",
    CloseCode.IDLE: "idle",
    CloseCode.DISCONNECTED: "left",
}
"""The reason that the audit log stores for the end of an opened shell."""
_PATH = re.compile(r"/jobs/([1-9][0-9]{0,17})/nodes/([0-9]{1,4})/shell/socket")
"""The path of a shell's websocket. A job's id has at most 18 digits here, so that it fits PostgreSQL's bigint."""


def requested_node(scope: Scope) -> tuple[int, int] | None:
    """Return the job's id and the node's number in the path of a shell's websocket; None for every other path."""
    match = _PATH.fullmatch(scope["path"])
    return (int(match[1]), int(match[2])) if match else None


class ShellConnector:
    """Asks Django to admit shells, and connects their websockets."""

    def __init__(self, run_django: gate.RunDjango) -> None:
        self._run_django = run_django
        self._shell_limit = Limit(MAX_SHELLS, TOO_MANY_SHELLS)

    async def serve(self, job_id: int, node: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Connect a websocket with a new shell until either side ends or admission is lost. Raises Refused."""
        await receive()  # websocket.connect
        shell = await self._ask_django(scope, ShellRequest(job_id, node)) if _is_same_origin(scope) else None
        if shell is None:
            # Without an accept, the browser gets the status 403 in place of the code.
            await send({"type": "websocket.close", "code": CloseCode.NOT_ADMITTED})
            return
        if not self._shell_limit.acquire(shell.organization_id):
            # A browser learns a close code only from a websocket that was accepted.
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close", "code": CloseCode.TOO_MANY})
            return
        try:
            close_code = await self._connect(shell, ShellRequest(job_id, node), scope, receive, send)
        except Refused as refused:
            if refused.refusal is not CLUSTER_UNAVAILABLE:
                raise  # the page shows its sentence for a shell that could not be opened
            await send({"type": "websocket.accept"})
            close_code = CloseCode.CLUSTER_UNAVAILABLE
        finally:
            self._shell_limit.release(shell.organization_id)
        await send({"type": "websocket.close", "code": close_code})

    async def _connect(
        self, shell: AdmittedShell, request: ShellRequest, scope: Scope, receive: Receive, send: Send
    ) -> CloseCode:
        """Open a shell and serve it to its end; return why it ended. Raises Refused."""
        async with open_connection(shell.address) as (reader, writer):
            # The audit log gets the opening only now, when the node has answered.
            if await self._ask_django(scope, replace(request, is_new=True)) is None:
                return CloseCode.NOT_ADMITTED
            started_at, close_code = time.monotonic(), CloseCode.DISCONNECTED
            try:
                await send({"type": "websocket.accept"})
                terminal = Terminal(reader, writer, receive, send)
                close_code = await terminal.run(lambda: self._ask_django(scope, request))
            finally:
                writer.close()  # the node sends the shell SIGHUP
                end = ShellEnd(shell, REASONS[close_code], round(time.monotonic() - started_at))
                # Shielded from cancellation, so that the audit log gets the end also if the server stops.
                await asyncio.shield(self._record_end(scope, replace(request, end=end)))
        return close_code

    async def _ask_django(self, scope: Scope, request: ShellRequest) -> AdmittedShell | None:
        """Send Django a request about a shell; return the shell, or None if the browser may not, or no longer, use it.

        Raises Refused if the console is busy.
        """
        exchange = Exchange(shell=request)
        messages = await gate.send_subrequest(
            self._run_django, scope, exchange, path=GATE_PATH, host=header(scope, b"host"),
            cookie=header(scope, b"cookie"), scheme=urlsplit(settings.TRAINYARD_URL).scheme,
        )  # fmt: skip
        return exchange.admitted_shell if messages[0]["status"] == HTTPStatus.OK else None

    async def _record_end(self, scope: Scope, request: ShellRequest) -> None:
        """Have Django write the end of a shell to the audit log. Repeat this until the console is not too busy."""
        while True:
            with suppress(Refused):
                await self._ask_django(scope, request)
                return
            await asyncio.sleep(RETRY_SECONDS)


@asynccontextmanager
async def open_connection(
    endpoint: Path | ShellTunnel,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a new shell. Raises Refused: CLUSTER_UNAVAILABLE, or TOOL_ENDED, whose text no websocket shows."""
    if isinstance(endpoint, Path):
        with verified_socket(endpoint) as path:  # a socket and no link, by a path of allowed length
            try:
                reader, writer = await asyncio.open_unix_connection(path, limit=READ_BYTES)
            except OSError as error:
                raise Refused(proxy.TOOL_ENDED) from error
        try:
            yield reader, writer
        finally:
            writer.close()
        return
    async with AsyncExitStack() as resources:
        try:
            streams = await resources.enter_async_context(endpoint())
        except (RuntimeFault, OSError) as error:
            logger.warning("A shell cannot be opened: %s", error)
            raise Refused(CLUSTER_UNAVAILABLE if isinstance(error, BackendUnavailable) else proxy.TOOL_ENDED) from error
        yield streams


class Terminal:
    """Passes bytes between a browser's websocket and one shell. Frames to the shell: see `runtime.launcher.shell`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receive: Receive, send: Send
    ) -> None:
        self._reader, self._writer, self._receive, self._send = reader, writer, receive, send
        self._sent_bytes = 0
        self._acknowledged_bytes = 0
        self._was_acknowledged = asyncio.Event()
        self._last_input_at = time.monotonic()

    async def run(self, admit: Callable[[], Awaitable[AdmittedShell | None]]) -> CloseCode:
        """Pass bytes in both directions until one side ends or a limit is reached; return the code that says which.

        `admit` returns None once the shell may no longer be open. It may raise Refused while the console is busy.
        """
        coroutines = (self._to_browser(), self._to_shell(), self._enforce_limits(admit))
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        try:
            done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return done.pop().result()

    async def _to_browser(self) -> CloseCode:
        """Pass the shell's output to the browser, and wait while too much of it is not drawn."""
        try:
            while data := await self._reader.read(READ_BYTES):
                self._sent_bytes += len(data)
                try:
                    await self._send({"type": "websocket.send", "bytes": data})
                except OSError:  # the browser has disconnected
                    return CloseCode.DISCONNECTED
                while self._sent_bytes - self._acknowledged_bytes > MAX_UNACKNOWLEDGED_BYTES:
                    self._was_acknowledged.clear()
                    await self._was_acknowledged.wait()
        except OSError:  # the run was killed
            return CloseCode.ENDED
        return CloseCode.ENDED

    async def _to_shell(self) -> CloseCode:
        """Pass the browser's messages to the shell as frames."""
        while (message := await self._receive())["type"] == "websocket.receive":
            text = message.get("text")
            frame = _input_frame(message["bytes"]) if text is None else self._control_frame(text)
            if frame is None:
                return CloseCode.INVALID
            if text is None:  # not for text messages, which the page also sends without a person's action
                self._last_input_at = time.monotonic()
            try:
                self._writer.write(frame)
                await self._writer.drain()
            except OSError:
                return CloseCode.ENDED
        return CloseCode.DISCONNECTED

    def _control_frame(self, text: str) -> bytes | None:
        """Return the frame to send to the shell for a text message; None if the message is invalid.

        An acknowledgement concerns only this process: it counts the bytes and returns an empty frame.
        """
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

    async def _enforce_limits(self, admit: Callable[[], Awaitable[AdmittedShell | None]]) -> CloseCode:
        """Return once the shell is idle for too long or no longer admitted."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if time.monotonic() - self._last_input_at > IDLE_SECONDS:
                return CloseCode.IDLE
            with suppress(Refused):  # the console is busy; the next check follows in CHECK_SECONDS
                if await admit() is None:
                    return CloseCode.NOT_ADMITTED


def _input_frame(data: bytes) -> bytes | None:
    """Return the frame that passes input to the shell; None if the input is too long."""
    return None if len(data) > MAX_INPUT_BYTES else HEADER.pack(INPUT, len(data)) + data


def _is_same_origin(scope: Scope) -> bool:
    """Return whether a page of the console opened the websocket.

    Browsers let every site open websockets with the console's cookies, so the origin must be checked. It may be any
    host by which the console is reached: Django checks the host with ALLOWED_HOSTS.
    """
    console = urlsplit(settings.TRAINYARD_URL)
    return header(scope, b"origin") in {
        f"{console.scheme}://{console.netloc.lower()}",
        f"{console.scheme}://{header(scope, b'host')}",
    }

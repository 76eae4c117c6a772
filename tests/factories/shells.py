"""Nodes whose shells echo what is typed, and browsers of members that open shells at a served console."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from django.db import connection
from django.urls import reverse
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from console.accounts.models import Membership
from tests.factories.accounts import logged_in

ENDS = (b"i\x00\x04exit", b"i\x00\x01\x03")
"""Frames that end a shell, `exit` and Ctrl+C. A frame of input is the letter `i`, two bytes of length and text."""


class Node:
    """Listens at `path`, where the shells of a node are opened. Each shell sends `output`, then repeats each frame."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections = 0
        self.output = b"$ "
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()

    @contextmanager
    def running(self) -> Iterator[Node]:
        """Listen during the block."""
        is_ready = threading.Event()
        thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(is_ready)))
        thread.start()
        is_ready.wait()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()
            self._loop.close()

    async def _serve(self, is_ready: threading.Event) -> None:
        async with await asyncio.start_unix_server(self._echo, str(self.path)):
            is_ready.set()
            await self._stop.wait()

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError):
            writer.write(self.output)
            while (data := await reader.read(65536)) and not data.endswith(ENDS):
                writer.write(data)
                await writer.drain()
        writer.close()


class Browser:
    """A browser of a member, logged in at the console at `url`."""

    def __init__(self, url: str, membership: Membership) -> None:
        self.url = url
        self.session = logged_in(membership.user)
        self.cookie = f"sessionid={self.session.cookies['sessionid'].value}"

    def websocket(self, job: int, *, node: int = 0, origin: str = "") -> connect:
        """Return a connection of the page's websocket."""
        address = f"{self.url.replace('http', 'ws')}{reverse('job_shell', args=[job, node])}socket"
        return connect(address, origin=origin or self.url, additional_headers={"Cookie": self.cookie}, proxy=None)

    def log_out(self) -> None:
        """End the session, and close this thread's database connection."""
        self.session.logout()
        connection.close()


async def closing_code(websocket: ClientConnection) -> int:
    """Read a websocket to its end; return the code that closed it."""
    with suppress(ConnectionClosed):
        while True:
            await websocket.recv()
    return websocket.close_code or 0

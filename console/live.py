"""Event streams on the port of the pages, without a thread each.

Pages and API run on gunicorn's threads, which serve them fastest. A request that asks for an event stream is handed
over: the worker passes the client's socket, with what it has read from it, through a unix socket to the live process
(`manage.py live`), where uvicorn's protocol serves it with Django's ASGI application. Same address, same views.

The one rule: a socket has one owner. The worker never shuts a socket down that it has handed over, it only forgets it.
Behind a proxy, `uvicorn console.asgi:application` may serve streams directly instead.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
from pathlib import Path
from typing import Any

import uvicorn
from django.conf import settings
from gunicorn import util
from gunicorn.workers.gthread import ThreadWorker
from uvicorn.protocols.http.h11_impl import H11Protocol

from console.operations import signs

logger = logging.getLogger(__name__)

HAND_OVER_SECONDS = 5.0
BACKLOG = 1024
SIGN_SECONDS = 5.0
MEDIA_TYPE = "text/event-stream"
CONNECTION_HEADERS = {"CONNECTION", "KEEP-ALIVE"}
UNAVAILABLE_BODY = json.dumps(
    {"code": "live_unavailable", "message": "Live streams are starting. Try again in a moment."}
).encode()
UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n" % len(UNAVAILABLE_BODY)
) + UNAVAILABLE_BODY


# --- The worker's half: gunicorn --------------------------------------------------------------------------------------


class StreamPassingWorker(ThreadWorker):  # type: ignore[misc]  # gunicorn publishes no types
    """gunicorn's threads; event streams go to the live process."""

    def handle_request(self, req: Any, conn: Any) -> bool:
        """Serve the request, or hand its connection over. False: this worker has done with the connection."""
        if req.method != "GET" or conn.cfg.is_ssl or not _asks_for_events(req.headers):
            return bool(super().handle_request(req, conn))
        try:
            hand_over(conn.sock, _head(req) + conn.parser.unreader.take_buffered())
        except OSError as error:
            logger.warning("the live process is away: %s", error)
            util.write(conn.sock, UNAVAILABLE)
            return False
        conn.sock.close()
        # gunicorn ends a connection with shutdown(), which would reach the client: it gets another socket for that.
        conn.sock = socket.socket(socket.AF_UNIX)
        return False


def hand_over(client: socket.socket, received: bytes) -> None:
    """Pass a client's socket, and the bytes already read from it, to the live process. Raises OSError if it is away."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(HAND_OVER_SECONDS)
        channel.connect(str(settings.TRAINYARD_LIVE_SOCKET))
        socket.send_fds(channel, [b"+"], [client.fileno()])
        channel.sendall(received)


def _asks_for_events(headers: list[tuple[str, str]]) -> bool:
    return any(name == "ACCEPT" and MEDIA_TYPE in value for name, value in headers)


def _head(req: Any) -> bytes:
    """The request's head again. Its connection ends with the stream, so the client's next request comes to a worker."""
    lines = [f"{req.method} {req.uri} HTTP/{req.version[0]}.{req.version[1]}"]
    lines += [f"{name}: {value}" for name, value in req.headers if name not in CONNECTION_HEADERS]
    lines += ["Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


# --- The live process: uvicorn ----------------------------------------------------------------------------------------


class Probed(Exception):
    """Somebody connected only to see whether anybody listens, as a cluster's probe does."""


class HandedOverProtocol(H11Protocol):
    """uvicorn's HTTP on a connection whose first bytes were read by somebody else."""

    def __init__(self, *, received: bytes, server: uvicorn.Server) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._received = received

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        """Start with the bytes that came with the socket, before it is read from."""
        super().connection_made(transport)
        self.data_received(self._received)


class LiveServer(uvicorn.Server):
    """A uvicorn that listens for handed-over connections instead of new ones."""

    def __init__(self, config: uvicorn.Config, path: Path) -> None:
        super().__init__(config)
        self._path = path
        self._adopting: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the unix socket."""
        await self.lifespan.startup()
        self.servers = []
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())
        self._telling = asyncio.create_task(self._tell())
        self.started = True
        logger.info("serving event streams handed over at %s", self._path)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, end the streams."""
        self._accepting.cancel()
        self._telling.cancel()
        self._listener.close()
        await super().shutdown(sockets)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            channel, _ = await loop.sock_accept(self._listener)
            task = asyncio.create_task(self._adopt(channel))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)

    async def _tell(self) -> None:
        """How many streams are open, once in a while, for whoever watches this console."""
        while True:
            await asyncio.to_thread(signs.give, signs.LIVE, streams=len(self.server_state.connections))
            await asyncio.sleep(SIGN_SECONDS)

    async def _adopt(self, channel: socket.socket) -> None:
        try:
            client, received = await asyncio.to_thread(_receive, channel)
        except Probed:
            return
        except OSError as error:
            logger.warning("a connection was lost while it was handed over: %s", error)
            return
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: HandedOverProtocol(received=received, server=self), client)


def _receive(channel: socket.socket) -> tuple[socket.socket, bytes]:
    """What `hand_over` sent. Raises OSError."""
    with channel:
        channel.settimeout(HAND_OVER_SECONDS)
        received, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not received:
            raise Probed
        if not descriptors:
            raise ConnectionError("no socket came")
        client = socket.socket(fileno=descriptors[0])
        client.setblocking(False)
        parts = []
        while part := channel.recv(65536):
            parts.append(part)
    return client, b"".join(parts)


def serve() -> None:
    """Serve until SIGTERM or SIGINT."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    config = uvicorn.Config(
        "console.asgi:application", lifespan="off", ws="none", log_config=None, access_log=False,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    LiveServer(config, settings.TRAINYARD_LIVE_SOCKET).run()

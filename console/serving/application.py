"""The ASGI application: Django, with limits that protect clients from other clients that are slow or send too much.

A request holds a thread, with its database connection, only while Django works: the body is read before, and the
response is sent afterwards. Uploads are the exception: their views read the body as it arrives.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from contextlib import ExitStack, suppress
from http import HTTPStatus
from typing import Any

from django.conf import settings

from console.accounts.middleware import MONITORING_PATHS
from console.observability import addresses, heartbeats, logs
from console.serving import notebooks, proxy, refusals, shells
from console.serving.exchange import SCOPE_KEY, Exchange, IncomingBody
from console.serving.gate import Scope
from console.serving.handler import Handler
from console.serving.limits import Limit
from console.serving.refusals import Message, Receive, Refused, Send
from console.serving.server import end_with_parent
from console.serving.streams import Streams
from console.serving.threads import Threads

UPLOAD_PATHS = {
    "PUT": re.compile(r"/api/v1/(datasets/[^/]+/archive/|workspaces/[^/]+/files/.+)"),
    "POST": re.compile(r"/api/v1/uploads/([0-9a-f-]{36}/)?"),
    "PATCH": re.compile(r"/api/v1/uploads/[^/]+/"),
}
"""Paths, by method, that accept a body of any size. Their views check access before they read the body."""
LIVENESS_PATH = "/healthz"
HEARTBEAT_SECONDS = 5.0
"""How often this process sends a heartbeat. Metrics count a process without one for 30 seconds as ended."""
SPOOL_BYTES = 64 * 1024
"""A body up to this size is kept in memory, and a larger one in a temporary file. Most forms are smaller."""
CLIENT_CLOSED_REQUEST = 499
"""The status in the access log if the client disconnected before there was a response. nginx logs this number too."""

WEBSOCKET_STATUS = {"websocket.accept": 101, "websocket.close": 403}
"""The status in the access log for a websocket, by the type of the first message that is sent to the browser."""


class ClientDisconnected(Exception):
    """The client closed the connection before the request was complete."""


class Application:
    """The ASGI application of one process. Its limits and threads are those of this process."""

    def __init__(self, handler: Handler) -> None:
        self._respond = handler.respond
        self._pages = Threads(settings.WEB_THREADS, "page")
        # Monitoring has its own threads, so that it works while all other threads are busy. `/healthz` has one alone,
        # because `/readyz` waits as long as a database accepts connections but does not answer.
        self._liveness = Threads(1, "liveness")
        self._monitoring = Threads(1, "monitoring")
        self._uploads = Threads(settings.UPLOAD_THREADS, "upload")
        # Behind a proxy all clients share the proxy's connections, so requests are counted by address too.
        self._request_limit = Limit(settings.MAX_CONNECTIONS_PER_ADDRESS, refusals.TOO_MANY_CONNECTIONS)
        # One address or organization can use at most half of the upload threads, so that none alone blocks all others.
        self._upload_limit = Limit(max(1, settings.UPLOAD_THREADS // 2), refusals.TOO_MANY_UPLOADS)
        self._streams = Streams()
        self._notebooks = notebooks.NotebookForwarder(self._run_django)
        self._shells = shells.ShellConnector(self._run_django)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or websocket, or ASGI's lifespan events of the process."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        serve = self._serve_websocket if scope["type"] == "websocket" else self._serve_request
        response = _RecordedResponse(send)
        started_at = time.perf_counter()
        try:
            with self._request_limit.slot(addresses.rate_limit_key(_client_of(scope))):
                await serve(scope, receive, response.send)
        except Refused as refused:
            if scope["type"] == "http":
                await refused.refusal.send_to(response.send)
            else:
                # The browser gets this code only if the websocket was already accepted, and else the status 403.
                await response.send({"type": "websocket.close", "code": notebooks.NOT_ADMITTED})
        except ClientDisconnected:
            pass  # nobody is left to respond to
        finally:
            logs.log_request(
                method=scope.get("method", "WEBSOCKET"), path=scope["path"], status=response.status,
                seconds=time.perf_counter() - started_at, size=response.size, fields=scope.get(logs.FIELDS_KEY) or {},
                logger="console.access",
            )  # fmt: skip

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Connect a websocket with a notebook or, on the console's host, with a shell. Raises Refused."""
        if (job_id := notebooks.requested_job_id(scope)) is not None:
            await self._notebooks.serve_websocket(job_id, scope, receive, send)
        elif (node_of_job := shells.requested_node(scope)) is not None:
            job_id, node = node_of_job
            await self._shells.serve(job_id, node, scope, receive, send)
        else:
            await receive()  # websocket.connect
            await send({"type": "websocket.close", "code": notebooks.NOT_ADMITTED})

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request: read its body, let Django or a notebook respond, and send the response.

        Raises Refused, ClientDisconnected.
        """
        if (job_id := notebooks.requested_job_id(scope)) is not None:
            address = await self._notebooks.admit(job_id, scope, send)
            if address is not None:
                with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
                    await _read_into(spool, scope, receive, limit=notebooks.MAX_BODY_BYTES)
                    spool.seek(0)
                    await notebooks.forward(address, scope, spool, receive, send)
            return
        exchange = scope[SCOPE_KEY] = Exchange()
        with ExitStack() as resources:
            if (pattern := UPLOAD_PATHS.get(scope["method"])) and pattern.fullmatch(scope["path"]):
                resources.enter_context(self._upload_limit.slot(addresses.rate_limit_key(_client_of(scope))))
                # The view counts the upload under its organization, which is known after authentication only.
                exchange.body = IncomingBody(receive, lambda: self._count_upload(scope, resources))
                resources.callback(exchange.body.close)
                body, threads = b"", self._uploads
            else:
                spool = resources.enter_context(tempfile.SpooledTemporaryFile(SPOOL_BYTES))
                await _read_into(spool, scope, receive, limit=settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
                spool.seek(0)
                body = spool.read()
                threads = self._threads_for(scope["path"])
            messages = await threads.run(self._respond, scope, body)
        # The view of a tool, such as TensorBoard, admitted the request and named the program that responds.
        if exchange.upstream is not None and messages[0]["status"] == HTTPStatus.OK:
            await proxy.forward(exchange.upstream, scope, body, receive, send)
        elif exchange.stream is not None:  # `messages` then holds only the start of the response
            await self._streams.send(exchange.stream, messages[0], _organization_id_of(scope), receive, send)
        else:
            for message in messages:
                await send(message)

    def _threads_for(self, path: str) -> Threads:
        """Return the threads that respond to requests for `path`, except uploads."""
        if path == LIVENESS_PATH:
            return self._liveness
        return self._monitoring if path in MONITORING_PATHS else self._pages

    async def _run_django(self, scope: Scope) -> list[Message]:
        """Return Django's response to a request without a body. Raises Refused."""
        return await self._pages.run(self._respond, scope, b"")

    def _count_upload(self, scope: Scope, resources: ExitStack) -> None:
        """Count an upload under its organization too, because members can have many IP addresses. Raises Refused.

        `resources` stops counting it when the request ends.
        """
        if (organization_id := _organization_id_of(scope)) is not None:
            resources.enter_context(self._upload_limit.slot(("organization", organization_id)))

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Follow ASGI's lifespan protocol: send heartbeats from startup until shutdown."""
        await receive()  # lifespan.startup
        end_with_parent()
        heartbeat = asyncio.create_task(self._send_heartbeats())
        await send({"type": "lifespan.startup.complete"})
        await receive()  # lifespan.shutdown
        heartbeat.cancel()
        with suppress(asyncio.CancelledError):
            await heartbeat
        await send({"type": "lifespan.shutdown.complete"})

    async def _send_heartbeats(self) -> None:
        """Send heartbeats until the task is cancelled. A thread sends each, since Redis may not answer."""
        while True:
            await asyncio.to_thread(heartbeats.send, heartbeats.WEB, streams=self._streams.open_event_streams)
            await asyncio.sleep(HEARTBEAT_SECONDS)


class _RecordedResponse:
    """Passes a response on, and records its status and the size of its body in bytes for the access log."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status, self.size = CLIENT_CLOSED_REQUEST, 0

    async def send(self, message: Message) -> None:
        """Send an ASGI message, and record the status or the size that it has."""
        if self.status == CLIENT_CLOSED_REQUEST:  # there was no response until now
            self.status = message.get("status") or WEBSOCKET_STATUS.get(message["type"], self.status)
        self.size += len(message.get("body", b""))
        await self._send(message)


def _client_of(scope: Scope) -> str:
    """Return the client's IP address, which a trusted proxy forwards; empty for a client on a Unix socket."""
    peer = (scope.get("client") or ("", 0))[0]
    forwarded_for = b",".join(value for name, value in scope["headers"] if name == b"x-forwarded-for").decode("latin-1")
    return addresses.client_address(peer, forwarded_for, settings.TRUSTED_PROXIES) or ""


def _organization_id_of(scope: Scope) -> Any:
    """Return the id of the authenticated organization; None for anonymous clients and before authentication."""
    return (scope.get(logs.FIELDS_KEY) or {}).get("organization")


async def _read_into(
    spool: tempfile.SpooledTemporaryFile[bytes], scope: Scope, receive: Receive, *, limit: int
) -> None:
    """Write a request's whole body to `spool`. Raises Refused if it has more than `limit` bytes, ClientDisconnected."""
    content_length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if content_length.isdigit() and int(content_length) > limit:
        raise Refused(refusals.TOO_LARGE)
    size, is_complete = 0, False  # the bytes are counted, because a chunked body has no Content-Length
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise Refused(refusals.TOO_LARGE)
        spool.write(chunk)
        is_complete = not message.get("more_body", False)

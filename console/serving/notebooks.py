"""Forward requests and websockets to notebooks. Each has a host name of its own, `n<job>` below that of NOTEBOOK_URL.

Customers' code decides every byte that such a host sends, and may come from another member or from a dataset. On an
origin of its own its pages can reach neither the console nor another notebook. Django admits each request by a cookie
of that host (`console.web.notebooks.admit`). The notebook never gets that cookie, and can set none.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import httpx
from django.conf import settings
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.typing import Origin

from console.serving import gate, proxy
from console.serving.exchange import Exchange, NotebookRequest
from console.serving.gate import Scope, header, pinned
from console.serving.limits import Limit
from console.serving.refusals import Message, Receive, Refusal, Refused, Send
from runtime.backends.base import Tunnel
from runtime.errors import RuntimeFault

GATE_PATH = "/notebook-gate/"
"""The path of the view that admits requests to notebooks. It refuses requests that come to this path from outside."""
COOKIE = "__Host-notebook" if settings.HTTPS else "notebook"
"""The cookie by which a notebook's host recognizes a member's browser."""
MAX_BODY_BYTES = 64 * 1024**2
"""The largest body of a request: a notebook with its pictures. JupyterLab sends files in parts of 1 MiB."""
MAX_MESSAGE_BYTES = 16 * 1024**2
"""The largest message of a websocket, such as a cell's output. Each websocket buffers at most two in this process."""
MAX_WEBSOCKETS = 16
"""Most websockets of one notebook in this process: JupyterLab has one for each open kernel and terminal."""
CHUNK_BYTES = 64 * 1024
"""How much of a body is passed on at once."""
CHECK_SECONDS = 10.0
"""The interval of checks whether an open websocket is still admitted: its member may have logged out since."""
NOT_ADMITTED = 1008
"""The code that closes a websocket that is not, or no longer, admitted ("policy violation")."""
CROSS_SITE = Refusal(403, "cross_site", "This request came from another site.")
TOO_MANY_WEBSOCKETS = Refusal(429, "too_many_websockets", "Too many tabs of this notebook are open. Close some.")
REQUEST_HEADERS = proxy.REQUEST_HEADERS | {
    "cache-control", "content-length", "if-match", "origin", "referer", "user-agent", "x-requested-with",
}  # fmt: skip
RESPONSE_HEADERS = proxy.RESPONSE_HEADERS | {
    "cache-control", "content-disposition", "content-encoding", "content-type", "date", "expires", "vary",
}  # fmt: skip
"""Headers that reach the browser. Cookies do not, because they could be set for the console's domain too; nor do CORS
headers, and headers that a browser keeps after the notebook has ended, such as Alt-Svc."""
_HOST = re.compile(r"n([1-9][0-9]{0,17})\.(.+)")


def origin_of(job: int) -> str:
    """Return the origin of a job's notebook, such as `https://n12.notebooks.example.com`."""
    base = urlsplit(settings.NOTEBOOK_URL)
    return f"{base.scheme}://n{job}.{base.netloc}"


def job_of(scope: Scope) -> int | None:
    """Return the job whose notebook's host name a request has; None for every other host."""
    match = _HOST.fullmatch(header(scope, b"host").lower())
    if match is None or not settings.NOTEBOOK_URL or match[2] != urlsplit(settings.NOTEBOOK_URL).netloc.lower():
        return None
    return int(match[1])


class Notebooks:
    """Forwards to notebooks. `run_django` sends a scope, without a body, to Django and returns the response."""

    def __init__(self, run_django: gate.RunDjango) -> None:
        self._run_django = run_django
        self._websockets = Limit(MAX_WEBSOCKETS, TOO_MANY_WEBSOCKETS)

    async def admit(self, job: int, scope: Scope, send: Send) -> Path | Tunnel | None:
        """Return where the notebook answers. Without access, send Django's response and return None. Raises Refused."""
        if _is_cross_site(job, scope):
            raise Refused(CROSS_SITE)
        socket, messages = await self._request_socket(job, scope)
        if socket is None:
            for message in messages:
                await send(message)
        return socket

    async def serve_websocket(self, job: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Connect a websocket with the notebook until one side closes it, or it is no longer admitted."""
        await receive()  # websocket.connect
        if header(scope, b"origin") != origin_of(job):
            raise Refused(CROSS_SITE)
        socket, _messages = await self._request_socket(job, scope)
        if socket is None:
            await send({"type": "websocket.close", "code": NOT_ADMITTED})
            return
        with self._websockets.held(job):
            async with _opened(socket) as path:
                try:
                    async with _connect(path, scope) as notebook:
                        await send({"type": "websocket.accept", "subprotocol": notebook.subprotocol})
                        code = await self._pump(notebook, job, scope, receive, send)
                except (OSError, ValueError, WebSocketException) as error:  # ValueError: a redirect to another host
                    raise Refused(proxy.ENDED) from error
                await send({"type": "websocket.close", "code": code})

    async def _pump(self, notebook: ClientConnection, job: int, scope: Scope, receive: Receive, send: Send) -> int:
        """Pass messages in both directions; return the code to close the browser's websocket with."""

        async def to_browser() -> int:
            with suppress(ConnectionClosed):
                async for data in notebook:
                    name = "text" if isinstance(data, str) else "bytes"
                    await send({"type": "websocket.send", name: data})
            return 1001  # "going away"

        async def to_notebook() -> int:
            with suppress(ConnectionClosed):
                while (message := await receive())["type"] == "websocket.receive":
                    text = message.get("text")
                    await notebook.send(message["bytes"] if text is None else text)
            return 1000

        async def recheck_admission() -> int:
            while True:
                await asyncio.sleep(CHECK_SECONDS)
                with suppress(Refused):  # the console is busy: the next check is soon enough
                    socket, _messages = await self._request_socket(job, scope)
                    if socket is None:
                        return NOT_ADMITTED

        tasks = [asyncio.create_task(each()) for each in (to_browser, to_notebook, recheck_admission)]
        try:
            done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return done.pop().result()

    async def _request_socket(self, job: int, scope: Scope) -> tuple[Path | Tunnel | None, list[Message]]:
        """Return where the notebook answers, None if the browser may not use it, and Django's response."""
        exchange = Exchange(notebook=NotebookRequest(job, scope["path"], scope["query_string"].decode("latin-1")))
        console = urlsplit(settings.TRAINYARD_URL)
        messages = await gate.send_subrequest(
            self._run_django, scope, exchange, path=GATE_PATH, host=console.netloc,
            cookie=f"{COOKIE}={_cookie(scope)}", scheme=console.scheme,
        )  # fmt: skip
        is_admitted = messages[0]["status"] == HTTPStatus.OK
        return exchange.notebook_socket if is_admitted else None, messages


async def forward(socket: Path | Tunnel, scope: Scope, body: IO[bytes], receive: Receive, send: Send) -> None:
    """Send the response of the notebook. Raises Refused."""
    content = _chunks(body) if scope["method"] not in {"GET", "HEAD"} else None
    request = proxy.request_of(scope, REQUEST_HEADERS, host=header(scope, b"host").encode(), content=content)
    async with _opened(socket) as path:
        await proxy.relay(path, request, _response_headers, receive, send)


@asynccontextmanager
async def _opened(socket: Path | Tunnel) -> AsyncIterator[str]:
    """Yield the path of a Unix socket on which the notebook answers. Raises Refused."""
    async with AsyncExitStack() as resources:
        if isinstance(socket, Path):
            path = resources.enter_context(pinned(socket))
        else:
            try:
                path = await resources.enter_async_context(socket())
            except RuntimeFault as fault:
                raise Refused(proxy.ENDED) from fault
        yield path


def _connect(path: str, scope: Scope) -> connect:
    query = scope["query_string"].decode("latin-1")
    host = header(scope, b"host")
    return connect(
        f"ws://{host}{scope['raw_path'].decode('latin-1')}{'?' if query else ''}{query}",
        unix=True,
        path=path,
        origin=Origin(header(scope, b"origin")),
        subprotocols=scope["subprotocols"] or None,
        compression=None,  # it hardly leaves this machine
        max_size=MAX_MESSAGE_BYTES,
        max_queue=1,  # a notebook may send faster than its browser reads
    )


async def _chunks(body: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := body.read(CHUNK_BYTES):
        yield chunk


def _response_headers(response: httpx.Response) -> proxy.Headers:
    """Return the headers for the browser. Raises Refused for a redirect to another host."""
    headers = [(name, value) for name, value in response.headers.multi_items() if name in RESPONSE_HEADERS]
    if location := response.headers.get("location"):
        if not location.startswith("/") or location.startswith(("//", "/\\")):
            raise Refused(proxy.ENDED)
        headers.append(("location", location))
    return proxy.encoded(
        [
            *headers,
            ("content-security-policy", "frame-ancestors 'self'"),
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "same-origin"),
            ("cross-origin-opener-policy", "same-origin"),
            ("cross-origin-resource-policy", "same-origin"),
        ]
    )


def _is_cross_site(job: int, scope: Scope) -> bool:
    """Return whether another site's page sent the request. It may link to a notebook, but not load or change parts."""
    if scope["method"] not in {"GET", "HEAD", "OPTIONS"}:
        return header(scope, b"origin") != origin_of(job)
    site = header(scope, b"sec-fetch-site") or "none"
    return site not in {"same-origin", "none"} and header(scope, b"sec-fetch-mode") != "navigate"


def _cookie(scope: Scope) -> str:
    """Return the value of COOKIE in a request; empty without one."""
    for part in header(scope, b"cookie").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""

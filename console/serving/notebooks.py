"""Forward requests and websockets to notebooks, each of which has its own host name.

The notebook of job 12 has the host name `n12.notebooks.example.com` if NOTEBOOK_URL is `https://notebooks.example.com`.
Customers' code decides every byte that a notebook sends. Because each notebook is an origin of its own, browsers keep
its pages from reading the console or another notebook.

Before the server forwards a request, it asks Django whether the browser may use the notebook: it sends a subrequest to
the view `console.web.notebooks.admit`. The view checks a cookie of the notebook's host. The notebook itself never
receives this cookie, and cannot set cookies. Its JupyterLab asks for no password or token, because browsers reach it
only through this module. The run's own processes can reach it too.
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
from console.serving.gate import Scope, header, verified_socket
from console.serving.limits import Limit
from console.serving.refusals import Message, Receive, Refusal, Refused, Send
from runtime.backends.base import Tunnel
from runtime.errors import RuntimeFault

GATE_PATH = "/notebook-gate/"
"""The path of the view that admits requests to notebooks. It reads the NotebookRequest that only a subrequest carries
(`Exchange.notebook`), so it answers 404 to a browser."""
COOKIE = "__Host-notebook" if settings.HTTPS else "notebook"
"""The name of the cookie that identifies a member's browser on a notebook's host. The view sets it. Browsers accept the
prefix `__Host-` only over HTTPS."""
MAX_BODY_BYTES = 64 * 1024**2
"""The largest body of a request. The largest that JupyterLab sends is a saved notebook with the pictures in its
outputs; it uploads other files in parts of 1 MiB."""
MAX_MESSAGE_BYTES = 16 * 1024**2
"""The largest message of a websocket, such as a picture in a cell's output. A websocket holds at most two messages in
memory: one that is being sent and one that waits (`max_queue`)."""
MAX_WEBSOCKETS = 16
"""How many websockets of one notebook this process serves. JupyterLab opens one for each kernel and terminal."""
CHUNK_BYTES = 64 * 1024
"""How much of a request's body is read from the temporary file and sent to the notebook at once."""
CHECK_SECONDS = 10.0
"""How often Django is asked whether an open websocket is still admitted. After a log-out it stays open this long."""
NOT_ADMITTED = 1008
"""The websocket close code ("policy violation") for a browser that may not, or may no longer, use the notebook."""
CROSS_SITE = Refusal(403, "cross_site", "This request came from another site.")
TOO_MANY_WEBSOCKETS = Refusal(429, "too_many_websockets", "Too many tabs of this notebook are open. Close some.")
REQUEST_HEADERS = proxy.REQUEST_HEADERS | {
    "cache-control", "content-length", "if-match", "if-modified-since", "if-none-match", "origin", "referer",
    "user-agent", "x-requested-with",
}  # fmt: skip
"""Request headers that are passed on to the notebook: those that JupyterLab and its extensions read. Cookies and
`Authorization` are missing, because customers' code must not learn credentials of a member."""
RESPONSE_HEADERS = proxy.RESPONSE_HEADERS | {
    "cache-control", "content-disposition", "content-encoding", "content-type", "date", "etag", "expires",
    "last-modified", "vary",
}  # fmt: skip
"""Response headers that are passed on to the browser. `Set-Cookie` is missing, because a cookie could apply to the
console's domain. CORS headers are missing, because no other origin may read a notebook. So are headers that a browser
remembers after the notebook has ended, such as `Alt-Svc`."""
_HOST = re.compile(r"n([1-9][0-9]{0,17})\.(.+)")
"""A notebook's host name. A job's id has at most 18 digits here, so that it fits PostgreSQL's bigint."""


def origin_of(job_id: int) -> str:
    """Return the origin of a job's notebook, such as `https://n12.notebooks.example.com`."""
    base = urlsplit(settings.NOTEBOOK_URL)
    return f"{base.scheme}://n{job_id}.{base.netloc.lower()}"  # in lower case, as browsers send it


def requested_job_id(scope: Scope) -> int | None:
    """Return the id of the job whose notebook has the request's host name; None if no notebook has it."""
    match = _HOST.fullmatch(header(scope, b"host").lower())
    if match is None or not settings.NOTEBOOK_URL or match[2] != urlsplit(settings.NOTEBOOK_URL).netloc.lower():
        return None
    return int(match[1])


class NotebookForwarder:
    """Asks Django to admit requests to notebooks, and connects the websockets of admitted browsers."""

    def __init__(self, run_django: gate.RunDjango) -> None:
        self._run_django = run_django
        self._websocket_limit = Limit(MAX_WEBSOCKETS, TOO_MANY_WEBSOCKETS)

    async def admit(self, job_id: int, scope: Scope, send: Send) -> Path | Tunnel | None:
        """Return where the notebook answers, to which the caller forwards the request. Raises Refused.

        If the browser may not use the notebook, send Django's error page and return None.
        """
        if _is_cross_site(job_id, scope):
            raise Refused(CROSS_SITE)
        address, messages = await self._request_admission(job_id, scope)
        if address is None:
            for message in messages:
                await send(message)
        return address

    async def serve_websocket(self, job_id: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass messages between browser and notebook, until one of them disconnects or the browser loses admission.

        Raises Refused.
        """
        await receive()  # websocket.connect
        if header(scope, b"origin") != origin_of(job_id):
            raise Refused(CROSS_SITE)
        address, _messages = await self._request_admission(job_id, scope)
        if address is None:
            await send({"type": "websocket.close", "code": NOT_ADMITTED})
            return
        with self._websocket_limit.slot(job_id):
            async with _socket_path(address) as socket_path:
                try:
                    async with _connect(socket_path, scope) as notebook:
                        await send({"type": "websocket.accept", "subprotocol": notebook.subprotocol})
                        close_code = await self._pass_messages(notebook, job_id, scope, receive, send)
                except (OSError, ValueError, WebSocketException) as error:  # ValueError: a redirect to another host
                    raise Refused(proxy.TOOL_ENDED) from error
                await send({"type": "websocket.close", "code": close_code})

    async def _pass_messages(
        self, notebook: ClientConnection, job_id: int, scope: Scope, receive: Receive, send: Send
    ) -> int:
        """Pass messages in both directions; return the code with which to close the browser's websocket."""

        async def to_browser() -> int:
            with suppress(ConnectionClosed):
                async for data in notebook:
                    name = "text" if isinstance(data, str) else "bytes"
                    await send({"type": "websocket.send", name: data})
            return 1001  # "going away": the notebook has ended

        async def to_notebook() -> int:
            with suppress(ConnectionClosed):
                while (message := await receive())["type"] == "websocket.receive":
                    text = message.get("text")
                    await notebook.send(message["bytes"] if text is None else text)
            return 1000  # "normal closure": the browser has closed its websocket

        async def recheck_admission() -> int:
            while True:
                await asyncio.sleep(CHECK_SECONDS)
                with suppress(Refused):  # the console is busy; the next check follows in CHECK_SECONDS
                    address, _messages = await self._request_admission(job_id, scope)
                    if address is None:
                        return NOT_ADMITTED

        tasks = [asyncio.create_task(function()) for function in (to_browser, to_notebook, recheck_admission)]
        try:
            done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return done.pop().result()

    async def _request_admission(self, job_id: int, scope: Scope) -> tuple[Path | Tunnel | None, list[Message]]:
        """Ask Django whether the browser may use the notebook. Raises Refused if the console is busy.

        Return where the notebook answers, or None if the browser may not use it; and Django's response.
        """
        exchange = Exchange(notebook=NotebookRequest(job_id, scope["path"], scope["query_string"].decode("latin-1")))
        console = urlsplit(settings.TRAINYARD_URL)
        messages = await gate.send_subrequest(
            self._run_django, scope, exchange, path=GATE_PATH, host=console.netloc,
            cookie=f"{COOKIE}={_notebook_cookie(scope)}", scheme=console.scheme,
        )  # fmt: skip
        is_admitted = messages[0]["status"] == HTTPStatus.OK
        return exchange.notebook_socket if is_admitted else None, messages  # the view has set `notebook_socket`


async def forward(address: Path | Tunnel, scope: Scope, body: IO[bytes], receive: Receive, send: Send) -> None:
    """Send an admitted request to the notebook, and its response to the browser.

    Raises Refused if the notebook does not answer.
    """
    content = _read_chunks(body) if scope["method"] not in {"GET", "HEAD"} else None
    request = proxy.request_of(scope, REQUEST_HEADERS, host=header(scope, b"host").encode(), content=content)
    async with _socket_path(address) as socket_path:
        await proxy.relay(socket_path, request, _select_headers, receive, send)


@asynccontextmanager
async def _socket_path(address: Path | Tunnel) -> AsyncIterator[str]:
    """Yield the path of a Unix socket on which the notebook answers. Raises Refused.

    `address` is the path of a socket in a run folder on this machine, or a tunnel to another machine.
    """
    async with AsyncExitStack() as resources:
        if isinstance(address, Path):
            path = resources.enter_context(verified_socket(address))
        else:
            try:
                path = await resources.enter_async_context(address())
            except RuntimeFault as fault:
                raise Refused(proxy.TOOL_ENDED) from fault
        yield path


def _connect(socket_path: str, scope: Scope) -> connect:
    """Return the websocket connection to the notebook, to be opened with `async with`."""
    query = scope["query_string"].decode("latin-1")
    host = header(scope, b"host")
    return connect(
        f"ws://{host}{scope['raw_path'].decode('latin-1')}{'?' if query else ''}{query}",
        unix=True,
        path=socket_path,
        origin=Origin(header(scope, b"origin")),
        subprotocols=scope["subprotocols"] or None,
        compression=None,  # most messages are small, and large ones, such as pictures, are compressed already
        max_size=MAX_MESSAGE_BYTES,
        max_queue=1,  # when the browser reads slowly, the notebook waits, and this process buffers one message
    )


async def _read_chunks(body: IO[bytes]) -> AsyncIterator[bytes]:
    """Yield a body in parts, because httpx reads files only for synchronous requests."""
    while chunk := body.read(CHUNK_BYTES):
        yield chunk


def _select_headers(response: httpx.Response) -> proxy.Headers:
    """Return the headers for the browser. Raises Refused for a redirect to another host.

    Such a redirect could lead to a page that imitates the console's log-in. JupyterLab redirects only within its own
    host, so other code must have sent it; the browser gets the error for a notebook that has ended.
    """
    headers = [(name, value) for name, value in response.headers.multi_items() if name in RESPONSE_HEADERS]
    if location := response.headers.get("location"):
        if not location.startswith("/") or location.startswith(("//", "/\\")):  # browsers read `/\` like `//`
            raise Refused(proxy.TOOL_ENDED)
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


def _is_cross_site(job_id: int, scope: Scope) -> bool:
    """Return whether a page of another origin sent the request, other than by a link to the notebook.

    Requests that change something must name the notebook's origin. For others, browsers tell the sender's site in
    `Sec-Fetch-Site`; clients that are not browsers omit it.
    """
    if scope["method"] not in {"GET", "HEAD", "OPTIONS"}:
        return header(scope, b"origin") != origin_of(job_id)
    site = header(scope, b"sec-fetch-site") or "none"
    return site not in {"same-origin", "none"} and header(scope, b"sec-fetch-mode") != "navigate"


def _notebook_cookie(scope: Scope) -> str:
    """Return the value of the cookie COOKIE in a request; empty without one."""
    for part in header(scope, b"cookie").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""

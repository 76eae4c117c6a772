"""Forward a request to a tool: a program in a sandbox, which listens on a Unix socket.

A tool is not trusted, and shares its origin with the console. The tool gets few of the request's headers, and never a
cookie or credential. The browser gets the body, the status and a few headers of the tool's response. The headers that
decide what a browser may do with the body are the console's own. Redirects are refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import httpx

from console.serving.exchange import Upstream
from console.serving.refusals import Message, Receive, Refusal, Refused, Send
from console.serving.streams import send_until_disconnect

Headers = list[tuple[bytes, bytes]]

TIMEOUT = httpx.Timeout(90.0, connect=5.0)
"""In seconds. A tool that has just started takes some seconds for its first response, on a busy machine longer."""
ENDED = Refusal(502, "tool_ended", "This tool has ended or does not answer. Open it again.")
REQUEST_HEADERS = frozenset(
    {"accept", "accept-encoding", "accept-language", "content-type", "range", "if-none-match", "if-modified-since"}
)
RESPONSE_HEADERS = frozenset({"content-length", "content-range", "accept-ranges", "etag", "last-modified"})
DATA_TYPES = frozenset({"application/json", "text/plain", "text/csv", "image/png", "image/jpeg", "image/gif",
                        "image/webp", "image/bmp", "audio/wav", "audio/mpeg", "audio/ogg", "audio/flac",
                        "font/woff2"})  # fmt: skip
"""Media types of data that a browser shows and never executes. Other data is sent as `application/octet-stream`."""
PROGRAM_TYPES = frozenset({"text/html", "text/css", "text/javascript", "application/javascript", "application/wasm",
                           "image/svg+xml", "image/x-icon", "image/vnd.microsoft.icon"})  # fmt: skip
"""Media types that only a tool's own files may have, besides those of data."""


async def forward(upstream: Upstream, scope: Mapping[str, Any], body: bytes, receive: Receive, send: Send) -> None:
    """Send the tool's response to the request. Raises Refused if the tool does not respond, or redirects."""

    def headers(response: httpx.Response) -> Headers:
        if response.is_redirect:
            raise Refused(ENDED)
        return _response_headers(upstream, scope["path"], response.headers)

    request = request_of(scope, REQUEST_HEADERS, host=b"localhost", content=body or None)
    await relay(str(upstream.socket), request, headers, receive, send)


def request_of(
    scope: Mapping[str, Any],
    passed_headers: frozenset[str],
    *,
    host: bytes,
    content: bytes | AsyncIterator[bytes] | None,
) -> httpx.Request:
    """Return the request of an ASGI scope for a program: with this host and body, and with `passed_headers` only."""
    path, query = scope["raw_path"], scope["query_string"]
    headers = [(name, value) for name, value in scope["headers"] if name.decode("latin-1").lower() in passed_headers]
    return httpx.Request(
        scope["method"],
        httpx.URL("http://localhost", raw_path=path + (b"?" + query if query else b"")),
        headers=[*headers, (b"host", host)],
        content=content,
    )


async def relay(
    socket: str,
    request: httpx.Request,
    response_headers: Callable[[httpx.Response], Headers],
    receive: Receive,
    send: Send,
) -> None:
    """Send a program's response, with other headers, as it arrives. The program listens on a Unix socket.

    Raises Refused if it does not respond. `response_headers` may raise Refused too.
    """
    transport = httpx.AsyncHTTPTransport(uds=socket, verify=False)  # it uses no TLS
    async with httpx.AsyncClient(transport=transport, timeout=TIMEOUT, trust_env=False) as client:
        try:
            response = await client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise Refused(ENDED) from error
        try:
            start: Message = {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": response_headers(response),
            }
            with suppress(httpx.HTTPError):  # the program has ended: the server closes the connection
                await send_until_disconnect(_chunks(response), start, receive, send)
        finally:
            await response.aclose()


async def _chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    async for chunk in response.aiter_raw():
        yield chunk


def _response_headers(upstream: Upstream, path: str, headers: httpx.Headers) -> Headers:
    """Return the headers for the browser: RESPONSE_HEADERS of the tool's, and the console's own."""
    media_type, _, parameters = headers.get("content-type", "").partition(";")
    media_type = media_type.strip().lower()
    allowed = DATA_TYPES | PROGRAM_TYPES if upstream.is_own(path) else DATA_TYPES
    content_type = media_type if media_type in allowed else "application/octet-stream"
    if content_type.startswith("text/") and parameters.strip().lower() == "charset=utf-8":
        content_type += "; charset=utf-8"
    tool_headers = [(name, value) for name, value in headers.items() if name in RESPONSE_HEADERS]
    if headers.get("content-encoding") in {"gzip", "br", "deflate", "zstd"}:
        tool_headers.append(("content-encoding", headers["content-encoding"]))
    console_headers = {
        "content-type": content_type,
        "content-security-policy": upstream.content_security_policy,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        # The console's pages send `same-origin`, so a tool's page keeps no access to a window that opens one of them.
        "cross-origin-opener-policy": "unsafe-none",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "private, no-store",
    }
    return encoded([*tool_headers, *console_headers.items()])


def encoded(headers: Iterable[tuple[str, str]]) -> Headers:
    """Return headers as an ASGI server sends them."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]

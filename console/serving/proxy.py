"""Forward a request to a tool, such as TensorBoard: a program in a sandbox, which listens on a Unix socket.

A tool shares its origin with the console, but is not trusted. The tool gets few of the request's headers, and never a
cookie or credential. The browser gets the body, the status and a few headers of the tool's response. The headers that
decide what a browser may do with the body are set by the console. Redirects are refused.

`console.serving.notebooks` uses `request_of` and `relay` for notebooks, which have origins of their own.
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
"""Names and values of headers, as ASGI has them."""

TIMEOUT = httpx.Timeout(90.0, connect=5.0)
"""In seconds. On a busy machine a tool that has just started may take a minute for its first response. A connection to
a Unix socket takes no time; five seconds mean that the tool hangs."""
TOOL_ENDED = Refusal(502, "tool_ended", "This tool has ended or does not answer. Open it again.")
TOOL_REDIRECTS = Refusal(502, "tool_redirects", "This tool answered with a redirect, which is not passed on.")
REQUEST_HEADERS = frozenset({"accept", "accept-encoding", "accept-language", "content-type", "range"})
"""Request headers that are passed on to the tool: for content negotiation and ranges."""
RESPONSE_HEADERS = frozenset({"content-length", "content-range", "accept-ranges"})
"""Response headers that are passed on to the browser: they describe the body, and cannot change what it may do."""
DATA_TYPES = frozenset({"application/json", "text/plain", "text/csv", "image/png", "image/jpeg", "image/gif",
                        "image/webp", "image/bmp", "audio/wav", "audio/mpeg", "audio/ogg", "audio/flac",
                        "font/woff2"})  # fmt: skip
"""Media types that a browser shows and never executes. Customers' data of any other type, such as HTML, is sent as
`application/octet-stream`, which a browser only downloads."""
PROGRAM_TYPES = frozenset({"text/html", "text/css", "text/javascript", "application/javascript", "application/wasm",
                           "image/svg+xml", "image/x-icon", "image/vnd.microsoft.icon"})  # fmt: skip
"""Media types that a browser may execute, and those of icons. Only a tool's own files may have them."""


async def forward(upstream: Upstream, scope: Mapping[str, Any], body: bytes, receive: Receive, send: Send) -> None:
    """Forward a request to a tool, and send its response. Raises Refused if the tool does not respond or redirects."""

    def headers(response: httpx.Response) -> Headers:
        if response.has_redirect_location:  # it could lead the browser out of the tool's pages
            raise Refused(TOOL_REDIRECTS)
        return _select_headers(upstream, scope["path"], response.headers)

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
    socket_path: str,
    request: httpx.Request,
    response_headers: Callable[[httpx.Response], Headers],
    receive: Receive,
    send: Send,
) -> None:
    """Send `request` to the program that listens at `socket_path`, and pass its response on while it arrives.

    `response_headers` returns the headers for the browser, or raises Refused. Raises Refused if the program does not
    respond.
    """
    # There is no TLS on a Unix socket. `verify=False` only keeps httpx from loading certificates for each request.
    transport = httpx.AsyncHTTPTransport(uds=socket_path, verify=False)
    async with httpx.AsyncClient(transport=transport, timeout=TIMEOUT, trust_env=False) as client:
        try:
            response = await client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise Refused(TOOL_ENDED) from error
        response.headers.encoding = "latin-1"  # it has a character for each byte, so `encoded` returns the same bytes
        try:
            start: Message = {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": response_headers(response),
            }
            # If the program ends amid the response, uvicorn closes the connection, so the browser notices.
            with suppress(httpx.HTTPError):
                await send_until_disconnect(_read_chunks(response), start, receive, send)
        finally:
            await response.aclose()


async def _read_chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the body as the program sent it, also if it is compressed."""
    async for chunk in response.aiter_raw():
        yield chunk


def _select_headers(upstream: Upstream, path: str, headers: httpx.Headers) -> Headers:
    """Return the headers for the browser: the tool's own that are in RESPONSE_HEADERS, and the console's."""
    media_type, _, parameters = headers.get("content-type", "").partition(";")
    media_type = media_type.strip().lower()
    allowed = DATA_TYPES | PROGRAM_TYPES if upstream.is_tool_file(path) else DATA_TYPES
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
        # The console's pages send `same-origin`. Because this value differs, a browser separates the windows of a
        # tool's page and a console's page, even if one has opened the other: no script can reach across.
        "cross-origin-opener-policy": "unsafe-none",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "private, no-store",
    }
    return encoded([*tool_headers, *console_headers.items()])


def encoded(headers: Iterable[tuple[str, str]]) -> Headers:
    """Return headers as bytes, as ASGI needs them."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]

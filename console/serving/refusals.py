"""Error responses that the server sends without Django, to clients that are too slow or exceed a limit.

Their bodies have the format of the API's errors (`console.api`). Their sentences are not translated, because the
client's language is known only to Django.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
"""The types of ASGI (https://asgi.readthedocs.io): a message, and the callables that receive and send one."""


@dataclass(frozen=True)
class Refusal:
    """An error response. `retry_after` is the value of the header Retry-After in seconds; 0: there is none."""

    status: int
    code: str
    message: str
    retry_after: int = 0

    @property
    def body(self) -> bytes:
        """Return the JSON body."""
        return json.dumps({"code": self.code, "message": self.message}).encode()

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers as bytes, as ASGI needs them."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self.body)).encode())]
        return [*headers, (b"retry-after", str(self.retry_after).encode())] if self.retry_after else headers

    @property
    def http_bytes(self) -> bytes:
        """Return the response as HTTP/1.1 bytes with `Connection: close`, for use outside ASGI."""
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in self.headers]
        return b"\r\n".join([*lines, b"", self.body])

    async def send_to(self, send: Send) -> None:
        """Send the response through an ASGI server."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


class Refused(Exception):
    """The request is refused, with the error response `refusal`. The ASGI application catches it and sends it."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(refusal.message)


TOO_SLOW = Refusal(408, "request_timeout", "The request arrived too slowly. Send it again.", retry_after=1)
TOO_LARGE = Refusal(413, "too_large", "The request is too large.")
TOO_MANY_CONNECTIONS = Refusal(
    429,
    "too_many_connections",
    "Too many connections are open from your address. Close some and try again.",
    retry_after=10,
)
TOO_MANY_STREAMS = Refusal(
    429, "too_many_streams", "Your organization has too many live views and downloads open. Close some.", retry_after=10
)
TOO_MANY_UPLOADS = Refusal(
    429, "too_many_uploads", "Too many uploads are in progress from your address. Wait for one to end.", retry_after=10
)
BUSY = Refusal(503, "busy", "The console is busy. Try again in a moment.", retry_after=5)

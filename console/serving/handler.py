"""Django's request handler for `Application`: it responds to a request from start to end in one thread.

Django's own ASGI handler starts each request in the event loop, and switches between the loop and a thread several
times, so that views can be asynchronous. The console has no asynchronous views, and the switches would cost CPU time at
each request.

Therefore `Handler` uses methods that Django does not document: `load_middleware`, `create_request` and `get_response`.
The documented `get_asgi_application` makes these switches. The documented `get_wsgi_application` does not, but it would
need each ASGI request translated into a WSGI environment. `tests/console/test_serving.py` fails if an update of Django
breaks `Handler`.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any, cast

from django.core import signals
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.http import HttpResponse, HttpResponseBase
from django.urls import set_script_prefix

from console.serving.refusals import Message


class Handler(ASGIHandler):
    """Django's handler of ASGI requests with a synchronous chain of middleware."""

    def load_middleware(self, is_async: bool = False) -> None:
        """Load the middleware for `get_response`, which runs in the caller's thread."""
        super().load_middleware(is_async=False)

    def respond(self, scope: dict[str, Any], body: bytes) -> list[Message]:
        """Return the ASGI messages of the response. For a stream only its head: the server sends `Exchange.stream`."""
        set_script_prefix(get_script_prefix(scope))
        signals.request_started.send(sender=type(self), scope=scope)
        request, error_response = self.create_request(scope, BytesIO(body))  # an error response if it cannot be parsed
        # RequestMiddleware replaced a stream by an empty response with its headers, so every response has `content`.
        response = cast("HttpResponse", error_response if request is None else self.get_response(request))
        try:
            return [
                {"type": "http.response.start", "status": response.status_code, "headers": _headers(response)},
                {"type": "http.response.body", "body": response.content},
            ]
        finally:
            response.close()


def _headers(response: HttpResponseBase) -> list[tuple[bytes, bytes]]:
    """Return the headers and cookies as bytes, as ASGI needs them."""
    headers = [(name.encode("ascii"), value.encode("latin-1")) for name, value in response.items()]
    return headers + [(b"Set-Cookie", cookie.OutputString().encode("ascii")) for cookie in response.cookies.values()]

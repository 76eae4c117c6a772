"""What is noted of every request: its id, its log line, how long it took, its span.

The one rule: this stands before every other middleware, and changes nothing of an answer but the header with the id.
Pages and API are logged by gunicorn, which knows when an answer was sent whole; event streams by `console.asgi`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase

from billing import webhooks
from console.operations import context, logs, tracing
from console.operations.health import live, ready
from console.operations.metrics import metrics
from console.operations.tally import HTTP_SECONDS, HTTP_TOTAL, tally

HEADER = "X-Request-Id"
IN_META = "HTTP_X_REQUEST_ID"
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
UNKNOWN = "unknown"
"""The route of what no address of ours answers: its path is a stranger's, and would be a label."""


class RequestMiddleware:
    """Binds the request's id, measures, and answers probes at once."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Pass the request on; its answer carries its id."""
        started = time.perf_counter()
        number = context.request_id(request.META.get(IN_META, ""))
        with context.bound(request_id=number) as fields:
            logs.place_of(request)[logs.BOUND] = fields
            response = self._traced(request, fields) if tracing.is_on() else self._answer(request)
            response[HEADER] = number
            _measure(request, response, time.perf_counter() - started)
        return response

    def _traced(self, request: HttpRequest, fields: dict[str, context.Value]) -> HttpResponseBase:
        """The answer, in a span. A stranger's trace is linked to, not joined: who is sampled is for us to say."""
        offered = tracing.sane(request.META.get("HTTP_TRACEPARENT"))
        with tracing.span(str(request.method), kind="server", link=offered) as mark:
            if trace := tracing.trace_id():
                fields["trace_id"] = trace
            response = self._answer(request)
            about = {f"trainyard.{name}": value for name, value in context.fields().items()}
            mark.set(**about, **{"http.request.method": str(request.method), "http.route": route_of(request)})
            mark.set(**{"http.response.status_code": response.status_code})
            if response.status_code >= 500:
                mark.fail(f"HTTP {response.status_code}")
        return response

    def _answer(self, request: HttpRequest) -> HttpResponseBase:
        """Probes and scrapers come by address, not by name, and without a session: no other middleware is for them."""
        view = PROBES.get(request.path_info)
        if view and settings.SESSION_COOKIE_NAME not in request.COOKIES:
            return view(request)
        return self.get_response(request)


PROBES: dict[str, Callable[[HttpRequest], HttpResponseBase]] = {
    "/healthz": live,
    "/readyz": ready,
    "/metrics": metrics,
}


def route_of(request: HttpRequest) -> str:
    """The address as its pattern, without what a customer filled in. Some are answered before any pattern is tried."""
    if request.path_info in PROBES or request.path_info == webhooks.PATH:
        return request.path_info.lstrip("/")
    if request.path_info.startswith(settings.STATIC_URL):
        return settings.STATIC_URL.lstrip("/")
    match = request.resolver_match
    return str(match.route) if match else UNKNOWN


def _measure(request: HttpRequest, response: HttpResponseBase, seconds: float) -> None:
    method, route = request.method if request.method in METHODS else "other", route_of(request)
    tally.count(HTTP_TOTAL, route=route, method=method, status=str(response.status_code))
    if not response.streaming or not response.headers.get("Content-Type", "").startswith("text/event-stream"):
        tally.observe(HTTP_SECONDS, seconds, route=route, method=method)

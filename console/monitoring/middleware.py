"""The first middleware. It gives each request an id, context fields and a span, and counts it.

It answers health checks (MONITORING_VIEWS), and hands streaming responses to the server (`_detach_stream`). The access
log is written by `console.serving`, which knows when a response was sent completely.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from opentelemetry.trace import SpanKind

from console.monitoring.health import live, ready
from console.monitoring.metrics import metrics
from console.observability import addresses, context, logs, tracing
from console.observability.counters import HTTP_SECONDS, HTTP_TOTAL, buffer
from console.serving.exchange import exchange_of, is_event_stream

REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID_META_KEY = "HTTP_X_REQUEST_ID"
"""The key of the same header in Django's `request.META`."""
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
"""The methods that are labels of metrics; others are counted as `other`, because clients could invent any number."""
UNKNOWN = "unknown"
"""The label of metrics for every path without a route, because clients could invent any number of paths."""


class RequestMiddleware:
    """Prepares each request and measures it, as the module's docstring describes."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Respond to a request; a header of the response has the request's id."""
        started_at = time.perf_counter()
        # The client's id if it is valid, else a new one.
        request_id = context.request_id(request.META.get(REQUEST_ID_META_KEY, ""))
        client = addresses.resolve_client(request.META)
        with context.bound(request_id=request_id, client=client) as fields:
            logs.request_scope(request)[logs.FIELDS_KEY] = fields  # for the server's access log
            response = self._respond_in_span(request, fields) if tracing.is_on() else self._respond(request)
            response[REQUEST_ID_HEADER] = request_id
            _measure(request, response, time.perf_counter() - started_at)
        return _detach_stream(request, response)

    def _respond_in_span(self, request: HttpRequest, fields: dict[str, context.Value]) -> HttpResponseBase:
        """Respond within a new span that links to the client's span. Add the trace's id to `fields` for the log.

        If the client's span were the parent, clients would decide which of the console's traces are sampled.
        """
        client_traceparent = tracing.valid_traceparent(request.META.get("HTTP_TRACEPARENT"))
        with tracing.span(str(request.method), kind=SpanKind.SERVER, link=client_traceparent) as span:
            if trace := tracing.trace_id():
                fields["trace_id"] = trace
            response = self._respond(request)
            attributes = {f"trainyard.{name}": value for name, value in context.fields().items()}
            span.set_attributes(
                {
                    **attributes,
                    "http.request.method": str(request.method),
                    "http.route": route_of(request),
                    "http.response.status_code": response.status_code,
                }
            )
            if response.status_code >= 500:
                tracing.mark_failed(span, f"HTTP {response.status_code}")
        return response

    def _respond(self, request: HttpRequest) -> HttpResponseBase:
        """Return the response. Requests to MONITORING_VIEWS skip the other middleware.

        Probes of Kubernetes and Prometheus use the address of a pod as Host header, which ALLOWED_HOSTS would refuse.
        A request with a session does not skip them, so that `/readyz` can show details to staff.
        """
        view = MONITORING_VIEWS.get(request.path_info)
        if view and settings.SESSION_COOKIE_NAME not in request.COOKIES:
            return view(request)
        return self.get_response(request)


MONITORING_VIEWS: dict[str, Callable[[HttpRequest], HttpResponseBase]] = {
    "/healthz": live,
    "/readyz": ready,
    "/metrics": metrics,
}
"""The views for Kubernetes's probes and for Prometheus, by their path."""


def route_of(request: HttpRequest) -> str:
    """Return the request's URL pattern, which has no ids, as a label of metrics; UNKNOWN if no pattern matched."""
    if request.path_info in MONITORING_VIEWS:
        return request.path_info.lstrip("/")
    if request.path_info.startswith(settings.STATIC_URL):
        return settings.STATIC_URL.lstrip("/")
    match = request.resolver_match
    return str(match.route) if match else UNKNOWN


def _measure(request: HttpRequest, response: HttpResponseBase, seconds: float) -> None:
    """Count the request, and how long Django took to respond."""
    method, route = request.method if request.method in METHODS else "other", route_of(request)
    buffer.count(HTTP_TOTAL, route=route, method=method, status=str(response.status_code))
    # The events of a stream follow after this time, for as long as its page is open.
    if not is_event_stream(response):
        buffer.observe(HTTP_SECONDS, seconds, route=route, method=method)


def _detach_stream(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """Hand a streaming response to the server, and return a response with its status and headers, but no content.

    The server sends the stream after Django is done with the request, so that a slow client holds no thread. It finds
    the stream in the request's `Exchange`. Without an Exchange, as in Django's test client, return `response` itself.
    """
    exchange = exchange_of(request)
    if exchange is None or not isinstance(response, StreamingHttpResponse):
        return response
    exchange.stream = response
    head = HttpResponse(status=response.status_code, headers=dict(response.headers))
    head.cookies = response.cookies
    return head

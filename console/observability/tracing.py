"""OpenTelemetry spans, from an order to its ranks. Without an OTLP endpoint the SDK is not loaded and spans do nothing.

A span context is passed on as a W3C `traceparent`: in a message's header, on a job's row, in a rank's environment.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, NoOpTracerProvider, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[0-3]")
TRACE_ID, SPAN_ID = slice(3, 35), slice(36, 52)
"""Where a traceparent has the ids of its trace and its span, in hexadecimal."""
NANOSECONDS_PER_SECOND = 1_000_000_000
FLUSH_MILLISECONDS = 3000
"""How long a process that ends waits for the receiver to take the last spans."""
Attributes = Mapping[str, str | int | float | bool]

_OFF = NoOpTracerProvider()
_PROPAGATOR = TraceContextTextMapPropagator()
_provider: Any = _OFF  # this process's provider; an `otlp.Provider` if traces are on


class TracingMissing(Exception):
    """Traces are configured, but the OpenTelemetry SDK is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, and OpenTelemetry's SDK is not installed. "
            "Install the packages of requirements/production.txt."
        )


@dataclass(frozen=True)
class FinishedSpan:
    """A span that is exported after the fact, with its own `traceparent` and its parent's. Times in Unix seconds."""

    name: str
    traceparent: str
    parent: str
    started_at: float
    finished_at: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""


def start(*, endpoint: str) -> None:
    """Export spans to this OTLP address (without `/v1/traces`) from now on; an empty one switches tracing off.

    Raises TracingMissing.
    """
    global _provider  # noqa: PLW0603  # one for each process, as its logging is
    if not endpoint:
        _provider = _OFF
        return
    try:
        _provider = import_module("console.observability.otlp").provider(endpoint)
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] != "opentelemetry":
            raise
        raise TracingMissing from error


def is_on() -> bool:
    """Return whether spans are exported."""
    return _provider is not _OFF


@contextmanager
def span(
    name: str,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    parent: str = "",
    link: str = "",
    attributes: Attributes | None = None,
) -> Iterator[Span]:
    """Open a span for the block: a child of the current span, or of `parent` if `parent` is in another trace.

    `parent` and `link` are traceparents. If `parent` replaces the current span, the new span links to the latter.
    """
    if not is_on():
        yield INVALID_SPAN
        return
    current = trace.get_current_span().get_span_context()
    parent_context = None
    links = [Link(trace.get_current_span(_context(link)).get_span_context())] if link else []
    if parent and (not current.is_valid or trace.format_trace_id(current.trace_id) != parent[TRACE_ID]):
        parent_context = _context(parent)
        links += [Link(current)] if current.is_valid else []
    tracer = _provider.get_tracer("trainyard")
    with tracer.start_as_current_span(
        name, context=parent_context, kind=kind, attributes=attributes, links=links
    ) as new_span:
        yield new_span


def mark_failed(failed_span: Span, message: str) -> None:
    """Mark a span as failed."""
    failed_span.set_status(Status(StatusCode.ERROR, message))


def current_traceparent() -> str:
    """Return the traceparent of the current span; empty without one, or if it is not sampled."""
    carrier: dict[str, str] = {}
    if trace.get_current_span().get_span_context().trace_flags.sampled:
        _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


def trace_id() -> str:
    """Return the id of the current trace; empty without one."""
    return current_traceparent()[TRACE_ID]


def child_traceparent(traceparent: str, name: str) -> str:
    """Return the traceparent of the child span `name`, which is always the same one; empty without a parent.

    The process that starts a run and the one that exports its span compute the same id.
    """
    if not valid_traceparent(traceparent):
        return ""
    trace_part = traceparent[TRACE_ID]
    span_part = hashlib.sha256(f"{trace_part} {name}".encode()).hexdigest()[:16]
    flags = traceparent[-2:]
    return f"00-{trace_part}-{span_part}-{flags}"


def export(spans: Sequence[FinishedSpan]) -> None:
    """Export spans after the fact, where traces are on."""
    for finished in spans if is_on() else ():
        with _provider.next_span_id(int(finished.traceparent[SPAN_ID], 16)):
            exported = _provider.get_tracer("trainyard").start_span(
                finished.name,
                context=_context(finished.parent),
                attributes=finished.attributes,
                start_time=int(finished.started_at * NANOSECONDS_PER_SECOND),
            )
        if finished.error:
            mark_failed(exported, finished.error)
        exported.end(int(finished.finished_at * NANOSECONDS_PER_SECOND))


def flush() -> None:
    """Export the spans that are still in memory. Call it before the process ends."""
    if is_on():
        _provider.force_flush(FLUSH_MILLISECONDS)


def valid_traceparent(value: Any) -> str:
    """Return a traceparent from outside; empty if it is malformed."""
    return value if isinstance(value, str) and TRACEPARENT.fullmatch(value) else ""


def _context(traceparent: str) -> Context:
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())

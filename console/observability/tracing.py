"""OpenTelemetry spans, from an order to its ranks. Without an OTLP endpoint the SDK is not loaded and spans do nothing.

A W3C `traceparent` carries a trace from one process to the next: in the header of a Celery message, on a job's row, and
in a rank's environment.
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
"""Version 00 of W3C Trace Context: ids of trace and span, which are not all zeros, and flags (sampled, random)."""
TRACE_ID, SPAN_ID = slice(3, 35), slice(36, 52)
"""The positions of the trace's id and the span's id in a traceparent, in hexadecimal."""
NANOSECONDS_PER_SECOND = 1_000_000_000
FLUSH_MILLISECONDS = 3000
"""How long an ending process waits until the receiver has accepted the last spans. An unavailable receiver must not
delay the end for longer."""
Attributes = Mapping[str, str | int | float | bool]

_OFF = NoOpTracerProvider()
"""The provider whose spans do nothing."""
_PROPAGATOR = TraceContextTextMapPropagator()
"""Reads and writes traceparents."""
_provider: Any = _OFF
"""The provider of this process: `_OFF`, or an `otlp.Provider` if tracing is on. `start` sets it."""


class TracingMissing(Exception):
    """Traces are configured, but the OpenTelemetry SDK is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, and OpenTelemetry's SDK is not installed. "
            "Install the packages of requirements/production.txt."
        )


@dataclass(frozen=True)
class FinishedSpan:
    """A span that has already ended, such as a run's. `parent` is the traceparent of its parent span.

    Times are Unix seconds. `error` is the message of a failed span, else empty.
    """

    name: str
    traceparent: str
    parent: str
    started_at: float
    finished_at: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""


def start(*, endpoint: str) -> None:
    """Export spans to this OTLP URL (without `/v1/traces`) from now on. An empty URL switches tracing off.

    Raises TracingMissing.
    """
    global _provider  # noqa: PLW0603  # like logging, tracing is configured once for each process
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
    """Open a span for the block. `parent` and `link` are traceparents; the new span links to `link`.

    Its parent is the current span. But if `parent` is given and belongs to another trace, `parent` is the parent, and
    the new span links to the current span.
    """
    if not is_on():
        yield INVALID_SPAN
        return
    current = trace.get_current_span().get_span_context()
    parent_context = None
    links = [Link(trace.get_current_span(_context(link)).get_span_context())] if link else []
    if parent and (not current.is_valid or trace.format_trace_id(current.trace_id) != parent[TRACE_ID]):
        parent_context = _context(parent)
        if current.is_valid:
            links.append(Link(current))
    tracer = _provider.get_tracer("trainyard")
    with tracer.start_as_current_span(
        name, context=parent_context, kind=kind, attributes=attributes, links=links
    ) as new_span:
        yield new_span


def mark_failed(failed_span: Span, message: str) -> None:
    """Mark a span as failed."""
    failed_span.set_status(Status(StatusCode.ERROR, message))


def current_traceparent() -> str:
    """Return the traceparent of the current span; empty if there is no span, or if it is not sampled."""
    carrier: dict[str, str] = {}
    if trace.get_current_span().get_span_context().trace_flags.sampled:
        _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


def trace_id() -> str:
    """Return the id of the current trace in hexadecimal; empty if there is none."""
    return current_traceparent()[TRACE_ID]


def child_traceparent(traceparent: str, name: str) -> str:
    """Return the traceparent of the child span `name` of `traceparent`; empty if `traceparent` is.

    The span's id is computed from both, not random. So the process that starts a run can pass the traceparent to the
    ranks. The process that exports the span after the run computes the same id.
    """
    if not valid_traceparent(traceparent):
        return ""
    trace_part = traceparent[TRACE_ID]
    span_part = hashlib.sha256(f"{trace_part} {name}".encode()).hexdigest()[:16]
    flags = traceparent[-2:]
    return f"00-{trace_part}-{span_part}-{flags}"


def export(spans: Sequence[FinishedSpan]) -> None:
    """Export spans that have already ended. Does nothing while tracing is off."""
    if not is_on():
        return
    for finished in spans:
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
    """Return `value` if it is a valid traceparent, else an empty string. Check values from outside with it."""
    return value if isinstance(value, str) and TRACEPARENT.fullmatch(value) else ""


def _context(traceparent: str) -> Context:
    """Return an OpenTelemetry context whose current span is the one that the traceparent names."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())

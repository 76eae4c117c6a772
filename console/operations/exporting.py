"""Spans over OpenTelemetry's SDK to an OTLP receiver. The one rule: only `tracing` imports this, where it is on.

The SDK reads its own variables besides (OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER, ...).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from console.operations.tracing import Attributes, Mark, Recorded

KINDS = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}
FLUSH_MILLISECONDS = 3000
NANOSECONDS = 1_000_000_000
_PROPAGATOR = TraceContextTextMapPropagator()
_next_span_id: ContextVar[int] = ContextVar("next_span_id", default=0)


class OtlpExporter:
    """See `tracing.Exporter`. Spans are sent by a thread of the SDK, in batches; a receiver that is away loses them."""

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create({SERVICE_NAME: "trainyard"} | _named_by_environment())
        self._provider = TracerProvider(resource=resource, id_generator=_Ids())
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))
        self._tracer = self._provider.get_tracer("trainyard")

    @contextmanager
    def span(self, name: str, *, kind: str, parent: str, link: str, attributes: Attributes) -> Iterator[Mark]:
        """See `tracing.span`."""
        around = trace.get_current_span().get_span_context()
        above, links = otel.get_current(), [Link(trace.get_current_span(_at(link)).get_span_context())] if link else []
        if parent and (not around.is_valid or trace.format_trace_id(around.trace_id) != parent[3:35]):
            above = _at(parent)
            links += [Link(around)] if around.is_valid else []
        with self._tracer.start_as_current_span(
            name, context=above, kind=KINDS[kind], attributes=attributes, links=links
        ) as opened:
            yield _Open(opened)

    def current(self) -> str:
        """See `tracing.current`."""
        carrier: dict[str, str] = {}
        if trace.get_current_span().get_span_context().trace_flags.sampled:
            _PROPAGATOR.inject(carrier)
        return carrier.get("traceparent", "")

    def record(self, spans: Sequence[Recorded]) -> None:
        """See `tracing.record`."""
        for each in spans:
            token = _next_span_id.set(int(each.place[36:52], 16))
            try:
                made = self._tracer.start_span(
                    each.name,
                    context=_at(each.parent),
                    attributes=each.attributes,
                    start_time=int(each.started_at * NANOSECONDS),
                )
            finally:
                _next_span_id.reset(token)
            if each.error:
                made.set_status(Status(StatusCode.ERROR, each.error))
            made.end(int(each.finished_at * NANOSECONDS))

    def flush(self) -> None:
        """See `tracing.flush`."""
        self._provider.force_flush(FLUSH_MILLISECONDS)


class _Ids(RandomIdGenerator):
    """Random ids, but for spans whose place is known."""

    def generate_span_id(self) -> int:
        """The one that `record` set, or a random one."""
        return _next_span_id.get() or int(super().generate_span_id())


class _Open(Mark):
    """A span that is sent."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, **attributes: str | int | float | bool) -> None:
        """See `Mark`."""
        self._span.set_attributes(attributes)

    def fail(self, message: str) -> None:
        """See `Mark`."""
        self._span.set_status(Status(StatusCode.ERROR, message))


def _at(traceparent: str) -> otel.Context:
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=otel.Context())


def _named_by_environment() -> dict[str, str]:
    """The service's name where OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES give one."""
    name = Resource.create().attributes.get(SERVICE_NAME, "")
    return {SERVICE_NAME: str(name)} if name and not str(name).startswith("unknown_service") else {}

"""Configure OpenTelemetry's SDK with its OTLP exporter. `tracing` imports this module only if tracing is on.

The SDK itself reads further environment variables, such as OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

_next_span_id: ContextVar[int] = ContextVar("next_span_id", default=0)
"""The id for a span that is started now; 0: a random id."""


class Provider(TracerProvider):
    """The SDK's provider, which can also start a span with an id that the caller computed."""

    @contextmanager
    def next_span_id(self, span_id: int) -> Iterator[None]:
        """Give the id `span_id` to a span that is started in the block."""
        token = _next_span_id.set(span_id)
        try:
            yield
        finally:
            _next_span_id.reset(token)


class _IdGenerator(RandomIdGenerator):
    """Generates random ids, except in a block of `Provider.next_span_id`."""

    def generate_span_id(self) -> int:
        """Return the id of a new span."""
        return _next_span_id.get() or int(super().generate_span_id())


def provider(endpoint: str) -> Provider:
    """Return a provider whose thread sends spans to `endpoint` in batches. While `endpoint` is down, spans are lost."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "trainyard"}))
    tracer_provider = Provider(resource=resource, id_generator=_IdGenerator())
    tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))
    return tracer_provider

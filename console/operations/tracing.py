"""Spans from the click to the ranks, where an operator wants them. The one rule: switched off, nothing is imported.

Hides OpenTelemetry behind a few calls that do nothing while it is off. A place in a trace is a `traceparent`, as the
W3C writes it: it is what travels in headers, in a job's row and in a rank's environment.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[0-3]")
Attributes = Mapping[str, str | int | float | bool]


class TracingMissing(Exception):
    """Traces are asked for and the packages that write them are not installed."""

    def __init__(self) -> None:
        super().__init__(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, and OpenTelemetry is not installed: pip install 'trainyard[tracing]'."
        )


@dataclass(frozen=True)
class Recorded:
    """A span of the past: `place` is its own traceparent, `parent` another's. Unix seconds."""

    name: str
    place: str
    parent: str
    started_at: float
    finished_at: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""


class Mark:
    """The span of a block, as the block sees it. This one is nothing's: tracing is off."""

    def set(self, **attributes: str | int | float | bool) -> None:
        """Say more about it."""

    def fail(self, message: str) -> None:
        """Say that it went wrong."""


class Exporter(Protocol):
    """What `exporting` offers."""

    @contextmanager
    def span(self, name: str, *, kind: str, parent: str, link: str, attributes: Attributes) -> Iterator[Mark]:
        """See `span`."""

    def current(self) -> str:
        """See `current`."""

    def record(self, spans: Sequence[Recorded]) -> None:
        """See `record`."""

    def flush(self) -> None:
        """See `flush`."""


_exporter: Exporter | None = None
NOTHING = Mark()


def start(*, endpoint: str) -> None:
    """Send spans to this OTLP address (without `/v1/traces`) from now on; an empty one switches tracing off.

    Raises TracingMissing.
    """
    global _exporter  # noqa: PLW0603  # one for each process, as its logging is
    if not endpoint:
        _exporter = None
        return
    try:
        _exporter = import_module("console.operations.exporting").OtlpExporter(endpoint)
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] != "opentelemetry":
            raise
        raise TracingMissing from error


def is_on() -> bool:
    """Whether spans are sent."""
    return _exporter is not None


@contextmanager
def span(
    name: str, *, kind: str = "internal", parent: str = "", link: str = "", attributes: Attributes | None = None
) -> Iterator[Mark]:
    """A span around the block: below the block around it, or below `parent` where that is of another trace.

    `kind`: internal, server, producer or consumer; `link`: a traceparent of another trace that it has to do with.
    """
    if _exporter is None:
        yield NOTHING
        return
    with _exporter.span(name, kind=kind, parent=parent, link=link, attributes=attributes or {}) as mark:
        yield mark


def current() -> str:
    """The traceparent of the innermost span; empty where there is none, or it is not sampled."""
    return _exporter.current() if _exporter else ""


def trace_id() -> str:
    """The id of the trace that this belongs to; empty where there is none."""
    return _exporter.current()[3:35] if _exporter else ""


def child(traceparent: str, name: str) -> str:
    """The place of the span that is called `name` below another: always the same one. Empty below nothing.

    So that who starts a thing and who later tells how it went, in another process, speak of the same span.
    """
    if not TRACEPARENT.fullmatch(traceparent):
        return ""
    trace = traceparent[3:35]
    return f"00-{trace}-{hashlib.sha256(f'{trace} {name}'.encode()).hexdigest()[:16]}-{traceparent[-2:]}"


def record(spans: Sequence[Recorded]) -> None:
    """Send spans of the past."""
    if _exporter:
        _exporter.record(spans)


def flush() -> None:
    """Send what has not been sent yet: this process is about to end."""
    if _exporter:
        _exporter.flush()


def sane(offered: Any) -> str:
    """A traceparent as it came from outside, or nothing."""
    return offered if isinstance(offered, str) and TRACEPARENT.fullmatch(offered) else ""

"""Handlers of Celery's signals: context fields, spans and counters of tasks, and heartbeats of workers and beat."""

from __future__ import annotations

import time
from contextlib import ExitStack
from logging.config import dictConfig
from typing import Any, NamedTuple

from celery import signals
from django.conf import settings
from opentelemetry.trace import Span, SpanKind

from console.observability import context, heartbeats, tracing
from console.observability.counters import TASK_SECONDS, TASK_TOTAL, buffer

HEADER = "trainyard"
"""The header that the console adds to a task's message: a dict with the sender's context fields under "about", and the
sender's traceparent under TRACEPARENT."""
TRACEPARENT = "traceparent"
DISPATCHER = "dispatcher"
"""The program that starts jobs (`console.supervision.supervisor`); its Celery node name is `dispatcher@host`."""
_process = {"program": heartbeats.WORKER}
"""The program that this process runs: WORKER, DISPATCHER or BEAT. The handlers of Celery's start signals set it."""


class _StartedTask(NamedTuple):
    """A task that runs: `_start_task` stores it on the request for `_finish_task`.

    `started_at` is a time of `time.perf_counter`.
    """

    resources: ExitStack
    """Closes the task's span and context."""
    span: Span
    started_at: float


@signals.setup_logging.connect
def _configure_logging(**_kwargs: Any) -> None:
    """Configure logging as Django does. That this handler exists keeps Celery from configuring its own logging."""
    dictConfig(settings.LOGGING)


@signals.before_task_publish.connect
def _add_header(headers: dict[str, Any] | None = None, **_kwargs: Any) -> None:
    """Put context fields and traceparent into a message. Beat also sends its heartbeat here: it has no other signal."""
    if headers is not None:
        headers[HEADER] = {"about": context.task_fields(), TRACEPARENT: tracing.current_traceparent()}
    if _process["program"] == heartbeats.BEAT:
        heartbeats.send(heartbeats.BEAT)


@signals.beat_init.connect
def _set_program_of_beat(**_kwargs: Any) -> None:
    _process["program"] = heartbeats.BEAT


@signals.celeryd_init.connect
def _set_program_of_worker(sender: str = "", **_kwargs: Any) -> None:
    if sender.startswith(f"{DISPATCHER}@"):
        _process["program"] = DISPATCHER


@signals.heartbeat_sent.connect
@signals.worker_ready.connect
def _send_heartbeat(**_kwargs: Any) -> None:
    """Send this worker's heartbeat, at its start and with each heartbeat of Celery's own."""
    part = heartbeats.DISPATCH if _process["program"] == DISPATCHER else ""
    heartbeats.send(heartbeats.WORKER, part, liveness_file=_process["program"])


@signals.task_prerun.connect
def _start_task(task: Any = None, task_id: str = "", **_kwargs: Any) -> None:
    """Set the context fields of the message, and open the task's span."""
    header = _read_header(task.request)
    resources = ExitStack()
    resources.enter_context(context.bound(**context.fields_from_header(header.get("about")), task=task.name))
    parent = tracing.valid_traceparent(header.get(TRACEPARENT))
    span = resources.enter_context(
        tracing.span(f"task {task.name}", kind=SpanKind.CONSUMER, parent=parent, attributes={"celery.task_id": task_id})
    )
    task.request.trainyard_task = _StartedTask(resources, span, time.perf_counter())


@signals.task_postrun.connect
def _finish_task(task: Any = None, state: str | None = None, **_kwargs: Any) -> None:
    """Close the task's span and context, and count the task.

    Does nothing if `_start_task` did not run to its end: Celery calls this in any case.
    """
    started: _StartedTask | None = getattr(task.request, "trainyard_task", None)
    if started is None:
        return
    outcome = str(state or "unknown").lower()
    if outcome == "failure":
        tracing.mark_failed(started.span, "the task failed")
    buffer.observe(TASK_SECONDS, time.perf_counter() - started.started_at, task=task.name)
    buffer.count(TASK_TOTAL, task=task.name, outcome=outcome)
    started.resources.close()


@signals.worker_process_shutdown.connect
@signals.worker_shutdown.connect
def _flush_buffers(**_kwargs: Any) -> None:
    """Send the buffered counts and spans, because a process of Celery's pool ends without running `atexit` handlers."""
    buffer.flush()
    tracing.flush()


def _read_header(request: Any) -> dict[str, Any]:
    """Return the header HEADER of a task's message; empty if it has none. Celery's versions put it in two places."""
    header = getattr(request, HEADER, None) or (getattr(request, "headers", None) or {}).get(HEADER)
    return header if isinstance(header, dict) else {}

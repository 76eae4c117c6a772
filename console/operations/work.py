"""Celery's side: which request a task comes from, how long it took, that worker and beat are alive. Signals only.

The one rule: no task knows of this, and nothing here can fail one.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from logging.config import dictConfig
from typing import Any

from celery import signals
from django.conf import settings

from console.operations import context, signs, tracing
from console.operations.tally import TASK_SECONDS, TASK_TOTAL, tally

HEADER = "trainyard"
"""Of a message: {"about": what `context` carries, "traceparent"}."""
TRACED_PARENT = "traceparent"
_beat: list[bool] = []


@signals.setup_logging.connect
def _log_as_django_does(**_more: Any) -> None:
    """That somebody listens keeps Celery from setting logging up its own way."""
    dictConfig(settings.LOGGING)


@signals.before_task_publish.connect
def _send_along(headers: dict[str, Any] | None = None, **_more: Any) -> None:
    """What the request is goes with the message. And if this is beat, it has just ticked."""
    if headers is not None:
        headers[HEADER] = {"about": context.carried(), TRACED_PARENT: tracing.current()}
    if _beat:
        signs.give(signs.BEAT)


@signals.beat_init.connect
def _this_is_beat(**_more: Any) -> None:
    _beat.append(True)


@signals.heartbeat_sent.connect
def _worker_lives(**_more: Any) -> None:
    signs.give(signs.WORKER)


@signals.worker_ready.connect
def _worker_begins(**_more: Any) -> None:
    signs.give(signs.WORKER)


@signals.task_prerun.connect
def _begin(task: Any = None, task_id: str = "", **_more: Any) -> None:
    """Bind what the message said, and open the task's span."""
    sent = _header(task.request)
    stack = ExitStack()
    stack.enter_context(context.bound(**context.received(sent.get("about")), task=task.name))
    parent = tracing.sane(sent.get(TRACED_PARENT))
    mark = stack.enter_context(
        tracing.span(f"task {task.name}", kind="consumer", parent=parent, attributes={"celery.task_id": task_id})
    )
    task.request.trainyard_work = (stack, mark, time.perf_counter())


@signals.task_postrun.connect
def _end(task: Any = None, state: str | None = None, **_more: Any) -> None:
    work: tuple[ExitStack, tracing.Mark, float] | None = getattr(task.request, "trainyard_work", None)
    if work is None:
        return
    stack, mark, started = work
    outcome = str(state or "unknown").lower()
    if outcome == "failure":
        mark.fail("the task failed")
    tally.observe(TASK_SECONDS, time.perf_counter() - started, task=task.name)
    tally.count(TASK_TOTAL, task=task.name, outcome=outcome)
    stack.close()


@signals.worker_process_shutdown.connect
@signals.worker_shutdown.connect
def _send_the_rest(**_more: Any) -> None:
    """A pool's process ends without Python's own farewell."""
    tally.flush()
    tracing.flush()


def _header(request: Any) -> dict[str, Any]:
    """Our header of a task's message, wherever this version of Celery puts headers of others."""
    sent = getattr(request, HEADER, None) or (getattr(request, "headers", None) or {}).get(HEADER)
    return sent if isinstance(sent, dict) else {}

"""Send Celery tasks. If the broker loses a message, the work is only delayed: periodic tasks do the same work."""

from __future__ import annotations

import logging
from typing import Any

from celery import Task
from django.db import transaction
from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)


def send_on_commit(task: Task[Any, Any], *arguments: Any) -> None:
    """Send `task` after the current transaction commits. If the broker cannot be reached, only log a warning."""
    transaction.on_commit(lambda: _send_or_warn(task, arguments))


def send(task: Task[Any, Any], *arguments: Any) -> None:
    """Send `task` at once, outside a transaction. If the broker cannot be reached, only log a warning."""
    _send_or_warn(task, arguments)


def _send_or_warn(task: Task[Any, Any], arguments: tuple[Any, ...]) -> None:
    """Send a task. Celery does not retry, because the caller may be a request: a page must not wait for the broker."""
    try:
        task.apply_async(arguments, retry=False)
    except OperationalError:
        logger.warning("The broker cannot be reached. The next periodic task does the work of %s.", task.name)

"""Hints to the workers: messages that make things fast.

The one rule: losing one loses nothing, a sweep does the same.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Task
from django.db import transaction
from kombu.exceptions import OperationalError

logger = logging.getLogger(__name__)


def hint(task: Task[Any, Any], *arguments: Any) -> None:
    """Send `task` once the current transaction is committed. A broker that is away is logged, never raised."""
    transaction.on_commit(lambda: _send(task, arguments))


def send(task: Task[Any, Any], *arguments: Any) -> None:
    """Send `task` now, from where no transaction is open. A broker that is away is logged, never raised."""
    _send(task, arguments)


def _send(task: Task[Any, Any], arguments: tuple[Any, ...]) -> None:
    try:
        task.apply_async(arguments, retry=False)
    except OperationalError:
        logger.warning("The broker is away: %s waits for the next sweep.", task.name)

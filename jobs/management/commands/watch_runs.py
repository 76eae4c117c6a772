"""Follow the cluster: what a run writes and how it goes reaches its job's row as it happens."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from typing import Any

from django.core.management.base import BaseCommand
from django.db import close_old_connections

from jobs import dispatch
from jobs.backend import cluster
from runtime.errors import RuntimeFault
from runtime.specs import RunPhase

logger = logging.getLogger(__name__)

READ_EVERY_SECONDS = 0.25
"""A run that writes without pause is read this often, not at each write; its end is taken in at once."""


class Command(BaseCommand):
    """`manage.py watch_runs`."""

    help = "Follow the cluster's changes and bring jobs up to them. The sweep is the net under it."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Watch until SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(0))
        # the library that watches files turns an interruption into one of Python's
        with contextlib.suppress(KeyboardInterrupt):
            self._watch()

    def _watch(self) -> None:
        for gap in cluster().isolation_gaps():
            logger.warning("Isolation: %s", gap)
        read_at: dict[str, float] = {}
        waiting: set[str] = set()
        for changed in cluster().changes():
            waiting |= changed
            now = time.monotonic()
            due = {name for name in waiting if now - read_at.get(name, 0.0) >= READ_EVERY_SECONDS or _has_ended(name)}
            waiting -= due
            for name in due:
                read_at[name] = now
                self._look(name)
            read_at = {name: at for name, at in read_at.items() if now - at < 60 or name in waiting}

    def _look(self, name: str) -> None:
        """Bring one run's job up to date; a fault is logged, and the sweep makes up for it."""
        try:
            close_old_connections()
            dispatch.follow(run_name=name)
        except Exception:
            logger.exception("The change of %s could not be taken in; the sweep will.", name)


def _has_ended(name: str) -> bool:
    try:
        return cluster().describe(name).phase is RunPhase.ENDED
    except RuntimeFault:
        return True  # nothing to wait for: the look at it will say what became of it

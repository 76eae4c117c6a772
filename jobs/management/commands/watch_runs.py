"""Follow the clusters until SIGTERM: see `jobs.watcher`."""

from __future__ import annotations

import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand

from jobs import watcher


class Command(BaseCommand):
    """`manage.py watch_runs`."""

    help = "Follow the clusters and update jobs as their runs change, until SIGTERM."
    requires_system_checks = []  # `up` and `prepare` run these checks

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Watch until SIGTERM or SIGINT."""
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        watcher.follow_all(stop)

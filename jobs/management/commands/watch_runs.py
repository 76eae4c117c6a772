"""Follow the clusters until told to stop: see `jobs.watching`."""

from __future__ import annotations

import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand

from jobs import watching


class Command(BaseCommand):
    """`manage.py watch_runs`."""

    help = "Follow the clusters' changes and bring jobs up to them. The sweep is the net under it."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Watch until SIGTERM or SIGINT."""
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        watching.follow_all(stop)

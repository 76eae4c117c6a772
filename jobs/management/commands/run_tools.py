"""Run the process that starts and ends the tools of this installation, until SIGTERM: see `runtime.tools`."""

from __future__ import annotations

import signal
import threading
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from jobs import tensorboards
from runtime.tools.owner import Limits, Owner


class Command(BaseCommand):
    """`manage.py run_tools`."""

    help = "Start TensorBoard when a page asks for it, and end it when idle, until SIGTERM."
    requires_system_checks = []  # `up` and `prepare` run these checks

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Serve requests for tools until SIGTERM or SIGINT."""
        limits = Limits(
            per_organization=settings.TOOLS_PER_ORGANIZATION,
            total=settings.TOOLS_TOTAL,
            idle_seconds=settings.TOOLS_IDLE_SECONDS,
            memory_mib=settings.TOOLS_MEMORY_MIB,
        )
        owner = Owner(tensorboards.tools_folder(), limits, tensorboards.url_path)
        for number in (signal.SIGTERM, signal.SIGINT):
            # In a thread, because `stop` waits for `serve`, which this handler interrupts.
            signal.signal(number, lambda *_: threading.Thread(target=owner.stop).start())
        owner.serve()

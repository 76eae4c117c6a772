"""`manage.py live`: serve the event streams that the web workers hand over."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from console.live import serve


class Command(BaseCommand):
    """See `console.live`."""

    help = "Serve event streams handed over by the web workers. Part of `manage.py up`."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        """Serve until SIGTERM."""
        serve()

"""`manage.py hold_services`: keep the embedded PostgreSQL and Redis running; one that has died is started again."""

from __future__ import annotations

import logging
import subprocess
import time
from typing import Any

from django.core.management.base import BaseCommand

from console.supervision.embedded import ServiceError
from console.supervision.supervisor import start_services

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""How often to check that both servers run."""


class Command(BaseCommand):
    """Keeps both servers running. They continue when this command ends: `manage.py up` stops them after all others."""

    help = "Keep the embedded PostgreSQL and Redis running. Part of `manage.py up`."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        """Keep the servers running until SIGTERM."""
        while True:
            time.sleep(CHECK_SECONDS)  # the servers are no children of this process, so it cannot wait for their end
            try:
                start_services()
            except (ServiceError, subprocess.SubprocessError, OSError):
                logger.exception("an embedded service did not start; the next check tries again")

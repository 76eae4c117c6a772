"""Keep the embedded PostgreSQL and Redis running: start each again after it has died.

`python -m console.supervision.services` is no management command, because a management command loads every app of
Django. This program needs only the settings, so it takes a third of the time to start and half of the memory.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from logging.config import dictConfig

from django.conf import settings

from console.supervision.embedded import ServiceError
from console.supervision.supervisor import start_services

logger = logging.getLogger("console.supervision.services")

CHECK_SECONDS = 1.0
"""How often to check that both servers run."""


def keep_running() -> None:
    """Keep the servers running until SIGTERM, which ends this process only: `manage.py up` stops the servers last."""
    dictConfig(settings.LOGGING)
    while True:
        time.sleep(CHECK_SECONDS)  # the servers are no children of this process, so it cannot wait for their end
        try:
            start_services()
        except (ServiceError, subprocess.SubprocessError, OSError):
            logger.exception("an embedded service did not start; the next check tries again")


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
    keep_running()

"""Liveness files: each process that listens on no port touches a file as long as its loop runs.

In `deploy/kubernetes` the kubelet's liveness probes check the age of these files, and restart a container whose loop
hangs. A process touches its file even while Redis or the database is unavailable, because a restart would not help.
"""

from __future__ import annotations

import logging

from django.conf import settings

logger = logging.getLogger(__name__)


def touch(name: str) -> None:
    """Touch the liveness file of the program `name`, such as `watcher`. A failure is only logged: work goes on."""
    path = settings.VAR_DIR / "pulse" / name  # the probes in operators' manifests name this path
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch()
    except OSError as error:
        logger.debug("the liveness file could not be touched: %s", error)

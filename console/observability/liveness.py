"""Liveness files: each process that listens on no port touches a file as long as its loop runs.

A liveness probe checks the file's age (`deploy/kubernetes`). A process touches its file even while Redis or the
database is unavailable, because a restart would not help. A loop that hangs no longer touches it.
"""

from __future__ import annotations

import logging

from django.conf import settings

logger = logging.getLogger(__name__)


def touch(name: str) -> None:
    """Touch the file of the process type `name`. Never raises: a failure here must not stop the work."""
    path = settings.VAR_DIR / "pulse" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch()
    except OSError as error:
        logger.debug("the liveness file could not be touched: %s", error)

"""Liveness files: each process that listens on no port touches a file as long as it works.

A liveness probe checks the file's age (`deploy/kubernetes`). An unavailable Redis or database does not stop a process
from touching its file, because a restart would not help; a loop that stands still does.
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

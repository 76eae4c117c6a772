"""Signs of life on this machine: a file for each process that listens on no port, touched as long as work goes on.

The one rule: a pulse says nothing of what the work needs. A Redis or a database that is away is no reason to start a
process again; a loop that stands still is. A cluster's probe looks at the file's age (`deploy/kubernetes`).
"""

from __future__ import annotations

import logging

from django.conf import settings

logger = logging.getLogger(__name__)


def beat(name: str) -> None:
    """Touch the file of the process `name`. Never raises: work goes on without a doctor."""
    path = settings.VAR_DIR / "pulse" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch()
    except OSError as error:
        logger.debug("no sign of life could be left: %s", error)

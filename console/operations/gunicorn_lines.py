"""gunicorn's own lines and its access log, in our format. The one rule: gunicorn's parent loads this, and no model.

Used by `--logger-class console.operations.gunicorn_lines.GunicornLines`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from logging.config import dictConfig
from typing import Any

from django.conf import settings
from gunicorn.glogging import Logger

from console.operations import logs


class GunicornLines(Logger):  # type: ignore[misc]  # gunicorn publishes no types
    """See the module."""

    def setup(self, cfg: Any) -> None:
        """In gunicorn's parent nobody has set Django's logging up; in a worker it is the same again."""
        super().setup(cfg)
        self._access_log_enabled = True
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
        dictConfig(settings.LOGGING)
        for log in (self.error_log, self.access_log):
            log.handlers.clear()
            log.propagate = True

    def access(self, resp: Any, req: Any, environ: dict[str, Any], request_time: timedelta) -> None:
        """A line for each answer, with what the request's middleware bound for it."""
        logs.access(
            method=str(environ.get("REQUEST_METHOD", "-")),
            path=str(environ.get("PATH_INFO", "-")),
            status=int(str(resp.status).split(None, 1)[0]),
            seconds=request_time.total_seconds(),
            size=getattr(resp, "sent", None),
            fields=environ.get(logs.BOUND) or {},
            logger="gunicorn.access",
        )

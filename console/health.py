"""Whether this console answers, and whether it can work. The one rule: no session, no log-in, plain JSON."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import redis
from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.db import Error as DatabaseError
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0


@never_cache
@require_safe
@login_not_required
def live(request: HttpRequest) -> JsonResponse:
    """200 as long as the process answers."""
    return JsonResponse({"status": "ok"})


@never_cache
@require_safe
@login_not_required
def ready(request: HttpRequest) -> JsonResponse:
    """200 when database, migrations and Redis are fine, 503 with what is wrong otherwise."""
    parts = {name: _outcome(name, check) for name, check in CHECKS.items()}
    fine = all(outcome == "ok" for outcome in parts.values())
    body: dict[str, Any] = {"status": "ok" if fine else "unavailable", "checks": parts}
    return JsonResponse(body, status=200 if fine else 503)


def _outcome(name: str, check: Callable[[], str]) -> str:
    """The check's word; what exactly failed goes to the log, since anybody may ask here."""
    try:
        return check()
    except (DatabaseError, redis.RedisError, OSError) as error:
        logger.warning("not ready: %s: %s", name, error)
        return "unreachable"


def _database() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return "ok"


def _migrations() -> str:
    executor = MigrationExecutor(connection)
    return "pending" if executor.migration_plan(executor.loader.graph.leaf_nodes()) else "ok"


def _redis() -> str:
    with redis.Redis.from_url(settings.REDIS_URL, socket_timeout=ANSWER_SECONDS) as client:
        client.ping()
    return "ok"


CHECKS: dict[str, Callable[[], str]] = {"database": _database, "migrations": _migrations, "redis": _redis}

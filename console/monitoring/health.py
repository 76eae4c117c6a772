"""Liveness and readiness: `/healthz`, `/readyz` and the health panel of the admin.

`/readyz` returns 503 if this process should get no traffic. A problem elsewhere, such as a missing worker or an
unreachable cluster, only makes the status *degraded*, because pages can still be served. Only staff and requests with
METRICS_TOKEN see details.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from console.accounts import second_factors
from console.accounts.models import User
from console.core.errors import Text
from console.monitoring import operations
from console.monitoring.metrics import has_metrics_token
from console.observability import heartbeats, redis_client
from jobs.models import ClusterStatus

logger = logging.getLogger(__name__)

OK, DEGRADED, FAILED = "ok", "degraded", "failed"
LATE_SECONDS = {heartbeats.BEAT: 60.0, heartbeats.WORKER: 60.0, heartbeats.WATCHER: 30.0}
"""The age at which the last heartbeat of a process means that it does not work. Beat sends one at least every five
seconds, a worker every two, a watcher every second."""
SCHEMA_CACHE_SECONDS = 60.0
"""How long the schema is assumed to stay up to date: the check loads every migration, and `/readyz` is called often."""
REUSE_SECONDS = 1.0
"""How long `/readyz` answers with the same results. Anyone may request it, and one thread answers it and `/metrics`: a
flood must not make a probe wait for many checks."""
_recent_results: dict[str, tuple[float, list[CheckResult]]] = {}
"""When the last checks for `/readyz` ended, on the monotonic clock, and their results, by the alias of the database."""
_migrated_at: dict[str, float] = {}
"""When the check last found the schema up to date, on the monotonic clock, by the alias of the database."""
CHECK_NAMES: dict[str, Text] = {
    "database": gettext_lazy("Database"),
    "migrations": gettext_lazy("Schema"),
    "redis": gettext_lazy("Redis"),
    "storage": gettext_lazy("Storage"),
    heartbeats.BEAT: gettext_lazy("Clock (beat)"),
    heartbeats.WORKER: gettext_lazy("Workers"),
    heartbeats.WATCHER: gettext_lazy("Watcher"),
    heartbeats.CLUSTER: gettext_lazy("Cluster"),
}
"""The labels of the checks, for operators."""


@dataclass(frozen=True)
class CheckResult:
    """The result of the check named `check`, a key of CHECK_NAMES. `status` is OK, DEGRADED or FAILED.

    `part` is the name of the checked cluster, or DISPATCH for the dispatcher; `detail` is a sentence for operators.
    """

    check: str
    status: str
    part: str = ""
    detail: str = ""

    @property
    def name(self) -> str:
        """Return the label for operators, with the part."""
        return f"{CHECK_NAMES[self.check]} {self.part}".strip()


@never_cache
@require_safe
def live(_request: HttpRequest) -> HttpResponseBase:
    """Return 200, because a process that hangs does not respond at all."""
    return JsonResponse({"status": OK})


@never_cache
@require_safe
def ready(request: HttpRequest) -> HttpResponseBase:
    """Return 503 if this process should get no traffic, else 200; the body lists every check."""
    results = _recent_checks()
    status = worst_status(results)
    entries = [{"check": result.check, "part": result.part, "status": result.status} for result in results]
    body: dict[str, Any] = {"status": "not_ready" if status == FAILED else status, "checks": entries}
    if has_metrics_token(request) or _is_staff(request):
        for entry, result in zip(entries, results, strict=True):
            entry["detail"] = result.detail
        body["isolation_gaps"] = isolation_gaps()
    return JsonResponse(body, status=503 if status == FAILED else 200)


def worst_status(results: list[CheckResult]) -> str:
    """Return the worst status of some results."""
    statuses = {result.status for result in results}
    return next((status for status in (FAILED, DEGRADED) if status in statuses), OK)


def checks() -> list[CheckResult]:
    """Return the results of all checks: first what this process needs, then other processes and clusters."""
    own_results = [_run_check(check, function) for check, function in OWN_CHECKS.items()]
    return own_results + _check_others({result.check for result in own_results if result.status == OK})


def _recent_checks() -> list[CheckResult]:
    """Return the results of all checks, which are at most REUSE_SECONDS old."""
    ended_at, results = _recent_results.get(connection.alias, (float("-inf"), []))
    if time.monotonic() - ended_at >= REUSE_SECONDS:
        results = checks()
        _recent_results[connection.alias] = time.monotonic(), results
    return results


def isolation_gaps() -> dict[str, list[str]]:
    """Return each cluster's isolation gaps: English sentences about what the cluster cannot isolate or limit.

    A reconciliation reports them to Redis at intervals. Clusters without gaps are left out.
    """
    try:
        clusters = heartbeats.latest(heartbeats.recent(), heartbeats.CLUSTER)
    except redis.RedisError:
        return {}
    return {name: gaps for name, heartbeat in sorted(clusters.items()) if (gaps := heartbeat.details.get("gaps"))}


def dashboard(_request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Return the template context of /admin/'s first page, with figures and health (unfold's DASHBOARD_CALLBACK)."""
    results = checks()
    return context | {
        "figures": operations.figures(),
        "tables": operations.tables(),
        "health_status": worst_status(results),
        "health_lines": [result for result in results if result.status != OK],
        "isolation_gaps": isolation_gaps(),
    }


# --- What this process needs ------------------------------------------------------------------------------------------


def _run_check(check: str, function: Callable[[], str]) -> CheckResult:
    """Run the check `function`, which returns the problem, empty if there is none; return the result.

    An error that it raises is a problem too.
    """
    try:
        problem = function()
    except (DatabaseError, redis.RedisError, OSError) as error:
        logger.warning("not ready: %s: %s", check, error)
        problem = f"{type(error).__name__}: {error}"
    return CheckResult(check, FAILED if problem else OK, detail=problem)


def _check_database() -> str:
    """Check that the database answers a query."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return ""


def _check_migrations() -> str:
    """Check that all migrations were applied. A newer schema is no problem: each version works with the next schema."""
    if time.monotonic() - _migrated_at.get(connection.alias, float("-inf")) < SCHEMA_CACHE_SECONDS:
        return ""
    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    if plan:
        return _("%(count)d unapplied migrations. Run manage.py migrate.") % {"count": len(plan)}
    _migrated_at[connection.alias] = time.monotonic()
    return ""


def _check_redis() -> str:
    """Check that Redis answers."""
    redis_client.client().ping()
    return ""


def _check_storage() -> str:
    """Write and remove a file where datasets, workspaces and runs are stored."""
    for root in (settings.TRAINYARD_STORAGE_ROOT, settings.TRAINYARD_RUNS_ROOT):
        folder = Path(root) / ".health"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        test_file = folder / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            test_file.write_bytes(b"written")  # not empty, because a full disk accepts empty files
        finally:
            test_file.unlink(missing_ok=True)
    return ""


OWN_CHECKS: dict[str, Callable[[], str]] = {
    "database": _check_database,
    "migrations": _check_migrations,
    "redis": _check_redis,
    "storage": _check_storage,
}
"""The checks of what this process needs. Each returns the problem as a sentence, or an empty text."""


# --- Other processes and clusters -------------------------------------------------------------------------------------


def _check_others(passed: set[str]) -> list[CheckResult]:
    """Return the results for other processes and clusters. `passed` names the checks of this process that passed.

    Without Redis the heartbeats are unknown, so every process counts as degraded. Without the schema, clusters cannot
    be read.
    """
    try:
        recent = heartbeats.recent() if "redis" in passed else []
    except redis.RedisError:
        recent = []
    parts = [
        (heartbeats.BEAT, ""),
        (heartbeats.WORKER, ""),
        (heartbeats.WORKER, heartbeats.DISPATCH),
        *((heartbeats.WATCHER, name) for name in settings.TRAINYARD_CLUSTERS),
    ]
    processes = [_check_process(kind, part, heartbeats.latest(recent, kind).get(part)) for kind, part in parts]
    # The result for the schema may be SCHEMA_CACHE_SECONDS old, so the database must have passed its own check too.
    return processes + (_check_clusters() if {"database", "migrations"} <= passed else [])


def _check_process(kind: str, part: str, heartbeat: heartbeats.Heartbeat | None) -> CheckResult:
    """Return the result for a process: whether `heartbeat`, the last of its kind and part, is recent enough."""
    if heartbeat is None:
        return CheckResult(kind, DEGRADED, part, _("No heartbeat received yet."))
    detail = _("Last heartbeat %(seconds)d seconds ago, from %(process)s.") % {
        "seconds": heartbeat.age_seconds,
        "process": heartbeat.process,
    }
    return CheckResult(kind, DEGRADED if heartbeat.age_seconds > LATE_SECONDS[kind] else OK, part, detail)


def _check_clusters() -> list[CheckResult]:
    """Return for each cluster whether it answered the last reconciliation; before the first one it is OK."""
    errors = {status.name: status.detail for status in ClusterStatus.objects.filter(answers=False)}
    return [
        CheckResult(heartbeats.CLUSTER, DEGRADED if name in errors else OK, name, errors.get(name, ""))
        for name in settings.TRAINYARD_CLUSTERS
    ]


def _is_staff(request: HttpRequest) -> bool:
    """Return whether an administrator sent the request, who may see details."""
    user = getattr(request, "user", None)
    return isinstance(user, User) and second_factors.may_administer(user)

"""Whether this console answers, whether it should get traffic, and what of it does less than it should.

The one rule: 503 means that this process should get no traffic; what lies elsewhere (no worker, a cluster that is
away) is *degraded*, and said, and pages are served. Details are for operators: the staff, or who has METRICS_TOKEN.
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
from django.contrib.auth.decorators import login_not_required
from django.db import Error as DatabaseError
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from console.accounts.errors import Text
from console.operations import signs, store
from console.operations.metrics import is_operator
from jobs.models import ClusterStatus

logger = logging.getLogger(__name__)

OK, DEGRADED, FAILED = "ok", "degraded", "failed"
LATE_SECONDS = {signs.BEAT: 60.0, signs.WORKER: 60.0, signs.WATCHER: 30.0}
"""Beat ticks every five seconds, a worker's heart beats every two, a watcher looks every second."""
SCHEMA_KEPT_SECONDS = 60.0
"""A schema that was found up to date stays so for this process, whose code does not change; to look is dear."""
_migrated_at: dict[str, float] = {}
NAMES: dict[str, Text] = {
    "database": gettext_lazy("Database"),
    "migrations": gettext_lazy("Schema"),
    "redis": gettext_lazy("Redis"),
    "storage": gettext_lazy("Storage"),
    signs.BEAT: gettext_lazy("Clock (beat)"),
    signs.WORKER: gettext_lazy("Workers"),
    signs.WATCHER: gettext_lazy("Watcher"),
    signs.CLUSTER: gettext_lazy("Cluster"),
}


@dataclass(frozen=True)
class Line:
    """One thing that was looked at. `part`: of several alike, which; `detail`: a sentence for operators."""

    check: str
    status: str
    part: str = ""
    detail: str = ""

    @property
    def name(self) -> str:
        """What it is called, by people."""
        return f"{NAMES[self.check]} {self.part}".strip()


@never_cache
@require_safe
@login_not_required
def live(_request: HttpRequest) -> HttpResponseBase:
    """200 as long as the process answers."""
    return JsonResponse({"status": OK})


@never_cache
@require_safe
@login_not_required
def ready(request: HttpRequest) -> HttpResponseBase:
    """503 where this process should get no traffic; 200 else, with what is degraded."""
    told = lines()
    status = worst(told)
    shown = [{"check": line.check, "part": line.part, "status": line.status} for line in told]
    body: dict[str, Any] = {"status": "not_ready" if status == FAILED else status, "checks": shown}
    if is_operator(request) or _is_staff(request):
        for entry, line in zip(shown, told, strict=True):
            entry["detail"] = line.detail
        body["isolation_gaps"] = isolation_gaps()
    return JsonResponse(body, status=503 if status == FAILED else 200)


def worst(told: list[Line]) -> str:
    """The status of the whole."""
    return next((status for status in (FAILED, DEGRADED) if any(line.status == status for line in told)), OK)


def lines() -> list[Line]:
    """Everything that is looked at, in the order in which one would."""
    told = [_asked(check, look) for check, look in HERE.items()]
    return told + _elsewhere({line.check for line in told if line.status == OK})


def isolation_gaps() -> dict[str, list[str]]:
    """What each cluster cannot keep apart or limit as it should, as the process that starts runs found it; by name."""
    try:
        found = signs.newest(signs.seen(), signs.CLUSTER)
    except redis.RedisError:
        return {}
    return {name: gaps for name, sign in sorted(found.items()) if (gaps := sign.facts.get("gaps"))}


def dashboard(_request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """What the first page of /admin/ shows of this (unfold's DASHBOARD_CALLBACK)."""
    told = lines()
    return context | {
        "health_status": worst(told),
        "health_lines": [line for line in told if line.status != OK],
        "isolation_gaps": isolation_gaps(),
    }


# --- What this process needs ------------------------------------------------------------------------------------------


def _asked(check: str, look: Callable[[], str]) -> Line:
    """What a look found, as a line; it gives a sentence where something is wrong."""
    try:
        wrong = look()
    except (DatabaseError, redis.RedisError, OSError) as error:
        logger.warning("not ready: %s: %s", check, error)
        wrong = f"{type(error).__name__}: {error}"
    return Line(check, FAILED if wrong else OK, detail=wrong)


def _database() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return ""


def _migrations() -> str:
    """A newer schema than this version's is fine: it fits one version back."""
    if time.monotonic() - _migrated_at.get(connection.alias, float("-inf")) < SCHEMA_KEPT_SECONDS:
        return ""
    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    if plan:
        return _("%(count)d migrations are not applied: run manage.py migrate.") % {"count": len(plan)}
    _migrated_at[connection.alias] = time.monotonic()
    return ""


def _redis() -> str:
    store.client().ping()
    return ""


def _storage() -> str:
    """A file can be made and removed where datasets, workspaces and runs lie."""
    for root in (settings.TRAINYARD_STORAGE_ROOT, settings.TRAINYARD_RUNS_ROOT):
        folder = Path(root) / ".health"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = folder / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(b"written")  # an empty file can be made on a full disk
        finally:
            probe.unlink(missing_ok=True)
    return ""


HERE: dict[str, Callable[[], str]] = {
    "database": _database,
    "migrations": _migrations,
    "redis": _redis,
    "storage": _storage,
}


# --- What it relies on ------------------------------------------------------------------------------------------------


def _elsewhere(fine: set[str]) -> list[Line]:
    """Processes and clusters; what can't be known, because what would tell is away, is degraded too."""
    try:
        seen = signs.seen() if "redis" in fine else []
    except redis.RedisError:
        seen = []
    parts = [(signs.BEAT, ""), (signs.WORKER, ""), *((signs.WATCHER, name) for name in settings.TRAINYARD_CLUSTERS)]
    found = [_sign_line(kind, part, signs.newest(seen, kind).get(part)) for kind, part in parts]
    return found + (_clusters() if "migrations" in fine else [])


def _sign_line(kind: str, part: str, sign: signs.Sign | None) -> Line:
    if sign is None:
        return Line(kind, DEGRADED, part, _("It has not been heard of."))
    detail = _("Last heard of %(seconds)d seconds ago, from %(process)s.") % {
        "seconds": sign.age_seconds,
        "process": sign.process,
    }
    return Line(kind, DEGRADED if sign.age_seconds > LATE_SECONDS[kind] else OK, part, detail)


def _clusters() -> list[Line]:
    """Whether each cluster answers, by the last sweep. One that nobody has asked yet is not called away."""
    known = {status.name: status for status in ClusterStatus.objects.all()}
    return [
        Line(signs.CLUSTER, DEGRADED, name, status.detail)
        if (status := known.get(name)) and not status.answers
        else Line(signs.CLUSTER, OK, name)
        for name in settings.TRAINYARD_CLUSTERS
    ]


def _is_staff(request: HttpRequest) -> bool:
    user = getattr(request, "user", None)
    return bool(user and user.is_active and user.is_staff)

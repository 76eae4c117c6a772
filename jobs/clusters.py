"""Which clusters there are to look after, and whether they answer. The one rule: a cluster has one sweep at a time."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models import Count, Q, QuerySet
from django.utils import timezone

from console.operations import signs
from jobs.backend import cluster, cluster_named, cluster_names, columns_of
from jobs.models import Attempt, ClusterStatus, Job, Room
from jobs.states import JobState
from runtime.errors import BackendUnavailable, RuntimeFault
from runtime.specs import Capacity, NodeCapacity, Resources

LOCK = 7_411
"""The advisory locks of sweeps, apart from anybody else's."""
REPORT_SECONDS = 15.0


@dataclass(frozen=True)
class ClusterRow:
    """A cluster as the status page shows it. `answers` is None where no sweep has looked yet."""

    name: str
    is_local: bool
    answers: bool | None
    since: datetime | None
    checked_at: datetime | None
    detail: str
    queued: int
    running: int
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Amount:
    """How much of something a cluster has, and how much of it no run holds."""

    free: float
    total: float


@dataclass(frozen=True)
class Sums:
    """A cluster's machines together. Memory in MiB; `gpus` by their type."""

    machines: int
    cpus: Amount
    memory_mib: Amount
    gpus: dict[str, Amount]


def sums(capacity: Capacity) -> Sums:
    """What all machines have together."""
    total = {(kind, model): amount for kind, model, amount in _amounts(capacity.machines, lambda each: each.total)}
    free = {(kind, model): amount for kind, model, amount in _amounts(capacity.machines, lambda each: each.free)}
    found = {key: Amount(free.get(key, 0), amount) for key, amount in total.items()}
    return Sums(
        machines=len(capacity.machines),
        cpus=found["cpus", ""],
        memory_mib=found["memory_mib", ""],
        gpus={model: amount for (kind, model), amount in found.items() if kind == "gpus" and amount.total},
    )


def on(name: str) -> Q:
    """Attempts that a cluster runs."""
    return Q(backend__in=columns_of(name))


def to_sweep() -> list[str]:
    """The clusters of the settings, and those that settings no longer name though jobs are open there."""
    opened = Attempt.objects.filter(finished_at=None).order_by().values_list("backend", flat=True).distinct()
    return list(dict.fromkeys([*cluster_names(), *(cluster_named(name) for name in opened)]))


@contextlib.contextmanager
def only_sweep(name: str) -> Iterator[bool]:
    """Whether the sweep of this cluster is the caller's; a lock of the database's, gone with whoever holds it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s, hashtext(%s))", [LOCK, name])
        is_mine = bool(cursor.fetchone()[0])
        try:
            yield is_mine
        finally:
            if is_mine:
                cursor.execute("SELECT pg_advisory_unlock(%s, hashtext(%s))", [LOCK, name])


def note(*, name: str, answers: bool, detail: str = "") -> None:
    """Write down how a cluster was found just now."""
    now = timezone.now()
    same = ClusterStatus.objects.filter(name=name, answers=answers)
    if not same.update(checked_at=now, detail=detail):
        values = {"answers": answers, "since": now, "checked_at": now, "detail": detail}
        ClusterStatus.objects.update_or_create(name=name, defaults=values)
        Room.objects.filter(node_spec__cluster__in=columns_of(name)).update(answers=answers)


def report(name: str) -> None:
    """Say what a cluster has and what of it is free, for whoever watches: metrics and health ask no cluster."""
    if not signs.is_due(signs.CLUSTER, name):
        return
    try:
        machines, gaps = cluster(name).capacity().machines, cluster(name).isolation_gaps()
    except BackendUnavailable:
        return  # `note` has written it down
    total, free = _amounts(machines, lambda each: each.total), _amounts(machines, lambda each: each.free)
    signs.give(signs.CLUSTER, name, every_seconds=REPORT_SECONDS, total=total, free=free, gaps=gaps)


def _amounts(
    machines: Sequence[NodeCapacity], pick: Callable[[NodeCapacity], Resources]
) -> list[tuple[str, str, float]]:
    """(resource, type of GPU, amount) over all machines."""
    sums: dict[tuple[str, str], float] = defaultdict(float, {("cpus", ""): 0, ("memory_mib", ""): 0})
    for each in map(pick, machines):
        sums["cpus", ""] += each.cpus
        sums["memory_mib", ""] += each.memory_mib
        if each.gpus or each.gpu_type:
            sums["gpus", each.gpu_type] += each.gpus
    return [(resource, gpu_type, amount) for (resource, gpu_type), amount in sums.items()]


def does_answer(name: str) -> bool:
    """Whether the cluster answered when it was last asked; for pages, which do not wait to find out."""
    return not ClusterStatus.objects.filter(name=cluster_named(name), answers=False).exists()


def rows(*, with_gaps: bool = False) -> list[ClusterRow]:
    """Every cluster, for the status page. `with_gaps`: ask those that answer what they can't keep apart."""
    found = {status.name: status for status in ClusterStatus.objects.all()}
    queued = _counts(Job.objects.filter(state=JobState.QUEUED), "node_spec__cluster")
    running = _counts(Attempt.objects.filter(finished_at=None), "backend")
    names = dict.fromkeys([*cluster_names(), *(name for name in (*queued, *running) if name not in cluster_names())])
    return [
        ClusterRow(
            name=name,
            is_local=settings.TRAINYARD_CLUSTERS.get(name, "") is None,
            answers=found[name].answers if name in found else None,
            since=found[name].since if name in found else None,
            checked_at=found[name].checked_at if name in found else None,
            detail=found[name].detail if name in found else "",
            queued=queued.get(name, 0),
            running=running.get(name, 0),
            gaps=_gaps(name) if with_gaps else (),
        )
        for name in names
    ]


def _counts(rows: QuerySet[Any], column: str) -> dict[str, int]:
    counted: dict[str, int] = {}
    for name, count in rows.order_by().values_list(column).annotate(count=Count("pk")):
        counted[cluster_named(name)] = counted.get(cluster_named(name), 0) + count
    return counted


def _gaps(name: str) -> tuple[str, ...]:
    if not does_answer(name):
        return ()
    try:
        return tuple(cluster(name).isolation_gaps())
    except RuntimeFault:
        return ()

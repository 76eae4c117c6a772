"""The clusters that this installation runs on: their backends, their names, and whether each one answers.

A cluster is known by its name in TRAINYARD_CLUSTERS; an empty name means the first. Any call to a cluster may raise
BackendUnavailable, also for a name that the settings no longer list.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db.models import Case, Count, F, Q, QuerySet, Value, When
from django.utils import timezone

from billing.models import NodeSpec
from console.observability import heartbeats
from jobs.circuit_breaker import with_circuit_breaker
from jobs.models import Attempt, CapacitySnapshot, ClusterStatus, Job
from jobs.states import JobState
from runtime import specs
from runtime.backends.base import Backend, create
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.slurm.config import SlurmConfig
from runtime.errors import BackendUnavailable, RuntimeFault
from runtime.specs import Capacity, Resources
from storage.models import Image

LEGACY_NAME = "local"
"""The cluster name in attempts that were written before clusters had names. It means the first cluster, unless the
settings have a cluster of this name."""
REPORT_SECONDS = 15.0
"""Minimum interval between two reports of a cluster's capacity, because each calls the cluster's API. Prometheus, which
shows the reports, usually reads them every 15 s or less often."""


@dataclass(frozen=True)
class ClusterRow:
    """A cluster on the status page.

    `answers` is None before the first reconciliation. `since` is when it last changed. `detail` is the error if the
    cluster does not answer. `queued` counts jobs, `running` open attempts. `drain_reason` is empty unless an
    administrator drained the cluster. `gaps` are sentences about missing isolation between runs
    (`Backend.isolation_gaps`).
    """

    name: str
    is_local: bool
    answers: bool | None
    since: datetime | None
    checked_at: datetime | None
    detail: str
    queued: int
    running: int
    drain_reason: str
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Amount:
    """The free and the total amount of a resource of a cluster."""

    free: float
    total: float


@dataclass(frozen=True)
class ClusterTotals:
    """The resources of all machines of a cluster together. `gpus` has an amount for each GPU type."""

    machines: int
    cpus: Amount
    memory_mib: Amount
    gpus: dict[str, Amount]


# --- Names and backends -----------------------------------------------------------------------------------------------


def pulls_images(name: str) -> bool:
    """Whether the cluster runs images from registries. Other clusters run only images that this installation built."""
    config = settings.TRAINYARD_CLUSTERS.get(name)
    return isinstance(config, ClusterConfig) or (isinstance(config, SlurmConfig) and bool(config.containers))


@cache
def cluster(name: str = "") -> Backend:
    """Return the cluster's backend, created once per process. Raises BackendUnavailable for an unknown name."""
    resolved_name = resolve_cluster_name(name)
    if resolved_name != name:
        return cluster(resolved_name)  # so that all names of a cluster share one backend in the cache
    if name not in settings.TRAINYARD_CLUSTERS:
        raise BackendUnavailable(f"TRAINYARD_CLUSTERS names no cluster '{name}'.")
    return _create(name)


def cluster_names() -> list[str]:
    """Return the names of all configured clusters, in the order of the settings."""
    return list(settings.TRAINYARD_CLUSTERS)


def resolve_cluster_name(name: str) -> str:
    """Return the cluster name that a stored name (of a node spec or an attempt) refers to."""
    if name and (name != LEGACY_NAME or name in settings.TRAINYARD_CLUSTERS):
        return name
    return cluster_names()[0]


def stored_names(name: str) -> set[str]:
    """Return every stored name that refers to this cluster: the inverse of `resolve_cluster_name`.

    The first cluster may have several: its own name, "" and LEGACY_NAME.
    """
    return {each for each in (name, "", LEGACY_NAME) if resolve_cluster_name(each) == name}


def resolved_name(column: str) -> Case:
    """Return `resolve_cluster_name` of the stored name in a column, as an expression of a query."""
    first = cluster_names()[0]
    return Case(When(**{f"{column}__in": stored_names(first)}, then=Value(first)), default=F(column))


def on_cluster(name: str) -> Q:
    """Return the filter for attempts on a cluster, by any of its stored names, which `Attempt.backend` holds."""
    return Q(backend__in=stored_names(name))


def clusters_to_reconcile() -> list[str]:
    """Return the names of the configured clusters, and of those no longer configured that still have open attempts."""
    used_names = Attempt.objects.filter(finished_at=None).order_by().values_list("backend", flat=True).distinct()
    return list(dict.fromkeys([*cluster_names(), *(resolve_cluster_name(name) for name in used_names)]))


def runs_root(name: str) -> Path:
    """Return the folder of a cluster's runs on the console's machine, where its shared storage may be mounted."""
    root: Path = settings.TRAINYARD_RUNS_ROOT
    return root if _is_local(name) else root / ".clusters" / name


def resources_of(spec: NodeSpec) -> Resources:
    """Return the resources that one node of this spec requests, with whole cores on Slurm, which assigns no parts."""
    is_slurm = isinstance(settings.TRAINYARD_CLUSTERS.get(resolve_cluster_name(spec.cluster)), SlurmConfig)
    return Resources(
        cpus=float(math.ceil(spec.cpus) if is_slurm else spec.cpus),
        memory_mib=spec.memory_mib,
        gpus=spec.gpus,
        gpu_type=spec.gpu_type if spec.gpus else "",
    )


def image_of(image: Image, digest: str = "") -> specs.Image:
    """Return the image as backends identify it: by a built-in name, or by reference and, if known, `digest`."""
    if image.is_builtin:
        return specs.Image(builtin=image.name)
    return specs.Image(reference=image.reference, digest=digest)


def _is_local(name: str) -> bool:
    """Whether the cluster is the console's machine: the settings have None for it. False for a name that they lack."""
    return settings.TRAINYARD_CLUSTERS.get(name, "") is None


def _create(name: str) -> Backend:
    """Create a cluster's backend. The local one needs no circuit breaker, because it makes no remote calls."""
    config = settings.TRAINYARD_CLUSTERS[name]
    if isinstance(config, SlurmConfig):
        backend = create("slurm", config=config, root=runs_root(name), images_root=settings.TRAINYARD_IMAGES_ROOT)
        return with_circuit_breaker(name, backend)
    if config is not None:
        return with_circuit_breaker(name, create("kubernetes", config=config, root=runs_root(name)))
    return create(
        "local",
        root=runs_root(name),
        images_root=settings.TRAINYARD_IMAGES_ROOT,
        cpus=settings.LOCAL_CPUS,
        memory_mib=settings.LOCAL_MEMORY_MIB,
        disk_mib=settings.LOCAL_DISK_MIB,
        warm_seconds=settings.LOCAL_WARM_SECONDS,
        network=settings.TRAINYARD_RUN_NETWORK,
    )


# --- Whether each cluster answers -------------------------------------------------------------------------------------


def record_status(*, name: str, answers: bool, detail: str = "") -> None:
    """Store whether a cluster has just answered. If that has changed, also store the time of the change."""
    now = timezone.now()
    same_answer = ClusterStatus.objects.filter(name=name, answers=answers)
    if not same_answer.update(checked_at=now, detail=detail):
        values = {"answers": answers, "since": now, "checked_at": now, "detail": detail}
        ClusterStatus.objects.update_or_create(name=name, defaults=values)
    # `jobs.waiting` reads `answers` from the snapshots. A pass of the scheduler may have stored another answer there.
    snapshots = CapacitySnapshot.objects.filter(node_spec__cluster__in=stored_names(name))
    snapshots.filter(answers=not answers).update(answers=answers)


def drain_reason(name: str) -> str:
    """Return why an administrator drained the cluster, so that no run may start on it; empty if runs may start."""
    reasons = ClusterStatus.objects.filter(name=name, drained_since__isnull=False).values_list(
        "drain_reason", flat=True
    )
    return next(iter(reasons), "")


def does_answer(name: str) -> bool:
    """Whether the cluster answered the last reconciliation. Makes no call to the cluster, so pages may use it."""
    return not ClusterStatus.objects.filter(name=resolve_cluster_name(name), answers=False).exists()


def unavailable_clusters() -> set[str]:
    """Return the names of the clusters that did not answer the last reconciliation, with one query."""
    return set(ClusterStatus.objects.filter(answers=False).values_list("name", flat=True))


def report_capacity(name: str) -> None:
    """Publish a cluster's capacity and isolation gaps in Redis as a heartbeat, for metrics and health checks.

    Metrics and health checks must not call clusters, because a cluster that does not answer would delay them. Does
    nothing if the last report is recent.
    """
    if not heartbeats.is_due(heartbeats.CLUSTER, name):
        return
    try:
        machines, gaps = cluster(name).capacity().machines, cluster(name).isolation_gaps()
    except BackendUnavailable:
        return  # the reconciliation stores with `record_status` that the cluster does not answer
    total = _as_json(_sums(each.total for each in machines))
    free = _as_json(_sums(each.free for each in machines))
    heartbeats.send(heartbeats.CLUSTER, name, interval_seconds=REPORT_SECONDS, total=total, free=free, gaps=gaps)


def totals(capacity: Capacity) -> ClusterTotals:
    """Return the sums over all machines."""
    free = _sums(each.free for each in capacity.machines)
    total = _sums(each.total for each in capacity.machines)
    amounts = {key: Amount(free.get(key, 0), total_amount) for key, total_amount in total.items()}
    return ClusterTotals(
        machines=len(capacity.machines),
        cpus=amounts["cpus", ""],
        memory_mib=amounts["memory_mib", ""],
        gpus={gpu_type: each for (resource, gpu_type), each in amounts.items() if resource == "gpus" and each.total},
    )


def status_rows(*, with_gaps: bool = False) -> list[ClusterRow]:
    """Return a row for every configured cluster, and for any other that has queued jobs or open attempts.

    `with_gaps`: also ask the clusters that answer for their isolation gaps.
    """
    statuses = {status.name: status for status in ClusterStatus.objects.all()}
    queued = _counts(Job.objects.filter(state=JobState.QUEUED), "node_spec__cluster")
    running = _counts(Attempt.objects.filter(finished_at=None), "backend")
    names = dict.fromkeys([*cluster_names(), *(name for name in (*queued, *running) if name not in cluster_names())])
    rows = []
    for name in names:
        status = statuses.get(name) or ClusterStatus(name=name)  # a new instance, whose other fields are empty
        rows.append(
            ClusterRow(
                name=name,
                is_local=_is_local(name),
                answers=status.answers,
                since=status.since,
                checked_at=status.checked_at,
                detail=status.detail,
                queued=queued.get(name, 0),
                running=running.get(name, 0),
                drain_reason=status.drain_reason,
                gaps=_gaps(name) if with_gaps else (),
            )
        )
    return rows


def _sums(resources_of_machines: Iterable[Resources]) -> dict[tuple[str, str], float]:
    """Return the sums over the machines by (resource, GPU type), with cores and memory even without machines."""
    sums: dict[tuple[str, str], float] = defaultdict(float, {("cpus", ""): 0, ("memory_mib", ""): 0})
    for each in resources_of_machines:
        sums["cpus", ""] += each.cpus
        sums["memory_mib", ""] += each.memory_mib
        if each.gpus or each.gpu_type:
            sums["gpus", each.gpu_type] += each.gpus
    return sums


def _as_json(sums: Mapping[tuple[str, str], float]) -> list[tuple[str, str, float]]:
    """Return sums as a list of (resource, GPU type, amount), because keys in JSON cannot be pairs."""
    return [(resource, gpu_type, amount) for (resource, gpu_type), amount in sums.items()]


def _counts(rows: QuerySet[Any], column: str) -> dict[str, int]:
    """Count rows by the cluster that `column` refers to."""
    counts: dict[str, int] = {}
    for name, count in rows.order_by().values_list(column).annotate(count=Count("pk")):
        counts[resolve_cluster_name(name)] = counts.get(resolve_cluster_name(name), 0) + count
    return counts


def _gaps(name: str) -> tuple[str, ...]:
    """Return a cluster's isolation gaps; none if it does not answer."""
    if not does_answer(name):
        return ()
    try:
        return tuple(cluster(name).isolation_gaps())
    except RuntimeFault:
        return ()

"""Forecast when a run could start, from the cluster's capacity and its open jobs.

This is a forecast, not a promise. It places jobs in the queue's order on the free capacity, and assumes that each job
takes its estimated time. The scheduler may start a smaller run sooner.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from django.utils import timezone

from billing.models import NodeSpec
from console.accounts.models import Organization
from jobs import quotas
from jobs.clusters import drain_reason, resolve_cluster_name, resources_of, stored_names
from jobs.models import CapacitySnapshot, Job
from jobs.scheduler import capacity_without
from jobs.selectors import capacity_now
from jobs.states import ENDED, JobState
from runtime.specs import Capacity, Resources

MAX_OPEN_JOBS = 200
"""Open jobs of a cluster that a forecast places: as many as it can place while the customer waits. If there are more,
no time is given."""


@dataclass(frozen=True)
class StartForecast:
    """When a run could start. `ahead` is the number of jobs in the queue before it.

    `code` says when:

    - `now`
    - `waits`: in about `seconds`, or None if that is unknown
    - `quota`: when another run ends, because the organization would run more nodes than it may
    - `grows`: at once or when the cluster has added nodes, which it does on demand
    - `drained`: when the administrator lets runs start again
    - `unknown`: the cluster does not answer
    """

    code: Literal["now", "waits", "quota", "grows", "drained", "unknown"]
    seconds: float | None = None
    ahead: int = 0


@dataclass(frozen=True)
class Load:
    """The nodes that a job occupies, and for how many seconds: from its start, or from now if it runs.

    `resources` are those of one node, `kind` is the name of the node spec.
    """

    resources: Resources
    kind: str
    nodes: int
    seconds: float


class Forecast:
    """Forecasts for an organization. The state of each cluster is read once, for several forecasts."""

    def __init__(self, organization: Organization) -> None:
        running = quotas.running_nodes(organization).get(organization.pk, 0)
        self._quota_left = organization.quota.max_running_nodes - running
        self._clusters: dict[str, _ClusterState] = {}

    def start(self, spec: NodeSpec, nodes: int) -> StartForecast:
        """Return when a run of `nodes` nodes of `spec` could start."""
        name = resolve_cluster_name(spec.cluster)
        if name not in self._clusters:
            self._clusters[name] = _ClusterState.read(name)
        state = self._clusters[name]
        if state.capacity is None:
            return StartForecast("unknown")
        if state.is_drained:
            return StartForecast("drained")
        if self._quota_left < nodes:
            return StartForecast("quota", ahead=state.queued_count)
        if state.capacity.elastic:  # how many nodes are free now is not known
            return StartForecast("grows")
        resources = resources_of(spec)
        # Jobs that are queued do not fit now. The scheduler lets a run that fits overtake them, unless it keeps free
        # capacity for one of them.
        if state.capacity.nodes_now(resources, spec.name) >= nodes and not state.is_reserved:
            return StartForecast("now")
        new_run = Load(resources, spec.name, nodes, seconds=0)  # its own time does not delay its start
        seconds = None if state.is_truncated else wait_seconds(state.capacity, state.running, [*state.queued, new_run])
        return StartForecast("waits", seconds, state.queued_count)


@dataclass(frozen=True)
class _ClusterState:
    """The state of a cluster. `capacity` is None if it does not answer."""

    capacity: Capacity | None
    running: Sequence[Load] = ()
    queued: Sequence[Load] = ()
    queued_count: int = 0
    """Number of queued jobs of the cluster, also of those that `queued` lacks."""
    is_reserved: bool = False
    """Whether free capacity is kept for a queued job that has waited long (`scheduler.BACKFILL_LIMIT`)."""
    is_truncated: bool = False
    """Whether the cluster has more than MAX_OPEN_JOBS open jobs, so that some are missing here."""
    is_drained: bool = False

    @classmethod
    def read(cls, name: str) -> _ClusterState:
        """Read a cluster's capacity, and its open jobs if the wait depends on them."""
        capacity = capacity_now(name)
        is_drained = bool(drain_reason(name))
        if is_drained or capacity is None:
            return cls(capacity, is_drained=is_drained)
        names = stored_names(name)  # node specs may name the first cluster in several ways, such as ""
        jobs_of_cluster = Job.objects.filter(node_spec__cluster__in=names)
        queued_jobs = jobs_of_cluster.filter(state=JobState.QUEUED)
        if capacity.elastic:
            return cls(capacity, queued_count=queued_jobs.count())
        open_jobs = (
            jobs_of_cluster.exclude(state__in=ENDED)
            .select_related("node_spec", "order__quote")
            .order_by("queued_at", "pk")[: MAX_OPEN_JOBS + 1]
        )
        now = timezone.now()
        jobs = list(open_jobs)
        snapshots = CapacitySnapshot.objects.filter(node_spec__cluster__in=names)
        queued = [job for job in jobs if job.state == JobState.QUEUED]
        is_truncated = len(jobs) > MAX_OPEN_JOBS
        return cls(
            capacity,
            running=[_load(job, now) for job in jobs if job.state != JobState.QUEUED],
            queued=[_load(job, now) for job in queued],
            queued_count=queued_jobs.count() if is_truncated else len(queued),
            # A pass updates only the snapshots of specs for which jobs wait. An old one may still name a job that has
            # started, so only queued jobs count.
            is_reserved=snapshots.filter(kept_for_job__in=[job.pk for job in queued]).exists(),
            is_truncated=is_truncated,
        )


def wait_seconds(capacity: Capacity, running: Iterable[Load], queue: Sequence[Load]) -> float | None:
    """Return in how many seconds the last load of `queue` starts, if loads start in order and each as soon as it fits.

    Return None if a load does not fit even after all others have ended. Pure.
    """
    # A heap of (seconds from now until the end, number, load). The number is unique, so that the heap never compares
    # two loads.
    ends = [(load.seconds, number, load) for number, load in enumerate(running)]
    heapq.heapify(ends)
    now, next_number = 0.0, len(ends)
    for load in queue:
        while capacity.nodes_now(load.resources, load.kind) < load.nodes:
            if not ends:
                return None
            now, _number, ended = heapq.heappop(ends)
            capacity = _release(capacity, ended)
        capacity = capacity_without(capacity, load.resources, load.nodes, load.kind)
        heapq.heappush(ends, (now + load.seconds, next_number, load))
        next_number += 1
    return now


def _release(capacity: Capacity, load: Load) -> Capacity:
    """Return the capacity after a load has ended.

    The load's machines are not known. Only a machine that has at least the node's resources in use can have run a node.
    Of these, the one with the most free cores is assumed.
    """
    machines = list(capacity.machines)
    resources = load.resources
    for _node in range(load.nodes):
        fitting = [
            index
            for index, machine in enumerate(machines)
            if machine.total.cpus - machine.free.cpus >= resources.cpus - 1e-6  # rounding of fractions of cores
            and machine.total.memory_mib - machine.free.memory_mib >= resources.memory_mib
            and machine.total.gpus - machine.free.gpus >= resources.gpus
        ]
        if not fitting:  # no machine has that much in use, so the end of this node frees nothing
            break
        freest = max(fitting, key=lambda index: machines[index].free.cpus)
        free = machines[freest].free
        machines[freest] = replace(
            machines[freest],
            free=replace(
                free,
                cpus=round(free.cpus + resources.cpus, 6),
                memory_mib=free.memory_mib + resources.memory_mib,
                gpus=free.gpus + resources.gpus,
            ),
        )
    return replace(capacity, machines=tuple(machines))


def _load(job: Job, now: datetime) -> Load:
    """Return the load of an open job: for the job's estimated time if it is queued, else for what is left of that time.

    The load ends at the job's deadline at the latest.
    """
    seconds = float(job.deadline_seconds)
    if not job.is_notebook:  # the estimate in a notebook's quote does not include its extensions
        seconds = min(float(job.order.quote.basis["p50_seconds"]), seconds)
    if job.started_at is not None and job.state != JobState.QUEUED:
        elapsed = (now - job.started_at).total_seconds()
        # Extrapolated from the progress, if the run reports any.
        total = min(elapsed / job.progress, job.deadline_seconds) if job.progress > 0 else seconds
        # A run that has exceeded its estimate is assumed to end at its deadline.
        seconds = total - elapsed if total > elapsed else max(0.0, job.deadline_seconds - elapsed)
    return Load(resources_of(job.node_spec), job.node_spec.name, job.nodes, seconds)

"""The queue of a cluster: choose the job that starts next, and store why the others wait.

The cost of a pass depends on the number of jobs that it starts, not on the length of the queue. Jobs that cannot start
are never loaded. The capacity is stored once per node spec (`CapacitySnapshot`). `waiting` derives from it why a job
waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import reduce
from operator import or_

from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from billing.models import NodeSpec
from console.accounts.models import Quota
from jobs import quotas
from jobs.clusters import resolve_cluster_name, resources_of
from jobs.models import LEAST_NODES, Attempt, CapacitySnapshot, Job
from jobs.states import JobState
from runtime.specs import Capacity, Resources

BACKFILL_LIMIT = timedelta(minutes=10)
"""How long smaller jobs may start ahead of an older job that does not fit yet (backfill). After that, free capacity is
kept for the older job. Without a limit, a steady stream of small jobs would delay it for ever."""
MIN_PAGE, MAX_PAGE = 8, 100
"""Bounds of the number of jobs that one query loads. A page has as many jobs as there are free nodes, because no more
can start. The minimum saves queries if jobs of a page exceed their quota; the maximum limits memory."""
Position = tuple[datetime, int]
"""A place in the queue: when the job was queued, and its id."""


def waiting_specs(cluster_name: str) -> list[NodeSpec]:
    """Return the node specs of a cluster for which at least one queued job is ready to start."""
    ready = Job.objects.filter(_ready_filter(timezone.now()), node_spec=OuterRef("pk"), state=JobState.QUEUED)
    specs = NodeSpec.objects.filter(Exists(ready)).select_related("capacity_snapshot")
    return [spec for spec in specs if resolve_cluster_name(spec.cluster) == cluster_name]


class SchedulingPass:
    """One pass over a cluster's queue, given its capacity. It yields jobs, which the caller starts and reports."""

    def __init__(self, specs: Sequence[NodeSpec], capacity: Capacity, reserved: Iterable[Attempt] = ()) -> None:
        """`reserved`: claimed attempts that the cluster does not have yet. Capacity for them is not given to others."""
        self._specs = {spec.pk: spec for spec in specs}
        self._now = timezone.now()
        self._running_nodes = quotas.running_nodes()  # by organization id
        # Also by organization id. `_free_in_quota` adds the limits of organizations without running nodes.
        limits = Quota.objects.filter(organization__in=self._running_nodes)
        self._node_limits = dict(limits.values_list("organization_id", "max_running_nodes"))
        self._kept_for: Position | None = None  # position of the job for which capacity is kept free
        self._reserved = list(reserved)
        self.update_capacity(capacity)

    def update_capacity(self, capacity: Capacity) -> None:
        """Set the capacity to what the cluster has now, less the reserved attempts."""
        for attempt in self._reserved:
            spec = attempt.job.node_spec
            capacity = capacity_without(capacity, resources_of(spec), attempt.granted_nodes, spec.name)
        self._set_capacity(capacity)

    def _set_capacity(self, capacity: Capacity) -> None:
        """Set the capacity, and derive from it how many nodes of each spec can start."""
        self._capacity = capacity
        self._free_nodes = {pk: capacity.nodes_now(resources_of(spec), spec.name) for pk, spec in self._specs.items()}

    def allocate(self, job: Job, nodes: int) -> None:
        """Subtract from capacity and quota the nodes of a job that is being submitted to the cluster."""
        self._running_nodes[job.organization_id] = self._running_nodes.get(job.organization_id, 0) + nodes
        self._set_capacity(capacity_without(self._capacity, resources_of(job.node_spec), nodes, job.node_spec.name))

    def startable_jobs(self) -> Iterator[tuple[Job, int]]:
        """Yield each job that can start now, oldest first, and the number of nodes for it.

        Before it takes the next job, the caller calls `allocate`, or `update_capacity` if the job could not start.
        """
        position: Position | None = None
        is_last_page = False
        while not is_last_page and (page := self._next_page(position)):
            # Only the last page is smaller than MIN_PAGE. Jobs that fit only later start in a later pass, which each
            # order and each end of a run requests.
            is_last_page = len(page) < MIN_PAGE
            overdue = self._first_overdue_position(position)
            for job in page:
                position = (job.queued_at, job.pk)
                if overdue and overdue < position:  # from here on, jobs could take what the overdue one needs
                    self._kept_for = overdue
                    return
                free_in_quota, free_nodes = self._free_in_quota(job), self._free_nodes[job.node_spec_id]
                if free_in_quota < job.least_nodes:
                    continue
                if free_nodes >= job.least_nodes:
                    yield job, min(job.nodes, free_in_quota, free_nodes)
                elif self._now - job.queued_at > BACKFILL_LIMIT:
                    # The job fitted when the page was loaded, but other jobs of this pass have taken the nodes.
                    self._kept_for = position
                    return

    def save_snapshots(self) -> None:
        """Store the capacity for each node spec. Rows that would not change are not written."""
        queued_at, job_id = self._kept_for or (None, None)
        values = {"answers": True, "kept_for_job": job_id, "kept_for_job_queued_at": queued_at, "drain_reason": ""}
        _store(
            {pk: values | {"free": self._free_nodes[pk], "most": self._max_nodes(pk)} for pk in self._specs},
            self._specs.values(),
        )

    def _queued(self, after: Position | None = None) -> QuerySet[Job]:
        """Return the ready jobs of this pass in the queue's order, with `least`: the nodes that each needs to start."""
        jobs = Job.objects.filter(_ready_filter(timezone.now()), state=JobState.QUEUED, node_spec__in=self._specs)
        if after:
            jobs = jobs.filter(Q(queued_at__gt=after[0]) | Q(queued_at=after[0], pk__gt=after[1]))
        return jobs.alias(least=LEAST_NODES).order_by("queued_at", "pk")

    def _next_page(self, after: Position | None) -> list[Job]:
        """Return the next jobs that fit the free capacity and the quotas that this pass has read so far."""
        fits = [Q(node_spec=pk, least__lte=free) for pk, free in self._free_nodes.items() if free]
        if not fits:
            return []
        jobs = self._queued(after).filter(reduce(or_, fits)).exclude(self._over_quota_filter())
        size = min(MAX_PAGE, max(MIN_PAGE, sum(self._free_nodes.values())))
        return list(jobs.select_related("node_spec", "image", "workspace", "organization__quota")[:size])

    def _first_overdue_position(self, after: Position | None) -> Position | None:
        """Return the position of the first job that has waited for capacity for longer than BACKFILL_LIMIT.

        Jobs for which the quota has no room do not count, nor do jobs that even the empty cluster could not run. The
        filter knows only the quotas that were read so far, so each loaded job is checked again.
        """
        needs_more = [
            Q(node_spec=pk, least__gt=free_nodes, least__lte=max_nodes)
            for pk, free_nodes in self._free_nodes.items()
            if (max_nodes := self._max_nodes(pk)) > free_nodes
        ]
        if not needs_more:
            return None
        waits_for_capacity = reduce(or_, needs_more)
        while True:
            overdue = self._queued(after).filter(waits_for_capacity, queued_at__lt=self._now - BACKFILL_LIMIT)
            jobs = list(overdue.exclude(self._over_quota_filter()).select_related("organization__quota")[:MIN_PAGE])
            for job in jobs:
                after = job.queued_at, job.pk
                if self._free_in_quota(job) >= job.least_nodes:
                    return after
            if len(jobs) < MIN_PAGE:
                return None

    def _max_nodes(self, spec_pk: int) -> int:
        """Return how many nodes of the spec the cluster could run if it were empty."""
        return self._capacity.nodes_ever(resources_of(self._specs[spec_pk]), self._specs[spec_pk].name)

    def _free_in_quota(self, job: Job) -> int:
        """Return how many more nodes the job's organization may run. Store its limit for `_over_quota_filter`."""
        self._node_limits[job.organization_id] = job.organization.quota.max_running_nodes
        return quotas.free_nodes(job, self._running_nodes)

    def _over_quota_filter(self) -> Q:
        """Return the filter for jobs that exceed their organization's quota. It knows the quotas in `_node_limits`."""
        free = {pk: limit - self._running_nodes.get(pk, 0) for pk, limit in self._node_limits.items()}
        used_up = [pk for pk, nodes in free.items() if nodes <= 0]
        too_large = (Q(organization=pk, least__gt=nodes) for pk, nodes in free.items() if nodes > 0)
        return reduce(or_, too_large, Q(organization__in=used_up))


def save_unavailable(specs: Sequence[NodeSpec]) -> None:
    """Store that the cluster of these specs does not answer."""
    _store({spec.pk: {"answers": False} for spec in specs}, specs)


def save_drained(specs: Sequence[NodeSpec], reason: str) -> None:
    """Store that the cluster of these specs is drained, and why."""
    _store({spec.pk: {"answers": True, "drain_reason": reason} for spec in specs}, specs)


def capacity_without(capacity: Capacity, resources: Resources, nodes: int, kind: str = "") -> Capacity:
    """Return the capacity that is left after `nodes` nodes with `resources` start, placed machine by machine.

    `kind` is the name of the node spec. A cluster may reserve machines for nodes of one kind.
    """
    machines = []
    for machine in capacity.machines:
        # Without `elastic`: only what this machine has, not the machines that the cluster would add.
        placed_nodes = min(nodes, replace(capacity, machines=(machine,), elastic=False).nodes_now(resources, kind))
        nodes -= placed_nodes
        free = machine.free
        if placed_nodes:
            free = replace(
                free,
                cpus=round(free.cpus - resources.cpus * placed_nodes, 6),  # fractions of cores are inexact as floats
                memory_mib=free.memory_mib - resources.memory_mib * placed_nodes,
                gpus=free.gpus - resources.gpus * placed_nodes,
            )
        machines.append(replace(machine, free=free))
    return replace(capacity, machines=tuple(machines))


def _ready_filter(now: datetime) -> Q:
    """Return the filter for jobs whose wait before a retry is over, and whose packages are installed."""
    return Q(awaits_packages=False) & (Q(not_before=None) | Q(not_before__lte=now))


def _store(values_by_spec: Mapping[int, Mapping[str, object]], specs: Iterable[NodeSpec]) -> None:
    """Write columns of the specs' snapshots, by the id of the spec. Unchanged rows are not written.

    `specs` come from `waiting_specs`, which has loaded the stored snapshots.
    """
    for spec in specs:
        stored: CapacitySnapshot | None = getattr(spec, "capacity_snapshot", None)
        values = values_by_spec[spec.pk]
        if stored is not None and all(getattr(stored, name) == value for name, value in values.items()):
            continue
        if stored is None or not CapacitySnapshot.objects.filter(pk=stored.pk).update(**values):
            # There is no row yet, or it was deleted since it was loaded.
            CapacitySnapshot.objects.update_or_create(node_spec_id=spec.pk, defaults=values)

"""What starts next on a cluster, and why the rest waits.

Hides how a queue of any length is read. The one rule: a pass costs what it starts, not what waits: a job that can't
start is never loaded, and why it waits is kept once for its node spec (`Room`) and put together when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet, Sum
from django.utils import timezone

from billing.models import NodeSpec
from console.accounts.models import Organization, Quota
from console.operations.kept import Kept, given
from jobs.backend import cluster_named, resources_of
from jobs.models import LEAST_NODES, Attempt, Job, Room
from jobs.states import ACTIVE, JobState
from runtime.specs import Capacity, Resources

PATIENCE = timedelta(minutes=10)
"""Smaller jobs may overtake one that doesn't fit until it has waited this long; then room is kept free for it."""
AGAIN = frozenset({"retry", "backoff"})
"""Codes of jobs that wait for another attempt."""
SMALL_PAGE, LARGEST_PAGE = 8, 100
Position = tuple[datetime, int]
"""A place in the queue: when a job was queued, and its id."""


def waiting_specs(cluster: str = "") -> dict[str, list[NodeSpec]]:
    """Node specs that jobs wait for now, by cluster (or of one)."""
    found: dict[str, list[NodeSpec]] = {}
    for spec in _WANTED_SPECS.all(now=timezone.now()):
        name = cluster_named(spec.cluster)
        if cluster in {"", name}:
            found.setdefault(name, []).append(spec)
    return found


def running_nodes(organization: Organization | int | None = None) -> dict[int, int]:
    """Nodes in use by organization (or of one): what open attempts were granted, on whatever cluster."""
    return dict(_IN_USE.all() if organization is None else _IN_USE_BY.all(organization=organization))


def locked_quota(organization: Organization) -> Quota:
    """The organization's quota, locked until the transaction ends: its orders and its claims come one after the other.

    So two orders at once can't both buy one quote, or both take the last place; nor two claims the last nodes.
    """
    return _QUOTA.get(organization=organization)


def room_in_quota(job: Job, running: dict[int, int]) -> int:
    """How many more nodes the job's organization may run."""
    return job.organization.quota.max_running_nodes - running.get(job.organization_id, 0)


class Pass:
    """One look at the queue of a cluster, with `capacity` as it was told; the caller says what it started."""

    def __init__(self, specs: Sequence[NodeSpec], capacity: Capacity) -> None:
        self._specs = {spec.pk: spec for spec in specs}
        self._now = timezone.now()
        self._running = running_nodes()
        quotas = Quota.objects.filter(organization__in=self._running)
        self._most_in_quota = dict(quotas.values_list("organization_id", "max_running_nodes"))
        self._held: Position | None = None
        self.refresh(capacity)

    def refresh(self, capacity: Capacity) -> None:
        """The cluster said anew what it has: something was not as it seemed."""
        self._capacity = capacity
        self._free = {pk: capacity.nodes_now(resources_of(spec), spec.name) for pk, spec in self._specs.items()}

    def take(self, job: Job, nodes: int) -> None:
        """`nodes` nodes of the job's spec were handed to the cluster."""
        self._running[job.organization_id] = self._running.get(job.organization_id, 0) + nodes
        self.refresh(without(self._capacity, resources_of(job.node_spec), nodes, job.node_spec.name))

    def startable(self) -> Iterator[tuple[Job, int]]:
        """Each job that may start now, oldest first, and on how many nodes. What is taken between two counts."""
        last: Position | None = None
        is_last = False
        while not is_last and (page := self._page(last)):
            # What comes to fit while this one is gone through, by an end or an order, has a pass of its own.
            is_last = len(page) < SMALL_PAGE
            holder = self._holder(last)
            for job in page:
                last = (job.queued_at, job.pk)
                if holder and holder < last:
                    self._held = holder
                    return
                room, free = self._room_in_quota(job), self._free[job.node_spec_id]
                if room < job.least_nodes:
                    continue
                if free >= job.least_nodes:
                    yield job, min(job.nodes, room, free)
                elif self._now - job.queued_at > PATIENCE:
                    self._held = last
                    return

    def close(self) -> None:
        """Write down what there was: rows that say so already are left alone."""
        held_from, held_job = self._held or (None, None)
        seen = {
            pk: {
                "free": self._free[pk],
                "most": self._most_ever(pk),
                "answers": True,
                "held_from": held_from,
                "held_from_job": held_job,
            }
            for pk in self._specs
        }
        _write_down(seen, self._specs.values())

    def _queued(self, after: Position | None = None) -> QuerySet[Job]:
        jobs = Job.objects.filter(_ready(timezone.now()), state=JobState.QUEUED, node_spec__in=self._specs)
        if after:
            jobs = jobs.filter(Q(queued_at__gt=after[0]) | Q(queued_at=after[0], pk__gt=after[1]))
        return jobs.alias(least=LEAST_NODES).order_by("queued_at", "pk")

    def _page(self, after: Position | None) -> list[Job]:
        """The next jobs that fit, by what is known of quotas."""
        fits = [Q(node_spec=pk, least__lte=free) for pk, free in self._free.items() if free]
        if not fits:
            return []
        wanted = self._queued(after).filter(reduce(or_, fits)).exclude(self._over_quota())
        page = min(LARGEST_PAGE, max(SMALL_PAGE, sum(self._free.values())))
        return list(wanted.select_related("node_spec", "image", "workspace", "organization__quota")[:page])

    def _holder(self, after: Position | None) -> Position | None:
        """The first job that has waited too long for the room it needs, though its quota has room."""
        small = [
            Q(node_spec=pk, least__gt=free, least__lte=most)
            for pk, free in self._free.items()
            if (most := self._most_ever(pk)) > free
        ]
        if not small:
            return None
        large = reduce(or_, small)
        while True:
            waited = self._queued(after).filter(large, queued_at__lt=self._now - PATIENCE).exclude(self._over_quota())
            found = list(waited.select_related("organization__quota")[:SMALL_PAGE])
            for job in found:
                after = job.queued_at, job.pk
                if self._room_in_quota(job) >= job.least_nodes:
                    return after
            if len(found) < SMALL_PAGE:
                return None

    def _most_ever(self, spec: int) -> int:
        return self._capacity.nodes_ever(resources_of(self._specs[spec]), self._specs[spec].name)

    def _room_in_quota(self, job: Job) -> int:
        self._most_in_quota[job.organization_id] = job.organization.quota.max_running_nodes
        return room_in_quota(job, self._running)

    def _over_quota(self) -> Q:
        """Jobs of organizations met so far that their quota keeps waiting."""
        rooms = {pk: most - self._running.get(pk, 0) for pk, most in self._most_in_quota.items()}
        full = [pk for pk, room in rooms.items() if room <= 0]
        partly = (Q(organization=pk, least__gt=room) for pk, room in rooms.items() if room > 0)
        return reduce(or_, partly, Q(organization__in=full))


def does_not_answer(specs: Sequence[NodeSpec]) -> None:
    """Write down that the cluster of these specs does not answer."""
    _write_down({spec.pk: {"answers": False} for spec in specs}, specs)


def why(job: Job) -> tuple[str, dict[str, Any]]:
    """Why a job of `selectors.jobs_for` waits in the queue: a code, and the figures it needs."""
    room: Room | None = getattr(job.node_spec, "room", None)
    if room is None or (job.not_before and job.not_before > timezone.now()):
        return job.waiting_code, job.waiting_data
    running: int = job.running_nodes  # type: ignore[attr-defined]  # an annotation of `jobs_for`
    most = job.organization.quota.max_running_nodes
    if not room.answers:
        told: tuple[str, dict[str, Any]] = ("backend_unavailable", {})
    elif most - running < job.least_nodes:
        told = "quota", {"running": running, "most": most}
    elif room.most < job.least_nodes:
        told = "too_large", {"most": room.most}
    elif room.free < job.least_nodes:
        told = "capacity", {"free": room.free}
    elif room.held_from and (room.held_from, room.held_from_job) < (job.queued_at, job.pk):
        told = "reserved", {}
    else:
        told = job.waiting_code, job.waiting_data
    return told


def cluster_answers(job: Job) -> bool:
    """Whether the cluster of a job's node spec did when it was last asked. For `selectors.jobs_for`'s."""
    room: Room | None = getattr(job.node_spec, "room", None)
    return room is None or room.answers


def without(capacity: Capacity, resources: Resources, nodes: int, kind: str = "") -> Capacity:
    """What is left of it once `nodes` more nodes of `resources` run, filled machine by machine."""
    left = []
    for machine in capacity.machines:
        placed = min(nodes, replace(capacity, machines=(machine,), elastic=False).nodes_now(resources, kind))
        nodes -= placed
        free = machine.free
        if placed:
            free = replace(
                free,
                cpus=round(free.cpus - resources.cpus * placed, 6),
                memory_mib=free.memory_mib - resources.memory_mib * placed,
                gpus=free.gpus - resources.gpus * placed,
            )
        left.append(replace(machine, free=free))
    return replace(capacity, machines=tuple(left))


def _ready(now: Any) -> Q:
    return Q(not_before=None) | Q(not_before__lte=now)


def _in_use() -> QuerySet[Attempt, tuple[int, int]]:
    attempts = Attempt.objects.filter(finished_at=None, job__state__in=ACTIVE).order_by()
    return attempts.values_list("job__organization_id").annotate(total=Sum("granted_nodes"))


_WANTED_SPECS = Kept(
    lambda: NodeSpec.objects.filter(
        Exists(Job.objects.filter(_ready(given("now")), node_spec=OuterRef("pk"), state=JobState.QUEUED))
    ).select_related("room")
)
_IN_USE = Kept(_in_use)
_QUOTA = Kept(lambda: Quota.objects.select_for_update().filter(organization=given("organization")))
_IN_USE_BY = Kept(lambda: _in_use().filter(job__organization=given("organization")))


def _write_down(seen: Mapping[int, dict[str, Any]], specs: Iterable[NodeSpec]) -> None:
    """Bring the rows of specs of `waiting_specs` up to what was seen."""
    for spec in specs:
        room, values = getattr(spec, "room", None), seen[spec.pk]
        if room is not None and all(getattr(room, name) == value for name, value in values.items()):
            continue
        if room is None or not Room.objects.filter(pk=room.pk).update(**values):
            Room.objects.update_or_create(node_spec_id=spec.pk, defaults=values)

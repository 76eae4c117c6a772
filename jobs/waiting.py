"""Find out why a job waits in the queue, from its row and the snapshot of the last scheduling pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.utils import timezone

from jobs.models import CapacitySnapshot, Job

RETRY_CODES = frozenset({"retry", "backoff"})
"""Waiting codes of jobs that wait for another attempt after a failed one: `backoff` until a set time, `retry` only for
capacity."""


@dataclass(frozen=True)
class WaitingReason:
    """Why a job waits: a code, and the figures that `messages.waiting_sentence` needs for it."""

    code: str
    data: dict[str, Any] = field(default_factory=dict)


def waiting_reason(job: Job) -> WaitingReason:
    """Return why a queued job waits. `job` comes from `selectors.jobs_for`."""
    snapshot = snapshot_of(job)
    if job.awaits_packages:
        # A Kubernetes cluster installs the packages of its jobs itself. The console's machine needs no cluster for it.
        is_away = snapshot is not None and not snapshot.answers and job.packages is not None and job.packages.cluster
        return WaitingReason("backend_unavailable" if is_away else "packages")
    own_reason = WaitingReason(job.waiting_code, job.waiting_data)
    if snapshot is None or (job.not_before and job.not_before > timezone.now()):
        return own_reason
    # The nodes that the job's organization runs, in all of its jobs: an annotation of `jobs_for`.
    running_nodes: int = job.running_nodes  # type: ignore[attr-defined]
    limit = job.organization.quota.max_running_nodes
    if not snapshot.answers:
        reason = WaitingReason("backend_unavailable")
    elif snapshot.drain_reason:
        reason = WaitingReason("drained", {"why": snapshot.drain_reason})
    elif limit - running_nodes < job.least_nodes:
        reason = WaitingReason("quota", {"running": running_nodes, "most": limit})
    elif snapshot.most < job.least_nodes:  # even an empty cluster could not run it
        reason = WaitingReason("too_large", {"most": snapshot.most})
    elif snapshot.free < job.least_nodes:
        reason = WaitingReason("capacity", {"free": snapshot.free})
    elif snapshot.kept_for_job_queued_at and (
        # Positions in the queue. A job behind the job for which capacity is kept free waits, even if it fits.
        (snapshot.kept_for_job_queued_at, snapshot.kept_for_job) < (job.queued_at, job.pk)
    ):
        reason = WaitingReason("reserved")
    else:
        reason = own_reason  # the job's own: a retry, or a cluster that refused its run for lack of capacity
    return reason


def cluster_answers(job: Job) -> bool:
    """Whether the job's cluster answered when its capacity was last needed. `job` comes from `selectors.jobs_for`."""
    snapshot = snapshot_of(job)
    return snapshot is None or snapshot.answers


def snapshot_of(job: Job) -> CapacitySnapshot | None:
    """Return the last snapshot for the job's node spec; None before the first scheduling pass."""
    snapshot: CapacitySnapshot | None = getattr(job.node_spec, "capacity_snapshot", None)
    return snapshot

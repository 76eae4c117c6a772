"""The states of a job, its end reasons, and the allowed transitions. Pure.

The end reason decides the final state (`END_STATE`) and whether the customer pays (`BILLED`). `docs/architecture.md`
draws `TRANSITIONS`; a test compares the two.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any


class JobState(enum.StrEnum):
    """State of a job."""

    QUEUED = "queued"
    STARTING = "starting"
    """An attempt is claimed, and its nodes do not run yet."""
    RUNNING = "running"
    STOPPING = "stopping"
    """A cancel was requested, and the run has not ended yet."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EndReason(enum.StrEnum):
    """Why an attempt ended, or the job as a whole."""

    COMPLETED = "completed"
    CODE_FAILED = "code_failed"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    HUNG = "hung"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    NO_CAPACITY = "no_capacity"
    NODE_LOST = "node_lost"
    PLATFORM_ERROR = "platform_error"
    PACKAGES_FAILED = "packages_failed"
    """The packages of the requirements file could not be installed. The job has no attempt."""


TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED, JobState.FAILED}),
    JobState.STARTING: frozenset(
        {
            JobState.RUNNING,
            JobState.STOPPING,
            JobState.QUEUED,
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.CANCELLED,
        }
    ),
    JobState.RUNNING: frozenset(
        {JobState.STOPPING, JobState.QUEUED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.STOPPING: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
"""The states that may follow each state."""

ENDED: frozenset[JobState] = frozenset(state for state, following in TRANSITIONS.items() if not following)
"""Final states."""
OPEN: frozenset[JobState] = frozenset(JobState) - ENDED
"""States that are not final. Queries that use an index on the state filter by these, because PostgreSQL can't use such
an index to exclude ENDED."""
ACTIVE: frozenset[JobState] = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STOPPING})
"""States in which a cluster may have a run of the job."""

END_STATE: dict[EndReason, JobState] = {
    EndReason.COMPLETED: JobState.SUCCEEDED,
    EndReason.CODE_FAILED: JobState.FAILED,
    EndReason.OUT_OF_MEMORY: JobState.FAILED,
    EndReason.DISK_FULL: JobState.FAILED,
    EndReason.HUNG: JobState.FAILED,
    EndReason.CANCELLED: JobState.CANCELLED,
    EndReason.TIME_LIMIT: JobState.FAILED,
    EndReason.NO_CAPACITY: JobState.FAILED,
    EndReason.NODE_LOST: JobState.FAILED,
    EndReason.PLATFORM_ERROR: JobState.FAILED,
    EndReason.PACKAGES_FAILED: JobState.FAILED,
}
"""The final state of a job by the reason of its end."""

BILLED: frozenset[EndReason] = frozenset(
    {
        EndReason.COMPLETED,
        EndReason.CODE_FAILED,
        EndReason.OUT_OF_MEMORY,
        EndReason.DISK_FULL,
        EndReason.HUNG,
        EndReason.CANCELLED,
        EndReason.TIME_LIMIT,
    }
)
"""Reasons after which the customer pays for the time used; for a hang, for the time before its last sign of progress.
The run is free for all other reasons."""

PLATFORM_FAULTS: frozenset[EndReason] = frozenset(EndReason) - BILLED - {EndReason.PACKAGES_FAILED}
"""Reasons that the platform is responsible for. The attempt is free, and is retried for free. PACKAGES_FAILED is
neither billed nor in this set, because the job then has no attempt."""

CODE_FAILURES: frozenset[EndReason] = frozenset({EndReason.CODE_FAILED, EndReason.OUT_OF_MEMORY, EndReason.HUNG})
"""Failures of the code that may be transient. They are retried as often as the order says, a hang only with
OnHang.RETRY. Each attempt is billed."""


class OnHang(enum.StrEnum):
    """The policy for a run that shows no sign of progress."""

    STOP = "stop"
    RETRY = "retry"
    IGNORE = "ignore"
    """Hangs are not detected: their time is billed, up to the ceiling."""


def pays_for_hang(failure: Mapping[str, Any] | None) -> bool:
    """Whether a hung run pays for the hang too: until it was ended, and not only until its last sign of progress.

    `failure` is a `runtime.specs.Failure` as JSON data. Only the Kubernetes backend sets `charged_whole` in it, for
    customers' images: their code could claim that the run hung earlier than it did.
    """
    return bool(((failure or {}).get("data") or {}).get("charged_whole"))


def may_follow(current: JobState, following: JobState) -> bool:
    """Whether a job may change from `current` to `following`."""
    return following in TRANSITIONS[current]

"""The life of a job: its states, why it ends, which change may follow which. PURE.

The reason is primary: the final state and who pays follow from it (`END_STATE`, `BILLED`). `docs/architecture.md` draws
`TRANSITIONS`, and a test holds the two equal.
"""

from __future__ import annotations

import enum


class JobState(enum.StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EndReason(enum.StrEnum):
    """Why a job, or one attempt at it, ended."""

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

ENDED: frozenset[JobState] = frozenset(state for state, following in TRANSITIONS.items() if not following)
"""States that nothing follows."""
ACTIVE: frozenset[JobState] = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STOPPING})
"""States in which the backend may hold a run of the job."""

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
}

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
"""The time used is the customer's; of a hang, up to the last sign of progress.

Any other reason is the platform's fault, costs nothing and is retried free.
"""

RETRIED: frozenset[EndReason] = frozenset(EndReason) - BILLED

RETRIABLE: frozenset[EndReason] = frozenset({EndReason.CODE_FAILED, EndReason.OUT_OF_MEMORY, EndReason.HUNG})
"""Faults of the code that may not come again: tried again as often as the order bought."""


class OnHang(enum.StrEnum):
    """What an order wants of a run that shows no sign of progress."""

    STOP = "stop"
    RETRY = "retry"
    IGNORE = "ignore"
    """It is not watched: the time it hangs is paid, up to the ceiling."""


def may_follow(current: JobState, following: JobState) -> bool:
    """Whether `following` may come after `current`."""
    return following in TRANSITIONS[current]

"""Explain why a run has not started, by the state of its job and the reason that Slurm gives. Pure.

Reasons are those of `squeue`; see https://slurm.schedmd.com/squeue.html#SECTION_JOB-REASON-CODES.
"""

from __future__ import annotations

from runtime.backends.slurm.states import SlurmJob
from runtime.specs import Waiting, WaitingCode

# Slurm's reasons, by their meaning for a run.
_BUSY = frozenset({"Priority", "Resources", "Licenses", "Dependency", "JobArrayTaskLimit", "Prolog"})
# BeginTime: after a requeue Slurm gives a job a start time some seconds ahead.
_STARTING = frozenset({"None", "", "BeginTime", "Cleaning", "WaitingForScheduling"})
_HELD = frozenset({"JobHeldAdmin", "JobHeldUser", "JobHoldMaxRequeue", "launch failed requeued held"})
_CLOSED = frozenset(
    {
        *("ReqNodeNotAvail", "NodeDown", "Reservation", "ReservationDeleted", "PartitionDown", "PartitionInactive"),
        *("FrontEndDown", "BlockMaxError", "BlockFreeAction"),
        # Slurm's text goes on: ", DRAINED or reserved for jobs in higher priority partitions".
        "Nodes required for job are DOWN",
    }
)
_TOO_LARGE = frozenset({"BadConstraints", "PartitionNodeLimit", "PartitionConfig"})
_LIMIT_PREFIXES = ("Assoc", "QOS", "MaxJobs", "MaxNode", "MaxCpu", "MaxMem", "MaxGRES", "MaxTRES", "MaxBilling")
_NOT_AWAITED = ("PerJob", "PerNode", "NotSatisfied", "NotAllowed")
"""Parts of the reasons of limits that one job alone violates, such as AssocMaxWallDurationPerJobLimit or
QOSMinCpuNotSatisfied. No other job affects them, so waiting for one does not help."""


def explain_waiting(job: SlurmJob | None, *, is_importing: bool = False) -> Waiting:
    """Return why the nodes of a run do not run yet. `job` is None if Slurm does not list the run's job.

    `is_importing`: node 0 has begun to import the run's own image, and has not finished.
    """
    if job is None or not job.is_waiting:  # Slurm lists every waiting job, so one that is missing has been started
        if is_importing:
            return Waiting(WaitingCode.STARTING, {"step": "image"}, "The image of the run is pulled and unpacked.")
        return Waiting(WaitingCode.STARTING, {"step": "supervisor"}, "Slurm has started the nodes of the run.")
    # Some reasons have details after a comma: "ReqNodeNotAvail, UnavailableNodes:n1".
    reason = job.reason.partition(",")[0].strip("() ")
    if reason in _STARTING:
        return Waiting(WaitingCode.STARTING, {"step": "place"}, "Slurm is placing the nodes of the run.")
    code, sentence = _code_and_sentence(reason)
    return Waiting(code, {"detail": reason}, f"{sentence} ({reason}).")


def _code_and_sentence(reason: str) -> tuple[WaitingCode, str]:
    """Return the code for a reason of Slurm, and an English sentence without its full stop."""
    if reason in _HELD or reason.endswith("held"):
        return WaitingCode.HELD, "The run is held in Slurm's queue"
    if reason.startswith(_LIMIT_PREFIXES):
        if any(part in reason for part in _NOT_AWAITED):
            return WaitingCode.CLUSTER_RULE, "A rule of the account or QOS forbids the run"
        return WaitingCode.CLUSTER_LIMIT, "A limit of the account or QOS is reached"
    for reasons, code, sentence in (
        (_CLOSED, WaitingCode.MACHINES_CLOSED, "Machines that fit are reserved or down"),
        (_TOO_LARGE, WaitingCode.TOO_LARGE, "No machine of the partition fits"),
        (_BUSY, WaitingCode.CLUSTER_QUEUE, "The run waits in Slurm's queue"),
    ):
        if reason in reasons:
            return code, sentence
    return WaitingCode.UNSCHEDULABLE, "Slurm does not start the run"

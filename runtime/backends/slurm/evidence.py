"""Decide what became of each node of a run, from its supervisor's record and from what Slurm says. Pure.

Only Slurm's own words make a run free after customer code has begun: a failed machine, a preemption, an administrator's
cancellation. A supervisor that ended without a last record while Slurm reports none of these was ended by the run
itself, for example by using up the memory of its job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from runtime.backends.slurm.states import JobState
from runtime.specs import FailureCode, Outcome

Record = dict[str, Any]
Loss = dict[str, Any]
"""A cause, as a rule without `at` and `node`: see `supervision.outcome.merge`."""

ENDED_BY_SLURM = "ended_by_slurm"
"""In the data of a cause: the supervisor got SIGTERM from Slurm, which does not say why."""
SILENT_SECONDS = 120.0
"""How long a supervisor may send no heartbeat while Slurm says that its job runs. It sends one every 5 s; shared
storage that pauses for a minute ends no run."""
LOST_SECONDS = 15.0
"""The same on a machine that Slurm considers as failed: three heartbeats."""
SETTLE_SECONDS = 3.0
"""How long after the end of a job its supervisors' last records may take to be visible on shared storage."""
_SIMULTANEOUS_SECONDS = 1.0
"""A rank that failed so soon before its node was ended by Slurm failed because of that."""
_MACHINE_FAULTS = frozenset({"NODE_FAIL", "BOOT_FAIL"})
_LIMITS = frozenset({"TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"})
_BY_SLURM = _LIMITS | {"PREEMPTED"}
"""States that Slurm gives a job by itself, even if the console has asked for its end."""


@dataclass(frozen=True)
class Request:
    """A request of the console to end the run, in Unix seconds. `loss` describes it as a cause."""

    at: float
    grace_seconds: float
    loss: Loss


@dataclass(frozen=True)
class Scene:
    """What is known about a run besides its supervisors' records.

    `job` is None if Slurm no longer knows it. `failed_machines` are the run's machines that Slurm considers as failed.
    `now` is in Unix seconds.
    """

    job: JobState | None
    request: Request | None
    failed_machines: Set[str]
    submitted_at: float
    now: float

    @property
    def is_over(self) -> bool:
        """Whether no process of the job is left, and its supervisors' last records are visible."""
        if self.job is None:
            return True
        return not self.job.is_active and self.now >= self.job.ended_at + SETTLE_SECONDS


def assess(node: int, record: Record | None, scene: Scene) -> Record:
    """Return a node's record for `supervision.outcome.merge`, which has the loss if the node was lost."""
    if record is None:
        return _unstarted(node, scene)
    if record["phase"] == "ended":
        return _explained(record, scene)
    loss = _loss(record, scene)
    if loss is None:
        return {**record, "alive": not scene.is_over}
    return {**record, "alive": False, "loss": loss}


def needs_slurm(records: Sequence[Record | None], now: float, max_silence: float) -> bool:
    """Whether the records alone do not tell the state of the run."""
    return any(
        record is None
        or _slurm_cause(record) is not None
        or (record["phase"] != "ended" and now - record["seen_at"] > max_silence)
        for record in records
    )


def _unstarted(node: int, scene: Scene) -> Record:
    """Return the record of a node whose supervisor has written none."""
    record: Record = {
        "node": node,
        "phase": "starting",
        "address": "",
        "started_at": None,
        "finished_at": None,
        "exit_code": None,
        "detail": "",
        "causes": [],
        "alive": not scene.is_over,
        "silent": False,
        "seen_at": scene.submitted_at,
    }
    if not scene.is_over:
        return record
    ended_at = scene.job.ended_at if scene.job is not None and scene.job.ended_at else scene.submitted_at
    loss = _request_loss(scene) or _not_started(scene.job)
    return {
        **record,
        "phase": "ended",
        "finished_at": ended_at,
        "causes": [{**loss, "at": ended_at, "node": node}],
    }


def _not_started(job: JobState | None) -> Loss:
    state = "" if job is None else job.state
    if state in _MACHINE_FAULTS:
        return cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, f"Slurm reports {state} for the run's job.")
    if state == "PREEMPTED":
        return cause(Outcome.NODE_LOST, FailureCode.PREEMPTED, "Slurm preempted the run's job.")
    if state == "CANCELLED":
        return cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, "The run's job was cancelled in Slurm.")
    message = f"The node's supervisor did not start. Slurm reports {state or 'nothing'} for the run's job."
    return cause(Outcome.PLATFORM_ERROR, FailureCode.NODE_NOT_STARTED, message)


def _explained(record: Record, scene: Scene) -> Record:
    """Return a last record, with Slurm's reason in place of a cause that says only that Slurm ended the node."""
    by_slurm = _slurm_cause(record)
    if by_slurm is None:
        return {**record, "alive": True}
    if not scene.is_over:
        # The outcome is stored once, so the run does not end before Slurm says why.
        return {**record, "phase": "stopping", "alive": True}
    loss = _loss_by_state(record, scene)
    if loss is None:
        return {**record, "alive": True}
    # Slurm signals all processes of a node at once, so a rank may seem to fail before its supervisor was asked to end.
    at = float(by_slurm["at"]) - _SIMULTANEOUS_SECONDS
    earlier = [each for each in record["causes"] if each is not by_slurm and float(each["at"]) < at]
    return {**record, "alive": True, "causes": [*earlier, {**by_slurm, "at": at, **loss}]}


def _slurm_cause(record: Record) -> Mapping[str, Any] | None:
    causes = record.get("causes") or ()
    return next((each for each in causes if (each.get("data") or {}).get(ENDED_BY_SLURM)), None)


def _loss(record: Record, scene: Scene) -> Loss | None:
    """Return why a supervisor without a last record has ended; None while it runs."""
    silence_seconds = scene.now - record["seen_at"]
    if record.get("machine") in scene.failed_machines and (scene.is_over or silence_seconds > LOST_SECONDS):
        return _machine_lost(record)
    if scene.job is not None and scene.job.is_waiting:
        message = f"Slurm put the run's job back into its queue, which ended node {record['node']}."
        return cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, message)
    if _is_silent(record, scene):
        message = f"The supervisor of node {record['node']} gave no sign of life."
        return cause(Outcome.NODE_LOST, FailureCode.NODE_SILENT, message)
    if not scene.is_over:
        return None
    loss = _loss_by_state(record, scene)
    return _unexplained(record, scene) if loss is None else loss


def _is_silent(record: Record, scene: Scene) -> bool:
    return scene.job is not None and scene.job.is_active and scene.now - record["seen_at"] > SILENT_SECONDS


def _loss_by_state(record: Record, scene: Scene) -> Loss | None:
    """Return why Slurm ended a node that had started, by the state of its job; None if Slurm gives no reason."""
    node, state = record["node"], "" if scene.job is None else scene.job.state
    if record.get("machine") in scene.failed_machines:
        return _machine_lost(record)
    if state in _MACHINE_FAULTS:
        message = f"Node {node} was lost: Slurm reports {state} for the run's job."
        loss = cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, message)
        # The node on a machine that failed comes first. A machine may also be back in service by now.
        if scene.failed_machines and scene.job is not None:
            loss["at"] = scene.job.ended_at + 1.0
        return loss
    if state in _LIMITS and record["started_at"] is None:
        return _not_started(scene.job)
    losses = {
        "PREEMPTED": cause(Outcome.NODE_LOST, FailureCode.PREEMPTED, f"Slurm preempted node {node} of the run."),
        "TIMEOUT": cause(Outcome.TIME_LIMIT, FailureCode.TIME_LIMIT, "The run reached its time limit."),
        "DEADLINE": cause(Outcome.TIME_LIMIT, FailureCode.TIME_LIMIT, "The run reached its time limit."),
        "OUT_OF_MEMORY": cause(
            Outcome.OUT_OF_MEMORY, FailureCode.OUT_OF_MEMORY, f"Node {node} used more memory than its job has."
        ),
        "CANCELLED": cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, "The run's job was cancelled in Slurm."),
    }
    # A job that the console stops may end in any other state.
    if state in _BY_SLURM:
        return losses[state]
    return _request_loss(scene) or losses.get(state)


def _request_loss(scene: Scene) -> Loss | None:
    return None if scene.request is None else scene.request.loss


def _unexplained(record: Record, scene: Scene) -> Loss:
    """Return the loss of a node whose supervisor ended although Slurm reports no fault."""
    node = record["node"]
    if scene.job is None:
        message = f"Node {node} ended without a last record, and Slurm no longer knows the run's job."
        return cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, message)
    if record["started_at"] is None:
        message = f"Node {node} broke down while it started. Slurm reports {scene.job.state}."
        return cause(Outcome.PLATFORM_ERROR, FailureCode.NODE_NOT_STARTED, message)
    message = f"The supervisor of node {node} ended although Slurm reports no fault ({scene.job.state})."
    return cause(Outcome.CODE_FAILED, FailureCode.LAUNCHER_KILLED, message)


def _machine_lost(record: Record) -> Loss:
    message = f"Node {record['node']} was lost: Slurm reports that the machine {record.get('machine', '')} failed."
    return cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, message)


def cause(outcome: Outcome, code: FailureCode, message: str, data: Mapping[str, Any] | None = None) -> Loss:
    """Return a cause without its time and node."""
    return {"kind": outcome.value, "code": code.value, "message": message, "data": dict(data or {})}

"""Decide the state of each node of a run, and why it ended, from its supervisor's record and Slurm's report. Pure.

If a node ends after customer code has begun, and its record does not say why, the run is free of charge only in these
cases:

- Slurm reports a failed machine, a preemption, a requeue or an administrator's cancellation.
- Slurm no longer knows the job.
- Slurm reports that the job runs, but a supervisor sends no heartbeat.

In any other case, the run itself is held responsible. It may, for example, have used up the memory of its job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from runtime.backends.slurm.states import SlurmJob
from runtime.specs import FailureCode, Outcome

RecordData = dict[str, Any]
"""A node's record, as in `supervision.outcome`."""
Cause = dict[str, Any]
"""A cause as in a record: why a node ended. `supervision.outcome.merge` adds `at` and `node` if they are missing."""

ENDED_BY_SLURM = "ended_by_slurm"
"""Key in a cause's data: whether the supervisor ended its node because of Slurm's SIGTERM, which gives no reason."""
SILENT_SECONDS = 120.0
"""How long a supervisor may send no heartbeat while Slurm reports that its job runs. It sends one every 5 s. The limit
is far longer, so that a run survives if shared storage does not respond for a minute."""
LOST_SECONDS = 15.0
"""How long a supervisor may send no heartbeat if Slurm reports its machine as failed: three intervals."""
SETTLE_SECONDS = 3.0
"""How long after a job's end the last records of its supervisors may take to be visible. NFS clients cache folders for
some seconds."""
_SIMULTANEOUS_SECONDS = 1.0
"""A rank that fails at most this long before its supervisor gets Slurm's signal counts as ended by the same signal.
Slurm signals the processes of a node one after another, within milliseconds; a busy machine may take longer."""
_MACHINE_FAULTS = frozenset({"NODE_FAIL", "BOOT_FAIL"})
"""States of a job whose machine failed."""
_LIMITS = frozenset({"TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"})
"""States of a job that reached a limit."""
_SET_BY_SLURM = _LIMITS | {"PREEMPTED"}
"""States that a request of the console never causes. They explain a job's end even if there was such a request."""


@dataclass(frozen=True)
class EndRequest:
    """A request of the console to end the run. `at` is in Unix seconds; `cause` describes the request."""

    at: float
    grace_seconds: float
    cause: Cause


@dataclass(frozen=True)
class Observation:
    """All facts about a run except its supervisors' records, as observed at `now` (Unix seconds).

    `job` is None if Slurm no longer knows it. `failed_machines` are the run's machines that Slurm reports as failed.
    """

    job: SlurmJob | None
    end_request: EndRequest | None
    failed_machines: Set[str]
    submitted_at: float
    now: float

    @property
    def job_has_ended(self) -> bool:
        """Whether no process of the job is left or will start, and its supervisors' last records are visible.

        A job that Slurm no longer knows counts as ended.
        """
        if self.job is None:
            return True
        return not self.job.is_active and self.now >= self.job.ended_at + SETTLE_SECONDS


def assess(node: int, record: RecordData | None, observation: Observation) -> RecordData:
    """Return a node's record with the fields that `supervision.outcome.merge` needs.

    `record` is None if the supervisor has written none. The result has the field `loss` if the node was lost. A *last
    record* has the phase `ended`. A node with one still counts as `alive`, that is, as not lost: its supervisor has
    exited normally, or is about to.
    """
    if record is None:
        return _unstarted_record(node, observation)
    if record["phase"] == "ended":
        return _with_slurms_reason(record, observation)
    loss_cause = _loss_cause(record, observation)
    if loss_cause is None:
        return {**record, "alive": True}
    return {**record, "alive": False, "loss": loss_cause, "finished_at": _lost_at(record, observation)}


def needs_slurm(records: Sequence[RecordData | None], now: float, max_silence_seconds: float) -> bool:
    """Return whether the records do not show the run's state, so that Slurm must be asked.

    Slurm must be asked if a node has no record, if Slurm has ended a node, or if a node has sent no heartbeat for
    `max_silence_seconds`.
    """
    return any(
        record is None
        or _slurm_cause(record) is not None
        or (record["phase"] != "ended" and now - record["seen_at"] > max_silence_seconds)
        for record in records
    )


def _unstarted_record(node: int, observation: Observation) -> RecordData:
    """Return the record of a node whose supervisor has written none."""
    record: RecordData = {
        "node": node,
        "phase": "starting",
        "address": "",
        "started_at": None,
        "finished_at": None,
        "exit_code": None,
        "detail": "",
        "causes": [],
        "alive": not observation.job_has_ended,
        "silent": False,  # a field for `merge`; never True on Slurm, where a node without heartbeats has a `loss`
        "seen_at": observation.submitted_at,
    }
    if not observation.job_has_ended:
        return record
    job_ended_at = 0.0 if observation.job is None else observation.job.ended_at
    ended_at = job_ended_at or observation.submitted_at  # `ended_at` of a job is 0 if it is not known
    cause = _requested_cause(observation) or _start_failure_cause(observation.job)
    return {
        **record,
        "phase": "ended",
        "finished_at": ended_at,
        "causes": [{**cause, "at": ended_at, "node": node}],
    }


def _start_failure_cause(job: SlurmJob | None) -> Cause:
    """Return why a node has not started, by the state of its ended job."""
    state = "" if job is None else job.state
    if state in _MACHINE_FAULTS:
        return new_cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, f"Slurm reports {state} for the run's job.")
    if state == "PREEMPTED":
        return new_cause(Outcome.NODE_LOST, FailureCode.PREEMPTED, "Slurm preempted the run's job.")
    if state == "CANCELLED":
        return new_cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, "The run's job was cancelled in Slurm.")
    message = f"The node's supervisor did not start. Slurm reports {state or 'nothing'} for the run's job."
    return new_cause(Outcome.PLATFORM_ERROR, FailureCode.NODE_NOT_STARTED, message)


def _with_slurms_reason(record: RecordData, observation: Observation) -> RecordData:
    """Return a last record, in which Slurm's reason replaces a cause that says only that Slurm ended the node."""
    slurm_cause = _slurm_cause(record)
    if slurm_cause is None:
        return {**record, "alive": True}
    if not observation.job_has_ended:
        # The outcome is stored only once, so the run must not count as ended before Slurm gives its reason.
        return {**record, "phase": "stopping", "alive": True}
    reason = _cause_by_job_state(record, observation)
    if reason is None:  # Slurm gives none either, so the supervisor's own cause stays
        return {**record, "alive": True}
    # Slurm signals all processes of a node, so a rank may fail by the signal before its supervisor has received it.
    # Such a failure is dropped. Slurm's reason is dated before the failure, since other nodes may have reported it too.
    signalled_at = float(slurm_cause["at"]) - _SIMULTANEOUS_SECONDS
    earlier_causes = [
        cause for cause in record["causes"] if cause is not slurm_cause and float(cause["at"]) < signalled_at
    ]
    return {**record, "alive": True, "causes": [*earlier_causes, {**slurm_cause, "at": signalled_at, **reason}]}


def _slurm_cause(record: RecordData) -> Mapping[str, Any] | None:
    """Return the cause which says only that Slurm ended the node; None if the record has none."""
    causes: list[Mapping[str, Any]] = record.get("causes") or []
    for cause in causes:
        if (cause.get("data") or {}).get(ENDED_BY_SLURM):
            return cause
    return None


def _loss_cause(record: RecordData, observation: Observation) -> Cause | None:
    """Return why a node without a last record was lost; None if its supervisor may still run."""
    silence_seconds = observation.now - record["seen_at"]
    machine_has_failed = record.get("machine") in observation.failed_machines
    if machine_has_failed and (observation.job_has_ended or silence_seconds > LOST_SECONDS):
        return _failed_machine_cause(record)
    if observation.job is not None and observation.job.is_waiting:
        message = f"Slurm put the run's job back into its queue, which ended node {record['node']}."
        return new_cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, message)
    if _is_silent(record, observation):
        message = f"The supervisor of node {record['node']} sent no heartbeat."
        return new_cause(Outcome.NODE_LOST, FailureCode.NODE_SILENT, message)
    if not observation.job_has_ended:
        return None
    cause = _cause_by_job_state(record, observation)
    return _unexplained_cause(record, observation) if cause is None else cause


def _lost_at(record: RecordData, observation: Observation) -> float:
    """Return when a lost node ended: with its job, or at its last heartbeat if Slurm does not know the job's end.

    If the heartbeats stopped long before the job's end, the node ended before the job: another node of an elastic run
    may have continued.
    """
    last_heartbeat_at = float(record["seen_at"])
    if observation.job is None or not observation.job_has_ended:
        return last_heartbeat_at
    silence_seconds = observation.job.ended_at - last_heartbeat_at
    return observation.job.ended_at if 0 < silence_seconds <= SILENT_SECONDS else last_heartbeat_at


def _is_silent(record: RecordData, observation: Observation) -> bool:
    """Return whether Slurm reports that the job runs, but the supervisor has sent no heartbeat for too long."""
    job = observation.job
    # A job that waits is active too, but `_loss_cause` has handled it.
    return job is not None and job.is_active and observation.now - record["seen_at"] > SILENT_SECONDS


def _cause_by_job_state(record: RecordData, observation: Observation) -> Cause | None:
    """Return why Slurm ended a node whose supervisor had started, by the state of its job.

    None if the state gives no reason and the console did not request the end.
    """
    node, state = record["node"], "" if observation.job is None else observation.job.state
    if record.get("machine") in observation.failed_machines:
        return _failed_machine_cause(record)
    if state in _MACHINE_FAULTS:
        message = f"Node {node} was lost: Slurm reports {state} for the run's job."
        cause = new_cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, message)
        # If Slurm names other machines as failed, the loss of their nodes must come first. So this cause is dated after
        # the job's end. If Slurm names none, this node's machine may have failed and be back in service by now.
        if observation.failed_machines and observation.job is not None:
            cause["at"] = observation.job.ended_at + 1.0
        return cause
    if state in _LIMITS and record["started_at"] is None:  # before any rank ran, so the code did not reach the limit
        return _unexplained_cause(record, observation)
    causes_by_state = {
        "PREEMPTED": new_cause(Outcome.NODE_LOST, FailureCode.PREEMPTED, f"Slurm preempted node {node} of the run."),
        "TIMEOUT": new_cause(Outcome.TIME_LIMIT, FailureCode.TIME_LIMIT, "The run reached its time limit."),
        "DEADLINE": new_cause(Outcome.TIME_LIMIT, FailureCode.TIME_LIMIT, "The run reached its time limit."),
        "OUT_OF_MEMORY": new_cause(
            Outcome.OUT_OF_MEMORY, FailureCode.OUT_OF_MEMORY, f"Node {node} used more memory than its job may use."
        ),
        "CANCELLED": new_cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, "The run's job was cancelled in Slurm."),
    }
    if state in _SET_BY_SLURM:
        return causes_by_state[state]
    # After a request of the console, a job may end in any other state, and the request is the reason.
    return _requested_cause(observation) or causes_by_state.get(state)


def _requested_cause(observation: Observation) -> Cause | None:
    """Return the console's reason to end the run; None if the console has not requested the end."""
    return None if observation.end_request is None else observation.end_request.cause


def _unexplained_cause(record: RecordData, observation: Observation) -> Cause:
    """Return the cause for a node whose supervisor ended although Slurm reports no fault."""
    node = record["node"]
    if observation.job is None:
        message = f"Node {node} ended without a last record, and Slurm no longer knows the run's job."
        return new_cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, message)
    if record["started_at"] is None:
        message = f"Node {node} failed while it started. Slurm reports {observation.job.state}."
        return new_cause(Outcome.PLATFORM_ERROR, FailureCode.NODE_NOT_STARTED, message)
    message = f"The supervisor of node {node} ended although Slurm reports no fault ({observation.job.state})."
    return new_cause(Outcome.CODE_FAILED, FailureCode.LAUNCHER_KILLED, message)


def _failed_machine_cause(record: RecordData) -> Cause:
    message = f"Node {record['node']} was lost: Slurm reports that the machine {record.get('machine', '')} failed."
    return new_cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, message)


def new_cause(outcome: Outcome, code: FailureCode, message: str, data: Mapping[str, Any] | None = None) -> Cause:
    """Return a cause without its time and node."""
    return {"kind": outcome.value, "code": code.value, "message": message, "data": dict(data or {})}

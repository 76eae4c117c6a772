"""Derive a run's RunStatus from its Job, its Pods and its nodes' records. Pure.

The Job and the Pods come from the API server (`state`). A record is JSON that the first process of a Pod wrote; the
caller has verified its signature. A run is metered from `started_at` to `finished_at`, and its outcome decides whether
it is billed:

- If no kubelet reports a node's end, a record with the exit code 0 counts as its end. So a completed run is billed
  even if its machines are lost afterwards. In a customer's own image, the record counts only if the node was
  lost: with its machine, or by a disruption of its Pod.
- Every other end has the cause that `causes.find_cause` returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set

from runtime.backends.kubernetes.causes import EXIT_UNKNOWN_REASONS, Cause, find_cause, pod_cause
from runtime.backends.kubernetes.disruptions import DeletionEvents, unexplained_deletions
from runtime.backends.kubernetes.names import POD_MARGIN_SECONDS
from runtime.backends.kubernetes.state import JobState, PodState
from runtime.backends.records import RecordData, latest, progress_at, restarts
from runtime.specs import Failure, NodeStatus, Outcome, RunPhase, RunStatus, Span

_JOB_VERDICT_SECONDS = 30.0
"""How long to wait for the Job controller's verdict, the Job's condition Failed, after Pods were deleted. It is written
within 5 s; 30 s leave room for a busy API server."""
_KUBELET_REPORT_SECONDS = 15.0
"""How long a kubelet may take to report a Pod's end after the time when the Pod should have ended. After that, the
machine counts as unresponsive. A working kubelet reports within 2 s; 15 s leave room for a busy API server."""


def derive_status(
    job: JobState,
    pods: Mapping[int, PodState],
    records: Mapping[int, RecordData],
    *,
    now: float,
    unreachable_since: Mapping[int, float] | None = None,
    events: DeletionEvents | None = None,
) -> RunStatus:
    """Return the run's status. `pods` and `records` are by node.

    `now` and all times are Unix seconds. `unreachable_since` has, by node, when its machine became NotReady or was
    deleted. `events` is what the Job's events show about deleted Pods; None if they were not read.
    """
    unreachable_since = unreachable_since or {}
    overdue_since = _overdue_nodes(job, pods, now)
    # In a stopped run, an overdue Pod does not mean a lost node: its kubelet may honor an earlier, longer grace period.
    lost_nodes = unreachable_since.keys() | (overdue_since.keys() if job.termination is None else set())
    pods = _with_recorded_successes(job, pods, records, lost_nodes, now)
    # By node: when its kubelet stopped responding. Nodes whose end is reported are left out.
    unresponsive_since = {
        node: since
        for node, since in {**overdue_since, **unreachable_since}.items()
        if node not in pods or not pods[node].ended
    }
    nodes = tuple(_node_status(job, node, pods.get(node), unresponsive_since.get(node)) for node in range(job.nodes))
    phase = _run_phase(job, nodes)
    # The outcome is stored only once. So the run stays STOPPING until all facts that decide the payer are known.
    awaits_events = events is not None and events.are_expected(unexplained_deletions(job, pods), now)
    if phase is RunPhase.ENDED and (awaits_events or _awaits_job_verdict(job, pods, now)):
        phase = RunPhase.STOPPING
    has_ended = phase is RunPhase.ENDED
    started_at = _started_at(job, pods, records.values(), now)
    finished_at = _finished_at(job, pods, unresponsive_since, started_at) if has_ended else None
    cause = None
    if has_ended and job.end_condition != "Complete":
        lost_since = {node: since for node, since in unresponsive_since.items() if node in lost_nodes}
        cause = find_cause(job, pods, records, lost_since, events)
    outcome = None
    if has_ended:
        outcome = cause.outcome if cause else Outcome.COMPLETED
    return RunStatus(
        name=job.name,
        phase=phase,
        nodes=nodes,
        submitted_at=job.submitted_at,
        started_at=started_at,
        finished_at=finished_at,
        outcome=outcome,
        failure=_failure(job, cause) if cause else None,
        spans=_spans(job, pods, unresponsive_since, started_at, finished_at),
        progress_at=_progress_at(job, records.values(), cause, finished_at),
        checkpoint_at=latest(records.values(), "checkpoint_at"),
        restarts=restarts(records.values()),
    )


# Nodes that no kubelet reports on


def _overdue_nodes(job: JobState, pods: Mapping[int, PodState], now: float) -> dict[int, float]:
    """Return, by node, when its Pod should have ended. Has only the nodes of deleted Pods whose end is overdue."""
    end_deadlines = {
        node: max(pod.deletion_deadline, _grace_end(job))
        for node, pod in pods.items()
        if pod.deletion_deadline and not pod.ended
    }
    # A disrupted Pod was lost at its disruption, which is earlier than its deadline.
    return {
        node: pods[node].disrupted_at or deadline
        for node, deadline in end_deadlines.items()
        if now > deadline + _KUBELET_REPORT_SECONDS
    }


def _grace_end(job: JobState) -> float:
    """Return when the Pods of a stopped run must have ended (Unix seconds); 0 if the run was not stopped.

    A kubelet keeps the first grace period that it received, so the longer one counts here.
    """
    if job.termination is None:
        return job.grace_end
    return max(job.grace_end, job.termination.at + job.spec.grace_seconds + POD_MARGIN_SECONDS)


def _with_recorded_successes(
    job: JobState,
    pods: Mapping[int, PodState],
    records: Mapping[int, RecordData],
    lost_nodes: Set[int],
    now: float,
) -> dict[int, PodState]:
    """Return the Pods. A Pod without a reported exit is marked as succeeded if its node's record says so."""
    merged = dict(pods)
    for node, record in records.items():
        pod = pods.get(node, PodState(node))
        finished_at = _recorded_success_at(record)
        has_reported_exit = pod.exit_code is not None and pod.container_reason not in EXIT_UNKNOWN_REASONS
        if finished_at is None or has_reported_exit:
            continue
        # A working kubelet gets time to report the exit itself.
        should_be_reported = pod.ended or now > finished_at + _KUBELET_REPORT_SECONDS
        # In a customer's own image, code can forge a record (`causes`) that dates its end long before now, and work on.
        # There it counts only if the node was lost, by which the run would be free anyway.
        cause = pod_cause(job, pod) if pod.ended else None
        is_lost = node in lost_nodes or (cause is not None and cause.outcome is Outcome.NODE_LOST)
        if is_lost or (should_be_reported and job.spec.builtin):
            merged[node] = _as_succeeded(pod, finished_at)
    # Node 0 (the hub) exits with 0 only after every other node has reported success to it. So its success covers nodes
    # without a record, unless the run is elastic and continued without them.
    hub = merged.get(0)
    if hub is not None and hub.succeeded and hub.finished_at is not None and not job.is_elastic:
        for node in lost_nodes - records.keys():
            if node in merged and not merged[node].ended:
                merged[node] = _as_succeeded(merged[node], hub.finished_at)
    return merged


def _recorded_success_at(record: RecordData) -> float | None:
    """Return when the node exited with 0, by its last record; None if the record does not say so."""
    succeeded = record.get("phase") == "ended" and record.get("exit_code") == 0 and not record.get("causes")
    return float(record["finished_at"]) if succeeded and record.get("finished_at") else None


def _as_succeeded(pod: PodState, at: float) -> PodState:
    """Return the Pod as ended with exit code 0 at this time, without the fields that would name another cause."""
    return dataclasses.replace(pod, ended=True, exit_code=0, finished_at=at, container_reason="", disruption="")


# Phases


def _node_status(job: JobState, node: int, pod: PodState | None, unresponsive_since: float | None) -> NodeStatus:
    """Return a node's status.

    `pod` is None if the node has none, and `unresponsive_since` is None if its kubelet responds.
    """
    if pod is None:
        # A terminated Job that has created no Pods will create none.
        never_started = job.suspended or job.start_time is None
        has_ended = bool(job.end_condition) or (job.termination is not None and never_started)
        return NodeStatus(node, RunPhase.ENDED if has_ended else RunPhase.STARTING)
    if pod.ended or unresponsive_since is not None or job.end_condition:
        phase = RunPhase.ENDED
    elif pod.started_at is None:
        phase = RunPhase.STARTING
    else:
        is_stopping = pod.deletion_deadline is not None or job.termination is not None
        phase = RunPhase.STOPPING if is_stopping else RunPhase.RUNNING
    return NodeStatus(
        node=node,
        phase=phase,
        address=pod.address,
        started_at=pod.started_at,
        finished_at=pod.finished_at if pod.ended else unresponsive_since,
        exit_code=pod.exit_code,
    )


def _run_phase(job: JobState, nodes: Sequence[NodeStatus]) -> RunPhase:
    """Return the run's phase, from its Job and the phases of its nodes."""
    # A run has ended if every node has ended and no further Pod can be created. That is certain if the Job has ended or
    # is being ended, or if every node has run.
    phases = {node.phase for node in nodes}
    is_stopping = job.is_failing or job.termination is not None
    have_finished = all(node.finished_at is not None for node in nodes)
    if phases == {RunPhase.ENDED} and (job.end_condition or is_stopping or have_finished):
        return RunPhase.ENDED
    if is_stopping or RunPhase.STOPPING in phases:
        return RunPhase.STOPPING
    return RunPhase.STARTING if RunPhase.STARTING in phases else RunPhase.RUNNING


def _awaits_job_verdict(job: JobState, pods: Mapping[int, PodState], now: float) -> bool:
    """Return whether a Pod was deleted for no known reason, and the Job controller has not written its verdict yet.

    The verdict shows whether the controller deleted the Pod, after another Pod failed, or somebody else did.
    """
    # After a success, no verdict is needed. The Job of an elastic run does not fail with its first Pod.
    if job.end_condition or job.termination or job.is_elastic or all(pod.exit_code == 0 for pod in pods.values()):
        return False
    was_deleted = any(pod.ended and pod.deletion_deadline is not None and not pod.disruption for pod in pods.values())
    last_end = max((pod.finished_at or 0.0 for pod in pods.values()), default=0.0)
    return was_deleted and now < last_end + _JOB_VERDICT_SECONDS


# Times


def _started_at(job: JobState, pods: Mapping[int, PodState], records: Iterable[RecordData], now: float) -> float | None:
    """Return when the last Pod's container started; None before that. The records stand in for deleted Pods."""
    if job.started_at is not None:
        return job.started_at
    start_times = [pod.started_at for pod in pods.values() if pod.started_at is not None]
    if len(start_times) == job.nodes:
        # Kubelets round times down to whole seconds, so the start may seem to be before the submission.
        return max(*start_times, job.submitted_at or 0.0)
    recorded_times = [float(record["started_at"]) for record in records if record.get("started_at")]
    return min(max(recorded_times), now) if recorded_times else None  # a record may not start the meter in the future


def _finished_at(
    job: JobState, pods: Mapping[int, PodState], unresponsive_since: Mapping[int, float], started_at: float | None
) -> float:
    """Return when the last node of an ended run ended.

    If the end of a node is not known, the end of the Job counts too. If no end is known, return the time of the Job's
    termination, or else of its submission.
    """
    end_times = [pod.finished_at for pod in pods.values() if pod.ended and pod.finished_at is not None]
    end_times += unresponsive_since.values()
    if len(end_times) < job.nodes and job.ended_at is not None:
        end_times.append(job.ended_at)
    if not end_times:
        end_times.append(job.termination.at if job.termination else job.submitted_at or 0.0)
    return max(*end_times, started_at or 0.0)


def _spans(
    job: JobState,
    pods: Mapping[int, PodState],
    unresponsive_since: Mapping[int, float],
    started_at: float | None,
    finished_at: float | None,
) -> tuple[Span, ...]:
    """Return the periods with a constant number of nodes; several only in an elastic run that lost nodes."""
    if started_at is None:
        return ()
    loss_times: list[float] = []
    if job.is_elastic:
        loss_times = [pod.finished_at for pod in pods.values() if pod.ended and pod.exit_code != 0 and pod.finished_at]
        loss_times += unresponsive_since.values()
    spans, span_start, remaining_nodes = [], started_at, job.nodes
    for lost_at in sorted(max(loss_time, started_at) for loss_time in loss_times):
        # After the loss of the last node, or a loss at the run's end, no time is left to meter.
        if remaining_nodes == 1 or (finished_at is not None and lost_at >= finished_at):
            break
        if lost_at > span_start:
            spans.append(Span(remaining_nodes, span_start, lost_at))
            span_start = lost_at
        remaining_nodes -= 1
    return (*spans, Span(remaining_nodes, span_start, finished_at))


# The price of a hung run


def _progress_at(
    job: JobState, records: Iterable[RecordData], cause: Cause | None, finished_at: float | None
) -> float | None:
    """Return the time of the last sign of progress, up to which a hung run is billed; None if it is not known.

    Only records from built-in images are trusted. In a customer's image, customer code can read the key that signs the
    record and claim an early hang. So such a run is billed to its end.
    """
    is_hung = cause is not None and cause.outcome is Outcome.HUNG
    if not job.spec.builtin:
        return finished_at if is_hung else None
    return progress_at(records, cause.failure.data if cause is not None and is_hung else None)


def _failure(job: JobState, cause: Cause) -> Failure:
    """Return the cause's failure, marked `charged_whole` if the run hung and is billed to its end (`_progress_at`).

    The console shows the customer an explanation for that mark.
    """
    if cause.outcome is not Outcome.HUNG or job.spec.builtin:
        return cause.failure
    return dataclasses.replace(cause.failure, data={**cause.failure.data, "charged_whole": True})

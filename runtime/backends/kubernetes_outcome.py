"""From facts of the API server and signed records of pods to one RunStatus. PURE.

The one rule: nothing that is said from inside a pod makes a run free. That a node was lost, evicted or preempted only
the API server says; what a launcher believes of its peers is a claim, upheld where a fact stands beside it, and else
the run failed by its own code: see `kubernetes_causes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.backends.kubernetes_causes import Record, cause_of, failure_of, parted
from runtime.backends.kubernetes_facts import JobFact, PodFact
from runtime.backends.kubernetes_history import History
from runtime.specs import NodeStatus, Outcome, RunPhase, RunStatus, Span

_TOLD_SECONDS = 30.0
"""Of pods that were told to go by who knows whom, and all have ended: so long their Job is given to say how it ends."""
_OVERDUE_SECONDS = 15.0
"""A pod that was told to end and has not been seen to this long after its grace: its kubelet is gone."""


def merge(
    job: JobFact,
    pods: Mapping[int, PodFact],
    records: Mapping[int, Record],
    *,
    now: float,
    lost: Mapping[int, float] | None = None,
    history: History | None = None,
) -> RunStatus:
    """The run's status.

    `pods` and `records` are by node; records are those whose signature is good. `lost` holds the nodes whose machine
    the API server takes for dead, and since when; `history` is what else it remembers, where it was asked.
    """
    gone = _lost(job, pods, now) | dict(lost or {})
    nodes = tuple(_node(job, node, pods.get(node), gone.get(node)) for node in range(job.nodes))
    phase = _phase(job, nodes)
    awaited = history is not None and history.is_awaited(parted(job, pods), now)
    if phase is RunPhase.ENDED and (awaited or _says_more(job, pods, now)):
        phase = RunPhase.STOPPING
    ended = phase is RunPhase.ENDED
    begun_at = _started_at(job, pods, records, now)
    finished_at = _finished_at(job, pods, gone, begun_at) if ended else None
    cause = cause_of(job, pods, records, gone, history) if ended and job.ended_as != "Complete" else None
    outcome = None
    if ended:
        outcome = Outcome(cause["kind"]) if cause else Outcome.COMPLETED
    return RunStatus(
        name=job.name,
        phase=phase,
        nodes=nodes,
        submitted_at=job.submitted_at,
        started_at=begun_at,
        finished_at=finished_at,
        outcome=outcome,
        failure=failure_of(cause) if cause else None,
        spans=_spans(job, pods, gone, begun_at, finished_at),
        progress_at=_progress_at(job, records, outcome, cause, finished_at),
        checkpoint_at=_latest(records, "checkpoint_at"),
        restarts=max((int(record.get("round", 0)) for record in records.values()), default=0),
    )


# How far it is


def _lost(job: JobFact, pods: Mapping[int, PodFact], now: float) -> dict[int, float]:
    """Nodes whose pod was to end and has not been seen to: nobody is there who could say so."""
    due = {
        node: max(pod.deleted_at, job.hurried_until) for node, pod in pods.items() if pod.deleted_at and not pod.ended
    }
    return {node: pods[node].disrupted_at or at for node, at in due.items() if now > at + _OVERDUE_SECONDS}


def _node(job: JobFact, node: int, pod: PodFact | None, lost_at: float | None) -> NodeStatus:
    if pod is None:
        over = bool(job.ended_as) or (job.taken_down is not None and _never_ran(job))
        return NodeStatus(node, RunPhase.ENDED if over else RunPhase.STARTING)
    if pod.ended or lost_at is not None or job.ended_as:
        phase = RunPhase.ENDED
    elif pod.started_at is None:
        phase = RunPhase.STARTING
    else:
        phase = RunPhase.STOPPING if pod.deleted_at is not None or job.taken_down else RunPhase.RUNNING
    return NodeStatus(
        node=node,
        phase=phase,
        address=pod.address,
        started_at=pod.started_at,
        finished_at=pod.finished_at if pod.ended else lost_at,
        exit_code=pod.exit_code,
    )


def _never_ran(job: JobFact) -> bool:
    return job.suspended or job.begun_at is None


def _phase(job: JobFact, nodes: Sequence[NodeStatus]) -> RunPhase:
    phases = {node.phase for node in nodes}
    if phases == {RunPhase.ENDED} and (job.ended_as or job.failing or job.taken_down or _all_over(nodes)):
        return RunPhase.ENDED
    if job.taken_down or job.failing or RunPhase.STOPPING in phases:
        return RunPhase.STOPPING
    return RunPhase.STARTING if RunPhase.STARTING in phases else RunPhase.RUNNING


def _says_more(job: JobFact, pods: Mapping[int, PodFact], now: float) -> bool:
    """Whether the Job's controller is about to say whether its pods were told to go by itself, or others were first."""
    if job.ended_as or job.taken_down or job.elastic or all(pod.exit_code == 0 for pod in pods.values()):
        return False
    told = any(pod.ended and pod.deleted_at is not None and not pod.disruption for pod in pods.values())
    return told and now < max(pod.finished_at or 0.0 for pod in pods.values()) + _TOLD_SECONDS


def _all_over(nodes: Sequence[NodeStatus]) -> bool:
    return all(node.finished_at is not None for node in nodes)


def _started_at(job: JobFact, pods: Mapping[int, PodFact], records: Mapping[int, Record], now: float) -> float | None:
    """When the last pod began to run, by the kubelets; where that went with its pod, by a signed record."""
    if job.started_at is not None:
        return job.started_at
    begun = [pod.started_at for pod in pods.values() if pod.started_at is not None]
    if len(begun) == job.nodes:
        # Kubelets tell whole seconds, rounded down.
        return max(*begun, job.submitted_at or 0.0)
    told = [float(record["started_at"]) for record in records.values() if record.get("started_at")]
    return min(max(told), now) if told else None


def _finished_at(
    job: JobFact, pods: Mapping[int, PodFact], gone: Mapping[int, float], started_at: float | None
) -> float | None:
    ends = [pod.finished_at for pod in pods.values() if pod.ended and pod.finished_at is not None]
    ends += gone.values()
    if len(ends) < job.nodes and job.ended_at is not None:
        ends.append(job.ended_at)
    if not ends:
        ends.append(float(job.taken_down["at"]) if job.taken_down else job.submitted_at or 0.0)
    return max(*ends, started_at or 0.0)


def _spans(
    job: JobFact,
    pods: Mapping[int, PodFact],
    gone: Mapping[int, float],
    started_at: float | None,
    finished_at: float | None,
) -> tuple[Span, ...]:
    """One stretch, but for an elastic run that lost nodes: then one more from each loss on."""
    if started_at is None:
        return ()
    losses = []
    if job.elastic:
        losses = [pod.finished_at for pod in pods.values() if pod.ended and pod.exit_code != 0 and pod.finished_at]
        losses += gone.values()
    spans, since, count = [], started_at, job.nodes
    for at in sorted(max(loss, started_at) for loss in losses):
        if count == 1 or (finished_at is not None and at >= finished_at):
            break
        if at > since:
            spans.append(Span(count, since, at))
            since = at
        count -= 1
    return (*spans, Span(count, since, finished_at))


def _progress_at(
    job: JobFact,
    records: Mapping[int, Record],
    outcome: Outcome | None,
    cause: Mapping[str, Any] | None,
    finished_at: float | None,
) -> float | None:
    """The last sign of progress: what a hung run pays up to, and so the word of our own images alone."""
    if not job.told.get("builtin"):
        return finished_at if outcome is Outcome.HUNG else None
    latest = _latest(records, "progress_at")
    told = ((cause or {}).get("data") or {}).get("progress_at") if outcome is Outcome.HUNG else None
    return latest if told is None or latest is None else min(latest, float(told))


def _latest(records: Mapping[int, Record], what: str) -> float | None:
    return max((float(record[what]) for record in records.values() if record.get(what) is not None), default=None)

"""From facts of the API server and signed records of pods to one RunStatus. PURE.

The one rule: nothing that is said from inside a pod makes a run free. That a node was lost, evicted or preempted only
the API server says; what a launcher believes of its peers is a claim, upheld where a fact stands beside it, and else
the run failed by its own code. A table (`_FACTS`, `_MINE`) says what is what; `docs/kubernetes.md` shows it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from runtime.backends.kubernetes_facts import JobFact, PodFact
from runtime.launcher.report import first_cause
from runtime.specs import Failure, FailureCode, NodeStatus, Outcome, RunPhase, RunStatus, Span

Record = Mapping[str, Any]

_OVERDUE_SECONDS = 15.0
"""A pod that was told to end and has not been seen to this long after its grace: its kubelet is gone."""
_LOSS_LAG_SECONDS = 120.0
"""The API server may learn so late that a machine fell silent: what fails elsewhere meanwhile, fails of that."""
_FACT_LAG_SECONDS = 2.0
_OWN_LIMIT = re.compile(r"exceeds the (?:total )?limit|exceeded its local ephemeral storage limit", re.IGNORECASE)


@dataclass(frozen=True)
class _Cause:
    outcome: Outcome
    code: FailureCode
    at: float
    message: str
    node: int | None = None
    lag: float = _FACT_LAG_SECONDS
    data: Mapping[str, Any] = field(default_factory=dict)


_FACTS: dict[str, tuple[Outcome, FailureCode, str]] = {
    # What the pod's condition DisruptionTarget says.
    "PreemptionByScheduler": (Outcome.NODE_LOST, FailureCode.PREEMPTED, "gave way to a pod of higher priority"),
    "DeletionByTaintManager": (Outcome.NODE_LOST, FailureCode.NODE_LOST, "was lost: its machine is out of reach"),
    "DeletionByPodGC": (Outcome.NODE_LOST, FailureCode.NODE_LOST, "was lost: its machine is gone"),
    "EvictionByEvictionAPI": (Outcome.NODE_LOST, FailureCode.EVICTED, "was evicted: its machine is being drained"),
    "TerminationByKubelet": (Outcome.NODE_LOST, FailureCode.EVICTED, "was evicted by its machine"),
    # What the pod's status says.
    "Evicted": (Outcome.NODE_LOST, FailureCode.EVICTED, "was evicted by its machine"),
    "Preempting": (Outcome.NODE_LOST, FailureCode.PREEMPTED, "gave way to a pod of higher priority"),
    "NodeLost": (Outcome.NODE_LOST, FailureCode.NODE_LOST, "was lost: its machine is out of reach"),
    "Terminated": (Outcome.NODE_LOST, FailureCode.NODE_LOST, "was lost: its machine was shut down"),
    "NodeShutdown": (Outcome.NODE_LOST, FailureCode.NODE_LOST, "was lost: its machine was shut down"),
    "Shutdown": (Outcome.NODE_LOST, FailureCode.NODE_LOST, "was lost: its machine was shut down"),
    "NodeAffinity": (Outcome.NODE_LOST, FailureCode.NODE_LOST, "was refused by its machine after a restart"),
    "UnexpectedAdmissionError": (Outcome.NODE_LOST, FailureCode.NODE_LOST, "was refused by its machine"),
    "DeadlineExceeded": (Outcome.TIME_LIMIT, FailureCode.TIME_LIMIT, "reached its time limit"),
    # What the container's end says.
    "OOMKilled": (Outcome.OUT_OF_MEMORY, FailureCode.OUT_OF_MEMORY, "ran out of memory"),
    "StartError": (Outcome.CODE_FAILED, FailureCode.IMAGE_UNUSABLE, "could not be started: its image has no Python"),
    "ContainerCannotRun": (
        Outcome.CODE_FAILED,
        FailureCode.IMAGE_UNUSABLE,
        "could not be started: its image has no Python",
    ),
}
_UNKNOWN = frozenset({"Unknown", "ContainerStatusUnknown"})
"""A machine that was started anew knows that its containers have ended, and not how."""
_FACTS |= dict.fromkeys(_UNKNOWN, (Outcome.NODE_LOST, FailureCode.NODE_LOST, "was lost: its machine was started anew"))
_SILENT = (Outcome.NODE_LOST, FailureCode.NODE_LOST, "was lost: its machine does not answer")
_NO_ROOM = re.compile(r"^(OutOf|Outof)")
_LOSSES = _UNKNOWN | {"DeletionByTaintManager", "DeletionByPodGC", "NodeLost", "Terminated", "NodeShutdown", "Shutdown"}
"""What the API server learns late."""
_MINE = frozenset({"code_failed", "out_of_memory", "disk_full", "hung", "time_limit"})
"""What a signed record is believed: all of it is paid."""


def merge(
    job: JobFact,
    pods: Mapping[int, PodFact],
    records: Mapping[int, Record],
    *,
    now: float,
    lost: Mapping[int, float] | None = None,
) -> RunStatus:
    """The run's status.

    `pods` and `records` are by node; records are those whose signature is good. `lost` holds the nodes whose machine
    the API server takes for dead, and since when.
    """
    gone = _lost(job, pods, now) | dict(lost or {})
    nodes = tuple(_node(job, node, pods.get(node), gone.get(node)) for node in range(job.nodes))
    phase = _phase(job, nodes)
    ended = phase is RunPhase.ENDED
    begun_at = _started_at(job, pods, records, now)
    finished_at = _finished_at(job, pods, gone, begun_at) if ended else None
    cause = _cause(job, pods, records, gone) if ended and job.ended_as != "Complete" else None
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
        failure=_failure(cause) if cause else None,
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


# What it ended of


def _cause(
    job: JobFact, pods: Mapping[int, PodFact], records: Mapping[int, Record], gone: Mapping[int, float]
) -> dict[str, Any] | None:
    """What the run ended of: the first of what the cluster says and what the launchers say; None: of nothing."""
    if len(pods) == job.nodes and all(pod.ended and pod.exit_code == 0 for pod in pods.values()):
        return None
    facts = [*_taken_down(job), *(cause for cause in (_fact(job, pod) for pod in pods.values()) if cause)]
    facts += _disrupted(job, {cause.node for cause in facts})
    facts += [] if facts else _removed(job, pods)
    facts += [
        dataclasses.replace(_told(pods[node], _SILENT, at=at), lag=_LOSS_LAG_SECONDS)
        for node, at in gone.items()
        if node in pods and not any(cause.node == node for cause in facts)
    ]
    if job.elastic:
        facts = [cause for cause in facts if cause.node is None or not _outlived(job, pods)]
    fact = min(facts, key=lambda cause: cause.at - cause.lag, default=None)
    claims = [cause for record in records.values() for cause in record.get("causes", ()) if cause["kind"] != "stopped"]
    own = first_cause([cause for cause in claims if cause["kind"] in _MINE])
    if fact is not None and (own is None or fact.at - fact.lag <= float(own["at"])):
        return _as_record(fact)
    if own is not None:
        return own
    if fact is None and claims:
        return _claim(job, records, first_cause(claims) or claims[0])
    if fact is None and job.elastic and _outlived(job, pods):
        return None
    return _as_record(fact) if fact else _unexplained(job, pods)


def _disrupted(job: JobFact, known: Set[int | None]) -> list[_Cause]:
    """What the Job's own condition says of a disruption, where the pod has gone with its word."""
    if job.end_reason != "PodFailurePolicy":  # our one rule is about disruptions
        return []
    found = re.search(rf"/{re.escape(job.name)}-(\d+)-", job.end_message)
    node = int(found.group(1)) if found else None
    if node in known or job.failed_at is None:
        return []
    told = (Outcome.NODE_LOST, FailureCode.EVICTED, job.failed_at, f"Node {node} was disrupted: {job.end_message}.")
    return [_Cause(*told, node=node, lag=_LOSS_LAG_SECONDS)]


def _removed(job: JobFact, pods: Mapping[int, PodFact]) -> list[_Cause]:
    """A pod that somebody deleted, and not because its Job had failed: the code inside has no way to do that.

    Of a Job that failed by itself, the pod that failed is still there, not deleted.
    """
    failed_alone = any(pod.ended and pod.exit_code and pod.deleted_at is None for pod in pods.values())
    if job.end_reason != "BackoffLimitExceeded" or job.failed_at is None or job.elastic or failed_alone:
        return []
    missing = [node for node in range(job.nodes) if node not in pods]
    deleted = [(pod.deleted_at, node) for node, pod in pods.items() if pod.deleted_at is not None]
    if not pods or not (missing or deleted):
        return []
    node = missing[0] if missing else min(deleted)[1]
    message = f"Node {node} was lost: its pod was removed from the cluster."
    return [_Cause(Outcome.NODE_LOST, FailureCode.NODE_LOST, job.failed_at, message, node, lag=_LOSS_LAG_SECONDS)]


def _outlived(job: JobFact, pods: Mapping[int, PodFact]) -> bool:
    """Whether enough nodes came to a good end."""
    return sum(pod.ended and pod.exit_code == 0 for pod in pods.values()) >= int(job.told["min_nodes"])


def _taken_down(job: JobFact) -> list[_Cause]:
    """What was decided outside the run, by `stop` or by a guard."""
    told = job.taken_down
    if told is None:
        return []
    outcome, code = Outcome(told["kind"]), FailureCode(told["code"])
    return [_Cause(outcome, code, float(told["at"]), str(told["message"]), lag=0.0, data=told.get("data") or {})]


def _fact(job: JobFact, pod: PodFact) -> _Cause | None:
    """What the API server says a pod ended of; None where it says no more than an exit code."""
    # Of a pod that was told to go before its container had begun, the status is unknown as well.
    unknown = pod.container_reason in _UNKNOWN and pod.deleted_at is not None
    words = (pod.disruption, pod.pod_reason, pod.container_reason if pod.ended and not unknown else "")
    if _NO_ROOM.match(pod.pod_reason):
        return _told(pod, (Outcome.NO_CAPACITY, FailureCode.NODES_NOT_PLACED, "found no room on its machine"))
    if "Evicted" in words and _OWN_LIMIT.search(pod.pod_message):
        told = _told(pod, (Outcome.DISK_FULL, FailureCode.DISK_FULL, "wrote more than its limit"))
        return dataclasses.replace(told, data={"limit_mib": job.told.get("disk_mib") or 0})
    word = next((word for word in words if word in _FACTS), None)
    if word is None:
        return None
    told = _told(pod, _FACTS[word], at=pod.disrupted_at)
    lag = _LOSS_LAG_SECONDS if word in _LOSSES else _FACT_LAG_SECONDS
    # An image of ours without Python is our own fault.
    ours = told.code is FailureCode.IMAGE_UNUSABLE and job.told.get("builtin")
    outcome = Outcome.PLATFORM_ERROR if ours else told.outcome
    data = _memory(job) if told.code is FailureCode.OUT_OF_MEMORY else {}
    return dataclasses.replace(told, outcome=outcome, lag=lag, data=data)


def _memory(job: JobFact) -> dict[str, Any]:
    return {"limit_mib": job.told.get("memory_mib", 0)}


def _told(pod: PodFact, what: tuple[Outcome, FailureCode, str], *, at: float | None = None) -> _Cause:
    outcome, code, words = what
    said = f" ({pod.pod_message})" if pod.pod_message else ""
    when = at or pod.finished_at or pod.deleted_at or pod.created_at
    return _Cause(outcome, code, when, f"Node {pod.node} {words}{said}.", pod.node)


def _claim(job: JobFact, records: Mapping[int, Record], claim: Mapping[str, Any]) -> dict[str, Any]:
    """What the launchers say of the platform, and no fact bears out."""
    never_ran = not any(record.get("started_at") for record in records.values())
    if claim.get("code") == FailureCode.NODES_NOT_MET and never_ran and job.told.get("builtin"):
        # No code of the customer's had begun, and the image is ours: there is nobody else who could have said it.
        return dict(claim)
    return {**claim, "kind": Outcome.CODE_FAILED.value}


def _unexplained(job: JobFact, pods: Mapping[int, PodFact]) -> dict[str, Any]:
    failed = [pod for pod in pods.values() if pod.ended and pod.exit_code]
    if job.end_reason == "DeadlineExceeded":
        message = "The run reached its time limit."
        return _as_record(_Cause(Outcome.TIME_LIMIT, FailureCode.TIME_LIMIT, job.ended_at or 0.0, message))
    if failed:
        first = min(failed, key=lambda pod: pod.finished_at or 0.0)
        if first.exit_code == 137 and first.deleted_at is None and job.told.get("builtin"):
            # Nobody inside can kill a pod's first process, and containerd at times misses the kernel's word of why.
            return _as_record(dataclasses.replace(_told(first, _FACTS["OOMKilled"]), data=_memory(job)))
        message = f"Node {first.node} ended with exit code {first.exit_code}, and left no record."
        told = _Cause(Outcome.CODE_FAILED, FailureCode.RANK_EXITED, first.finished_at or 0.0, message, first.node)
        return {**_as_record(told), "exit_code": first.exit_code}
    # Who could have ended its pods without a trace is not the customer.
    message = f"The run ended without a trace of why. {job.end_message}".strip()
    return _as_record(_Cause(Outcome.PLATFORM_ERROR, FailureCode.PLATFORM_ERROR, job.ended_at or 0.0, message))


def _as_record(cause: _Cause) -> dict[str, Any]:
    return {
        "kind": cause.outcome,
        "code": cause.code,
        "at": cause.at,
        "node": cause.node,
        "message": cause.message,
        "data": dict(cause.data),
    }


def _failure(cause: Mapping[str, Any]) -> Failure:
    known = {code.value for code in FailureCode}
    code = FailureCode(cause["code"]) if cause.get("code") in known else FailureCode.PLATFORM_ERROR
    return Failure(
        message=str(cause.get("message") or _sentence(cause)),
        code=code,
        data=dict(cause.get("data") or {}),
        node=cause.get("node"),
        rank=cause.get("rank"),
        exit_code=cause.get("exit_code"),
        signal=str(cause.get("signal") or ""),
        last_lines=tuple(str(line) for line in cause.get("last_lines") or ()),
    )


def _sentence(cause: Mapping[str, Any]) -> str:
    who = f"Rank {cause.get('rank')} on node {cause.get('node')}"
    if cause.get("signal"):
        return f"{who} was ended by {cause['signal']}."
    return f"{who} exited with code {cause.get('exit_code')}."

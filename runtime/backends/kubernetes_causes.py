"""What a run ended of: what the API server says, weighed against what the launchers of its pods say. PURE.

The one rule: only what the API server says makes a run free, and which of two such things was first is taken from the
order in which it tells of them, not from clocks. `_FACTS` and `_MINE` say what is what; `docs/kubernetes.md` shows it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from runtime.backends.kubernetes_facts import REMOVED, JobFact, PodFact
from runtime.backends.kubernetes_history import History
from runtime.launcher.report import first_cause
from runtime.specs import Failure, FailureCode, Outcome

Record = Mapping[str, Any]

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
    REMOVED: (Outcome.NODE_LOST, FailureCode.NODE_LOST, "was lost: its pod was removed from the cluster"),
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
_LOSSES = _UNKNOWN | {
    REMOVED,
    "DeletionByTaintManager",
    "DeletionByPodGC",
    "NodeLost",
    "Terminated",
    "NodeShutdown",
    "Shutdown",
}
"""What the API server learns late."""
_MINE = frozenset({"code_failed", "out_of_memory", "disk_full", "hung", "time_limit"})
"""What a signed record is believed: all of it is paid."""


def cause_of(
    job: JobFact,
    pods: Mapping[int, PodFact],
    records: Mapping[int, Record],
    gone: Mapping[int, float],
    history: History | None = None,
) -> dict[str, Any] | None:
    """What the run ended of: the first of what the cluster says and what the launchers say; None: of nothing.

    `gone` holds the nodes that nobody has heard the end of, and since when; `history` is what events say, where asked.
    """
    if len(pods) == job.nodes and all(pod.ended and pod.exit_code == 0 for pod in pods.values()):
        return None
    facts = [*_taken_down(job), *(cause for cause in (_fact(job, pod) for pod in pods.values()) if cause)]
    facts += _disrupted(job, {cause.node for cause in facts})
    facts += [] if facts else _removed(job, pods, history or History())
    silent = {node: at for node, at in (history.unready if history else {}).items() if node in parted(job, pods)}
    facts += [
        dataclasses.replace(_told(pods.get(node, PodFact(node)), _SILENT, at=at), lag=_LOSS_LAG_SECONDS)
        for node, at in (silent | {node: at for node, at in gone.items() if node in pods}).items()
        if not any(cause.node == node for cause in facts)
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


def parted(job: JobFact, pods: Mapping[int, PodFact]) -> set[int]:
    """Nodes whose pods were told to go, or are gone, and nothing says why: by the Job's controller, or by others."""
    return {
        node
        for node in range(job.nodes)
        if node not in pods or (pods[node].deleted_at is not None and not pods[node].disruption)
    }


def _removed(job: JobFact, pods: Mapping[int, PodFact], history: History) -> list[_Cause]:
    """A pod that somebody deleted, and not because its Job had failed: the code inside has no way to do that.

    Of a Job that failed by itself, the pod that failed is still there, not deleted, and the others were told to go by
    its controller. That sends none which was told to go before: what it has not sent, others had, before any failed.
    """
    if job.end_reason != "BackoffLimitExceeded" or job.failed_at is None or job.elastic or not pods:
        return []
    failed_alone = any(pod.ended and pod.exit_code and pod.deleted_at is None for pod in pods.values())
    found = parted(job, pods)
    if failed_alone:
        found = history.by_others(found)
    if not found:
        return []
    node = min(found, key=lambda node: (pods[node].deleted_at or 0.0) if node in pods else 0.0)
    told = _told(pods.get(node, PodFact(node)), _FACTS[REMOVED], at=job.failed_at)
    return [dataclasses.replace(told, lag=_LOSS_LAG_SECONDS)]


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


def failure_of(cause: Mapping[str, Any]) -> Failure:
    """A cause, as the run's status tells of it."""
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

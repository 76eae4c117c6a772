"""What API objects say of a run, as far as it matters. PURE: objects in, frozen facts out.

The one rule: here is only what the API server said. What a pod says of itself is no fact; see `kubernetes_outcome`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from runtime.backends.kubernetes_names import (
    CONTAINER,
    FINAL,
    HURRIED,
    INDEX,
    POD,
    SPEC,
    STARTED,
    SUBMITTED,
    TAKEN_DOWN,
)
from runtime.specs import Failure, FailureCode, NodeStatus, Outcome, RunPhase, RunStatus, Span

Object = Mapping[str, Any]

REMOVED = "Removed"
"""Our own word for a disruption: the pod was told to go by neither its Job nor us, when none of its run had failed."""
_TERMINAL = frozenset({"Succeeded", "Failed"})
_LONGEST_LINE = 500


@dataclass(frozen=True)
class PodFact:
    """One pod, as last seen. Times are Unix seconds by the cluster's clocks.

    `ended`: none of its processes is left, by its kubelet's word. `deleted_at`: by when it is to have ended, where it
    was told to. `message` is the container's last word, unread.
    """

    node: int
    name: str = ""
    uid: str = ""
    created_at: float = 0.0
    machine: str = ""
    placed_at: float | None = None
    address: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    ended: bool = False
    container_reason: str = ""
    pod_reason: str = ""
    pod_message: str = ""
    disruption: str = ""
    disrupted_at: float | None = None
    deleted_at: float | None = None
    message: str = ""

    def to_json(self) -> str:
        """For an annotation."""
        told = {name: value for name, value in dataclasses.asdict(self).items() if value is not None and value != ""}
        return json.dumps(told, sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> PodFact:
        """Read what `to_json` wrote."""
        return cls(**{"node": 0, **json.loads(text)})


@dataclass(frozen=True)
class JobFact:
    """The run's Job, as it is now."""

    name: str
    namespace: str
    uid: str
    nodes: int
    told: Mapping[str, Any]
    """What `manifests.remembered` kept of the spec."""
    suspended: bool
    begun_at: float | None
    """Since when it may have pods."""
    submitted_at: float | None
    started_at: float | None
    taken_down: Mapping[str, Any] | None
    final: str
    failing: bool
    """It has failed, and its pods are being ended."""
    ended_as: str
    """`Complete` or `Failed` once none of its pods runs any more."""
    ended_at: float | None
    failed_at: float | None
    end_reason: str
    end_message: str
    kept: Mapping[int, PodFact]
    """Pods that are gone, as last seen."""
    is_told: bool = False
    """Whether its own controller knows that it is to end its pods."""
    hurried_until: float = 0.0
    """By when its pods are to have ended, where that was made sooner; their own times count from the first request."""

    @property
    def elastic(self) -> bool:
        """Whether it goes on without some of its nodes."""
        return 0 < int(self.told.get("min_nodes", 0)) < self.nodes


def read_job(job: Object) -> JobFact:
    """The Job as facts. Raises KeyError, ValueError for a Job that is none of ours."""
    meta, spec, status = job["metadata"], job["spec"], job.get("status") or {}
    notes = meta.get("annotations") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or [] if one.get("status") == "True"}
    end = conditions.get("Complete") or conditions.get("Failed")
    why = conditions.get("Failed") or conditions.get("FailureTarget") or {}
    return JobFact(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        nodes=spec["completions"],
        told=json.loads(notes.get(SPEC, "{}")),
        suspended=bool(spec.get("suspend")),
        begun_at=seconds(status.get("startTime")),
        submitted_at=float(notes[SUBMITTED]) if SUBMITTED in notes else None,
        started_at=float(notes[STARTED]) if STARTED in notes else None,
        taken_down=json.loads(notes[TAKEN_DOWN]) if TAKEN_DOWN in notes else None,
        final=notes.get(FINAL, ""),
        failing="FailureTarget" in conditions or "Failed" in conditions,
        ended_as=end["type"] if end else "",
        ended_at=seconds(end.get("lastTransitionTime")) if end else None,
        failed_at=seconds(why.get("lastTransitionTime")),
        end_reason=why.get("reason") or "",
        end_message=why.get("message") or "",
        kept={
            int(key[len(POD) :]): PodFact.from_json(text)
            for key, text in notes.items()
            if key.startswith(POD) and key[len(POD) :].isdecimal()
        },
        is_told=spec.get("activeDeadlineSeconds") is not None,
        hurried_until=float(notes.get(HURRIED, 0.0)),
    )


def read_pod(pod: Object) -> PodFact | None:
    """A pod as facts; None for one that is no node of a run."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    index = (meta.get("annotations") or {}).get(INDEX, "")
    if not index.isdecimal():
        return None
    conditions = {one["type"]: one for one in status.get("conditions") or [] if one.get("status") == "True"}
    disruption = conditions.get("DisruptionTarget") or {}
    placed = conditions.get("PodScheduled") or {}
    container = _container(status)
    state = container.get("state") or {}
    ended = state.get("terminated") or {}
    if not ended and status.get("phase") in _TERMINAL:
        ended = (container.get("lastState") or {}).get("terminated") or {}
    running = state.get("running") or {}
    started_at = seconds(ended.get("startedAt")) or seconds(running.get("startedAt"))
    return PodFact(
        node=int(index),
        name=meta["name"],
        uid=meta["uid"],
        created_at=seconds(meta.get("creationTimestamp")) or 0.0,
        machine=spec.get("nodeName") or "",
        placed_at=seconds(placed.get("lastTransitionTime")) if spec.get("nodeName") else None,
        address=status.get("podIP") or "",
        # What could not be started is told with the beginning of time.
        started_at=None if ended.get("reason") in {"StartError", "ContainerCannotRun"} else started_at or None,
        finished_at=seconds(ended.get("finishedAt")) or None,
        exit_code=ended.get("exitCode"),
        ended=status.get("phase") in _TERMINAL,
        container_reason=ended.get("reason") or "",
        pod_reason=status.get("reason") or "",
        pod_message=(status.get("message") or disruption.get("message") or "")[:1000],
        disruption=disruption.get("reason") or "",
        disrupted_at=seconds(disruption.get("lastTransitionTime")),
        deleted_at=seconds(meta.get("deletionTimestamp")),
        message=ended.get("message") or "",
    )


def latest(job: JobFact, pods: Iterable[PodFact]) -> dict[int, PodFact]:
    """For each node of the run its pod, the newest where there were more; what is gone, as it was kept."""
    # What is not listed any more is gone, and so are its processes; nobody may have seen when they went.
    found = {
        node: dataclasses.replace(pod, ended=True, finished_at=pod.finished_at or pod.disrupted_at or pod.deleted_at)
        for node, pod in job.kept.items()
    }
    for pod in sorted(pods, key=lambda pod: pod.created_at):
        kept = found.get(pod.node)
        if kept is None or pod.uid == kept.uid or pod.created_at >= kept.created_at:
            found[pod.node] = remembered(pod, kept)
    return {node: pod for node, pod in sorted(found.items()) if node < job.nodes}


def removed(pod: Object, *, now: float) -> PodFact | None:
    """The pod as one that others have removed: by its own word of when, else now. None as `read_pod` has it."""
    fact, meta = read_pod(pod), pod["metadata"]
    if fact is None:
        return None
    told_at = now
    if fact.deleted_at is not None:
        told_at = fact.deleted_at - (meta.get("deletionGracePeriodSeconds") or 0)
    return dataclasses.replace(fact, disruption=REMOVED, disrupted_at=told_at)


def remembered(pod: PodFact, kept: PodFact | None) -> PodFact:
    """The pod as it is now, with what is known of it that it does not say itself."""
    if kept is None or kept.uid != pod.uid or kept.disruption != REMOVED or pod.disruption:
        return pod
    return dataclasses.replace(pod, disruption=REMOVED, disrupted_at=kept.disrupted_at)


def seconds(timestamp: str | None) -> float | None:
    """A time of the API's as Unix seconds."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else None


def pack_status(status: RunStatus) -> str:
    """How a run ended, for an annotation."""
    if status.failure is not None:
        lines = tuple(line[:_LONGEST_LINE] for line in status.failure.last_lines)
        status = dataclasses.replace(status, failure=dataclasses.replace(status.failure, last_lines=lines))
    return json.dumps(dataclasses.asdict(status), sort_keys=True, ensure_ascii=False)


def unpack_status(text: str) -> RunStatus:
    """Read what `pack_status` wrote."""
    data = json.loads(text)
    data["phase"] = RunPhase(data["phase"])
    data["outcome"] = Outcome(data["outcome"]) if data["outcome"] else None
    data["nodes"] = tuple(NodeStatus(**{**node, "phase": RunPhase(node["phase"])}) for node in data["nodes"])
    data["spans"] = tuple(Span(**span) for span in data["spans"])
    failure = data["failure"]
    if failure:
        told = {"code": FailureCode(failure["code"]), "last_lines": tuple(failure["last_lines"])}
        data["failure"] = Failure(**{**failure, **told})
    return RunStatus(**data)


def _container(status: Object) -> Object:
    for one in status.get("containerStatuses") or []:
        if one.get("name") == CONTAINER:
            found: Object = one
            return found
    return {}

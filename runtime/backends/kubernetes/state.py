"""The state of a run's Job and Pods, as the API server reports it. Pure: API objects in, frozen dataclasses out.

Also converts the values that the backend stores in the Job's annotations. Nothing here comes from inside a Pod, except
`PodState.termination_message`, which holds the node's unverified record.

Some JSON keys in annotations differ from the field names. They are kept, because Jobs that an older version of the
console started still carry them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.backends.kubernetes import names
from runtime.backends.kubernetes.objects import (
    TERMINAL_PHASES,
    Object,
    container_statuses,
    is_deleting,
    object_annotations,
    pod_phase,
    timestamp,
    true_conditions,
)
from runtime.json_values import storable
from runtime.specs import Failure, FailureCode, NodeStatus, Outcome, RunPhase, RunSpec, RunStatus, Span

EXTERNALLY_DELETED = "Removed"
"""A disruption reason that Kubernetes does not have: neither the Job controller nor the console deleted the Pod.
The value is stored in annotations."""
_NEVER_STARTED_REASONS = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of a container that never started. For them, the kubelet reports 1970-01-01 as the start time."""
_MAX_POD_MESSAGE = 1000
"""Characters kept of a Pod's status message, since 24 saved Pods (`runs._MAX_SAVED_PODS`) must fit into a Job's 256 KiB
of annotations."""
_MAX_LOG_LINE = 500
"""Characters kept of each log line in the final status, which is stored in the same annotations."""
_STORED_POD_KEYS = {"scheduled_at": "placed_at", "deletion_deadline": "deleted_at", "termination_message": "message"}
"""PodState fields whose JSON key differs from their name."""


@dataclass(frozen=True)
class PodState:
    """One Pod, as last seen. Times are Unix seconds by the cluster's clocks."""

    node: int
    name: str = ""
    uid: str = ""
    created_at: float = 0.0
    machine: str = ""
    """The name of the Kubernetes Node that the Pod was scheduled to; empty before."""
    scheduled_at: float | None = None
    address: str = ""
    started_at: float | None = None
    """When the Pod's container started."""
    finished_at: float | None = None
    exit_code: int | None = None
    ended: bool = False
    """Whether the kubelet has reported that no process of the Pod is left."""
    container_reason: str = ""
    """`reason` of the container's terminated state, such as OOMKilled."""
    pod_reason: str = ""
    """`reason` of the Pod's status, such as Evicted."""
    pod_message: str = ""
    disruption: str = ""
    """`reason` of the Pod's condition DisruptionTarget, or EXTERNALLY_DELETED."""
    disrupted_at: float | None = None
    deletion_deadline: float | None = None
    """`deletionTimestamp`: when the Pod's grace period is over; None if its deletion was not requested."""
    termination_message: str = ""
    """The container's termination message: the node's last record, not verified."""

    @property
    def succeeded(self) -> bool:
        """Whether the Pod's container exited with 0."""
        return self.ended and self.exit_code == 0

    def to_json(self) -> str:
        """Serialize for an annotation; fields without a value are left out."""
        json_fields = {
            _STORED_POD_KEYS.get(name, name): value
            for name, value in dataclasses.asdict(self).items()
            if value is not None and value != ""
        }
        return json.dumps(json_fields, sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> PodState:
        """Read the output of `to_json`."""
        names_by_key = {key: name for name, key in _STORED_POD_KEYS.items()}
        values = {names_by_key.get(key, key): value for key, value in json.loads(text).items()}
        return cls(**{"node": 0, **values})  # older versions left out zeros, and so the number of node 0


@dataclass(frozen=True)
class SpecSummary:
    """The parts of a RunSpec that the backend needs after submission."""

    workers: int = 1
    """Ranks of each node."""
    deadline_seconds: int = 0
    grace_seconds: int = 0
    min_nodes: int = 0
    builtin: bool = False
    """Whether the image is one of the platform's own."""
    memory_mib: int = 0
    disk_mib: int = 0
    """The disk limit; 0 if an older version, which did not always store it, started the run."""
    kind: str = ""
    """The node kind, `RunSpec.node_kind`."""

    @classmethod
    def from_spec(cls, spec: RunSpec, disk_mib: int) -> SpecSummary:
        """Summarize a spec. `disk_mib` is the disk limit of a spec that has none."""
        return cls(
            workers=spec.workers_per_node,
            deadline_seconds=spec.deadline_seconds,
            grace_seconds=spec.grace_seconds,
            min_nodes=spec.min_nodes,
            builtin=bool(spec.image.builtin),
            memory_mib=spec.resources.memory_mib,
            disk_mib=spec.resources.disk_mib or disk_mib,
            kind=spec.node_kind,
        )

    @classmethod
    def from_job(cls, job: Object) -> SpecSummary:
        """Read the summary from the Job's annotation.

        Fields that an older version did not write have their defaults.
        """
        json_fields = json.loads(object_annotations(job).get(names.SPEC_ANNOTATION, "{}"))
        return cls(**{name: value for name, value in json_fields.items() if name in cls.__dataclass_fields__})

    def to_json(self) -> str:
        """Serialize for the annotation."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Termination:
    """The console's decision to end a run: by `stop`, or for a reason that `pending.find_termination` returns."""

    outcome: Outcome
    code: FailureCode
    message: str
    at: float
    """When the console decided this, in Unix seconds."""
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Serialize for an annotation."""
        json_fields = {
            "kind": self.outcome.value,
            "code": self.code.value,
            "message": self.message,
            "at": self.at,
            "data": dict(self.data),
        }
        return json.dumps(json_fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Termination:
        """Read the output of `to_json`."""
        json_fields = json.loads(text)
        outcome, code = Outcome(json_fields["kind"]), FailureCode(json_fields["code"])
        return cls(outcome, code, str(json_fields["message"]), float(json_fields["at"]), json_fields.get("data") or {})


@dataclass(frozen=True)
class JobState:
    """The run's Job, as it is now. Times are Unix seconds."""

    name: str
    namespace: str
    uid: str
    nodes: int
    spec: SpecSummary
    suspended: bool
    start_time: float | None
    """`status.startTime`: when the Job controller began to create Pods."""
    submitted_at: float | None
    started_at: float | None
    """When the last of the Pods started, if that is stored already."""
    termination: Termination | None
    final_status: RunStatus | None
    is_failing: bool
    """Whether the Job has failed. Its controller may still be ending Pods."""
    end_condition: str
    """`Complete` or `Failed` once no Pod runs any more; empty before."""
    ended_at: float | None
    """When `end_condition` was set."""
    failed_at: float | None
    """When the Job failed, by its condition Failed, or FailureTarget while Pods are still ending."""
    failure_reason: str
    """`reason` of the condition Failed or FailureTarget, such as BackoffLimitExceeded."""
    failure_message: str
    saved_pods: Mapping[int, PodState]
    """Deleted Pods as last seen, by node."""
    is_ending: bool = False
    """Whether the Job controller was asked to end the Pods (`activeDeadlineSeconds` is set)."""
    grace_end: float = 0.0
    """When the Pods must have ended, if a `stop` asked for a shorter grace period than `spec` has; else 0."""
    version: str = ""
    """The Job's resourceVersion, which each change of the Job changes; "" matches any."""

    @property
    def is_elastic(self) -> bool:
        """Whether the run continues after losing some of its nodes."""
        return 0 < self.spec.min_nodes < self.nodes


def read_job(job: Object) -> JobState:
    """Read a run's Job. Raises KeyError or ValueError if the backend did not create it."""
    meta, spec, status, annotations = job["metadata"], job["spec"], job.get("status") or {}, object_annotations(job)
    conditions = true_conditions(job)
    end = conditions.get("Complete") or conditions.get("Failed")
    failure = conditions.get("Failed") or conditions.get("FailureTarget") or {}
    termination = annotations.get(names.TERMINATION_ANNOTATION)
    final_status = annotations.get(names.FINAL_STATUS_ANNOTATION)
    return JobState(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        nodes=spec["completions"],
        spec=SpecSummary.from_job(job),
        suspended=bool(spec.get("suspend")),
        start_time=timestamp(status.get("startTime")),
        submitted_at=_optional_float(annotations.get(names.SUBMITTED_ANNOTATION)),
        started_at=_optional_float(annotations.get(names.STARTED_ANNOTATION)),
        termination=Termination.from_json(termination) if termination else None,
        final_status=load_status(final_status) if final_status else None,
        is_failing="FailureTarget" in conditions or "Failed" in conditions,
        end_condition=end["type"] if end else "",
        ended_at=timestamp(end.get("lastTransitionTime")) if end else None,
        failed_at=timestamp(failure.get("lastTransitionTime")),
        failure_reason=failure.get("reason") or "",
        failure_message=failure.get("message") or "",
        saved_pods=_saved_pods(annotations),
        is_ending=spec.get("activeDeadlineSeconds") is not None,
        grace_end=float(annotations.get(names.GRACE_END_ANNOTATION, 0.0)),
        version=meta.get("resourceVersion", ""),
    )


def _saved_pods(annotations: Mapping[str, str]) -> dict[int, PodState]:
    """Return the Pods that a Job's annotations hold, by node."""
    saved = {}
    for key, text in annotations.items():
        if key.startswith(names.POD_ANNOTATION_PREFIX):
            node = key.removeprefix(names.POD_ANNOTATION_PREFIX)
            if node.isdecimal():
                saved[int(node)] = PodState.from_json(text)
    return saved


def _optional_float(text: str | None) -> float | None:
    return float(text) if text else None


def read_pod(pod: Object) -> PodState | None:
    """Read a Pod. Return None if it has no completion index: then it is not a node of a run."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    index = object_annotations(pod).get(names.INDEX_ANNOTATION, "")
    if not index.isdecimal():
        return None
    conditions = true_conditions(pod)
    disruption = conditions.get("DisruptionTarget") or {}
    scheduled = conditions.get("PodScheduled") or {}
    is_terminal = pod_phase(pod) in TERMINAL_PHASES
    containers = {container.get("name"): container for container in container_statuses(pod)}
    container: Object = containers.get(names.CONTAINER_NAME, {})
    state = container.get("state") or {}
    terminated = state.get("terminated") or {}
    # A kubelet that has lost track of the container may report its end only in `lastState`.
    if not terminated and is_terminal:
        terminated = (container.get("lastState") or {}).get("terminated") or {}
    # Kubelets report an unknown time as 1970-01-01, which is 0. `or None` below turns it into None.
    started_at = timestamp(terminated.get("startedAt")) or timestamp((state.get("running") or {}).get("startedAt"))
    return PodState(
        node=int(index),
        name=meta["name"],
        uid=meta["uid"],
        created_at=timestamp(meta.get("creationTimestamp")) or 0.0,
        machine=spec.get("nodeName") or "",
        scheduled_at=timestamp(scheduled.get("lastTransitionTime")) if spec.get("nodeName") else None,
        address=status.get("podIP") or "",
        started_at=None if terminated.get("reason") in _NEVER_STARTED_REASONS else started_at or None,
        finished_at=timestamp(terminated.get("finishedAt")) or None,
        exit_code=terminated.get("exitCode"),
        ended=is_terminal,
        container_reason=terminated.get("reason") or "",
        pod_reason=status.get("reason") or "",
        pod_message=(status.get("message") or disruption.get("message") or "")[:_MAX_POD_MESSAGE],
        disruption=disruption.get("reason") or "",
        disrupted_at=timestamp(disruption.get("lastTransitionTime")),
        deletion_deadline=timestamp(meta.get("deletionTimestamp")),
        termination_message=terminated.get("message") or "",
    )


def newest_pods(job: JobState, pods: Iterable[PodState]) -> dict[int, PodState]:
    """Return the newest Pod of each node of the run. `pods` are those that the API server lists.

    A node whose Pod is deleted has the state that is saved in the Job, if there is one.
    """
    # A saved Pod that the API server no longer lists counts as ended, even if no console saw its end.
    newest = {
        node: dataclasses.replace(
            pod, ended=True, finished_at=pod.finished_at or pod.disrupted_at or pod.deletion_deadline
        )
        for node, pod in job.saved_pods.items()
    }
    for pod in sorted(pods, key=lambda pod: pod.created_at):
        saved = newest.get(pod.node)
        if saved is None or pod.uid == saved.uid or pod.created_at >= saved.created_at:
            newest[pod.node] = with_saved_external_deletion(pod, saved)
    return {node: pod for node, pod in sorted(newest.items()) if node < job.nodes}


def as_externally_deleted(pod: Object, *, now: float) -> PodState | None:
    """Read a Pod that neither the Job controller nor the console deleted.

    The result is disrupted for the reason EXTERNALLY_DELETED, at the time when the deletion was requested. It is None
    if the Pod is not a node of a run.
    """
    state = read_pod(pod)
    if state is None:
        return None
    requested_at = now
    if state.deletion_deadline is not None:
        requested_at = state.deletion_deadline - (pod["metadata"].get("deletionGracePeriodSeconds") or 0)
    return dataclasses.replace(state, disruption=EXTERNALLY_DELETED, disrupted_at=requested_at)


def with_saved_external_deletion(pod: PodState, saved: PodState | None) -> PodState:
    """Return the Pod, marked as EXTERNALLY_DELETED if its saved state is.

    A disruption that Kubernetes itself reports stays.
    """
    if saved is None or saved.uid != pod.uid or saved.disruption != EXTERNALLY_DELETED or pod.disruption:
        return pod
    return dataclasses.replace(pod, disruption=EXTERNALLY_DELETED, disrupted_at=saved.disrupted_at)


def is_submitted(job: Object) -> bool:
    """Return whether the Job's submission is complete, so that the run exists."""
    return names.SUBMITTED_ANNOTATION in object_annotations(job)


def is_existing_run(job: Object) -> bool:
    """Return whether the Job's submission is complete and its deletion was not requested."""
    return is_submitted(job) and not is_deleting(job)


def dump_status(status: RunStatus) -> str:
    """Serialize a run's final status for an annotation, with its log lines cut to fit."""
    if status.failure is not None:
        lines = tuple(line[:_MAX_LOG_LINE] for line in status.failure.last_lines)
        status = dataclasses.replace(status, failure=dataclasses.replace(status.failure, last_lines=lines))
    return json.dumps(dataclasses.asdict(status), sort_keys=True, ensure_ascii=False)


def load_status(text: str) -> RunStatus:
    """Read the output of `dump_status`."""
    data = storable(json.loads(text))  # earlier versions stored NUL
    data["phase"] = RunPhase(data["phase"])
    data["outcome"] = Outcome(data["outcome"]) if data["outcome"] else None
    data["nodes"] = tuple(NodeStatus(**{**node, "phase": RunPhase(node["phase"])}) for node in data["nodes"])
    data["spans"] = tuple(Span(**span) for span in data["spans"])
    failure = data["failure"]
    if failure:
        parsed = {"code": FailureCode(failure["code"]), "last_lines": tuple(failure["last_lines"])}
        data["failure"] = Failure(**{**failure, **parsed})
    return RunStatus(**data)

"""Find the first cause of a run's failure. Pure.

The cause decides whether the customer pays, so its two sources are trusted differently:

- The API server is trusted. Only it can report a cause that makes the run free: a lost, evicted or preempted Pod, or
  missing capacity.
- A record's causes are claims, trusted only if the customer pays for them (`_TRUSTED_CLAIMS`). Customer code shares the
  Pod with the process that signs the record. It may find the key, and so forge a record. A claim of any other cause
  therefore becomes CODE_FAILED, unless the API server confirms it.

`docs/kubernetes.md` has the complete table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime.backends.kubernetes.disruptions import DeletionEvents, unexplained_deletions
from runtime.backends.kubernetes.state import EXTERNALLY_DELETED, JobState, PodState, Termination
from runtime.backends.records import Cause as Claim
from runtime.backends.records import RecordData, failure_from
from runtime.launcher.causes import first_cause
from runtime.specs import Failure, FailureCode, Outcome

_MACHINE_LOSS_LAG_SECONDS = 120.0
"""Longest delay between the loss of a machine and its report. Kubernetes marks a Node NotReady 40 to 50 s after the
Node's last heartbeat. It evicts the Node's Pods 30 s later (`pod.EVICTION_SECONDS`); 120 s leave a reserve. A rank that
fails at most this long before the report counts as an effect of the loss."""
_REPORT_LAG_SECONDS = 2.0
"""Longest delay between any other cause and its report, since API timestamps are whole seconds."""
_OUT_OF_MEMORY_EXIT_CODE = 137
"""128 + the number of SIGKILL. Other processes of a container cannot kill its first process. So if the Pod was not
deleted, the kernel killed the process for its memory."""


@dataclass(frozen=True)
class Cause:
    """Why a run ended without completing."""

    outcome: Outcome
    failure: Failure
    at: float
    """When the cause was reported, in Unix seconds."""
    lag_seconds: float = _REPORT_LAG_SECONDS
    """How much earlier than `at` the cause may have happened."""


class _Diagnosis(NamedTuple):
    """The meaning for a run of a `reason` that the API server reports. `message` completes "Node 3 ..."."""

    outcome: Outcome
    code: FailureCode
    message: str
    lag_seconds: float = _REPORT_LAG_SECONDS


def _machine_loss(message: str) -> _Diagnosis:
    """Return the diagnosis for a node that was lost with its machine, which is reported late."""
    return _Diagnosis(Outcome.NODE_LOST, FailureCode.NODE_LOST, message, _MACHINE_LOSS_LAG_SECONDS)


# The diagnoses, which the tables below assign to the reasons.
_EVICTED = _Diagnosis(Outcome.NODE_LOST, FailureCode.EVICTED, "was evicted by its machine")
_PREEMPTED = _Diagnosis(Outcome.NODE_LOST, FailureCode.PREEMPTED, "was preempted by a Pod of higher priority")
_UNREACHABLE = _machine_loss("was lost: its machine is unreachable")  # Kubernetes reports it
_SHUT_DOWN = _machine_loss("was lost: its machine was shut down")
_UNRESPONSIVE = _machine_loss("was lost: its machine does not respond")  # only the backend noticed
_POD_DELETED = _machine_loss("was lost: its Pod was deleted from the cluster")
_REBOOTED = _machine_loss("was lost: its machine restarted")
_NO_CAPACITY = _Diagnosis(
    Outcome.NO_CAPACITY, FailureCode.NODES_NOT_PLACED, "found too few free resources on its machine"
)
_DISK_FULL = _Diagnosis(Outcome.DISK_FULL, FailureCode.DISK_FULL, "wrote more than its disk limit")
_OUT_OF_MEMORY = _Diagnosis(Outcome.OUT_OF_MEMORY, FailureCode.OUT_OF_MEMORY, "ran out of memory")
_NO_PYTHON = _Diagnosis(
    Outcome.CODE_FAILED, FailureCode.IMAGE_UNUSABLE, "could not be started: its image has no Python"
)

_DISRUPTION_REASONS = {
    "PreemptionByScheduler": _PREEMPTED,
    "DeletionByTaintManager": _UNREACHABLE,
    "DeletionByPodGC": _machine_loss("was lost: its machine was removed from the cluster"),
    "EvictionByEvictionAPI": _Diagnosis(
        Outcome.NODE_LOST, FailureCode.EVICTED, "was evicted: its machine is being drained"
    ),
    "TerminationByKubelet": _EVICTED,
    EXTERNALLY_DELETED: _POD_DELETED,
}
"""The meaning of each reason of the Pod's condition DisruptionTarget."""
_POD_REASONS = {
    "Evicted": _EVICTED,
    "Preempting": _PREEMPTED,
    "NodeLost": _UNREACHABLE,
    "Terminated": _SHUT_DOWN,
    "NodeShutdown": _SHUT_DOWN,
    "Shutdown": _SHUT_DOWN,
    "NodeAffinity": _Diagnosis(
        Outcome.NODE_LOST, FailureCode.NODE_LOST, "was rejected by its machine, which restarted with other labels"
    ),
    "UnexpectedAdmissionError": _Diagnosis(Outcome.NODE_LOST, FailureCode.NODE_LOST, "was rejected by its machine"),
    "DeadlineExceeded": _Diagnosis(Outcome.TIME_LIMIT, FailureCode.TIME_LIMIT, "reached its time limit"),
}
"""The meaning of each reason in the Pod's status."""
_OUT_OF_RESOURCE = re.compile(r"^(OutOf|Outof)")
"""The beginning of Pod reasons such as OutOfcpu: the kubelet rejected a Pod that the scheduler had placed. Versions of
Kubernetes differ in the capital letter."""
EXIT_UNKNOWN_REASONS = frozenset({"Unknown", "ContainerStatusUnknown"})
"""Container reasons of a kubelet that restarted and found the container gone. The reported exit code is then
not the container's."""
_CONTAINER_REASONS = {
    "OOMKilled": _OUT_OF_MEMORY,
    # The container's command is Python, so a command that cannot be executed means that the image has none.
    "StartError": _NO_PYTHON,
    "ContainerCannotRun": _NO_PYTHON,
    **dict.fromkeys(EXIT_UNKNOWN_REASONS, _REBOOTED),
}
"""The meaning of each reason of the container's terminated state."""
_OWN_DISK_LIMIT = re.compile(r"exceeds the (?:total )?limit|exceeded its local ephemeral storage limit", re.IGNORECASE)
"""Parts of the kubelet's messages for a Pod that was evicted because it exceeded its own disk limit. Other evictions
mean that the machine ran short of resources."""
_TRUSTED_CLAIMS = frozenset({"code_failed", "out_of_memory", "disk_full", "hung", "time_limit"})
"""Kinds of causes that a record may claim without confirmation: the customer pays for each of them."""


def find_cause(
    job: JobState,
    pods: Mapping[int, PodState],
    records: Mapping[int, RecordData],
    unresponsive_since: Mapping[int, float],
    events: DeletionEvents | None = None,
) -> Cause | None:
    """Return the first cause of the run's end, or None if the run completed.

    `pods` and `records` are by node. `unresponsive_since` has, by node, when its kubelet stopped responding (Unix
    seconds). `events` is None if the Job's events were not read.
    """
    if len(pods) == job.nodes and all(pod.succeeded for pod in pods.values()):
        return None
    enough_succeeded = job.is_elastic and _count_succeeded(pods) >= job.spec.min_nodes
    reported_causes = _reported_causes(job, pods, unresponsive_since, events)
    # If enough nodes of an elastic run succeeded, only a cause that concerns no single node can have ended it.
    if enough_succeeded:
        reported_causes = [cause for cause in reported_causes if cause.failure.node is None]
    reported_cause = min(reported_causes, key=_earliest_time, default=None)
    # A node that claims STOPPED has obeyed a request to end. The reason for that is in the Job's termination.
    claims = [
        claim for record in records.values() for claim in record.get("causes", ()) if claim["kind"] != Outcome.STOPPED
    ]
    trusted_claim = first_cause([claim for claim in claims if claim["kind"] in _TRUSTED_CLAIMS])
    # The API server's cause counts as the first if it may have happened before the claimed one.
    if reported_cause is not None and (
        trusted_claim is None or _earliest_time(reported_cause) <= float(trusted_claim["at"])
    ):
        return reported_cause
    if trusted_claim is not None:
        return _claimed_cause(trusted_claim)
    first_claim = first_cause(claims)
    if first_claim is not None:
        return _unconfirmed_cause(job, records, first_claim)
    return None if enough_succeeded else _cause_by_exit_codes(job, pods)


def _earliest_time(cause: Cause) -> float:
    """Return the earliest time at which the cause may have happened."""
    return cause.at - cause.lag_seconds


def _count_succeeded(pods: Mapping[int, PodState]) -> int:
    return sum(pod.succeeded for pod in pods.values())


# Causes that the API server reports


def _reported_causes(
    job: JobState, pods: Mapping[int, PodState], unresponsive_since: Mapping[int, float], events: DeletionEvents | None
) -> list[Cause]:
    """Return all causes that the API server reports; see `find_cause` for the arguments."""
    causes = [] if job.termination is None else [_termination_cause(job.termination)]
    causes += [cause for cause in (pod_cause(job, pod) for pod in pods.values()) if cause is not None]
    # The statuses of Pods come first. Each further source counts only for nodes that no earlier source explains.
    causes += _job_disruption(job, {cause.failure.node for cause in causes})
    # If there is a cause so far, the Job controller may have deleted Pods because of it. Their deletion then proves
    # nothing.
    if not causes:
        causes += _external_deletion(job, pods, events or DeletionEvents())
    nodes_with_cause = {cause.failure.node for cause in causes}
    deleted_nodes = unexplained_deletions(job, pods)
    # By node: when its machine stopped responding. A NodeNotReady event counts only if the Pod was deleted, since
    # the machine may become Ready again in time. `unresponsive_since` has only Pods whose end is not reported.
    not_ready_at = {} if events is None else events.not_ready_at
    silent_since = {node: at for node, at in not_ready_at.items() if node in deleted_nodes}
    silent_since |= {node: at for node, at in unresponsive_since.items() if node in pods}
    causes += [
        _cause(pods.get(node, PodState(node)), _UNRESPONSIVE, at=at)
        for node, at in silent_since.items()
        if node not in nodes_with_cause
    ]
    return causes


def _termination_cause(termination: Termination) -> Cause:
    """Return the console's decision to end the run as a cause, without a lag: `at` is when the console decided."""
    failure = Failure(termination.message, termination.code, dict(termination.data))
    return Cause(termination.outcome, failure, termination.at, lag_seconds=0.0)


def pod_cause(job: JobState, pod: PodState) -> Cause | None:
    """Return the cause that the Pod's status names; None if it has only an exit code."""
    if _OUT_OF_RESOURCE.match(pod.pod_reason):
        return _cause(pod, _NO_CAPACITY)
    if pod.pod_reason == "Evicted" and _OWN_DISK_LIMIT.search(pod.pod_message):
        return _cause(pod, _DISK_FULL, data={"limit_mib": job.spec.disk_mib} if job.spec.disk_mib else {})
    diagnosis = _DISRUPTION_REASONS.get(pod.disruption) or _POD_REASONS.get(pod.pod_reason)
    # A Pod that was deleted before its container started has the same container reasons, but its machine did not
    # restart.
    was_never_started = pod.container_reason in EXIT_UNKNOWN_REASONS and pod.deletion_deadline is not None
    if diagnosis is None and pod.ended and not was_never_started:
        diagnosis = _CONTAINER_REASONS.get(pod.container_reason)
    if diagnosis is None:
        return None
    if diagnosis is _OUT_OF_MEMORY:
        # The console's message for the customer names the limit.
        return _cause(pod, diagnosis, at=pod.disrupted_at, data={"limit_mib": job.spec.memory_mib})
    cause = _cause(pod, diagnosis, at=pod.disrupted_at)
    if diagnosis is _NO_PYTHON and job.spec.builtin:
        return dataclasses.replace(cause, outcome=Outcome.PLATFORM_ERROR)  # the image is the platform's own
    return cause


def _job_disruption(job: JobState, nodes_with_cause: Set[int | None]) -> list[Cause]:
    """Return the disruption that the Job's Failed condition reports, unless its node is in `nodes_with_cause`.

    There is at most one, and its Pod may be deleted already. The Job's podFailurePolicy has one rule, for the condition
    DisruptionTarget, and the condition's message names the Pod.
    """
    if job.failure_reason != "PodFailurePolicy" or job.failed_at is None:
        return []
    match = re.search(rf"/{re.escape(job.name)}-(\d+)-", job.failure_message)
    node = int(match.group(1)) if match else None
    if node in nodes_with_cause:
        return []
    subject = "A node" if node is None else f"Node {node}"
    failure = Failure(f"{subject} was disrupted: {job.failure_message}.", FailureCode.EVICTED, node=node)
    return [Cause(Outcome.NODE_LOST, failure, job.failed_at, _MACHINE_LOSS_LAG_SECONDS)]


def _external_deletion(job: JobState, pods: Mapping[int, PodState], events: DeletionEvents) -> list[Cause]:
    """Return the deletion of a Pod by somebody other than the Job controller as a cause; at most one.

    Customer code cannot request such a deletion. If no Pod failed by itself, every deletion was external. If a Pod
    failed by itself, the Job controller deletes the others. A deletion then counts as external only if the Job's events
    prove it.
    """
    # BackoffLimitExceeded is the Job's reason if a Pod failed or was deleted. The Job of an elastic run has another
    # backoff limit, by node.
    if job.failure_reason != "BackoffLimitExceeded" or job.failed_at is None or job.is_elastic or not pods:
        return []
    failed_by_itself = any(pod.ended and pod.exit_code and pod.deletion_deadline is None for pod in pods.values())
    deleted_nodes = unexplained_deletions(job, pods)
    if failed_by_itself:
        deleted_nodes = events.deleted_externally(deleted_nodes)
    if not deleted_nodes:
        return []
    deleted_pods = [pods.get(node, PodState(node)) for node in deleted_nodes]
    first = min(deleted_pods, key=lambda pod: pod.deletion_deadline or 0.0)
    return [_cause(first, _POD_DELETED, at=job.failed_at)]


def _cause(
    pod: PodState, diagnosis: _Diagnosis, *, at: float | None = None, data: Mapping[str, Any] | None = None
) -> Cause:
    """Return the cause of a Pod's end with this diagnosis. Without `at`, it is dated at the Pod's end or deletion."""
    detail = f" ({pod.pod_message})" if pod.pod_message else ""
    failure = Failure(f"Node {pod.node} {diagnosis.message}{detail}.", diagnosis.code, dict(data or {}), pod.node)
    cause_at = at or pod.finished_at or pod.deletion_deadline or pod.created_at
    return Cause(diagnosis.outcome, failure, cause_at, diagnosis.lag_seconds)


# Causes that records claim, and causes by exit codes


def _claimed_cause(claim: Claim) -> Cause:
    return Cause(Outcome(claim["kind"]), failure_from(claim), float(claim["at"]))


def _unconfirmed_cause(job: JobState, records: Mapping[int, RecordData], claim: Claim) -> Cause:
    """Return the cause for a claim that the platform is at fault, if the API server does not confirm it.

    The customer pays, with one exception: the nodes of a run in a built-in image never met. Then no customer code has
    started that could have forged the claim. (A customer's own image could forge it before its code starts.)
    """
    never_ran = not any(record.get("started_at") for record in records.values())
    is_platform_fault = claim.get("code") == FailureCode.NODES_NOT_MET and never_ran and job.spec.builtin
    return _claimed_cause(claim if is_platform_fault else {**claim, "kind": Outcome.CODE_FAILED})


def _cause_by_exit_codes(job: JobState, pods: Mapping[int, PodState]) -> Cause:
    """Return a cause for a run that neither the API server nor a record explains."""
    ended_at = job.ended_at or 0.0
    if job.failure_reason == "DeadlineExceeded":
        failure = Failure("The run reached its time limit.", FailureCode.TIME_LIMIT)
        return Cause(Outcome.TIME_LIMIT, failure, ended_at)
    failed_pods = [pod for pod in pods.values() if pod.ended and pod.exit_code]
    if not failed_pods:
        # Customer code cannot cause this, since it cannot end a Pod without an exit code or delete one.
        failure = Failure(f"The run ended, and nothing shows why. {job.failure_message}".strip())
        return Cause(Outcome.PLATFORM_ERROR, failure, ended_at)
    first = min(failed_pods, key=lambda pod: pod.finished_at or 0.0)
    if first.exit_code == _OUT_OF_MEMORY_EXIT_CODE and first.deletion_deadline is None and job.spec.builtin:
        # containerd sometimes misses the kernel's notification and reports Error in place of OOMKilled. In an image of
        # their own, customers could make the first process exit with this code.
        return _cause(first, _OUT_OF_MEMORY, data={"limit_mib": job.spec.memory_mib})
    message = f"Node {first.node} ended with exit code {first.exit_code} and left no record."
    failure = Failure(message, FailureCode.RANK_EXITED, node=first.node, exit_code=first.exit_code)
    return Cause(Outcome.CODE_FAILED, failure, first.finished_at or 0.0)

"""Explain why a submitted run has not started, and decide when to give up on it. Pure.

`explain_waiting` turns the Pods' conditions and events into a `Waiting`: a code, its data and a sentence. If there are
several obstacles, it names the one that a person can most likely remove.

`find_termination` ends a run that holds machines but cannot start: only some of its Pods were scheduled, or their
containers do not start. Such a run never ran and is free of charge. Its outcome decides whether it is retried. It also
ends a run that Kueue preempts, and one in a customer's own image that ignores its deadline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.backends.kubernetes.capacity import cpus, mebibytes, request_of
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.objects import Object, container_statuses
from runtime.backends.kubernetes.state import JobState, PodState, Termination
from runtime.specs import Capacity, FailureCode, NodeCapacity, Outcome, RunPhase, RunStatus, Waiting, WaitingCode

IMAGE_REFUSED_SECONDS = 60.0
"""How long a registry may refuse an image's name or credentials before the run ends. Kubelets retry a pull after 10, 20
and 40 s, so at least three attempts have failed by then."""
DEADLINE_MARGIN_SECONDS = 60.0
"""How long after its deadline, counted from the last container's start, a run in a customer's own image may still run.
The clock of the first process starts some seconds later, when the nodes have met, and the run's end takes up to 30 s.
Nodes that take longer than that to meet leave the run less time. The meter counts from the last container's start too.
"""
_MAX_DETAIL_LENGTH = 500
"""Maximum length of a Kubernetes message in a reason's data: a few lines, which the console stores for each job and
shows to people."""

# Patterns for the free text in which container runtimes and registries report a failed pull. `classify_pull_error`
# applies them to the text without its quoted references and addresses, whose names may have any of these words.
_QUOTED_NAME = re.compile(r'"[^"\s]*"')
_NETWORK_ERROR = re.compile(
    r"dial tcp|no such host|i/o timeout|timed? ?out|deadline exceeded|connection re(?:fused|set)|no route|unreachable|"
    r"x509|\btls\b|certificate|\beof\b|toomanyrequests|too many requests|\b50[0-9]\b|server misbehaving|lookup .* on",
    re.IGNORECASE,
)
_NAME_ERROR = re.compile(
    r"not ?found|manifest unknown|name unknown|does not exist|invalid ?(?:image|reference)|couldn't parse|"
    r"no such image|no match for platform",
    re.IGNORECASE,
)
_CREDENTIALS_ERROR = re.compile(
    r"\b401\b|\b403\b|unauthori[sz]ed|authentication required|authorization failed|denied|forbidden|no basic auth",
    re.IGNORECASE,
)
_AMBIGUOUS_PREFIX = re.compile(
    r"pull access denied, repository does not exist or may require authorization", re.IGNORECASE
)
"""containerd's text for both a missing repository and missing credentials. The text that follows tells them apart."""
_CREDENTIALS_REFUSED = re.compile(r"\b401\b|\b403\b|unauthori[sz]ed|forbidden", re.IGNORECASE)
"""After an ambiguous message: the registry refused the credentials. This has fewer words than _CREDENTIALS_ERROR,
because registries report "authorization failed" for a missing repository too."""
_ANY_PULL_ERROR = re.compile(
    f"{_NETWORK_ERROR.pattern}|{_NAME_ERROR.pattern}|{_CREDENTIALS_ERROR.pattern}", re.IGNORECASE
)
# Reasons of a container that waits: its image cannot be pulled, or the container cannot be created.
_PULL_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "RegistryUnavailable",
        "ImageInspectError",
    }
)
_CONTAINER_REASONS = frozenset({"CreateContainerError", "CreateContainerConfigError", "RunContainerError"})
# Parts of messages of the scheduler, the kubelet and the API server, and reasons of events.
_INSUFFICIENT = re.compile(r"Insufficient ([A-Za-z0-9./-]*[A-Za-z0-9])")
_TAINT = re.compile(r"had untolerated taint(?:\(s\))? ?\{?([^}:,]*)")
_VOLUME_ERROR = re.compile(r"persistentvolumeclaim|PersistentVolume|volume", re.IGNORECASE)
_CLAIM_NAME = re.compile(r'persistentvolumeclaim "([^"]+)"')
_MOUNT_EVENTS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_POLICY_REFUSAL = re.compile(r"violates PodSecurity|admission webhook|denied the request", re.IGNORECASE)
# The failure of a run that ends because of its image, by the reason why it waited.
_IMAGE_FAILURES = {
    WaitingCode.IMAGE_NAME: FailureCode.IMAGE_NAME,
    WaitingCode.IMAGE_CREDENTIALS: FailureCode.IMAGE_CREDENTIALS,
    WaitingCode.IMAGE_NETWORK: FailureCode.IMAGE_NETWORK,
}


def explain_waiting(
    job: Object,
    pods: Sequence[Object],
    events: Sequence[Object],
    *,
    config: ClusterConfig,
    capacity: Capacity | None = None,
    workload: Object | None = None,
) -> Waiting:
    """Return the obstacle that delays the run's start.

    `events` are about the Job and its Pods. `capacity` is None if it is not known. `workload` is Kueue's Workload of
    the Job, if Kueue admits runs here.
    """
    nodes = job["spec"]["completions"]
    # Sorted as text, since all timestamps have the format of RFC 3339.
    events_in_order = sorted(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    if job["spec"].get("suspend"):
        return _explain_admission(config, workload)
    rejection = _explain_rejected_pods(events_in_order)
    # The events of a rejection stay for a while after all Pods were created, and then explain nothing.
    if rejection is not None and len(pods) < nodes:
        return rejection
    # Images and volumes come first: a person can usually fix them sooner than a lack of machines.
    for explain_pod in (_explain_image, _explain_volume):
        for pod in pods:
            obstacle = explain_pod(pod, _events_of(pod, events_in_order))
            if obstacle is not None:
                return obstacle
    messages = [message for pod in pods if (message := _unscheduled_message(pod)) is not None]
    shortage_message = next((message for message in messages if _INSUFFICIENT.search(message)), None)
    machines = None
    if messages and capacity is not None:
        request = request_of(job, config)
        machines = capacity.machines_for(request.resources, request.kind)
        if shortage_message and not capacity.nodes_ever(request.resources, request.kind):
            return Waiting(WaitingCode.TOO_LARGE, {}, f"No machine of this cluster is that large: {shortage_message}")
    if messages:
        message = shortage_message or messages[0]
        return _explain_unscheduled(pods[0], message, config=config, machines=machines, nodes=len(messages))
    return _explain_starting(nodes, pods)


def classify_pull_error(message: str) -> WaitingCode:
    """Return IMAGE_NAME, IMAGE_CREDENTIALS or IMAGE_NETWORK, by the message of a failed pull.

    Name errors have priority. A message about one may also contain a network error, because the runtime tried another
    address too, and registries report a hidden repository as both missing and denied.
    """
    text, is_ambiguous = _AMBIGUOUS_PREFIX.subn("", _QUOTED_NAME.sub("", message))
    if _NETWORK_ERROR.search(text) and not _NAME_ERROR.search(text):
        return WaitingCode.IMAGE_NETWORK
    if _NAME_ERROR.search(text) or (is_ambiguous and not _CREDENTIALS_REFUSED.search(text)):
        return WaitingCode.IMAGE_NAME
    return WaitingCode.IMAGE_CREDENTIALS if _CREDENTIALS_ERROR.search(text) else WaitingCode.IMAGE_NETWORK


def find_termination(
    job: JobState,
    pods: Mapping[int, PodState],
    status: RunStatus,
    waiting: Waiting | None,
    *,
    config: ClusterConfig,
    now: float,
) -> Termination | None:
    """Return why the run must be ended now; None if it may continue. `waiting` is None once the run has started."""
    if job.termination is not None or status.phase is RunPhase.ENDED:
        return None
    if status.started_at is not None and job.suspended:
        # Kueue preempts a run by suspending its Job, and would resume the Job later. The console ends this attempt and
        # starts a new one instead.
        message = "The queue preempted the run, because another run needs its quota."
        return Termination(Outcome.NODE_LOST, FailureCode.PREEMPTED, message, now)
    if status.started_at is not None:
        # The first process ends the run at its deadline. In a customer's own image, the image's Python runs this
        # process and may ignore the deadline, and `activeDeadlineSeconds` comes many minutes later (`pod`).
        # Its phase may be STARTING: in a large elastic run, a lost node's Pod may not be saved. If it is STOPPING, the
        # kubelets end it.
        is_active = status.phase is not RunPhase.STOPPING
        may_ignore_deadline = is_active and not job.spec.builtin and job.spec.deadline_seconds
        if may_ignore_deadline and now > status.started_at + job.spec.deadline_seconds + DEADLINE_MARGIN_SECONDS:
            return Termination(Outcome.TIME_LIMIT, FailureCode.TIME_LIMIT, "The run reached its time limit.", now)
        return None
    # `is_failing`: the Job controller already ends the Job.
    if job.suspended or job.start_time is None or waiting is None or job.is_failing:
        return None
    scheduled_pods = [pod for pod in pods.values() if pod.machine]
    termination = _partial_placement_termination(job, scheduled_pods, waiting, config, now)
    return termination or _stuck_start_termination(job, scheduled_pods, waiting, config, now)


# Obstacles to a start


def _explain_admission(config: ClusterConfig, workload: Object | None) -> Waiting:
    """Return what Kueue reports about a run that it has not admitted yet."""
    conditions = ((workload or {}).get("status") or {}).get("conditions") or []
    message = next(
        (condition.get("message", "") for condition in conditions if condition["type"] == "QuotaReserved"), ""
    )
    sentence = f"Waiting for the queue '{config.queue}' to admit the run. {message}".strip()
    return Waiting(WaitingCode.ADMISSION, {"queue": config.queue, "detail": message[:_MAX_DETAIL_LENGTH]}, sentence)


def _explain_rejected_pods(events: Sequence[Object]) -> Waiting | None:
    """Return why the API server rejected Pods that the Job controller tried to create; None if it rejected none."""
    messages = _messages(events, {"FailedCreate"})
    if not messages:
        return None
    message = messages[-1]
    if "exceeded quota" in message:
        return Waiting(
            WaitingCode.QUOTA, {"detail": message[:_MAX_DETAIL_LENGTH]}, f"The namespace's quota is used up: {message}"
        )
    if _POLICY_REFUSAL.search(message):
        data = {"queue": "", "detail": message[:_MAX_DETAIL_LENGTH]}
        return Waiting(WaitingCode.ADMISSION, data, f"The cluster's policy refuses the run's pods: {message}")
    return Waiting(
        WaitingCode.UNSCHEDULABLE,
        {"detail": message[:_MAX_DETAIL_LENGTH]},
        f"The run's pods cannot be created: {message}",
    )


def _explain_image(pod: Object, events: Sequence[Object]) -> Waiting | None:
    """Return why the Pod's image cannot be pulled or its container cannot be created; None if neither has failed."""
    for container in container_statuses(pod):
        state = (container.get("state") or {}).get("waiting") or {}
        image = container.get("image") or pod["spec"]["containers"][0]["image"]
        if state.get("reason") in _PULL_REASONS:
            message = str(state.get("message") or "")
            pull_events = [text for text in _messages(events, {"Failed"}) if "pull" in text]
            # During back-off, older kubelets report the pull's error only in an event.
            if pull_events and not _ANY_PULL_ERROR.search(_QUOTED_NAME.sub("", message)):
                message = pull_events[-1]
            # ErrImageNeverPull: the policy forbids a pull, and the machine has no image of that name.
            is_name_error = state["reason"] in {"InvalidImageName", "ErrImageNeverPull"}
            code = WaitingCode.IMAGE_NAME if is_name_error else classify_pull_error(message)
            sentence = f"The image {image} cannot be pulled: {message.strip() or state['reason']}"
            return Waiting(code, {"image": image, "detail": message.strip()[:_MAX_DETAIL_LENGTH]}, sentence)
        if state.get("reason") in _CONTAINER_REASONS:
            message = f"{state['reason']}: {state.get('message', '')}"
            sentence = f"The container cannot be created: {message}"
            # This obstacle has no code of its own: the customer can do no more about it than about a Pod that fits
            # nowhere.
            return Waiting(WaitingCode.UNSCHEDULABLE, {"detail": message[:_MAX_DETAIL_LENGTH]}, sentence)
    return None


def _explain_volume(pod: Object, events: Sequence[Object]) -> Waiting | None:
    """Return why the Pod's storage cannot be mounted; None if nothing reports a failure."""
    messages = _messages(events, _MOUNT_EVENTS)
    # The run's own ConfigMaps and Secret are created just after its Job. Until then, their mounts fail and are retried.
    messages = [text for text in messages if "configmap" not in text.lower() and "secret" not in text.lower()]
    unscheduled = _unscheduled_message(pod)
    if unscheduled is not None and _VOLUME_ERROR.search(unscheduled):
        messages = [unscheduled]
    if not messages or _is_running(pod):
        return None
    claim = _CLAIM_NAME.search(messages[-1])
    data = {"claim": claim.group(1) if claim else _claim_name(pod), "detail": messages[-1][:_MAX_DETAIL_LENGTH]}
    return Waiting(WaitingCode.VOLUME, data, f"The storage cannot be mounted: {messages[-1]}")


def _explain_unscheduled(
    pod: Object, message: str, *, config: ClusterConfig, machines: Sequence[NodeCapacity] | None, nodes: int
) -> Waiting:
    """Return what the unscheduled Pods wait for, by the scheduler's `message` about one of them.

    `pod` is any Pod of the run, since all request the same. `machines` are those that the run may use; None if they are
    not known. `nodes` is the number of unscheduled Pods. In the data, `free` is the largest amount on one machine; of
    GPUs it is the sum of all machines.
    """
    requests = pod["spec"]["containers"][0]["resources"]["requests"]
    missing_resources = set(_INSUFFICIENT.findall(message))
    selector = pod["spec"].get("nodeSelector") or {}
    # If the scheduler names no resource that is short, a run whose selector names a GPU type probably waits for a
    # machine with that type.
    lacks_gpu_type = config.gpu_resource in requests and not missing_resources and config.gpu_label in selector
    free: float | None
    if config.gpu_resource in missing_resources or lacks_gpu_type:
        gpu_type = selector.get(config.gpu_label, "")
        free = None if machines is None else _free_gpus(machines, gpu_type)
        data = {"wanted": int(requests[config.gpu_resource]), "gpu_type": gpu_type, "nodes": nodes, "free": free}
        return Waiting(WaitingCode.GPUS, data, f"Not enough GPUs are free: {message}")
    if "cpu" in missing_resources:
        free = None if machines is None else max((machine.free.cpus for machine in machines), default=0.0)
        data = {"wanted": cpus(requests["cpu"]), "nodes": nodes, "free": free}
        return Waiting(WaitingCode.CPUS, data, f"Not enough CPUs are free: {message}")
    if "memory" in missing_resources:
        free = None if machines is None else max((machine.free.memory_mib for machine in machines), default=0)
        data = {"wanted": mebibytes(requests["memory"]), "nodes": nodes, "free": free}
        return Waiting(WaitingCode.MEMORY, data, f"Not enough memory is free: {message}")
    taint = _TAINT.search(message)
    # "didn't match": other machines do not match the selector. Then the tainted machines are usually ones that the run
    # could not use anyway, such as those of the control plane.
    if taint and "didn't match" not in message:
        data = {"taint": taint.group(1).strip(), "detail": message[:_MAX_DETAIL_LENGTH]}
        return Waiting(WaitingCode.TAINT, data, f"The machines are reserved or not ready: {message}")
    sentence = f"The run's pods cannot be placed: {message}"
    return Waiting(WaitingCode.UNSCHEDULABLE, {"detail": message[:_MAX_DETAIL_LENGTH]}, sentence)


def _explain_starting(nodes: int, pods: Sequence[Object]) -> Waiting:
    """Return how many nodes have not started: they wait for a machine, or else for their container."""
    running_pods = sum(_is_running(pod) for pod in pods)
    scheduled_pods = sum(bool(pod["spec"].get("nodeName")) for pod in pods)
    step = "place" if scheduled_pods < nodes else "container"
    waiting_nodes = nodes - running_pods
    subject = "1 node" if waiting_nodes == 1 else f"{waiting_nodes} nodes"
    awaited = "a machine" if step == "place" else "the image and the container"
    sentence = f"Waiting for {subject} to start: {awaited}."
    return Waiting(WaitingCode.STARTING, {"nodes": waiting_nodes, "step": step}, sentence)


def _unscheduled_message(pod: Object) -> str | None:
    """Return the scheduler's message for a Pod that it could not schedule, else None."""
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "")
    return None


def _is_running(pod: Object) -> bool:
    return any((container.get("state") or {}).get("running") for container in container_statuses(pod))


def _events_of(pod: Object, events: Sequence[Object]) -> list[Object]:
    uid = pod["metadata"]["uid"]
    return [event for event in events if (event.get("involvedObject") or {}).get("uid") == uid]


def _messages(events: Sequence[Object], reasons: frozenset[str] | set[str]) -> list[str]:
    """Return the messages of the events that have one of these reasons."""
    return [str(event.get("message", "")) for event in events if event.get("reason") in reasons]


def _claim_name(pod: Object) -> str:
    """Return the name of the Pod's first PersistentVolumeClaim; "" if it has none."""
    for volume in pod["spec"].get("volumes") or []:
        if "persistentVolumeClaim" in volume:
            return str(volume["persistentVolumeClaim"]["claimName"])
    return ""


def _free_gpus(machines: Sequence[NodeCapacity], gpu_type: str) -> int:
    """Return the number of free GPUs of a type; "" is any type."""
    return sum(
        machine.free.gpus
        for machine in machines
        if gpu_type in {"", machine.free.gpu_type or machine.total.gpu_type}  # `free` has no type without free GPUs
    )


# When to give up


def _partial_placement_termination(
    job: JobState, scheduled_pods: list[PodState], waiting: Waiting, config: ClusterConfig, now: float
) -> Termination | None:
    """Return a termination if only some Pods were scheduled in time, else None.

    The scheduled Pods hold machines that other runs could use.
    """
    is_late = job.start_time is not None and now > job.start_time + config.gang_seconds
    if not (config.ends_partial_placement and scheduled_pods and len(scheduled_pods) < job.nodes and is_late):
        return None
    message = (
        f"Only {len(scheduled_pods)} of {job.nodes} nodes were placed in {config.gang_seconds} s. {waiting.sentence}"
    )
    data: dict[str, Any] = {
        "placed": len(scheduled_pods),
        "nodes": job.nodes,
        "seconds": config.gang_seconds,
        "waiting_code": waiting.code.value,
    }
    return Termination(Outcome.NO_CAPACITY, FailureCode.NODES_NOT_PLACED, message, now, data)


def _stuck_start_termination(
    job: JobState, scheduled_pods: list[PodState], waiting: Waiting, config: ClusterConfig, now: float
) -> Termination | None:
    """Return a termination if Pods were scheduled but their containers did not start in time, else None.

    The reason is the image, the storage or the machine.
    """
    waiting_pods = [pod for pod in scheduled_pods if pod.started_at is None]
    is_refused = waiting.code in {WaitingCode.IMAGE_NAME, WaitingCode.IMAGE_CREDENTIALS}
    limit_seconds = IMAGE_REFUSED_SECONDS if is_refused else float(config.start_seconds)
    # A run with only some scheduled Pods has a limit of its own (`gang_seconds`). If its image is refused, waiting that
    # long would not help.
    if not waiting_pods or (len(scheduled_pods) < job.nodes and not is_refused):
        return None
    if now < max(pod.scheduled_at or pod.created_at for pod in waiting_pods) + limit_seconds:
        return None
    # The customer is responsible for an image of their own, and the platform for everything else.
    outcome = Outcome.CODE_FAILED if is_refused and not job.spec.builtin else Outcome.PLATFORM_ERROR
    code = _IMAGE_FAILURES.get(waiting.code, FailureCode.NODE_NOT_STARTED)
    data = {**waiting.data, "node": min(pod.node for pod in waiting_pods)}
    return Termination(outcome, code, waiting.sentence, now, data)

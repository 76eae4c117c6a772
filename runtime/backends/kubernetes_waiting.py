"""Why a run that was accepted does not run yet: from pods and events to a code, its data and a sentence. PURE.

The one rule: the hindrance that a person can do most about comes first, and what nobody knows better is told in the
scheduler's own words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.backends.kubernetes_capacity import asked_by, cpus, mebibytes
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.specs import Capacity, Waiting, WaitingCode

Object = Mapping[str, Any]

# Asked in this order: a registry that cannot be reached says so in many ways, and one that hides what it has says that
# it denies access to a name that may not exist.
_NETWORK = re.compile(
    r"dial tcp|no such host|i/o timeout|timed? ?out|deadline exceeded|connection re(?:fused|set)|no route|unreachable|"
    r"x509|tls|certificate|\beof\b|toomanyrequests|too many requests|50[0-9]|server misbehaving|lookup .* on",
    re.IGNORECASE,
)
_NAME = re.compile(
    r"not ?found|manifest unknown|name unknown|does not exist|invalid ?(?:image|reference)|couldn't parse|"
    r"no such image|no match for platform",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(
    r"\b401\b|\b403\b|unauthori[sz]ed|authentication required|authorization failed|denied|forbidden|no basic auth",
    re.IGNORECASE,
)
# Said by containerd whatever the registry's reason: what follows it tells the two apart.
_HIDDEN = re.compile(r"pull access denied, repository does not exist or may require authorization", re.IGNORECASE)
_REFUSED = re.compile(r"\b401\b|\b403\b|unauthori[sz]ed|forbidden", re.IGNORECASE)
_TELLING = re.compile(f"{_NETWORK.pattern}|{_NAME.pattern}|{_CREDENTIALS.pattern}", re.IGNORECASE)
_IMAGE_REASONS = frozenset(
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
_INSUFFICIENT = re.compile(r"Insufficient ([A-Za-z0-9./-]*[A-Za-z0-9])")
_TAINT = re.compile(r"had untolerated taint(?:\(s\))? ?\{?([^}:,]*)")
_VOLUME = re.compile(r"persistentvolumeclaim|PersistentVolume|volume", re.IGNORECASE)
_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)"')
_MOUNT_EVENTS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_POLICY = re.compile(r"violates PodSecurity|admission webhook|denied the request", re.IGNORECASE)


def explain(
    job: Object,
    pods: Sequence[Object],
    events: Sequence[Object],
    *,
    config: ClusterConfig,
    capacity: Capacity | None = None,
    workload: Object | None = None,
) -> Waiting:
    """What holds the run up. `events` are those of its Job and its pods, `workload` Kueue's where there is one."""
    nodes = job["spec"]["completions"]
    told = sorted(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    if job["spec"].get("suspend"):
        return _admission(config, workload)
    refused = _refused(told)
    if refused is not None and len(pods) < nodes:
        return refused
    for find in (_image, _volume):
        found = next((found for pod in pods if (found := find(pod, _of(pod, told))) is not None), None)
        if found is not None:
            return found
    unplaced = [message for pod in pods if (message := _unplaced(pod)) is not None]
    short = [message for message in unplaced if _INSUFFICIENT.search(message)]
    if short and capacity is not None and not capacity.nodes_ever(*asked_by(job, config)):
        return Waiting(WaitingCode.TOO_LARGE, {}, f"No machine of this cluster is that large: {short[0]}")
    if unplaced:
        return _unschedulable(pods[0], unplaced[0], config=config, capacity=capacity, nodes=len(unplaced))
    return _underway(nodes, pods)


def image_trouble(message: str) -> WaitingCode:
    """What a message of a failed pull is about: the image's name, the credentials, or the way to the registry."""
    said, hidden = _HIDDEN.subn("", message)
    if _NETWORK.search(said) and not _NAME.search(said):
        return WaitingCode.IMAGE_NETWORK
    if _NAME.search(said) or (hidden and not _REFUSED.search(said)):
        return WaitingCode.IMAGE_NAME
    return WaitingCode.IMAGE_CREDENTIALS if _CREDENTIALS.search(said) else WaitingCode.IMAGE_NETWORK


def _admission(config: ClusterConfig, workload: Object | None) -> Waiting:
    conditions = ((workload or {}).get("status") or {}).get("conditions") or []
    said = next((one.get("message", "") for one in conditions if one["type"] == "QuotaReserved"), "")
    sentence = f"Waiting for the queue '{config.queue}' to admit the run. {said}".strip()
    return Waiting(WaitingCode.ADMISSION, {"queue": config.queue, "detail": said}, sentence)


def _refused(events: Sequence[Object]) -> Waiting | None:
    """Pods that the Job controller was not let make."""
    messages = [str(event.get("message", "")) for event in events if event.get("reason") == "FailedCreate"]
    if not messages:
        return None
    said = messages[-1]
    if "exceeded quota" in said:
        return Waiting(WaitingCode.QUOTA, {"detail": said}, f"The namespace's quota is used up: {said}")
    if _POLICY.search(said):
        data = {"queue": "", "detail": said}
        return Waiting(WaitingCode.ADMISSION, data, f"The cluster's policy refuses the run's pods: {said}")
    return Waiting(WaitingCode.UNSCHEDULABLE, {"detail": said}, f"The run's pods cannot be made: {said}")


def _image(pod: Object, events: Sequence[Object]) -> Waiting | None:
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        state = (container.get("state") or {}).get("waiting") or {}
        image = container.get("image") or pod["spec"]["containers"][0]["image"]
        if state.get("reason") in _IMAGE_REASONS:
            said = str(state.get("message") or "")
            pulls = [one for one in _messages(events, {"Failed"}) if "pull" in one]
            # Of an image that is backed off from, older kubelets tell the cause in an event alone.
            said = pulls[-1] if pulls and not _TELLING.search(said) else said
            invalid = state["reason"] in {"InvalidImageName", "ErrImageNeverPull"}
            code = WaitingCode.IMAGE_NAME if invalid else image_trouble(said)
            sentence = f"The image {image} cannot be pulled: {said.strip() or state['reason']}"
            return Waiting(code, {"image": image, "detail": said.strip()[:500]}, sentence)
        if state.get("reason") in _CONTAINER_REASONS:
            said = f"{state['reason']}: {state.get('message', '')}"
            return Waiting(WaitingCode.UNSCHEDULABLE, {"detail": said}, f"The container cannot be made: {said}")
    return None


def _volume(pod: Object, events: Sequence[Object]) -> Waiting | None:
    said = _messages(events, _MOUNT_EVENTS)
    scheduled = _unplaced(pod)
    # What belongs to the run itself is made a moment after its Job; the kubelet asks again.
    said = [message for message in said if "configmap" not in message.lower() and "secret" not in message.lower()]
    if scheduled is not None and _VOLUME.search(scheduled):
        said = [scheduled]
    started = any((one.get("state") or {}).get("running") for one in _containers(pod))
    if not said or started:
        return None
    claim = _CLAIM.search(said[-1])
    data = {"claim": claim.group(1) if claim else _claim_of(pod), "detail": said[-1][:500]}
    return Waiting(WaitingCode.VOLUME, data, f"The storage cannot be mounted: {said[-1]}")


def _unschedulable(pod: Object, said: str, *, config: ClusterConfig, capacity: Capacity | None, nodes: int) -> Waiting:
    wanted = pod["spec"]["containers"][0]["resources"]["requests"]
    short = set(_INSUFFICIENT.findall(said))
    selector = pod["spec"].get("nodeSelector") or {}
    if config.gpu_resource in short or (config.gpu_resource in wanted and not short and config.gpu_label in selector):
        gpu_type = selector.get(config.gpu_label, "")
        free = None if capacity is None else _free_gpus(capacity, gpu_type)
        data = {"wanted": int(wanted[config.gpu_resource]), "gpu_type": gpu_type, "nodes": nodes, "free": free}
        return Waiting(WaitingCode.GPUS, data, f"Not enough GPUs are free: {said}")
    if "cpu" in short:
        most = None if capacity is None else max((one.free.cpus for one in capacity.machines), default=0.0)
        data = {"wanted": cpus(wanted["cpu"]), "nodes": nodes, "free": most}
        return Waiting(WaitingCode.CPUS, data, f"Not enough CPUs are free: {said}")
    if "memory" in short:
        room = None if capacity is None else max((one.free.memory_mib for one in capacity.machines), default=0)
        data = {"wanted": mebibytes(wanted["memory"]), "nodes": nodes, "free": room}
        return Waiting(WaitingCode.MEMORY, data, f"Not enough memory is free: {said}")
    taint = _TAINT.search(said)
    if taint and "didn't match" not in said:
        data = {"taint": taint.group(1).strip(), "detail": said[:500]}
        return Waiting(WaitingCode.TAINT, data, f"The machines are kept for others, or not ready: {said}")
    return Waiting(WaitingCode.UNSCHEDULABLE, {"detail": said[:500]}, f"The run's pods cannot be placed: {said}")


def _underway(nodes: int, pods: Sequence[Object]) -> Waiting:
    running = sum(any((one.get("state") or {}).get("running") for one in _containers(pod)) for pod in pods)
    placed = sum(bool(pod["spec"].get("nodeName")) for pod in pods)
    step = "place" if placed < nodes else "container"
    left = nodes - running
    who = "1 node" if left == 1 else f"{left} nodes"
    what = "a machine" if step == "place" else "the image and the container"
    return Waiting(WaitingCode.STARTING, {"nodes": left, "step": step}, f"Waiting for {who} to start: {what}.")


def _unplaced(pod: Object) -> str | None:
    """What the scheduler says of a pod that it has found no machine for."""
    for one in (pod.get("status") or {}).get("conditions") or []:
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return str(one.get("message") or one.get("reason") or "")
    return None


def _containers(pod: Object) -> Sequence[Object]:
    found: Sequence[Object] = (pod.get("status") or {}).get("containerStatuses") or []
    return found


def _of(pod: Object, events: Sequence[Object]) -> list[Object]:
    return [one for one in events if (one.get("involvedObject") or {}).get("uid") == pod["metadata"]["uid"]]


def _messages(events: Sequence[Object], reasons: frozenset[str] | set[str]) -> list[str]:
    return [str(event.get("message", "")) for event in events if event.get("reason") in reasons]


def _claim_of(pod: Object) -> str:
    for volume in pod["spec"].get("volumes") or []:
        if "persistentVolumeClaim" in volume:
            return str(volume["persistentVolumeClaim"]["claimName"])
    return ""


def _free_gpus(capacity: Capacity, gpu_type: str) -> int:
    return sum(one.free.gpus for one in capacity.machines if gpu_type in {"", one.free.gpu_type or one.total.gpu_type})

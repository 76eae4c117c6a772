"""A Pod's status and environment, as a kubelet sets them. Times are whole seconds."""

from __future__ import annotations

import base64

from tests.kubernetes.api import ENDED, set_condition
from tests.kubernetes.container import Container
from tests.kubernetes.resources import ApiError, Object, timestamp
from tests.kubernetes.store import Store

_MESSAGE_BYTES = 4096  # a kubelet keeps so much of a termination message


class ConfigError(Exception):
    """The container's configuration is invalid now; the kubelet retries."""


def set_waiting(pod: Object, reason: str, message: str = "") -> None:
    """Set the status of a Pod whose container cannot start yet."""
    _set_state(pod, {"waiting": {"reason": reason, "message": message} if message else {"reason": reason}})
    _set_ready(pod, "False", "ContainersNotReady")


def set_running(pod: Object, address: str, started_at: float) -> None:
    """Set the status of a Pod whose container runs."""
    if pod["status"]["phase"] not in ENDED:
        pod["status"].update(phase="Running", podIP=address, podIPs=[{"ip": address}])
        _set_state(pod, {"running": {"startedAt": timestamp(started_at)}}, ready=True)
        _set_ready(pod, "True")


def set_ended(pod: Object, terminated: Object) -> None:
    """Set the status of a Pod whose container has this terminated state."""
    if pod["status"]["phase"] in ENDED:
        return
    has_failed = bool(terminated["exitCode"])
    pod["status"]["phase"] = "Failed" if has_failed else "Succeeded"
    _set_state(pod, {"terminated": terminated})
    _set_ready(pod, "False", "PodFailed" if has_failed else "PodCompleted")


def _set_ready(pod: Object, status: str, reason: str = "") -> None:
    for kind in ("Ready", "ContainersReady"):
        set_condition(pod, kind, status, reason)


def _set_state(pod: Object, state: Object, *, ready: bool = False) -> None:
    container = pod["spec"]["containers"][0]
    pod["status"]["containerStatuses"] = [
        {"name": container["name"], "image": container["image"], "imageID": "", "ready": ready, "started": ready,
         "restartCount": 0, "state": state, "lastState": {}},
    ]  # fmt: skip


def terminated_state(container: Container, message: bytes, container_id: str) -> Object:
    """Return the state of a container that ran."""
    state: Object = {
        "exitCode": container.exit_code,
        "reason": "OOMKilled" if container.out_of_memory else "Error" if container.exit_code else "Completed",
        "startedAt": timestamp(container.started_at),
        "finishedAt": timestamp(container.finished_at),
        "containerID": f"containerd://{container_id}",
    }
    return state | ({"message": message[:_MESSAGE_BYTES].decode("utf-8", "replace")} if message else {})


def never_started_state() -> Object:
    """Return the state of a container whose Pod was deleted before it started."""
    message = "The container could not be located when the pod was terminated"
    state = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": message}
    return {**state, "startedAt": None, "finishedAt": None}


def environment(store: Store, pod: Object, container: Object, address: str) -> dict[str, str]:
    """Return a container's variables besides its image's. Raises ConfigError."""
    new = {"HOSTNAME": pod["spec"].get("hostname", pod["metadata"]["name"]), "HOME": "/"}
    new |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    for variable in container.get("env") or []:
        source = variable.get("valueFrom")
        if not source:
            new[variable["name"]] = str(variable.get("value", ""))
        elif "fieldRef" in source:
            new[variable["name"]] = _field(pod, source["fieldRef"]["fieldPath"], address)
        else:
            new[variable["name"]] = _secret(store, pod, source["secretKeyRef"])
    return new


def _field(pod: Object, path: str, address: str) -> str:
    """Return the value at `status.podIP`, or at a path such as `metadata.labels['key']`."""
    if path == "status.podIP":
        return address
    part, _, key = path.removeprefix("metadata.").partition("[")
    return str(pod["metadata"][part][key.strip("]'")])


def _secret(store: Store, pod: Object, source: Object) -> str:
    try:
        value = store.get("secrets", pod["metadata"]["namespace"], source["name"])["data"][source["key"]]
    except (ApiError, KeyError) as error:
        raise ConfigError(f'secret "{source["name"]}" not found') from error
    return base64.b64decode(value).decode()

"""What a kubelet writes into a pod's status, and what it reads of a pod for its containers' environment.

The one rule: times are whole seconds, and a pod that has ended is never said to run again.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime

from tests.kubernetes.api import add_condition
from tests.kubernetes.container import Container
from tests.kubernetes.resources import ApiError, Object, now
from tests.kubernetes.store import Store

_MESSAGE_BYTES = 4096
ENDED = ("Succeeded", "Failed")


class ConfigError(Exception):
    """The container cannot be made as it is written; the kubelet tries again."""


# Status


def set_creating(pod: Object) -> None:
    """It has a node, which is about to make it."""
    pod["status"].update(hostIP="127.0.0.1", startTime=now())
    set_waiting(pod, "ContainerCreating", "")


def set_waiting(pod: Object, reason: str, message: str) -> None:
    """It cannot start yet."""
    _set_state(pod, {"waiting": {"reason": reason, "message": message} if message else {"reason": reason}})
    for kind in ("Ready", "ContainersReady"):
        add_condition(pod, kind, "False", "ContainersNotReady")


def set_running(pod: Object, address: str, made: Container) -> None:
    """Its container runs."""
    if pod["status"]["phase"] in ENDED:
        return
    pod["status"].update(phase="Running", podIP=address, podIPs=[{"ip": address}])
    _set_state(pod, {"running": {"startedAt": moment(made.started_at)}}, ready=True)
    for kind in ("Initialized", "Ready", "ContainersReady"):
        add_condition(pod, kind, "True", "")


def set_ended(pod: Object, told: Object, phase: str, too_late: bool = False) -> None:
    """Its container has ended, or will never be."""
    if pod["status"]["phase"] in ENDED:
        return
    if too_late:
        message = "Pod was active on the node longer than the specified deadline"
        pod["status"].update(reason="DeadlineExceeded", message=message)
    pod["status"]["phase"] = phase
    _set_state(pod, {"terminated": told})
    for kind in ("Ready", "ContainersReady"):
        add_condition(pod, kind, "False", "PodFailed" if phase == "Failed" else "PodCompleted")


def _set_state(pod: Object, state: Object, *, ready: bool = False) -> None:
    container = pod["spec"]["containers"][0]
    pod["status"]["containerStatuses"] = [
        {"name": container["name"], "image": container["image"], "imageID": "", "ready": ready, "started": ready,
         "restartCount": 0, "state": state, "lastState": {}},
    ]  # fmt: skip


def terminated(made: Container, message: bytes, container_id: str) -> Object:
    """The state of a container that ran."""
    told: Object = {
        "exitCode": made.exit_code,
        "reason": "OOMKilled" if made.out_of_memory else "Error" if made.exit_code else "Completed",
        "startedAt": moment(made.started_at),
        "finishedAt": moment(made.finished_at),
        "containerID": f"containerd://{container_id}",
    }
    return told | ({"message": message[:_MESSAGE_BYTES].decode("utf-8", "replace")} if message else {})


def never_started() -> Object:
    """The state of a container whose pod was deleted before."""
    message = "The container could not be located when the pod was terminated"
    return {
        "exitCode": 137,
        "reason": "ContainerStatusUnknown",
        "message": message,
        "startedAt": None,
        "finishedAt": None,
    }


def not_executable(command: str) -> Object:
    """The state of a container whose image lacks its command."""
    message = (
        "failed to create containerd task: failed to create shim task: OCI runtime create failed: "
        f'exec: "{command}": executable file not found in $PATH: unknown'
    )
    begun = "1970-01-01T00:00:00Z"
    return {"exitCode": 128, "reason": "StartError", "message": message, "startedAt": begun, "finishedAt": now()}


def moment(seconds: float) -> str:
    """Unix seconds as objects have them."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# Environment


def environment(store: Store, pod: Object, container: Object, address: str, node: str) -> dict[str, str]:
    """What a container's process is told besides its image. Raises ConfigError."""
    made = {"HOSTNAME": pod["spec"].get("hostname", pod["metadata"]["name"]), "HOME": "/"}
    made |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    for variable in container.get("env") or []:
        told = variable.get("valueFrom")
        if not told:
            made[variable["name"]] = str(variable.get("value", ""))
        elif "fieldRef" in told:
            made[variable["name"]] = _field(pod, told["fieldRef"]["fieldPath"], address, node)
        else:
            plural = "secrets" if "secretKeyRef" in told else "configmaps"
            made[variable["name"]] = _key(store, pod, plural, told.get("secretKeyRef") or told["configMapKeyRef"])
    return made


def _field(pod: Object, path: str, address: str, node: str) -> str:
    meta = pod["metadata"]
    known = {
        "status.podIP": address, "metadata.name": meta["name"], "spec.nodeName": node, "status.hostIP": "127.0.0.1",
        "metadata.namespace": meta["namespace"], "metadata.uid": meta["uid"],
    }  # fmt: skip
    if path in known:
        return str(known[path])
    part, _, key = path.removeprefix("metadata.").partition("[")
    return str(meta[part][key.strip("]'")])


def _key(store: Store, pod: Object, plural: str, told: Object) -> str:
    try:
        value = str(store.get(plural, pod["metadata"]["namespace"], told["name"])["data"][told["key"]])
    except (ApiError, KeyError) as error:
        raise ConfigError(f'{plural.removesuffix("s")} "{told["name"]}" not found') from error
    return base64.b64decode(value).decode() if plural == "secrets" else value

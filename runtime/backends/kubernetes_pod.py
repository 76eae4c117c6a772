"""One pod of a run: a container whose first process is our launcher. PURE: spec and config in, a plain dict out.

The one rule: the pod meets the *restricted* Pod Security Standard (but for a `host_path`, which is for trials), and all
that it may use is bounded here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_names import (
    CONTAINER,
    INDEX,
    LAUNCHER_FILE,
    LAUNCHER_TARGET,
    MARGIN_SECONDS,
    ORDER_TARGET,
    RUN_LABEL,
    RUN_ROOT_TARGET,
    gpu_label_value,
)
from runtime.errors import InvalidSpec
from runtime.specs import Mount, RunSpec

Manifest = dict[str, Any]

LOST_SECONDS = 30
"""A pod is given up this long after its node was found not ready or out of reach."""
_LEAST_DISK_MIB = 256


def image_of(spec: RunSpec, config: ClusterConfig) -> str:
    """The reference that nodes pull. Raises InvalidSpec (image)."""
    if spec.image.reference and not spec.image.builtin:
        return spec.image.reference
    found = config.images.get(spec.image.builtin, "")
    if not found:
        raise InvalidSpec(
            f"The cluster '{config.name}' has no image '{spec.image.builtin}'. Ask your administrator to add it to "
            "the cluster's 'images'.",
            field="image",
        )
    return found


def pod_spec(spec: RunSpec, config: ClusterConfig, order: Mapping[str, Any], launcher_name: str) -> Manifest:
    """The pod of each node, by the name of the launcher's ConfigMap. Raises InvalidSpec."""
    resources = spec.resources
    disk_mib = resources.disk_mib or config.disk_mib
    volumes, mounts = _storage(spec, config, order)
    volumes += [
        {"name": "order", "configMap": {"name": spec.name}},
        {"name": "launcher", "configMap": {"name": launcher_name}},
        {"name": "tmp", "emptyDir": {"sizeLimit": f"{disk_mib}Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{resources.memory_mib}Mi"}},
    ]
    mounts = [
        {"name": "order", "mountPath": ORDER_TARGET, "readOnly": True},
        {"name": "launcher", "mountPath": LAUNCHER_TARGET, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the pod's own
        *mounts,
    ]
    python = config.pythons.get(spec.image.builtin or spec.image.reference, "python3")
    pod: Manifest = {
        "restartPolicy": "Never",
        "subdomain": spec.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.grace_seconds + MARGIN_SECONDS,
        # The net under the run's own deadline, which counts from when all nodes run; this one from the pod's placing.
        "activeDeadlineSeconds": config.gang_seconds
        + 2 * config.start_seconds
        + spec.deadline_seconds
        + 2 * MARGIN_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": config.uid,
            "runAsGroup": config.uid,
            "fsGroup": config.uid,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": image_of(spec, config),
                "imagePullPolicy": "IfNotPresent",
                "command": [python, "-I", "-S", f"{LAUNCHER_TARGET}/{LAUNCHER_FILE}", "--pod"],
                "workingDir": "/",
                "env": _environment(spec),
                "resources": _resources(spec, config, disk_mib),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "runAsNonRoot": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "terminationMessagePolicy": "File",
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
        "tolerations": _tolerations(spec, config),
        **_placement(spec, config),
    }
    pulling = [*config.image_pull_secrets, *([f"{spec.name}-pull"] if spec.pull_secret is not None else [])]
    if pulling:
        pod["imagePullSecrets"] = [{"name": name} for name in pulling]
    if config.priority_class:
        pod["priorityClassName"] = config.priority_class
    return pod


def _environment(spec: RunSpec) -> list[Manifest]:
    def field(name: str, path: str) -> Manifest:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    def secret(name: str, key: str) -> Manifest:
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": spec.name, "key": key}}}

    return [
        field("TRAINYARD_NODE", f"metadata.annotations['{INDEX}']"),
        field("TRAINYARD_ADDRESS", "status.podIP"),
        secret("TRAINYARD_TOKEN", "token"),
        secret("TRAINYARD_RECORD_KEY", "record_key"),
    ]


def _resources(spec: RunSpec, config: ClusterConfig, disk_mib: int) -> Manifest:
    wanted = spec.resources
    both = {"cpu": f"{math.ceil(wanted.cpus * 1000)}m", "memory": f"{wanted.memory_mib}Mi"}
    if wanted.gpus:
        both[config.gpu_resource] = str(wanted.gpus)
    # The disk is held to its limit, but not reserved: few runs come near it.
    least = {"ephemeral-storage": f"{min(_LEAST_DISK_MIB, disk_mib)}Mi"}
    return {"requests": {**both, **least}, "limits": {**both, "ephemeral-storage": f"{disk_mib}Mi"}}


def _storage(spec: RunSpec, config: ClusterConfig, order: Mapping[str, Any]) -> tuple[list[Manifest], list[Manifest]]:
    """The volumes of what lasts, and where they are mounted. Raises InvalidSpec (mounts)."""
    volume = config.volume
    source: Manifest = {"persistentVolumeClaim": {"claimName": volume.claim}}
    if volume.host_path:
        source = {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    volumes: list[Manifest] = [{"name": "storage", **source}]
    run_dir, checkpoint_dir = order["plan"]["run_dir"], order["plan"]["checkpoint_dir"]
    if volume.shared:
        inner = [
            ("storage", RUN_ROOT_TARGET, order["sources"]["root"]),
            ("storage", run_dir, order["sources"]["run"]),
            ("storage", checkpoint_dir, order["sources"]["checkpoints"]),
        ]
    else:
        limit = f"{spec.resources.disk_mib or config.disk_mib}Mi"
        volumes.append({"name": "run", "emptyDir": {"sizeLimit": limit}})
        inner = [
            ("run", RUN_ROOT_TARGET, "root"),
            ("run", run_dir, "root/run"),
            ("run", checkpoint_dir, "checkpoints"),
        ]
    mounts: list[Manifest] = [{"name": name, "mountPath": target, "subPath": path} for name, target, path in inner]
    if not any(mount.target.startswith(spec.datasets_target.rstrip("/") + "/") for mount in spec.mounts):
        volumes.append({"name": "datasets", "emptyDir": {"sizeLimit": "1Mi"}})
        mounts.append({"name": "datasets", "mountPath": spec.datasets_target, "readOnly": True})
    # Parents first, so that a mount below another one is seen.
    for mount in sorted(spec.mounts, key=lambda mount: mount.target.count("/")):
        one = {"name": "storage", "mountPath": mount.target, "subPath": sub_path(mount, config)}
        mounts.append({**one, "readOnly": True} if mount.read_only else one)
    return volumes, mounts


def sub_path(mount: Mount, config: ClusterConfig) -> str:
    """Where a mount's source lies in the volume. Raises InvalidSpec (mounts)."""
    root = config.volume.root.rstrip("/") + "/"
    inside = mount.source[len(root) :].strip("/")
    if not mount.source.startswith(root) or not inside or ".." in inside.split("/"):
        raise InvalidSpec(f"'{mount.source}' does not lie in the cluster's volume, {root[:-1]}.", field="mounts")
    if ":" in mount.target:
        raise InvalidSpec(f"Nothing can be mounted at '{mount.target}' on Kubernetes: it holds a ':'.", field="mounts")
    return inside


def _tolerations(spec: RunSpec, config: ClusterConfig) -> list[Manifest]:
    gone = [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute"}
        for what in ("not-ready", "unreachable")
    ]
    told: list[Manifest] = [{**one, "tolerationSeconds": LOST_SECONDS} for one in gone]
    for one in config.tolerations.get(spec.node_kind, config.tolerations.get("", ())):
        fields = {"key": one.key, "operator": one.operator, "value": one.value, "effect": one.effect}
        told.append({name: value for name, value in fields.items() if value})
    if spec.resources.gpus:
        told.append({"key": config.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    return told


def _placement(spec: RunSpec, config: ClusterConfig) -> Manifest:
    wanted = dict(config.node_selectors.get(spec.node_kind, config.node_selectors.get("", {})))
    if spec.resources.gpus and spec.resources.gpu_type:
        wanted[config.gpu_label] = gpu_label_value(spec.resources.gpu_type)
    told: Manifest = {"nodeSelector": wanted} if wanted else {}
    if spec.nodes == 1:
        return told
    own = {"matchLabels": {RUN_LABEL: spec.name}}
    if config.spread == "spread":
        even = {"maxSkew": 1, "topologyKey": config.topology_key, "whenUnsatisfiable": "ScheduleAnyway"}
        return {**told, "topologySpreadConstraints": [{**even, "labelSelector": own}]}
    near = {"weight": 100, "podAffinityTerm": {"labelSelector": own, "topologyKey": config.topology_key}}
    return {**told, "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [near]}}}

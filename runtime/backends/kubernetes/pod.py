"""Build the Pod spec of a run's nodes: one container, whose first process supervises the node. Pure.

The Pod meets the *restricted* Pod Security Standard, except for a `host_path` volume, which is for test clusters. Every
resource that it can use has a limit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.backends.kubernetes import names
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.objects import Manifest
from runtime.errors import InvalidSpec
from runtime.specs import PACKAGES_TARGET, Mount, RunSpec

EVICTION_SECONDS = 30
"""How long a Pod stays on a machine that is NotReady or unreachable. Kubernetes' default is 300 s, and the other nodes
of the run would wait that long. 30 s are enough for a kubelet to restart."""
_REQUESTED_DISK_MIB = 256
"""Ephemeral storage that the scheduler reserves for a Pod. It is far below the Pod's limit: few runs come near the
limit, and reserving that much would leave machines empty."""


@dataclass(frozen=True)
class PodInputs:
    """The plan that a run's Pods read, and the folders that they mount."""

    pod_plan: Mapping[str, Any]
    """The contents of `order.json`, which each Pod reads as a `runtime.launcher.pod.limits.PodPlan`."""
    run_root: str
    """Path of the run's folder in the cluster's volume, with the records and logs."""
    run_dir: str
    """Path in the volume of the code's RUN_DIR."""
    checkpoint_dir: str
    """Path in the volume of the code's CHECKPOINT_DIR."""
    output_dir: str
    """Path in the volume of the code's OUTPUT_DIR."""

    @property
    def topology(self) -> Mapping[str, Any]:
        """The part of the Pod plan that `runtime.launcher.topology.Plan` reads."""
        plan: Mapping[str, Any] = self.pod_plan["plan"]
        return plan


def image_of(spec: RunSpec, config: ClusterConfig) -> str:
    """Return the registry reference of the run's image. Raises InvalidSpec (image)."""
    if spec.image.reference and not spec.image.builtin:
        return _pinned(spec.image.reference, spec.image.digest)
    reference = config.images.get(spec.image.builtin, "")
    if not reference:
        raise InvalidSpec(
            f"The cluster '{config.name}' has no image '{spec.image.builtin}'. Ask your administrator to add it to "
            "the cluster's 'images'.",
            field="image",
        )
    return reference


def _pinned(reference: str, digest: str) -> str:
    """Return the reference with this digest, if any, in place of its tag."""
    if not digest:
        return reference
    host, _, path = reference.partition("@")[0].partition("/")  # the host may have a port
    return f"{host}/{path.partition(':')[0]}@{digest}"


def pod_spec(spec: RunSpec, config: ClusterConfig, inputs: PodInputs, launcher_name: str) -> Manifest:
    """Return the Pod spec. `launcher_name` names the launcher's ConfigMap. Raises InvalidSpec."""
    resources = spec.resources
    disk_mib = resources.disk_mib or config.disk_mib
    volumes, mounts = _storage(spec, config, inputs)
    volumes += [
        {"name": "order", "configMap": {"name": spec.name}},  # the Pod plan
        {"name": "launcher", "configMap": {"name": launcher_name}},
        {"name": "tmp", "emptyDir": {"sizeLimit": f"{disk_mib}Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{resources.memory_mib}Mi"}},
    ]
    mounts = [
        {"name": "order", "mountPath": names.POD_PLAN_PATH, "readOnly": True},
        {"name": "launcher", "mountPath": names.LAUNCHER_PATH, "readOnly": True},
        {"name": "tmp", "mountPath": names.TMP_PATH},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a path in the Pod
        *mounts,
    ]
    python = config.pythons.get(spec.image.builtin or spec.image.reference, "python3")
    pod: Manifest = {
        "restartPolicy": "Never",
        "subdomain": spec.name,  # the run's Service, which gives each Pod a DNS name
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # no variables that name other Services of the namespace
        "terminationGracePeriodSeconds": spec.grace_seconds + names.POD_MARGIN_SECONDS,
        # A second deadline, in case the first process does not enforce its own. The kubelet counts from the moment it
        # accepts the Pod, and the first process from the moment all nodes run. So these limits are added: for
        # scheduling all Pods; for pulling the image and for the meeting of the nodes (`start_seconds` each); and for
        # the end, which may take longer than one margin (`_FINISH_SECONDS` of the first process).
        "activeDeadlineSeconds": config.gang_seconds
        + 2 * config.start_seconds
        + spec.deadline_seconds
        + 2 * names.POD_MARGIN_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": config.uid,
            "runAsGroup": config.uid,
            "fsGroup": config.uid,
            "fsGroupChangePolicy": "OnRootMismatch",  # "Always" would walk over the whole shared volume at each start
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": names.CONTAINER_NAME,
                "image": image_of(spec, config),
                # A machine may have a customer's own image from another organization's run. "Always": the kubelet asks
                # the registry, with this run's credentials. It does not pull layers again that the machine has.
                "imagePullPolicy": "IfNotPresent" if spec.image.builtin else "Always",
                # -I and -S: no code of the image's site-packages runs in the process that holds the run's keys.
                "command": [python, "-I", "-S", f"{names.LAUNCHER_PATH}/{names.LAUNCHER_FILE}", "--pod"],
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
    pull_secrets = [*config.image_pull_secrets, *([f"{spec.name}-pull"] if spec.pull_secret is not None else [])]
    if pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in pull_secrets]
    if config.priority_class:
        pod["priorityClassName"] = config.priority_class
    return pod


def _environment(spec: RunSpec) -> list[Manifest]:
    """Return the variables of the first process; `runtime.launcher.pod.main` documents them."""

    def field(name: str, path: str) -> Manifest:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    def secret(name: str, key: str, secret_name: str = spec.name) -> Manifest:
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name, "key": key}}}

    return [
        field("TRAINYARD_NODE", f"metadata.annotations['{names.INDEX_ANNOTATION}']"),
        field("TRAINYARD_ADDRESS", "status.podIP"),
        secret("TRAINYARD_TOKEN", "token"),
        secret("TRAINYARD_RECORD_KEY", "record_key"),
        *(secret(f"TRAINYARD_SECRET_{name}", name, names.secrets_name(spec)) for name in sorted(spec.secrets)),
    ]


def _resources(spec: RunSpec, config: ClusterConfig, disk_mib: int) -> Manifest:
    """Return the container's requests and limits."""
    resources = spec.resources
    # Requests equal limits, so each run can use exactly the resources that it has bought.
    amounts = {"cpu": f"{math.ceil(resources.cpus * 1000)}m", "memory": f"{resources.memory_mib}Mi"}
    if resources.gpus:
        amounts[config.gpu_resource] = str(resources.gpus)
    requested_disk = {"ephemeral-storage": f"{min(_REQUESTED_DISK_MIB, disk_mib)}Mi"}
    return {"requests": {**amounts, **requested_disk}, "limits": {**amounts, "ephemeral-storage": f"{disk_mib}Mi"}}


def _storage(spec: RunSpec, config: ClusterConfig, inputs: PodInputs) -> tuple[list[Manifest], list[Manifest]]:
    """Return the volumes for the run's files, datasets and models, and their mounts. Raises InvalidSpec (mounts)."""
    volume = config.volume
    source: Manifest = {"persistentVolumeClaim": {"claimName": volume.claim}}
    if volume.host_path:
        source = {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    volumes: list[Manifest] = [{"name": "storage", **source}]
    run_dir, checkpoint_dir, output_dir = (
        inputs.topology[name] for name in ("run_dir", "checkpoint_dir", "output_dir")
    )
    # A volume is shared if the console mounts it too. If not, a run's files stay in its Pod and end with it.
    if volume.shared:
        paths = [
            ("storage", names.RUN_ROOT_PATH, inputs.run_root),
            ("storage", run_dir, inputs.run_dir),
            ("storage", checkpoint_dir, inputs.checkpoint_dir),
            ("storage", output_dir, inputs.output_dir),
        ]
    else:
        limit = f"{spec.resources.disk_mib or config.disk_mib}Mi"
        volumes.append({"name": "run", "emptyDir": {"sizeLimit": limit}})
        paths = [
            ("run", names.RUN_ROOT_PATH, "root"),
            ("run", run_dir, "root/run"),
            ("run", checkpoint_dir, "checkpoints"),
            ("run", output_dir, "outputs"),
        ]
    mounts: list[Manifest] = [{"name": name, "mountPath": target, "subPath": path} for name, target, path in paths]
    # The environment contract promises DATASETS_PATH and MODELS_PATH also to a run without datasets or models.
    for name, target in (("datasets", spec.datasets_target), ("models", spec.models_target)):
        if not any(mount.target.startswith(target.rstrip("/") + "/") for mount in spec.mounts):
            volumes.append({"name": name, "emptyDir": {"sizeLimit": "1Mi"}})
            mounts.append({"name": name, "mountPath": target, "readOnly": True})
    packages = [Mount(spec.packages, PACKAGES_TARGET)] if spec.packages else []
    # Folders above others come first, since a mount hides earlier mounts below it.
    for mount in sorted([*spec.mounts, *packages], key=lambda mount: mount.target.count("/")):
        volume_mount = {"name": "storage", "mountPath": mount.target, "subPath": sub_path(mount, config)}
        mounts.append({**volume_mount, "readOnly": True} if mount.read_only else volume_mount)
    return volumes, mounts


def sub_path(mount: Mount, config: ClusterConfig) -> str:
    """Return the path of a mount's source inside the volume. Raises InvalidSpec (mounts, packages)."""
    field = "packages" if mount.target == PACKAGES_TARGET else "mounts"
    root = config.volume.root.rstrip("/") + "/"
    path = mount.source[len(root) :].strip("/")
    if not mount.source.startswith(root) or not path or ".." in path.split("/"):
        raise InvalidSpec(f"'{mount.source}' does not lie in the cluster's volume, {root[:-1]}.", field=field)
    if ":" in mount.target:
        raise InvalidSpec(f"Nothing can be mounted at '{mount.target}' on Kubernetes: it holds a ':'.", field="mounts")
    return path


def _tolerations(spec: RunSpec, config: ClusterConfig) -> list[Manifest]:
    """Return the Pod's tolerations of the taints of its node kind, of GPUs and, for EVICTION_SECONDS, of failures."""
    tolerations: list[Manifest] = [
        {
            "key": f"node.kubernetes.io/{condition}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": EVICTION_SECONDS,
        }
        for condition in ("not-ready", "unreachable")
    ]
    # The kind "" holds the default of all kinds.
    for toleration in config.tolerations.get(spec.node_kind, config.tolerations.get("", ())):
        fields = dataclasses.asdict(toleration)
        tolerations.append({name: value for name, value in fields.items() if value})
    if spec.resources.gpus:
        tolerations.append({"key": config.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    return tolerations


def _placement(spec: RunSpec, config: ClusterConfig) -> Manifest:
    """Return the fields that choose the Pod's machine: the node selector, and the preference to pack or to spread."""
    selector = dict(config.node_selectors.get(spec.node_kind, config.node_selectors.get("", {})))
    if spec.resources.gpus and spec.resources.gpu_type:
        selector[config.gpu_label] = names.gpu_label_value(spec.resources.gpu_type)
    placement: Manifest = {"nodeSelector": selector} if selector else {}
    if spec.nodes == 1:
        return placement
    own_pods = {"matchLabels": {names.RUN_LABEL: spec.name}}
    if config.spread == "spread":
        constraint = {"maxSkew": 1, "topologyKey": config.topology_key, "whenUnsatisfiable": "ScheduleAnyway"}
        return {**placement, "topologySpreadConstraints": [{**constraint, "labelSelector": own_pods}]}
    # 100 is the greatest weight.
    preference = {"weight": 100, "podAffinityTerm": {"labelSelector": own_pods, "topologyKey": config.topology_key}}
    return {**placement, "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}}

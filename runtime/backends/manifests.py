"""What a run is on Kubernetes, object by object. PURE: a RunSpec and a ClusterConfig in, plain dicts out.

The one rule: what is here is all there is of a run, and everything of it carries its labels, so that it is found again
and deleted whole. `docs/kubernetes.md` shows it whole.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_names import (
    COMPONENT_LABEL,
    CONTROL_PORT,
    LAUNCHER,
    LAUNCHER_FILE,
    MANAGED_BY,
    MANAGER,
    ORGANIZATION_LABEL,
    QUEUE_LABEL,
    RUN_LABEL,
    SPEC,
    labels,
    namespace_of_run,
)
from runtime.backends.kubernetes_pod import Manifest, pod_spec
from runtime.specs import PullSecret, RunSpec

_DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")


def remembered(spec: RunSpec) -> dict[str, Any]:
    """What the backend has to know of a run later, whoever asks."""
    return {
        "workers": spec.workers_per_node,
        "deadline_seconds": spec.deadline_seconds,
        "grace_seconds": spec.grace_seconds,
        "min_nodes": spec.min_nodes,
        "builtin": bool(spec.image.builtin),
        "memory_mib": spec.resources.memory_mib,
        "disk_mib": spec.resources.disk_mib,
        "kind": spec.node_kind,
    }


def job(spec: RunSpec, config: ClusterConfig, order: Mapping[str, Any], launcher: str) -> Manifest:
    """The run's Job, suspended. `launcher` is the name of the launcher's ConfigMap. Raises InvalidSpec."""
    told = labels(spec)
    elastic = 0 < spec.min_nodes < spec.nodes
    if elastic:
        # Who is left goes on: each node fails for itself.
        failures: dict[str, Any] = {"backoffLimitPerIndex": 0, "maxFailedIndexes": spec.nodes - spec.min_nodes}
    else:
        rule = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        failures = {"backoffLimit": 0, "podFailurePolicy": {"rules": [rule]}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": spec.name,
            "namespace": namespace_of_run(spec, config),
            "labels": {**told, **({QUEUE_LABEL: config.queue} if config.queue else {})},
            "annotations": {SPEC: json.dumps(remembered(spec), sort_keys=True)},
        },
        "spec": {
            "completions": spec.nodes,
            "parallelism": spec.nodes,
            "completionMode": "Indexed",
            "podReplacementPolicy": "Failed",
            "suspend": True,
            **failures,
            "template": {"metadata": {"labels": told}, "spec": pod_spec(spec, config, order, launcher)},
        },
    }


def owned(
    spec: RunSpec, config: ClusterConfig, order: Mapping[str, Any], uid: str, keys: Mapping[str, str]
) -> list[Manifest]:
    """What else a run is made of, owned by its Job of this `uid`. `keys`: `token` and `record_key`."""
    made = [_service(spec), _order(spec, order), _network_policy(spec), _secret(spec, keys)]
    if spec.pull_secret is not None:
        made.append(_pull_secret(spec, spec.pull_secret))
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": spec.name, "uid": uid}
    for one in made:
        named = {"name": spec.name, "namespace": namespace_of_run(spec, config), "labels": labels(spec)}
        one["metadata"] = {**named, **one.get("metadata", {}), "ownerReferences": [owner]}
    return made


def launcher(namespace: str, archive: bytes) -> Manifest:
    """The launcher as a ConfigMap, named by its content: runs of an older console keep theirs."""
    digest = hashlib.sha256(archive).hexdigest()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"trainyard-launcher-{digest[:12]}",
            "namespace": namespace,
            "labels": {MANAGED_BY: MANAGER, COMPONENT_LABEL: LAUNCHER},
        },
        "immutable": True,
        "binaryData": {LAUNCHER_FILE: base64.b64encode(archive).decode()},
    }


def organization_objects(spec: RunSpec, config: ClusterConfig) -> list[Manifest]:
    """The namespace of the run's organization, what it may use there, and that nothing comes in uninvited."""
    namespace = namespace_of_run(spec, config)
    told = {MANAGED_BY: MANAGER, ORGANIZATION_LABEL: labels(spec).get(ORGANIZATION_LABEL, "")}
    # Folders of a machine are for trials; the stricter standards forbid them.
    level = "privileged" if config.volume.host_path else "restricted"
    standard = {f"pod-security.kubernetes.io/{mode}": level for mode in ("enforce", "warn")}
    meta = {"namespace": namespace, "labels": told}
    made: list[Manifest] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": {**told, **standard}}},
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "trainyard", **meta},
            "spec": {
                "limits": [
                    {
                        "type": "Container",
                        "default": {"cpu": "1", "memory": "1Gi"},
                        "defaultRequest": {"cpu": "100m", "memory": "128Mi"},
                    }
                ]
            },
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "trainyard-default", **meta},
            "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
        },
    ]
    if spec.organization_nodes:
        quota = {"metadata": {"name": "trainyard", **meta}, "spec": {"hard": {"pods": str(spec.organization_nodes)}}}
        made.append({"apiVersion": "v1", "kind": "ResourceQuota", **quota})
    return made


# What belongs to the Job


def _service(spec: RunSpec) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: spec.name},
            "ports": [{"name": "control", "port": CONTROL_PORT, "protocol": "TCP"}],
        },
    }


def _order(spec: RunSpec, order: Mapping[str, Any]) -> Manifest:
    told = {key: value for key, value in order.items() if key != "sources"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "data": {"order.json": json.dumps(told, sort_keys=True)}}


def _network_policy(spec: RunSpec) -> Manifest:
    """The run's pods reach each other and the cluster's DNS, and nothing else reaches them, or they it."""
    own = {"podSelector": {"matchLabels": {RUN_LABEL: spec.name}}}
    system = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    node_local = {"ipBlock": {"cidr": "169.254.20.10/32"}}
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "spec": {
            "podSelector": own["podSelector"],
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [own]}],
            "egress": [{"to": [own]}, {"to": [system, node_local], "ports": dns}],
        },
    }


def _secret(spec: RunSpec, keys: Mapping[str, str]) -> Manifest:
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "data": {k: _b64(v) for k, v in keys.items()}}


def _pull_secret(spec: RunSpec, pull: PullSecret) -> Manifest:
    hosts = ["https://index.docker.io/v1/"] if pull.host in _DOCKER_HUB else [pull.host]
    auth = {"username": pull.username, "password": pull.password, "auth": _b64(f"{pull.username}:{pull.password}")}
    config = json.dumps({"auths": dict.fromkeys(hosts, auth)})
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{spec.name}-pull"},
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": _b64(config)},
    }


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()

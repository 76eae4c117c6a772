"""Build the manifests of a run's objects. Pure: a RunSpec and a ClusterConfig in, dicts out.

The objects of a run carry its labels and are owned by its Job, so deleting the Job deletes all of them. The launcher's
ConfigMap and an organization's objects are shared and stay. `docs/kubernetes.md` lists the objects.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping

from runtime.backends.kubernetes import names
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.objects import Manifest
from runtime.backends.kubernetes.pod import PodInputs, pod_spec
from runtime.backends.kubernetes.state import SpecSummary
from runtime.specs import PullSecret, RunSpec

_DOCKER_HUB_HOSTS = ("docker.io", "index.docker.io", "registry-1.docker.io")
"""Names that people use for Docker Hub."""
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"
"""The key under which container runtimes look up credentials for Docker Hub."""
_LAUNCHER_DIGEST_LENGTH = 12
"""Hex digits of the launcher's digest in its ConfigMap's name: enough to tell its few versions apart."""


def job(spec: RunSpec, config: ClusterConfig, inputs: PodInputs, launcher_name: str) -> Manifest:
    """Return the run's Job, suspended. `launcher_name` names the launcher's ConfigMap. Raises InvalidSpec."""
    run_labels = names.labels_of(spec)
    if 0 < spec.min_nodes < spec.nodes:
        # An elastic run continues without a failed node, so one failed index does not fail the Job.
        failure_policy: Manifest = {"backoffLimitPerIndex": 0, "maxFailedIndexes": spec.nodes - spec.min_nodes}
    else:
        # With a backoffLimit of 0 any failed Pod fails the Job. If the reason is a disruption, this rule makes the
        # Job's Failed condition say so and name the Pod, which `causes` reads.
        rule = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        failure_policy = {"backoffLimit": 0, "podFailurePolicy": {"rules": [rule]}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": spec.name,
            "namespace": names.namespace_of(spec, config),
            "labels": {**run_labels, **({names.QUEUE_LABEL: config.queue} if config.queue else {})},
            "annotations": {names.SPEC_ANNOTATION: SpecSummary.from_spec(spec, config.disk_mib).to_json()},
        },
        "spec": {
            "completions": spec.nodes,
            "parallelism": spec.nodes,
            "completionMode": "Indexed",
            "podReplacementPolicy": "Failed",  # never two Pods of one node at the same time
            "suspend": True,  # until its other objects exist (`submission`) and, with a queue, Kueue admits it
            **failure_policy,
            "template": {"metadata": {"labels": run_labels}, "spec": pod_spec(spec, config, inputs, launcher_name)},
        },
    }


def owned_objects(
    spec: RunSpec, config: ClusterConfig, inputs: PodInputs, uid: str, keys: Mapping[str, str]
) -> list[Manifest]:
    """Return the run's other objects, owned by its Job, whose UID is `uid`. `keys` are `token` and `record_key`."""
    objects = [_service(spec), _pod_plan(inputs), _network_policy(spec, config), _secret(keys)]
    if spec.pull_secret is not None:
        objects.append(_pull_secret(spec, spec.pull_secret))
    if spec.secrets:
        objects.append({**_secret(spec.secrets), "metadata": {"name": names.secrets_name(spec)}})
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": spec.name, "uid": uid}
    for manifest in objects:
        defaults = {"name": spec.name, "namespace": names.namespace_of(spec, config), "labels": names.labels_of(spec)}
        manifest["metadata"] = {**defaults, **manifest.get("metadata", {}), "ownerReferences": [owner]}
    return objects


def launcher(namespace: str, archive: bytes) -> Manifest:
    """Return a ConfigMap that holds the launcher. Its name contains a digest, so each version has its own ConfigMap."""
    digest = hashlib.sha256(archive).hexdigest()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"trainyard-launcher-{digest[:_LAUNCHER_DIGEST_LENGTH]}",
            "namespace": namespace,
            "labels": {names.MANAGED_BY_LABEL: names.MANAGER, names.COMPONENT_LABEL: names.LAUNCHER_COMPONENT},
        },
        "immutable": True,
        "binaryData": {names.LAUNCHER_FILE: base64.b64encode(archive).decode()},
    }


def organization_objects(spec: RunSpec, config: ClusterConfig) -> list[Manifest]:
    """Return the namespace of the run's organization, with its limits and a NetworkPolicy that denies ingress."""
    namespace = names.namespace_of(spec, config)
    org_labels = {
        names.MANAGED_BY_LABEL: names.MANAGER,
        names.ORGANIZATION_LABEL: names.labels_of(spec).get(names.ORGANIZATION_LABEL, ""),
    }
    # "privileged" is the only Pod Security Standard that allows host paths.
    level = "privileged" if config.volume.host_path else "restricted"
    security_labels = {f"pod-security.kubernetes.io/{mode}": level for mode in ("enforce", "warn")}
    meta = {"namespace": namespace, "labels": org_labels}
    objects: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": {**org_labels, **security_labels}},
        },
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "trainyard", **meta},
            "spec": {
                "limits": [
                    {
                        "type": "Container",
                        # For containers that set no limits of their own; the containers of runs always do.
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
    if spec.organization_nodes:  # the organization's limit; each node of a run is one Pod
        quota = {"metadata": {"name": "trainyard", **meta}, "spec": {"hard": {"pods": str(spec.organization_nodes)}}}
        objects.append({"apiVersion": "v1", "kind": "ResourceQuota", **quota})
    return objects


# Objects owned by the Job


def _service(spec: RunSpec) -> Manifest:
    """Return the headless Service that gives each of the run's Pods a DNS name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # launchers find each other by name even if a Pod is not ready
            "selector": {names.RUN_LABEL: spec.name},
            "ports": [{"name": "control", "port": names.CONTROL_PORT, "protocol": "TCP"}],
        },
    }


def _pod_plan(inputs: PodInputs) -> Manifest:
    """Return the ConfigMap with the Pod plan. Its key is the name that the plan had in earlier versions."""
    pod_plan = json.dumps(inputs.pod_plan, sort_keys=True)
    return {"apiVersion": "v1", "kind": "ConfigMap", "data": {"order.json": pod_plan}}


def _network_policy(spec: RunSpec, config: ClusterConfig) -> Manifest:
    """Return the policy that allows only traffic among the run's Pods and to the cluster's DNS.

    A run that installs a customer's requirements may also reach the package index.
    """
    own_pods = {"podSelector": {"matchLabels": {names.RUN_LABEL: spec.name}}}
    kube_system = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    # The default address of NodeLocal DNSCache, which runs on the host's network.
    node_local_dns = {"ipBlock": {"cidr": "169.254.20.10/32"}}
    dns_ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    egress: list[Manifest] = [{"to": [own_pods]}, {"to": [kube_system, node_local_dns], "ports": dns_ports}]
    if spec.builtin_script == "install" and config.package_index is not None:
        networks = [{"ipBlock": {"cidr": network}} for network in config.package_index.networks]
        egress.append({"to": networks, "ports": [{"protocol": "TCP", "port": config.package_index.port}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "spec": {
            "podSelector": own_pods["podSelector"],
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [own_pods]}],
            "egress": egress,
        },
    }


def _secret(values: Mapping[str, str]) -> Manifest:
    """Return a Secret with these values, by name."""
    data = {name: _base64(value) for name, value in values.items()}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "data": data}


def _pull_secret(spec: RunSpec, pull: PullSecret) -> Manifest:
    """Return the Secret with which kubelets pull the run's image."""
    key = _DOCKER_HUB_KEY if pull.host in _DOCKER_HUB_HOSTS else pull.host
    auth = {"username": pull.username, "password": pull.password, "auth": _base64(f"{pull.username}:{pull.password}")}
    config = json.dumps({"auths": {key: auth}})
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{spec.name}-pull"},
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": _base64(config)},
    }


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()

"""Whether a cluster can serve runs, line by line, each with what to do where it cannot.

The one rule: a line never raises. What cannot be looked at is a line that says so.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.backends import smoke_run
from runtime.backends.base import Backend, Check
from runtime.backends.kubernetes_access import Rule, rules
from runtime.backends.kubernetes_api import Api, Refused, path_of
from runtime.backends.kubernetes_capacity import capacity
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.errors import RuntimeFault

OLDEST, NEWEST = 31, 37
"""Minor versions of Kubernetes 1 that this console is made for: Jobs as we use them are stable from the first on."""
SMOKE_SECONDS = 180.0
_SMOKE_MEMORY_MIB = 512
_NO_WAY = "Check the cluster's 'kubeconfig', 'context' or 'in_cluster', and the network from here to it."


def check(api: Api, config: ClusterConfig, root: Path, backend: Backend | None) -> Iterator[Check]:
    """All lines, in the order in which one depends on another; a smoke run at the end where there is a `backend`."""
    try:
        yield _version(api, config)
    except (RuntimeFault, Refused) as fault:
        yield Check("API server", ok=False, detail=str(fault), remedy=_NO_WAY)
        return
    yield _guarded("namespace", lambda: _namespace(api, config))
    yield from _permissions(api, config)
    yield _guarded("storage", lambda: _storage(api, config, root))
    yield _guarded("storage classes", lambda: _classes(api))
    yield _guarded("machines", lambda: _machines(api, config))
    yield _guarded("GPUs", lambda: _gpus(api, config))
    yield _guarded("Kueue", lambda: _kueue(api, config))
    yield _guarded("DNS", lambda: _dns(api))
    yield _images(config)
    if backend is not None:
        yield _guarded("smoke run", lambda: _smoke(config, root, backend))


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except Refused as refused:
        remedy = "Apply what 'manage.py kubernetes_rbac' prints." if refused.status in {401, 403} else ""
        return Check(name, ok=False, detail=f"The API server refuses: {refused}", remedy=remedy)
    except RuntimeFault as fault:
        return Check(name, ok=False, detail=str(fault), remedy=_NO_WAY)
    except (OSError, KeyError, ValueError, TypeError) as error:
        return Check(name, ok=False, detail=f"It could not be looked at: {type(error).__name__}: {error}")


def _version(api: Api, config: ClusterConfig) -> Check:
    told = api.get("/version")
    found = re.match(r"\d+", str(told.get("minor", "")))
    minor = int(found.group()) if found else 0
    ok = told.get("major") == "1" and OLDEST <= minor <= NEWEST
    remedy = f"Use Kubernetes 1.{OLDEST} to 1.{NEWEST}."
    return Check("API server", ok, f"{config.name}: {told.get('gitVersion')}", "" if ok else remedy)


def _namespace(api: Api, config: ClusterConfig) -> Check:
    # Jobs are what we may list there; a namespace itself we may not see.
    api.list(path_of("batch/v1", "jobs", config.namespace))
    try:
        found = api.find(path_of("v1", "namespaces", name=config.namespace))
    except Refused:
        return Check("namespace", ok=True, detail=f"{config.namespace}: we may list Jobs there.")
    if found is None:
        remedy = f"kubectl create namespace {config.namespace}"
        return Check("namespace", ok=False, detail=f"There is no namespace {config.namespace}.", remedy=remedy)
    level = (found["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce", "")
    if config.volume.host_path and level in {"baseline", "restricted"}:
        remedy = "Use a claim as the cluster's volume, or label the namespace 'privileged' (for trials alone)."
        return Check("namespace", ok=False, detail=f"It enforces '{level}', and forbids a host_path.", remedy=remedy)
    return Check("namespace", ok=True, detail=f"{config.namespace}, pod security: {level or 'not enforced'}.")


def _permissions(api: Api, config: ClusterConfig) -> Iterator[Check]:
    for rule, namespace in rules(config):
        where = f"in {namespace}" if namespace else "everywhere"
        name = f"may {', '.join(rule.verbs)} {rule.resource} {where}"

        def look(rule: Rule = rule, namespace: str = namespace, name: str = name) -> Check:
            missing = _missing(api, rule, namespace)
            if not missing:
                return Check(name, ok=True, detail="yes")
            detail = f"not: {', '.join(missing)}" + ("" if rule.needed else " (not needed, but the console sees less)")
            return Check(
                name, ok=not rule.needed, detail=detail, remedy="Apply what 'manage.py kubernetes_rbac' prints."
            )

        yield _guarded(name, look)


def _missing(api: Api, rule: Rule, namespace: str) -> list[str]:
    resource, _slash, sub = rule.resource.partition("/")
    asked = {"group": rule.group, "resource": resource, "namespace": namespace, **({"subresource": sub} if sub else {})}
    return [verb for verb in rule.verbs if not api.review({**asked, "verb": verb})]


def _storage(api: Api, config: ClusterConfig, root: Path) -> Check:
    volume = config.volume
    if volume.claim:
        found = api.find(path_of("v1", "persistentvolumeclaims", config.namespace, volume.claim))
        if found is None:
            remedy = f"Create a ReadWriteMany claim of this name in {config.namespace}."
            return Check("storage", ok=False, detail=f"There is no claim {volume.claim}.", remedy=remedy)
        phase = (found.get("status") or {}).get("phase", "")
        if phase != "Bound":
            remedy = f"kubectl -n {config.namespace} describe pvc {volume.claim}"
            return Check("storage", ok=False, detail=f"The claim {volume.claim} is {phase}.", remedy=remedy)
        if "ReadWriteMany" not in (found.get("spec") or {}).get("accessModes", []):
            remedy = (
                "Use a storage class that offers ReadWriteMany, such as NFS, CephFS, EFS, Filestore or Azure Files."
            )
            detail = f"The claim {volume.claim} is not ReadWriteMany: one machine alone could mount it."
            return Check("storage", ok=False, detail=detail, remedy=remedy)
    if not volume.shared:
        detail = f"{volume.host_path} on each machine, not shared: for trials. Checkpoints end with their pod."
        return Check("storage", ok=True, detail=detail)
    return _folder(config, root)


def _folder(config: ClusterConfig, root: Path) -> Check:
    remedy = f"Mount the cluster's volume at {config.volume.root} here, writable for this user."
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".check-"):
            pass
    except OSError as error:
        return Check("storage", ok=False, detail=f"{root} cannot be written: {error.strerror}.", remedy=remedy)
    if os.geteuid() not in {0, config.uid}:
        detail = f"We run as user {os.geteuid()}, and pods as {config.uid}: what pods wrote, we cannot delete."
        return Check("storage", ok=False, detail=detail, remedy="Run the console as the cluster's 'uid', or set that.")
    return Check("storage", ok=True, detail=f"{root} can be written by us and by pods.")


def _classes(api: Api) -> Check:
    found = [item["metadata"]["name"] for item in api.list(path_of("storage.k8s.io/v1", "storageclasses"))["items"]]
    return Check("storage classes", ok=True, detail=", ".join(sorted(found)) or "none")


def _machines(api: Api, config: ClusterConfig) -> Check:
    nodes = api.list(path_of("v1", "nodes"))["items"]
    found = capacity(nodes, (), config)
    ready = [one for one in found.machines if one.free.cpus > 0]
    detail = f"{len(nodes)} nodes, {len(found.machines)} for runs, {len(ready)} of them ready."
    without = sorted(kind for kind in found.kinds if all(kind in one.closed_to for one in found.machines))
    if config.elastic:
        return Check("machines", ok=True, detail=f"{detail} More come as pods wait for them.")
    if ready and without:
        detail = f"{detail} None is for {', '.join(without)}."
        remedy = "Labels and taints of machines must be those of the cluster's 'node_selectors' and 'tolerations'."
        return Check("machines", ok=False, detail=detail, remedy=remedy)
    remedy = "Look at 'kubectl get nodes'; taints are let past by the cluster's 'tolerations'."
    return Check("machines", bool(ready), detail, "" if ready else remedy)


def _gpus(api: Api, config: ClusterConfig) -> Check:
    machines = capacity(api.list(path_of("v1", "nodes"))["items"], (), config).machines
    count = sum(machine.total.gpus for machine in machines)
    types = sorted({machine.total.gpu_type for machine in machines if machine.total.gpus})
    if not count:
        detail = f"No node offers {config.gpu_resource}: runs are on CPUs."
        remedy = "For GPUs install the vendor's device plugin, such as NVIDIA's GPU operator."
        return Check("GPUs", ok=True, detail=detail, remedy=remedy)
    if "" in types:
        detail = f"{count}, but some nodes have no label {config.gpu_label}: their type is not known."
        return Check("GPUs", ok=False, detail=detail, remedy="Install GPU feature discovery, or set 'gpu_label'.")
    return Check("GPUs", ok=True, detail=f"{count}: {', '.join(types)}. Node specs name a type as it is written here.")


def _kueue(api: Api, config: ClusterConfig) -> Check:
    if not config.queue:
        return Check("Kueue", ok=True, detail="No queue is set: runs are placed whole or taken down by our own guard.")
    found = api.find(path_of("kueue.x-k8s.io/v1beta1", "localqueues", config.namespace, config.queue))
    if found is None:
        detail = f"There is no LocalQueue {config.queue} in {config.namespace}."
        return Check("Kueue", ok=False, detail=detail, remedy="Install Kueue and make that queue, or unset 'queue'.")
    return Check("Kueue", ok=True, detail=f"LocalQueue {config.queue}.")


def _dns(api: Api) -> Check:
    try:
        found = api.list(path_of("v1", "pods", "kube-system"), labelSelector="k8s-app=kube-dns")["items"]
    except Refused:
        return Check("DNS", ok=True, detail="We may not look at kube-system; the smoke run tries it.")
    running = [pod for pod in found if (pod.get("status") or {}).get("phase") == "Running"]
    if running:
        return Check("DNS", ok=True, detail=f"{len(running)} DNS pods run in kube-system.")
    detail = (
        "No pod labelled k8s-app=kube-dns runs in kube-system. Some clusters have another DNS; the smoke run tries it."
    )
    remedy = "Pods of a run find each other by name. Where the smoke run fails of it, install CoreDNS."
    return Check("DNS", ok=True, detail=detail, remedy=remedy)


def _images(config: ClusterConfig) -> Check:
    if config.images:
        return Check("images", ok=True, detail=", ".join(f"{name}: {at}" for name, at in sorted(config.images.items())))
    remedy = 'Add them to the cluster\'s \'images\', such as {"pytorch": "registry.example.com/trainyard/pytorch:1"}.'
    return Check("images", ok=False, detail="No built-in image has a reference here.", remedy=remedy)


# The smoke run


def _smoke(config: ClusterConfig, root: Path, backend: Backend) -> Check:
    builtin = "pytorch" if "pytorch" in config.images else next(iter(sorted(config.images)), "")
    if not builtin:
        return Check("smoke run", ok=False, detail="There is no image to run.", remedy="Add one to 'images'.")
    name = smoke_run.new_name()
    workspace = root / f".{name}"
    if config.volume.shared:
        workspace.mkdir(mode=0o755)
    try:
        return smoke_run.check(
            backend,
            name,
            builtin,
            workspace=workspace,
            memory_mib=_SMOKE_MEMORY_MIB,
            seconds=SMOKE_SECONDS,
        )
    finally:
        if config.volume.shared:
            with contextlib.suppress(OSError):
                workspace.rmdir()

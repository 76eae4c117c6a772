"""Check whether runs can execute on a Kubernetes cluster. Failed results say how to fix the fault, if that is known.

No check raises: a check that cannot be made yields a failed result that says why.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from runtime.backends import smoke_run
from runtime.backends.base import Backend, CheckResult
from runtime.backends.checks import UNEXPECTED_ERRORS, failed_result
from runtime.backends.kubernetes.capacity import compute_capacity
from runtime.backends.kubernetes.client import ApiClient, ApiError, resource_path
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.objects import object_labels
from runtime.backends.kubernetes.rbac import Rule, rules
from runtime.errors import BackendUnavailable, RuntimeFault

OLDEST_MINOR, NEWEST_MINOR = 31, 37
"""Supported minor versions of Kubernetes 1. In the oldest version, all Job fields that Trainyard sets
(podFailurePolicy, backoffLimitPerIndex, podReplacementPolicy) are stable or on by default. Versions after the newest
are untested."""
SMOKE_SECONDS = 180.0
"""How long the smoke run may take. The first pull of the image may take minutes; the run itself takes seconds."""
_SMOKE_MEMORY_MIB = 512
"""Memory of each node of the smoke run: more than enough for an interpreter that imports no framework."""
_UNREACHABLE_REMEDY = "Check the cluster's 'kubeconfig', 'context' or 'in_cluster', and the network from here to it."
_CREDENTIALS_REMEDY = "Renew the credentials of the cluster's 'kubeconfig', 'context' or 'in_cluster'."
_RBAC_REMEDY = "Apply the output of 'manage.py kubernetes_rbac'."
_REFUSAL_REMEDIES = {401: _CREDENTIALS_REMEDY, 403: _RBAC_REMEDY}
"""Remedies by HTTP status. The server answers 401 to an unknown client, and 403 to one that lacks a permission."""
_VERSION_REMEDY = "Bind the ClusterRole 'system:public-info-viewer' to the console's user: it permits GET /version."


def check(api: ApiClient, config: ClusterConfig, root: Path, backend: Backend | None) -> Iterator[CheckResult]:
    """Yield the results of all checks. With a `backend`, the last one is a smoke run: a small real run on the cluster.

    `root` is the folder of the cluster's runs on this machine. If pods share it, it lies in the cluster's volume, which
    is mounted at `config.volume.root`. An unreachable cluster gets only the first check.
    """
    try:
        yield _check_version(api, config)
    except ApiError as error:
        remedy = {401: _CREDENTIALS_REMEDY, 403: _VERSION_REMEDY}.get(error.status, _UNREACHABLE_REMEDY)
        yield CheckResult("API server", ok=False, detail=str(error), remedy=remedy)
        return
    except RuntimeFault as fault:
        yield CheckResult("API server", ok=False, detail=str(fault), remedy=_UNREACHABLE_REMEDY)
        return
    except UNEXPECTED_ERRORS as error:
        yield failed_result("API server", error)
        return
    yield _run_guarded("namespace", lambda: _check_namespace(api, config))
    yield from _check_permissions(api, config)
    yield _run_guarded("storage", lambda: _check_storage(api, config, root))
    yield _run_guarded("storage classes", lambda: _check_storage_classes(api))
    yield _run_guarded("machines", lambda: _check_machines(api, config))
    yield _run_guarded("GPUs", lambda: _check_gpus(api, config))
    yield _run_guarded("Kueue", lambda: _check_kueue(api, config))
    yield _run_guarded("DNS", lambda: _check_dns(api))
    yield _check_images(config)
    if backend is not None:
        yield _run_guarded("smoke run", lambda: _check_smoke_run(config, root, backend))


def _run_guarded(name: str, run_check: Callable[[], CheckResult]) -> CheckResult:
    """Run a check and return its result; turn an exception into a failed result of this name."""
    try:
        return run_check()
    except ApiError as error:
        return CheckResult(name, ok=False, detail=f"The API server refuses: {error}", remedy=_remedy(error))
    except RuntimeFault as fault:
        return CheckResult(name, ok=False, detail=str(fault), remedy=_remedy(fault))
    except UNEXPECTED_ERRORS as error:
        return failed_result(name, error)


def _remedy(error: ApiError | RuntimeFault) -> str:
    """Return the remedy of a check that raised this; "" if there is none."""
    # A backend turns a refusal of the API server into a BackendUnavailable, whose cause is the ApiError.
    refusal = error.__cause__ if isinstance(error, BackendUnavailable) else error
    if isinstance(refusal, ApiError) and refusal.status in _REFUSAL_REMEDIES:
        return _REFUSAL_REMEDIES[refusal.status]
    return _UNREACHABLE_REMEDY if isinstance(error, BackendUnavailable) else ""


def _check_version(api: ApiClient, config: ClusterConfig) -> CheckResult:
    version = api.get("/version")
    match = re.match(r"\d+", str(version.get("minor", "")))  # some clouds append a "+"
    minor = int(match.group()) if match else 0
    ok = version.get("major") == "1" and OLDEST_MINOR <= minor <= NEWEST_MINOR
    remedy = f"Use Kubernetes 1.{OLDEST_MINOR} to 1.{NEWEST_MINOR}."
    return CheckResult("API server", ok, f"{config.name}: {version.get('gitVersion')}", "" if ok else remedy)


def _check_namespace(api: ApiClient, config: ClusterConfig) -> CheckResult:
    # Raises ApiError if the console may not list Jobs in the namespace, which runs need. The permission to read the
    # Namespace itself may be missing, since runs do not need it.
    api.list(resource_path("batch/v1", "jobs", config.namespace))
    try:
        namespace = api.find(resource_path("v1", "namespaces", name=config.namespace))
    except ApiError:
        return CheckResult("namespace", ok=True, detail=f"{config.namespace}: the console may list Jobs there.")
    if namespace is None:
        remedy = f"kubectl create namespace {config.namespace}"
        return CheckResult("namespace", ok=False, detail=f"There is no namespace {config.namespace}.", remedy=remedy)
    level = object_labels(namespace).get("pod-security.kubernetes.io/enforce", "")
    if config.volume.host_path and level in {"baseline", "restricted"}:
        remedy = "Use a claim as the cluster's volume, or, for trials only, label the namespace 'privileged'."
        return CheckResult(
            "namespace", ok=False, detail=f"It enforces '{level}', which forbids a host_path.", remedy=remedy
        )
    return CheckResult("namespace", ok=True, detail=f"{config.namespace}, pod security: {level or 'not enforced'}.")


def _check_permissions(api: ApiClient, config: ClusterConfig) -> Iterator[CheckResult]:
    for rule, namespace in rules(config):
        scope = f"in {namespace}" if namespace else "everywhere"
        name = f"may {', '.join(rule.verbs)} {rule.resource} {scope}"
        yield _run_guarded(name, functools.partial(_check_rule, api, rule, namespace, name))


def _check_rule(api: ApiClient, rule: Rule, namespace: str, name: str) -> CheckResult:
    missing_verbs = _missing_verbs(api, rule, namespace)
    if not missing_verbs:
        return CheckResult(name, ok=True, detail="yes")
    consequence = "" if rule.is_needed else " (not needed, but the console shows less)"
    detail = f"not: {', '.join(missing_verbs)}{consequence}"
    return CheckResult(name, ok=not rule.is_needed, detail=detail, remedy=_RBAC_REMEDY)


def _missing_verbs(api: ApiClient, rule: Rule, namespace: str) -> list[str]:
    """Return the rule's verbs that the console has no permission for."""
    resource, _slash, subresource = rule.resource.partition("/")
    attributes = {"group": rule.group, "resource": resource, "namespace": namespace}
    if subresource:
        attributes["subresource"] = subresource
    return [verb for verb in rule.verbs if not api.is_allowed({**attributes, "verb": verb})]


def _check_storage(api: ApiClient, config: ClusterConfig, root: Path) -> CheckResult:
    volume = config.volume
    if volume.claim:
        claim = api.find(resource_path("v1", "persistentvolumeclaims", config.namespace, volume.claim))
        if claim is None:
            remedy = f"Create a ReadWriteMany claim of this name in {config.namespace}."
            return CheckResult("storage", ok=False, detail=f"There is no claim {volume.claim}.", remedy=remedy)
        phase = (claim.get("status") or {}).get("phase", "")
        if phase != "Bound":
            remedy = f"kubectl -n {config.namespace} describe pvc {volume.claim}"
            return CheckResult("storage", ok=False, detail=f"The claim {volume.claim} is {phase}.", remedy=remedy)
        return _check_bound_claim(config, root, (claim.get("spec") or {}).get("accessModes", []))
    if not volume.shared:
        detail = (
            f"{volume.host_path} on each machine, not shared: for trials. Checkpoints and outputs are in an emptyDir "
            "of their pod, and end with it."
        )
        return CheckResult("storage", ok=True, detail=detail)
    return _check_shared_folder(config, root)


def _check_bound_claim(config: ClusterConfig, root: Path, modes: Sequence[str]) -> CheckResult:
    """Check whether several machines and the console can write to a bound claim."""
    if "ReadWriteMany" in modes:
        return _check_shared_folder(config, root)
    remedy = "Use a storage class that offers ReadWriteMany, such as NFS, CephFS, EFS, Filestore or Azure Files."
    name = config.volume.claim
    if "ReadWriteOnce" not in modes:
        detail = f"The claim {name} is {', '.join(modes) or 'without access modes'}: runs cannot write to it."
        return CheckResult("storage", ok=False, detail=detail, remedy=remedy)
    folder_result = _check_shared_folder(config, root)
    if not folder_result.ok:
        return folder_result
    limitation = (
        f"The claim {name} is ReadWriteOnce: the console and every run share one machine. Use it for trials only."
    )
    return CheckResult(
        "storage", ok=True, detail=f"{folder_result.detail} {limitation}", remedy=f"For more machines: {remedy}"
    )


def _check_shared_folder(config: ClusterConfig, root: Path) -> CheckResult:
    remedy = f"Mount the cluster's volume at {config.volume.root} here, writable for this user."
    try:
        _create_runs_folder(config, root)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".check-"):
            pass
    except OSError as error:
        return CheckResult(
            "storage", ok=False, detail=f"The console cannot write to {root}: {error.strerror}.", remedy=remedy
        )
    if os.geteuid() not in {0, config.uid}:
        detail = f"The console runs as user {os.geteuid()} and pods as {config.uid}: it cannot delete their files."
        return CheckResult(
            "storage", ok=False, detail=detail, remedy="Run the console as the cluster's 'uid', or change that setting."
        )
    return CheckResult("storage", ok=True, detail=f"The console and pods can write to {root}.")


def _create_runs_folder(config: ClusterConfig, root: Path) -> None:
    """Create the folder of runs unless it exists. Raises OSError, also if the mount point of its volume is missing."""
    # `mkdir` would create a missing mount point too, and runs would be written to the console's own disk.
    Path(config.volume.root).stat()
    root.mkdir(parents=True, exist_ok=True)


def _check_storage_classes(api: ApiClient) -> CheckResult:
    names = [
        item["metadata"]["name"] for item in api.list(resource_path("storage.k8s.io/v1", "storageclasses"))["items"]
    ]
    return CheckResult("storage classes", ok=True, detail=", ".join(sorted(names)) or "none")


def _check_machines(api: ApiClient, config: ClusterConfig) -> CheckResult:
    kubernetes_nodes = api.list(resource_path("v1", "nodes"))["items"]
    capacity = compute_capacity(kubernetes_nodes, (), config)  # as if no Pods ran, because busy machines are ready too
    # A machine that accepts no Pods counts as full.
    ready = [machine for machine in capacity.machines if machine.free.cpus > 0]
    detail = f"{len(kubernetes_nodes)} nodes, {len(capacity.machines)} for runs, {len(ready)} of them ready."
    # The node kinds with a selector or toleration of their own (`placed_kinds`) that no machine accepts. `detail` calls
    # them node types, the word that administrators know.
    unserved_kinds = sorted(
        kind for kind in capacity.placed_kinds if all(kind in machine.closed_to for machine in capacity.machines)
    )
    if config.elastic:
        return CheckResult("machines", ok=True, detail=f"{detail} The cluster adds more for pending pods.")
    if ready and unserved_kinds:
        detail = f"{detail} None accepts nodes of type {', '.join(unserved_kinds)}."
        remedy = "Set labels and taints on machines to match the cluster's 'node_selectors' and 'tolerations'."
        return CheckResult("machines", ok=False, detail=detail, remedy=remedy)
    remedy = "Check 'kubectl get nodes'. If nodes have taints, add them to the cluster's 'tolerations'."
    return CheckResult("machines", bool(ready), detail, "" if ready else remedy)


def _check_gpus(api: ApiClient, config: ClusterConfig) -> CheckResult:
    kubernetes_nodes = api.list(resource_path("v1", "nodes"))["items"]
    machines = compute_capacity(kubernetes_nodes, (), config).machines  # as if no Pods ran
    count = sum(machine.total.gpus for machine in machines)
    types = sorted({machine.total.gpu_type for machine in machines if machine.total.gpus})
    if not count:
        detail = f"No node offers {config.gpu_resource}: runs use CPUs only."
        remedy = "For GPUs, install the vendor's device plugin, such as NVIDIA's GPU operator."
        return CheckResult("GPUs", ok=True, detail=detail, remedy=remedy)
    if "" in types:
        detail = f"{count}, but some nodes have no label {config.gpu_label}: their GPU type is unknown."
        return CheckResult("GPUs", ok=False, detail=detail, remedy="Install GPU feature discovery, or set 'gpu_label'.")
    return CheckResult("GPUs", ok=True, detail=f"{count}: {', '.join(types)}. Use these names in node specs.")


def _check_kueue(api: ApiClient, config: ClusterConfig) -> CheckResult:
    if not config.queue:
        return CheckResult(
            "Kueue", ok=True, detail="No queue is set: a run that is only partly placed ends after 'gang_seconds'."
        )
    queue = api.find(resource_path("kueue.x-k8s.io/v1beta1", "localqueues", config.namespace, config.queue))
    if queue is None:
        detail = f"There is no LocalQueue {config.queue} in {config.namespace}."
        return CheckResult(
            "Kueue", ok=False, detail=detail, remedy="Install Kueue and create that queue, or unset 'queue'."
        )
    return CheckResult("Kueue", ok=True, detail=f"LocalQueue {config.queue}.")


def _check_dns(api: ApiClient) -> CheckResult:
    try:
        pods = api.list(resource_path("v1", "pods", "kube-system"), labelSelector="k8s-app=kube-dns")["items"]
    except ApiError:
        return CheckResult("DNS", ok=True, detail="The console may not read kube-system. The smoke run tests DNS.")
    running_pods = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
    if running_pods:
        return CheckResult("DNS", ok=True, detail=f"{len(running_pods)} DNS pods run in kube-system.")
    detail = (
        "No pod labelled k8s-app=kube-dns runs in kube-system. Some clusters use another DNS; the smoke run tests it."
    )
    remedy = "Pods of a run need DNS to find each other. If the smoke run fails for this reason, install CoreDNS."
    return CheckResult("DNS", ok=True, detail=detail, remedy=remedy)


def _check_images(config: ClusterConfig) -> CheckResult:
    if config.images:
        return CheckResult("images", ok=True, detail=", ".join(map(": ".join, sorted(config.images.items()))))
    remedy = 'Add them to the cluster\'s \'images\', such as {"pytorch": "registry.example.com/trainyard/pytorch:1"}.'
    return CheckResult("images", ok=False, detail="No built-in image has a reference here.", remedy=remedy)


def _check_smoke_run(config: ClusterConfig, root: Path, backend: Backend) -> CheckResult:
    # The smoke run's spec names PyTorch as its framework. Its script imports none, so any built-in image will do.
    image = "pytorch" if "pytorch" in config.images else next(iter(sorted(config.images)), "")
    if not image:
        return CheckResult("smoke run", ok=False, detail="There is no image to run.", remedy="Add one to 'images'.")
    name = smoke_run.new_name()
    workspace = root / f".{name}"
    if config.volume.shared:  # without shared storage, the console cannot create a folder that Pods see
        _create_runs_folder(config, root)  # the storage check may have failed before it created the folder
        workspace.mkdir(mode=0o755)
    try:
        return smoke_run.check(
            backend, name, image, workspace=workspace, memory_mib=_SMOKE_MEMORY_MIB, seconds=SMOKE_SECONDS
        )
    finally:
        if config.volume.shared:
            with contextlib.suppress(OSError):  # an empty folder that stays does no harm
                workspace.rmdir()

"""Compute a cluster's total and free capacity from its Nodes, its Pods and the runs' Jobs. Pure.

A machine that accepts no Pod now, because it is cordoned or NotReady, counts as full. A machine that no run may ever
use, because of its labels or taints, does not count at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from runtime.backends.kubernetes.config import ClusterConfig, Toleration
from runtime.backends.kubernetes.names import RUN_LABEL
from runtime.backends.kubernetes.objects import TERMINAL_PHASES, Object, object_labels, pod_phase, timestamp
from runtime.backends.kubernetes.state import SpecSummary
from runtime.backends.reservations import NodeRequest, reserve, subtract, sum_of
from runtime.specs import Capacity, NodeCapacity, Resources

# Suffixes of Kubernetes quantities, with their exponents of 1024 and of 1000.
_BINARY_EXPONENTS = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL_EXPONENTS = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_QUANTITY = re.compile(r"^([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]?)\Z")
_EXCLUDING_EFFECTS = frozenset({"NoSchedule", "NoExecute"})
"""Effects of taints that keep Pods off a Node."""


def compute_capacity(
    nodes: Iterable[Object], pods: Iterable[Object], config: ClusterConfig, *, pending: Iterable[NodeRequest] = ()
) -> Capacity:
    """Return the machines that runs may use, with their total and their free resources.

    The Pods of DaemonSets and static Pods reduce a machine's total; other Pods reduce only its free resources. Each
    `pending` request is subtracted from the first machine that it fits on, because its Pod will be scheduled soon.
    """
    # The requests of Pods, by the name of their machine.
    system_requests: dict[str, list[Resources]] = {}
    user_requests: dict[str, list[Resources]] = {}
    for pod in pods:
        machine_name = pod["spec"].get("nodeName")
        if machine_name and pod_phase(pod) not in TERMINAL_PHASES:
            requests = system_requests if _is_system_pod(pod) else user_requests
            requests.setdefault(machine_name, []).append(_pod_request(pod, config))
    # Node kinds with a selector or toleration of their own; "" stands for all others.
    placed_kinds = frozenset({*config.tolerations, *config.node_selectors}) - {""}
    all_kinds = placed_kinds | {""}
    machines = []
    for node in nodes:
        closed_to = frozenset(kind for kind in all_kinds if not _accepts(node, kind, config))
        if closed_to == all_kinds:
            continue
        name = node["metadata"]["name"]
        gpu_type = object_labels(node).get(config.gpu_label, "")
        allocatable = resources(node["status"].get("allocatable") or {}, config, gpu_type=gpu_type)
        total = subtract(allocatable, system_requests.get(name, []))
        free = subtract(total, user_requests.get(name, [])) if _is_schedulable(node) else Resources(0.0, 0, 0, "")
        gpus_only = any(taint["key"] == config.gpu_resource for taint in _permanent_taints(node))
        machines.append(NodeCapacity(name, total, free, closed_to, gpus_only))
    machines.sort(key=lambda machine: machine.name)
    return reserve(Capacity(tuple(machines), placed_kinds, config.elastic), pending)


def declared_capacity(declared: Capacity, jobs: Iterable[Object], config: ClusterConfig) -> Capacity:
    """Return the capacity that the settings declare, less the requests of the runs' live Jobs.

    This is for a console without the permission to list Nodes, and for a cluster that adds machines on demand. The
    caller leaves out Jobs that are suspended or have ended.
    """
    # Without Pods, the requests of all nodes of the Jobs count as pending, and the declared machines as empty.
    return reserve(declared, pending_requests(jobs, (), config))


def pending_requests(jobs: Iterable[Object], pods: Iterable[Object], config: ClusterConfig) -> list[NodeRequest]:
    """Return one request for each Pod of the Jobs that still needs a machine, since it is neither scheduled nor ended.

    `jobs` are neither suspended nor ended. `pods` are all Pods that have not ended.
    """
    scheduled_pods: dict[str, int] = {}
    for pod in pods:
        run = object_labels(pod).get(RUN_LABEL)
        if run and pod["spec"].get("nodeName"):
            scheduled_pods[run] = scheduled_pods.get(run, 0) + 1
    requests = []
    for job in jobs:
        status = job.get("status") or {}
        ended_pods = int(status.get("succeeded") or 0) + int(status.get("failed") or 0)
        unscheduled_pods = job["spec"]["completions"] - ended_pods - scheduled_pods.get(job["metadata"]["name"], 0)
        requests += [request_of(job, config)] * max(0, unscheduled_pods)
    return requests


def request_of(job: Object, config: ClusterConfig) -> NodeRequest:
    """Return the resources that each Pod of a run's Job requests, and the run's node kind."""
    template = job["spec"]["template"]
    request = _pod_request(template, config)
    selector = template["spec"].get("nodeSelector") or {}
    gpu_type = selector.get(config.gpu_label, "") if request.gpus else ""
    return NodeRequest(replace(request, gpu_type=gpu_type), SpecSummary.from_job(job).kind)


def not_ready_since(node: Object) -> float | None:
    """Return when the Node stopped being Ready, in Unix seconds; None if it is Ready or has no such condition."""
    ready = _condition(node, "Ready")
    return None if ready.get("status") == "True" else timestamp(ready.get("lastTransitionTime"))


def quantity(text: str | float) -> float:
    """Convert a Kubernetes quantity, such as "500m" or "2Gi", to a number. Raises ValueError."""
    match = _QUANTITY.match(str(text))
    if not match:
        raise ValueError(f"'{text}' is not a valid quantity.")
    number, suffix = float(match.group(1)), match.group(2)
    if suffix in _BINARY_EXPONENTS:
        return float(number * 1024 ** _BINARY_EXPONENTS[suffix])
    return float(number * 1000.0 ** _DECIMAL_EXPONENTS[suffix])


def cpus(text: str) -> float:
    """Convert a CPU quantity to cores."""
    return round(quantity(text), 6)  # rounded, since binary floats are not exact


def mebibytes(text: str) -> int:
    """Convert a memory quantity to MiB, rounded down."""
    return int(quantity(text)) >> 20  # 2**20 bytes


def resources(quantities: Mapping[str, str], config: ClusterConfig, *, gpu_type: str = "") -> Resources:
    """Convert a Pod's requests or a Node's allocatable quantities to Resources."""
    gpus = int(quantity(quantities.get(config.gpu_resource, "0")))
    memory = mebibytes(quantities.get("memory", "0"))
    return Resources(cpus(quantities.get("cpu", "0")), memory, gpus, gpu_type if gpus else "")


def _accepts(node: Object, kind: str, config: ClusterConfig) -> bool:
    """Return whether Pods of this node kind may be scheduled to the Node, by its labels and permanent taints.

    The taint of machines with GPUs is ignored here: `NodeCapacity.gpus_only` represents it.
    """
    selector = config.node_selectors.get(kind, config.node_selectors.get("", {}))
    tolerations = config.tolerations.get(kind, config.tolerations.get("", ()))
    if any(object_labels(node).get(key) != value for key, value in selector.items()):
        return False
    taints = [taint for taint in _permanent_taints(node) if taint["key"] != config.gpu_resource]
    return all(any(_tolerates(toleration, taint) for toleration in tolerations) for taint in taints)


def _permanent_taints(node: Object) -> list[Object]:
    """Return the taints that exclude Pods, without those that Kubernetes sets while a Node is not ready."""
    taints = (node.get("spec") or {}).get("taints") or []
    return [
        taint
        for taint in taints
        if taint.get("effect") in _EXCLUDING_EFFECTS and not taint["key"].startswith("node.kubernetes.io/")
    ]


def _is_system_pod(pod: Object) -> bool:
    """Return whether the Pod runs for as long as its machine exists: the Pod of a DaemonSet, or a static Pod."""
    owners = pod["metadata"].get("ownerReferences") or []
    return any(owner.get("kind") in {"DaemonSet", "Node"} for owner in owners)


def _tolerates(toleration: Toleration, taint: Object) -> bool:
    if toleration.key and toleration.key != taint["key"]:
        return False
    if toleration.effect and toleration.effect != taint.get("effect"):
        return False
    return toleration.operator == "Exists" or toleration.value == (taint.get("value") or "")


def _is_schedulable(node: Object) -> bool:
    is_cordoned = (node.get("spec") or {}).get("unschedulable")
    return not is_cordoned and _condition(node, "Ready").get("status") == "True"


def _condition(node: Object, name: str) -> Object:
    """Return the Node's condition of this type; an empty one if it has none."""
    conditions = (node.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == name), {})


def _pod_request(pod: Object, config: ClusterConfig) -> Resources:
    """Return the Pod's effective request, nearly as the scheduler counts it.

    For each resource, it is the sum over the containers, or the request of the largest init container if that is more.
    Sidecar containers and `spec.overhead` do not count: Pods of runs have neither, and on others they are small.
    """
    container_sum = sum_of(_container_requests(pod, "containers", config))
    init_requests = _container_requests(pod, "initContainers", config)
    return Resources(
        max([container_sum.cpus, *(request.cpus for request in init_requests)]),
        max([container_sum.memory_mib, *(request.memory_mib for request in init_requests)]),
        max([container_sum.gpus, *(request.gpus for request in init_requests)]),
    )


def _container_requests(pod: Object, field: str, config: ClusterConfig) -> list[Resources]:
    """Return the requests of the containers in this field of the Pod's spec."""
    containers = pod["spec"].get(field) or []
    return [resources((container.get("resources") or {}).get("requests") or {}, config) for container in containers]

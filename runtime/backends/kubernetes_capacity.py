"""What a cluster has and what of it is free, from its nodes and pods. PURE.

The one rule: a machine that would not take a run's pod now has nothing free, and one that never will is not counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from runtime.backends.kubernetes_config import ClusterConfig, Toleration
from runtime.backends.kubernetes_facts import seconds
from runtime.backends.kubernetes_names import RUN_LABEL, SPEC
from runtime.specs import Capacity, NodeCapacity, Resources

Object = Mapping[str, Any]
Asked = tuple[Resources, str]
"""What a node of a run asks for, and its kind."""

_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_QUANTITY = re.compile(r"^([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]?)$")
_ENDED = frozenset({"Succeeded", "Failed"})
_KEEP_OUT = frozenset({"NoSchedule", "NoExecute"})


def capacity(
    nodes: Iterable[Object], pods: Iterable[Object], config: ClusterConfig, *, waiting: Iterable[Asked] = ()
) -> Capacity:
    """The machines that runs may be placed on: what each offers to pods, and what others' requests have left of it.

    `waiting` are requests of pods that are about to be placed: they are taken off where they fit first.
    """
    used: dict[str, list[Resources]] = {}
    always: dict[str, list[Resources]] = {}
    for pod in pods:
        machine = pod["spec"].get("nodeName")
        if machine and (pod.get("status") or {}).get("phase") not in _ENDED:
            (always if _belongs_to_machine(pod) else used).setdefault(machine, []).append(_requests(pod, config))
    kinds = frozenset({"", *config.tolerations, *config.node_selectors})
    machines = []
    for node in nodes:
        closed_to = frozenset(kind for kind in kinds if not _takes(node, kind, config))
        if closed_to == kinds:
            continue
        name = node["metadata"]["name"]
        gpu_type = (node["metadata"].get("labels") or {}).get(config.gpu_label, "")
        offered = resources(node["status"].get("allocatable") or {}, config, gpu_type=gpu_type)
        total = _less(offered, always.get(name, []))
        free = _less(total, used.get(name, [])) if _is_ready(node) else Resources(0.0, 0, 0, "")
        gpus_only = any(taint["key"] == config.gpu_resource for taint in _taints(node))
        machines.append(NodeCapacity(name, total, free, closed_to, gpus_only))
    found = Capacity(tuple(sorted(machines, key=lambda machine: machine.name)), kinds - {""}, config.elastic)
    return _place(found, waiting)


def declared(capacity: Capacity, jobs: Iterable[Object], config: ClusterConfig) -> Capacity:
    """What settings say that there is, less what our own Jobs hold: where nodes may not be seen, or come as asked."""
    return _place(capacity, waiting_requests(jobs, (), config))


def waiting_requests(jobs: Iterable[Object], pods: Iterable[Object], config: ClusterConfig) -> list[Asked]:
    """What our Jobs ask for and no machine holds yet, pod by pod; `pods` are all that are known to be placed."""
    placed: dict[str, int] = {}
    for pod in pods:
        run = (pod["metadata"].get("labels") or {}).get(RUN_LABEL)
        if run and pod["spec"].get("nodeName"):
            placed[run] = placed.get(run, 0) + 1
    wanted = []
    for job in jobs:
        status = job.get("status") or {}
        over = int(status.get("succeeded") or 0) + int(status.get("failed") or 0)
        missing = job["spec"]["completions"] - over - placed.get(job["metadata"]["name"], 0)
        wanted += [asked_by(job, config)] * max(0, missing)
    return wanted


def asked_by(job: Object, config: ClusterConfig) -> Asked:
    """What each pod of a run's Job asks for."""
    template = job["spec"]["template"]
    selector = template["spec"].get("nodeSelector") or {}
    asked = _requests(template, config)
    gpu_type = selector.get(config.gpu_label, "") if asked.gpus else ""
    told = json.loads((job["metadata"].get("annotations") or {}).get(SPEC, "{}"))
    return Resources(asked.cpus, asked.memory_mib, asked.gpus, gpu_type), str(told.get("kind", ""))


def _place(capacity: Capacity, waiting: Iterable[Asked]) -> Capacity:
    machines = list(capacity.machines)
    for asked, kind in waiting:
        for place, machine in enumerate(machines):
            if Capacity((machine,), capacity.kinds).nodes_now(asked, kind):
                machines[place] = replace(machine, free=_less(machine.free, [asked]))
                break
    return replace(capacity, machines=tuple(machines))


def lost_since(node: Object) -> float | None:
    """Since when the API server has taken a machine for dead; None where it answers."""
    ready = _condition(node, "Ready")
    return None if ready.get("status") == "True" else seconds(ready.get("lastTransitionTime"))


def _takes(node: Object, kind: str, config: ClusterConfig) -> bool:
    """Whether nodes of a kind may be placed there: its labels are those wanted, and its taints are let past."""
    labels = node["metadata"].get("labels") or {}
    wanted = config.node_selectors.get(kind, config.node_selectors.get("", {}))
    passes = config.tolerations.get(kind, config.tolerations.get("", ()))
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        taint["key"] == config.gpu_resource or any(_tolerates(one, taint) for one in passes) for taint in _taints(node)
    )


def _taints(node: Object) -> list[Object]:
    """Those that keep pods out for good: not the ones of a machine that is not ready for a while."""
    taints = (node.get("spec") or {}).get("taints") or []
    return [
        one for one in taints if one.get("effect") in _KEEP_OUT and not one["key"].startswith("node.kubernetes.io/")
    ]


def _belongs_to_machine(pod: Object) -> bool:
    """Whether a pod is there whatever else runs: a daemon's, or the machine's own."""
    owners = pod["metadata"].get("ownerReferences") or []
    return any(owner.get("kind") in {"DaemonSet", "Node"} for owner in owners)


def _tolerates(one: Toleration, taint: Object) -> bool:
    if one.key and one.key != taint["key"]:
        return False
    if one.effect and one.effect != taint.get("effect"):
        return False
    return one.operator == "Exists" or one.value == (taint.get("value") or "")


def _is_ready(node: Object) -> bool:
    spec = node.get("spec") or {}
    return not spec.get("unschedulable") and _condition(node, "Ready").get("status") == "True"


def _condition(node: Object, name: str) -> Object:
    conditions = (node.get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == name), {})


def _requests(pod: Object, config: ClusterConfig) -> Resources:
    """What a pod holds: its containers together, or its largest init container where that is more."""
    both = [
        [resources((one.get("resources") or {}).get("requests") or {}, config) for one in pod["spec"].get(what) or []]
        for what in ("containers", "initContainers")
    ]
    running = _sum(both[0])
    return Resources(
        max([running.cpus, *(one.cpus for one in both[1])]),
        max([running.memory_mib, *(one.memory_mib for one in both[1])]),
        max([running.gpus, *(one.gpus for one in both[1])]),
    )


def _sum(held: Iterable[Resources]) -> Resources:
    held = list(held)
    return Resources(sum(one.cpus for one in held), sum(one.memory_mib for one in held), sum(one.gpus for one in held))


def _less(total: Resources, held: Iterable[Resources]) -> Resources:
    away = _sum(held)
    gpus = max(0, total.gpus - away.gpus)
    cores = max(0.0, round(total.cpus - away.cpus, 6))
    return Resources(cores, max(0, total.memory_mib - away.memory_mib), gpus, total.gpu_type if gpus else "")


def quantity(text: str | float) -> float:
    """A quantity of the API's as a number. Raises ValueError."""
    found = _QUANTITY.match(str(text))
    if not found:
        raise ValueError(f"'{text}' is no quantity.")
    number, suffix = float(found.group(1)), found.group(2)
    return float(number * 1024 ** _BINARY[suffix]) if suffix in _BINARY else float(number * 1000.0 ** _DECIMAL[suffix])


def cpus(text: str) -> float:
    """Cores."""
    return round(quantity(text), 6)


def mebibytes(text: str) -> int:
    """MiB, rounded down."""
    return int(quantity(text)) >> 20


def resources(listed: Mapping[str, str], config: ClusterConfig, *, gpu_type: str = "") -> Resources:
    """A pod's requests, or what a machine has, as our resources."""
    gpus = int(quantity(listed.get(config.gpu_resource, "0")))
    memory = mebibytes(listed.get("memory", "0"))
    return Resources(cpus(listed.get("cpu", "0")), memory, gpus, gpu_type if gpus else "")

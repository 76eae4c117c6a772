"""Subtract the resources that runs will use from the capacity of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from runtime.specs import Capacity, Resources


class NodeRequest(NamedTuple):
    """The resources that one node of a run requests, and its node kind."""

    resources: Resources
    kind: str


def reserve(capacity: Capacity, requests: Iterable[NodeRequest]) -> Capacity:
    """Subtract each request from the first machine that it fits on; ignore a request that fits on none."""
    machines = list(capacity.machines)
    for request in requests:
        for index, machine in enumerate(machines):
            if Capacity((machine,), capacity.kinds).nodes_now(request.resources, request.kind):
                machines[index] = replace(machine, free=subtract(machine.free, [request.resources]))
                break
    return replace(capacity, machines=tuple(machines))


def subtract(total: Resources, items: Iterable[Resources]) -> Resources:
    """Return `total` minus the sum of the items; no amount falls below 0."""
    used = sum_of(items)
    gpus = max(0, total.gpus - used.gpus)
    cores = max(0.0, round(total.cpus - used.cpus, 6))  # drops the rounding residue of binary floats
    return Resources(cores, max(0, total.memory_mib - used.memory_mib), gpus, total.gpu_type if gpus else "")


def sum_of(items: Iterable[Resources]) -> Resources:
    """Return the sum of the items, without a GPU type."""
    items = list(items)
    return Resources(
        sum(item.cpus for item in items), sum(item.memory_mib for item in items), sum(item.gpus for item in items)
    )

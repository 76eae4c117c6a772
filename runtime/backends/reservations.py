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
    """Return the capacity after each request was put on the first machine where it fits.

    A request that fits on no machine is ignored.
    """
    machines = list(capacity.machines)
    for request in requests:
        for index, machine in enumerate(machines):
            if Capacity((machine,), capacity.placed_kinds).nodes_now(request.resources, request.kind):
                machines[index] = replace(machine, free=subtract(machine.free, [request.resources]))
                break
    return replace(capacity, machines=tuple(machines))


def subtract(total: Resources, used_resources: Iterable[Resources]) -> Resources:
    """Return `total` minus all `used_resources`; no amount falls below 0."""
    used_sum = sum_of(used_resources)
    gpus = max(0, total.gpus - used_sum.gpus)
    cpus = max(0.0, round(total.cpus - used_sum.cpus, 6))  # rounded, since 0.3 - 0.1 is not exactly 0.2
    return Resources(cpus, max(0, total.memory_mib - used_sum.memory_mib), gpus, total.gpu_type if gpus else "")


def sum_of(items: Iterable[Resources]) -> Resources:
    """Return the sum of the items' CPUs, memory and GPUs, without a GPU type."""
    items = list(items)
    return Resources(
        sum(item.cpus for item in items), sum(item.memory_mib for item in items), sum(item.gpus for item in items)
    )

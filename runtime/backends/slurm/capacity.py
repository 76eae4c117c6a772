"""The capacity of a cluster by what Slurm says about its machines. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.backends.slurm.config import Placement, SlurmConfig
from runtime.backends.slurm.states import Machine
from runtime.specs import Capacity, NodeCapacity, Resources


def capacity(machines: Iterable[Machine], config: SlurmConfig) -> Capacity:
    """Return the machines that runs can get. One that takes no new jobs now has nothing free."""
    kinds = frozenset(kind for kind in config.node_types if kind)
    nodes = []
    for machine in machines:
        closed_to = {kind for kind in (*kinds, "") if not _is_eligible(machine, config.placement(kind))}
        if machine.cpus and machine.memory_mib and not closed_to >= {*kinds, ""}:
            nodes.append(_node(machine, config, frozenset(closed_to)))
    return Capacity(tuple(nodes), kinds)


def _is_eligible(machine: Machine, placement: Placement) -> bool:
    """Whether nodes with this placement may be put on the machine."""
    partitions = set(filter(None, placement.partition.split(",")))
    in_partition = not partitions or bool(partitions & machine.partitions)
    has_gpu = not placement.gpu or placement.gpu in machine.gpus
    return in_partition and has_gpu and placement.features <= machine.features


def _node(machine: Machine, config: SlurmConfig, closed_to: frozenset[str]) -> NodeCapacity:
    # A machine with several types of GPUs counts with the type that it has most of.
    gpu = max(machine.gpus, key=lambda kind: machine.gpus[kind], default="")
    gpu_type = config.gpu_types.get(gpu, gpu)
    total = Resources(machine.cpus, machine.memory_mib, machine.gpus.get(gpu, 0), gpu_type)
    free = Resources(0, 0)
    if machine.is_open:
        free_gpus = machine.free_gpus.get(gpu, 0)
        free = Resources(machine.free_cpus, machine.free_memory_mib, free_gpus, gpu_type)
    return NodeCapacity(machine.name, total, free, closed_to)

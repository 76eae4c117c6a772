"""Compute the capacity of a cluster from Slurm's list of its machines. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.backends.slurm.config import Placement, SlurmConfig
from runtime.backends.slurm.states import Machine
from runtime.specs import Capacity, NodeCapacity, Resources


def compute_capacity(machines: Iterable[Machine], config: SlurmConfig) -> Capacity:
    """Return the machines on which nodes can be placed. A machine that takes no new jobs now has no free resources."""
    placed_kinds = frozenset(kind for kind in config.node_types if kind)
    all_kinds = {*placed_kinds, ""}  # "" stands for all kinds without a placement of their own
    eligible_machines = []
    for machine in machines:
        closed_to = {kind for kind in all_kinds if not _is_eligible(machine, config.placement(kind))}
        if machine.cpus and machine.memory_mib and closed_to != all_kinds:
            eligible_machines.append(_machine_capacity(machine, config, frozenset(closed_to)))
    return Capacity(tuple(eligible_machines), placed_kinds)


def _is_eligible(machine: Machine, placement: Placement) -> bool:
    """Return whether nodes with this placement may be put on the machine."""
    partitions = set(filter(None, placement.partition.split(",")))
    in_partition = not partitions or bool(partitions & machine.partitions)
    has_gpu = not placement.gpu or placement.gpu in machine.gpus
    return in_partition and has_gpu and placement.features <= machine.features


def _machine_capacity(machine: Machine, config: SlurmConfig, closed_to: frozenset[str]) -> NodeCapacity:
    """Return a machine's total and free resources. `closed_to` are the node kinds that it does not accept."""
    # A NodeCapacity has one type of GPUs. If a machine has several, only the most numerous type counts.
    slurm_type = max(machine.gpus, key=lambda gpu_type: machine.gpus[gpu_type], default="")
    gpu_type = config.gpu_types.get(slurm_type, slurm_type)
    total = Resources(machine.cpus, machine.memory_mib, machine.gpus.get(slurm_type, 0), gpu_type)
    free = Resources(0, 0)
    if machine.is_open:
        free_gpus = machine.free_gpus.get(slurm_type, 0)
        free = Resources(machine.free_cpus, machine.free_memory_mib, free_gpus, gpu_type)
    return NodeCapacity(machine.name, total, free, closed_to)

"""Build the parts of a node's plan that do not depend on the backend. Pure: a RunSpec in, plain data out.

A node's plan consists of its limits (`NodePlan`) and its launch plan (`LaunchPlan` of `runtime.launcher.topology`). The
field `plan` of the launch plan has the fields of `topology.Plan`.
"""

from __future__ import annotations

from typing import Any

from runtime.backends import network, sandbox
from runtime.launcher.node_limits import NodePlan
from runtime.specs import Controller, Framework, RunSpec


def disk_limit(spec: RunSpec, disk_mib: int) -> NodePlan:
    """Return the fields of a NodePlan with a run's disk limit: its own, or `disk_mib` if it has none.

    The limit is never more than the unused part of the organization's storage quota. With `disk_by_quota`, the message
    about the limit names the quota. If the quota is used up, the limit is 1 MiB, since 0 means no limit.
    """
    run_limit_mib, quota_left_mib = spec.resources.disk_mib or disk_mib, spec.storage_left_mib
    if quota_left_mib is None or quota_left_mib >= run_limit_mib:
        return {"disk_bytes": run_limit_mib << 20}
    return {"disk_bytes": max(1, quota_left_mib) << 20, "disk_by_quota": True}


def launcher_arguments(folder: str) -> list[str]:
    """Return Python's arguments to start the launcher in this folder. The launcher's own arguments come after them.

    `python <folder>` would take longer, since Python would first search the folder for `__main__`. The garbage
    collector stays off until the ranks run, because almost no objects that the start creates become garbage.
    """
    parent, _, package = folder.rpartition("/")
    code = f"import gc, sys; gc.disable(); sys.path[:0] = [{parent!r}]; from {package}.__main__ import start; start()"
    return ["-I", "-S", "-c", code]


def _script(spec: RunSpec) -> str:
    """Return the script's path in the sandbox: in the workspace, or in the launcher's folder for a built-in script."""
    if spec.builtin_script:
        return f"{sandbox.LAUNCHER_TARGET}/{spec.builtin_script}.py"
    return f"{spec.workspace_target}/{spec.script}"


def _collectives(spec: RunSpec) -> str:
    """Return the library for collectives, by the name that `torch.distributed` gives it as a backend."""
    if spec.controller is Controller.MPI:
        return "mpi"
    return "nccl" if spec.resources.gpus else "gloo"


def topology_fields(spec: RunSpec) -> dict[str, Any]:
    """Return the fields of `runtime.launcher.topology.Plan` that the spec decides.

    The caller adds `node`, `own_network` and the ports.
    """
    return {
        "run_id": spec.name,
        "nodes": spec.nodes,
        "workers": spec.workers_per_node,
        "framework": spec.framework.value,
        "controller": spec.controller.value,
        "backend": _collectives(spec),  # of torch.distributed, not a backend of runs
        # All nodes of a local run are on this machine. The other backends replace these.
        "addresses": [network.ADDRESS] * spec.nodes,
        "min_nodes": spec.min_nodes,
        "collective_timeout_seconds": spec.collective_timeout_seconds,
        "stall_check_seconds": spec.stall_check_seconds,
        "script": _script(spec),
        "arguments": list(spec.arguments),
        "epochs": spec.epochs,
        "lr": spec.lr,
        "batch_size": spec.batch_size,
        "datasets": list(spec.datasets),
        "datasets_path": spec.datasets_target,
        "models": list(spec.models),
        "models_path": spec.models_target,
        "workspace": spec.workspace_target,
        "run_dir": sandbox.RUN_TARGET,
        "checkpoint_dir": sandbox.CHECKPOINT_TARGET,
        "output_dir": sandbox.OUTPUT_TARGET,
        "restart_count": spec.restart_count,
        "omp_threads": max(1, int(spec.resources.cpus // spec.workers_per_node)),
        "interface": network.INTERFACE,
        "hang_seconds": spec.hang_seconds,
        "cpus": spec.resources.cpus,
        "lr_scaling": spec.lr_scaling.value,
        "warmup_epochs": spec.warmup_epochs,
        "local_rank_argument": spec.local_rank_argument.value,
        "expands_arguments": spec.expands_arguments,
        "traceparent": spec.traceparent,
    }


def ports_needed(spec: RunSpec) -> dict[str, int]:
    """Return how many ports a run needs in addition to the master port, for its workers and for later rounds.

    Every TensorFlow process listens on a port; with other frameworks only rank 0 does, on the master port. An elastic
    run continues without a lost node in a new round, which needs as many new ports.
    """
    worker_ports = spec.world_size if spec.framework is Framework.TENSORFLOW else 0
    ports_per_round = worker_ports or 1
    # At most this many, since each later round has at least one node less.
    later_rounds = spec.nodes - spec.min_nodes if 0 < spec.min_nodes < spec.nodes else 0
    return {"worker_ports": worker_ports, "spare_ports": later_rounds * ports_per_round}

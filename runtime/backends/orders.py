"""From a RunSpec to what its supervisors and launchers are told. PURE: a spec in, plain data out.

The one rule: everything that the processes of a node need is in their order; they read no settings. Ports are not: they
are chosen where the run's network is made (`starter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.backends import network, sandbox
from runtime.specs import Controller, Framework, RunSpec

TASK_LIMIT = 1024
TASKS_PER_RANK = 1024
"""Processes and threads that a node may have at once."""


def for_node(
    spec: RunSpec, node: int, place: sandbox.Place, environment: Mapping[str, str], *, disk_mib: int
) -> dict[str, Any]:
    """What one node's supervisor is told about the run itself. `disk_mib` counts where the spec gives none."""
    first = node * spec.workers_per_node
    python = str(place.image / "bin" / "python")
    return {
        "name": spec.name,
        "node": node,
        "nodes": spec.nodes,
        "elastic": 0 < spec.min_nodes < spec.nodes,
        "ranks": list(range(first, first + spec.workers_per_node)),
        "command": [python, *launcher_call(sandbox.LAUNCHER_TARGET)],
        "listener": None,
        "deadline_seconds": spec.deadline_seconds,
        "grace_seconds": spec.grace_seconds,
        "log_limit_bytes": spec.log_limit_bytes,
        "cpus": spec.resources.cpus,
        "memory_bytes": spec.resources.memory_mib << 20,
        "process_limit": TASK_LIMIT + TASKS_PER_RANK * spec.workers_per_node,
        "disk_bytes": (spec.resources.disk_mib or disk_mib) << 20,
        "written": _written(spec, place),
        "launcher": {
            "plan": {**plan(spec), "node": node},
            "python": python,
            "environment": dict(environment),
        },
    }


def launcher_call(folder: str) -> list[str]:
    """An interpreter's arguments for starting the launcher that lies there, up to the launcher's own.

    Given the folder itself, it would spend a third of its start on finding out what that is. What is made on the way to
    the ranks stays, and need not be looked through by the garbage collector again and again.
    """
    above, _, package = folder.rpartition("/")
    code = f"import gc, sys; gc.disable(); sys.path[:0] = [{above!r}]; from {package}.__main__ import start; start()"
    return ["-I", "-S", "-c", code]


def _script(spec: RunSpec) -> str:
    """Where the run finds its script: in the workspace, or beside the launcher where it is the platform's own."""
    if spec.builtin_script:
        return f"{sandbox.LAUNCHER_TARGET}/{spec.builtin_script}.py"
    return f"{spec.workspace_target}/{spec.script}"


def plan(spec: RunSpec) -> dict[str, Any]:
    """What the launchers are told, the same on every node; `runtime.launcher.topology.Plan` says what it means."""
    return {
        "run_id": spec.name,
        "nodes": spec.nodes,
        "workers": spec.workers_per_node,
        "framework": spec.framework.value,
        "controller": spec.controller.value,
        "backend": "mpi" if spec.controller is Controller.MPI else "nccl" if spec.resources.gpus else "gloo",
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
        "workspace": spec.workspace_target,
        "run_dir": sandbox.RUN_TARGET,
        "checkpoint_dir": sandbox.CHECKPOINT_TARGET,
        "restart_count": spec.restart_count,
        "omp_threads": max(1, int(spec.resources.cpus // spec.workers_per_node)),
        "interface": network.INTERFACE,
        "hang_seconds": spec.hang_seconds,
        "cpus": spec.resources.cpus,
        **({"traceparent": spec.traceparent} if spec.traceparent else {}),
    }


def ports_needed(spec: RunSpec) -> dict[str, int]:
    """How many ports besides the master's: TensorFlow's processes each listen, elsewhere rank 0 alone does.

    Each time an elastic run goes on without a node, its ranks meet at new ones.
    """
    workers = spec.world_size if spec.framework is Framework.TENSORFLOW else 0
    rounds = spec.nodes - spec.min_nodes if 0 < spec.min_nodes < spec.nodes else 0
    return {"worker_ports": workers, "spare_ports": rounds * max(1, workers)}


def _written(spec: RunSpec, place: sandbox.Place) -> dict[str, str]:
    """The folders that the run may write to, each a part of its disk limit."""
    workspace = [mount.source for mount in spec.mounts if mount.target == spec.workspace_target and not mount.read_only]
    folders = {"run": str(place.run_folder), "checkpoints": str(place.checkpoint_folder)}
    return folders | ({"workspace": workspace[0]} if workspace else {})

"""Turn a RunSpec into the plan of each node. Pure: a spec in, plain data out."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.backends import container, launch_plan, sandbox
from runtime.backends.supervision.node_plan import SupervisorPlan
from runtime.specs import RunSpec

TASKS_PER_NODE = 1024
"""Processes and threads that a node may have in addition to those for its ranks. They are enough for shells, compilers
and TensorBoard, and stop a fork bomb before the machine suffers."""
TASKS_PER_RANK = 1024
"""Processes and threads that a node may have for each of its ranks. With data loaders on many cores, a few hundred are
usual."""


def node_plan(
    spec: RunSpec,
    node: int,
    node_sandbox: sandbox.Sandbox,
    environment: Mapping[str, str],
    *,
    bubblewrap: str,
    disk_mib: int,
    cgroups: bool,
) -> SupervisorPlan:
    """Return the plan of one node. `environment` is the ranks' environment, without the order's own variables.

    `disk_mib` is the disk limit of a spec that has none. `cgroups`: create a control group where the kernel allows it.

    The caller adds the values that all nodes of the run share: `folder`, `change_file`, `fork_server` and the
    launcher's token. The process that starts the node adds `nonce`, `listener` and the ports of the launcher's plan.
    """
    first_rank = node * spec.workers_per_node
    python = node_sandbox.python
    launcher_command, launcher_environment = [python], environment
    if node_sandbox.container is not None:
        # The launcher trusts nothing in a customer's own image, not its Python and not its variables.
        launcher_command, _mounts = container.host_interpreter()
        launcher_environment = container.LAUNCHER_ENVIRONMENT
    disk = launch_plan.disk_limit(spec, disk_mib)
    return {
        "name": spec.name,
        "node": node,
        "nodes": spec.nodes,
        "elastic": 0 < spec.min_nodes < spec.nodes,
        "ranks": list(range(first_rank, first_rank + spec.workers_per_node)),
        "sandbox": [bubblewrap, *sandbox.arguments(node_sandbox, launcher_environment)],
        "command": [*launcher_command, *launch_plan.launcher_arguments(sandbox.LAUNCHER_TARGET)],
        "cgroups": cgroups,
        "listener": None,
        "deadline_seconds": spec.deadline_seconds,
        "grace_seconds": spec.grace_seconds,
        "log_limit_bytes": spec.log_limit_bytes,
        "cpus": spec.resources.cpus,
        "memory_bytes": spec.resources.memory_mib << 20,
        "process_limit": TASKS_PER_NODE + TASKS_PER_RANK * spec.workers_per_node,
        "disk_bytes": disk["disk_bytes"],
        "disk_by_quota": disk.get("disk_by_quota", False),
        "written": _writable_folders(spec, node_sandbox),
        "launcher": {
            "plan": {**launch_plan.topology_fields(spec), "node": node},
            "python": python,
            "environment": dict(environment),
            "variables": spec.environment,  # the order's own, which only the ranks get
            "secrets": spec.secrets,
        },
    }


def _writable_folders(spec: RunSpec, node_sandbox: sandbox.Sandbox) -> dict[str, str]:
    """Return the folders that the run may write to, by name. All files in them count towards its disk limit."""
    workspaces = [
        mount.source for mount in spec.mounts if mount.target == spec.workspace_target and not mount.read_only
    ]
    folders = {
        "run": str(node_sandbox.run_folder),
        "checkpoints": str(node_sandbox.checkpoint_folder),
        "outputs": str(node_sandbox.output_folder),
    }
    return folders | ({"workspace": workspaces[0]} if workspaces else {})

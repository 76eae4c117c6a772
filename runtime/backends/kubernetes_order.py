"""From a RunSpec to `order.json`, what each pod of the run is told; `runtime.launcher.pod` says what is in it.

The one rule: the order is the same for every pod and every time it is made, so that a submission can be made again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.backends import orders, sandbox
from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_names import CONTROL_PORT, RUN_ROOT_TARGET, host
from runtime.specs import RunSpec

MASTER_PORT = 29500
_WORKER_PORTS = 29600
"""Each pod has an address of its own: ports are free by design, and the same in every run."""


def order(spec: RunSpec, config: ClusterConfig, root: Path) -> dict[str, Any]:
    """The order, with `sources`: where in the volume the run's folder, RUN_DIR and CHECKPOINT_DIR lie."""
    needed = orders.ports_needed(spec)
    spare = _WORKER_PORTS + needed["worker_ports"]
    plan = {
        **orders.plan(spec),
        "interface": "",
        "own_network": True,
        "master_port": MASTER_PORT,
        "worker_ports": list(range(_WORKER_PORTS, spare)),
        "spare_ports": list(range(spare, spare + needed["spare_ports"])),
    }
    del plan["addresses"]
    written = {"run": sandbox.RUN_TARGET, "checkpoints": sandbox.CHECKPOINT_TARGET}
    if any(mount.target == spec.workspace_target and not mount.read_only for mount in spec.mounts):
        written["workspace"] = spec.workspace_target
    return {
        "run": spec.name,
        "names": [host(spec.name, node) for node in range(spec.nodes)],
        "folder": RUN_ROOT_TARGET,
        "control_port": CONTROL_PORT,
        "start_seconds": config.gang_seconds + config.start_seconds,
        "deadline_seconds": spec.deadline_seconds,
        "grace_seconds": spec.grace_seconds,
        "log_limit_bytes": spec.log_limit_bytes,
        "memory_bytes": spec.resources.memory_mib << 20,
        "disk_bytes": (spec.resources.disk_mib or config.disk_mib) << 20,
        "written": written,
        "gpus": spec.resources.gpus,
        "python": "",
        "builtin_script": spec.builtin_script,
        "environment": {},
        "plan": plan,
        "sources": _sources(spec, config, root),
    }


def _sources(spec: RunSpec, config: ClusterConfig, root: Path) -> dict[str, str]:
    inside = root.relative_to(config.volume.root) if config.volume.shared else Path()
    own = inside / spec.name
    checkpoints = inside / ".checkpoints" / spec.checkpoint_key if spec.checkpoint_key else own / "checkpoints"
    return {"root": str(own), "run": str(own / "run"), "checkpoints": str(checkpoints)}

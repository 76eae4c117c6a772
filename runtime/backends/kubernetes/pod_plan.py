"""Build the inputs of a run's Pods: the Pod plan (`order.json`), which each Pod's first process reads, and the folders.

`runtime.launcher.pod.main` documents the plan's fields. All Pods of a run read the same plan. One spec always yields
the same plan, so repeating a submission changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from runtime.backends import launch_plan, sandbox
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.names import CONTROL_PORT, RUN_ROOT_PATH, TMP_PATH, host_name
from runtime.backends.kubernetes.pod import PodInputs
from runtime.specs import PACKAGES_TARGET, RunSpec

MASTER_PORT = 29500
"""Rank 0's port, torchrun's default. Each Pod has an address of its own, so fixed ports are always free."""
NOTEBOOK_PORT = 8888
"""The port on 127.0.0.1 of a Pod on which JupyterLab listens, its default. `notebooks` connects to it."""
_FIRST_WORKER_PORT = 29600
"""The first of the ports at which TensorFlow's workers listen. They are consecutive; the spare ones for later rounds of
an elastic run follow."""
_RANK_FILES_BYTES = 8 << 20
"""Room for a rank's files in the run's folder beside its log: the log's times (7 MiB after a month) and its stacks."""
_NODE_FILES_BYTES = 20 << 20
"""Room for a node's files in the run's folder: samples (16 MiB at most), its launcher's log (1 MiB) and its record."""


def build_pod_inputs(spec: RunSpec, config: ClusterConfig, root: Path) -> PodInputs:
    """Return the inputs of a run's Pods. `root` is the folder of all runs, as the console sees it."""
    ports = launch_plan.ports_needed(spec)
    first_spare = _FIRST_WORKER_PORT + ports["worker_ports"]
    topology = {
        **launch_plan.topology_fields(spec),
        "interface": "",  # which interface a Pod has depends on the cluster's network
        "own_network": True,
        "master_port": MASTER_PORT,
        "worker_ports": list(range(_FIRST_WORKER_PORT, first_spare)),
        "spare_ports": list(range(first_spare, first_spare + ports["spare_ports"])),
    }
    del topology["addresses"]  # Pods learn each other's addresses when they start
    if spec.builtin_script == "notebook":
        topology["arguments"] = [*spec.arguments, str(NOTEBOOK_PORT)]  # see `main` of `runtime.launcher.notebook`
    # The folders whose contents count towards the disk limit.
    writable_folders = {
        # Not only RUN_DIR: the code can also write to the folders of logs and records, and create others beside them.
        "run": RUN_ROOT_PATH,
        "checkpoints": sandbox.CHECKPOINT_TARGET,
    }
    # Without a key, outputs are a part of the run's folder and already counted. So are checkpoints, but the plan's
    # field `written` must have them. The runs of jobs have a key.
    if spec.checkpoint_key or not config.volume.shared:
        writable_folders["outputs"] = sandbox.OUTPUT_TARGET
    if any(mount.target == spec.workspace_target and not mount.read_only for mount in spec.mounts):
        writable_folders["workspace"] = spec.workspace_target
    pod_plan = {
        "run": spec.name,
        "names": [host_name(spec.name, node) for node in range(spec.nodes)],
        "folder": RUN_ROOT_PATH,
        "control_port": CONTROL_PORT,
        # Each Pod counts from its own start, when others may still have to be scheduled and to pull the image.
        "start_seconds": config.gang_seconds + config.start_seconds,
        "deadline_seconds": spec.deadline_seconds,
        "grace_seconds": spec.grace_seconds,
        "log_limit_bytes": spec.log_limit_bytes,
        "memory_bytes": spec.resources.memory_mib << 20,
        **launch_plan.disk_limit(spec, config.disk_mib),
        "written": writable_folders,
        # The kubelet limits the bytes in /tmp. But a run that used up the inodes of its machine would be evicted, free.
        "local_disk_bytes": (spec.resources.disk_mib or config.disk_mib) << 20,
        "local": {"tmp": TMP_PATH},
        # The platform's own files in the run's folder count towards the disk limit only above this size.
        "platform_bytes": spec.world_size * (spec.log_limit_bytes + _RANK_FILES_BYTES) + spec.nodes * _NODE_FILES_BYTES,
        "gpus": spec.resources.gpus,
        "python": "",  # the interpreter of the first process
        "builtin_script": spec.builtin_script,
        "environment": {},  # added to the image's; `variables` are the customer's
        **({"packages": PACKAGES_TARGET} if spec.packages else {}),
        **({"variables": spec.environment} if spec.environment else {}),
        "plan": topology,
    }
    runs_path = root.relative_to(config.volume.root) if config.volume.shared else Path()
    run_root = runs_path / spec.name
    key = spec.checkpoint_key  # the attempts of a job share checkpoints and outputs; `run` is the attempt's own
    return PodInputs(
        pod_plan=pod_plan,
        run_root=str(run_root),
        run_dir=str(run_root / "run"),
        checkpoint_dir=str(runs_path / ".checkpoints" / key if key else run_root / "checkpoints"),
        output_dir=str(runs_path / ".outputs" / key if key else run_root / "outputs"),
    )

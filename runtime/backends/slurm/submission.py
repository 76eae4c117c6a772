"""Turn a RunSpec into a batch job: the arguments of sbatch and the script. Pure.

Each node of the run is one task of the job, so nodes may share a machine. Slurm gives a task whole cores.
"""

from __future__ import annotations

import math
import shlex

from runtime.backends.slurm.config import Placement, SlurmConfig
from runtime.specs import RunSpec

_END_MARGIN_SECONDS = 120
"""How much longer than the run's own limits the job's time limit is. So the supervisors end the run before Slurm does;
they need seconds to write their last records."""
_SECONDS_PER_MINUTE = 60


def arguments(spec: RunSpec, config: SlurmConfig, *, job_name: str, log: str) -> list[str]:
    """Return the arguments of sbatch. `log` is the path of the file for the output of the script and of srun."""
    placement = config.placement(spec.node_kind)
    cpus = max(1, math.ceil(spec.resources.cpus))
    seconds = spec.deadline_seconds + config.start_seconds + _END_MARGIN_SECONDS
    if spec.image.reference:
        seconds += config.import_seconds
    minutes = math.ceil(seconds / _SECONDS_PER_MINUTE)  # the unit of `--time`
    result = [
        f"--job-name={job_name}",
        f"--ntasks={spec.nodes}",
        f"--cpus-per-task={cpus}",
        # `--mem` would be the memory of all tasks on a machine, and tasks may share machines. So it is given per core.
        f"--mem-per-cpu={math.ceil(spec.resources.memory_mib / cpus)}M",
        f"--time={minutes}",
        "--no-requeue",  # the console retries runs itself, as new attempts
        # ALL is the environment of sbatch, which `Slurm.call` sets. With NONE, Slurm would first run the user's log-in
        # shell on the node, and a slow profile would delay the job.
        "--export=ALL",
        "--chdir=/",
        f"--output={log}",
        "--open-mode=append",
    ]
    if spec.resources.gpus:
        type_prefix = f"{placement.gpu}:" if placement.gpu else ""
        result.append(f"--gpus-per-task={type_prefix}{spec.resources.gpus}")
    result += placement_arguments(placement, config.organization_account(spec.labels.get("organization", "")))
    if _is_elastic(spec):
        result.append("--no-kill")  # the job outlives the loss of a machine
    return result


def placement_arguments(placement: Placement, account: str) -> list[str]:
    """Return the arguments of sbatch that say where a job runs, and for which account ("": Slurm's default)."""
    options = {
        "partition": placement.partition,
        "constraint": placement.constraint,
        "qos": placement.qos,
        "account": account,
    }
    return [f"--{name}={value}" for name, value in options.items() if value]


def script(spec: RunSpec, config: SlurmConfig, command: list[str]) -> str:
    """Return the batch script, which starts `command` once for each node."""
    srun = ["srun", f"--ntasks={spec.nodes}", f"--cpus-per-task={max(1, math.ceil(spec.resources.cpus))}"]
    # When one node ends, srun must not end the others: their launchers notice the end and report the cause.
    srun += ["--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--export=ALL", "--input=none"]
    if _is_elastic(spec):
        srun.append("--no-kill")
    set_path = f"PATH={shlex.quote(config.bin)}:$PATH\n" if config.bin else ""
    return f"#!/bin/sh\n{set_path}exec {shlex.join([*srun, *command])}\n"


def _is_elastic(spec: RunSpec) -> bool:
    return 0 < spec.min_nodes < spec.nodes

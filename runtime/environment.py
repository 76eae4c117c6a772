"""Decide which environment variables an order may set itself. Pure.

The platform sets the variables of the environment contract and those of the frameworks. Their names are taken from the
code that sets them, so a new variable of the platform is reserved without a change here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from runtime.launcher.frameworks import rank_environment
from runtime.launcher.topology import Plan, common_environment
from runtime.specs import Controller, Framework

NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}\Z")
"""Valid names of variables: those that every shell accepts, of at most 100 characters."""
MAX_VARIABLES = 100
"""Maximum number of variables that one order may set: more than any script needs, and few enough for a form."""
MAX_BYTES = 32 * 1024
"""Maximum size of all names and values of an order's variables. They are part of the launch plan, one message of at
most 1 MiB (`launcher.protocol`)."""
MAX_SECRETS = 10
"""Maximum number of secrets that one order may use. With `MAX_SECRET_BYTES` each, they fit into the same message."""
MAX_SECRET_BYTES = 8 * 1024
"""Maximum size of a secret: more than keys and certificates have."""
OVERRIDABLE = frozenset({
    "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME",
})  # fmt: skip
"""Defaults of the platform that an order may replace: they only tune the run."""
_FORBIDDEN = frozenset({
    # The platform chooses the GPUs of a node.
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
    # With these, the interpreter would not find its library or the script's folder, or would not end. Variables of the
    # dynamic linker such as LD_PRELOAD are allowed: only the ranks get them, never a process of the platform.
    "PYTHONHOME", "PYTHONSAFEPATH", "PYTHONPLATLIBDIR", "PYTHONEXECUTABLE", "PYTHONINSPECT",
})  # fmt: skip
_RESERVED_PREFIXES = (
    "TRAINYARD_", "KUBERNETES_", "TORCHELASTIC_",
    # Variables that mpirun sets for its processes.
    "OMPI_COMM_", "OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_plm", "PMI_", "PMIX_", "PRTE_", "ORTE_",
)  # fmt: skip
# The platform's variables are those that the ranks of the following two plans get. Only their names matter, so the
# values are placeholders. A "-" stands where an empty value would leave the variable out.
_MINIMAL_PLAN = Plan(
    run_id="run",
    node=0,
    nodes=2,
    workers=1,
    framework="",
    backend="",
    addresses=["", ""],
    master_port=1,
    script="",
    arguments=[],
    epochs=1,
    lr="1",
    batch_size=1,
    datasets=[],
    datasets_path="",
    workspace="",
    run_dir="",
    checkpoint_dir="",
    restart_count=0,
    omp_threads=1,
    interface="",
    worker_ports=[1, 1],
    output_dir="-",
)
# The plan of a run that uses every option which adds variables.
_PLAN_WITH_ALL_OPTIONS = _MINIMAL_PLAN._replace(
    interface="lo", min_nodes=1, collective_timeout_seconds=1, stall_check_seconds=1, traceparent="-"
)
CONTRACT = frozenset(common_environment(_MINIMAL_PLAN, 0)) - OVERRIDABLE
"""Names of the variables of the environment contract that every rank has. A script's arguments may refer to them, as in
`--lr $LR`."""


def _names_set_by_platform() -> frozenset[str]:
    """Return the names of all variables that the platform sets for a rank, in any framework."""
    names: set[str] = set()
    for framework in Framework:
        for controller in Controller:
            plan = _PLAN_WITH_ALL_OPTIONS._replace(framework=framework.value, controller=controller.value)
            names.update(rank_environment(plan, 0))
    return frozenset(names)


_SET_BY_PLATFORM = _names_set_by_platform()


def is_name(name: str) -> bool:
    """Whether a variable can have this name."""
    return bool(NAME_PATTERN.match(name))


def is_reserved(name: str) -> bool:
    """Whether an order must not set this variable: the platform sets it, or needs it unset."""
    if name in OVERRIDABLE:
        return False
    return name in _SET_BY_PLATFORM or name in _FORBIDDEN or name.startswith(_RESERVED_PREFIXES)


def size_of(variables: Mapping[str, str]) -> int:
    """Return the bytes of the variables in a process's environment, with a "=" and a zero byte for each."""
    return sum(len(name.encode()) + len(value.encode()) + 2 for name, value in variables.items())

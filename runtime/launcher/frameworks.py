"""The environment variables that each framework needs. Pure.

These variables replace the framework's own launcher, such as torchrun or horovodrun.
"""

from __future__ import annotations

import json
from typing import Callable, Dict

from .topology import Plan, common_environment

_STALL_WARNING_SECONDS = 60
"""Horovod's default for HOROVOD_STALL_CHECK_TIME_SECONDS: after how long it warns that ranks are missing in a
collective."""


def rank_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """Return all variables of one rank: the common ones and its framework's."""
    environment = common_environment(plan, local_rank)
    environment.update(_VARIABLES_BY_FRAMEWORK[plan.framework](plan, local_rank))
    return environment


def pytorch_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """Return the variables that torchrun sets in addition to the common ones, and those of the network interface.

    `TORCHELASTIC_USE_AGENT_STORE` is False because rank 0 itself serves the store. `TORCHELASTIC_RESTART_COUNT`
    includes earlier attempts and rounds. `TORCHELASTIC_MAX_RESTARTS` allows one more restart for each node that the run
    can lose.
    """
    rank = str(plan.rank(local_rank))
    environment = {
        "LOCAL_WORLD_SIZE": str(plan.workers),
        "GROUP_RANK": str(plan.node),
        "GROUP_WORLD_SIZE": str(plan.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(plan.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.restart_count + (plan.nodes - plan.min_nodes if plan.elastic else 0)),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if plan.interface:
        for library in ("GLOO", "NCCL", "TP"):  # TP: TensorPipe, which `torch.distributed.rpc` uses
            environment[library + "_SOCKET_IFNAME"] = plan.interface
    return environment


def tensorflow_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """Return `TF_CONFIG`, in which every process is a worker with a port of its own."""
    hosts = ["[{}]".format(address) if ":" in address else address for address in plan.addresses]
    workers = ["{}:{}".format(hosts[rank // plan.workers], plan.worker_ports[rank]) for rank in range(plan.world_size)]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": plan.rank(local_rank)}}
    return {"TF_CONFIG": json.dumps(config)}


def horovod_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """Return the variables for `hvd.init()`.

    With the Gloo controller, the launcher of node 0 serves the key-value store (`runtime.launcher.horovod_store`).

    Host names must differ between nodes, since Horovod groups ranks into nodes by them. With MPI, mpirun's own
    variables assign ranks.
    """
    environment = pytorch_environment(plan, local_rank)
    values = _timeout_variables(plan)
    values.update(
        {"CONTROLLER": "mpi", "CPU_OPERATIONS": "mpi"}
        if plan.controller == "mpi"
        else _gloo_variables(plan, local_rank)
    )
    environment.update({"HOROVOD_" + name: value for name, value in values.items()})
    return environment


def _gloo_variables(plan: Plan, local_rank: int) -> Dict[str, str]:
    """Return the variables of the Gloo controller, which horovodrun would set, without the prefix HOROVOD_."""
    values = {
        # A node keeps its host name in later rounds, although its number may change. `original_node` is -1 in round 0.
        "HOSTNAME": plan.host(plan.node if plan.original_node < 0 else plan.original_node),
        "RANK": str(plan.rank(local_rank)),
        "SIZE": str(plan.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_SIZE": str(plan.workers),
        "CROSS_RANK": str(plan.node),
        "CROSS_SIZE": str(plan.nodes),
        "GLOO_RENDEZVOUS_ADDR": plan.addresses[0],
        "GLOO_RENDEZVOUS_PORT": str(plan.rendezvous_port),
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
    }
    if plan.interface:
        values["GLOO_IFACE"] = plan.interface
    if plan.elastic:
        values["ELASTIC"] = "1"
    return values


def _timeout_variables(plan: Plan) -> Dict[str, str]:
    """Return Horovod's time-outs that the run sets, without the prefix HOROVOD_.

    Horovod gives up on a stall only after it has warned of it, so the warning must not come later than the time-out.
    """
    values = {}
    timeout_seconds, warning_seconds = plan.collective_timeout_seconds, plan.stall_check_seconds
    if timeout_seconds:
        warning_seconds = min(warning_seconds or _STALL_WARNING_SECONDS, timeout_seconds)
        values["GLOO_TIMEOUT_SECONDS"] = values["STALL_SHUTDOWN_TIME_SECONDS"] = str(timeout_seconds)
    if warning_seconds:
        values["STALL_CHECK_TIME_SECONDS"] = str(warning_seconds)
    return values


_VARIABLES_BY_FRAMEWORK: Dict[str, Callable[[Plan, int], Dict[str, str]]] = {
    "pytorch": pytorch_environment,
    "tensorflow": tensorflow_environment,
    "horovod": horovod_environment,
}

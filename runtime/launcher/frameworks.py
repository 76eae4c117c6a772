"""What each framework wants to find in a rank's environment. PURE: a plan in, plain data out.

The one rule: a framework starts from its own variables alone, with no agent, ssh or mpirun in between.
"""

from __future__ import annotations

from .plain import dumps
from .topology import Plan, common_environment

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Callable, Dict

_STALL_WARNING_SECONDS = 60
"""After how long Horovod warns of ranks that are missing in a collective, unless told otherwise."""


def rank_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """Everything one rank is told: the common contract and its framework's own."""
    environment = common_environment(plan, local_rank)
    environment.update(_FRAMEWORKS[plan.framework](plan, local_rank))
    return environment


def pytorch_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """What torchrun sets besides the common part.

    `TORCHELASTIC_USE_AGENT_STORE` is False: no agent holds a store for the ranks, so rank 0 must serve it itself.
    Restarts are those of earlier attempts and those inside this run, of which there can be one for each spare node.
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
        for library in ("GLOO", "NCCL", "TP"):
            environment[library + "_SOCKET_IFNAME"] = plan.interface
    return environment


def tensorflow_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """`TF_CONFIG` with every process as a worker, at a port of its own."""
    hosts = ["[{}]".format(address) if ":" in address else address for address in plan.addresses]
    workers = ["{}:{}".format(hosts[rank // plan.workers], plan.worker_ports[rank]) for rank in range(plan.world_size)]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": plan.rank(local_rank)}}
    return {"TF_CONFIG": dumps(config)}


def horovod_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """What `hvd.init()` needs; with the Gloo controller the key-value server is `rendezvous`, on node 0.

    Host names must differ between nodes: Horovod groups ranks into nodes by them. With MPI, mpirun's own variables say
    who is who.
    """
    environment = pytorch_environment(plan, local_rank)
    values = _horovod_limits(plan)
    values.update(
        {"CONTROLLER": "mpi", "CPU_OPERATIONS": "mpi"} if plan.controller == "mpi" else _gloo(plan, local_rank)
    )
    environment.update({"HOROVOD_" + name: value for name, value in values.items()})
    return environment


def _gloo(plan: Plan, local_rank: int) -> Dict[str, str]:
    values = {
        "HOSTNAME": plan.host(plan.node if plan.home < 0 else plan.home),
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


def _horovod_limits(plan: Plan) -> Dict[str, str]:
    """How long Horovod waits, where the order says so. It gives up on a stall only after it has warned of it."""
    values = {}
    timeout, warning = plan.collective_timeout_seconds, plan.stall_check_seconds
    if timeout:
        warning = min(warning or _STALL_WARNING_SECONDS, timeout)
        values["GLOO_TIMEOUT_SECONDS"] = values["STALL_SHUTDOWN_TIME_SECONDS"] = str(timeout)
    if warning:
        values["STALL_CHECK_TIME_SECONDS"] = str(warning)
    return values


_FRAMEWORKS: Dict[str, Callable[[Plan, int], Dict[str, str]]] = {
    "pytorch": pytorch_environment,
    "tensorflow": tensorflow_environment,
    "horovod": horovod_environment,
}

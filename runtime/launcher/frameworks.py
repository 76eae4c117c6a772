"""What each framework wants to find in a rank's environment. PURE: a plan in, plain data out.

The one rule: a framework starts from its own variables alone, with no agent, ssh or mpirun in between.
"""

from __future__ import annotations

import json
from typing import Callable, Dict

from .topology import Plan, common_environment


def rank_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """Everything one rank is told: the common contract and its framework's own."""
    environment = common_environment(plan, local_rank)
    environment.update(_FRAMEWORKS[plan.framework](plan, local_rank))
    return environment


def pytorch_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """What torchrun sets besides the common part.

    `TORCHELASTIC_USE_AGENT_STORE` is False: no agent holds a store for the ranks, so rank 0 must serve it itself.
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
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if plan.interface:
        for library in ("GLOO", "NCCL", "TP"):
            environment[library + "_SOCKET_IFNAME"] = plan.interface
    return environment


def tensorflow_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """`TF_CONFIG` with every process as a worker, at a port of its own."""
    workers = [
        "{}:{}".format(plan.addresses[rank // plan.workers], plan.worker_ports[rank]) for rank in range(plan.world_size)
    ]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": plan.rank(local_rank)}}
    return {"TF_CONFIG": json.dumps(config)}


def horovod_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """What `hvd.init()` needs with the Gloo controller; the key-value server is `rendezvous`, on node 0.

    Host names must differ between nodes: Horovod groups ranks into nodes by them.
    """
    environment = pytorch_environment(plan, local_rank)
    values = {
        "HOSTNAME": "{}-{}".format(plan.run_id, plan.node),
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
    environment.update({"HOROVOD_" + name: value for name, value in values.items()})
    return environment


_FRAMEWORKS: Dict[str, Callable[[Plan, int], Dict[str, str]]] = {
    "pytorch": pytorch_environment,
    "tensorflow": tensorflow_environment,
    "horovod": horovod_environment,
}

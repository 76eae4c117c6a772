"""Start one submitted run: prepare its network and ports, then become the supervisors of its nodes.

    python -I -S -c "..." < request

The request is a StartRequest as JSON. This process waits for the end of its input. The input ends when the submitter
has recorded the submission, or has died. Without a recorded submission nothing is started. Imports no installed
package, so that it starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from runtime.backends import network
from runtime.backends.local.warm_pool.protocol import StartRequest
from runtime.backends.supervision.node_plan import SupervisorPlan
from runtime.backends.supervision.supervisor import Supervisor


def main() -> None:
    """Detach from the submitter, read the request from stdin, and supervise the run if its submission is recorded."""
    if os.fork():
        os._exit(0)
    request: StartRequest | None = json.loads(sys.stdin.buffer.read() or b"null")
    if request is not None and is_submitted(request):
        supervise(request)


def is_submitted(request: StartRequest) -> bool:
    """Return whether this submission is recorded. A later submission of the same name has another nonce."""
    try:
        submission = json.loads((Path(request["folder"]) / "submission.json").read_bytes())
        return bool(submission["nonce"] == request["nonce"])
    except (OSError, ValueError):
        return False


def supervise(request: StartRequest) -> None:
    """Prepare the nodes' network and ports, and supervise each node in a process and session of its own."""
    plans = request["nodes"]
    _write_output_to_log(plans[0])  # now, so that the log also has errors from before the supervisors start
    # Why the run shares the machine's network; "" if it has its own.
    sharing_reason = network.enter() if request["network"] == "private" else "The setting asks for the host's network."
    if sharing_reason:
        sys.stderr.write(f"The run shares the network of this machine. {sharing_reason}\n")
    elif plans[0]["launcher"]["plan"]["controller"] == "mpi":  # `add_bridge` says why only MPI needs one
        bridge_problem = network.add_bridge()
        if bridge_problem:
            sys.stderr.write(f"{bridge_problem}\n")
    listener = network.listen()
    # One port for the master, then the workers' ports, then spare ports for later rounds.
    worker_ports = request["worker_ports"]
    reserved_ports = [network.reserve_port() for _port in range(1 + worker_ports + request["spare_ports"])]
    port_numbers = [port.getsockname()[1] for port in reserved_ports]
    shared_fields = {
        # TensorFlow's chief listens at the first worker's port; the port for the master then stays unused.
        "master_port": port_numbers[1] if worker_ports else port_numbers[0],
        "worker_ports": port_numbers[1 : 1 + worker_ports],
        "spare_ports": port_numbers[1 + worker_ports :],
        # Whether the node has a network to itself. Several nodes share the run's network namespace.
        "own_network": not sharing_reason and len(plans) == 1,
    }
    for plan in plans:
        plan["launcher"]["plan"].update(shared_fields)
        plan["launcher"]["control_port"] = listener.getsockname()[1]
        plan["nonce"] = request["nonce"]
    # This process supervises node 0 and keeps the ports reserved until the run ends. Forks supervise the other nodes.
    for plan in plans[1:]:
        if not os.fork():
            for inherited in (listener, *reserved_ports):
                inherited.close()
            _supervise_node(plan, request["locks"])
            os._exit(0)
    plans[0]["listener"] = listener.detach()
    _supervise_node(plans[0], request["locks"])


def _supervise_node(plan: SupervisorPlan, locks: list[int]) -> None:
    """Supervise the node of this plan to its end.

    Of `locks`, keep only the node's own, which shows that its supervisor lives.
    """
    node = plan["node"]
    # The process of node 0 already leads a session: the daemon calls setsid in its fork, and in a cold start the pool's
    # client starts the process in a new session.
    if node:
        os.setsid()
    for lock_node, lock in enumerate(locks):
        if lock_node == node:
            os.set_inheritable(lock, False)  # the node's processes must not hold it after the supervisor has died
        else:
            os.close(lock)
    _write_output_to_log(plan)
    Supervisor(plan).run()


def _write_output_to_log(plan: SupervisorPlan) -> None:
    """Let this process write its output and errors to the log of the node's supervisor."""
    path = f"{plan['folder']}/logs/supervisor-{plan['node']}.log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)

"""What a submission starts: one process that makes the run's network and ports, and becomes its supervisors.

The order comes over stdin, as JSON. The one rule: nothing happens before the submission is on record. Its end of input
is the submitter's word that it is, or that the submitter is dead. Standard library only, so that it starts in
milliseconds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from runtime.backends import network
from runtime.backends.supervisor import Supervisor


def main() -> None:
    """Detach, read the order from stdin, and supervise: if the submission is on record, else vanish."""
    if os.fork():
        os._exit(0)
    order = json.loads(sys.stdin.buffer.read() or b"null")
    if order is not None and is_submitted(order):
        supervise(order)


def is_submitted(order: dict[str, Any]) -> bool:
    """Whether this very submission is on record; a later one of the same name has another nonce."""
    try:
        return bool(json.loads((Path(order["folder"]) / "submission.json").read_bytes())["nonce"] == order["nonce"])
    except (OSError, ValueError):
        return False


def supervise(order: dict[str, Any]) -> None:
    """Make what the nodes share, and be a supervisor for each, in a process and session of its own."""
    why_shared = network.enter() if order["network"] == "private" else "The setting asks for the host's network."
    if why_shared:
        sys.stderr.write(f"The run shares the network of this machine. {why_shared}\n")
    elif order["nodes"][0]["launcher"]["plan"]["controller"] == "mpi":
        sys.stderr.write(f"{network.add_bridge()}\n".lstrip())
    listener = network.listen()
    ports = [network.reserve_port() for _port in range(1 + order["worker_ports"] + order["spare_ports"])]
    numbers = [port.getsockname()[1] for port in ports]
    workers = order["worker_ports"]
    shared = {
        # TensorFlow's chief listens at the first worker's port.
        "master_port": numbers[1] if workers else numbers[0],
        "worker_ports": numbers[1 : 1 + workers],
        "spare_ports": numbers[1 + workers :],
        "own_network": not why_shared and len(order["nodes"]) == 1,
    }
    for node in order["nodes"]:
        node["launcher"]["plan"].update(shared)
        node["launcher"]["control_port"] = listener.getsockname()[1]
        node["network"] = "host" if why_shared else "private"
        node["nonce"] = order["nonce"]
    # Node 0 is this process: it holds the ports, and with them the run, to its end.
    for node in order["nodes"][1:]:
        if not os.fork():
            for shut in (listener, *ports):
                shut.close()
            _be(node, order["locks"])
            os._exit(0)
    first = order["nodes"][0]
    first["listener"] = listener.detach()
    _be(first, order["locks"])


def _be(node: dict[str, Any], locks: list[int]) -> None:
    """Supervise this node; of the locks, which say that a supervisor lives, keep its own."""
    if node["node"]:
        os.setsid()
    for number, lock in enumerate(locks):
        if number == node["node"]:
            os.set_inheritable(lock, False)
        else:
            os.close(lock)
    log = os.open(f"{node['folder']}/logs/supervisor-{node['node']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    Supervisor(node).run()

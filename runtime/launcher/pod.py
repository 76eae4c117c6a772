r"""The first process of a pod: one node of a run on Kubernetes, from its order to its signed last record.

    python3 -I -S /trainyard/launcher/launcher.pyz --pod

It hides names that resolve late, pipes, clocks and kills. Its one rule: it needs nobody. Once it has read its order and
its environment, the deadline, the log caps and the record are its own, whether a console, an API server or a kubelet
lives or not. The customer's code shares its user id and its files, so nothing that lies in a file is believed: the
order is read before that code starts, and the record is signed (`signed`). As first process of its pid namespace it
cannot be killed from inside, and all that runs ends with it.

Environment, of which nothing reaches the ranks:

    TRAINYARD_NODE         this node's number (the Job's completion index)
    TRAINYARD_ADDRESS      this pod's IP
    TRAINYARD_TOKEN        what the run's launchers know each other by
    TRAINYARD_RECORD_KEY   what the record is signed with
    TRAINYARD_ORDER        where the order is; /trainyard/order/order.json unless set
    TRAINYARD_TERMINATION  where the last record goes; /dev/termination-log unless set

While the node ends it looks at one file: `nodes/stop.json` of the run's folder, where whoever wants the end sooner
than the kubelet was told leaves word (`signed.sign_stop`): no kubelet cuts short a wait that has begun.

What else is in the environment is the image's: ranks get it, without TRAINYARD_* and KUBERNETES_*, with HOME=/tmp and
USER=trainyard (the user id may be unknown to the image), and what the order adds.

order.json is one object, the same for every node of the run; readers skip fields that they do not know:

    run                 the run's name
    names               [one host name for each node]; resolved until they answer, this node's own is not asked
    folder              the run's folder, with `logs/` and `nodes/` (made where missing); /trainyard/run-root
    control_port        where node 0's launcher listens for the others
    start_seconds       how long the nodes may take to find each other, from this process's start (images may be pulled)
    deadline_seconds    how long all nodes may run, from the moment that they do; 0: no limit
    grace_seconds       the part of it, at its end, in which ranks have SIGTERM and may write a checkpoint; also how
                        long a stop by the kubelet (SIGTERM from outside) leaves them
    log_limit_bytes     of each rank's output, in the file and again on stdout
    memory_bytes        what the pod has, for the message of a rank that was killed for memory
    disk_bytes          what the run may add to the folders in `written`; 0: not measured
    written             {"run": path, "checkpoints": path, "workspace"?: path}, as the pod sees them
    gpus                GPUs of each node; 0
    python              the interpreter of the ranks; empty: the one that runs this
    builtin_script      a script of the platform's own, such as `smoke`; else empty, and the plan's `script` counts
    environment         {name: value} for the ranks, over the image's
    plan                what `runtime.launcher.topology.Plan` names, without `node` and `addresses`: run_id, nodes,
                        workers, framework, backend, master_port, script (absolute), arguments, epochs, lr, batch_size,
                        datasets, datasets_path, workspace, run_dir, checkpoint_dir, restart_count, omp_threads,
                        interface ("": the frameworks' choice), worker_ports and spare_ports (as for local runs),
                        min_nodes, controller, collective_timeout_seconds, stall_check_seconds, hang_seconds, cpus,
                        own_network

What it leaves in the run's folder is what a local run leaves: `logs/rank-<rank>.log`, `logs/node-<node>.log` (the
platform's own), `logs/stacks-<rank>.txt`, `nodes/<node>.samples.jsonl`, and `nodes/<node>.json`, signed, whose time of
change is a sign of life. Ranks' output goes to stdout as well, line by line, for storage that the console cannot see:
`speaker` says how.

The record (nodes/<node>.json; the last one, cut to 4096 bytes, is the termination message), fields in this order:

    run, node           whose it is
    phase               starting, running, stopping, ended. Only `ended` is a last record: an older one can be replayed
    address             the pod's IP
    started_at          when all nodes ran, by this node's clock; null: no code of the customer's ever ran here
    finished_at         when nothing of the run was left here
    exit_code           0: every rank succeeded
    detail              what is worth knowing and no cause
    causes              [as in `report`: kind, code, at, node, rank?, exit_code?, signal?, message?, data?, last_lines?]
    round, members      of an elastic run, as for local runs
    progress_at         the last sign of progress
    checkpoint_at       when the newest checkpoint was written, by its file's word (node 0)
    signature

A `node_lost` or `platform_error` among the causes of a run whose `started_at` is set is what the launchers believe, and
could be the doing of the customer's code (it can stop a launcher for a while): who bills asks the API server. What the
launcher of this very node fell of is told as `code_failed` with the code `launcher_killed`: no platform does that.
The exit code of this process is 0 where the node came to a good end, else 1.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Dict, Mapping, NamedTuple

from .pod_node import PodNode
from .report import shield

_ORDER = "/trainyard/order/order.json"
_TERMINATION = "/dev/termination-log"
_NOT_FOR_RANKS = ("TRAINYARD_", "KUBERNETES_")
_HOME = "/tmp"  # noqa: S108 - the pod's own


class Place(NamedTuple):
    """What is a pod's own."""

    node: int
    address: str
    token: str
    key: str
    order: str
    termination: str
    environment: Dict[str, str]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Read it from a pod's environment. Raises KeyError, ValueError."""
        return cls(
            node=int(environment["TRAINYARD_NODE"]),
            address=environment["TRAINYARD_ADDRESS"],
            token=environment["TRAINYARD_TOKEN"],
            key=environment["TRAINYARD_RECORD_KEY"],
            order=environment.get("TRAINYARD_ORDER", _ORDER),
            termination=environment.get("TRAINYARD_TERMINATION", _TERMINATION),
            environment=for_ranks(environment),
        )


def for_ranks(environment: Mapping[str, str]) -> Dict[str, str]:
    """What of this process's environment the ranks get."""
    kept = {name: value for name, value in environment.items() if not name.startswith(_NOT_FOR_RANKS)}
    kept.update(HOME=_HOME, USER="trainyard", LOGNAME="trainyard")
    kept.setdefault("LANG", "C.UTF-8")
    kept.setdefault("PATH", os.defpath)
    return kept


def main() -> int:
    """Be the first process of a pod; returns its exit code."""
    shield()
    os.umask(0o002)
    try:
        place = Place.of(os.environ)
        order = json.loads(Path(place.order).read_bytes())
    except (OSError, KeyError, ValueError) as error:
        sys.stderr.write("This pod has no order that can be read: {!r}\n".format(error))
        return 1
    os.environ.clear()
    return PodNode(place, order).run()

"""The first process of a pod: runs one node of a run on Kubernetes, from its plan to its signed last record.

    python3 -I -S /trainyard/launcher/launcher.pyz --pod

This process reads its plan and its environment once and then depends on nothing else. It enforces the deadline and the
log limits and writes the record even if no console, API server or kubelet runs. Customer code has the same user and can
change files of this process. The plan is therefore read before that code starts, and the record is signed
(`signed_record`). The first process of a pid namespace cannot be killed from inside, and all others end with it.

Environment; none of it reaches the ranks, except secrets:

    TRAINYARD_NODE         this node's number (the Job's completion index)
    TRAINYARD_ADDRESS      this pod's IP
    TRAINYARD_TOKEN        the secret that the run's launchers share
    TRAINYARD_RECORD_KEY   the key that signs the record
    TRAINYARD_SECRET_*     the order's secrets, by name; the ranks get them without the prefix
    TRAINYARD_ORDER        path of the plan, which older versions called order; default /trainyard/order/order.json
    TRAINYARD_TERMINATION  path of the last record; default /dev/termination-log

While the node ends, this process checks `nodes/stop.json` in the run's folder for a signed request to end sooner
(`signed_record.sign_stop`). The file is needed because a kubelet never shortens a grace period that has begun.

The rest of the environment is the image's. Ranks get it without TRAINYARD_* and KUBERNETES_*, with HOME=/tmp,
USER=trainyard (the image may not know the user id), and the plan's `environment`.

The plan is one JSON object, the same for every node of the run; unknown fields are ignored:

    run                 the run's name
    names               [the host name of each node]. Node 0's is resolved repeatedly until the ranks run, since DNS may
                        know it late or return the address of an earlier pod
    folder              the run's folder, with `logs/` and `nodes/` (created if missing); default /trainyard/run-root
    control_port        where node 0's launcher listens for the others
    start_seconds       how long the nodes may take to meet, from this process's start; images may still be pulled
    deadline_seconds    how long the ranks may run, from their start; 0: no limit
    grace_seconds       how long before the deadline the ranks get SIGTERM, so that they can write a checkpoint; also
                        the grace period when the kubelet stops the pod
    log_limit_bytes     limit of each rank's output, in the file and on stdout
    memory_bytes        the pod's memory limit, for the message about an OOM kill
    disk_bytes          what the run may add to its writable folders; 0: not measured
    disk_by_quota       true if that is the rest of the organization's storage quota
    written             the folders that the run may write to: {"run": path, "checkpoints": path, "outputs"?: path,
                        "workspace"?: path}, as the pod sees them. "run" is the run's whole folder
    local               the folders on the disk of each node's own machine: {"tmp": path}
    local_disk_bytes    what each node may add to them; 0: not measured. A file counts for at least 4 KiB, or for its
                        inode's share of the disk
    platform_bytes      bytes in the run's folder for the files of this process, which do not count as the run's
    gpus                GPUs of each node; default 0
    python              the interpreter of the ranks; empty: this process's
    builtin_script      a script of the platform, such as `smoke`; if empty, the plan's `script` is used
    environment         {name: value} for the ranks, added to the image's
    variables           {name: value} that the customer has set, for the ranks
    packages            folder of packages in addition to the image's, or ""
    plan                the fields of `runtime.launcher.topology.Plan` except `node` and `addresses`

The run's folder gets the same files as a local run's: `logs/rank-<rank>.log`, `logs/node-<node>.log` (the
launcher's output), `logs/stacks-<rank>.txt`, `nodes/<node>.samples.jsonl`, and the signed `nodes/<node>.json`. The
modification time of the last one is the heartbeat. The ranks' output also goes to stdout (`log_mux`), in case the
console cannot see the storage.

Fields of the record, in this order. The last record, cut to 4096 bytes, is the termination message:

    run, node
    phase               starting, running, stopping, ended. Trust only `ended`: code can put back an older record
    address             the pod's IP
    started_at          when all ranks of this node had started, by its clock; null: they never had.
                        With MPI: when the first rank of any node had started
    finished_at         when no process of the run was left here
    exit_code           0: every rank succeeded
    detail              sentences that explain, but are no cause
    causes              [as in `protocol`: kind, code, at, node, rank?, exit_code?, signal?, message?, data?,
                        last_lines?]
    round, members      of an elastic run: the current round's number, and the messages `members` of `protocol` so far
    progress_at         the last sign of progress
    checkpoint_at       modification time of the newest checkpoint file (node 0)
    signature

If `started_at` is set, a `node_lost` or `platform_error` among the causes proves nothing. Customer code can provoke it
by stopping a launcher for a while, so only the API server can prove a platform fault. The end of this
node's own launcher is reported as `code_failed` with the code `launcher_killed`, since the platform never ends it. This
process exits with 0 if the node succeeded, else with 1.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ..protocol import make_undumpable
from .identity import PodIdentity
from .node import PodNode


def main() -> int:
    """Run as the first process of a pod; return its exit code."""
    make_undumpable()
    os.umask(0o002)  # the storage is shared by the pod's group
    try:
        pod = PodIdentity.from_environment(os.environ)
        plan = json.loads(Path(pod.plan_path).read_bytes())
    except (OSError, KeyError, ValueError) as error:
        sys.stderr.write("This pod's plan cannot be read: {!r}\n".format(error))
        return 1
    os.environ.clear()  # the secrets in it must not reach any child process
    return PodNode(pod, plan).run()

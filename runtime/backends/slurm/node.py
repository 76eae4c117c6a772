"""The process that Slurm starts for each node of a run: `start FOLDER NONCE`, as one task of the run's job.

It meets the other nodes through shared storage, reserves ports and becomes the node's supervisor. It reads the order of
the run (`ORDER_FILE`), which contains secrets and the token of its launchers, before customer code begins; node 0 then
deletes it. Nothing in the sandbox can read or signal this process. Standard library only, and only what `program`
copies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from runtime.backends import host, launch_plan, network, sandbox
from runtime.backends.supervision import submission
from runtime.backends.supervision.limits import Limits
from runtime.backends.supervision.node_plan import SupervisorPlan
from runtime.backends.supervision.process_tree import ProcessTree
from runtime.backends.supervision.supervisor import Supervisor
from runtime.files import write_json
from runtime.launcher import cgroup_events
from runtime.launcher.record import Record, Verdict
from runtime.specs import Framework, RunSpec

ORDER_FILE = "order.json"
STOP_SIGNAL = signal.SIGURG
"""Sent by the console after it has written `stop.json`. Slurm signals every process of a task, also the ranks, which
ignore this one by default. SIGTERM comes from Slurm itself, which does not say why."""
_RECORD_SECONDS = 60.0
"""How long the submission may take to be recorded after the job was submitted, as visible on shared storage."""
_POLL_SECONDS = 0.1
"""Interval of looks at shared storage, which sends no events."""
_SIOCGIFADDR = 0x8915
"""From <linux/sockios.h>: an interface's IPv4 address."""


class Order(TypedDict):
    """What the nodes of a run need to know, as JSON in its folder. Paths are the same on all machines."""

    spec: dict[str, Any]
    secrets: dict[str, str]
    nonce: str
    token: str
    folder: str
    change_file: str
    checkpoints: str
    outputs: str
    image: str
    launcher: str
    disk_mib: int
    start_seconds: int
    interface: str
    bubblewrap: str
    own_bubblewrap: str
    """The console's bwrap, for machines without one; it may lie on shared storage too."""


class Meeting(TypedDict):
    """What a node tells the others: its address, and the ports that it has reserved. Node 0 also names its listener."""

    address: str
    ports: list[int]
    control_port: int


class SlurmLimits(Limits):
    """The limits of one node. Slurm's own control group may kill processes for memory before a check finds out."""

    def __init__(self, plan: SupervisorPlan, record: Record, tree: ProcessTree) -> None:
        super().__init__(plan, record, tree)
        self._groups = _memory_groups()
        self._oom.count(self._kills(), 0.0)
        self._oom.increased_at = None

    def _kills(self) -> int:
        return max((cgroup_events.oom_kills(group) for group in self._groups), default=0)

    def explain_failure(self, failure: Mapping[str, Any], now: float) -> Verdict | None:
        """Return the limit that explains a failed rank or a lost node; None if none does."""
        self._oom.count(self._kills(), now)
        if failure["kind"] == "code_failed" and self.is_recent(self._oom, now):
            return self.out_of_memory(failure.get("rank"))
        return super().explain_failure(failure, now)

    def killed_for_memory(self) -> Verdict | None:
        """Return the verdict if the kernel killed a process of the job for its memory; None if it did not."""
        self._oom.count(self._kills(), time.monotonic())
        return None if self._oom.increased_at is None else self.out_of_memory(None)


class SlurmTree(ProcessTree):
    """The process tree of one node. Slurm's SIGTERM reaches every process of a task, also bubblewrap.

    Its death would end the sandbox at once, but the ranks have a grace period. The launcher resets the signal.
    """

    def _prepare(self) -> None:
        super()._prepare()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class SlurmRecord(Record):
    """A record on shared storage, where each notification costs round trips to the storage server."""

    _NOTIFY_SECONDS = 0.25

    def notify(self) -> None:
        """Wake the readers, and then not again for a moment unless the node ends."""
        super().notify()
        self.delay_notification(self._NOTIFY_SECONDS)


class SlurmSupervisor(Supervisor):
    """The supervisor of one node, as a task of a job."""

    # Longer intervals than on local disks, since many nodes share the storage.
    _heartbeat_seconds = 5.0
    _metrics_seconds = 1.0
    _stop_seconds = 1.0
    _stop_checked_at = 0.0

    def _create_record(self, plan: SupervisorPlan, folder: Path, address: str) -> Record:
        machine = {"machine": os.environ.get("SLURMD_NODENAME", socket.gethostname())}
        return SlurmRecord(folder, Path(plan["change_file"]), node=plan["node"], address=address, first_fields=machine)

    def _create_tree(self, plan: SupervisorPlan, cgroups_file: Path) -> ProcessTree:
        return SlurmTree(plan, cgroups_file)

    def _create_limits(self, plan: SupervisorPlan, record: Record, tree: ProcessTree) -> Limits:
        return SlurmLimits(plan, record, tree)

    def _catch_signals(self) -> None:
        super()._catch_signals()
        signal.signal(STOP_SIGNAL, lambda _number, _frame: None)  # a handler, so that the signal wakes the selector

    def _check_for_stop(self) -> None:
        now = time.monotonic()
        if now - self._stop_checked_at >= self._stop_seconds:
            self._stop_checked_at = now
            super()._check_for_stop()

    def _handle_signals(self, numbers: set[int]) -> None:
        if numbers & {STOP_SIGNAL, signal.SIGTERM}:
            super()._check_for_stop()
        # From Slurm: a preemption, its time limit, a failed machine of the run, or an administrator. The console asks
        # Slurm which of them it was.
        if signal.SIGTERM in numbers and self._record.phase != "stopping":
            self._limits.kill_by(time.monotonic() + float(self._plan["grace_seconds"]))
            message = f"Slurm ended node {self._node}."
            self._end(Verdict("node_lost", "evicted", message, data={"ended_by_slurm": True}))


def main(folder: Path, nonce: str) -> int:
    """Supervise this task's node to its end; return the exit code of the task."""
    # Until the supervisor handles signals: a request to stop is read when it starts, and Slurm's SIGTERM ends the task.
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    order = _read_order(folder, nonce)
    if order is None:
        sys.stderr.write("This job belongs to no recorded run, so it ends.\n")
        return 1
    node = int(os.environ["SLURM_PROCID"])
    spec = RunSpec.from_json(json.dumps({**order["spec"], "secrets": {}}))
    object.__setattr__(spec, "secrets", order["secrets"])
    with contextlib.ExitStack() as stack:
        address = _own_address(order["interface"])
        listener = None if node else network.listen(address)
        reserved = [stack.enter_context(network.reserve_port()) for _port in range(_ports_of(spec, node))]
        meeting: Meeting = {
            "address": address,
            "ports": [each.getsockname()[1] for each in reserved],
            "control_port": 0 if listener is None else listener.getsockname()[1],
        }
        meetings = _meet(folder, node, spec.nodes, meeting, order["start_seconds"])
        if meetings is None:
            sys.stderr.write(f"The {spec.nodes} nodes of the run did not meet.\n")
            return 1
        if not node:
            (folder / ORDER_FILE).unlink(missing_ok=True)
        plan = _plan(order, spec, node, meetings)
        plan["listener"] = None if listener is None else listener.detach()
        SlurmSupervisor(plan).run()
    return 0


def _read_order(folder: Path, nonce: str) -> Order | None:
    """Return the order once its submission is recorded; None if another one is, or none in time."""
    give_up_at = time.monotonic() + _RECORD_SECONDS
    while time.monotonic() < give_up_at:
        refresh(folder)
        with contextlib.suppress(OSError, ValueError):
            if json.loads((folder / "submission.json").read_bytes())["nonce"] != nonce:
                return None
            order: Order = json.loads((folder / ORDER_FILE).read_bytes())
            return order if order["nonce"] == nonce else None
        time.sleep(_POLL_SECONDS)  # shared storage sends no events
    return None


def refresh(folder: Path) -> None:
    """List a folder, which makes an NFS client ask its server for files that were missing before."""
    with contextlib.suppress(OSError):
        list(folder.iterdir())


def _ports_of(spec: RunSpec, node: int) -> int:
    """Return how many ports this node reserves: those of its workers, and on node 0 the master's and spare ones."""
    needed = launch_plan.ports_needed(spec)
    workers = needed["worker_ports"] // spec.nodes
    return workers if node else 1 + workers + needed["spare_ports"]


def _meet(folder: Path, node: int, nodes: int, meeting: Meeting, seconds: float) -> list[Meeting] | None:
    """Publish this node's meeting and return those of all nodes; None if they do not come in time."""
    write_json(folder / "nodes" / f"{node}.meeting", meeting)
    meetings: dict[int, Meeting] = {}
    give_up_at = time.monotonic() + seconds
    while len(meetings) < nodes:
        if time.monotonic() > give_up_at:
            return None
        refresh(folder / "nodes")
        for other in set(range(nodes)) - meetings.keys():
            with contextlib.suppress(OSError, ValueError):
                meetings[other] = json.loads((folder / "nodes" / f"{other}.meeting").read_bytes())
        if len(meetings) < nodes:
            time.sleep(_POLL_SECONDS)  # as above
    return [meetings[other] for other in range(nodes)]


def _plan(order: Order, spec: RunSpec, node: int, meetings: list[Meeting]) -> SupervisorPlan:
    """Return the plan of this node's supervisor."""
    folder = Path(order["folder"])
    gpus = _own_gpus() if spec.resources.gpus else {}
    node_sandbox = _sandbox(order, spec, node, tuple(gpus.values()))
    environment = sandbox.base_environment(
        node_sandbox.image, list(gpus), has_packages=node_sandbox.packages is not None
    )
    plan = submission.node_plan(
        spec,
        node,
        node_sandbox,
        environment,
        bubblewrap=order["bubblewrap"] or shutil.which("bwrap") or order["own_bubblewrap"],
        disk_mib=order["disk_mib"],
        cgroups=False,  # Slurm's own hold the job
    )
    plan["folder"] = str(folder)
    plan["change_file"] = order["change_file"]
    plan["fork_server"] = ""
    plan["nonce"] = order["nonce"]
    plan["peers_are_here"] = False
    first, workers = meetings[0], launch_plan.ports_needed(spec)["worker_ports"] // spec.nodes
    worker_ports = [port for number, each in enumerate(meetings) for port in _worker_ports(each, number, workers)]
    plan["launcher"]["token"] = order["token"]
    plan["launcher"]["control_port"] = first["control_port"]
    plan["launcher"]["plan"].update(
        addresses=[each["address"] for each in meetings],
        interface=order["interface"] or ("lo" if first["address"] == network.ADDRESS else ""),
        # TensorFlow's chief listens at the first worker's port.
        master_port=worker_ports[0] if spec.framework is Framework.TENSORFLOW else first["ports"][0],
        worker_ports=worker_ports,
        spare_ports=first["ports"][1 + workers :],
        own_network=False,
    )
    return plan


def _worker_ports(meeting: Meeting, node: int, workers: int) -> list[int]:
    start = 0 if node else 1  # node 0's first port is the master's
    return meeting["ports"][start : start + workers]


def _sandbox(order: Order, spec: RunSpec, node: int, gpus: tuple[int, ...]) -> sandbox.Sandbox:
    folder, image = Path(order["folder"]), Path(order["image"])
    hostname = f"{spec.name}-{node}"
    etc = folder / "etc" / str(node)
    sandbox.write_etc(etc, hostname)
    return sandbox.Sandbox(
        hostname=hostname,
        run_folder=folder / "run",
        checkpoint_folder=Path(order["checkpoints"]),
        output_folder=Path(order["outputs"]),
        etc_folder=etc,
        image=image,
        interpreter_prefixes=sandbox.interpreter_prefixes(image),
        launcher=Path(order["launcher"]),
        mounts=spec.mounts,
        datasets_target=spec.datasets_target,
        models_target=spec.models_target,
        memory_bytes=spec.resources.memory_mib << 20,
        gpus=gpus,
        packages=Path(spec.packages) if spec.packages else None,
    )


def _own_address(interface: str) -> str:
    """Return this machine's address on an interface, or that by which it reaches the machine of the batch script."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
            return socket.inet_ntoa(answer[20:24])
        # Connecting a datagram socket sends nothing. Any port does.
        probe.connect((os.environ.get("SLURM_LAUNCH_NODE_IPADDR", network.ADDRESS), 9))
        return str(probe.getsockname()[0])


def _own_gpus() -> dict[str, int]:
    """Return the GPUs that Slurm gave to this task: the number of the device file by UUID."""
    gpus = {str(gpu.index): gpu.uuid for gpu in host.gpus()}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    minors = _minors()
    return {uuid: minors[uuid] for uuid in (gpus.get(name, name) for name in visible) if uuid in minors}


def _minors() -> dict[str, int]:
    """Return the numbers of the machine's GPU device files by UUID."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    minors, uuid = {}, ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listing = subprocess.run([tool, "-q"], capture_output=True, text=True, timeout=30, check=True).stdout
        for name, _, value in (line.partition(":") for line in listing.splitlines()):
            if name.strip() == "GPU UUID":
                uuid = value.strip()
            elif name.strip() == "Minor Number" and value.strip().isdigit():
                minors[uuid] = int(value)
    return minors


def _memory_groups() -> list[str]:
    """Return the folder of this process's control group; none with v1, where a check measures the memory."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _number, controllers, path = line.split(":", 2)
            if not controllers and path != "/":
                return [f"{cgroup_events.ROOT}{path}"]
    return []


def start() -> None:
    """Run `main` with the command line's arguments and end this process."""
    exit_code = main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)

"""The process that Slurm starts for each node of a run, as one task of the run's job: `start FOLDER NONCE`.

FOLDER is the run's folder, and NONCE identifies the run's submission. This process reads the run's plan
(`RUN_PLAN_FILE`), which contains secrets. It exchanges addresses and ports with the other nodes through shared storage,
and becomes the node's supervisor. Node 0 deletes the plan before customer code begins. If the run uses a customer's own
image, node 0 imports it (`image_import`). Nothing in the sandbox can read or signal this process. Imports only the
standard library and the modules that `runtime.backends.slurm.program` copies to compute nodes, which have no others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

from runtime.backends import host, launch_plan, network, sandbox
from runtime.backends.container import Container, host_interpreter
from runtime.backends.slurm import image_import
from runtime.backends.slurm.evidence import ENDED_BY_SLURM, Cause, new_cause
from runtime.backends.slurm.image_import import ImageContents, ImagePlan, ImportFailed, ImportStopped
from runtime.backends.supervision import submission
from runtime.backends.supervision.limits import Limits
from runtime.backends.supervision.node_plan import SupervisorPlan
from runtime.backends.supervision.process_tree import ProcessTree
from runtime.backends.supervision.supervisor import Supervisor
from runtime.files import refresh_listing, write_json
from runtime.launcher import cgroup_events
from runtime.launcher.record import Record, Verdict
from runtime.specs import FailureCode, Framework, Outcome, RunSpec

RUN_PLAN_FILE = "order.json"
"""The file in the run's folder that holds its RunPlan. Earlier versions gave it this name, and their runs may still
exist."""
STOP_SIGNAL = signal.SIGURG
"""The signal that the console sends through Slurm after it has written `stop.json`. Slurm signals every process of a
task, so the ranks get it too; by default a process ignores SIGURG. SIGTERM is not used, so that each SIGTERM comes from
Slurm itself."""
_SUBMISSION_WAIT_SECONDS = 60.0
"""How long after the job's start `submission.json` may take to be written and visible. NFS clients may cache for half a
minute that the file is missing."""
IMPORT_FILE = "import.json"
"""The file in the run's folder that node 0 writes when it begins to import the run's own image, and again with the
image's contents after the import. While `is_ready` is false, the console shows that the image is being imported. Other
nodes wait for the contents here, so they need not wait until they see the image's own `image.json`."""
_IMPORT_MARGIN_SECONDS = 60.0
"""Additional time for which the other nodes wait for the import: node 0 needs seconds to write the result."""
_POLL_SECONDS = 0.1
"""Interval between two reads of shared storage, which sends no events: short, since each read delays the start."""
_SIGTERM_SECONDS = 0.5
"""How long to wait for Slurm's SIGTERM to this process after a SIGTERM ended a rank. `evidence` counts both as one
event if they are at most a second apart, so this is shorter."""
_SIOCGIFADDR = 0x8915
"""From <linux/sockios.h>: an interface's IPv4 address."""


class RunPlan(TypedDict):
    """The plan of a run, for all of its nodes, as JSON in its folder. Paths are the same on all machines.

    `secrets` are variables of the ranks. `nonce` identifies the submission, and the launchers recognize each other by
    `token`. `change_file` is as in `SupervisorPlan`. `checkpoints`, `outputs`, `image` and `launcher` are folders.
    `disk_mib`, `start_seconds`, `interface` and `bubblewrap` are settings of the cluster (`SlurmConfig`).
    """

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
    own_image: ImagePlan | None
    """How to import the run's own image; None if the image is a built-in one."""
    fallback_bubblewrap: str
    """The console's bwrap, for machines that have none. They can start it only if it lies on shared storage."""


class Endpoint(TypedDict):
    """The address and the reserved ports of a node, which the other nodes need to know.

    `ports` are those of the node's workers; on node 0 the master port precedes them, and the spare ports follow.
    `control_port` is where node 0's launcher listens; 0 on other nodes.
    """

    address: str
    ports: list[int]
    control_port: int


class GpusMissing(Exception):
    """This task has fewer GPUs than its node spec. The message is the reason why the run ends."""


class SlurmLimits(Limits):
    """The limits of one node. Counts the OOM kills in Slurm's control group, in addition to the checks of `Limits`.

    The kernel may kill a process for the group's memory limit before a check measures the memory.
    """

    def __init__(self, plan: SupervisorPlan, record: Record, tree: ProcessTree) -> None:
        super().__init__(plan, record, tree)
        self._cgroups = _memory_cgroups()
        # OOM kills from before this node started do not count.
        self._oom_counter.update(self._count_oom_kills(), 0.0)
        self._oom_counter.increased_at = None

    def _count_oom_kills(self) -> int:
        return max((cgroup_events.oom_kills(group) for group in self._cgroups), default=0)

    def explain_failure(self, failure: Mapping[str, Any], now: float) -> Verdict | None:
        """Return the limit that explains a failed rank or a lost node; None if none does."""
        self._oom_counter.update(self._count_oom_kills(), now)
        if failure["kind"] == "code_failed" and self.is_recent(self._oom_counter, now):
            return self.out_of_memory_verdict(failure.get("rank"))
        return super().explain_failure(failure, now)

    def find_memory_kill(self) -> Verdict | None:
        """Return the verdict if the kernel's OOM killer has killed a process of the job; None if it has not."""
        self._oom_counter.update(self._count_oom_kills(), time.monotonic())
        return None if self._oom_counter.increased_at is None else self.out_of_memory_verdict(None)


class SlurmTree(ProcessTree):
    """The process tree of one node, in which bubblewrap ignores SIGTERM.

    Slurm's SIGTERM reaches every process of a task. If bubblewrap died of it, the sandbox would end at once, without
    the ranks' grace period. The launcher inherits the ignored signal and restores its default action.
    """

    def _prepare_child(self) -> None:
        super()._prepare_child()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class SlurmRecord(Record):
    """A record on shared storage, where each notification costs round trips to the storage server."""

    _MIN_NOTIFY_SECONDS = 0.25
    """Minimum interval between two notifications: the interval at which `SlurmBackend.changes` reads them."""

    def notify(self) -> None:
        """Notify the readers, and delay the next notification. The notification of the node's end is never delayed."""
        super().notify()
        self.delay_notification(self._MIN_NOTIFY_SECONDS)


class SlurmSupervisor(Supervisor):
    """The supervisor of one node, as a task of a job."""

    # Intervals of heartbeats, of checks of METRICS_FILE and of checks of `stop.json`. They are longer than on local
    # disks, since many nodes share the storage.
    _heartbeat_seconds = 5.0
    _metrics_seconds = 1.0
    _stop_check_seconds = 1.0
    _stop_checked_at = 0.0  # when `_check_for_stop` last read the file (monotonic)

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
        if now - self._stop_checked_at >= self._stop_check_seconds:
            self._stop_checked_at = now
            super()._check_for_stop()

    def _handle_signals(self, numbers: set[int]) -> None:
        """End the node if the console requests it or Slurm has sent SIGTERM."""
        if numbers & {STOP_SIGNAL, signal.SIGTERM}:
            super()._check_for_stop()  # at once, and not only after `_stop_check_seconds`
        # SIGTERM comes from Slurm. Possible reasons are a preemption, the job's time limit, a failed machine of the run
        # and an administrator's scancel. `evidence` finds the reason in Slurm's report.
        if signal.SIGTERM not in numbers:
            return
        verdict = Verdict(
            kind="node_lost", code="evicted", message=f"Slurm ended node {self._node}.", data={ENDED_BY_SLURM: True}
        )
        if self._rank_ended_by_sigterm_first():
            self._record.add_cause(verdict)  # directly, since `_end` ignores verdicts once the ranks have ended
        elif self._record.phase != "stopping":  # else the node is ending already
            self._limits.kill_by(time.monotonic() + float(self._plan["grace_seconds"]))
            self._end(verdict)

    def _rank_ended_by_sigterm_first(self) -> bool:
        """Return whether a rank died of SIGTERM, but this process has not recorded a SIGTERM to itself (yet).

        The SIGTERM may be Slurm's, which signals the processes of a node one after another. So ranks may end before
        their supervisor is signalled.
        """
        causes = self._record.causes
        was_signalled = any((cause.get("data") or {}).get(ENDED_BY_SLURM) for cause in causes)
        return not was_signalled and any(cause.get("signal") == "SIGTERM" for cause in causes)

    def _add_final_data(self) -> None:
        # The record must have Slurm's SIGTERM as a cause, and not only the ranks that it ended.
        give_up_at = time.monotonic() + _SIGTERM_SECONDS
        while self._rank_ended_by_sigterm_first() and (seconds := give_up_at - time.monotonic()) > 0:
            if select.select([self._caught_signals], [], [], seconds)[0]:
                self._read_signals()
        super()._add_final_data()


def main(folder: Path, nonce: str) -> int:
    """Supervise this task's node to its end; return the exit code of the task."""
    # Until the supervisor handles signals, STOP_SIGNAL may be ignored: the supervisor's first check reads `stop.json`.
    # SIGTERM has its default action until then and ends this process; an import delays that (`_delayed_sigterm`).
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    run_plan = _read_run_plan(folder, nonce)
    if run_plan is None:
        sys.stderr.write("This job belongs to no recorded run, so it ends.\n")
        return 1
    node = int(os.environ["SLURM_PROCID"])
    is_hub = node == 0  # the node to whose launcher the others connect
    # A spec as JSON has no secrets, so the plan has them separately.
    spec = dataclasses.replace(RunSpec.from_json(json.dumps(run_plan["spec"])), secrets=run_plan["secrets"])
    with contextlib.ExitStack() as stack:
        address = _own_address(run_plan["interface"])
        listener = network.listen(address) if is_hub else None
        # The sockets stay open to the node's end, so that no other process gets these ports.
        reserved_ports = [stack.enter_context(network.reserve_port()) for _port in range(_ports_to_reserve(spec, node))]
        own_endpoint: Endpoint = {
            "address": address,
            "ports": [port.getsockname()[1] for port in reserved_ports],
            "control_port": 0 if listener is None else listener.getsockname()[1],
        }
        endpoints = _exchange_endpoints(folder, node, spec.nodes, own_endpoint, run_plan["start_seconds"])
        if endpoints is None:
            sys.stderr.write(f"The {spec.nodes} nodes of the run did not find each other.\n")
            return 1
        if is_hub:
            # The plan contains secrets. Every node has read it by now: a node publishes its endpoint only after that.
            (folder / RUN_PLAN_FILE).unlink(missing_ok=True)
        own_image, container = run_plan["own_image"], None
        if own_image is not None:
            container = _container(run_plan, own_image, folder, is_importer=is_hub)
            if container is None:
                sys.stderr.write("The run's image was not imported.\n")
                return 1
        try:
            plan = _supervisor_plan(run_plan, spec, node, endpoints, container)
        except GpusMissing as error:
            _end_run(folder, new_cause(Outcome.PLATFORM_ERROR, FailureCode.NODE_NOT_STARTED, str(error)))
            return 1
        plan["listener"] = None if listener is None else listener.detach()
        SlurmSupervisor(plan).run()
    return 0


def _read_run_plan(folder: Path, nonce: str) -> RunPlan | None:
    """Wait until a submission of the run is recorded, and return the run's plan.

    None if the recorded submission has another nonce, or if none is recorded in time.
    """
    give_up_at = time.monotonic() + _SUBMISSION_WAIT_SECONDS
    while time.monotonic() < give_up_at:
        refresh_listing(folder)
        with contextlib.suppress(OSError, ValueError):
            if json.loads((folder / "submission.json").read_bytes())["nonce"] != nonce:
                return None
            run_plan: RunPlan = json.loads((folder / RUN_PLAN_FILE).read_bytes())
            return run_plan if run_plan["nonce"] == nonce else None
        time.sleep(_POLL_SECONDS)  # shared storage sends no events
    return None


def _ports_to_reserve(spec: RunSpec, node: int) -> int:
    """Return how many ports this node reserves: for its workers, and on node 0 also the master and spare ports.

    `launch_plan.ports_needed` explains them.
    """
    ports = launch_plan.ports_needed(spec)
    ports_per_node = ports["worker_ports"] // spec.nodes
    return ports_per_node if node else 1 + ports_per_node + ports["spare_ports"]


def _exchange_endpoints(
    folder: Path, node: int, nodes: int, endpoint: Endpoint, seconds: float
) -> list[Endpoint] | None:
    """Publish this node's endpoint and return the endpoints of all nodes; None if some are not published in time."""
    write_json(folder / "nodes" / f"{node}.meeting", endpoint)
    endpoints: dict[int, Endpoint] = {}
    give_up_at = time.monotonic() + seconds
    while len(endpoints) < nodes:
        if time.monotonic() > give_up_at:
            return None
        refresh_listing(folder / "nodes")
        for other_node in set(range(nodes)) - endpoints.keys():
            with contextlib.suppress(OSError, ValueError):
                endpoints[other_node] = json.loads((folder / "nodes" / f"{other_node}.meeting").read_bytes())
        if len(endpoints) < nodes:
            time.sleep(_POLL_SECONDS)  # shared storage sends no events
    return [endpoints[other_node] for other_node in range(nodes)]


def _container(run_plan: RunPlan, own_image: ImagePlan, folder: Path, *, is_importer: bool) -> Container | None:
    """Return the run's own image, once node 0 has imported it. `is_importer`: whether this node is node 0.

    None if the import failed or the run is ending (`_is_ending`).
    """
    try:
        host_interpreter()  # checked before the import, so that an error ends the run at once
    except OSError as error:
        _end_run(folder, new_cause(Outcome.PLATFORM_ERROR, FailureCode.NODE_NOT_STARTED, str(error)))
        return None
    if is_importer:
        contents = _import_image(run_plan, own_image, folder)
    else:
        # Node 0 may find the other nodes, and then begin the import, up to `start_seconds` later than this node.
        seconds = own_image["seconds"] + run_plan["start_seconds"] + _IMPORT_MARGIN_SECONDS
        contents = _wait_for_import(folder, seconds)
    if contents is None or _is_ending(folder):
        return None
    root = Path(own_image["folder"]) / contents["root"]
    return Container(root=root, python=contents["python"], environment=contents["environment"])


def _import_image(run_plan: RunPlan, own_image: ImagePlan, folder: Path) -> ImageContents | None:
    """Import the run's own image, tell the other nodes, and return its contents.

    None if a stop was requested, or if the import fails. A failure is stored as the reason why the run ends.
    """
    try:
        write_json(folder / IMPORT_FILE, {"is_ready": False})
        with _delayed_sigterm() as is_signalled:
            contents = image_import.import_image(
                own_image,
                bubblewrap=_bubblewrap(run_plan),
                is_stopped=lambda: is_signalled() or _is_ending(folder),
            )
        write_json(folder / IMPORT_FILE, {"is_ready": True, "contents": contents})
        return contents
    except ImportStopped:
        pass
    except ImportFailed as error:
        _end_run(folder, new_cause(error.outcome, error.code, str(error), error.data))
    except OSError as error:
        message = f"The run's image could not be imported: {error.strerror or error}."
        _end_run(folder, new_cause(Outcome.PLATFORM_ERROR, FailureCode.PLATFORM_ERROR, message))
    return None


def _is_ending(folder: Path) -> bool:
    """Return whether the run must end: another process has stored the reason, or the customer stopped the run.

    `end.json` is written by the console, or by a node that cannot start (`_end_run`); its field `loss` is the cause.
    `stop.json` is a request of a customer, or of the console for a run whose end is already stored.
    """
    return _load(folder / "end.json") is not None or _load(folder / "stop.json") is not None


def _end_run(folder: Path, cause: Cause) -> None:
    """Store why the run ends, unless the console or another node has done so meanwhile."""
    if _load(folder / "end.json") is None:
        write_json(folder / "end.json", {"at": time.time(), "loss": cause})


@contextlib.contextmanager
def _delayed_sigterm() -> Iterator[Callable[[], bool]]:
    """Delay a SIGTERM, which ends this process, to the end of the block; yield a function that returns whether it came.

    So an import can remove its files first.
    """
    is_signalled = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_signalled
        is_signalled = True

    previous = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: is_signalled
    finally:
        signal.signal(signal.SIGTERM, previous)
        if is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)


def _wait_for_import(folder: Path, seconds: float) -> ImageContents | None:
    """Wait until node 0 has imported the run's image, and return its contents.

    None if the run ends meanwhile, or after `seconds`.
    """
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        refresh_listing(folder)
        contents: ImageContents | None = (_load(folder / IMPORT_FILE) or {}).get("contents")
        if contents is not None:
            return contents
        if _is_ending(folder):
            return None
        time.sleep(_POLL_SECONDS)  # shared storage sends no events
    return None


def _load(path: Path) -> Any:
    """Return the contents of a JSON file; None if it is missing, cannot be read or contains null."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _find_bubblewrap(configured: str, fallback: str) -> str:
    """Return the path of bwrap: the cluster's setting, else this machine's, else the console's (`RunPlan`)."""
    return configured or shutil.which("bwrap") or fallback


def _bubblewrap(run_plan: RunPlan) -> str:
    """Return the path of bwrap on this machine, by the settings in the run's plan."""
    return _find_bubblewrap(run_plan["bubblewrap"], run_plan["fallback_bubblewrap"])


def _supervisor_plan(
    run_plan: RunPlan, spec: RunSpec, node: int, endpoints: list[Endpoint], container: Container | None
) -> SupervisorPlan:
    """Return the plan of this node's supervisor. `container` is the run's own image, if it has one.

    Raises GpusMissing.
    """
    folder = Path(run_plan["folder"])
    gpus = _own_gpus(spec.resources.gpus) if spec.resources.gpus else {}
    node_sandbox = _sandbox(run_plan, spec, node, tuple(gpus.values()), container)
    environment = sandbox.base_environment(
        node_sandbox.image, list(gpus), has_packages=node_sandbox.packages is not None
    )
    if container is not None:
        environment = container.rank_environment(environment)
    plan = submission.node_plan(
        spec,
        node,
        node_sandbox,
        environment,
        bubblewrap=_bubblewrap(run_plan),
        disk_mib=run_plan["disk_mib"],
        cgroups=False,  # Slurm has control groups of its own for its jobs
    )
    plan["folder"] = str(folder)
    plan["change_file"] = run_plan["change_file"]
    plan["fork_server"] = ""  # starts are always cold
    plan["nonce"] = run_plan["nonce"]
    plan["shells"] = True
    plan["peers_are_here"] = False  # the other nodes may be on other machines
    hub = endpoints[0]
    ports_per_node = launch_plan.ports_needed(spec)["worker_ports"] // spec.nodes
    worker_ports: list[int] = []
    for number, endpoint in enumerate(endpoints):
        worker_ports += _worker_ports(endpoint, number, ports_per_node)
    plan["launcher"]["token"] = run_plan["token"]
    plan["launcher"]["control_port"] = hub["control_port"]
    plan["launcher"]["plan"].update(
        addresses=[endpoint["address"] for endpoint in endpoints],
        # If node 0 has a loopback address, all nodes are on this machine, and collectives use loopback too. Else
        # the framework chooses.
        interface=run_plan["interface"] or (network.INTERFACE if hub["address"] == network.ADDRESS else ""),
        # TensorFlow's chief listens at the first worker's port.
        master_port=worker_ports[0] if spec.framework is Framework.TENSORFLOW else hub["ports"][0],
        worker_ports=worker_ports,
        spare_ports=hub["ports"][1 + ports_per_node :],
        own_network=False,
    )
    return plan


def _worker_ports(endpoint: Endpoint, node: int, count: int) -> list[int]:
    """Return the `count` ports that a node has reserved for its workers; none without TensorFlow."""
    start = 0 if node else 1  # node 0's first port is the master's
    return endpoint["ports"][start : start + count]


def _sandbox(
    run_plan: RunPlan, spec: RunSpec, node: int, gpus: tuple[int, ...], container: Container | None
) -> sandbox.Sandbox:
    """Return this node's sandbox, and write its files for /etc. `gpus` are device numbers."""
    folder, image = Path(run_plan["folder"]), Path(run_plan["image"])
    hostname = f"{spec.name}-{node}"
    etc = folder / "etc" / str(node)
    sandbox.write_etc(etc, hostname)
    return sandbox.Sandbox(
        hostname=hostname,
        run_folder=folder / "run",
        checkpoint_folder=Path(run_plan["checkpoints"]),
        output_folder=Path(run_plan["outputs"]),
        etc_folder=etc,
        image=image,
        interpreter_prefixes=() if container else sandbox.interpreter_prefixes(image),
        launcher=Path(run_plan["launcher"]),
        mounts=spec.mounts,
        datasets_target=spec.datasets_target,
        models_target=spec.models_target,
        memory_bytes=spec.resources.memory_mib << 20,
        gpus=gpus,
        packages=Path(spec.packages) if spec.packages else None,
        container=container,
    )


def _own_address(interface: str) -> str:
    """Return this machine's IPv4 address on the network interface of this name.

    For "", return the address by which this machine reaches the machine that runs the batch script.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram_socket:
        if interface:
            # struct ifreq: 16 bytes of name, then a sockaddr_in, whose address begins at its byte 4. 256 bytes are more
            # than the kernel reads and writes.
            request = fcntl.ioctl(datagram_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
            return socket.inet_ntoa(request[20:24])
        # Connecting a datagram socket sends nothing, but chooses the local address. Any port would do; 9 is `discard`.
        datagram_socket.connect((os.environ.get("SLURM_LAUNCH_NODE_IPADDR", network.ADDRESS), 9))
        return str(datagram_socket.getsockname()[0])


def _own_gpus(count: int) -> dict[str, int]:
    """Return the device numbers of the GPUs that Slurm gave to this task, by UUID.

    Raises GpusMissing if there are fewer than `count`, so that no customer pays for GPUs that the ranks cannot use.
    """
    # Slurm sets CUDA_VISIBLE_DEVICES to the index or the UUID of each GPU of the task.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    own_names = [name for name in visible.split(",") if name]
    gpus = host.gpus()
    gpus_by_name = {gpu.uuid: gpu for gpu in gpus} | {str(gpu.index): gpu for gpu in gpus}
    # `nvidia-smi` does not list a part of a GPU (MIG) as a GPU. If the driver has failed, it lists no GPU at all.
    own_gpus = [gpus_by_name[name] for name in own_names if name in gpus_by_name]
    if len(own_gpus) < count:
        machine = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        raise GpusMissing(
            f"The machine {machine} gave the node {len(own_gpus)} of its {count} GPUs. CUDA_VISIBLE_DEVICES is "
            f"{visible!r}."
        )
    return {gpu.uuid: gpu.device_number for gpu in own_gpus}


def _memory_cgroups() -> list[str]:
    """Return the folder of this process's control group with cgroup v2 (a list of one), and an empty list with v1.

    With v1, OOM kills are therefore not counted, and only the checks of `Limits` find that memory is exceeded.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _number, controllers, path = line.split(":", 2)
            if not controllers and path != "/":  # v2's root group has no counter of OOM kills
                return [f"{cgroup_events.ROOT}{path}"]
    return []


def check_containers(tools: str, bubblewrap: str, fallback_bubblewrap: str, result: Path) -> None:
    """Write to the file `result` why this machine cannot run customers' own images; "" if it can.

    A job runs this on one compute node when an administrator checks the cluster (`slurm.check`).
    `tools` and `bubblewrap` are settings of the cluster; `fallback_bubblewrap` is as in `RunPlan`.
    """
    problem = image_import.check_tools(tools, _find_bubblewrap(bubblewrap, fallback_bubblewrap))
    if not problem:
        try:
            host_interpreter()
        except OSError as error:
            problem = str(error)
    write_json(result, {"machine": os.environ.get("SLURMD_NODENAME", ""), "problem": problem})


def start() -> None:
    """Run `main` with the command line's arguments and end this process."""
    exit_code = main(Path(sys.argv[1]), sys.argv[2])
    # `os._exit` skips the interpreter's shutdown, which would only take time: everything is closed or written by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)

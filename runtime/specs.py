"""What a run is and how it goes, as frozen plain data. PURE: no clock, no disk, no import from outside.

The one rule: everything a backend needs is in the RunSpec, and everything it knows comes back in the RunStatus.
Both travel as JSON (`to_json`, `from_json`), so that a supervisor can read them after a restart of everything else.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from dataclasses import dataclass, field
from typing import Any

NAME_PATTERN = re.compile(r"^[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?$")
"""A run's name is also a Kubernetes object name, a folder and a host name: a DNS label, with room for a suffix."""
ANY_NUMBER = 10_000
"""How many nodes an elastic cluster has room for: more than anybody buys at once."""


class Framework(enum.StrEnum):
    """The family of collectives the launcher prepares for."""

    PYTORCH = "pytorch"
    HOROVOD = "horovod"
    TENSORFLOW = "tensorflow"


class Controller(enum.StrEnum):
    """How the ranks of a run find each other and talk."""

    GLOO = "gloo"
    """Over TCP, with what the launcher offers; collectives on GPUs still go through NCCL."""
    MPI = "mpi"
    """Started by the image's `mpirun`, which asks the launchers, not ssh, to reach the other nodes."""


@dataclass(frozen=True)
class Resources:
    """What one node of the run gets; the backend enforces it. Memory and disk in MiB.

    `disk_mib` bounds what one run may add to its run folder, its checkpoints and its workspace; 0: the backend's own.
    """

    cpus: float
    memory_mib: int
    gpus: int = 0
    gpu_type: str = ""
    disk_mib: int = 0


@dataclass(frozen=True)
class Mount:
    """A folder of the host (or `subPath` of a volume) seen inside the run at `target`."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class Image:
    """Where the code's interpreter comes from.

    `builtin` names an image made by this installation (on the local backend a virtual environment);
    `reference` is a registry reference for backends that pull. One of them is set.
    """

    builtin: str = ""
    reference: str = ""


@dataclass(frozen=True)
class PullSecret:
    """What it takes to pull the run's image from its registry. Never written down, never in a log."""

    host: str
    username: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True)
class RunSpec:
    """One attempt at one job, complete.

    Targets are fixed by the environment contract: the workspace is mounted at `workspace_target`, datasets each at
    `datasets_target/<name>`. `script` is relative to the workspace. `deadline_seconds` counts from the moment all
    nodes run; when it is over the backend sends SIGTERM, waits `grace_seconds`, then kills: the grace lies *inside*
    the deadline, so that no run is ever charged past it.

    `nodes` is what the run starts with. It goes on without one that is lost while at least `min_nodes` are left
    (0: all are needed); its ranks then restart from their last checkpoint, or, with Horovod's elastic mode, go on.
    """

    name: str
    framework: Framework
    image: Image
    nodes: int
    workers_per_node: int
    resources: Resources
    script: str
    deadline_seconds: int
    arguments: tuple[str, ...] = ()
    epochs: int = 1
    lr: str = "0.01"
    batch_size: int = 32
    datasets: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    workspace_target: str = "/workspace"
    datasets_target: str = "/datasets"
    restart_count: int = 0
    grace_seconds: int = 10
    log_limit_bytes: int = 64 * 1024 * 1024
    checkpoint_key: str = ""
    """Attempts that share this key share one checkpoint folder (`CHECKPOINT_DIR`); empty: a folder of its own."""
    min_nodes: int = 0
    controller: Controller = Controller.GLOO
    collective_timeout_seconds: int = 0
    """How long a collective may wait for a peer, told to the framework; 0: the framework's own."""
    stall_check_seconds: int = 0
    """Horovod warns after this long of ranks that have not joined a collective; 0: its own."""
    hang_seconds: int = 120
    """A run that shows no sign of progress this long has hung (the launcher may be surer sooner); 0: not watched."""
    builtin_script: str = ""
    """A script of the platform's own, run instead of the workspace's: `smoke`, `hello`. Then `script` is empty."""
    labels: dict[str, str] = field(default_factory=dict)
    """`organization` (a slug) and `job`: who it is for, in the cluster's own listings."""
    traceparent: str = ""
    """The run's place in a trace (W3C), told to its ranks as TRACEPARENT; empty: they are told nothing."""
    node_kind: str = ""
    """The name of the node spec that was bought: clusters may keep machines, labels and taints for one."""
    organization_nodes: int = 0
    """Nodes the organization may run at once, where the cluster itself holds it to that; 0: nothing is held."""
    pull_secret: PullSecret | None = field(default=None, repr=False)

    @property
    def world_size(self) -> int:
        """All processes of the run."""
        return self.nodes * self.workers_per_node

    def to_json(self) -> str:
        """This spec as a JSON object, without its pull secret; `from_json` is its inverse."""
        data = dataclasses.asdict(dataclasses.replace(self, pull_secret=None))
        del data["pull_secret"]
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Read what `to_json` wrote. Raises ValueError or TypeError on anything else."""
        data: dict[str, Any] = json.loads(text)
        data["framework"] = Framework(data["framework"])
        data["controller"] = Controller(data["controller"])
        data["image"] = Image(**data["image"])
        data["resources"] = Resources(**data["resources"])
        data["mounts"] = tuple(Mount(**mount) for mount in data["mounts"])
        data["arguments"] = tuple(data["arguments"])
        data["datasets"] = tuple(data["datasets"])
        return cls(**data)


class RunPhase(enum.StrEnum):
    """Where a run is, as a backend sees it."""

    STARTING = "starting"
    """Accepted; not every node runs yet. Nothing is metered."""
    RUNNING = "running"
    """Every node runs the customer's code (or has run it)."""
    STOPPING = "stopping"
    """SIGTERM was sent; the grace is running."""
    ENDED = "ended"
    """No process of the run is left; `outcome` says how it ended."""


class Outcome(enum.StrEnum):
    """How an ended run ended. The first cause, never an echo of it."""

    COMPLETED = "completed"
    CODE_FAILED = "code_failed"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    """The run wrote more than its `disk_mib`."""
    HUNG = "hung"
    """No sign of progress for too long: `RunStatus.progress_at` was the last."""
    STOPPED = "stopped"
    """`stop` was called."""
    TIME_LIMIT = "time_limit"
    NODE_LOST = "node_lost"
    NO_CAPACITY = "no_capacity"
    """Not all of its nodes could be placed in time, and those that were are down again: it never ran as one."""
    PLATFORM_ERROR = "platform_error"


class FailureCode(enum.StrEnum):
    """What a failure is about, for whoever words it: the console says it in the reader's language."""

    RANK_EXITED = "rank_exited"
    RANK_KILLED = "rank_killed"
    OUT_OF_MEMORY = "out_of_memory"
    TOO_MANY_PROCESSES = "too_many_processes"
    DISK_FULL = "disk_full"
    HUNG = "hung"
    STOPPED = "stopped"
    TIME_LIMIT = "time_limit"
    NODE_LOST = "node_lost"
    """Its supervisor or launcher was killed, or its machine went down."""
    NODE_SILENT = "node_silent"
    """It stopped answering: frozen, or cut off from the others."""
    NODE_NOT_STARTED = "node_not_started"
    NODES_NOT_MET = "nodes_not_met"
    NODES_NOT_PLACED = "nodes_not_placed"
    """The cluster could place only some of its nodes, `data`: `placed`, `nodes`, `seconds`, `waiting_code`."""
    EVICTED = "evicted"
    """The cluster took its node away: drained, or short of memory or disk."""
    PREEMPTED = "preempted"
    """It gave way to a run of higher priority, or to the owner of the quota it had borrowed."""
    IMAGE_NAME = "image_name"
    """There is no image of this name, `data`: `image`."""
    IMAGE_CREDENTIALS = "image_credentials"
    """The registry does not let us have it, `data`: `image`."""
    IMAGE_NETWORK = "image_network"
    """The registry did not answer, `data`: `image`."""
    IMAGE_UNUSABLE = "image_unusable"
    """The image has no Python where one was expected, `data`: `image`."""
    LAUNCHER_KILLED = "launcher_killed"
    """Code inside the run killed what watches over it."""
    PLATFORM_ERROR = "platform_error"


class WaitingCode(enum.StrEnum):
    """Why a run that was accepted does not run yet, and what `RunStatus.waiting_data` then holds."""

    STARTING = "starting"
    """It is under way: `nodes` (how many are waited for), `step` (place, image, volume, container)."""
    GPUS = "gpus"
    """`wanted` GPUs a node, of `gpu_type` ("": any), for `nodes` nodes; `free` where that is known, else None."""
    CPUS = "cpus"
    """`wanted` a node, for `nodes` nodes, and `free` on the machine that has most; None: not known."""
    MEMORY = "memory"
    """MiB: as CPUS."""
    TOO_LARGE = "too_large"
    """No machine that the cluster has now takes a node of it, were it empty."""
    IMAGE_NAME = "image_name"
    """`image`; there is none of this name."""
    IMAGE_CREDENTIALS = "image_credentials"
    """`image`; the registry wants other credentials, or some."""
    IMAGE_NETWORK = "image_network"
    """`image`; the registry cannot be reached."""
    VOLUME = "volume"
    """`claim` ("" where it is none) and `detail`: the storage is not there, or cannot be mounted."""
    QUOTA = "quota"
    """`detail`: a ResourceQuota of the namespace is used up."""
    TAINT = "taint"
    """`taint`: the machines that would fit are kept for others, or are not ready."""
    ADMISSION = "admission"
    """`queue`, `detail`: Kueue has not admitted it yet, or the cluster's policy refuses its pods."""
    UNSCHEDULABLE = "unschedulable"
    """`detail`, in the scheduler's words."""


@dataclass(frozen=True)
class Waiting:
    """Why a run waits: a code and its data for people, one English sentence for logs."""

    code: WaitingCode
    data: dict[str, Any]
    sentence: str


@dataclass(frozen=True)
class Failure:
    """The first cause of a run that did not complete.

    `rank` is global and None where the fault is a node's; exactly one of `exit_code`, `signal` is set for a process.
    `message` is one English sentence for logs, `code` and `data` (plain numbers and names, such as `limit_mib`) the
    same for people; `last_lines` the end of that rank's output.
    """

    message: str
    code: FailureCode = FailureCode.PLATFORM_ERROR
    data: dict[str, Any] = field(default_factory=dict)
    node: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: str = ""
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeStatus:
    """One node of a run. Times are Unix seconds by the backend's clock."""

    node: int
    phase: RunPhase
    address: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Span:
    """A stretch of a run with one number of nodes; the last one of a run that still goes has no end. Unix seconds."""

    nodes: int
    started_at: float
    finished_at: float | None = None


@dataclass(frozen=True)
class RunStatus:
    """How a run goes. Times are Unix seconds by the backend's clock.

    `started_at` is when the last node began to run, and `finished_at` when the last process ended: what lies between
    is metered. `started_at` stays None for a run that never ran on all its nodes. `spans` cover it without a gap:
    one, unless an elastic run lost nodes. `progress_at` is the last sign of progress (output, metrics, work done), and
    `checkpoint_at` when the newest file in the checkpoint folder was written, by that file's own word.
    """

    name: str
    phase: RunPhase
    nodes: tuple[NodeStatus, ...] = ()
    submitted_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    outcome: Outcome | None = None
    failure: Failure | None = None
    spans: tuple[Span, ...] = ()
    progress_at: float | None = None
    checkpoint_at: float | None = None
    restarts: int = 0
    """How often the ranks were started again inside this run, because a node was lost."""
    waiting_for: str = ""
    """While STARTING: what the backend still waits for, one English sentence; else empty."""
    waiting_code: str = ""
    """The same for people: a WaitingCode, or empty where the backend knows no more than `waiting_for`."""
    waiting_data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeCapacity:
    """One machine of the cluster: what it has for runs and what of it is free now."""

    name: str
    total: Resources
    free: Resources
    closed_to: frozenset[str] = frozenset()
    """The node kinds that are never placed here; "": those that the cluster does not tell apart."""
    gpus_only: bool = False
    """Nodes without a GPU are never placed here."""


@dataclass(frozen=True)
class Capacity:
    """The cluster as a whole. A node kind is the name of what was bought (`RunSpec.node_kind`)."""

    machines: tuple[NodeCapacity, ...]
    kinds: frozenset[str] = frozenset()
    """The node kinds that it tells apart; it places all others alike."""
    elastic: bool = False
    """Machines come when they are asked for: nothing is too much for it."""

    def nodes_now(self, resources: Resources, kind: str = "") -> int:
        """How many nodes of `resources` could start now."""
        return self._room(resources, kind, free=True)

    def nodes_ever(self, resources: Resources, kind: str = "") -> int:
        """How many nodes of `resources` an otherwise empty cluster could run."""
        return self._room(resources, kind, free=False)

    def _room(self, wanted: Resources, kind: str, *, free: bool) -> int:
        if self.elastic:
            return ANY_NUMBER
        known = kind if kind in self.kinds else ""
        takes = (each for each in self.machines if known not in each.closed_to and (wanted.gpus or not each.gpus_only))
        return sum(_copies(each.free if free else each.total, wanted) for each in takes)


def _copies(have: Resources, wanted: Resources) -> int:
    """How many times `wanted` fits into `have`. A GPU type of "" asks for any."""
    if wanted.gpus and wanted.gpu_type not in {"", have.gpu_type}:
        return 0
    limits = [int((have.cpus + 1e-9) / wanted.cpus), have.memory_mib // wanted.memory_mib]
    if wanted.gpus:
        limits.append(have.gpus // wanted.gpus)
    return max(0, min(limits))


@dataclass(frozen=True)
class LogChunk:
    """A piece of one rank's log: `text` from `offset`, the next offset to ask for, and whether more can ever come.

    Offsets are bytes in the stored file. `text` ends at a UTF-8 boundary; bytes that are no UTF-8 come as U+FFFD.
    """

    text: str
    next_offset: int
    eof: bool

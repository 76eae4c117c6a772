"""Define a run, its status and a cluster's capacity as frozen dataclasses.

Pure: no clock, no disk, standard library only.

A RunSpec holds everything that a backend needs for a run. A RunStatus holds everything that a backend knows about a
run. Both are stored as JSON, so a supervisor or a restarted console can read them later.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from dataclasses import dataclass, field
from typing import Any

NAME_PATTERN = re.compile(r"^[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?\Z")
"""A run's name also names Kubernetes objects, a folder and hosts. So it is a DNS label. It has at most 52 of the 63
characters of a label, which leaves room for a suffix."""
PACKAGES_TARGET = "/opt/trainyard/site-packages"
"""The folder in which a run sees the packages that were installed in addition to the image's."""
JOBS_TARGET = "/jobs"
"""The folder in which a notebook sees the files of an ended job, by the job's number."""
UNLIMITED_NODES = 10_000
"""How many nodes count as fitting on a cluster that adds machines on demand: more than anybody buys at once."""


class Framework(enum.StrEnum):
    """The framework whose environment variables and rendezvous the launcher prepares."""

    PYTORCH = "pytorch"
    HOROVOD = "horovod"
    TENSORFLOW = "tensorflow"


class Flavour(enum.StrEnum):
    """The build of a built-in image."""

    CPU = "cpu"
    CUDA = "cuda"


class Controller(enum.StrEnum):
    """How the ranks of a Horovod run find each other and exchange data on CPUs: Horovod calls it the controller."""

    GLOO = "gloo"
    """Gloo's TCP rendezvous, served by the launcher. Collectives on GPUs still use NCCL."""
    MPI = "mpi"
    """The image's `mpirun`. It reaches other nodes through the launchers, not through ssh."""


class LrScaling(enum.StrEnum):
    """How the learning rate of the ranks is computed from the ordered one."""

    NONE = "none"
    """Unchanged."""
    LINEAR = "linear"
    """Multiplied by the number of processes: the linear scaling rule (Goyal et al., 2017)."""


class LocalRankArgument(enum.StrEnum):
    """How a script receives its local rank as an argument."""

    AUTO = "auto"
    """In the form that the script's own argument parser declares; not passed if no parser declares it."""
    UNDERSCORE = "underscore"
    """`--local_rank=N`"""
    DASH = "dash"
    """`--local-rank=N`"""
    NONE = "none"
    """Not passed."""


@dataclass(frozen=True)
class Resources:
    """The resources of one node, enforced by the backend. Memory and disk are in MiB.

    `disk_mib` limits what a run may add, with all its nodes together, to its run folder, its checkpoints, its outputs
    and its workspace; 0: the backend's default. Kubernetes also limits each node's temporary files by it.
    """

    cpus: float
    memory_mib: int
    gpus: int = 0
    gpu_type: str = ""
    disk_mib: int = 0


@dataclass(frozen=True)
class Mount:
    """A folder that the run sees at `target`. `source` is its path as the console sees it."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class Image:
    """The image that a run uses. Exactly one of `builtin` and `reference` is set.

    `builtin` names an image that this installation builds: a virtual environment, or on Kubernetes a container image.
    `reference` names an image in a registry, for backends that pull images. If `digest` is set, the image is pulled by
    this digest in place of the reference's tag.
    """

    builtin: str = ""
    reference: str = ""
    digest: str = ""


@dataclass(frozen=True)
class PullSecret:
    """Credentials for the registry of the run's image. Never stored in a run's records or logs."""

    host: str
    username: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True)
class RunSpec:
    """The specification of a run, which is one attempt of one job.

    The environment contract (docs/environment.md) fixes where mounts appear: the workspace at `workspace_target`, each
    dataset at `datasets_target/<name>`, each model at `models_target/<name>`. `script` is relative to the workspace.
    `deadline_seconds` counts from the moment all nodes run. The backend sends SIGTERM `grace_seconds` before the
    deadline and SIGKILL at the deadline, so no run is charged beyond it.

    `nodes` is the number of nodes at the start. An elastic run continues without a lost node while `min_nodes` remain
    (0: all are needed). Its ranks then restart from their last checkpoint; with Horovod's elastic mode they continue.

    `restart_count` is the number of earlier attempts. `log_limit_bytes` limits the log of each rank.
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
    local_rank_argument: LocalRankArgument = LocalRankArgument.AUTO
    epochs: int = 1
    lr: str = "0.01"
    """As ordered, digit by digit, since a float could show another number."""
    lr_scaling: LrScaling = LrScaling.NONE
    warmup_epochs: int = 0
    """Epochs over which the script raises the learning rate. The script gets the number as LR_WARMUP_EPOCHS."""
    batch_size: int = 32
    datasets: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    workspace_target: str = "/workspace"
    datasets_target: str = "/datasets"
    models_target: str = "/models"
    restart_count: int = 0
    grace_seconds: int = 10
    log_limit_bytes: int = 64 * 1024 * 1024
    checkpoint_key: str = ""
    """Attempts with the same key share one checkpoint folder (`CHECKPOINT_DIR`) and one output folder (`OUTPUT_DIR`).
    Empty: the run has its own.
    """
    min_nodes: int = 0
    controller: Controller = Controller.GLOO
    collective_timeout_seconds: int = 0
    """How long a collective may wait for a peer; 0: the framework's default."""
    stall_check_seconds: int = 0
    """After how many seconds Horovod warns of ranks that have not joined a collective; 0: Horovod's default."""
    hang_seconds: int = 120
    """A run without any sign of progress for this long counts as hung; 0: never. It counts as hung sooner if every rank
    waits for the others for far longer than before."""
    builtin_script: str = ""
    """A script of the platform that runs instead of the workspace's: `smoke`, `hello`, `install` or `notebook`. Then
    `script` is empty.
    """
    labels: dict[str, str] = field(default_factory=dict)
    """`organization` (a slug) and `job`, shown in the cluster's own listings."""
    traceparent: str = ""
    """The run's W3C trace context, passed to its ranks as TRACEPARENT; empty: not traced."""
    node_kind: str = ""
    """The node kind: the name of the purchased node spec. A cluster may reserve machines for it."""
    organization_nodes: int = 0
    """Nodes that the organization may run at once, where the cluster enforces such a quota; 0: no quota."""
    packages: str = ""
    """A folder of Python packages in addition to the image's, as the console sees it; empty: none. Mounted read-only.
    """
    storage_left_mib: int | None = None
    """The unused part of the organization's storage quota, in MiB; None: no quota."""
    environment: dict[str, str] = field(default_factory=dict)
    """The order's own variables, for the ranks; `runtime.environment` has the rules for their names."""
    expands_arguments: bool = False
    """Replace references to variables in `arguments`: see `runtime.launcher.variables`."""
    pull_secret: PullSecret | None = field(default=None, repr=False)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Further variables for the ranks. Their values are never stored, and all stored output shows `***` instead."""

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return self.nodes * self.workers_per_node

    def to_json(self) -> str:
        """Return this spec as a JSON object, without its secrets; `from_json` is the inverse."""
        data = dataclasses.asdict(dataclasses.replace(self, pull_secret=None, secrets={}))
        del data["pull_secret"], data["secrets"]
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Read the output of `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        data: dict[str, Any] = json.loads(text)
        data["framework"] = Framework(data["framework"])
        data["controller"] = Controller(data["controller"])
        # A run that was submitted before an upgrade lacks these fields.
        data["local_rank_argument"] = LocalRankArgument(data.get("local_rank_argument", "auto"))
        data["lr_scaling"] = LrScaling(data.get("lr_scaling", "none"))
        data["image"] = Image(**data["image"])
        data["resources"] = Resources(**data["resources"])
        data["mounts"] = tuple(Mount(**mount) for mount in data["mounts"])
        data |= {name: tuple(data.get(name, ())) for name in ("arguments", "datasets", "models")}
        return cls(**data)


class RunPhase(enum.StrEnum):
    """The phase of a run, as its backend sees it."""

    STARTING = "starting"
    """Accepted, but not every node runs yet. Not metered."""
    RUNNING = "running"
    """Every node runs the customer's code, or has already ended."""
    STOPPING = "stopping"
    """SIGTERM was sent, and the grace period has not passed yet."""
    ENDED = "ended"
    """No process of the run remains; `outcome` is set."""


class Outcome(enum.StrEnum):
    """How a run ended. The first cause decides, never one of its effects."""

    COMPLETED = "completed"
    CODE_FAILED = "code_failed"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    """The run wrote more than its disk limit: its `disk_mib`, or the rest of the organization's storage quota."""
    HUNG = "hung"
    """No sign of progress for too long; the last one was at `RunStatus.progress_at`."""
    STOPPED = "stopped"
    """`stop` was called."""
    TIME_LIMIT = "time_limit"
    NODE_LOST = "node_lost"
    NO_CAPACITY = "no_capacity"
    """The cluster could not place all nodes in time, and released those that it had placed. The run never ran."""
    PLATFORM_ERROR = "platform_error"


class FailureCode(enum.StrEnum):
    """The kind of a failure in detail. The console uses it to describe the failure in the reader's language."""

    RANK_RAISED = "rank_raised"
    """`data`: `exception`, `message`, and the place in the code: `file`, `line`, `function`."""
    RANK_EXITED = "rank_exited"
    """A process ended by itself, with an exit code that is not 0."""
    RANK_KILLED = "rank_killed"
    """A signal ended a process."""
    OUT_OF_MEMORY = "out_of_memory"
    TOO_MANY_PROCESSES = "too_many_processes"
    """The node reached its limit of processes, or its processes left no CPU time for the launcher."""
    DISK_FULL = "disk_full"
    HUNG = "hung"
    STOPPED = "stopped"
    TIME_LIMIT = "time_limit"
    NODE_LOST = "node_lost"
    """The node's supervisor was killed, or its machine went down."""
    NODE_SILENT = "node_silent"
    """The node stopped answering: it was frozen, or cut off from the others."""
    NODE_NOT_STARTED = "node_not_started"
    """The node could not be prepared, or did not start in time. `data`: `starter` "mpirun" if that started no rank."""
    NODES_NOT_MET = "nodes_not_met"
    """The nodes did not connect to each other in time."""
    NODES_NOT_PLACED = "nodes_not_placed"
    """The cluster placed only some of the nodes. `data`: `placed`, `nodes`, `seconds`, `waiting_code`."""
    EVICTED = "evicted"
    """The cluster drained the node, or its machine ran short of memory or disk."""
    PREEMPTED = "preempted"
    """Preempted by a run of higher priority, or by the owner of a borrowed quota."""
    IMAGE_NAME = "image_name"
    """The registry has no such image. `data`: `image`."""
    IMAGE_CREDENTIALS = "image_credentials"
    """The registry refused the credentials, or needs some. `data`: `image`."""
    IMAGE_NETWORK = "image_network"
    """The registry did not answer. `data`: `image`."""
    IMAGE_UNUSABLE = "image_unusable"
    """The image has no Python at the expected path. `data`: `image`."""
    IMAGE_TOO_LARGE = "image_too_large"
    """The image takes more disk than the cluster allows. `data`: `image`, `limit_mib`."""
    IMAGE_TOO_SLOW = "image_too_slow"
    """The image was not imported in time. `data`: `image`, `limit_seconds`."""
    IMAGE_NOT_UNPACKED = "image_not_unpacked"
    """The layers of the image are invalid. `data`: `image`, `detail`."""
    LAUNCHER_KILLED = "launcher_killed"
    """A launcher died or stopped answering while its supervisor lived, so the customer's code is held responsible."""
    RANKS_NOT_STARTED = "ranks_not_started"
    """Some ranks did not start although others ran, whose code is held responsible."""
    PLATFORM_ERROR = "platform_error"
    REFUSED = "refused"
    """Set by the console: the cluster rejected the spec; `data`: `field`, the field at fault."""
    NOT_STARTED = "not_started"
    """Set by the console: the run could not be submitted."""
    VANISHED = "vanished"
    """Set by the console: the cluster no longer knows the run."""
    UNREADABLE = "unreadable"
    """Set by the console: the run's files could not be read, even long after its time limit."""
    MOVED = "moved"
    """Set by the console: an administrator ended the run so that another attempt starts."""


IMAGE_FAILURES = frozenset(
    {
        FailureCode.IMAGE_NAME,
        FailureCode.IMAGE_CREDENTIALS,
        FailureCode.IMAGE_NETWORK,
        FailureCode.IMAGE_UNUSABLE,
        FailureCode.IMAGE_TOO_LARGE,
        FailureCode.IMAGE_TOO_SLOW,
        FailureCode.IMAGE_NOT_UNPACKED,
    }
)
"""The codes of runs whose image could not be used, so that no code of theirs started."""


class WaitingCode(enum.StrEnum):
    """The reason why an accepted run does not run yet. Names in backquotes are the keys of `RunStatus.waiting_data`."""

    STARTING = "starting"
    """Nodes are starting. `step`: place, image, container or supervisor; `nodes`, if known: how many are not ready."""
    GPUS = "gpus"
    """`nodes` nodes need `wanted` GPUs each, of `gpu_type` ("": any); `free`: how many are free, None if not known."""
    CPUS = "cpus"
    """`nodes` nodes need `wanted` CPUs each; `free`: the most that one machine has free, None if not known."""
    MEMORY = "memory"
    """The same data as for CPUS, in MiB."""
    TOO_LARGE = "too_large"
    """No machine of the cluster could hold a node of the run, even when empty."""
    IMAGE_NAME = "image_name"
    """`image`: the registry has no such image."""
    IMAGE_CREDENTIALS = "image_credentials"
    """`image`: the registry refused the credentials, or needs some."""
    IMAGE_NETWORK = "image_network"
    """`image`: the registry does not answer."""
    VOLUME = "volume"
    """`claim` (a PersistentVolumeClaim, or "") and `detail`: the storage does not exist, or cannot be mounted."""
    QUOTA = "quota"
    """`detail`: a ResourceQuota of the namespace is used up."""
    TAINT = "taint"
    """`taint`: the machines that would fit are reserved or not ready."""
    ADMISSION = "admission"
    """`queue` and `detail`: Kueue has not admitted the run, or the cluster's policy refuses its pods."""
    UNSCHEDULABLE = "unschedulable"
    """`detail`: the scheduler's message."""
    CLUSTER_QUEUE = "cluster_queue"
    """`detail`: other jobs of the cluster come first, or use its machines."""
    CLUSTER_LIMIT = "cluster_limit"
    """`detail`: a limit of the cluster's account or quality of service is reached."""
    CLUSTER_RULE = "cluster_rule"
    """`detail`: a rule of the cluster's account or quality of service forbids this run; waiting does not end it."""
    HELD = "held"
    """`detail`: an administrator holds the run in the cluster's queue."""
    MACHINES_CLOSED = "machines_closed"
    """`detail`: the machines that would fit are reserved or down."""


@dataclass(frozen=True)
class Waiting:
    """The reason why a run waits. The console writes a sentence from `code` and `data`; `sentence` is for logs."""

    code: WaitingCode
    data: dict[str, Any]
    sentence: str


@dataclass(frozen=True)
class Failure:
    """The first cause of the end of a run that did not complete.

    `rank` is the global rank, or None for a fault of the node. If a process failed, `exit_code` or `signal` is set.
    `message` is an English sentence for logs; `code` and `data` (plain numbers and names, such as `limit_mib`) let the
    console describe the failure. `last_lines` is the end of the output of `rank`.
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
    """The status of one node. Times are Unix seconds by the backend's clock; `detail` explains its end."""

    node: int
    phase: RunPhase
    address: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Span:
    """A period in which the number of nodes did not change. Times are Unix seconds.

    `finished_at` is None for the last period of a live run.
    """

    nodes: int
    started_at: float
    finished_at: float | None = None


@dataclass(frozen=True)
class RunStatus:
    """The status of a run. Times are Unix seconds by the backend's clock.

    The metered time runs from `started_at`, when the last node began to run, to `finished_at`, when the last process
    ended. If the run ends before that, `started_at` is when its first node began, and None if none did. If an elastic
    run begins without some of its nodes, only the others count. `spans` cover the metered time without gaps; there are
    several only if an elastic run lost nodes. `progress_at` is the last sign of progress (output, metrics or CPU work).
    `checkpoint_at` is the modification time of the newest file in the checkpoint folder.
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
    """How often the ranks were restarted inside this run because a node was lost."""
    waiting_for: str = ""
    """While STARTING, an English sentence that says why the run has not started; else empty."""
    waiting_code: str = ""
    """A WaitingCode, from which the console writes a sentence; empty if the backend knows only `waiting_for`."""
    waiting_data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeCapacity:
    """One machine of the cluster: its total resources for runs, and its free ones now."""

    name: str
    total: Resources
    free: Resources
    closed_to: frozenset[str] = frozenset()
    """The node kinds that are never placed on this machine; "" stands for all kinds that are not in
    `Capacity.placed_kinds`."""
    gpus_only: bool = False
    """Whether only nodes with GPUs are placed on this machine."""


@dataclass(frozen=True)
class Capacity:
    """The cluster's machines. A node kind is the name of a node spec (`RunSpec.node_kind`)."""

    machines: tuple[NodeCapacity, ...]
    placed_kinds: frozenset[str] = frozenset()
    """Node kinds with a label or taint of their own in the cluster; nodes of all other kinds are placed alike."""
    elastic: bool = False
    """Whether the cluster adds machines on demand, so that every request fits eventually."""

    def nodes_now(self, resources: Resources, kind: str = "") -> int:
        """Return how many nodes with these resources could start now."""
        return self._count_nodes(resources, kind, free=True)

    def nodes_ever(self, resources: Resources, kind: str = "") -> int:
        """Return how many nodes with these resources an empty cluster could run."""
        return self._count_nodes(resources, kind, free=False)

    def _count_nodes(self, required: Resources, kind: str, *, free: bool) -> int:
        if self.elastic:
            return UNLIMITED_NODES
        machines = self.machines_for(required, kind)
        return sum(_count_fitting(machine.free if free else machine.total, required) for machine in machines)

    def machines_for(self, required: Resources, kind: str) -> list[NodeCapacity]:
        """Return the machines on which nodes of this kind may be placed, also those that are too small or full."""
        placed_kind = kind if kind in self.placed_kinds else ""
        return [
            machine
            for machine in self.machines
            if placed_kind not in machine.closed_to and (required.gpus or not machine.gpus_only)
        ]


def _count_fitting(available: Resources, required: Resources) -> int:
    """Return how many times `required` fits into `available`. A required GPU type of "" means any."""
    if required.gpus and required.gpu_type not in {"", available.gpu_type}:
        return 0
    # 1e-9 is added because binary floats are not exact: 0.3 / 0.1 is a little less than 3.
    counts = [int((available.cpus + 1e-9) / required.cpus), available.memory_mib // required.memory_mib]
    if required.gpus:
        counts.append(available.gpus // required.gpus)
    return max(0, min(counts))


@dataclass(frozen=True)
class LogChunk:
    """A piece of a log: its text, the offset to continue at, and whether the log is complete.

    Offsets are bytes in the stored file. `text` begins at `offset` and ends at a UTF-8 boundary; invalid bytes appear
    as U+FFFD. `size` is how many bytes the log has now; None where the cluster does not know.

    `times` has pairs of a line's number in `text`, from 0 on, and a time (Unix seconds), in order. A time holds for its
    line and all lines before that of the next pair. It is exact to 0.1 s, except in a log of many hours
    (`runtime.launcher.log_times`). Lines before the first pair have no known time. None: the caller did not ask for
    times.
    """

    text: str
    next_offset: int
    eof: bool
    offset: int = 0
    size: int | None = None
    times: tuple[tuple[int, float], ...] | None = None

"""The plan of a node's launcher, and the environment and arguments of its ranks. Pure.

All variables of the environment contract are named here, except the frameworks' own (`frameworks`).
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, TypedDict

from .variables import expand

LOCAL_RANK_FLAGS = ("--local_rank", "--local-rank")
_ABSL_PREFIX = "DEFINE_"
"""The beginning of the names of absl's functions that declare flags, such as DEFINE_integer."""
_FLAGS_BY_CHOICE = {"underscore": "--local_rank", "dash": "--local-rank", "none": None}
"""The flag for each value of `runtime.specs.LocalRankArgument` except `auto`."""


class LaunchPlan(TypedDict, total=False):
    """The JSON that a supervisor sends to its node's launcher: the `Plan`, and what else the launcher needs.

    Descriptors are numbers that the launcher inherits.
    """

    plan: Dict[str, Any]
    """The fields of `Plan`."""
    token: str
    """A secret that the launchers of one run share."""
    control_port: int
    """The port on which the launcher of node 0 listens for the others."""
    listener: Optional[int]
    """On node 0, the descriptor of the socket that listens on `control_port`; None if the supervisor could not open it.
    None on every other node."""
    shells: Optional[int]
    """Descriptor of the socket on which the launcher starts shells (`shells`); None where there are none."""
    shell_token: str
    """What each connection to the socket of `shells` must send first; if absent, nothing."""
    outputs: List[int]
    """A descriptor for the output of each local rank."""
    warm: Optional[int]
    """Descriptor of the socket from which forked ranks read what to run (`warm.client`); None if every rank starts
    cold."""
    python: str
    """Path of the ranks' interpreter."""
    environment: Dict[str, str]
    """The environment that every process of the image starts with."""
    variables: Dict[str, str]
    """The order's own environment variables, which only the ranks get."""
    secrets: Dict[str, str]
    """Further variables of the ranks. The supervisor replaces their values in everything that it stores (`masking`)."""
    devices: List[str]
    """The numbers of this node's GPUs in a pod, from 0. If absent, CUDA_VISIBLE_DEVICES in `environment` names them."""
    umask: int
    """The umask of the ranks; if absent, 022."""
    start_seconds: float
    """How long to wait for the launchers of the other nodes; if absent, `agent.START_SECONDS`."""
    owns_pid_namespace: bool
    """Whether the launcher's pid namespace has only the supervisor (pid 1) and processes of the run, as in a pod. The
    launcher may then kill all others (`worker_group`)."""
    folder: str
    """The script's folder. The launcher sets this and the next two itself, from the script."""
    local_rank_flag: Optional[str]
    """The flag by which the script expects its local rank; None if it expects no flag."""
    import_folders: List[str]
    """The folders where the script's imports may find its own modules; see `warm.client.import_folders`."""


class Plan(NamedTuple):
    """What the run executes, and where: the same on every node except for `node`. A part of the `LaunchPlan`.

    Paths are as seen inside the sandbox. Fields without a comment are as in `runtime.specs.RunSpec`, or become the
    variable of the same name in the ranks' environment (`common_environment`).
    """

    run_id: str  # the run's name
    node: int  # this node's number, in the current round of an elastic run
    nodes: int  # how many take part in the current round
    workers: int  # ranks per node
    framework: str
    backend: str  # the library for collectives, as `torch.distributed` names it
    addresses: List[str]  # of each node
    master_port: int
    script: str
    arguments: List[str]
    epochs: int
    lr: str  # as ordered
    batch_size: int
    datasets: List[str]
    datasets_path: str
    workspace: str
    run_dir: str
    checkpoint_dir: str
    restart_count: int  # the number of earlier attempts and rounds
    omp_threads: int  # OMP_NUM_THREADS of each rank
    interface: str  # the network interface for collectives; if empty, the framework chooses
    worker_ports: List[int]  # for TensorFlow, a free port for each global rank; else empty
    rendezvous_port: int = 0  # where node 0 serves Horovod's store
    min_nodes: int = 0
    spare_ports: Sequence[int] = ()  # the ports of all further rounds of an elastic run
    controller: str = "gloo"
    collective_timeout_seconds: int = 0
    stall_check_seconds: int = 0
    original_node: int = -1  # this node's number at submission; -1 in round 0, when `node` is still that number
    original_nodes: Sequence[int] = ()  # the nodes that take part in the round, by their numbers at submission
    hang_seconds: int = 0
    cpus: float = 0.0  # cores of one node; 0: not known
    own_network: bool = False  # whether this node's network namespace carries no other node's traffic
    traceparent: str = ""
    local_rank_argument: str = "auto"
    models: Sequence[str] = ()
    models_path: str = "/models"
    output_dir: str = ""
    expands_arguments: bool = False
    lr_scaling: str = "none"  # "linear": the ranks get `lr` times the number of processes
    warmup_epochs: int = 0

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Plan:
        """Read a plan from a JSON object; other fields are ignored."""
        return cls(**{name: data[name] for name in cls._fields if name in data})

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return self.nodes * self.workers

    @property
    def elastic(self) -> bool:
        """Whether the run can go on without some of its nodes."""
        return 0 < self.min_nodes < self.nodes

    def host(self, node: int) -> str:
        """Return the host name that frameworks see for a node, by its number at submission: unique and stable."""
        return "{}-{}".format(self.run_id, node)

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local one; ranks fill the nodes one after another."""
        return self.node * self.workers + local_rank


def common_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """Return the variables that all frameworks share."""
    run_dir = plan.run_dir.rstrip("/")
    environment = {
        "DATASETS_PATH": plan.datasets_path,
        "DATASETS": ",".join(plan.datasets),
        "MODELS_PATH": plan.models_path,
        "MODELS": ",".join(plan.models),
        "WORKSPACE": plan.workspace,
        "EPOCHS": str(plan.epochs),
        "LR": scale_lr(plan.lr, plan.world_size) if plan.lr_scaling == "linear" else plan.lr,
        "LR_BASE": plan.lr,
        "LR_WARMUP_EPOCHS": str(plan.warmup_epochs),
        "BATCH_SIZE": str(plan.batch_size),
        "BACKEND": plan.backend,
        "MASTER_ADDR": plan.addresses[0],
        "MASTER_PORT": str(plan.master_port),
        "WORLD_SIZE": str(plan.world_size),
        "RANK": str(plan.rank(local_rank)),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(plan.node),
        "WORKER_PER_NODE": str(plan.workers),
        "RUN_DIR": run_dir,
        "CHECKPOINT_DIR": plan.checkpoint_dir,
        "TENSORBOARD_LOGDIR": run_dir + "/tensorboard",
        "METRICS_FILE": run_dir + "/metrics.jsonl",
        "RESTART_COUNT": str(plan.restart_count),
        "OMP_NUM_THREADS": str(plan.omp_threads),
        "PYTHONUNBUFFERED": "1",
    }
    if plan.output_dir:  # the plan of a run that was submitted by an earlier version has none
        environment["OUTPUT_DIR"] = plan.output_dir
    if plan.collective_timeout_seconds:
        environment["COLLECTIVE_TIMEOUT_SECONDS"] = str(plan.collective_timeout_seconds)
    if plan.traceparent:
        environment["TRACEPARENT"] = plan.traceparent
    return environment


def scale_lr(lr: str, world_size: int) -> str:
    """Return a learning rate times the number of processes. Decimal numbers avoid rounding errors."""
    # Imported here because few runs need it.
    from decimal import Decimal  # noqa: PLC0415

    return str(Decimal(lr) * world_size)


def find_imports(source: str) -> List[str]:
    """Return the top-level names of the modules that a source imports, found by a quick scan of its lines.

    The launcher needs them to find the script's own modules (`__main__`), and to decide whether a warm start is faster
    (`warm.client`).
    """
    names: List[str] = []
    # Regular expressions would be slower, and this reads every line of every source before the ranks start.
    for line in source.splitlines():
        keyword, _, clause = line.replace("\t", " ").strip(" ").partition(" ")
        if keyword == "from":
            clause = clause.lstrip(" ")
            names.append(_identifier(clause[1:] if clause.startswith(".") else clause))
        elif keyword == "import":
            names.extend(_identifier(part.lstrip(" ")) for part in clause.split("#")[0].split(";")[0].split(","))
    return [name for name in names if name]


def _identifier(text: str) -> str:
    """Return the identifier at the beginning of a text, or ""."""
    end = next(
        (index for index, character in enumerate(text) if character != "_" and not character.isalnum()), len(text)
    )
    return text[:end] if text[:end].isidentifier() else ""


def local_rank_flag(sources: Iterable[str], choice: str = "auto") -> Optional[str]:
    """Return the flag by which the script expects its local rank; None if it expects no flag.

    If `choice` is `auto`, it is the flag that an argument parser in one of the sources declares. PyTorch 2 renamed the
    flag, and a parser rejects a spelling that it does not declare, so only a declared flag is passed. A source that
    cannot be parsed counts as declaring none.
    """
    if choice in _FLAGS_BY_CHOICE:
        return _FLAGS_BY_CHOICE[choice]
    for source in sources:
        if any(flag in source for flag in (*LOCAL_RANK_FLAGS, _ABSL_PREFIX)):
            flag = _declared_flag(source)
            if flag:
                return flag
    return None


def _declared_flag(source: str) -> Optional[str]:
    """Return the local-rank flag that an argument parser in this source declares, or None.

    Knows the functions of argparse, optparse, click and absl.
    """
    # Imported here because few scripts need it, and importing `ast` takes a fifth of the launcher's start.
    import ast  # noqa: PLC0415

    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested deeper than Python reads
        return None
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        constants = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        if name in ("add_argument", "add_option", "option"):
            for value in constants:
                if value in LOCAL_RANK_FLAGS:
                    return str(value)
        elif name.startswith(_ABSL_PREFIX) and constants[:1] == ["local_rank"]:  # absl adds the dashes itself
            return "--local_rank"
    return None


def rank_arguments(plan: Plan, local_rank: int, flag: Optional[str], environment: Mapping[str, str]) -> List[str]:
    """Return the script's arguments, with the local-rank flag added unless the order already has it.

    `flag` is the result of `local_rank_flag`. `environment` has the variables that the arguments may refer to.
    """
    arguments = (
        [expand(argument, environment) for argument in plan.arguments] if plan.expands_arguments else [*plan.arguments]
    )
    return with_local_rank(arguments, local_rank, flag)


def with_local_rank(arguments: List[str], local_rank: int, flag: Optional[str]) -> List[str]:
    """Return the arguments with the local-rank flag added, if there is one, unless they already have it."""
    if flag and not any(argument.split("=")[0] in LOCAL_RANK_FLAGS for argument in arguments):
        return [*arguments, "{}={}".format(flag, local_rank)]
    return arguments

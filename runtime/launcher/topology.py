"""Which rank sits where and what it is told. PURE: a plan in, plain data out.

The one rule: every variable of the environment contract that does not depend on a framework is named here and
nowhere else (the frameworks' own are in `frameworks`).
"""

from __future__ import annotations

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence
else:
    from .plain import NamedTuple

LOCAL_RANK_FLAGS = ("--local_rank", "--local-rank")


class Plan(NamedTuple):
    """What the launcher of one node is told. The same on every node but for `node`.

    Paths are as seen inside the sandbox. `worker_ports` holds one free port per global rank where the framework needs
    them (TensorFlow), else nothing; `spare_ports` as many again for every round that an elastic run may come to.
    `interface` is the network interface that collectives use; empty: their choice. 0 seconds: the framework's own.
    In a round, `home` is this node's number at submission, and `homes` those of all nodes that take part.
    `hang_seconds` is how long a run may show no sign of progress (0: not watched), `cpus` the cores of one node (0: not
    known). `own_network` says that this node's network namespace carries no traffic of others.
    """

    run_id: str
    node: int
    nodes: int
    workers: int
    framework: str
    backend: str
    addresses: List[str]
    master_port: int
    script: str
    arguments: List[str]
    epochs: int
    lr: str
    batch_size: int
    datasets: List[str]
    datasets_path: str
    workspace: str
    run_dir: str
    checkpoint_dir: str
    restart_count: int
    omp_threads: int
    interface: str
    worker_ports: List[int]
    rendezvous_port: int = 0
    min_nodes: int = 0
    spare_ports: Sequence[int] = ()
    controller: str = "gloo"
    collective_timeout_seconds: int = 0
    stall_check_seconds: int = 0
    home: int = -1
    homes: Sequence[int] = ()
    hang_seconds: int = 0
    cpus: float = 0.0
    own_network: bool = False
    traceparent: str = ""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Plan:
        """Read a plan from a JSON object that has its fields and perhaps others."""
        return cls(**{name: data[name] for name in cls._fields if name in data})

    @property
    def world_size(self) -> int:
        """All processes of the run."""
        return self.nodes * self.workers

    @property
    def elastic(self) -> bool:
        """Whether the run can go on without some of its nodes."""
        return 0 < self.min_nodes < self.nodes

    def host(self, node: int) -> str:
        """The name that frameworks know a node by, from its number at submission: one that stays and is its own."""
        return "{}-{}".format(self.run_id, node)

    def rank(self, local_rank: int) -> int:
        """The global rank of a local one on this node: nodes are filled one after another."""
        return self.node * self.workers + local_rank


def common_environment(plan: Plan, local_rank: int) -> Dict[str, str]:
    """The part of the contract that every framework shares."""
    run_dir = plan.run_dir.rstrip("/")
    environment = {
        "DATASETS_PATH": plan.datasets_path,
        "DATASETS": ",".join(plan.datasets),
        "WORKSPACE": plan.workspace,
        "EPOCHS": str(plan.epochs),
        "LR": plan.lr,
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
    if plan.collective_timeout_seconds:
        environment["COLLECTIVE_TIMEOUT_SECONDS"] = str(plan.collective_timeout_seconds)
    if plan.traceparent:
        environment["TRACEPARENT"] = plan.traceparent
    return environment


def imported_names(source: str) -> List[str]:
    """Top-level names of the modules that a source imports, by a cheap look at its lines."""
    names: List[str] = []
    # Without regular expressions, whose import takes longer than this.
    for line in source.splitlines():
        word, _, rest = line.replace("\t", " ").strip(" ").partition(" ")
        if word == "from":
            rest = rest.lstrip(" ")
            names.append(_identifier(rest[1:] if rest.startswith(".") else rest))
        elif word == "import":
            names.extend(_identifier(part.lstrip(" ")) for part in rest.split("#")[0].split(";")[0].split(","))
    return [name for name in names if name]


def _identifier(text: str) -> str:
    """The name that a text begins with."""
    end = next((at for at, letter in enumerate(text) if letter != "_" and not letter.isalnum()), len(text))
    return text[:end] if text[:end].isidentifier() else ""


def local_rank_flag(sources: Iterable[str]) -> Optional[str]:
    """The spelling of the local-rank flag that an argument parser in one of the sources declares; None for none.

    PyTorch 2 renamed the flag, and a strict parser fails on the spelling it does not know: only what the script itself
    declares is ever passed. A source that does not parse declares nothing.
    """
    for source in sources:
        if any(flag in source for flag in LOCAL_RANK_FLAGS):
            flag = _declared_flag(source)
            if flag:
                return flag
    return None


def _declared_flag(source: str) -> Optional[str]:
    # Imported here for speed alone: parsing is needed by few scripts, and `ast` is a fifth of the launcher's start.
    import ast  # noqa: PLC0415

    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested deeper than Python reads
        return None
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name not in ("add_argument", "option"):
            continue
        for argument in call.args:
            if isinstance(argument, ast.Constant) and argument.value in LOCAL_RANK_FLAGS:
                return str(argument.value)
    return None


def rank_arguments(plan: Plan, local_rank: int, flag: Optional[str]) -> List[str]:
    """The script's arguments: what was bought, and the local-rank flag where it is declared and not given already."""
    arguments = list(plan.arguments)
    if flag and not any(argument.split("=")[0] in LOCAL_RANK_FLAGS for argument in arguments):
        arguments.append("{}={}".format(flag, local_rank))
    return arguments

"""The platform's own script: what a run on this image and these nodes would meet, checked and told rank by rank.

It runs as any customer's script does, on every rank. Each finding goes to the output, in words, and as JSON to
`RUN_DIR/check/rank-<rank>.json`, written again after each step, so that what was found before a crash is there too. The
one rule: it changes nothing that stays: whatever it writes elsewhere it removes again.
"""

import functools
import importlib
import json
import os
import platform
import shutil
import socket
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "BACKEND", "RUN_DIR")
MOST_FILES = 100_000
ELEMENTS = 1 << 20
"""Of a collective that is timed: 4 MiB."""
ROUNDS = 5

Framework = Tuple[Dict[str, Any], Callable[[], "Collectives"]]
Finding = Dict[str, Any]
Collectives = Tuple[Callable[[List[float]], List[float]], Callable[[], None]]
"""`sum` over all ranks of a list of numbers, and `barrier`."""


class Wrong(Exception):
    """A check that went through and found something amiss."""

    def __init__(self, text: str, *values: object) -> None:
        super().__init__(text.format(*values))


def say(line: str) -> None:
    """A line for who reads the output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Report:
    """What one rank has found so far; on disk after each step."""

    def __init__(self, folder: str, rank: int, node: int) -> None:
        self.findings: List[Finding] = []
        self._path = os.path.join(folder, "rank-{}.json".format(rank))
        self._head = {"rank": rank, "node": node}
        os.makedirs(folder, exist_ok=True)

    def step(self, name: str, check: Callable[[], Dict[str, Any]]) -> None:
        """Run one check: what it gives is kept, what it raises is a finding that is not ok."""
        began = time.monotonic()
        data: Dict[str, Any] = {}
        fault = ""
        try:
            data = check()
        except Wrong as error:
            fault = str(error)
        except Exception as error:  # whatever is wrong is what is looked for
            fault = "{}: {}".format(type(error).__name__, error)[:500]
        finding: Finding = {"name": name, "ok": not fault, "data": data, "error": fault}
        finding["seconds"] = round(time.monotonic() - began, 4)
        self.findings.append(finding)
        self._write()
        mark = "ok  " if finding["ok"] else "FAIL"
        told = ", ".join("{} {}".format(key, value) for key, value in data.items())
        say("[{}] {:<14} {}".format(mark, name, fault or told))

    def _write(self) -> None:
        temporary = self._path + ".new"
        with open(temporary, "w") as file:
            json.dump({**self._head, "findings": self.findings}, file)
        os.replace(temporary, self._path)


def check_environment() -> Dict[str, Any]:
    """Every variable that the contract promises."""
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise Wrong("missing: {}", ", ".join(missing))
    return {"variables": len(os.environ), "hostname": socket.gethostname()}


def check_python() -> Dict[str, Any]:
    """Which interpreter, on how many cores."""
    return {"version": platform.python_version(), "cpus": len(os.sched_getaffinity(0))}


def check_folder(path: str) -> Dict[str, Any]:
    """That a file can be written, read and removed there, and how much room there is."""
    mine = os.path.join(path, ".trainyard-check-{}".format(os.environ.get("RANK", "0")))
    with open(mine, "w") as file:
        file.write("checked")
    try:
        with open(mine) as file:
            if file.read() != "checked":
                raise Wrong("what was written could not be read again")
    finally:
        os.unlink(mine)
    return {"path": path, "free_bytes": shutil.disk_usage(path).free}


def check_dataset(path: str) -> Dict[str, Any]:
    """That a dataset is there, can be read and cannot be written."""
    files = total = 0
    first = ""
    for folder, _folders, names in os.walk(path):
        for name in names:
            files += 1
            total += os.stat(os.path.join(folder, name)).st_size
            first = first or os.path.join(folder, name)
        if files >= MOST_FILES:
            break
    if not files:
        raise Wrong("it holds no file, or is not there")
    with open(first, "rb") as file:
        file.read(65536)
    try:
        with open(os.path.join(path, ".trainyard-check"), "w"):
            pass
    except OSError:
        return {"name": os.path.basename(path), "files": files, "bytes": total}
    os.unlink(os.path.join(path, ".trainyard-check"))
    raise Wrong("it can be written, and should not")


def check_names() -> Dict[str, Any]:
    """That this node and the first one have an address."""
    return {"own": socket.gethostbyname(socket.gethostname()), "first": socket.gethostbyname(os.environ["MASTER_ADDR"])}


def load_framework() -> Framework:
    """Import what the run is for; gives what it is, and how to begin its collectives."""
    if "TF_CONFIG" in os.environ:
        return _tensorflow()
    return _horovod() if "HOROVOD_CONTROLLER" in os.environ else _pytorch()


def _pytorch() -> Framework:
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    cuda = torch.cuda.is_available()
    device = "cuda:{}".format(os.environ["LOCAL_RANK"]) if cuda else "cpu"
    name = torch.cuda.get_device_name(int(os.environ["LOCAL_RANK"])) if cuda else "cpu"

    def begin() -> Collectives:
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(os.environ["BACKEND"])

        def total(values: List[float]) -> List[float]:
            given = torch.tensor(values, device=device)
            dist.all_reduce(given)
            return list(given[:2].tolist())

        return total, dist.barrier

    return {"framework": "torch", "version": torch.__version__, "device": name}, begin


def _horovod() -> Framework:
    try:
        hvd, tensor = importlib.import_module("horovod.torch"), importlib.import_module("torch").tensor
    except ImportError:
        hvd, tensor = importlib.import_module("horovod.tensorflow"), importlib.import_module("tensorflow").constant
    version = importlib.import_module("horovod").__version__

    def begin() -> Collectives:
        hvd.init()

        def total(values: List[float]) -> List[float]:
            summed = hvd.allreduce(tensor(values), op=hvd.Sum, name="check-{}".format(len(values)))
            return [float(number) for number in summed[:2]]

        return total, lambda: (total([0.0, 0.0]), None)[1]

    return {"framework": "horovod", "version": version, "device": "cpu"}, begin


def _tensorflow() -> Framework:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    tf = importlib.import_module("tensorflow")
    # The strategy has to be there before anything else of TensorFlow is used.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def begin() -> Collectives:
        @tf.function  # type: ignore[untyped-decorator]  # the launcher knows no framework's types
        def everywhere(values: Any) -> Any:
            return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(lambda given: given, (values,)), axis=None)

        def total(values: List[float]) -> List[float]:
            return [float(number) for number in everywhere(tf.constant(values))[:2]]

        return total, lambda: (total([0.0, 0.0]), None)[1]

    devices = tf.config.list_physical_devices("GPU")
    return {
        "framework": "tensorflow",
        "version": tf.__version__,
        "device": devices[0].name if devices else "cpu",
    }, begin


def check_sum(total: Callable[[List[float]], List[float]], rank: int, size: int) -> Dict[str, Any]:
    """That all ranks' numbers add up, and how long 4 MiB take (the best of a few rounds)."""
    wanted = size * (size + 1) / 2
    found = total([rank + 1.0, 0.0])[0]
    if found != wanted:
        raise Wrong("the ranks' numbers add up to {}, not to {}", found, wanted)
    values = [1.0] * ELEMENTS
    best = float("inf")
    for _round in range(ROUNDS):
        began = time.monotonic()
        if total(values)[0] != size:
            raise Wrong("a large sum came out wrong")
        best = min(best, time.monotonic() - began)
    return {"ranks": size, "milliseconds": round(best * 1000, 2)}


def check_broadcast(total: Callable[[List[float]], List[float]], rank: int) -> Dict[str, Any]:
    """That what rank 0 alone says reaches every rank."""
    found = total([42.0 if rank == 0 else 0.0, 0.0])[0]
    if found != 42.0:
        raise Wrong("rank 0 said 42, and {} arrived", found)
    return {}


def check_clock(barrier: Callable[[], None]) -> Dict[str, Any]:
    """When all ranks left the same barrier, by this node's clock: the reader compares."""
    barrier()
    barrier()
    return {"at": time.time()}


def main() -> int:
    """Every check in turn; 1 where one failed on this rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report = Report(os.path.join(os.environ["RUN_DIR"], "check"), rank, int(os.environ["NODE_RANK"]))
    os.chdir(os.environ["WORKSPACE"])
    report.step("environment", check_environment)
    report.step("python", check_python)
    report.step("names", check_names)
    for name in ("WORKSPACE", "CHECKPOINT_DIR", "RUN_DIR"):
        report.step(name.lower(), functools.partial(check_folder, os.environ[name]))
    for name in filter(None, os.environ.get("DATASETS", "").split(",")):
        path = os.path.join(os.environ["DATASETS_PATH"], name)
        report.step("dataset", functools.partial(check_dataset, path))
    begins: List[Callable[[], Collectives]] = []
    ready: List[Collectives] = []

    def load() -> Dict[str, Any]:
        found, begin = load_framework()
        begins.append(begin)
        return found

    def meet() -> Dict[str, Any]:
        ready.append(begins[0]())
        return {}

    report.step("framework", load)
    if begins:
        report.step("meeting", meet)
    if ready:
        total, barrier = ready[0]
        report.step("sum", lambda: check_sum(total, rank, size))
        report.step("broadcast", lambda: check_broadcast(total, rank))
        report.step("clock", lambda: check_clock(barrier))
    failed = [finding["name"] for finding in report.findings if not finding["ok"]]
    say("rank {}: {}".format(rank, "failed: " + ", ".join(failed) if failed else "everything works"))
    return 1 if failed else 0


if __name__ == "__main__":
    # The launcher's own modules are not to be found in place of the image's.
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]
    sys.exit(main())

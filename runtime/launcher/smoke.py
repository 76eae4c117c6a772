"""The platform's test script: every rank checks its environment, its folders and the framework's collectives.

It runs like a customer's script. After each check it prints the result and rewrites `RUN_DIR/check/rank-<rank>.json`,
so a crash loses no result. `jobs.checks` reads these files. The script removes all other files that it writes.
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
from typing import Any, Callable, Dict, List, NamedTuple, Optional, TypeVar

CONTRACT_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "BACKEND",
    "RUN_DIR",
)
"""The variables of the environment contract that are checked: what scripts need most. They are never empty."""
MAX_COUNTED_FILES = 100_000
"""After so many files of a dataset, counting stops once the folder of the last one is done. Counting more could take
minutes."""
ALL_REDUCE_ELEMENTS = 1 << 20
"""Numbers that the timed all-reduce sums: 4 MiB of 32-bit floats, about the size of one of DDP's buckets."""
ALL_REDUCE_REPETITIONS = 5
"""Timed repetitions of the all-reduce. The report has the shortest time, since other load affects it least."""

Result = TypeVar("Result")


class Collectives(NamedTuple):
    """A framework's collectives.

    `tensor` makes a tensor of a list of numbers. `all_reduce` sums each number of a tensor over all ranks, and returns
    the first sum; no check needs more. It may change the tensor.
    """

    tensor: Callable[[List[float]], Any]
    all_reduce: Callable[[Any], float]
    barrier: Callable[[], None]


class Framework(NamedTuple):
    """An imported framework: its name, version and device for the report, and a function that connects the ranks."""

    description: Dict[str, Any]
    connect: Callable[[], Collectives]


class CheckFailed(Exception):
    """A check that completed and found a problem."""


class Report:
    """The results of one rank's checks, written to `folder` after each check."""

    def __init__(self, folder: str, rank: int, node: int) -> None:
        self.findings: List[Dict[str, Any]] = []
        self._path = os.path.join(folder, "rank-{}.json".format(rank))
        self._rank = rank
        self._node = node
        os.makedirs(folder, exist_ok=True)

    def run(
        self, name: str, check: Callable[[], Result], describe: Callable[[Result], Dict[str, Any]]
    ) -> Optional[Result]:
        """Run one check, add its finding and return its result; None if it has failed by raising an exception.

        `describe` returns the finding's data from the result.
        """
        started_at = time.monotonic()
        result: Optional[Result] = None
        data: Dict[str, Any] = {}
        error = ""
        try:
            result = check()
            data = describe(result)
        except CheckFailed as failure:
            error = str(failure)
        except Exception as failure:  # any error of the image or the node is a result to report
            # 500 characters are enough for the console's table of findings.
            error = "{}: {}".format(type(failure).__name__, failure)[:500]
        seconds = round(time.monotonic() - started_at, 4)
        self.findings.append({"name": name, "ok": not error, "data": data, "error": error, "seconds": seconds})
        self._write()
        details = ", ".join("{} {}".format(key, value) for key, value in data.items())
        print_line("[{}] {:<14} {}".format("FAIL" if error else "ok  ", name, error or details))
        return result

    def _write(self) -> None:
        # Replaced as a whole, so that a reader never sees half a file.
        temporary = self._path + ".new"
        with open(temporary, "w") as file:
            json.dump({"rank": self._rank, "node": self._node, "findings": self.findings}, file)
        os.replace(temporary, self._path)


def print_line(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def check_environment() -> Dict[str, Any]:
    """Check that the variables in CONTRACT_VARIABLES are set; report how many variables there are in all."""
    missing_variables = [name for name in CONTRACT_VARIABLES if not os.environ.get(name)]
    if missing_variables:
        raise CheckFailed(f"missing: {', '.join(missing_variables)}")
    return {"variables": len(os.environ), "hostname": socket.gethostname()}


def check_python() -> Dict[str, Any]:
    """Report the interpreter and the number of cores."""
    return {"version": platform.python_version(), "cpus": len(os.sched_getaffinity(0))}


def check_folder(folder: str) -> Dict[str, Any]:
    """Check that a file can be written, read and removed in a folder, and report its free space."""
    path = _own_path(folder)
    with open(path, "w") as file:
        file.write("checked")
    try:
        with open(path) as file:
            if file.read() != "checked":
                raise CheckFailed("a file's contents differ from what was written")
    finally:
        os.unlink(path)
    return {"path": folder, "free_bytes": shutil.disk_usage(folder).free}


def _own_path(folder: str) -> str:
    """Return the path of this rank's test file. All ranks test the same folder at the same time."""
    return os.path.join(folder, ".trainyard-check-{}".format(os.environ.get("RANK", "0")))


def check_dataset(dataset: str) -> Dict[str, Any]:
    """Check that the files in a dataset's folder can be read and none can be written."""
    files = total_bytes = 0
    first_path = ""
    for folder, _folders, names in os.walk(dataset):
        for name in names:
            path = os.path.join(folder, name)
            files += 1
            total_bytes += os.stat(path).st_size
            first_path = first_path or path
        if files >= MAX_COUNTED_FILES:
            break
    if not files:
        raise CheckFailed("the folder has no file, or does not exist")
    with open(first_path, "rb") as file:
        file.read(65536)  # listing a dataset does not show that its files can be read
    new_path = _own_path(dataset)
    try:
        with open(new_path, "w"):
            pass
    except OSError:
        return {"name": os.path.basename(dataset), "files": files, "bytes": total_bytes}
    os.unlink(new_path)
    raise CheckFailed("the folder can be written to, but should be read-only")


def check_host_names() -> Dict[str, Any]:
    """Check that the host names of this node and of node 0 resolve."""
    return {"own": socket.gethostbyname(socket.gethostname()), "first": socket.gethostbyname(os.environ["MASTER_ADDR"])}


def load_framework() -> Framework:
    """Import the run's framework, which the launcher's variables identify (`frameworks`)."""
    if "TF_CONFIG" in os.environ:
        return _load_tensorflow()
    return _load_horovod() if "HOROVOD_CONTROLLER" in os.environ else _load_pytorch()


def _load_pytorch() -> Framework:
    """Import PyTorch; its ranks connect by `init_process_group`."""
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    has_gpu = torch.cuda.is_available()
    gpu = int(os.environ["LOCAL_RANK"])
    device = "cuda:{}".format(gpu) if has_gpu else "cpu"
    device_name = torch.cuda.get_device_name(gpu) if has_gpu else "cpu"

    def connect() -> Collectives:
        if has_gpu:
            torch.cuda.set_device(gpu)
        dist.init_process_group(os.environ["BACKEND"])

        def all_reduce(tensor: Any) -> float:
            dist.all_reduce(tensor)
            # `item` also waits for the GPU, so the caller times the whole collective.
            return float(tensor[0].item())

        return Collectives(functools.partial(torch.tensor, device=device), all_reduce, dist.barrier)

    return Framework({"framework": "torch", "version": torch.__version__, "device": device_name}, connect)


def _load_horovod() -> Framework:
    """Import Horovod with PyTorch or, if the image has none, with TensorFlow."""
    try:
        hvd, tensor = importlib.import_module("horovod.torch"), importlib.import_module("torch").tensor
    except ImportError:
        hvd, tensor = importlib.import_module("horovod.tensorflow"), importlib.import_module("tensorflow").constant
    version = importlib.import_module("horovod").__version__

    def connect() -> Collectives:
        hvd.init()

        def all_reduce(values: Any) -> float:
            # Horovod matches the ranks' tensors by name, so each length gets a name of its own.
            return float(hvd.allreduce(values, op=hvd.Sum, name="check-{}".format(len(values)))[0])

        return Collectives(tensor, all_reduce, lambda: _barrier_by_all_reduce(tensor, all_reduce))

    return Framework({"framework": "horovod", "version": version, "device": "cpu"}, connect)


def _load_tensorflow() -> Framework:
    """Import TensorFlow and create its strategy for several workers."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only: neither information nor warnings
    tf = importlib.import_module("tensorflow")
    # TensorFlow requires the strategy before any other operation, so `connect` would be too late.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def connect() -> Collectives:
        @tf.function  # type: ignore[untyped-decorator]  # the launcher knows no framework's types
        def sum_over_ranks(values: Any) -> Any:
            per_rank = strategy.run(lambda tensor: tensor, (values,))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, per_rank, axis=None)

        def all_reduce(values: Any) -> float:
            return float(sum_over_ranks(values)[0])

        return Collectives(tf.constant, all_reduce, lambda: _barrier_by_all_reduce(tf.constant, all_reduce))

    gpus = tf.config.list_physical_devices("GPU")
    device_name = gpus[0].name if gpus else "cpu"
    return Framework({"framework": "tensorflow", "version": tf.__version__, "device": device_name}, connect)


def _barrier_by_all_reduce(tensor: Callable[[List[float]], Any], all_reduce: Callable[[Any], float]) -> None:
    """Wait for all ranks. A sum over all ranks serves as a barrier, since it is complete only once every rank joins."""
    all_reduce(tensor([0.0]))


def check_all_reduce(collectives: Collectives, rank: int, world_size: int) -> Dict[str, Any]:
    """Check that a sum over all ranks is right; report the shortest time for 4 MiB."""
    # Every rank adds its number plus one: 1 + 2 + ... + world_size.
    expected_sum = world_size * (world_size + 1) / 2
    total = collectives.all_reduce(collectives.tensor([rank + 1.0]))
    if total != expected_sum:
        raise CheckFailed(f"the ranks' numbers add up to {total}, not to {expected_sum}")
    values = [1.0] * ALL_REDUCE_ELEMENTS
    shortest_seconds = float("inf")
    for _repetition in range(ALL_REDUCE_REPETITIONS):
        tensor = collectives.tensor(values)  # not timed: this takes many times as long as the sum
        started_at = time.monotonic()
        if collectives.all_reduce(tensor) != world_size:
            raise CheckFailed("a large sum came out wrong")
        shortest_seconds = min(shortest_seconds, time.monotonic() - started_at)
    return {"ranks": world_size, "milliseconds": round(shortest_seconds * 1000, 2)}


def check_broadcast(collectives: Collectives, rank: int) -> Dict[str, Any]:
    """Check that a value of rank 0 reaches every rank, by a sum to which the other ranks add 0."""
    # Any number except 0: without rank 0's value, the sum would be 0.
    received_number = collectives.all_reduce(collectives.tensor([42.0 if rank == 0 else 0.0]))
    if received_number != 42.0:
        raise CheckFailed(f"rank 0 sent 42, and {received_number} arrived")
    return {}


def check_clock(collectives: Collectives) -> Dict[str, Any]:
    """Report the Unix time at which this rank left a barrier. Differences between nodes show how far clocks differ."""
    # After the first barrier all ranks are in step, so they leave the second one at nearly the same moment.
    collectives.barrier()
    collectives.barrier()
    return {"at": time.time()}


def main() -> int:
    """Run every check; return 1 if one failed on this rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report = Report(os.path.join(os.environ["RUN_DIR"], "check"), rank, int(os.environ["NODE_RANK"]))
    # The checks run in the workspace, like a customer's script. This script was started in its own folder, which is the
    # launcher's.
    os.chdir(os.environ["WORKSPACE"])
    # `dict` as `describe`: what these checks return is the finding's data already.
    report.run("environment", check_environment, dict)
    report.run("python", check_python, dict)
    report.run("names", check_host_names, dict)
    for name in ("WORKSPACE", "CHECKPOINT_DIR", "OUTPUT_DIR", "RUN_DIR"):
        report.run(name.lower(), functools.partial(check_folder, os.environ[name]), dict)
    for name in filter(None, os.environ.get("DATASETS", "").split(",")):
        dataset = os.path.join(os.environ["DATASETS_PATH"], name)
        report.run("dataset", functools.partial(check_dataset, dataset), dict)
    framework = report.run("framework", load_framework, lambda framework: framework.description)
    collectives = framework and report.run("meeting", framework.connect, lambda _collectives: {})
    if collectives:
        report.run("sum", functools.partial(check_all_reduce, collectives, rank, world_size), dict)
        report.run("broadcast", functools.partial(check_broadcast, collectives, rank), dict)
        report.run("clock", functools.partial(check_clock, collectives), dict)
    failed_checks = [finding["name"] for finding in report.findings if not finding["ok"]]
    print_line(
        "rank {}: {}".format(rank, "failed: " + ", ".join(failed_checks) if failed_checks else "everything works")
    )
    return 1 if failed_checks else 0


if __name__ == "__main__":
    # This script is in the launcher's folder, whose modules must not hide the image's (`agent`, `disk`, `dns`).
    own_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if folder != own_folder]
    sys.exit(main())

"""Count how often a failed run names the right cause: one rank fails first, and the others fail because of it.

make bench NAME=first_cause (QUICK=1 for fewer runs)

One rank of each run fails: by an exception, a signal or an exit code. Its process ends at once or slowly, or it closes
its connections in a `finally`, before Python reports the exception. The others see their connections close, and fail 0
to 500 ms later with a framework's error (an echo). A fifth of the runs is real PyTorch over gloo. Busy processes take
CPU time from the ranks meanwhile. A run counts as right if its cause names that rank and its own failure, and every
node's record has a cause.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.environment import images_root
from bench.local import wait_for_end
from bench.rounds import is_quick, print_result
from runtime.backends.base import create
from runtime.images.venvs import is_ready
from runtime.specs import Failure, Framework, Image, Mount, Resources, RunSpec

BUSY_PROCESSES = 3
"""How many processes compete with the ranks for CPU time, as on a busy machine."""
TIMEOUT_SECONDS = 180
"""How long one run may take."""
ECHOES = (
    "RuntimeError('[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242')",
    "RuntimeError('[pair.cc:525] Read error [127.0.0.1]:4242: Connection reset by peer')",
    "ConnectionResetError(104, 'Connection reset by peer')",
    "BrokenPipeError(32, 'Broken pipe')",
    "RuntimeError('Timed out waiting 1800000ms for recv operation to complete')",
    "RuntimeError('NCCL error: remote process exited or there was a network error, NCCL version 2.27.3')",
    "type('HorovodInternalError', (RuntimeError,), {})('Horovod has been shut down. This was caused by an exception')",
    "type('UnavailableError', (Exception,), {})('Collective ops is aborted by: Socket closed')",
)
"""The exceptions of ranks that lost a peer, as source text."""
FAILURES = {
    "exception": "raise RuntimeError('mat1 and mat2 shapes cannot be multiplied (4x8 and 4x2)')",
    "exception, slow end": (
        "import atexit; atexit.register(end_slowly); raise RuntimeError('mat1 and mat2 shapes cannot be multiplied')"
    ),
    "exception after its connections": (
        "try: raise RuntimeError('mat1 and mat2 shapes cannot be multiplied')\n"
        "    finally: close_connections(); time.sleep(DELAY)  # cleanup that takes a while"
    ),
    "exit code": "os._exit(3)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "__import__('ctypes').string_at(0)",
}
"""The statement by which the first rank fails, by the kind of the failure."""
SOCKET_SCRIPT = """
import os, random, signal, socket, time
rank, size, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
peers = []
def close_connections():
    for peer in peers: peer.close()
def end_slowly():
    close_connections()
    time.sleep(1)  # cleanup that takes a while
if rank == FAILING_RANK:
    with socket.create_server(("127.0.0.1", port)) as server:
        peers += [server.accept()[0] for _ in range(size - 1)]
    FAILURE
while True:
    try: peer = socket.create_connection(("127.0.0.1", port))
    except ConnectionRefusedError: time.sleep(0.01)  # there is no event for a peer that begins to listen
    else: break
try: peer.recv(1)
except ConnectionResetError: pass
time.sleep(random.Random(SEED + rank).uniform(0, 0.5))  # how late an echo may be
raise ECHO
"""
"""The script of a run without a framework. `cases` replaces FAILING_RANK, FAILURE, SEED and ECHO."""
TORCH_SCRIPT = """
import os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, model = dist.get_rank(), torch.nn.Linear(8, 2)
close_connections = dist.destroy_process_group
def end_slowly():
    time.sleep(1)  # gloo keeps the connections open meanwhile, until the process ends
for step in range(1000):
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    for parameter in model.parameters(): dist.all_reduce(parameter.grad)
    if step == 3 and rank == FAILING_RANK:
        FAILURE
"""
"""The script of a run with PyTorch. Its echoes are real."""


class Case(NamedTuple):
    """One run: its number of nodes, the rank that fails first and how (a key of FAILURES), and its script.

    `is_torch`: the script is real PyTorch.
    """

    nodes: int
    failing_rank: int
    failure: str
    script: str
    is_torch: bool


def cases(count: int, *, with_torch: bool, seed: int = 11) -> Iterator[Case]:
    """Yield `count` cases, the same each time. If `with_torch`, every fifth is real training with PyTorch."""
    chance = random.Random(seed)  # noqa: S311 - a benchmark must be repeatable
    for number in range(count):
        nodes = 2 if number % 2 else 4
        failure = chance.choice(sorted(FAILURES))
        failing_rank = chance.randrange(nodes)
        is_torch = with_torch and number % 5 == 0
        statement = FAILURES[failure].replace("DELAY", f"{chance.uniform(0, 0.5):.3f}")
        if is_torch:
            statement = statement.replace("\n    ", "\n        ")  # TORCH_SCRIPT has FAILURE one level deeper
        script = TORCH_SCRIPT if is_torch else SOCKET_SCRIPT
        script = script.replace("FAILING_RANK", str(failing_rank)).replace("FAILURE", statement)
        # The script adds the rank to the seed: with a step of 100, no two ranks of any cases have the same seed.
        script = script.replace("SEED", str(number * 100)).replace("ECHO", chance.choice(ECHOES))
        yield Case(nodes, failing_rank, failure, script, is_torch)


def is_right(case: Case, failure: Failure | None, records: list[dict[str, Any]]) -> bool:
    """Return whether the failure names the rank that failed first and how, and every node's record has a cause."""
    if failure is None or failure.rank != case.failing_rank or not all(record["causes"] for record in records):
        return False
    if case.failure.startswith("exception"):
        return "mat1 and mat2" in str(failure.data.get("message"))
    if case.failure.startswith("SIG"):
        return failure.signal == case.failure
    return failure.exit_code == 3  # as in FAILURES


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that compute until the end of the block."""
    processes = [multiprocessing.Process(target=_compute_for_ever, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compute_for_ever() -> None:
    while True:
        pass


def main() -> None:
    """Run the cases and print how many were right."""
    count = 20 if is_quick() else 200
    with_torch = is_ready(images_root(), "pytorch")
    results: Counter[tuple[str, str, bool]] = Counter()
    with tempfile.TemporaryDirectory(prefix="first-cause-") as folder, busy_processes(BUSY_PROCESSES):
        root = Path(folder)
        workspace = root / "workspace"
        workspace.mkdir()
        # Explicit, so that four nodes fit on a machine with fewer cores too.
        backend = create("local", root=root / "runs", images_root=images_root(), cpus=64, memory_mib=65536)
        for number, case in enumerate(cases(count, with_torch=with_torch), 1):
            (workspace / "train.py").write_text(case.script)
            spec = RunSpec(
                name=f"bench-{number}",
                framework=Framework.PYTORCH,
                image=Image(builtin="pytorch"),
                nodes=case.nodes,
                workers_per_node=1,
                resources=Resources(cpus=1, memory_mib=2048),
                script="train.py",
                deadline_seconds=TIMEOUT_SECONDS,
                mounts=(Mount(str(workspace), "/workspace", read_only=False),),
            )
            started_at = time.monotonic()
            backend.submit(spec)
            status = wait_for_end(backend, spec.name, TIMEOUT_SECONDS)
            paths = sorted((root / "runs" / spec.name / "nodes").glob("*.json"))
            records = [json.loads(path.read_bytes()) for path in paths]
            right = is_right(case, status.failure, records)
            ranks = "gloo" if case.is_torch else "sockets"
            results[ranks, case.failure, right] += 1
            if not right:
                print(f"wrong: {case.nodes} nodes, rank {case.failing_rank}, {ranks}, {case.failure}: {status.failure}")
                print(*[record["causes"] for record in records], sep="\n", flush=True)
            backend.delete(spec.name)
            print(f"{number}/{count} {ranks} {case.failure} {time.monotonic() - started_at:.1f} s", flush=True)
        backend.stop_prepared_processes()
    rows = [
        {"ranks": ranks, "how": failure, "right": right, "runs": runs}
        for (ranks, failure, right), runs in results.items()
    ]
    right_runs = sum(runs for (_ranks, _failure, right), runs in results.items() if right)
    figures = {"runs": count, "right": right_runs, "busy": BUSY_PROCESSES, "rows": rows, "load": os.getloadavg()[0]}
    print_result("first_cause", figures, ratios={})


if __name__ == "__main__":
    main()

"""Faults as whole nodes have them: everything dies, stands still or is cut off at once, and nothing outlives its node.

The one rule: what is left is counted by the sandbox's pid namespace, which no process can leave, never by names.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from runtime.backends import identity, machine
from runtime.backends.runs import wait_gone
from runtime.specs import FailureCode, Outcome, RunPhase, RunStatus

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

DOWN_SECONDS = 5
"""Within which nothing of a run that fails is left, on any node."""
FOUND_SECONDS = 15
"""Within which a node that gives no sign of life is found."""
TOGETHER = """
    import os, pathlib, signal, sys, time
    rank = int(os.environ["RANK"])
    run = pathlib.Path(os.environ["RUN_DIR"])
    (run / str(rank)).touch()
    while len(list(run.glob("[0-9]"))) < int(os.environ["WORLD_SIZE"]): time.sleep(0.001)
    print("last words of", rank, flush=True)
"""
HIDING = """
    import ctypes, os, signal
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
    if not os.fork():
        os.setsid()
        if not os.fork():
            ctypes.CDLL(None).prctl(15, b"kworker/0:1", 0, 0, 0)
            os.closerange(0, 256)
            while True: signal.pause()
        os._exit(0)
    os.wait()
    print("ready", flush=True)
    while True: signal.pause()
"""
"""Has a daemon: a session of its own, another name, no descriptor, deaf to every signal that can be ignored."""
CUT = """
import ctypes, fcntl, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.setns(os.open(f"/proc/{sys.argv[1]}/ns/net", os.O_RDONLY), 0x40000000): sys.exit("not allowed")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0))
"""
"""Takes down the one interface that the nodes of a run share: nothing arrives any more, and nothing is refused."""


class Node:
    """One node of a run as the host sees it: its supervisor, bubblewrap, and everybody in the sandbox."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.supervisor = int(record["pid"])
        # The supervisor of the first node has started the others, which are its children, too.
        (self.bubblewrap,) = (pid for pid in _children(self.supervisor) if b"bwrap" in _command(pid).split(b"\0")[0])
        (self.launcher,) = _children(self.bubblewrap)
        namespace = _namespace(self.launcher)
        assert namespace not in {"", _namespace(self.bubblewrap)}
        self.inside = [pid for pid in psutil.pids() if _namespace(pid) == namespace]
        self.everybody = {pid: identity.start_time(pid) for pid in (self.supervisor, self.bubblewrap, *self.inside)}

    def signal(self, number: int, *pids: int) -> None:
        for pid in pids or tuple(self.everybody):
            os.kill(pid, number)

    def is_gone(self, seconds: float = 10) -> bool:
        """Whether no process of the node is left, after at most so long."""
        until = time.monotonic() + seconds
        return all(
            started is None or wait_gone(pid, started, until - time.monotonic())
            for pid, started in self.everybody.items()
        )


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def nodes_of(yard: Yard, count: int) -> list[Node]:
    """The nodes, once every rank has said that it is ready."""
    for rank in range(count):
        yard.wait_for_text("ready", rank=rank)
    return [Node(record) for record in yard.records()]


def found_at(yard: Yard) -> float:
    """When the first of the nodes wrote down that another one was lost."""
    return min(
        float(cause["at"]) for record in yard.records() for cause in record["causes"] if cause["kind"] == "node_lost"
    )


def failed(status: RunStatus) -> tuple[int | None, int | None, str]:
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert status.failure.last_lines[-1] == f"last words of {status.failure.rank}"
    return status.failure.rank, status.failure.exit_code, status.failure.signal


@pytest.mark.parametrize("workers", [1, 2])
def test_of_ranks_that_exit_at_once_one_is_named_with_its_own_code(yard: Yard, workers: int) -> None:
    status = yard.run(TOGETHER + "    sys.exit(10 + rank)", nodes=2, workers_per_node=workers)
    rank, code, name = failed(status)
    assert rank is not None
    assert (code, name) == (10 + rank, "")
    assert status.failure is not None
    assert status.failure.node == rank // workers


ECHO = """
    import socket
    port = int(os.environ["MASTER_PORT"])
    if rank == 3:
        with socket.create_server(("127.0.0.1", port)) as server:
            peers = [server.accept()[0] for _ in range(3)]
            print("met", flush=True)
            HOW
    while True:
        try: peer = socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError: time.sleep(0.01)
        else: break
    peer.recv(1)
    raise RuntimeError("connection closed by peer")
"""
"""Rank 3 dies; the others fail in the same moment, as those of gloo do whose connection closes."""


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("__import__('ctypes').string_at(0)", "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGBUS)", "SIGBUS"),
    ],
)
def test_of_ranks_that_fall_with_one_that_a_signal_ended_that_one_is_named(yard: Yard, how: str, name: str) -> None:
    status = yard.run(TOGETHER + ECHO.replace("HOW", how), nodes=2, workers_per_node=2)
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert (status.failure.rank, status.failure.node, status.failure.signal) == (3, 1, name)
    assert status.failure.last_lines[:2] == ("last words of 3", "met")


@pytest.mark.parametrize("how", ["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_rest_of_a_failed_run_is_down_in_time_on_every_node(yard: Yard, how: str) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script = TOGETHER + f"    {deaf}\n    if rank == 2:\n        {how}\n    while True: signal.pause()"
    status = yard.run(script, nodes=4)
    assert failed(status)[0] == 2
    failed_at = min(cause["at"] for record in yard.records() for cause in record["causes"])
    ends = [node.finished_at for node in status.nodes]
    assert len(ends) == 4
    assert all(at is not None and at - failed_at <= DOWN_SECONDS for at in ends), (failed_at, ends)


@pytest.mark.parametrize("who", ["supervisor", "bubblewrap", "launcher", "rank"])
def test_no_process_outlives_its_node(yard: Yard, who: str) -> None:
    yard.backend.submit(yard.spec(HIDING, nodes=2))
    nodes = nodes_of(yard, 2)
    assert [len(node.inside) for node in nodes] == [3, 3], "the launcher, the rank and its daemon"
    victim = nodes[1]
    rank = next(pid for pid in _children(victim.launcher) if Path(f"/proc/{pid}/comm").read_text() != "kworker/0:1\n")
    victim.signal(signal.SIGKILL, rank if who == "rank" else getattr(victim, who))
    status = yard.wait_for_end()
    assert status.outcome is (Outcome.CODE_FAILED if who == "rank" else Outcome.NODE_LOST)
    assert status.failure is not None
    assert status.failure.node == 1
    assert all(node.is_gone() for node in nodes)


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_stands_still_whole_is_found_by_its_silence(yard: Yard, node: int) -> None:
    yard.backend.submit(yard.spec(HIDING, nodes=2))
    nodes = nodes_of(yard, 2)
    stopped_at = time.time()
    nodes[node].signal(signal.SIGSTOP)
    # Nobody asks how the run goes meanwhile: the other node finds it, as it would without a console.
    assert nodes[1 - node].is_gone(30)
    assert found_at(yard) - stopped_at <= FOUND_SECONDS
    status = yard.wait_for_end()
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure is not None
    assert (status.failure.node, status.failure.code) == (node, FailureCode.NODE_SILENT)
    assert all(each.is_gone() for each in nodes)


def test_nodes_that_are_cut_off_from_each_other_fall(yard: Yard) -> None:
    yard.backend.submit(yard.spec(HIDING, nodes=3))
    nodes = nodes_of(yard, 3)
    cut_at = time.time()
    subprocess.run([sys.executable, "-c", CUT, str(nodes[0].launcher)], check=True)
    status = yard.wait_for_end()
    assert found_at(yard) - cut_at <= FOUND_SECONDS
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure is not None
    assert status.failure.code is FailureCode.NODE_SILENT
    assert [node.phase for node in status.nodes] == [RunPhase.ENDED] * 3
    assert all(node.is_gone() for node in nodes)


@pytest.fixture
def small_disk(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """The runs lie on a disk of their own, of 300 MiB; gives a call that fills it."""
    runs = yard.folder / "runs"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(runs)], check=False).returncode:
        pytest.fail("the tests need to mount: run them as root")
    monkeypatch.setattr(machine, "_LEAST_ROOM_MIB", 32)
    yard.backend = yard.another()

    def fill() -> None:
        with (runs / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 20)):
                    pass
            except OSError:
                return

    try:
        yield fill
    finally:
        yard.backend.delete("job-1-1")
        subprocess.run(["umount", str(runs)], check=True)
        yard.backend = yard.another()


def test_a_disk_that_others_filled_is_the_platforms_fault(yard: Yard, small_disk: Callable[[], None]) -> None:
    script = """
    import os, pathlib, time
    print("ready", flush=True)
    while not pathlib.Path("go").exists(): time.sleep(0.01)
    with open(os.path.join(os.environ["CHECKPOINT_DIR"], "model"), "wb") as file: file.write(bytes(1 << 20))
    """
    yard.backend.submit(yard.spec(script, nodes=2))
    nodes = nodes_of(yard, 2)
    small_disk()
    (yard.workspace / "go").touch()
    status = yard.wait_for_end()
    assert status.outcome is Outcome.PLATFORM_ERROR, yard.all_logs("job-1-1")
    assert status.failure is not None
    assert status.failure.code is FailureCode.DISK_FULL
    assert status.failure.data["free_mib"] < 256
    assert all(node.is_gone() for node in nodes)


@pytest.mark.parametrize("node", [0, 1])
def test_a_disk_that_the_run_filled_itself_is_its_own_fault(
    yard: Yard, small_disk: Callable[[], None], node: int
) -> None:
    """Far below what it may write, but all that there was: it would be free otherwise, and whoever else runs is hit."""
    del small_disk  # it is small; the run fills it
    script = f"""
    import os, sys, time
    if os.environ["RANK"] != "{node}": time.sleep(30)
    with open(os.path.join(os.environ["CHECKPOINT_DIR"], "model"), "wb") as file:
        for _ in range(400): file.write(bytes(1 << 20))
    """
    status = yard.run(script, nodes=2)
    assert status.outcome in {Outcome.CODE_FAILED, Outcome.DISK_FULL}, status.failure


def test_a_full_disk_does_not_keep_a_run_from_its_deadline(yard: Yard, small_disk: Callable[[], None]) -> None:
    script = "print('ready', flush=True)\nwhile True: print('x' * 1000)"
    yard.backend.submit(yard.spec(script, nodes=2, deadline_seconds=6, grace_seconds=1))
    nodes = nodes_of(yard, 2)
    small_disk()
    assert all(node.is_gone(20) for node in nodes)
    assert yard.backend.describe("job-1-1").phase is RunPhase.ENDED


def test_a_flood_of_output_is_cut_and_the_run_goes_on(yard: Yard) -> None:
    script = """
    import os, time
    for _ in range(128): os.write(1, b"y" * 1023 * 1024 + b"\\n")
    os.write(1, b"the end\\n")
    os.mkdir(os.environ["RANK"])
    while not all(map(os.path.isdir, "01")): time.sleep(0.01)  # who fails first ends the other
    raise SystemExit(3)
    """
    status = yard.run(script, workers_per_node=2, log_limit_bytes=1 << 20)
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert status.failure.exit_code == 3
    assert status.failure.last_lines[-1] == "the end", "the end is told although the log was cut long before"
    for rank in range(2):
        path = yard.backend.run_folder("job-1-1") / "logs" / f"rank-{rank}.log"
        assert 1 << 20 <= path.stat().st_size < (1 << 20) + 300
        assert path.read_bytes().count(b"has reached its limit of 1048576 bytes") == 1


def test_output_is_kept_byte_for_byte_with_or_without_lines(yard: Yard) -> None:
    script = """
    import os
    os.write(1, bytes(range(256)) * 40)
    for _ in range(30): os.write(1, b"z" * 100_000)
    """
    assert yard.run(script).outcome is Outcome.COMPLETED
    kept = (yard.backend.run_folder("job-1-1") / "logs" / "rank-0.log").read_bytes()
    assert kept == bytes(range(256)) * 40 + b"z" * 3_000_000
    assert yard.log().endswith("z" * 1000)


def test_code_that_wrecks_what_it_reports_through_harms_itself_alone(yard: Yard) -> None:
    script = """
    import os, shutil
    for name in ("METRICS_FILE", "TENSORBOARD_LOGDIR", "CHECKPOINT_DIR", "RUN_DIR"):
        path = os.environ[name]
        for spoil in (os.unlink, shutil.rmtree):
            try: spoil(path)
            except OSError: pass
    os.makedirs(os.environ["RUN_DIR"], exist_ok=True)
    os.mkfifo(os.environ["METRICS_FILE"])
    for descriptor in range(3, 64):
        try: os.ftruncate(descriptor, 0)
        except OSError: pass
        try: os.write(descriptor, b"raised 1\\nfinished 1\\n{" + bytes(range(256)) * 64)
        except OSError: pass
    print("done")
    """
    status = yard.run(script, nodes=2)
    assert status.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    assert status.failure is None
    assert [yard.log(rank).splitlines()[-1] for rank in range(2)] == ["done", "done"]

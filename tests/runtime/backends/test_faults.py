"""Faults of ranks, nodes and disks on one machine: each is noticed, and no process outlives its node.

Processes are found by the sandbox's pid namespace, which no process can leave, and never by their names.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from runtime import pids
from runtime.backends import host
from runtime.launcher.disk import RESERVE_BYTES
from runtime.specs import FailureCode, Outcome, RunPhase
from tests.console.processes import children
from tests.runtime.backends.contract import WAIT
from tests.runtime.backends.test_first_cause import AWAIT_ALL

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")

DOWN_SECONDS = 5
"""How long the other ranks of a failed run may live."""
DETECTION_SECONDS = 15
"""How long a silent node may stay undetected."""
DAEMON = """
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
"""Has a daemon with its own session, another name and no descriptor. Both ignore SIGTERM, SIGHUP and SIGINT."""
CUT = """
import ctypes, fcntl, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.setns(os.open(f"/proc/{sys.argv[1]}/ns/net", os.O_RDONLY), 0x40000000): sys.exit("not allowed")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0))
"""
"""Takes down the interface that the nodes of a run share: nothing arrives, and nothing is refused. 0x40000000 is
CLONE_NEWNET, and 0x8914 is SIOCSIFFLAGS."""


class Node:
    """A node's processes on the host: its supervisor, bubblewrap, and all processes in the sandbox."""

    def __init__(self, record):
        self.supervisor = int(record["pid"])
        # Node 0's supervisor is the parent of the other supervisors.
        (self.bubblewrap,) = (pid for pid in children(self.supervisor) if b"bwrap" in command(pid).split(b"\0")[0])
        (self.launcher,) = children(self.bubblewrap)
        namespace = pid_namespace(self.launcher)
        assert namespace not in {"", pid_namespace(self.bubblewrap)}
        self.inside = [pid for pid in psutil.pids() if pid_namespace(pid) == namespace]
        self.processes = {pid: pids.start_time(pid) for pid in (self.supervisor, self.bubblewrap, *self.inside)}

    def signal_all(self, number):
        for pid in self.processes:
            os.kill(pid, number)

    def is_down(self, seconds=10):
        """Whether no process of the node is left within this time."""
        until = time.monotonic() + seconds
        return all(
            started is None or pids.wait_for_end(pid, started, until - time.monotonic())
            for pid, started in self.processes.items()
        )


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def pid_namespace(pid):
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def start(harness, source=DAEMON, name="job-1-1", **changes):
    """Start a run and return its nodes once every rank is ready."""
    harness.start(source, name=name, **changes)
    return [Node(record) for record in harness.records(name)]


def causes(harness, name="job-1-1"):
    """The causes in all records, in the order of their times."""
    found = (cause for record in harness.records(name) for cause in record["causes"])
    return sorted(found, key=lambda cause: cause["at"])


# Ranks that fail


@pytest.mark.slow
def test_all_ranks_are_down_soon_after_a_failure_even_if_they_ignore_sigterm(harness):
    # AWAIT_ALL sets `rank`, and goes on once every rank has started.
    ignore = "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script = (
        AWAIT_ALL + ignore + "    if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n    while True: signal.pause()"
    )
    assert harness.run_to_failure(Outcome.CODE_FAILED, script, nodes=4).rank == 2
    ends = [node.finished_at for node in harness.backend.describe("job-1-1").nodes]
    assert len(ends) == 4
    assert all(at is not None and at - causes(harness)[0]["at"] <= DOWN_SECONDS for at in ends), ends


@pytest.mark.parametrize("late", ["0", "1"])
def test_a_rank_that_fails_after_the_other_node_has_finished_ends_the_run(harness, late):
    # Under torchrun, the finished node would wait 300 s for the other, in a barrier that SIGTERM does not end.
    script = f"""
    import os, pathlib, sys, time
    rank, run = os.environ["RANK"], pathlib.Path(os.environ["RUN_DIR"])
    if rank != "{late}":
        (run / "finished").touch()
        sys.exit(0)
    while not (run / "finished").exists(): time.sleep(0.01)
    time.sleep(1)  # until the other node's launcher has ended too
    sys.exit(4)
    """
    failure = harness.run_to_failure(Outcome.CODE_FAILED, script, nodes=2)
    assert (failure.rank, failure.exit_code) == (int(late), 4)
    finished_at = harness.backend.describe("job-1-1").finished_at
    assert finished_at - causes(harness)[0]["at"] <= DOWN_SECONDS


def test_an_abort_after_the_last_line_completes_with_a_note(harness):
    """Libraries may abort while the interpreter shuts down. All results have been written before."""
    status = harness.complete("import atexit, os\natexit.register(os.abort)\nprint('trained')", nodes=2)
    assert "returned from its last line" in status.nodes[1].detail
    assert "[trainyard] Rank 1: the script returned from its last line" in harness.log(1)


def test_the_deadline_needs_no_console(harness):
    harness.submit(WAIT, nodes=2, deadline_seconds=2, grace_seconds=1)
    harness.wait("job-1-1", lambda _status: len(harness.records()) == 2)
    # No call to the backend until every supervisor has ended its node.
    for record in harness.records():
        assert pids.wait_for_end(record["pid"], record["start_time"], 20)
    assert harness.backend.describe("job-1-1").outcome is Outcome.TIME_LIMIT


# Nodes that are lost, stopped or cut off


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "process", "outcome", "code"),
    [
        (0, "supervisor", Outcome.NODE_LOST, FailureCode.NODE_LOST),
        (1, "bubblewrap", Outcome.NODE_LOST, FailureCode.NODE_LOST),
        # Only the launcher is inside the sandbox, where the code may have killed it.
        (1, "launcher", Outcome.CODE_FAILED, FailureCode.LAUNCHER_KILLED),
        # None: the supervisors of all nodes.
        (None, "supervisor", Outcome.NODE_LOST, FailureCode.NODE_LOST),
    ],
)
def test_no_process_outlives_its_node(harness, node, process, outcome, code):
    nodes = start(harness, nodes=2)
    assert [len(each.inside) for each in nodes] == [3, 3], "the launcher, the rank and its daemon"
    for victim in nodes if node is None else [nodes[node]]:
        os.kill(getattr(victim, process), signal.SIGKILL)
    failure = harness.wait_for_failure(outcome)
    assert failure.code is code
    assert node is None or failure.node == node
    assert all(each.is_down() for each in nodes)


STAYS = """
    import atexit, threading
    print("ready", flush=True)
    atexit.register(threading.Event().wait)
    raise RuntimeError("no such column")
"""
"""Fails, but its process stays, as when a data loader's worker ignores SIGTERM: the interpreter waits for ever."""


@pytest.mark.slow
def test_silent_nodes_and_a_failed_rank_whose_process_stays_are_detected(harness):
    """Five runs at once: a node may be silent for 12 s, and a failed rank may take 30 s to end."""
    # `hang_seconds=0` switches hang detection off, so that it does not end this run first.
    harness.start(STAYS, name="job-stays", nodes=2, hang_seconds=0, deadline_seconds=90)
    stopped = start(harness, name="job-stopped", nodes=2)
    cut_off = start(harness, name="job-cut-off", nodes=3)
    (lone_launcher,) = start(harness, name="job-lone-launcher")
    (lone_supervisor,) = start(harness, name="job-lone-supervisor")
    silent_since = time.time()
    stopped[0].signal_all(signal.SIGSTOP)
    subprocess.run([sys.executable, "-c", CUT, str(cut_off[0].launcher)], check=True)
    os.kill(lone_launcher.launcher, signal.SIGSTOP)
    os.kill(lone_supervisor.supervisor, signal.SIGSTOP)
    # Without a call to the backend, the other node detects the stopped one, as it would without a console.
    assert stopped[1].is_down(30)
    for name, outcome, node, code in (
        ("job-stopped", Outcome.NODE_LOST, 0, FailureCode.NODE_SILENT),
        # Every supervisor lives, so only code can have kept the launchers from reaching each other. Any of the nodes
        # may be the first to report it.
        ("job-cut-off", Outcome.CODE_FAILED, None, FailureCode.LAUNCHER_KILLED),
        ("job-lone-launcher", Outcome.CODE_FAILED, 0, FailureCode.LAUNCHER_KILLED),
        ("job-lone-supervisor", Outcome.NODE_LOST, 0, FailureCode.NODE_SILENT),
    ):
        failure = harness.wait_for_failure(outcome, name)
        assert (failure.code, node in {None, failure.node}) == (code, True), name
    for name in ("job-stopped", "job-cut-off"):
        detected_at = min(cause["at"] for cause in causes(harness, name) if cause["kind"] == "node_lost")
        assert detected_at - silent_since <= DETECTION_SECONDS, name
    assert all(node.is_down() for node in (*stopped, *cut_off, lone_launcher, lone_supervisor))
    failure = harness.wait_for_failure(Outcome.CODE_FAILED, "job-stays")
    assert (failure.exit_code, failure.signal) == (1, "")
    assert "no such column" in failure.last_lines[-1]


def test_only_two_signals_affect_a_launcher(harness):
    """SIGKILL and SIGSTOP: nothing can ignore them. Here the signals come from outside, past the sandbox's filter."""
    os.mkfifo(harness.workspace / "go")
    (node,) = start(harness, "print('ready', flush=True)\nopen('go').read()")
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        os.kill(node.launcher, number)
    # The script reads to the end of the pipe. O_RDWR: to open the pipe does not block if the script has ended.
    os.close(os.open(harness.workspace / "go", os.O_RDWR))
    harness.wait_for_outcome(Outcome.COMPLETED)


def test_an_interpreter_that_cannot_start_is_the_platforms_fault(harness, tmp_path):
    harness.images_root = tmp_path / "images"
    interpreter = harness.images_root / harness.image / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text("#!/nowhere\n")
    interpreter.chmod(0o755)
    (harness.images_root / harness.image / "ready.json").write_text("{}")
    harness.backend = harness.new_backend()
    status = harness.run("", nodes=2)
    assert (status.outcome, status.started_at) == (Outcome.PLATFORM_ERROR, None)


# Disks


@pytest.fixture
def small_disk(harness, monkeypatch):
    """Put the runs on their own disk of 300 MiB, and return a call that fills it."""
    runs = harness.folder / "runs"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(runs)], check=False).returncode:
        pytest.fail("the tests need to mount: run them as root")
    monkeypatch.setattr(host, "_MIN_FREE_MIB", 32)  # added to the reserve; else no run could start on so small a disk
    harness.backend = harness.new_backend()

    def fill():
        with (runs / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 20)):
                    pass
            except OSError:
                return

    try:
        yield fill
    finally:
        harness.backend.delete("job-1-1")
        subprocess.run(["umount", str(runs)], check=True)
        harness.backend = harness.new_backend()


def test_a_disk_that_others_filled_is_the_platforms_fault(harness, small_disk):
    script = """
    import os, pathlib, time
    print("ready", flush=True)
    while not pathlib.Path("go").exists(): time.sleep(0.01)
    with open(os.path.join(os.environ["CHECKPOINT_DIR"], "model"), "wb") as file: file.write(bytes(1 << 20))
    """
    nodes = start(harness, script, nodes=2)
    small_disk()
    (harness.workspace / "go").touch()
    failure = harness.wait_for_failure(Outcome.PLATFORM_ERROR)
    assert failure.code is FailureCode.DISK_FULL
    assert failure.data["free_mib"] < RESERVE_BYTES >> 20
    assert all(node.is_down() for node in nodes)


@pytest.mark.usefixtures("small_disk")
def test_a_disk_that_the_run_filled_itself_is_its_own_fault(harness):
    """It wrote less than its limit, but used up the disk. It must be billed, since it hurts other runs.

    The rank fails to write, or the supervisor measures the disk first.
    """
    script = """
    import os, time
    if os.environ["RANK"] != "1": time.sleep(30)
    with open(os.path.join(os.environ["CHECKPOINT_DIR"], "model"), "wb") as file:
        for _ in range(400): file.write(bytes(1 << 20))
    """
    status = harness.run(script, nodes=2)
    assert status.outcome in {Outcome.CODE_FAILED, Outcome.DISK_FULL}, status.failure


@pytest.mark.slow
@pytest.mark.usefixtures("small_disk")
def test_a_disk_without_room_for_the_record_loses_no_node(harness):
    """A node without a last record counts as lost, so code that fills the whole disk would run free.

    The script exits, or the supervisor measures the disk first.
    """
    script = """
    import os
    with open(os.path.join(os.environ["RUN_DIR"], "all"), "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)): pass
            except OSError: pass
    for _ in range(20): print("x" * 4000, flush=True)  # the log cannot be written either
    raise SystemExit(3)
    """
    status = harness.run(script, deadline_seconds=40)
    assert status.outcome in {Outcome.CODE_FAILED, Outcome.DISK_FULL}, status.failure


@pytest.mark.slow
def test_a_full_disk_does_not_keep_a_run_from_its_deadline(harness, small_disk):
    script = "print('ready', flush=True)\nwhile True: print('x' * 1000)"
    nodes = start(harness, script, nodes=2, deadline_seconds=6, grace_seconds=1)
    small_disk()
    assert all(node.is_down(20) for node in nodes)
    assert harness.backend.describe("job-1-1").phase is RunPhase.ENDED


# Output and reports


def test_output_is_kept_byte_for_byte_and_a_flood_of_it_is_cut(harness):
    """Rank 0 writes bytes of every value, and a long text without line ends. Rank 1 writes more than a log may hold."""
    script = """
    import os, time
    if os.environ["RANK"] == "0":
        os.write(1, bytes(range(256)) * 40)
        for _ in range(9): os.write(1, b"z" * 100_000)
        os.mkdir("written")
    else:
        for _ in range(128): os.write(1, b"y" * 1023 * 1024 + b"\\n")
        os.write(1, b"the end\\n")
        while not os.path.isdir("written"): time.sleep(0.01)  # the first failure ends the other rank
        raise SystemExit(3)
    """
    failure = harness.run_to_failure(Outcome.CODE_FAILED, script, workers_per_node=2, log_limit_bytes=1 << 20)
    assert (failure.exit_code, failure.last_lines[-1]) == (3, "the end"), "last lines come after the cut too"
    whole, cut = ((harness.backend.run_folder("job-1-1") / "logs" / f"rank-{rank}.log").read_bytes() for rank in (0, 1))
    assert whole == bytes(range(256)) * 40 + b"z" * 900_000
    assert 1 << 20 <= len(cut) < (1 << 20) + 300, "the limit, and the notice about it"
    assert cut.count(b"has reached its limit of 1048576 bytes") == 1


def test_code_that_destroys_its_reporting_files_still_completes(harness):
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
        # One of these is the pipe on which ranks report to their launcher that they finished or raised.
        try: os.write(descriptor, b"raised 1\\nfinished 1\\n{" + bytes(range(256)) * 64)
        except OSError: pass
    print("done")
    """
    harness.complete(script, nodes=2)
    assert [harness.log(rank).splitlines()[-1] for rank in range(2)] == ["done", "done"]

"""What goes wrong in a run: the first cause is named, the rest is down soon, and nothing outlives its limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.backends import identity
from runtime.backends.runs import wait_gone
from runtime.specs import FailureCode, Outcome, RunPhase

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

FOREVER = """
    import signal
    print("ready")
    while True: signal.pause()
"""
DEAF = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready")
    while True: signal.pause()
"""


def rank_fails(rank: int, how: str) -> str:
    """A script in which one rank fails when all are there, and the others wait for ever."""
    return f"""
    import os, pathlib, signal, sys, time
    rank = os.environ["RANK"]
    run = pathlib.Path(os.environ["RUN_DIR"])
    (run / rank).touch()
    while len(list(run.glob("[0-9]"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if rank == "{rank}":
        print("last words", flush=True)
        {how}
    while True: signal.pause()
    """


def test_a_rank_that_exits_is_the_first_cause(yard: Yard) -> None:
    status = yard.run(rank_fails(2, "sys.exit(3)"), nodes=2, workers_per_node=2)
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert (status.failure.node, status.failure.rank, status.failure.exit_code) == (1, 2, 3)
    assert status.failure.message == "Rank 2 on node 1 exited with code 3."
    assert status.failure.last_lines == ("last words",)
    assert [node.phase for node in status.nodes] == [RunPhase.ENDED] * 2


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_rank_that_a_signal_ends_is_named_with_it(yard: Yard, name: str) -> None:
    status = yard.run(rank_fails(0, f"os.kill(os.getpid(), signal.{name})"), nodes=4)
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert (status.failure.rank, status.failure.exit_code, status.failure.signal) == (0, None, name)


@pytest.mark.parametrize("how", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_rest_of_the_run_is_down_within_five_seconds(yard: Yard, how: str) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script = rank_fails(2, how).replace("(run / rank).touch()", f"{deaf}; (run / rank).touch()")
    status = yard.run(script, nodes=2, workers_per_node=2)
    assert status.outcome is Outcome.CODE_FAILED
    (failed_at,) = [cause["at"] for record in yard.records() for cause in record["causes"]]
    for node in status.nodes:
        assert node.finished_at is not None
        assert node.finished_at - failed_at <= 5


def test_two_ranks_on_two_nodes_die_at_once(yard: Yard) -> None:
    # Each waits for the other's last word, so that both fail before either node could hear of it.
    script = """
    import os, pathlib, signal, sys, time
    rank, run = os.environ["RANK"], pathlib.Path(os.environ["RUN_DIR"])
    if rank in "12":
        (run / rank).touch()
        while not ((run / "1").exists() and (run / "2").exists()): pass
        os.kill(os.getpid(), signal.SIGSEGV if rank == "1" else signal.SIGKILL)
    while True: signal.pause()
    """
    status = yard.run(script, nodes=2, workers_per_node=2)
    assert status.outcome is Outcome.CODE_FAILED
    causes = sorted((cause for record in yard.records() for cause in record["causes"]), key=lambda cause: cause["at"])
    assert status.failure is not None
    assert (status.failure.rank, status.failure.signal) == (causes[0]["rank"], causes[0]["signal"])
    assert (status.failure.rank, status.failure.signal) in {(1, "SIGSEGV"), (2, "SIGKILL")}
    assert status.failure.code is FailureCode.RANK_KILLED


@pytest.mark.parametrize("late", ["0", "1"])
def test_a_rank_that_fails_after_the_other_node_has_finished_ends_the_run(yard: Yard, late: str) -> None:
    # torchrun waits 300 s here, in a barrier that SIGTERM does not end.
    script = f"""
    import os, pathlib, sys, time
    rank, run = os.environ["RANK"], pathlib.Path(os.environ["RUN_DIR"])
    if rank != "{late}":
        (run / "pid").write_text("finished")
        sys.exit(0)
    while not (run / "pid").exists(): time.sleep(0.01)
    time.sleep(1)  # the other node's launcher comes to its end as well
    sys.exit(4)
    """
    status = yard.run(script, nodes=2)
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert (status.failure.rank, status.failure.exit_code) == (int(late), 4)
    (failed_at,) = [cause["at"] for record in yard.records() for cause in record["causes"]]
    assert status.finished_at is not None
    assert status.finished_at - failed_at <= 5


def test_a_rank_whose_script_has_failed_and_that_never_leaves(yard: Yard) -> None:
    # As a data loader's worker that ignores SIGTERM makes it: the interpreter joins it for ever.
    script = """
    import atexit, signal, threading
    atexit.register(threading.Event().wait)
    raise RuntimeError("no such column")
    """
    status = yard.run(script, nodes=2, hang_seconds=0, deadline_seconds=90)
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert (status.failure.exit_code, status.failure.signal) == (1, "")
    assert "no such column" in status.failure.last_lines[-1]


def test_ranks_that_ignore_sigterm_fall_with_the_others(yard: Yard) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script = rank_fails(1, "sys.exit(1)").replace("(run / rank).touch()", f"{deaf}; (run / rank).touch()")
    status = yard.run(script, nodes=2)
    assert status.failure is not None
    assert status.failure.rank == 1


def test_an_abort_after_the_last_line_completes_with_a_note(yard: Yard) -> None:
    status = yard.run("import atexit, os\natexit.register(os.abort)\nprint('trained')", nodes=2)
    assert status.outcome is Outcome.COMPLETED
    assert "returned from its last line" in status.nodes[1].detail
    assert "[trainyard] Rank 1: the script returned from its last line" in yard.log(1)


def test_an_abort_before_the_last_line_is_a_failure(yard: Yard) -> None:
    status = yard.run("import os\nos.abort()")
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert status.failure.signal == "SIGABRT"


def test_the_deadline_needs_no_console(yard: Yard) -> None:
    yard.backend.submit(yard.spec(FOREVER, nodes=2, deadline_seconds=2, grace_seconds=1))
    for record in _supervisors(yard):
        assert wait_gone(record["pid"], record["start_time"], 20)
    status = yard.backend.describe("job-1-1")
    assert status.outcome is Outcome.TIME_LIMIT
    assert status.started_at is not None
    assert status.finished_at is not None


def test_the_grace_lies_inside_the_deadline(yard: Yard) -> None:
    status = yard.run(DEAF, nodes=2, deadline_seconds=6, grace_seconds=5)
    assert status.outcome is Outcome.TIME_LIMIT
    assert status.started_at is not None
    assert status.finished_at is not None
    assert status.finished_at - status.started_at < 6 + 3, "after the deadline there is no grace left"


def test_code_may_write_a_checkpoint_in_the_grace(yard: Yard) -> None:
    script = """
    import os, signal, sys
    def save(*_):
        open(os.path.join(os.environ["CHECKPOINT_DIR"], os.environ["RANK"]), "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    while True: signal.pause()
    """
    status = yard.run(script, nodes=2, deadline_seconds=4, grace_seconds=2)
    assert status.outcome is Outcome.TIME_LIMIT
    assert sorted(path.name for path in (yard.backend.run_folder("job-1-1") / "checkpoints").iterdir()) == ["0", "1"]


def test_stop(yard: Yard) -> None:
    yard.backend.submit(yard.spec(FOREVER, nodes=2))
    yard.wait_for_text("ready", rank=0)
    yard.wait_for_text("ready", rank=1)
    yard.backend.stop("job-1-1", 30)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.STOPPED
    yard.backend.stop("job-1-1", 30)
    assert yard.backend.describe("job-1-1") == status


def test_stop_kills_after_the_grace(yard: Yard) -> None:
    yard.backend.submit(yard.spec(DEAF, nodes=2))
    yard.wait_for_text("ready", rank=1)
    yard.backend.stop("job-1-1", 30)
    assert yard.wait("job-1-1", lambda status: status.phase is RunPhase.STOPPING)
    yard.backend.stop("job-1-1", 0)
    assert yard.wait_for_end().outcome is Outcome.STOPPED


def test_stop_at_once_after_submit(yard: Yard) -> None:
    yard.backend.submit(yard.spec(FOREVER, nodes=4))
    yard.backend.stop("job-1-1", 0)
    assert yard.wait_for_end().outcome is Outcome.STOPPED


def test_delete_ends_what_runs(yard: Yard, left_running: Callable[[], list[str]]) -> None:
    yard.backend.submit(yard.spec(DEAF, nodes=2))
    yard.wait_for_text("ready")
    assert left_running()
    yard.backend.delete("job-1-1")
    assert left_running() == []
    assert yard.backend.names() == []


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_supervisor_takes_its_node_along(yard: Yard, node: int, left_running: Callable[[], list[str]]) -> None:
    yard.backend.submit(yard.spec(DEAF, nodes=2))
    yard.wait_for_text("ready", rank=0)
    yard.wait_for_text("ready", rank=1)
    record = _supervisors(yard)[node]
    assert identity.send(record["pid"], record["start_time"], signal.SIGKILL)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure is not None
    assert status.failure.node == node
    assert left_running() == []


def test_all_supervisors_killed(yard: Yard, left_running: Callable[[], list[str]]) -> None:
    yard.backend.submit(yard.spec(DEAF, nodes=2))
    yard.wait_for_text("ready", rank=1)
    inits = [init for record in _supervisors(yard) for init in _sandbox_processes(record["pid"])]
    for record in _supervisors(yard):
        identity.send(record["pid"], record["start_time"], signal.SIGKILL)
    for pid in inits:
        started = identity.start_time(pid)
        assert started is None or wait_gone(pid, started, 10)
    assert yard.wait_for_end().outcome is Outcome.NODE_LOST
    assert left_running() == []


def test_a_killed_launcher_takes_its_node_along(yard: Yard, left_running: Callable[[], list[str]]) -> None:
    yard.backend.submit(yard.spec(DEAF, nodes=2))
    yard.wait_for_text("ready", rank=0)
    yard.wait_for_text("ready", rank=1)
    launcher = _sandbox_processes(_supervisors(yard)[1]["pid"])[1]
    os.kill(launcher, signal.SIGKILL)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure is not None
    assert status.failure.node == 1
    assert left_running() == []


@pytest.mark.parametrize("node", [0, 1])
def test_a_stopped_launcher_is_found_by_its_silence(
    yard: Yard, node: int, left_running: Callable[[], list[str]]
) -> None:
    yard.backend.submit(yard.spec(DEAF, nodes=3))
    for rank in range(3):
        yard.wait_for_text("ready", rank=rank)
    launcher = _sandbox_processes(_supervisors(yard)[node]["pid"])[1]
    stopped_at = time.time()
    os.kill(launcher, signal.SIGSTOP)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure is not None
    assert (status.failure.node, status.failure.code) == (node, FailureCode.NODE_SILENT)
    assert status.finished_at is not None
    assert status.finished_at - stopped_at <= 15, "nobody waited for a collective, and nothing runs any more"
    assert left_running() == []


@pytest.mark.parametrize("node", [0, 1])
def test_a_stopped_supervisor_is_found_by_its_siblings(
    yard: Yard, node: int, left_running: Callable[[], list[str]]
) -> None:
    yard.backend.submit(yard.spec(DEAF, nodes=2))
    yard.wait_for_text("ready", rank=0)
    yard.wait_for_text("ready", rank=1)
    record = _supervisors(yard)[node]
    os.kill(record["pid"], signal.SIGSTOP)
    # Nobody asks how the run goes: the siblings find it, as they would without a console.
    assert wait_gone(record["pid"], record["start_time"], 30)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure is not None
    assert (status.failure.node, status.failure.code) == (node, FailureCode.NODE_SILENT)
    assert left_running() == []


def test_a_stopped_supervisor_is_found_by_who_asks(yard: Yard, left_running: Callable[[], list[str]]) -> None:
    yard.backend.submit(yard.spec(DEAF))
    yard.wait_for_text("ready")
    os.kill(_supervisors(yard)[0]["pid"], signal.SIGSTOP)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure is not None
    assert status.failure.code is FailureCode.NODE_SILENT
    assert left_running() == []


def test_an_interpreter_that_cannot_start_is_the_platforms_fault(yard: Yard, bare_images: Path) -> None:
    broken = bare_images / "broken" / "bin"
    broken.mkdir(parents=True)
    (broken / "python").write_text("#!/nowhere\n")
    (broken / "python").chmod(0o755)
    (bare_images / "broken" / "ready.json").write_text("{}")
    yard.image = "broken"
    status = yard.run("", nodes=2)
    assert status.outcome is Outcome.PLATFORM_ERROR
    assert status.started_at is None


def test_supervisors_outlive_whoever_submitted(yard: Yard) -> None:
    spec = yard.spec(FOREVER)
    code = (
        "import sys; from pathlib import Path; from runtime.backends.base import create; "
        "from runtime.specs import FailureCode, RunSpec;"
        f"create('local', root=Path({str(yard.folder / 'runs')!r}), images_root=Path({str(yard.images_root)!r}))"
        ".submit(RunSpec.from_json(sys.stdin.read()))"
    )
    subprocess.run([sys.executable, "-c", code], input=spec.to_json(), text=True, check=True, start_new_session=True)
    assert yard.wait_for_text("ready").phase is RunPhase.RUNNING
    yard.backend.stop("job-1-1", 0)
    assert yard.wait_for_end().outcome is Outcome.STOPPED


def _supervisors(yard: Yard) -> list[dict[str, int]]:
    """The records, once every supervisor has written its own."""
    nodes = len(yard.backend.describe("job-1-1").nodes)
    yard.wait("job-1-1", lambda _status: len(yard.records()) == nodes)
    return yard.records()


def _sandbox_processes(supervisor: int) -> list[int]:
    """On the host: bubblewrap, then the launcher, which is the sandbox's first process."""
    # Node 0's supervisor is the parent of the others'.
    children = [int(pid) for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()]
    (bubblewrap,) = [pid for pid in children if b"bwrap" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]]
    launcher = int(Path(f"/proc/{bubblewrap}/task/{bubblewrap}/children").read_text().split()[0])
    return [bubblewrap, launcher]

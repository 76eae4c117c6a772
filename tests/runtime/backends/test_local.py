"""Behaviour of local runs only. The contract of all backends is in `test_backend_contract.py`."""

import errno
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from runtime import pids
from runtime.backends.local.runs import Run
from runtime.backends.supervision import peer_liveness
from runtime.errors import NoCapacity, RunNotFound, RunUnreadable
from runtime.launcher import disk
from runtime.specs import Outcome, RunPhase
from tests.runtime.backends.contract import STUBBORN, WAIT

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")


def test_the_script_is_main_in_a_plain_interpreter(harness):
    (harness.workspace / "deep").mkdir()
    (harness.workspace / "deep" / "beside.py").write_text("NAME = 'beside'\n")
    (harness.workspace / "deep" / "main.py").write_text(
        "import sys, beside, os\n"
        "me = sys.modules['__main__']\n"
        "print(__name__, __file__, me.__dict__ is globals(), __doc__, beside.NAME, os.getcwd(), 'run' in globals())\n"
    )
    harness.complete("", script="deep/main.py")  # "": an empty `train.py`, which is not used
    assert harness.log() == "__main__ /workspace/deep/main.py True None beside /workspace/deep False\n"


def test_checkpoints_date_the_status_and_are_shared_with_the_outputs_by_attempts_with_one_key(harness):
    script = """
    import os
    for name in ("CHECKPOINT_DIR", "OUTPUT_DIR"):
        path = os.environ[name] + "/state"
        print(open(path).read() if os.path.exists(path) else "nothing")
        open(path, "w").write("epoch 3")
    """
    status = harness.complete(script, checkpoint_key="job-1")
    assert status.started_at <= status.progress_at
    assert status.checkpoint_at == (harness.backend.checkpoint_folder("job-1") / "state").stat().st_mtime
    assert [span.nodes for span in status.spans] == [1]
    harness.backend.delete("job-1-1")
    harness.complete(script, checkpoint_key="job-1", name="job-1-2")
    assert harness.log(name="job-1-2") == "epoch 3\nepoch 3\n"
    harness.backend.delete_shared("job-1")
    assert not harness.backend.checkpoint_folder("job-1").exists()
    assert not harness.backend.output_folder("job-1").exists()


def test_an_incomplete_submission_is_no_run_and_can_be_repeated(harness):
    harness.complete("print('ran')")
    (harness.backend.run_folder("job-1-1") / "submission.json").unlink()
    with pytest.raises(RunNotFound):
        harness.backend.describe("job-1-1")
    assert harness.backend.names() == ["job-1-1"], "reconciliation sees it"
    harness.complete("print('ran again')")
    assert harness.log() == "ran again\n"


def test_a_run_is_not_lost_while_its_files_cannot_be_read(harness, monkeypatch):
    harness.complete("print('ran')")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(RunUnreadable, match="Too many open files"):
            harness.backend.describe("job-1-1")
        monkeypatch.setattr(Run, "submission", lambda _run: {"spec": {"nodes": 1}, "submitted_at": 0.0})
        with pytest.raises(RunUnreadable, match="Too many open files"):
            harness.backend.describe("job-1-1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    record = peer_liveness.read_record(peer_liveness.record_path(harness.backend.run_folder("job-1-1"), 0))
    for records in ([], [None], [{**record, "phase": "running"}]):  # what is read before the error
        read = Mock(side_effect=[*records, *[OSError(errno.EIO, "Input/output error")] * 2])
        with monkeypatch.context() as patch:
            patch.setattr(peer_liveness, "read_record", read)
            with pytest.raises(RunUnreadable, match="Input/output error"):
                harness.backend.describe("job-1-1")


def test_a_live_run_that_cannot_be_read_counts_and_is_stopped(harness, monkeypatch):
    harness.submit(WAIT)
    harness.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    free = harness.backend.capacity()
    with monkeypatch.context() as patch:
        patch.setattr(Run, "status", Mock(side_effect=RunUnreadable))
        assert harness.backend.capacity() == free
        harness.backend.stop("job-1-1", 1)
    harness.wait_for_outcome(Outcome.STOPPED)


def test_a_run_whose_files_stay_unreadable_is_killed_and_frees_its_machine(harness, monkeypatch):
    """Neither the submission, nor the records, nor the list of control groups can be read."""
    free = harness.backend.capacity()
    harness.submit(WAIT, nodes=2)
    harness.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    taken = harness.backend.capacity()
    assert taken != free
    nodes = harness.backend.run_folder("job-1-1") / "nodes"
    processes = pids.with_descendants(pids.lock_holders(nodes))
    assert len(processes) > 4, "for each node at least a supervisor, bubblewrap and a launcher"
    for path in nodes.parent.rglob("*"):
        if path.suffix in {".json", ".cgroups"}:
            path.unlink()
            path.mkdir()  # reading it is an error that root gets too
    with pytest.raises(RunUnreadable):
        harness.backend.describe("job-1-1")
    assert harness.backend.capacity() == taken
    marker = nodes.parents[1] / ".active" / "job-1-1"
    reservation = marker.read_text()
    marker.write_text("")
    assert harness.backend.capacity().machines[0].free.cpus == 0, "the run may take all of the machine"
    marker.write_text(reservation)
    (nodes.parent / "stop.json").mkdir()
    with pytest.raises(RunUnreadable):
        harness.backend.stop("job-1-1", 1)
    harness.backend.kill("job-1-1")
    assert not any(pids.is_alive(pid, pids.start_time(pid)) for pid in processes)
    assert harness.backend.capacity() == free
    assert nodes.exists()
    trash = nodes.parents[1] / ".trash"
    trash.touch()  # so that no folder can be moved into it
    for delete in (harness.backend.delete, harness.backend.delete_shared):
        harness.backend.checkpoint_folder("job-1-1").mkdir(exist_ok=True)
        with pytest.raises(RunUnreadable):
            delete("job-1-1")
    trash.unlink()
    harness.backend.delete_shared("job-1-1")
    harness.backend.delete("job-1-1")


def test_a_damaged_submission_of_a_live_run_is_no_missing_run(harness):
    harness.submit(WAIT)
    harness.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    taken = harness.backend.capacity()
    submission = harness.backend.run_folder("job-1-1") / "submission.json"
    submission.write_text("{")
    with pytest.raises(RunUnreadable, match="damaged"):
        harness.backend.describe("job-1-1")
    assert harness.backend.capacity() == taken
    processes = pids.with_descendants(pids.lock_holders(submission.parent / "nodes"))
    (submission.parent / "nodes" / "0.json").write_text("{")
    harness.backend.delete("job-1-1")
    assert processes
    assert not any(pids.is_alive(pid, pids.start_time(pid)) for pid in processes)
    with pytest.raises(RunNotFound):
        harness.backend.describe("job-1-1")


def test_supervisors_of_a_submitter_that_died_start_nothing(harness, monkeypatch):
    def die(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "record_submission", die)
    with pytest.raises(KeyboardInterrupt):
        harness.submit("print('must not run')", nodes=2)
    assert harness.backend.names() == []
    assert harness.backend.capacity().machines[0].free.cpus == 64, "all that the harness declares"


def test_no_run_begins_on_a_disk_without_room(harness, monkeypatch, caplog):
    """The free space at the start is the most that a run may write, and a run that writes more pays."""
    enough = disk.RESERVE_BYTES + (1 << 30)
    monkeypatch.setattr(disk, "free_bytes", lambda _folder: enough - 1)
    spec = harness.spec("print('ran')")
    for _attempt in range(2):
        with pytest.raises(NoCapacity):
            harness.backend.submit(spec)
    assert harness.backend.names() == []
    capacity = harness.backend.capacity()
    assert (capacity.nodes_now(spec.resources), capacity.nodes_ever(spec.resources) > 0) == (0, True)
    assert caplog.text.count("1279 MiB are free on its disk") == 1, "256 + 1024 MiB less one byte, reported once"
    monkeypatch.setattr(disk, "free_bytes", lambda _folder: enough)
    harness.complete("print('ran')")


def test_concurrent_submissions_never_overbook(harness):
    """Each run takes one of the machine's three cores."""
    specs = [harness.spec(WAIT, name=f"job-{number}-1") for number in range(6)]
    with ThreadPoolExecutor() as pool:
        submissions = [pool.submit(harness.new_backend(cpus=3).submit, spec) for spec in specs]
    assert [type(each.exception()) for each in submissions].count(NoCapacity) == 3
    assert len(harness.backend.names()) == 3
    small = harness.new_backend(cpus=3)
    assert small.capacity().machines[0].free.cpus == 0
    harness.backend.delete(harness.backend.names()[0])
    assert small.capacity().machines[0].free.cpus == 1


@pytest.mark.slow
def test_odd_but_successful_code_completes(harness):
    """Each rank is odd in its own way."""
    script = """
    import os, resource, signal, sys
    rank = int(os.environ["RANK"])
    if rank == 0: sys.stdout.buffer.write(bytes(range(256)) * 100)
    if rank == 1: os.close(1); os.close(2)
    if rank == 2: os.closerange(0, 256)
    if rank == 3 and os.fork() == 0:
        os.setsid()
        signal.pause()
    if rank == 4: resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    """
    harness.complete(script, workers_per_node=5)


def test_a_shorter_stop_counts_though_the_supervisor_had_not_read_it_before_a_longer_one(harness):
    harness.start(STUBBORN, grace_seconds=600, deadline_seconds=3600)
    supervisor = harness.records("job-1-1")[0]["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    harness.backend.stop("job-1-1", 1)
    harness.backend.stop("job-1-1", 600)
    os.kill(supervisor, signal.SIGCONT)
    harness.wait_for_outcome(Outcome.STOPPED)


def test_a_running_run_is_extended_but_not_one_that_is_being_stopped(harness):
    harness.start(STUBBORN, grace_seconds=1, deadline_seconds=4)
    for seconds in (6, 5):  # the second asks for less, and changes nothing
        harness.backend.extend("job-1-1", seconds)
    status = harness.wait_for_outcome(Outcome.TIME_LIMIT)
    assert status.failure.data["limit_seconds"] == 6
    assert 5 < status.finished_at - status.started_at <= 6.5
    harness.start(STUBBORN, name="job-2-1", grace_seconds=600, deadline_seconds=3600)
    harness.backend.stop("job-2-1", 2)
    harness.backend.extend("job-2-1", 7200)  # changes nothing: the run is already being stopped
    harness.wait_for_outcome(Outcome.STOPPED, "job-2-1")

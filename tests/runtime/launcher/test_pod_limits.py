"""The limits of a node in a Pod, with a fake clock that starts at 1000 s."""

import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from runtime.launcher import cgroup_events
from runtime.launcher.node_limits import SILENCE_SECONDS
from runtime.launcher.pod import deadline
from runtime.launcher.pod.deadline import DeadlineThread
from runtime.launcher.pod.limits import START_MARGIN_SECONDS, PodLimits
from runtime.launcher.processes import Exit
from runtime.launcher.record import Record
from tests.console.processes import wait_for

POD_PLAN = {"start_seconds": 30, "deadline_seconds": 100, "grace_seconds": 10, "memory_bytes": 1 << 30}
KILLED = Exit(7, None, "SIGKILL")  # pid, exit code and signal


@pytest.fixture
def clock(clock, monkeypatch):
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture
def counters(monkeypatch):
    """How many processes the kernel has killed for lack of memory and refused, and the limit of processes."""
    counters = SimpleNamespace(oom_kills=0, process_refusals=0, process_limit=None)
    for name in vars(counters):
        monkeypatch.setattr(cgroup_events, name, partial(getattr, counters, name))
    return counters


@pytest.fixture
def record(tmp_path):
    """The record of node 1. Customer code has started if its data has the key `started_at`."""
    return Record(tmp_path, None, node=1, address="10.0.0.1")


def check_for(limits, clock, seconds, step=1.0):
    """Check once every step; return the kind and code of the first verdict."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += step
        verdict = limits.check(clock.now)
        if verdict is not None:
            return verdict.kind, verdict.code
    return None


def test_each_node_counts_the_files_on_its_own_machines_disk(clock, record, tmp_path):
    """On a machine without free inodes, the kubelet would evict the node, and the run would be free."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    limits = PodLimits({**POD_PLAN, "local": {"tmp": str(folder)}, "local_disk_bytes": 1 << 20}, record)
    limits.measure_folders()
    record.data["started_at"] = 0.0
    assert check_for(limits, clock, 10) is None
    for number in range(300):
        (folder / str(number)).touch()
    assert check_for(limits, clock, 10) == ("disk_full", "disk_full")


def test_a_silent_launcher_is_the_codes_fault_only_after_its_code_began(clock, record):
    # The names of the nodes never resolve, so the launcher is not started.
    limits = PodLimits(POD_PLAN, record)
    assert check_for(limits, clock, 30) is None
    assert check_for(limits, clock, 2) == ("platform_error", "nodes_not_met")
    # The launcher is started after 20 of the 30 s, and sends nothing.
    limits = PodLimits(POD_PLAN, record)
    clock.now += 20
    assert limits.begin_start_wait() == 10, "seconds left for the nodes to meet"
    assert check_for(limits, clock, SILENCE_SECONDS + 2) == ("platform_error", "node_silent")
    # Its ranks have started, so the silence may be their doing.
    limits = PodLimits(POD_PLAN, record)
    limits.note_running({})
    record.data["started_at"] = 1.0
    assert check_for(limits, clock, SILENCE_SECONDS) is None
    assert check_for(limits, clock, 2) == ("code_failed", "launcher_killed")


def test_a_launcher_that_never_starts_its_ranks_is_ended(clock, record):
    limits = PodLimits(POD_PLAN, record)
    assert limits.begin_start_wait() == 30
    while clock.now < 1000 + 30 + START_MARGIN_SECONDS:
        limits.note_message()
        assert check_for(limits, clock, 1) is None
    limits.note_message()
    assert check_for(limits, clock, 2) == ("platform_error", "node_not_started")


def test_a_pod_that_was_stopped_as_a_whole_restarts_its_timers(clock, record):
    limits = PodLimits(POD_PLAN, record)
    record.data["started_at"] = 1.0
    assert check_for(limits, clock, 5) is None
    clock.now += 600  # no check: this process was stopped together with the launcher
    assert check_for(limits, clock, SILENCE_SECONDS) is None
    assert check_for(limits, clock, 2) == ("code_failed", "launcher_killed")


def test_the_deadline_begins_once_and_keeps_the_grace(clock, record):
    limits = PodLimits(POD_PLAN, record)
    limits.note_running({})  # which ranks run does not matter in a pod
    # SIGTERM 10 s before the deadline at 1100, SIGKILL a moment before it.
    assert (limits.term_at, limits.kill_at) == (1090.0, 1099.75)
    record.data["started_at"] = 1.0
    clock.now += 50
    limits.note_running({})
    assert limits.kill_at == 1099.75, "a later round keeps the deadline"
    limits.kill_by(1060.0)
    limits.kill_by(1070.0)
    assert limits.kill_at == 1060.0


@pytest.mark.parametrize(
    ("counter", "expected"),
    [
        ("oom_kills", ("out_of_memory", "out_of_memory", 2, {"limit_mib": 1024})),
        ("process_refusals", ("code_failed", "too_many_processes", 2, {"limit": 512})),
    ],
)
def test_a_failure_soon_after_a_kill_or_a_refusal_names_the_limit(clock, record, counters, counter, expected):
    vars(counters).update({counter: 3, "process_limit": 512})
    limits = PodLimits(POD_PLAN, record)
    failure = {"kind": "code_failed", "rank": 2}
    assert limits.explain_failure(failure, clock.now) is None, "earlier ones do not count"
    setattr(counters, counter, 4)
    verdict = limits.explain_failure(failure, clock.now)
    assert (verdict.kind, verdict.code, verdict.rank, verdict.data) == expected
    assert limits.explain_failure({"kind": "node_lost"}, clock.now) is None
    counters.process_limit = None  # the kernel does not say it
    assert "limit" not in limits.explain_failure(failure, clock.now).data
    counters.oom_kills += 1
    assert limits.explain_failure(failure, clock.now).kind == "out_of_memory", "a kill outranks a refusal"
    clock.now += 31  # longer than the failure may lag behind
    assert limits.explain_failure(failure, clock.now) is None


def test_the_exit_of_a_launcher_is_explained_by_what_came_before(clock, record, counters):
    limits = PodLimits(POD_PLAN, record)
    assert limits.explain_exit(KILLED).code == "node_not_started"
    record.data["started_at"] = 1.0
    assert (limits.explain_exit(KILLED).kind, limits.explain_exit(KILLED).code) == ("code_failed", "launcher_killed")
    assert "SIGKILL" in limits.explain_exit(KILLED).message
    counters.oom_kills = 1
    assert limits.explain_exit(KILLED).kind == "out_of_memory"
    assert limits.explain_exit(Exit(7, 1, "")).code == "launcher_killed", "a kill for lack of memory is a SIGKILL"


def test_processes_of_a_pod_dump_no_core():
    """A limit of 1 byte prevents them also where the kernel pipes cores to a program, which it does at a limit of 0."""
    code = (
        "import resource; from runtime.launcher.pod.process_tree import PodTree; PodTree()._prepare(); "
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_the_deadline_thread_acts_only_if_the_main_thread_is_late(monkeypatch):
    now, looks, calls = [1000.0], [], []
    has_exited = threading.Event()

    def look_at_the_clock():
        looks.append(now[0])
        return now[0]

    def let_it_check():
        """Return once the thread has made a whole check at the current time."""
        seen = len(looks)
        wait_for(lambda: len(looks) >= seen + 2)  # when it looks again, it has acted on the look before

    def exit_process():
        calls.append("exited")
        has_exited.set()

    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=look_at_the_clock, sleep=time.sleep))
    monkeypatch.setattr(deadline, "_CHECK_SECONDS", 0.01)
    thread = DeadlineThread(lambda: calls.append("killed"), exit_process)
    thread.kill_at = now[0]
    now[0] += deadline.MAX_LATE_SECONDS
    thread.start()
    let_it_check()
    assert calls == [], "the main thread may still kill"
    now[0] += 1
    let_it_check()
    now[0] += deadline.MAX_LATE_SECONDS
    let_it_check()
    assert calls == ["killed"], "the main thread may still exit"
    now[0] += 1
    assert has_exited.wait(10)
    assert calls == ["killed", "exited"]

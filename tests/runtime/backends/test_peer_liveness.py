"""Supervisors that are silent or have ended: how the others detect them.

A child of the test stands in for the supervisor, and the test passes the times.
"""

import ctypes
import json
import os
import resource
import signal

import pytest

from runtime import pids
from runtime.backends.supervision import peer_liveness, resource_limits


@pytest.fixture
def child():
    """A process that only waits. Its name, which any process may choose, is no UTF-8 and looks like a line of /proc."""
    received, sent = os.pipe()
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(15, b"\xff)\rNSpid:\tx", 0, 0, 0)  # PR_SET_NAME
        os.close(sent)
        while True:
            signal.pause()
    os.close(sent)
    assert not os.read(received, 1), "the child has its name"
    os.close(received)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_no_name_hides_a_process(child):
    assert pids.parent(child) == os.getpid()
    assert resource_limits.cpu_schedule(child) is not None
    assert resource_limits._pid_in_sandbox(child) == child, "the rank that takes the most memory can be found"


def test_a_process_that_cannot_be_looked_at_has_not_ended(child):
    started, limits = pids.start_time(child), resource.getrlimit(resource.RLIMIT_NOFILE)
    calls = {"start_time": (child,), "send": (child, started, 0), "wait_for_end": (child, started, 0)}
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        for name, arguments in calls.items():
            with pytest.raises(OSError, match="Too many open files"):
                getattr(pids, name)(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def write(folder, node, pid, *, phase="running", causes=()):
    """Write the record of a node whose supervisor is the process `pid`, and return its path."""
    path = peer_liveness.record_path(folder, node)
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps(
            {"pid": pid, "start_time": pids.start_time(pid), "phase": phase, "node": node, "causes": list(causes)}
        )
    )
    return path


def test_a_silent_peer_is_killed_and_recorded(tmp_path, child):
    path = write(tmp_path, 1, child)
    watch = peer_liveness.PeerWatch(tmp_path, node=0, nodes=2)
    for second in range(11):  # up to 10 s of silence are allowed
        watch.kill_silent_peers(100.0 + second)
    started = pids.start_time(child)
    watch.kill_silent_peers(111.0)
    assert pids.wait_for_end(child, started, 10)
    assert watch.lost_peer() == 1
    record = peer_liveness.load_record(path)
    assert record["silent"]


@pytest.mark.parametrize(
    ("phase", "seconds", "is_updated"),
    [("running", range(60), True), ("running", (0, 1, 2, 1000, 1001), False), ("ended", range(30), False)],
    ids=["it updates its record", "it was silent while the watching supervisor was stopped", "it has ended"],
)
def test_a_peer_without_fault_is_not_killed(tmp_path, child, phase, seconds, is_updated):
    path = write(tmp_path, 1, child, phase=phase)
    watch = peer_liveness.PeerWatch(tmp_path, node=0, nodes=2)
    for second in seconds:
        if is_updated:
            os.utime(path, (second, second))
        watch.kill_silent_peers(100.0 + second)
    assert pids.start_time(child) is not None


def test_ended_and_failed_peers_are_detected(tmp_path, child):
    watch = peer_liveness.PeerWatch(tmp_path, node=0, nodes=3)
    assert watch.lost_peer() is None, "no peer has a record yet"
    write(tmp_path, 1, child)
    assert watch.lost_peer() is None
    write(tmp_path, 2, child, causes=("something",))  # it fails, and has not ended yet
    assert watch.lost_peer() == 2
    path = write(tmp_path, 1, child)
    # A process that started at another time is another process: the supervisor has ended.
    path.write_text(path.read_text().replace(f'"start_time": {pids.start_time(child)}', '"start_time": 1'))
    assert watch.lost_peer() == 1


def test_silence_is_checked_twice(tmp_path, child, monkeypatch):
    path = write(tmp_path, 1, child)
    record = peer_liveness.load_record(path)
    assert not peer_liveness.is_silent(path, record), "it has just been written"
    os.utime(path, (1, 1))
    record = peer_liveness.load_record(path)
    monkeypatch.setattr(peer_liveness, "_RECHECK_SECONDS", 0)
    assert peer_liveness.is_silent(path, record)
    monkeypatch.setattr(peer_liveness.time, "sleep", lambda _seconds: os.utime(path))
    assert not peer_liveness.is_silent(path, record), "it was updated between the two checks"

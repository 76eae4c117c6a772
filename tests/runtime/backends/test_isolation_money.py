"""Hostile scripts: code that wants its run to pass for the platform's fault, which would make it free."""

from __future__ import annotations

import pytest

from runtime.backends import cgroups
from runtime.specs import FailureCode, Outcome, Resources
from tests.runtime.backends import hostile
from tests.runtime.conftest import Yard

CROWD = """
    import os, signal, sys
    reading, writing = os.pipe()
    for _ in range(1900):
        if not os.fork():
            os.close(writing)
            os.read(reading, 1)
            while True: pass
    print("ready", flush=True)
    os.close(writing)
    while True: signal.pause()
"""


@pytest.fixture(params=["cold", "warm"])
def yard(yard: Yard, request: pytest.FixtureRequest) -> Yard:
    """Both ways in which ranks are started."""
    return hostile.started(yard, request.param)


def test_a_crowd_that_wants_all_cpu_time_does_not_silence_its_node(yard: Yard) -> None:
    """Its launcher is one process among so many: silent for 12 seconds it was, and the run free."""
    if cgroups.why_not():
        pytest.fail("the tests need control groups: run them as root")
    status = yard.run(CROWD, resources=Resources(0.5, 2048), deadline_seconds=40)
    assert status.outcome is Outcome.TIME_LIMIT, status.failure


def test_stacks_full_of_what_takes_much_room_do_not_silence_the_node(yard: Yard) -> None:
    """What a rank says of its stacks is told on as JSON, where a byte that is no text is six times as long."""
    script = r"""
    import os, signal, time
    pipes = [n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}")
             and os.readlink(f"/proc/self/fd/{n}").startswith("pipe")]
    def answer(*_):
        for _ in range(6): os.write(pipes[0], b"  " + b"\xff" * 60000 + b"\n")
    signal.signal(50, answer)
    print("all results are written", flush=True)
    while True: signal.pause()
    """
    status = yard.run(script, hang_seconds=5, deadline_seconds=60)
    assert status.outcome is Outcome.HUNG, status.failure
    assert status.failure is not None
    assert status.failure.code is FailureCode.HUNG


def test_work_by_processes_too_short_to_be_seen_is_no_hang(yard: Yard) -> None:
    """A hang is paid up to its last sign: whoever computes without any sign computes for nothing."""
    if cgroups.why_not():
        pytest.fail("the tests need control groups: run them as root")
    script = """
    import os, signal, time
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their time is nobody's, not even their parent's
    print("ready", flush=True)
    end = time.monotonic() + 40
    while time.monotonic() < end:
        pid = os.fork()
        if not pid:
            until = time.monotonic() + 0.02
            while time.monotonic() < until: pass
            os._exit(0)
        try: os.waitpid(pid, 0)
        except ChildProcessError: pass
    """
    status = yard.run(script, hang_seconds=12, deadline_seconds=90)
    assert status.outcome is Outcome.COMPLETED, status.failure

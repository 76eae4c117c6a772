"""Hostile scripts: code that wants its run to pass for the platform's fault, which would make it free."""

from __future__ import annotations

import os

import pytest

from runtime.backends import admission, cgroups
from runtime.specs import FailureCode, Outcome, Resources, RunSpec
from tests.runtime.backends import hostile
from tests.runtime.conftest import Yard

CROWD = """
    import os, signal, sys
    reading, writing = os.pipe()
    for _ in range(700):
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


@pytest.mark.parametrize("yard", ["cold"], indirect=True)
def test_a_crowd_that_wants_all_cpu_time_does_not_silence_its_node(yard: Yard) -> None:
    """Its launcher is one process among so many: silent for 12 seconds it was, and the run free."""
    if cgroups.why_not():
        pytest.fail("the tests need control groups: run them as root")
    status = yard.run(CROWD, resources=Resources(0.2, 1024), deadline_seconds=25)
    blamed = status.failure and status.failure.code
    assert status.outcome is Outcome.TIME_LIMIT or blamed is FailureCode.TOO_MANY_PROCESSES, status.failure


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


@pytest.mark.parametrize("yard", ["cold"], indirect=True)
def test_work_by_processes_too_short_to_be_seen_is_no_hang(yard: Yard) -> None:
    """A hang is paid up to its last sign: whoever computes without any sign computes for nothing."""
    if cgroups.why_not():
        pytest.fail("the tests need control groups: run them as root")
    script = """
    import os, signal, time
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their time is nobody's, not even their parent's
    print("ready", flush=True)
    end = time.monotonic() + 25
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


@pytest.mark.parametrize(
    "said", ['b"[" * 4000', 'b"{" * 4000', r'b"\xff\0" * 2000', 'b\'{"token": 1e999999, "node": [1]}\'', "b'[1]'"]
)
def test_what_is_said_to_the_launchers_own_port_breaks_nothing(yard: Yard, said: str) -> None:
    """The port is in the run's own network: code finds it, and a launcher that broke down would make the run free."""
    script = f"""
    import os, signal, socket, sys
    if os.environ["RANK"] == "1": signal.pause()
    if os.environ["RANK"] == "0":
        lines = [line.split() for line in open("/proc/net/tcp")][1:]
        ports = [int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A"]
        for port in ports:
            with socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall({said} + b"\\n")
                one.settimeout(3)
                try: one.recv(10)
                except TimeoutError: pass
        print(len(ports))
    sys.exit(4)
    """
    status = yard.run(script, nodes=2)
    assert int(yard.log()) >= 1
    assert status.outcome is Outcome.CODE_FAILED, yard.all_logs("job-1-1")


def test_a_pipe_in_place_of_the_script_holds_no_node_without_pay(yard: Yard) -> None:
    """Put there after the order was checked; a launcher that reads it waits for 90 seconds, which nobody pays."""
    spec = yard.spec("print('a file')", deadline_seconds=6, grace_seconds=1)
    check = admission._check_script

    def swap(resolved: RunSpec) -> None:
        check(resolved)
        (yard.workspace / "train.py").unlink()
        os.mkfifo(yard.workspace / "train.py")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(admission, "_check_script", swap)
        yard.backend.submit(spec)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.TIME_LIMIT, status.failure

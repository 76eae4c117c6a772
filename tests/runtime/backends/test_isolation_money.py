"""Hostile scripts: customer code cannot make its failure look like a platform fault, which would be free of charge."""

import os

import pytest

from runtime.backends import admission
from runtime.backends.supervision import cgroups
from runtime.specs import FailureCode, Outcome

pytestmark = [
    pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds"),
    pytest.mark.slow,
    pytest.mark.cores(2),
]


def test_large_stacks_do_not_silence_the_node(harness):
    """Stacks are sent as JSON, in which a byte that is no text is six times as long.

    A message that is too long would end the launcher's connection, and the node would count as lost.
    """
    script = r"""
    import os, signal, time
    pipes = [n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}")
             and os.readlink(f"/proc/self/fd/{n}").startswith("pipe")]
    def answer(*_):
        # The first pipe is the one on which a rank answers its launcher. Frames of a stack begin with two spaces.
        for _ in range(6): os.write(pipes[0], b"  " + b"\xff" * 60000 + b"\n")
    signal.signal(50, answer)  # with this signal, the launcher asks a rank for its stacks
    print("all results are written", flush=True)
    while True: signal.pause()
    """
    assert harness.run_to_failure(Outcome.HUNG, script, hang_seconds=5, deadline_seconds=60).code is FailureCode.HUNG


def test_work_by_processes_too_short_to_be_seen_is_no_hang(harness):
    """A hang is billed to its last sign of progress, so computing without a sign would be free."""
    if cgroups.unavailable_reason():
        pytest.fail("the tests need control groups: run them as root")
    script = """
    import os, signal, time
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their CPU time is not even counted for their parent
    print("ready", flush=True)
    end = time.monotonic() + 17  # longer than `hang_seconds`
    # Even on a busy machine, four processes together get half a core, from which a node counts as busy.
    for _ in range(2): os.fork()
    while time.monotonic() < end:
        pid = os.fork()
        if not pid:
            until = time.monotonic() + 0.02
            while time.monotonic() < until: pass
            os._exit(0)
        try: os.waitpid(pid, 0)
        except ChildProcessError: pass
    """
    harness.complete(script, hang_seconds=12, deadline_seconds=90)


def test_malformed_messages_to_the_launchers_port_break_nothing(harness):
    """The port is in the run's own network, where code finds it. A launcher that fails would make the run free."""
    script = r"""
    import os, signal, socket, sys
    messages = [b"[" * 4000, b"{" * 4000, b"\xff\0" * 2000, b'{"token": 1e999999, "node": [1]}', b"[1]"]
    if os.environ["RANK"] == "1": signal.pause()
    lines = [line.split() for line in open("/proc/net/tcp")][1:]
    ports = [int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A"]  # listening
    for port in ports:
        for message in messages:
            with socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall(message + b"\n")
                one.settimeout(1)
                try: one.recv(10)
                except TimeoutError: pass
    print(len(ports))
    sys.exit(4)
    """
    assert harness.run_to_failure(Outcome.CODE_FAILED, script, nodes=2).exit_code == 4
    assert int(harness.log()) >= 1, "it found no port"


def test_a_pipe_in_place_of_the_script_holds_no_node_unpaid(harness):
    """The pipe comes after the check of the script. A launcher that reads it would wait for 90 unpaid seconds."""
    spec = harness.spec("print('a file')", deadline_seconds=6, grace_seconds=1)
    check = admission._check_script

    def swap(resolved):
        check(resolved)
        (harness.workspace / "train.py").unlink()
        os.mkfifo(harness.workspace / "train.py")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(admission, "_check_script", swap)
        harness.backend.submit(spec)
    harness.wait_for_failure(Outcome.TIME_LIMIT)

"""The state of a rank, from its interpreter's stacks and from real processes."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from json import dumps
from pathlib import Path

import pytest

from runtime.launcher import rank
from runtime.launcher.protocol import MAX_LINE_BYTES
from runtime.launcher.telemetry.hang_detector import NOT_WAITING, WAITING, RankState
from runtime.launcher.telemetry.sampling import read_processes
from runtime.launcher.telemetry.stacks import (
    CaptureTarget,
    StackCapture,
    rank_state,
    stack_lines,
    unavailable_reason,
)
from tests.console.processes import wait_for

pytestmark = pytest.mark.rerun_if_late("it talks to real processes, with time limits of seconds")

WRAPPER = Path(rank.__file__)

ALL_REDUCE = """\
Thread 0x00007f11 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/workspace/data.py", line 8 in fetch

Current thread 0x00007f12 (most recent call first):
  File "/image/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2501 in all_reduce
  File "/image/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/opt/trainyard/launcher/step_timer.py", line 190 in call
  File "/workspace/train.py", line 40 in train
  File "/workspace/train.py", line 60 in <module>
  File "/opt/trainyard/launcher/rank.py", line 53 in run
  File "/opt/trainyard/launcher/rank.py", line 150 in <module>
"""


def test_a_rank_in_a_collective_waits():
    result = rank_state("finished 123.4\n" + ALL_REDUCE)
    assert (result.waiting, result.place) == (WAITING, "train.py, line 40, train")
    assert rank_state(ALL_REDUCE) == result, "only the stacks count"
    assert rank_state(ALL_REDUCE.replace("line 40", "line 41")).digest != result.digest
    assert rank_state(ALL_REDUCE.replace("line 8 in fetch", "line 9 in fetch")).digest != result.digest


@pytest.mark.parametrize(
    "text",
    [
        "\x00\xff garbage\n  File without an end",
        'Current thread 0x1 (most recent call first):\n  File "/workspace/train.py", line 1 in all_reduce\n',
        # A collective far from the top of a stack says nothing: a function that it has called computes now.
        'Current thread 0x1 (most recent call first):\n  File "/workspace/loss.py", line 1 in compute\n'
        + '  File "/workspace/train.py", line 1 in hook\n' * 4
        + '  File "/x/torch/distributed/distributed_c10d.py", line 1 in all_reduce\n',
    ],
)
def test_unknown_functions_do_not_count_as_waiting(text):
    assert rank_state(text).waiting == NOT_WAITING


def test_stacks_omit_the_launchers_frames_and_separate_threads():
    lines = stack_lines("finished 1.0\n" + ALL_REDUCE)
    assert not [line for line in lines if "/launcher/" in line]
    assert lines[3] == ""
    assert len(lines) == 4 + 5  # a thread of three lines, an empty line, and the thread in the collective


# Real processes


@contextmanager
def running(tmp_path, source):
    """Run a script in the wrapper, as the launcher does; yield once it has printed `ready`."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(source))
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    command = [sys.executable, "-u", str(WRAPPER), str(writing), str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[writing]) as child:
        os.close(writing)
        try:
            assert child.stdout.readline().strip() == "ready"
            yield CaptureTarget(child.pid, reading)
        finally:
            child.kill()
            os.close(reading)


def capture(target):
    """Capture the stacks of a process, as rank 3, as the launcher's loop does."""
    captured = StackCapture({3: target})
    captured.start(time.monotonic())
    while not captured.is_over(time.monotonic()):
        ready, _, _ = select.select([target.report_fd], [], [], max(0.0, captured.ends_at() - time.monotonic()))
        data = os.read(target.report_fd, 1 << 14) if ready else b""
        if data:
            captured.add_data(3, data, time.monotonic())
        elif ready:
            break
    return captured


def text_of(captured, target):
    return captured.describe_ranks(read_processes(), {3: [target.pid]})[3]


# Signal 50 makes an interpreter write its stacks; other programs die of it.
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os; os.execv('/bin/sh', ['sh', '-c', 'echo ready; exec sleep 1000'])", "or no longer"),
        ("import os; print('ready'); os.closerange(3, 4096)", "closed the pipe"),
        ("import signal; signal.signal(50, signal.SIG_DFL); print('ready')", "or no longer"),
        ("import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [50]); print('ready')", "blocks or ignores"),
        ("import signal; signal.signal(50, signal.SIG_IGN); print('ready')", "blocks or ignores"),
    ],
)
def test_a_process_that_would_not_survive_the_signal_for_stacks_gets_none(tmp_path, source, reason):
    with running(tmp_path, f"{source}\nimport time; time.sleep(1000)") as target:
        wait_for(lambda: unavailable_reason(target))
        captured = capture(target)
        assert captured.rank_states()[3] == RankState("", NOT_WAITING, "")
        assert reason in text_of(captured, target)
        assert target.pid in read_processes(), "the process still lives"


def test_a_process_that_has_ended_is_reported(tmp_path):
    with running(tmp_path, "print('ready')\nimport time; time.sleep(1000)") as target:
        os.kill(target.pid, signal.SIGKILL)
        wait_for(lambda: read_processes()[target.pid].state == "Z")
        assert "the process has ended" in text_of(capture(target), target)


def test_stacks_fit_in_a_message_whatever_they_contain():
    captured = StackCapture({0: CaptureTarget(1, -1)})
    captured._output[0] = b""  # as after `start`, which would send a signal
    captured.add_data(0, (b"  " + b"\xff" * 997 + b"\n") * 1000, 1.0)
    (text,) = captured.describe_ranks({}, {}).values()
    assert "\ufffd" in text
    assert len(dumps({"type": "stacks", "rank": 0, "text": text})) < MAX_LINE_BYTES

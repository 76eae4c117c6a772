"""Where a rank stands: read from its interpreter's word, and asked of real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.launcher import rank
from runtime.launcher.plain import dumps
from runtime.launcher.progress import NOT_WAITING, WAITING, WAITING_IF_IDLE, Stand
from runtime.launcher.report import LONGEST_LINE
from runtime.launcher.sampling import read_processes
from runtime.launcher.stacks import LARGEST_TEXT, LONGEST_SECONDS, Asked, Look, main_frames, stack_lines, stand, why_not

WRAPPER = Path(rank.__file__)

ALL_REDUCE = """\
Thread 0x00007f11 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/workspace/data.py", line 8 in fetch

Current thread 0x00007f12 (most recent call first):
  File "/image/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2501 in all_reduce
  File "/image/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/opt/trainyard/launcher/steps.py", line 190 in call
  File "/workspace/train.py", line 40 in train
  File "/workspace/train.py", line 60 in <module>
  File "/opt/trainyard/launcher/rank.py", line 53 in run
  File "/opt/trainyard/launcher/rank.py", line 150 in <module>
"""
BACKWARD = """\
Current thread 0x00007f12 (most recent call first):
  File "/image/lib/python3.11/site-packages/torch/autograd/graph.py", line 865 in _engine_run_backward
  File "/image/lib/python3.11/site-packages/torch/autograd/__init__.py", line 354 in backward
  File "/image/lib/python3.11/site-packages/torch/_tensor.py", line 625 in backward
  File "/workspace/train.py", line 41 in train
"""


def test_a_rank_in_a_collective_waits() -> None:
    found = stand("finished 123.4\n" + ALL_REDUCE)
    assert (found.waits, found.where) == (WAITING, "train.py, line 40, train")
    assert stand(ALL_REDUCE) == found, "what else it said is not part of where it stands"
    assert stand(ALL_REDUCE.replace("line 40", "line 41")).digest != found.digest
    assert stand(ALL_REDUCE.replace("line 8 in fetch", "line 9 in fetch")).digest != found.digest


def test_backward_may_wait_or_compute() -> None:
    assert stand(BACKWARD).waits == WAITING_IF_IDLE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "raised 12.0\n",
        "\x00\xff garbage\n  File without an end",
        'Current thread 0x1 (most recent call first):\n  File "/workspace/train.py", line 1 in all_reduce\n',
        # Deep inside something else, a collective's file says nothing: this rank computes for one.
        'Current thread 0x1 (most recent call first):\n  File "/workspace/loss.py", line 1 in compute\n'
        + '  File "/workspace/train.py", line 1 in hook\n' * 4
        + '  File "/x/torch/distributed/distributed_c10d.py", line 1 in all_reduce\n',
    ],
)
def test_what_is_no_known_call_is_not_waiting(text: str) -> None:
    assert stand(text).waits == NOT_WAITING


def test_without_a_current_thread_the_first_one_is_shown_last() -> None:
    text = ALL_REDUCE.replace("Current thread", "Thread")
    assert main_frames(stack_lines(text))[0][2] == "all_reduce"
    assert main_frames([]) == []


def test_frames_of_ours_are_left_out_and_threads_kept_apart() -> None:
    lines = stack_lines("finished 1.0\n" + ALL_REDUCE)
    assert not [line for line in lines if "/launcher/" in line]
    assert lines[3] == ""
    assert len(lines) == 4 + 5


# Real processes


@contextmanager
def running(tmp_path: Path, source: str, *, until: str = "ready") -> Iterator[Asked]:
    """A script under the wrapper, as the launcher starts it, from the moment it prints a word."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(source))
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    command = [sys.executable, "-u", str(WRAPPER), str(writing), str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[writing]) as child:
        os.close(writing)
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == until
            yield Asked(child.pid, reading)
        finally:
            child.kill()
            os.close(reading)


def look_at(asked: Asked) -> Look:
    """One look, fed as the agent feeds it."""
    look = Look({3: asked})
    look.begin(time.monotonic())
    while not look.is_over(time.monotonic()):
        ready, _, _ = select.select([asked.pipe], [], [], max(0.0, look.ends_at() - time.monotonic()))
        data = os.read(asked.pipe, 1 << 14) if ready else b""
        if data:
            look.feed(3, data, time.monotonic())
        elif ready:
            break
    return look


def text_of(look: Look, asked: Asked) -> str:
    return look.texts(read_processes(), {3: [asked.pid]})[3]


def test_every_thread_is_shown_again_and_again(tmp_path: Path) -> None:
    script = """
        import threading
        def background(): threading.Event().wait()
        threading.Thread(target=background, daemon=True).start()
        print("ready")
        threading.Event().wait()
    """
    with running(tmp_path, script) as asked:
        _wait_for(lambda: look_at(asked).stands()[3].where == "train.py, line 6, <module>")
        stands = [look_at(asked).stands()[3] for _ in range(2)]
        assert stands[0] == stands[1]
        assert stands[0].where == "train.py, line 6, <module>"
        text = text_of(look_at(asked), asked)
        assert "in background" in text
        assert f"Rank 3: process {asked.pid} (python" in text


def test_a_script_goes_on_after_it_was_looked_at(tmp_path: Path) -> None:
    script = """
        import time
        print("ready")
        begun = time.monotonic()
        time.sleep(1.5)
        print("slept", time.monotonic() - begun >= 1.5)
    """
    with running(tmp_path, script) as asked:
        _wait_for(lambda: look_at(asked).stands()[3].where == "train.py, line 5, <module>")
        end = time.monotonic() + 20
        said = b""
        while b"finished" not in said and time.monotonic() < end:
            if select.select([asked.pipe], [], [], 0.5)[0]:
                said += os.read(asked.pipe, 4096)
        assert b"finished" in said


@pytest.mark.parametrize(
    ("trick", "why"),
    [
        ("import os; os.execv('/bin/sh', ['sh', '-c', 'echo ready; exec sleep 1000'])", "no longer runs"),
        ("import os; print('ready'); os.closerange(3, 4096)", "closed the pipe"),
        ("import signal; signal.signal(50, signal.SIG_DFL); print('ready')", "no longer runs"),
        ("import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [50]); print('ready')", "does not let the signal"),
    ],
)
def test_a_process_that_would_not_survive_it_is_not_asked(tmp_path: Path, trick: str, why: str) -> None:
    with running(tmp_path, f"{trick}\nimport time; time.sleep(1000)") as asked:
        _wait_for(lambda: bool(why_not(asked)))
        look = look_at(asked)
        assert look.stands()[3] == Stand("", NOT_WAITING, "")
        assert why in text_of(look, asked)
        assert asked.pid in read_processes(), "it lives on"


def test_a_stopped_process_is_said_to_be(tmp_path: Path) -> None:
    with running(tmp_path, "print('ready')\nimport time; time.sleep(1000)") as asked:
        os.kill(asked.pid, signal.SIGSTOP)
        _wait_for(lambda: read_processes()[asked.pid].state == "T")
        assert "stopped (SIGSTOP)" in text_of(look_at(asked), asked)


def test_a_process_that_has_ended_is_said_to_have(tmp_path: Path) -> None:
    with running(tmp_path, "print('ready')\nimport time; time.sleep(1000)") as asked:
        os.kill(asked.pid, signal.SIGKILL)
        _wait_for(lambda: read_processes()[asked.pid].state == "Z")
        assert "the process has ended" in text_of(look_at(asked), asked)


def test_a_rank_that_takes_the_signal_for_itself_has_only_so_long(tmp_path: Path) -> None:
    script = """
        import signal, time
        signal.signal(50, lambda *_: None)
        print("ready")
        while True: time.sleep(1000)
    """
    with running(tmp_path, script) as asked:
        begun = time.monotonic()
        look = look_at(asked)
        assert time.monotonic() - begun >= LONGEST_SECONDS
        assert "did not answer within 2 seconds" in text_of(look, asked)


def test_a_rank_that_says_too_much_is_cut(tmp_path: Path) -> None:
    look = Look({0: Asked(os.getpid(), 0)})
    look._said[0] = b""  # as if it had been asked
    for _ in range(100):
        look.feed(0, b'Thread 0x1\n  File "x", line 1 in y\n' * 1000, 1.0)
    assert len(look.texts({}, {})[0]) <= LARGEST_TEXT + 1


def test_whatever_is_in_a_text_it_fits_in_a_line_of_the_protocol() -> None:
    look = Look({0: Asked(1, -1)})
    look._said[0] = b""
    look.feed(0, (b"  " + b"\xff" * 997 + b"\n") * 1000, 1.0)
    (text,) = look.texts({}, {}).values()
    assert "\ufffd" in text
    assert len(dumps({"type": "stacks", "rank": 0, "text": text})) < LONGEST_LINE


def _wait_for(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

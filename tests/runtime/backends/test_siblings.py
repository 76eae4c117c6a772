"""Silence, by a clock of the test's own and on a process that may be killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.backends import identity, siblings
from runtime.backends.runs import wait_gone


@pytest.fixture
def child() -> Iterator[int]:
    """A process that stands still."""
    pid = os.fork()
    if not pid:
        while True:
            signal.pause()
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def write(folder: Path, node: int, pid: int, *, phase: str = "running", causes: tuple[str, ...] = ()) -> Path:
    path = siblings.record_path(folder, node)
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps(
            {"pid": pid, "start_time": identity.start_time(pid), "phase": phase, "node": node, "causes": list(causes)}
        )
    )
    return path


def test_one_that_gives_no_sign_is_written_down_and_killed(tmp_path: Path, child: int) -> None:
    path = write(tmp_path, 1, child)
    watch = siblings.Siblings(tmp_path, 0, 2)
    for second in range(11):
        watch.end_silent_ones(100.0 + second)
    assert identity.start_time(child) is not None
    started = identity.start_time(child)
    assert started is not None
    watch.end_silent_ones(111.0)
    assert wait_gone(child, started, 10)
    record = siblings.load(path)
    assert record is not None
    assert record["silent"]


def test_one_that_changes_its_record_lives(tmp_path: Path, child: int) -> None:
    path = write(tmp_path, 1, child)
    watch = siblings.Siblings(tmp_path, 0, 2)
    for second in range(60):
        os.utime(path, (second, second))
        watch.end_silent_ones(100.0 + second)
    assert identity.start_time(child) is not None


def test_who_was_asleep_itself_gives_the_others_their_time(tmp_path: Path, child: int) -> None:
    write(tmp_path, 1, child)
    watch = siblings.Siblings(tmp_path, 0, 2)
    for second in (0.0, 1.0, 2.0, 1000.0, 1001.0):
        watch.end_silent_ones(100.0 + second)
    assert identity.start_time(child) is not None


def test_one_that_has_ended_may_be_silent(tmp_path: Path, child: int) -> None:
    write(tmp_path, 1, child, phase="ended")
    watch = siblings.Siblings(tmp_path, 0, 2)
    for second in range(30):
        watch.end_silent_ones(100.0 + second)
    assert identity.start_time(child) is not None


def test_who_is_gone_or_has_failed_is_known(tmp_path: Path, child: int) -> None:
    watch = siblings.Siblings(tmp_path, 0, 3)
    assert watch.lost_one() is None, "nobody has said a word yet"
    write(tmp_path, 1, child)
    assert watch.lost_one() is None
    write(tmp_path, 2, child, causes=("something",))
    assert watch.lost_one() == 2
    path = write(tmp_path, 1, child)
    path.write_text(path.read_text().replace(f'"start_time": {identity.start_time(child)}', '"start_time": 1'))
    assert watch.lost_one() == 1


def test_who_reads_looks_twice(tmp_path: Path, child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 1, child)
    record = siblings.load(path)
    assert record is not None
    assert not siblings.is_silent(path, record), "it has just been written"
    os.utime(path, (1, 1))
    record = siblings.load(path)
    assert record is not None
    monkeypatch.setattr(siblings, "_SECOND_LOOK_SECONDS", 0)
    assert siblings.is_silent(path, record)
    monkeypatch.setattr(siblings.time, "sleep", lambda _seconds: os.utime(path))
    assert not siblings.is_silent(path, record), "it woke up between the two looks"

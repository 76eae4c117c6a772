from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.launcher.ranklog import RankLog

Opened = tuple[RankLog, int]


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[Callable[[int], Opened]]:
    opened: list[RankLog] = []

    def make(limit: int) -> Opened:
        reading, writing = os.pipe()
        opened.append(RankLog(tmp_path / "rank-0.log", reading, limit))
        return opened[-1], writing

    yield make
    for log in opened:
        log.close()


def test_output_is_kept_as_it_comes(open_log: Callable[[int], Opened], tmp_path: Path) -> None:
    log, writing = open_log(1000)
    assert not log.pump()
    os.write(writing, b"one\n\xff\0two")
    assert log.pump()
    assert (tmp_path / "rank-0.log").read_bytes() == b"one\n\xff\0two"
    os.close(writing)
    assert not log.pump()
    assert not log.open
    assert log.last_lines() == ["one", "\ufffd\0two"]


def test_the_cap_is_said_once_and_the_pipe_is_drained(open_log: Callable[[int], Opened], tmp_path: Path) -> None:
    log, writing = open_log(10)
    for _ in range(5):
        os.write(writing, b"x" * 8)
        log.pump()
    os.write(writing, b"the end")
    assert not log.pump()
    text = (tmp_path / "rank-0.log").read_text()
    assert text.startswith("x" * 10 + "\n[trainyard]")
    assert text.count("[trainyard]") == 1
    assert log.last_lines() == ["x" * 40 + "the end"]
    os.close(writing)


def test_what_is_over_the_cap_is_thrown_away_but_for_its_end(open_log: Callable[[int], Opened], tmp_path: Path) -> None:
    log, writing = open_log(10)
    os.set_blocking(writing, False)
    os.write(writing, b"x" * 20)
    log.pump()
    kept = (tmp_path / "rank-0.log").stat().st_size
    for _ in range(50):
        os.write(writing, b"y" * 100_000 + b"\nthe end\n")
        log.pump()
    assert (tmp_path / "rank-0.log").stat().st_size == kept
    assert log.last_lines()[-1] == "the end"
    os.close(writing)
    log.pump()
    assert not log.open


def test_a_pipe_that_trickles_is_left_alone_for_a_moment(open_log: Callable[[int], Opened]) -> None:
    log, writing = open_log(1 << 30)
    os.write(writing, b"first\n")
    log.pump()
    assert log.rest_until is None, "what comes after a pause is told at once"
    os.write(writing, b"second\n")
    log.pump()
    assert log.rest_until is not None
    os.set_blocking(writing, False)
    os.write(writing, b"z" * (600 << 10))
    log.pump()
    assert log.rest_until is None, "a pipe that fills is emptied as fast as can be"
    os.close(writing)


def test_a_note_starts_a_line_of_its_own(open_log: Callable[[int], Opened], tmp_path: Path) -> None:
    log, writing = open_log(100)
    os.write(writing, b"no end")
    log.pump()
    log.note("told")
    assert (tmp_path / "rank-0.log").read_text() == "no end\n[trainyard] told\n"
    os.close(writing)


def test_a_full_disk_is_told_and_not_fatal(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    log = RankLog(Path("/dev/full"), reading, 100)
    os.write(writing, b"lost")
    log.pump()
    assert "No space left" in log.problem
    os.close(writing)
    log.close()


def test_what_the_code_takes_from_the_pipe_meanwhile_is_not_waited_for(
    open_log: Callable[[int], Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code can read its own output: between two looks at the pipe, all of it, with nobody left who writes."""
    log, writing = open_log(10)
    os.write(writing, b"x" * 20)
    log.pump()
    monkeypatch.setattr(log, "_waiting", lambda: 1 << 20)
    os.write(writing, b"x" * 5000)
    log.pump()
    assert log.open, "somebody can still write"
    os.close(writing)
    log.pump()
    assert not log.open

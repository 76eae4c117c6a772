import os
from pathlib import Path

import pytest

from runtime.launcher.ranklog import RankLog

Opened = tuple[RankLog, int]


@pytest.fixture
def open_log(tmp_path):
    opened = []

    def make(limit):
        reading, writing = os.pipe()
        opened.append(RankLog(tmp_path / "rank-0.log", reading, limit))
        return opened[-1], writing

    yield make
    for log in opened:
        log.close()


def test_the_last_lines_leave_out_the_markers_of_a_traceback(open_log):
    log, writing = open_log(4000)
    frames = [f'[rank1]:   File "module{n}.py", line 7\n[rank1]:     call()\n[rank1]:     ~~~~^^\n' for n in range(9)]
    os.write(writing, "".join(["step ^\n", *frames, "RuntimeError: shapes\n         ^^^^\n"]).encode())
    log.pump()
    os.close(writing)
    last = log.last_lines()
    assert (last[0], last[1], last[-1]) == ("step ^", '[rank1]:   File "module0.py", line 7', "RuntimeError: shapes")


def test_reading_a_slow_pipe_pauses_briefly(open_log):
    log, writing = open_log(1 << 30)
    os.write(writing, b"first\n")
    log.pump()
    assert log.paused_until is None, "what comes after a pause is told at once"
    os.write(writing, b"second\n")
    log.pump()
    assert log.paused_until is not None
    os.set_blocking(writing, False)
    os.write(writing, b"z" * (600 << 10))
    log.pump()
    assert log.paused_until is None, "a pipe that fills is emptied as fast as can be"
    os.close(writing)


def test_a_note_starts_a_line_of_its_own(open_log, tmp_path):
    log, writing = open_log(100)
    os.write(writing, b"no end")
    log.pump()
    log.note("told")
    assert (tmp_path / "rank-0.log").read_text() == "no end\n[trainyard] told\n"
    os.close(writing)


def test_a_full_disk_is_reported_and_not_fatal(tmp_path):
    reading, writing = os.pipe()
    log = RankLog(Path("/dev/full"), reading, 100)
    os.write(writing, b"lost")
    log.pump()
    assert "No space left" in log.problem
    os.close(writing)
    log.close()


def test_output_that_the_code_reads_itself_is_not_awaited(open_log, monkeypatch):
    """Code can empty its own output pipe between two reads of the launcher."""
    log, writing = open_log(10)
    os.write(writing, b"x" * 20)
    log.pump()
    monkeypatch.setattr(log, "_bytes_waiting", lambda: 1 << 20)
    os.write(writing, b"x" * 5000)
    log.pump()
    assert log.open, "somebody can still write"
    os.close(writing)
    log.pump()
    assert not log.open

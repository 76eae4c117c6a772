"""The log of a rank and the times of its lines."""

import os
from types import SimpleNamespace

import pytest

from runtime.backends import log_chunks
from runtime.launcher import log_times
from runtime.launcher.log_times import PAIR, LogTimes
from runtime.launcher.ranklog import RankLog


@pytest.fixture
def open_log(tmp_path):
    """Return a function that opens a log with a limit of bytes; it returns the log and the rank's end of its pipe."""
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


def test_output_that_the_code_reads_itself_is_not_awaited(open_log, monkeypatch):
    """Code can empty its own output pipe between two reads of the launcher."""
    log, writing = open_log(10)
    os.write(writing, b"x" * 20)  # beyond the limit, so later output is discarded
    log.pump()
    monkeypatch.setattr(log, "_bytes_waiting", lambda: 1 << 20)  # far more than the pipe then has
    os.write(writing, b"x" * 5000)
    log.pump()
    assert log.is_open, "the writing end is still open"
    os.close(writing)
    log.pump()
    assert not log.is_open


@pytest.fixture
def clock(clock, monkeypatch):
    """The clocks that `log_times` sees. Unix time is later by 1.8e9 s."""
    clocks = SimpleNamespace(monotonic=clock, time=lambda: 1.8e9 + clock.now)
    monkeypatch.setattr(log_times, "time", clocks)
    return clock


def read_times(path, offset, length):
    file_fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return log_chunks.read_times(file_fd, log_chunks.RawChunk(bytes(length), at_end=False, offset=offset))
    finally:
        os.close(file_fd)


def test_times_are_kept_beside_the_unchanged_output(open_log, tmp_path, clock):
    log, writing = open_log(30)
    writes = ((0, "one\n"), (0.0625, "at once\n"), (0.0625, "half a "), (60, "line\nlast\n"), (1, "beyond\n"))
    for seconds, text in writes:
        clock.now += seconds
        os.write(writing, text.encode())
        log.pump()
    os.close(writing)
    # The first 30 bytes, and a line break before the note that the limit is reached.
    assert (tmp_path / "rank-0.log").read_bytes()[:31] == b"one\nat once\nhalf a line\nlast\nb\n"
    start = log_times.time.time() - 61.125  # the sum of the pauses
    # "at once" came too soon after "one" for a pair of its own.
    pairs = [(0, start), (12, start + 0.125), (19, start + 60.125), (29, start + 61.125)]
    times = tmp_path / "rank-0.times"
    assert read_times(times, 0, 99) == pairs
    assert read_times(times, 13, 3) == pairs[1:2], "the time of a byte is that of the pair before it"
    assert read_times(times, 12, 8) == pairs[1:3]
    raw_chunk = log_chunks.RawChunk(b"half a line\nlast\n", at_end=True, offset=12)
    chunk = log_chunks.text_chunk(raw_chunk, is_final=True, times=read_times(times, 12, 17))
    assert chunk.times == ((0, start + 0.125), (1, start + 60.125)), "a line has the time of its beginning"


def test_the_times_of_endless_output_stay_few(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(log_times, "_INTERVAL_SHARE", 2**-8)
    log_fd = os.open(tmp_path / "rank-0.log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    times = LogTimes(tmp_path / "rank-0.log")
    for _tick in range(100_000):  # 10,000 s stand for a month, as the share is 256 times the real one
        clock.now += 0.1
        times.note(log_fd)
    assert (tmp_path / "rank-0.times").stat().st_size < 2048 * PAIR.size  # so 8 MiB after a real month
    os.close(log_fd)
    times.close()


@pytest.mark.parametrize("replace", [lambda path: path.symlink_to("/etc/hostname"), os.mkfifo])
def test_output_does_not_need_its_times(open_log, tmp_path, replace):
    replace(tmp_path / "rank-0.times")
    log, writing = open_log(30)
    os.write(writing, b"one\n")
    log.pump()
    assert ((tmp_path / "rank-0.log").read_bytes(), log.problem) == (b"one\n", "")
    os.close(writing)


@pytest.mark.parametrize(
    "content",
    [
        b"short",
        os.urandom(1 << 16),
        b"\xff" * (1 << 16),
        b"".join(PAIR.pack(5, 1) for _ in range(1 << 16)),  # all at one offset
        b"".join(PAIR.pack(offset, 10**12) for offset in range(1 << 16, 0, -1)),  # in the wrong order
    ],
)
def test_damaged_times_are_read_within_bounds(tmp_path, content):
    path = tmp_path / "rank-0.times"
    path.write_bytes(content)
    for size in (len(content), 1 << 43):
        os.truncate(path, size)  # a sparse file of terabytes holds zeros
        found = read_times(path, 3, 1 << 20)
        assert len(found) <= 16384  # the most that are read for one chunk
        assert found == sorted(found)
        assert all(0 < time < 1 << 32 for _offset, time in found)

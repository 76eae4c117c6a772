"""Convert bytes of ranks' logs, and of nodes' samples of their resource usage (JSON lines), to LogChunks.

The parameter `is_final` is true if the run has ended and the bytes reach the end of the file: nothing will follow them.
"""

from __future__ import annotations

import codecs
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import BinaryIO, NamedTuple

from runtime.launcher.log_times import PAIR
from runtime.specs import LogChunk

MAX_LINE_BYTES = 1 << 20
"""The longest line of samples and the longest stack dump that are read. Both arrive in launchers' messages, which have
the same limit (`runtime.launcher.protocol`)."""
_MAX_TIMES = 16384
"""Maximum number of times that are read for one chunk. Each takes one read of a file that customer code may have filled
with times. A usual chunk of 64 KiB has fewer, unless each of its lines has a time and less than four bytes."""
_MAX_MILLISECONDS = 1000 << 32
"""The latest time that is believed, in milliseconds since 1970: in the year 2106. Later times come from a damaged file.
"""

Times = list[tuple[int, float]]
"""(offset in a log in bytes, Unix seconds), in order. A time holds for the bytes up to the next offset."""


class RawChunk(NamedTuple):
    """Bytes that were read from a file at `offset`. `at_end`: they reach the file's end.

    `size` is the size of the file; None if it is not known.
    """

    data: bytes
    at_end: bool
    offset: int
    size: int | None = None


def read_raw_chunk(stream: BinaryIO, offset: int, limit: int) -> RawChunk:
    """Read up to `limit` bytes of a file from an offset; a negative offset counts from the end."""
    size = stream.seek(0, os.SEEK_END)
    offset = max(0, size + offset) if offset < 0 else offset
    stream.seek(offset)
    data = stream.read(limit)
    return RawChunk(data, at_end=not stream.read(1), offset=offset, size=size)


def read_times(file_fd: int, raw_chunk: RawChunk) -> Times:
    """Return the times of a chunk of a log, from the open file that `LogTimes` has written for the log.

    Customer code may have replaced the file. So any content is accepted, and anything but a regular file counts as
    empty. If there are more than `_MAX_TIMES`, some are skipped at even intervals, so that the reads are bounded.
    """
    start, end = raw_chunk.offset, raw_chunk.offset + len(raw_chunk.data)
    try:
        pairs = range(os.fstat(file_fd).st_size // PAIR.size)
        # From the last pair at or before the chunk's start to the first pair at or after the chunk's end.
        first = max(0, bisect_right(pairs, start, key=lambda pair: _read_pair(file_fd, pair)[0]) - 1)
        last = bisect_left(pairs, end, lo=first, key=lambda pair: _read_pair(file_fd, pair)[0])
        step = max(1, math.ceil((last - first) / _MAX_TIMES))
        pairs_read = [_read_pair(file_fd, pair) for pair in pairs[first:last:step]]
    except OSError:  # the log is shown without times
        return []
    return sorted((offset, time / 1000) for offset, time in pairs_read if 0 < time < _MAX_MILLISECONDS)


def _read_pair(file_fd: int, index: int) -> tuple[int, int]:
    """Return the offset and the time (in milliseconds) of a pair; zeros if the file ends before it."""
    offset, time = PAIR.unpack(os.pread(file_fd, PAIR.size, index * PAIR.size).ljust(PAIR.size, b"\0"))
    return offset, time


def text_chunk(raw_chunk: RawChunk, *, is_final: bool, at_line: bool = False, times: Times | None = None) -> LogChunk:
    """Decode the bytes of a log. Unless `is_final`, an incomplete character at their end is left to the next chunk.

    `at_line`: unless the chunk is the beginning of the file, leave out its first line, which may be incomplete. If the
    bytes have no other line, leave out only an incomplete character. `times` are the times of this chunk.
    """
    data, offset = raw_chunk.data, raw_chunk.offset
    if offset and at_line:
        # The last byte is not searched: no line of this chunk begins after it.
        start = data.find(b"\n", 0, len(data) - 1) + 1
        if not start:
            # A character of UTF-8 has at most three continuation bytes (10xxxxxx), so a character begins
            # within the first four bytes.
            start = next((index for index, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)
        data, offset = data[start:], offset + start
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=is_final)
    incomplete_bytes = len(decoder.getstate()[0])
    return LogChunk(
        text,
        offset + len(data) - incomplete_bytes,
        eof=is_final,
        offset=offset,
        size=raw_chunk.size,
        times=None if times is None else _times_of_lines(data, offset, times),
    )


def _times_of_lines(data: bytes, offset: int, times: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the times of the lines of `data`, which was read at `offset`, in the form of `LogChunk.times`."""
    by_line: dict[int, float] = {}
    line, position = 0, 0  # the line that contains the byte at `position`
    for time_offset, seconds in times:
        next_position = max(0, time_offset - offset)
        if next_position >= len(data):
            break
        line += data.count(b"\n", position, next_position)
        position = next_position
        # A time that begins in the middle of a line counts from the next line on: a line has the time of its beginning.
        begins_here = not position or data[position - 1 : position] == b"\n"
        by_line[line if begins_here else line + 1] = seconds
    return tuple(by_line.items())


def lines_chunk(data: bytes, offset: int, *, is_final: bool) -> LogChunk:
    """Decode the complete lines of `data`, which was read at `offset`.

    Leave an incomplete last line to the next chunk, or drop it if `is_final`.
    """
    data = data[: data.rfind(b"\n") + 1]
    return LogChunk(data.decode("utf-8", "replace"), offset + len(data), eof=is_final)

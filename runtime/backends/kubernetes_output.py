"""What a run has written, for those who read along: from shared storage, or, where there is none, from the API server.

The one rule: an offset means the same byte whenever it is asked for, as long as the cluster keeps the output at all.
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Generator, Iterable

from runtime.specs import LogChunk

LONGEST_SAMPLE = 1 << 20


def text_chunk(data: bytes, offset: int, *, final: bool) -> LogChunk:
    """A piece of a log. What is the start of a character at its end is read again, with the rest of it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=final)
    held_back = len(decoder.getstate()[0])
    return LogChunk(text, max(0, offset) + len(data) - held_back, eof=final)


def lines_chunk(data: bytes, offset: int, *, final: bool) -> LogChunk:
    """A piece of a file of lines: whole ones."""
    data = data[: data.rfind(b"\n") + 1]
    return LogChunk(data.decode("utf-8", "replace"), max(0, offset) + len(data), eof=final)


def of_rank(pieces: Iterable[bytes], rank: int, offset: int, limit: int) -> tuple[bytes, bool]:
    """A rank's bytes from an offset, out of its pod's output (`runtime.launcher.pod`), and whether that was all.

    No more is read of the pod's output than it takes.
    """
    whole, part = f"{rank}\t".encode(), f"{rank}+\t".encode()
    found, seen = b"", 0
    with contextlib.closing(_lines(pieces)) as lines:
        for line in lines:
            if line.startswith(whole):
                data = line[len(whole) :] + b"\n"
            elif line.startswith(part):
                data = line[len(part) :]
            else:
                continue
            seen += len(data)
            if seen > offset:
                found += data[max(0, len(data) - (seen - offset)) :]
            if len(found) > limit:
                return found[:limit], False
    return found, True


def _lines(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    """Lines as they come; one without an end is not there yet."""
    buffer = b""
    for piece in pieces:
        *lines, buffer = (buffer + piece).split(b"\n")
        yield from lines

"""Cut the bytes of ranks' logs and nodes' samples into LogChunks.

The parameter `final` is true if the run has ended and the bytes reach the end of the file.
"""

from __future__ import annotations

import codecs
import os
from typing import BinaryIO, NamedTuple

from runtime.specs import LogChunk

MAX_LINE_BYTES = 1 << 20
"""The longest line of samples and the longest stack dump that are read. Both arrive in launchers' messages, which have
the same limit (`runtime.launcher.protocol`)."""


class Piece(NamedTuple):
    """Bytes read from a file. `at_end`: they reach the file's end. `size` is the file's (None: unknown)."""

    data: bytes
    at_end: bool
    offset: int
    size: int | None = None


def read_piece(stream: BinaryIO, offset: int, limit: int) -> Piece:
    """Read up to `limit` bytes of a file from an offset; a negative one counts from the end."""
    size = stream.seek(0, os.SEEK_END)
    offset = max(0, size + offset) if offset < 0 else offset
    stream.seek(offset)
    data = stream.read(limit)
    return Piece(data, not stream.read(1), offset, size)


def text_chunk(piece: Piece, *, final: bool, at_line: bool = False) -> LogChunk:
    """Decode the bytes of a log. Unless `final`, an incomplete character at their end is left to the next chunk.

    `at_line`: leave out an incomplete line at the beginning. If the bytes have no other line, leave out only an
    incomplete character.
    """
    data, offset = piece.data, piece.offset
    if offset and at_line:
        # A newline in the last byte is no start, since nothing follows it.
        start = data.find(b"\n", 0, len(data) - 1) + 1
        if not start:
            # UTF-8 has at most three continuation bytes in a character.
            start = next((index for index, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)
        data, offset = data[start:], offset + start
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=final)
    incomplete_bytes = len(decoder.getstate()[0])
    return LogChunk(text, offset + len(data) - incomplete_bytes, eof=final, offset=offset, size=piece.size)


def lines_chunk(data: bytes, offset: int, *, final: bool) -> LogChunk:
    """Decode the complete lines of `data`, which was read at `offset`.

    Leave an incomplete last line to the next chunk.
    """
    data = data[: data.rfind(b"\n") + 1]
    return LogChunk(data.decode("utf-8", "replace"), max(0, offset) + len(data), eof=final)

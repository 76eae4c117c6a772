"""Extract one rank's output from its Pod's output. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import NamedTuple


class RankOutput(NamedTuple):
    """A part of a rank's output. `at_end`: it reaches the end of the output so far."""

    data: bytes
    at_end: bool


def extract_rank(chunks: Iterable[bytes], rank: int, offset: int, limit: int) -> RankOutput:
    r"""Return up to `limit` bytes of one rank's output from `offset`.

    An offset refers to the same byte in every call while the cluster keeps the output. `chunks` are the Pod's output,
    which is read only as far as needed. Each line starts with its rank (see `runtime.launcher.pod.log_mux`): "3\t" for
    a complete line, "3+\t" for a piece that the next line of this rank continues.
    """
    complete_prefix, partial_prefix = f"{rank}\t".encode(), f"{rank}+\t".encode()
    output, position = b"", 0
    with contextlib.closing(_lines(chunks)) as lines:
        for line in lines:
            if line.startswith(complete_prefix):
                data = line[len(complete_prefix) :] + b"\n"
            elif line.startswith(partial_prefix):
                data = line[len(partial_prefix) :]
            else:
                continue
            position += len(data)
            if position > offset:
                output += data[max(0, len(data) - (position - offset)) :]
            if len(output) > limit:
                return RankOutput(output[:limit], at_end=False)
    return RankOutput(output, at_end=True)


def _lines(chunks: Iterable[bytes]) -> Generator[bytes, None, None]:
    """Yield complete lines. Leave out an unfinished last line, which the next call finds complete."""
    buffer = b""
    for chunk in chunks:
        *lines, buffer = (buffer + chunk).split(b"\n")
        yield from lines

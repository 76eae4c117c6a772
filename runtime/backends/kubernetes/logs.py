"""Extract one rank's output from its Pod's output. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from datetime import datetime
from typing import NamedTuple

from runtime.backends.log_chunks import Times

_MIN_INTERVAL_SECONDS = 0.1
"""Minimum interval between two returned times; those in between are dropped, as in `runtime.launcher.log_times`."""


class RankOutput(NamedTuple):
    """A part of a rank's output. `at_end`: it reaches the end of the output so far. `times` are those of `data`."""

    data: bytes
    at_end: bool
    times: Times


def extract_rank(
    chunks: Iterable[bytes], rank: int, offset: int, limit: int, *, with_times: bool = False
) -> RankOutput:
    r"""Return up to `limit` bytes of one rank's output from `offset`.

    Offsets count the bytes of this rank only, and stay valid while the cluster keeps the output. `chunks` are the Pod's
    output, which is read only as far as needed. Each line starts with its rank (see `runtime.launcher.pod.log_mux`):
    "3\t" for a complete line, "3+\t" for a piece that the next line of this rank continues. `with_times`: before the
    rank, each line has the time at which the kubelet received it, and a space.
    """
    complete_prefix, partial_prefix = f"{rank}\t".encode(), f"{rank}+\t".encode()
    output, position, time = bytearray(), 0, b""
    times: Times = []
    with contextlib.closing(_lines(chunks)) as lines:
        for whole_line in lines:
            line = whole_line
            if with_times:
                time, _space, line = whole_line.partition(b" ")
            if line.startswith(complete_prefix):
                data = line[len(complete_prefix) :] + b"\n"
            elif line.startswith(partial_prefix):
                data = line[len(partial_prefix) :]
            else:
                continue
            start, position = position, position + len(data)
            if position > offset:
                seconds = _unix_seconds(time) if with_times else 0.0
                if seconds and (not times or seconds >= times[-1][1] + _MIN_INTERVAL_SECONDS):
                    times.append((start, seconds))
                output += data[max(0, offset - start) :]
            if len(output) > limit:
                return RankOutput(bytes(output[:limit]), at_end=False, times=times)
    return RankOutput(bytes(output), at_end=True, times=times)


def _unix_seconds(time: bytes) -> float:
    """Return a time such as 2026-01-31T23:59:59.123456789Z in Unix seconds; 0 for anything else."""
    try:
        return datetime.fromisoformat(time.decode()).timestamp()
    except ValueError:
        return 0.0


def _lines(chunks: Iterable[bytes]) -> Generator[bytes, None, None]:
    """Yield complete lines. Leave out an unfinished last line, which the next call finds complete."""
    buffer = b""
    for chunk in chunks:
        *lines, buffer = (buffer + chunk).split(b"\n")
        yield from lines

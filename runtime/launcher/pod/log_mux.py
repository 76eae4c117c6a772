r"""Write the output of a pod's processes to its stdout, line by line, each line with its rank.

    <rank>\t<text>     a line, or the last piece of one
    <rank>+\t<text>    a piece of a line; the rank's next piece continues it
    -\t<text>          output of the platform; like a rank's, a piece of a line has -+\t

A reader that joins a rank's pieces gets its exact output. A slow reader slows the ranks down (`is_full`). If stdout
accepts nothing for `STALL_SECONDS`, output is dropped, and a line says so. If stdout is closed, nothing is written.
"""

from __future__ import annotations

import os
import select
import selectors
import time
from typing import Callable, Dict

from ..output import LAUNCHER

STALL_SECONDS = 10.0
"""How long a stdout that accepts nothing slows the ranks down before output is dropped. A container runtime that
restarts needs seconds."""
_BUFFER_BYTES = 1 << 20
"""How many bytes are buffered before the ranks are slowed down: as many as a rank's pipe holds."""
_MAX_PIECE_BYTES = 8192
"""Maximum length of a piece. The kubelet splits lines of more than 16 KiB, and readers could not join those parts."""
_PARTIAL_LINE_SECONDS = 1.0
"""How long an incomplete line waits for its end. Then it is written, so that readers see prompts and progress bars."""


class LogMux:
    """Writes to `descriptor`; the selector reports when it can be written to."""

    def __init__(self, selector: selectors.BaseSelector, descriptor: int = 1) -> None:
        self._selector = selector
        self._descriptor = descriptor
        self._buffer = bytearray()
        self._partial_lines: Dict[int, bytes] = {}  # each rank's incomplete line
        self._partial_since: Dict[int, float] = {}  # when that line began (monotonic)
        self._written_at = time.monotonic()  # when stdout last accepted data, or the buffer was last empty
        self._is_registered = False  # with the selector, which is needed only while data waits
        self._has_dropped_output = False
        self._is_closed = False
        try:
            os.set_blocking(descriptor, False)
        except OSError:
            self._is_closed = True  # stdout was closed before this process started

    def for_rank(self, rank: int) -> Callable[[bytes], None]:
        """Return a function that takes this rank's output."""
        return lambda data: self.write(rank, data)

    @property
    def is_full(self) -> bool:
        """Whether no more output should be added for now."""
        return len(self._buffer) > _BUFFER_BYTES and not self._is_stalled

    @property
    def _is_stalled(self) -> bool:
        return bool(self._buffer) and time.monotonic() - self._written_at > STALL_SECONDS

    def write(self, rank: int, data: bytes) -> None:
        """Add output of a rank; an incomplete line is kept for a moment."""
        *lines, partial_line = (self._partial_lines.pop(rank, b"") + data).split(b"\n")
        prefix = b"-" if rank == LAUNCHER else str(rank).encode()
        if lines:
            if max(map(len, lines)) > _MAX_PIECE_BYTES:
                self._add(b"".join(_format_long_line(prefix, line) for line in lines))
            else:
                # Most output has only short lines, which one `join` formats without work per line.
                start = prefix + b"\t"
                self._add(start + (b"\n" + start).join(lines) + b"\n")
            self._partial_since.pop(rank, None)
        while len(partial_line) > _MAX_PIECE_BYTES:
            self._add(prefix + b"+\t" + partial_line[:_MAX_PIECE_BYTES] + b"\n")
            partial_line = partial_line[_MAX_PIECE_BYTES:]
        if partial_line:
            self._partial_lines[rank] = partial_line
            self._partial_since.setdefault(rank, time.monotonic())

    def handle_timers(self, now: float) -> None:
        """Write incomplete lines that have waited long enough, such as a prompt or a progress bar."""
        for rank in [rank for rank, since in self._partial_since.items() if now - since >= _PARTIAL_LINE_SECONDS]:
            self._write_partial(rank)

    def flush(self) -> None:
        """Write as much as stdout accepts now."""
        while self._buffer and not self._is_closed:
            try:
                # A part of the buffer, because a slice is a copy.
                count = os.write(self._descriptor, self._buffer[: _BUFFER_BYTES >> 2])
            except BlockingIOError:
                break
            except OSError:
                self._is_closed = True
                self._buffer.clear()
                break
            del self._buffer[:count]
            self._written_at = time.monotonic()
        if self._has_dropped_output and not self._buffer:
            self._has_dropped_output = False
            self._buffer += b"-\t[trainyard] Output is missing here because nothing read it.\n"
        self._set_registered(bool(self._buffer) and not self._is_closed)

    def finish(self, seconds: float) -> None:
        """Write everything that is left, for `seconds` at most."""
        for rank in list(self._partial_lines):
            self._write_partial(rank)
        give_up_at = time.monotonic() + seconds
        self.flush()
        while self._buffer and not self._is_closed and time.monotonic() < give_up_at:
            select.select([], [self._descriptor], [], max(0.0, give_up_at - time.monotonic()))
            self.flush()

    def _write_partial(self, rank: int) -> None:
        prefix = b"-" if rank == LAUNCHER else str(rank).encode()
        self._partial_since.pop(rank, None)
        self._add(prefix + b"+\t" + self._partial_lines.pop(rank, b"") + b"\n")

    def _add(self, data: bytes) -> None:
        """Add complete lines to the buffer, or drop them while stdout is stalled."""
        if self._is_closed:
            return
        if not self._buffer:
            self._written_at = time.monotonic()
        if len(self._buffer) > _BUFFER_BYTES and self._is_stalled:
            self._has_dropped_output = True
            return
        self._buffer += data
        if not self._is_registered:  # else stdout is full, and the selector reports when it is not
            self.flush()

    def _set_registered(self, is_registered: bool) -> None:
        """Register stdout with the selector, which then reports when stdout can be written to, or unregister it."""
        if is_registered == self._is_registered:
            return
        try:
            if is_registered:
                self._selector.register(self._descriptor, selectors.EVENT_WRITE, self)
            else:
                self._selector.unregister(self._descriptor)
        except OSError:
            return  # stdout is a file: a selector cannot wait for it, and need not, since writing to it never blocks
        self._is_registered = is_registered


def _format_long_line(prefix: bytes, line: bytes) -> bytes:
    """Return a complete line as it is written: in pieces of at most `_MAX_PIECE_BYTES`."""
    formatted = b""
    while len(line) > _MAX_PIECE_BYTES:
        formatted += prefix + b"+\t" + line[:_MAX_PIECE_BYTES] + b"\n"
        line = line[_MAX_PIECE_BYTES:]
    return formatted + prefix + b"\t" + line + b"\n"

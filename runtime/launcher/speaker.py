r"""What a pod says on its own stdout: the ranks' output, line by line, each line with its rank.

    <rank>\t<text>     a line, or the last piece of one
    <rank>+\t<text>    a piece of a line; the rank's next piece follows it without a line's end between
    -\t<text>          a word of the platform's own

Whoever puts a rank's pieces together again has its output byte by byte. The one rule: nobody waits for stdout longer
than `STALL_SECONDS`. Who reads it slowly slows the ranks down (`full`); who does not read it at all misses something,
and is told so; who has closed it is not spoken to again.
"""

from __future__ import annotations

import os
import select
import selectors
import time
from typing import Callable, Dict

from .output import PLATFORM

STALL_SECONDS = 10.0
_ROOM = 1 << 20
_LONGEST_PIECE = 8192
_HOLD_SECONDS = 1.0


class Speaker:
    """Speaks through `descriptor`, and has the selector say when more can be said."""

    def __init__(self, selector: selectors.BaseSelector, descriptor: int = 1) -> None:
        self._selector = selector
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._held: Dict[int, bytes] = {}
        self._held_since: Dict[int, float] = {}
        self._moved_at = time.monotonic()
        self._listed = False
        self._lost = False
        self._closed = False
        try:
            os.set_blocking(descriptor, False)
        except OSError:
            self._closed = True

    def for_rank(self, rank: int) -> Callable[[bytes], None]:
        """What takes this rank's output."""
        return lambda data: self.say(rank, data)

    @property
    def full(self) -> bool:
        """Whether more had better be said later."""
        return len(self._waiting) > _ROOM and not self._stalled

    @property
    def _stalled(self) -> bool:
        return bool(self._waiting) and time.monotonic() - self._moved_at > STALL_SECONDS

    def say(self, rank: int, data: bytes) -> None:
        """Some of the rank's output; what does not end a line is held back a moment."""
        *lines, rest = (self._held.pop(rank, b"") + data).split(b"\n")
        name = b"-" if rank == PLATFORM else str(rank).encode()
        if lines:
            start = name + b"\t"
            self._add(start + (b"\n" + start).join(lines) + b"\n")
            self._held_since.pop(rank, None)
        while len(rest) > _LONGEST_PIECE:
            self._add(name + b"+\t" + rest[:_LONGEST_PIECE] + b"\n")
            rest = rest[_LONGEST_PIECE:]
        if rest:
            self._held[rank] = rest
            self._held_since.setdefault(rank, time.monotonic())

    def keep_time(self, now: float) -> None:
        """Say what has been held back for long enough: a prompt, a progress bar."""
        for rank in [rank for rank, since in self._held_since.items() if now - since >= _HOLD_SECONDS]:
            self._release(rank)

    def flush(self) -> None:
        """As much as stdout takes now."""
        while self._waiting and not self._closed:
            try:
                count = os.write(self._descriptor, self._waiting[: _ROOM >> 2])
            except BlockingIOError:
                break
            except OSError:
                self._closed = True
                self._waiting.clear()
                break
            del self._waiting[:count]
            self._moved_at = time.monotonic()
        if self._lost and not self._waiting:
            self._lost = False
            self._waiting += b"-\t[trainyard] Output is missing here: nobody took it.\n"
        self._list(bool(self._waiting) and not self._closed)

    def finish(self, seconds: float) -> None:
        """Say everything that is left, for so long at most."""
        for rank in list(self._held):
            self._release(rank)
        give_up_at = time.monotonic() + seconds
        self.flush()
        while self._waiting and not self._closed and time.monotonic() < give_up_at:
            select.select([], [self._descriptor], [], max(0.0, give_up_at - time.monotonic()))
            self.flush()

    def _release(self, rank: int) -> None:
        name = b"-" if rank == PLATFORM else str(rank).encode()
        self._held_since.pop(rank, None)
        self._add(name + b"+\t" + self._held.pop(rank, b"") + b"\n")

    def _add(self, data: bytes) -> None:
        if self._closed:
            return
        if not self._waiting:
            self._moved_at = time.monotonic()
        if len(self._waiting) > _ROOM and self._stalled:
            self._lost = True
            return
        self._waiting += data
        if not self._listed:
            self.flush()

    def _list(self, wanted: bool) -> None:
        if wanted == self._listed:
            return
        try:
            if wanted:
                self._selector.register(self._descriptor, selectors.EVENT_WRITE, self)
            else:
                self._selector.unregister(self._descriptor)
        except OSError:
            return  # A file: it takes everything at once, and no selector takes it.
        self._listed = wanted

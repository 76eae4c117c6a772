"""The output of one node's processes: that of each rank and of the launcher, written to files."""

from __future__ import annotations

import os
import selectors
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional

from .masking import Mask
from .ranklog import RankLog

LAUNCHER = -1
"""Stands for the launcher's own output in place of a rank."""
_LAUNCHER_LOG_BYTES = 1 << 20
"""Maximum size of the launcher's own log. It normally prints nothing."""


class Output:
    """The logs of one node's ranks and of its launcher, in `folder`."""

    def __init__(self, selector: selectors.BaseSelector, folder: Path) -> None:
        self.selector = selector
        self._folder = folder
        self.ranks: Dict[int, RankLog] = {}  # the ranks' logs, by global rank at submission
        self._launcher: Optional[RankLog] = None
        self._paused_logs: List[RankLog] = []  # each has `paused_until`, and returns to the selector then
        self.mask = Mask()
        """Replaces the values of secrets. A log uses the mask that is set when the log is opened."""

    @property
    def is_full(self) -> bool:
        """Whether reading must pause. Subclasses that also send output to a slow reader override it."""
        return False

    def open_rank(self, rank: int, limit_bytes: int) -> int:
        """Create a rank's log and return the descriptor that the rank writes to. Raises OSError."""
        pipe_fd, write_end = os.pipe()
        self.ranks[rank] = self._open("rank-{}.log".format(rank), pipe_fd, limit_bytes, rank)
        return write_end

    def open_launcher(self, node: int) -> int:
        """Create the launcher's log and return the descriptor that it writes to. Raises OSError."""
        pipe_fd, write_end = os.pipe()
        self._launcher = self._open("node-{}.log".format(node), pipe_fd, _LAUNCHER_LOG_BYTES, LAUNCHER)
        return write_end

    def _open(self, name: str, pipe_fd: int, limit_bytes: int, rank: int) -> RankLog:
        log = RankLog(self._folder / name, pipe_fd, limit_bytes, self._data_callback(rank), self.mask.new_stream())
        self.selector.register(log, selectors.EVENT_READ, log)
        return log

    def _data_callback(self, rank: int) -> Optional[Callable[[bytes], None]]:
        """Return a function that also receives this rank's output, or None. Subclasses override it."""
        del rank
        return None

    def pump(self, log: RankLog) -> bool:
        """Move the contents of a log's pipe to its file; return whether the file changed."""
        changed = log.pump()
        if log.is_open and log.paused_until is None and self.is_full:
            log.paused_until = time.monotonic()  # due at once, but `handle_timers` waits while `is_full`
        if not log.is_open or log.paused_until is not None:
            self.selector.unregister(log)
        if log.is_open and log.paused_until is not None:
            self._paused_logs.append(log)
        return changed

    def is_live_rank(self, log: RankLog) -> bool:
        """Whether this is the log of a rank that still writes."""
        return log.is_open and log is not self._launcher

    def handle_timers(self, now: float) -> None:
        """Resume reading from pipes whose pause has ended."""
        if self.is_full:
            return
        for log in [log for log in self._paused_logs if log.paused_until is None or log.paused_until <= now]:
            self._paused_logs.remove(log)
            self.selector.register(log, selectors.EVENT_READ, log)

    def timeout(self, now: float, max_seconds: float) -> float:
        """Return how long to wait, `max_seconds` at most, until `handle_timers` has something to do."""
        if self.is_full:
            return max_seconds
        pauses = [log.paused_until - now for log in self._paused_logs if log.paused_until is not None]
        return max(0.0, min([max_seconds, *pauses]))

    def drain(self, give_up_at: float) -> None:
        """After the end of all processes, read the rest of the pipes, until `give_up_at` (monotonic) at most.

        Pauses are ignored: the processes have ended, so at most the contents of the pipes are left.
        """
        open_logs = [log for log in [*self.ranks.values(), self._launcher] if log is not None and log.is_open]
        while open_logs and time.monotonic() < give_up_at:
            for log in open_logs:
                log.pump()
            if self.is_full:
                self._flush(give_up_at - time.monotonic())
            open_logs = [log for log in open_logs if log.is_open]

    def _flush(self, seconds: float) -> None:
        """Make room within `seconds`, in a subclass whose `is_full` may be true."""

    @property
    def launcher_lines(self) -> List[str]:
        """The last lines of the launcher's output."""
        return [] if self._launcher is None else self._launcher.last_lines()

    @property
    def problems(self) -> List[str]:
        """Sentences about output that could not be written."""
        return sorted({log.problem for log in self.ranks.values() if log.problem})

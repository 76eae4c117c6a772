"""All that comes out of the processes of one node: each rank's output and the platform's own, into files.

The one rule: what was printed before a process ended is kept before its end is told.
"""

from __future__ import annotations

import os
import selectors
import time

from .ranklog import RankLog

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Callable, Dict, List, Optional

PLATFORM = -1
"""In place of a rank: what the launcher itself prints."""
_PLATFORM_LOG_BYTES = 1 << 20


class Output:
    """The logs of the ranks of one node, and of its launcher. Their files go to `folder`."""

    def __init__(self, selector: selectors.BaseSelector, folder: Path) -> None:
        self.selector = selector
        self._folder = folder
        self.ranks: Dict[int, RankLog] = {}
        self._platform: Optional[RankLog] = None
        self._resting: List[RankLog] = []

    @property
    def full(self) -> bool:
        """Whether nothing more is taken in for a while."""
        return False

    def open_rank(self, rank: int, limit_bytes: int) -> int:
        """Where the rank is to write. Raises OSError."""
        reading, writing = os.pipe()
        self.ranks[rank] = self._open("rank-{}.log".format(rank), reading, limit_bytes, rank)
        return writing

    def open_platform(self, node: int) -> int:
        """Where the launcher is to write. Raises OSError."""
        reading, writing = os.pipe()
        self._platform = self._open("node-{}.log".format(node), reading, _PLATFORM_LOG_BYTES, PLATFORM)
        return writing

    def _open(self, name: str, reading: int, limit_bytes: int, rank: int) -> RankLog:
        log = RankLog(self._folder / name, reading, limit_bytes, self._echo(rank))
        self.selector.register(log, selectors.EVENT_READ, log)
        return log

    def _echo(self, rank: int) -> Optional[Callable[[bytes], None]]:
        """What else takes this rank's output, besides its file."""
        del rank
        return None

    def pump(self, log: RankLog) -> bool:
        """Take in what a log's pipe holds; whether its file changed."""
        changed = log.pump()
        if log.open and log.rest_until is None and self.full:
            log.rest_until = time.monotonic()
        if not log.open or log.rest_until is not None:
            self.selector.unregister(log)
        if log.open and log.rest_until is not None:
            self._resting.append(log)
        return changed

    def is_of_a_rank(self, log: RankLog) -> bool:
        """Whether what came last came from a rank that still writes."""
        return log.open and log is not self._platform

    def keep_time(self, now: float) -> None:
        """What is due: pipes that were left alone."""
        if self.full:
            return
        for log in [log for log in self._resting if log.rest_until is None or log.rest_until <= now]:
            self._resting.remove(log)
            self.selector.register(log, selectors.EVENT_READ, log)

    def patience(self, now: float, longest: float) -> float:
        """How long to wait, at most `longest` seconds, until `keep_time` has something to do."""
        if self.full:
            return longest
        return max(0.0, min([longest, *(log.rest_until - now for log in self._resting if log.rest_until is not None)]))

    def drain(self, give_up_at: float) -> None:
        """Every process has ended: take in all that is left, until that moment."""
        waiting = [log for log in [*self.ranks.values(), self._platform] if log is not None and log.open]
        while waiting and time.monotonic() < give_up_at:
            for log in waiting:
                log.pump()
            if self.full:
                self._make_room(give_up_at - time.monotonic())
            waiting = [log for log in waiting if log.open]

    def _make_room(self, seconds: float) -> None:
        """For what is `full` now and then."""

    @property
    def platform_lines(self) -> List[str]:
        """The last lines of the launcher's own."""
        return [] if self._platform is None else self._platform.last_lines()

    @property
    def problems(self) -> List[str]:
        """What kept output from its files, a sentence each."""
        return sorted({log.problem for log in self.ranks.values() if log.problem})

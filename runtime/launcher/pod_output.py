"""All that comes out of a pod's processes: each rank's output and the platform's own, into files and onto stdout.

The one rule: what was printed before a process ended is kept before its end is told.
"""

from __future__ import annotations

import os
import selectors
import time
from pathlib import Path
from typing import Dict, List

from .ranklog import RankLog
from .speaker import PLATFORM, Speaker

_PLATFORM_LOG_BYTES = 1 << 20


class Output:
    """The logs of the ranks of one node, and of its launcher. Their files go to `folder`."""

    def __init__(self, selector: selectors.BaseSelector, folder: Path) -> None:
        self._selector = selector
        self._folder = folder
        self.speaker = Speaker(selector)
        self.ranks: Dict[int, RankLog] = {}
        self._platform: List[RankLog] = []
        self._resting: List[RankLog] = []

    def open_rank(self, rank: int, limit_bytes: int) -> int:
        """Where the rank is to write. Raises OSError."""
        reading, writing = os.pipe()
        self.ranks[rank] = self._open("rank-{}.log".format(rank), reading, limit_bytes, rank)
        return writing

    def open_platform(self, node: int) -> int:
        """Where the launcher is to write. Raises OSError."""
        reading, writing = os.pipe()
        self._platform.append(self._open("node-{}.log".format(node), reading, _PLATFORM_LOG_BYTES, PLATFORM))
        return writing

    def _open(self, name: str, reading: int, limit_bytes: int, rank: int) -> RankLog:
        log = RankLog(self._folder / name, reading, limit_bytes, self.speaker.for_rank(rank))
        self._selector.register(log, selectors.EVENT_READ, log)
        return log

    def pump(self, log: RankLog) -> bool:
        """Take in what a log's pipe holds; whether a rank wrote it."""
        log.pump()
        if log.open and log.rest_until is None and self.speaker.full:
            log.rest_until = time.monotonic()
        if not log.open or log.rest_until is not None:
            self._selector.unregister(log)
        if log.open and log.rest_until is not None:
            self._resting.append(log)
        return log.open and log not in self._platform

    def keep_time(self, now: float) -> None:
        """What is due: pipes that were left alone, a prompt that was held back."""
        self.speaker.keep_time(now)
        if self.speaker.full:
            return
        for log in [log for log in self._resting if log.rest_until is None or log.rest_until <= now]:
            self._resting.remove(log)
            self._selector.register(log, selectors.EVENT_READ, log)

    def patience(self, now: float, longest: float) -> float:
        """How long to wait, at most `longest` seconds, until `keep_time` has something to do."""
        if self.speaker.full:
            return longest
        return max(0.0, min([longest, *(log.rest_until - now for log in self._resting if log.rest_until is not None)]))

    def drain(self, give_up_at: float) -> None:
        """Every process has ended: take in all that is left, until that moment."""
        waiting = [log for log in [*self.ranks.values(), *self._platform] if log.open]
        while waiting and time.monotonic() < give_up_at:
            for log in waiting:
                log.pump()
            if self.speaker.full:
                self.speaker.finish(give_up_at - time.monotonic())
            waiting = [log for log in waiting if log.open]

    @property
    def platform_lines(self) -> List[str]:
        """The last lines of the launcher's own."""
        return [line for log in self._platform for line in log.last_lines()]

    @property
    def problems(self) -> List[str]:
        """What kept output from its files, a sentence each."""
        return sorted({log.problem for log in self.ranks.values() if log.problem})

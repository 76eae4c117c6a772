"""The output of a pod's processes, to files and to stdout. Without shared storage, only stdout can be read.

A slow reader of stdout slows the ranks down, but never this process.
"""

from __future__ import annotations

import selectors
from pathlib import Path
from typing import Callable

from ..output import Output
from .log_mux import LogMux


class PodOutput(Output):
    """The logs of one pod's ranks and of its launcher. Files go to `folder`, lines to stdout."""

    def __init__(self, selector: selectors.BaseSelector, folder: Path) -> None:
        super().__init__(selector, folder)
        self.log_mux = LogMux(selector)

    @property
    def is_full(self) -> bool:
        """Whether stdout accepts no more output for now."""
        return self.log_mux.is_full

    def _data_callback(self, rank: int) -> Callable[[bytes], None]:
        return self.log_mux.for_rank(rank)

    def handle_timers(self, now: float) -> None:
        """Resume paused pipes and write incomplete lines that are due."""
        self.log_mux.handle_timers(now)
        super().handle_timers(now)

    def _flush(self, seconds: float) -> None:
        self.log_mux.finish(seconds)

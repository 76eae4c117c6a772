"""All that comes out of a pod's processes, onto stdout as well: where storage is not shared, that alone is seen.

The one rule: a reader of stdout that is slow slows the code down, and never this process.
"""

from __future__ import annotations

import selectors
from pathlib import Path
from typing import Callable

from .output import Output
from .speaker import Speaker


class PodOutput(Output):
    """The logs of the ranks of one pod, and of its launcher. Their files go to `folder`, their lines to stdout."""

    def __init__(self, selector: selectors.BaseSelector, folder: Path) -> None:
        super().__init__(selector, folder)
        self.speaker = Speaker(selector)

    @property
    def full(self) -> bool:
        """Whether stdout takes nothing more for a while."""
        return self.speaker.full

    def _echo(self, rank: int) -> Callable[[bytes], None]:
        return self.speaker.for_rank(rank)

    def keep_time(self, now: float) -> None:
        """What is due: pipes that were left alone, a prompt that was held back."""
        self.speaker.keep_time(now)
        super().keep_time(now)

    def _make_room(self, seconds: float) -> None:
        self.speaker.finish(seconds)

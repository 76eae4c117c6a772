"""What a run used, as `pricing` rates it. PURE.

The one rule: moments are texts to be shown; what is reckoned with is seconds and nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """A stretch of a run with one number of nodes. The moments are ISO 8601 texts: shown, never reckoned with."""

    seconds: float
    nodes: int
    began_at: str = ""
    ended_at: str = ""


@dataclass(frozen=True)
class Usage:
    """What a run used: seconds in which its nodes ran and somebody has to pay, and whether it completed.

    `ranges` say how many nodes ran when, and replace `billable_seconds`; without them all of the quote's nodes ran.
    """

    billable_seconds: float
    completed: bool
    ranges: tuple[Range, ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[Range], *, completed: bool) -> Usage:
        """The usage that these ranges make."""
        kept = tuple(each for each in ranges if each.seconds > 0)
        return cls(sum(each.seconds for each in kept), completed, kept)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; `from_json` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Usage:
        """Read what `to_json` gave."""
        ranges = tuple(Range(**each) for each in data["ranges"])
        return cls(data["billable_seconds"], data["completed"], ranges)

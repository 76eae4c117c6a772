"""The usage of a run, as `pricing` rates it. Pure functions; only seconds and nodes are computed with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any


@dataclass(frozen=True)
class Range:
    """A part of a run with a constant number of nodes. Times are ISO 8601 strings, for display only."""

    seconds: float
    nodes: int
    began_at: str = ""
    ended_at: str = ""


@dataclass(frozen=True)
class Usage:
    """The billable seconds of a run, and whether it completed.

    `ranges`, where given, replace `billable_seconds`: they hold the number of nodes over time. Without them every node
    of the quote counts for all of `billable_seconds`.
    """

    billable_seconds: float
    completed: bool
    ranges: tuple[Range, ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[Range], *, completed: bool) -> Usage:
        """Return the usage of these ranges; empty ranges are dropped."""
        used = tuple(each for each in ranges if each.seconds > 0)
        return cls(sum(each.seconds for each in used), completed, used)

    def parts(self, nodes: int) -> tuple[Range, ...]:
        """Return the ranges; without them, one range on `nodes` nodes."""
        return self.ranges or (Range(self.billable_seconds, nodes),)

    def node_seconds(self, nodes: int) -> Decimal:
        """Return the node-seconds used; without ranges, on `nodes` nodes."""
        return sum((Decimal(str(part.seconds)) * part.nodes for part in self.parts(nodes)), Decimal(0))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; `from_json` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Usage:
        """Rebuild a usage from the data of `to_json`."""
        ranges = tuple(Range(**each) for each in data["ranges"])
        return cls(data["billable_seconds"], data["completed"], ranges)

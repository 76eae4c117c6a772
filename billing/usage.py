"""The usage of a run, which `billing.pricing` rates. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any


@dataclass(frozen=True)
class Range:
    """A part of a run with a constant number of nodes. Its times are ISO 8601 strings, which receipts only display."""

    seconds: float
    nodes: int
    began_at: str = ""
    ended_at: str = ""


@dataclass(frozen=True)
class Usage:
    """The time for which a run is charged, without its free time such as platform faults, and whether it completed.

    The `ranges` give the number of nodes over time, which changes in an elastic run. Their seconds sum to
    `billable_seconds`. Without ranges, all nodes of the quote were used for `billable_seconds`.
    """

    billable_seconds: float
    completed: bool
    ranges: tuple[Range, ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[Range], *, completed: bool) -> Usage:
        """Return the usage of these ranges. Ranges of no length are dropped."""
        used = tuple(part for part in ranges if part.seconds > 0)
        return cls(sum(part.seconds for part in used), completed, used)

    def parts(self, nodes: int) -> tuple[Range, ...]:
        """Return the ranges. Without ranges, return one of the whole time on `nodes` nodes, the number in the quote."""
        return self.ranges or (Range(self.billable_seconds, nodes),)

    def node_seconds(self, nodes: int) -> Decimal:
        """Return the node-seconds used. `nodes` is the number in the quote; it applies only if there are no ranges."""
        return sum((Decimal(str(part.seconds)) * part.nodes for part in self.parts(nodes)), Decimal(0))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; `from_json` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Usage:
        """Rebuild a usage from the data of `to_json`."""
        ranges = tuple(Range(**part) for part in data["ranges"])
        return cls(data["billable_seconds"], data["completed"], ranges)

"""Order the points of a curve, thin them for a chart, and count the finished epochs of a run. Pure.

Scripts count steps and epochs differently: many restart the count of steps in each epoch, some count epochs from 0,
some report fractions of an epoch. CurveState and EpochState are stored as JSON in the attempt's cursor
(`telemetry.ingest`), so that the next read continues from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict


class CurveState(TypedDict):
    """The state of one curve of an attempt after its last point."""

    offset: int
    """Added to a reported step to get the point's position."""
    first: int
    """The first step since the script last restarted its count."""
    last: int
    """The largest step since then."""
    gap: int
    """The latest distance between two steps. After a restart, the curve continues at this distance."""
    epoch: float | None
    """The last epoch that a point was reported with; None if no point had an epoch."""


class EpochState(TypedDict):
    """The epochs that an attempt has reported."""

    first: float
    """The smallest reported epoch."""
    last: float
    """The largest reported epoch."""
    is_fraction: bool
    """Whether the script reports how many epochs are done, such as 2.37, instead of the number of the current one."""


def next_position(curve: CurveState | None, step: int, epoch: float | None) -> tuple[int, CurveState]:
    """Return the position of a curve's next point, and the curve's new state.

    The position equals the reported step until the script restarts its count. Then it continues after the last
    position, so that points sorted by position are sorted by epoch and step. Two things show a restart: the step is at
    most the first step of the count, or it is in a later epoch and at most the largest step.
    """
    if curve is None:
        return step, {"offset": 0, "first": step, "last": step, "gap": 1, "epoch": epoch}
    is_later_epoch = epoch is not None and curve["epoch"] is not None and epoch > curve["epoch"]
    has_restarted = step <= curve["first"] or (is_later_epoch and step <= curve["last"])
    latest_epoch = curve["epoch"] if epoch is None else epoch
    if has_restarted:
        position = curve["offset"] + curve["last"] + curve["gap"]
        return position, {
            "offset": position - step,
            "first": step,
            "last": step,
            "gap": curve["gap"],
            "epoch": latest_epoch,
        }
    gap = step - curve["last"] if step > curve["last"] else curve["gap"]
    last = max(step, curve["last"])
    return curve["offset"] + step, {**curve, "last": last, "gap": gap, "epoch": latest_epoch}


def add_epoch(state: EpochState | None, epoch: float) -> EpochState:
    """Return the state with one more reported epoch."""
    is_fraction = epoch != math.floor(epoch)
    if state is None:
        return {"first": epoch, "last": epoch, "is_fraction": is_fraction}
    return {
        "first": min(epoch, state["first"]),
        "last": max(epoch, state["last"]),
        "is_fraction": is_fraction or state["is_fraction"],
    }


def count_finished_epochs(state: EpochState | None) -> int:
    """Return how many epochs are certainly finished: those before the largest that was reported.

    A script that has not reported epoch 0 is assumed to count from 1, unless it reports fractions of an epoch.
    """
    if state is None:
        return 0
    number_of_first_epoch = 0 if state["first"] < 1 or state["is_fraction"] else 1
    return math.floor(state["last"]) - number_of_first_epoch


def thinned_indexes(values: Sequence[float], limit: int) -> list[int]:
    """Return the indexes of about `limit` values that show the same curve as all values.

    The values are divided into `limit / 2` equal parts. Of each part, the lowest and the highest value remain, so that
    no peak is lost. The last of all values always remains, so that the curve keeps its end.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    size = math.ceil(len(values) / (limit // 2))
    kept_indexes = {len(values) - 1}
    for start in range(0, len(values), size):
        part = range(start, min(start + size, len(values)))
        kept_indexes |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(kept_indexes)

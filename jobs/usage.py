"""Compute a job's usage from its attempts: the billable time, the free lines of its receipt, the time left. Reads only.

Attempts are measured by the backend's clock. Only those with a reason in `states.BILLED` are billed. A hung attempt is
billed up to its last sign of progress, and a cancelled one at most up to the end of its grace period. An attempt on
fewer nodes costs less: one second on half of the job's nodes is half a billable second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from billing import charges
from billing.pricing import Line
from billing.usage import Range
from jobs.models import Attempt, Job
from jobs.states import BILLED, EndReason

GRACE_SECONDS = 10
"""Time for a cancelled run to write a checkpoint before it is killed. A longer time would delay the next run."""
STOP_SECONDS = 10
"""How long after the grace period the end of a cancelled run may come: backends kill it, which takes a few seconds. A
later end is the cluster's fault, so the grace period is then not billed either."""


class NodeSpan(NamedTuple):
    """A part of a run with a constant number of nodes."""

    nodes: int
    began_at: datetime
    ended_at: datetime


def to_datetime(seconds: float | None) -> datetime | None:
    """Convert a time of the backend (Unix seconds); None stays None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def spans(attempt: Attempt, until: datetime) -> Iterator[NodeSpan]:
    """Yield the spans of the run up to `until`."""
    if attempt.started_at is None:
        return
    # Without reported spans, all nodes of the attempt ran from its start.
    span_rows = attempt.spans or [{"nodes": attempt.granted_nodes, "started_at": attempt.started_at.timestamp()}]
    for span in span_rows:
        began_at = to_datetime(span["started_at"]) or attempt.started_at
        ended_at = min(to_datetime(span.get("finished_at")) or until, until)
        if ended_at > began_at:
            yield NodeSpan(int(span["nodes"]), began_at, ended_at)


def billed_ranges(attempt: Attempt, now: datetime) -> list[Range]:
    """Return what `billed_spans` yields, in the form that billing stores."""
    return [
        Range((ended_at - began_at).total_seconds(), nodes, began_at.isoformat(), ended_at.isoformat())
        for nodes, began_at, ended_at in billed_spans(attempt, now)
    ]


def billed_spans(attempt: Attempt, now: datetime) -> Iterator[NodeSpan]:
    """Yield the billed parts of an attempt. A running attempt counts as if it completed now."""
    reason = EndReason(attempt.reason) if attempt.reason else None
    if reason is None or reason in BILLED:
        yield from spans(attempt, _billed_until(attempt, now))


def billable_seconds(job: Job, attempts: Iterable[Attempt], now: datetime) -> float:
    """Return the billable seconds of all attempts: their node-seconds, divided by the job's number of nodes."""
    return sum(part.seconds * part.nodes for each in attempts for part in billed_ranges(each, now)) / job.nodes


def left_seconds(job: Job, attempts: Iterable[Attempt], *, nodes: int, longest_seconds: int) -> int:
    """Return how many seconds another attempt on `nodes` nodes may run, so that the job stays under its ceiling.

    On fewer nodes, where a second costs less, it may run longer than the deadline. But the billed time of all attempts
    together is at most `longest_seconds` (see `lifecycle.longest_seconds`), or the deadline if that is longer. Free
    attempts do not count.
    """
    ended_attempts = [each for each in attempts if each.finished_at]
    # `billable_seconds` needs a time for running attempts. There are none among these, so any time will do.
    now = max((each.finished_at for each in ended_attempts if each.finished_at), default=job.queued_at)
    # The rest of the node-seconds that the deadline allows, as seconds on `nodes` nodes.
    seconds_left = (job.deadline_seconds - billable_seconds(job, ended_attempts, now)) * job.nodes / nodes
    billed_run_seconds = sum(part.seconds for each in ended_attempts for part in billed_ranges(each, now))
    # An administrator may have lowered the product's limit, and so `longest_seconds`. The deadline that was sold holds.
    return max(0, int(min(seconds_left, max(job.deadline_seconds, longest_seconds) - billed_run_seconds)))


def free_lines(job: Job, attempts: Iterable[Attempt], finished_at: datetime) -> list[Line]:
    """Return the free lines of the receipt of a job that ended at `finished_at`.

    They are the time in the queue, starts, hangs, the time after a cancel, and platform faults with their evidence.
    """
    queued = starting = 0.0
    waiting_since = job.queued_at
    run_lines: list[Line] = []
    for attempt in attempts:
        ended_at = attempt.finished_at or finished_at
        queued += (attempt.claimed_at - waiting_since).total_seconds()
        waiting_since = ended_at
        started_at = attempt.started_at or ended_at
        starting += (started_at - attempt.claimed_at).total_seconds()
        run_lines += _free_part(attempt, started_at, ended_at)
    queued += (finished_at - waiting_since).total_seconds()  # not 0 if the job ended in the queue
    return [
        charges.free_line(rule="queue", seconds=queued),
        charges.free_line(rule="start", seconds=starting),
        *run_lines,
    ]


def lost_seconds(attempt: Attempt) -> float | None:
    """Return the run time since the last checkpoint of an ended attempt; None if it completed or never ran."""
    if attempt.started_at is None or attempt.finished_at is None or attempt.reason == EndReason.COMPLETED:
        return None
    checkpoint_at = attempt.checkpoint_at
    # A checkpoint from before the start belongs to an earlier attempt, because attempts share the checkpoint folder.
    lost_from = checkpoint_at if checkpoint_at and attempt.started_at <= checkpoint_at else attempt.started_at
    return max(0.0, (attempt.finished_at - lost_from).total_seconds())


def _billed_until(attempt: Attempt, now: datetime) -> datetime:
    """Return the end of an attempt's billable time. The caller checks that the reason is in BILLED."""
    ended_at = _end_after_cancel(attempt, attempt.finished_at or now)
    if attempt.reason == EndReason.HUNG and attempt.started_at:
        # Without any sign of progress since the start, nothing is billed.
        return min(ended_at, max(attempt.progress_at or attempt.started_at, attempt.started_at))
    return ended_at


def _end_after_cancel(attempt: Attempt, ended_at: datetime) -> datetime:
    """Return the end of the time that a cancelled run is billed for; `ended_at` if the job was not cancelled.

    That is `ended_at`, but at most the end of the grace period. If the run ended more than STOP_SECONDS after the grace
    period, it is billed only up to the cancel request.
    """
    requested_at = attempt.job.cancel_requested_at
    if requested_at is None:
        return ended_at
    grace_ends = requested_at + timedelta(seconds=GRACE_SECONDS)
    is_late = ended_at > grace_ends + timedelta(seconds=STOP_SECONDS)
    return requested_at if is_late else min(ended_at, grace_ends)


def is_untouched_by_cancel(attempt: Attempt) -> bool:
    """Return whether no cancel shortened the attempt's billable time.

    If one did, a fixed price is not due, although the run completed. Whether the reason is billed is not considered.
    """
    return attempt.finished_at is None or _end_after_cancel(attempt, attempt.finished_at) == attempt.finished_at


def _free_part(attempt: Attempt, started_at: datetime, ended_at: datetime) -> list[Line]:
    """Return the line for the part of an attempt's running time that is free; empty if all of it is billed.

    A platform fault always has a line, even if the attempt never ran, because the line shows the evidence.
    """
    if attempt.reason == EndReason.HUNG:
        rule, began_at = "hang", _billed_until(attempt, ended_at)
    elif attempt.reason and EndReason(attempt.reason) not in BILLED:
        rule, began_at = "platform_fault", started_at
    else:
        # The attempt is billed, so only the time after a cancel can be free. `max`, because a cancel may end the billed
        # time before the run has started.
        rule, began_at = "after_cancel", max(_billed_until(attempt, ended_at), started_at)
    line = charges.free_line(
        rule=rule,
        seconds=(ended_at - began_at).total_seconds(),
        began_at=began_at.isoformat(),
        ended_at=ended_at.isoformat(),
        nodes=attempt.granted_nodes,
        evidence={} if rule == "after_cancel" else _evidence(attempt, ended_at),
    )
    return [line] if ended_at > began_at or rule == "platform_fault" else []


def _evidence(attempt: Attempt, ended_at: datetime) -> dict[str, Any]:
    """Return the evidence that a receipt shows for a hang or a platform fault; see `charges.free_line`."""
    failure = attempt.failure or {}
    return {
        "reason": attempt.reason,
        "attempt": attempt.number,
        "at": ended_at.isoformat(),
        "node": failure.get("node"),
        "code": failure.get("code", ""),
        "data": failure.get("data", {}),
    }

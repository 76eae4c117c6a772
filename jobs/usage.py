"""Compute a job's usage from its attempts: the billable time, the free lines of its receipt, the time left. Reads only.

Only times of the backend's clock count, and only attempts with a reason in `states.BILLED` are billed. A hung attempt
is billed up to its last sign of progress, a cancelled attempt up to the end of its grace period. An attempt on fewer
nodes costs less: one second on half of the job's nodes is half a billable second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from billing import charges
from billing.pricing import Line
from billing.usage import Range
from jobs.models import Attempt, Job
from jobs.states import BILLED, EndReason

GRACE_SECONDS = 10
"""Time for a cancelled run to write a checkpoint before it is killed. A longer time would delay the next run."""
STOP_SECONDS = 10
"""How long after the grace period a cluster may report the end of a cancelled run. A later end is the cluster's fault,
so the grace period is not billed either."""


def to_datetime(seconds: float | None) -> datetime | None:
    """Convert a time of the backend (Unix seconds); None stays None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def spans(attempt: Attempt, until: datetime) -> Iterator[tuple[int, datetime, datetime]]:
    """Yield (nodes, start, end) for each part of the run with a constant number of nodes, up to `until`."""
    if attempt.started_at is None:
        return
    stored = attempt.spans or [{"nodes": attempt.granted_nodes, "started_at": attempt.started_at.timestamp()}]
    for span in stored:
        began = to_datetime(span["started_at"]) or attempt.started_at
        ended = min(to_datetime(span.get("finished_at")) or until, until)
        if ended > began:
            yield int(span["nodes"]), began, ended


def billed_ranges(attempt: Attempt, now: datetime) -> list[Range]:
    """Return the billed parts of an attempt. A running attempt counts as if it completed now."""
    return [
        Range((ended - began).total_seconds(), nodes, began.isoformat(), ended.isoformat())
        for nodes, began, ended in billed_spans(attempt, now)
    ]


def billed_spans(attempt: Attempt, now: datetime) -> Iterator[tuple[int, datetime, datetime]]:
    """Yield (nodes, start, end) for each billed part of an attempt, as `billed_ranges` returns them."""
    reason = EndReason(attempt.reason) if attempt.reason else None
    if reason is None or reason in BILLED:
        yield from spans(attempt, _billed_until(attempt, now))


def billable_seconds(job: Job, attempts: Iterable[Attempt], now: datetime) -> float:
    """Return the billable seconds of all attempts: their node-seconds, divided by the job's number of nodes."""
    return sum(part.seconds * part.nodes for each in attempts for part in billed_ranges(each, now)) / job.nodes


def left_seconds(job: Job, attempts: Iterable[Attempt], *, nodes: int, longest_seconds: int) -> int:
    """Return how many seconds another attempt on `nodes` nodes may run, so that the job stays under its ceiling.

    On fewer nodes an attempt may run longer than the deadline, but all attempts together at most `longest_seconds`.
    """
    ended = [each for each in attempts if each.finished_at]
    # `now` matters only to running attempts, and there are none among these.
    now = max((each.finished_at for each in ended if each.finished_at), default=job.queued_at)
    # The rest of the node-seconds that the deadline allows, as seconds on `nodes` nodes.
    seconds_left = (job.deadline_seconds - billable_seconds(job, ended, now)) * job.nodes / nodes
    run_seconds = sum(part.seconds for each in ended for part in billed_ranges(each, now))
    # The deadline was sold, so it holds even if the product's limit, and so `longest_seconds`, was lowered since.
    return max(0, int(min(seconds_left, max(job.deadline_seconds, longest_seconds) - run_seconds)))


def free_lines(job: Job, attempts: Iterable[Attempt], finished_at: datetime) -> list[Line]:
    """Return the receipt's free lines: time in the queue, starts, hangs, cancels, and platform faults with evidence."""
    queued = starting = 0.0
    waiting_since = job.queued_at
    fault_lines: list[Line] = []
    for attempt in attempts:
        ended = attempt.finished_at or finished_at
        queued += (attempt.claimed_at - waiting_since).total_seconds()
        waiting_since = ended
        started = attempt.started_at or ended
        starting += (started - attempt.claimed_at).total_seconds()
        fault_lines += _free_part(attempt, started, ended)
    queued += (finished_at - waiting_since).total_seconds()  # not 0 if the job ended in the queue
    return [
        charges.free_line(rule="queue", seconds=queued),
        charges.free_line(rule="start", seconds=starting),
        *fault_lines,
    ]


def lost_seconds(attempt: Attempt) -> float | None:
    """Return the run time since the last checkpoint of an ended attempt; None if it completed or never ran."""
    if attempt.started_at is None or attempt.finished_at is None or attempt.reason == EndReason.COMPLETED:
        return None
    saved = attempt.checkpoint_at
    # A checkpoint from before the start belongs to an earlier attempt; attempts share the folder.
    kept_until = saved if saved and attempt.started_at <= saved else attempt.started_at
    return max(0.0, (attempt.finished_at - kept_until).total_seconds())


def _billed_until(attempt: Attempt, now: datetime) -> datetime:
    """Return the end of an attempt's billable time, if its reason is billed at all."""
    ended = _limited_by_cancel(attempt, attempt.finished_at or now)
    if attempt.reason == EndReason.HUNG and attempt.started_at:
        # Without any sign of progress since the start, nothing is billed.
        return min(ended, max(attempt.progress_at or attempt.started_at, attempt.started_at))
    return ended


def _limited_by_cancel(attempt: Attempt, ended: datetime) -> datetime:
    """Return `ended`, or the end of the grace period after a cancel request if that is earlier.

    Return the request's own time if the run ended more than STOP_SECONDS after its grace period.
    """
    requested = attempt.job.cancel_requested_at
    if requested is None:
        return ended
    grace_ends = requested + timedelta(seconds=GRACE_SECONDS)
    is_late = ended > grace_ends + timedelta(seconds=STOP_SECONDS)
    return requested if is_late else min(ended, grace_ends)


def has_ended_before_cancel(attempt: Attempt) -> bool:
    """Whether an attempt ended before a cancel took effect. Otherwise a completed attempt is charged as cancelled."""
    return attempt.finished_at is None or _limited_by_cancel(attempt, attempt.finished_at) == attempt.finished_at


def _free_part(attempt: Attempt, started: datetime, ended: datetime) -> list[Line]:
    """Return the line for the part of an attempt's running time that is free; empty if all of it is billed.

    A platform fault always has a line, even if the attempt never ran: it shows the evidence.
    """
    if attempt.reason == EndReason.HUNG:
        rule, began = "hang", _billed_until(attempt, ended)
    elif attempt.reason and EndReason(attempt.reason) not in BILLED:
        rule, began = "platform_fault", started
    else:
        rule, began = "after_cancel", max(_billed_until(attempt, ended), started)  # a cancel may precede the start
    line = charges.free_line(
        rule=rule,
        seconds=(ended - began).total_seconds(),
        began_at=began.isoformat(),
        ended_at=ended.isoformat(),
        nodes=attempt.granted_nodes,
        evidence={} if rule == "after_cancel" else _evidence(attempt, ended),
    )
    return [line] if ended > began or rule == "platform_fault" else []


def _evidence(attempt: Attempt, ended: datetime) -> dict[str, Any]:
    """Return the evidence that a receipt shows for a hang or a platform fault; see `charges.free_line`."""
    failure = attempt.failure or {}
    return {
        "reason": attempt.reason,
        "attempt": attempt.number,
        "at": ended.isoformat(),
        "node": failure.get("node"),
        "code": failure.get("code", ""),
        "data": failure.get("data", {}),
    }

"""What a job used, from its attempts: what is paid, what is shown at nothing, what is left of its time. No write here.

The one rule: only the backend's clock counts, and only what `states.BILLED` says is paid; of a hang, what lies before
the last sign of progress. Fewer nodes cost less: seconds are told as if all nodes that were bought had run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from billing import charges
from billing.pricing import Line
from billing.usage import Range
from jobs.models import Attempt, Job
from jobs.states import BILLED, EndReason


def moment(seconds: float | None) -> datetime | None:
    """A time of the backend as a moment."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def spans(attempt: Attempt, until: datetime) -> Iterator[tuple[int, datetime, datetime]]:
    """How many nodes ran from when to when, up to `until`; nothing of an attempt that never ran on its nodes."""
    if attempt.started_at is None:
        return
    told = attempt.spans or [{"nodes": attempt.granted_nodes, "started_at": attempt.started_at.timestamp()}]
    for span in told:
        began = moment(span["started_at"]) or attempt.started_at
        ended = min(moment(span.get("finished_at")) or until, until)
        if ended > began:
            yield int(span["nodes"]), began, ended


def ranges(attempt: Attempt, now: datetime) -> list[Range]:
    """What is paid of an attempt; of one that still runs, what would be if it ended well now."""
    reason = EndReason(attempt.reason) if attempt.reason else None
    if reason is not None and reason not in BILLED:
        return []
    return [
        Range((ended - began).total_seconds(), nodes, began.isoformat(), ended.isoformat())
        for nodes, began, ended in spans(attempt, _paid_until(attempt, now))
    ]


def billable_seconds(job: Job, attempts: Iterable[Attempt], now: datetime) -> float:
    """What is paid of all attempts, in seconds on all the nodes that were bought."""
    return sum(part.seconds * part.nodes for each in attempts for part in ranges(each, now)) / job.nodes


def left_seconds(job: Job, attempts: Iterable[Attempt], *, nodes: int, longest_seconds: int) -> int:
    """How long another attempt on `nodes` nodes may run, so that all attempts together stay under the ceiling.

    `longest_seconds`: what the customer, or the product, allows on the clock, however few the nodes are.
    """
    tried = list(attempts)
    ended = [each for each in tried if each.finished_at]
    now = max((each.finished_at for each in ended if each.finished_at), default=job.queued_at)
    left = (job.deadline_seconds - billable_seconds(job, ended, now)) * job.nodes / nodes
    ran = sum(part.seconds for each in ended for part in ranges(each, now))
    return max(0, int(min(left, max(job.deadline_seconds, longest_seconds) - ran)))


def free_lines(job: Job, attempts: Iterable[Attempt], finished_at: datetime) -> list[Line]:
    """What a receipt shows at nothing: the queue, the starts, hangs, the platform's faults with their evidence."""
    queued = starting = 0.0
    waiting_since = job.queued_at
    others: list[Line] = []
    for attempt in attempts:
        ended = attempt.finished_at or finished_at
        queued += (attempt.claimed_at - waiting_since).total_seconds()
        waiting_since = ended
        started = attempt.started_at or ended
        starting += (started - attempt.claimed_at).total_seconds()
        others += _unpaid(attempt, started, ended)
    queued += (finished_at - waiting_since).total_seconds()
    return [
        charges.free_line(rule="queue", seconds=queued),
        charges.free_line(rule="start", seconds=starting),
        *others,
    ]


def lost_seconds(attempt: Attempt) -> float | None:
    """How much of an attempt's work the next one can't go on from; None where nothing is lost, or nothing ran."""
    if attempt.started_at is None or attempt.finished_at is None or attempt.reason == EndReason.COMPLETED:
        return None
    saved = attempt.checkpoint_at
    kept = saved if saved and attempt.started_at <= saved else attempt.started_at
    return max(0.0, (attempt.finished_at - kept).total_seconds())


def _paid_until(attempt: Attempt, now: datetime) -> datetime:
    ended = attempt.finished_at or now
    if attempt.reason == EndReason.HUNG and attempt.started_at:
        # Without any sign of progress nothing is paid.
        return min(ended, max(attempt.progress_at or attempt.started_at, attempt.started_at))
    return ended


def _unpaid(attempt: Attempt, started: datetime, ended: datetime) -> list[Line]:
    if attempt.reason == EndReason.HUNG:
        rule, began = "hang", _paid_until(attempt, ended)
    elif attempt.reason and EndReason(attempt.reason) not in BILLED:
        rule, began = "platform_fault", started
    else:
        return []
    line = charges.free_line(
        rule=rule,
        seconds=(ended - began).total_seconds(),
        began_at=began.isoformat(),
        ended_at=ended.isoformat(),
        nodes=attempt.granted_nodes,
        evidence=_evidence(attempt, ended),
    )
    return [line] if ended > began or rule == "platform_fault" else []


def _evidence(attempt: Attempt, ended: datetime) -> dict[str, Any]:
    failure = attempt.failure or {}
    return {
        "reason": attempt.reason,
        "attempt": attempt.number,
        "at": ended.isoformat(),
        "node": failure.get("node"),
        "code": failure.get("code", ""),
        "data": failure.get("data", {}),
    }

"""Change a job's state: claim, observe, end, retry and settle. No other module writes `Job.state`.

Every change is a compare-and-set: if another process changed the job first, StaleTransition is raised and nothing is
written. The state, its event and the receipt are written in one transaction.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from billing import charges
from billing.usage import Usage
from console.accounts.models import User
from console.notifications import services as notifications
from jobs import traces, usage
from jobs.errors import StaleTransition
from jobs.models import Attempt, Job, JobEvent
from jobs.pubsub import publish_state
from jobs.states import (
    CODE_FAILURES,
    END_STATE,
    PLATFORM_FAULTS,
    EndReason,
    JobState,
    OnHang,
    may_follow,
    pays_for_hang,
)
from runtime.json_values import storable
from runtime.specs import IMAGE_FAILURES, Failure, FailureCode, Outcome, RunPhase, RunStatus

MAX_PLATFORM_FAULTS = 3
"""After this many platform faults, whose attempts are free, a job ends: a fourth attempt rarely cures a repeated fault.
Failed placements (MAX_FAILED_PLACEMENTS) and moves by an administrator do not count."""
OBSERVED_COLUMNS = ("nodes", "started_at", "spans", "progress_at", "checkpoint_at", "restarts")
"""Columns of Attempt that are copied from the backend's RunStatus."""
MIN_RETRY_SECONDS = 30
"""A job with less time left gets no further attempt, because starting the code alone takes about as long."""
MAX_BACKOFF = timedelta(hours=6)
"""Longest wait before a retry. The wait in the order doubles with each retry."""
MAX_FAILED_PLACEMENTS = 12
"""After this many attempts that end with NO_CAPACITY, which are free, a job ends. An attempt ends so if the cluster can
place only some of its nodes. With the waits below, twelve take about two hours, in which most clusters free nodes."""
PLACEMENT_BACKOFF = timedelta(seconds=30)
"""Wait after the first failed placement. It doubles after each further one."""
MAX_PLACEMENT_BACKOFF = timedelta(minutes=15)
"""Longest wait after a failed placement."""

REASON_BY_OUTCOME: dict[Outcome, EndReason] = {
    Outcome.COMPLETED: EndReason.COMPLETED,
    Outcome.CODE_FAILED: EndReason.CODE_FAILED,
    Outcome.OUT_OF_MEMORY: EndReason.OUT_OF_MEMORY,
    Outcome.DISK_FULL: EndReason.DISK_FULL,
    Outcome.HUNG: EndReason.HUNG,
    Outcome.STOPPED: EndReason.CANCELLED,
    Outcome.TIME_LIMIT: EndReason.TIME_LIMIT,
    Outcome.NODE_LOST: EndReason.NODE_LOST,
    Outcome.NO_CAPACITY: EndReason.NO_CAPACITY,
    Outcome.PLATFORM_ERROR: EndReason.PLATFORM_ERROR,
}
"""The end reason of an attempt by the outcome that its backend reports."""


def record_event(
    *,
    job: Job,
    kind: str,
    actor: User | None = None,
    attempt_number: int | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """Write a JobEvent. `data` has the values that `messages.event_sentence` needs for this `kind`."""
    JobEvent.objects.create(job=job, kind=kind, actor=actor, attempt=attempt_number, data=data or {})


def transition(
    *,
    job: Job,
    to: JobState,
    actor: User | None = None,
    attempt_number: int | None = None,
    data: dict[str, Any] | None = None,
    **fields: Any,
) -> None:
    """Change a job from the state in `job` to `to`, set the columns `fields`, and write the event.

    Raises StaleTransition if `to` may not follow that state, or if another process has changed the row's state since.
    """
    current = JobState(job.state)
    if not may_follow(current, to):
        raise StaleTransition
    # A savepoint would cost two queries for nothing. Only a database error can be raised in this block, and that aborts
    # the caller's transaction anyway.
    with transaction.atomic(savepoint=False):
        changed_rows = Job.objects.filter(pk=job.pk, state=current).update(state=to, **fields)
        if changed_rows:
            record_event(job=job, kind=to, actor=actor, attempt_number=attempt_number, data=data)
            publish_state(job.pk)
    if not changed_rows:
        raise StaleTransition
    job.state = to
    for name, value in fields.items():
        setattr(job, name, value)


def request_cancel(*, job: Job, actor: User | None, why: str = "") -> None:
    """Cancel a queued job; change an active one to STOPPING. The caller has locked `job` and stops its run.

    `why`: an administrator's reason, which the customer sees.
    """
    now = timezone.now()
    if job.state == JobState.QUEUED:
        _finish(job, EndReason.CANCELLED, actor=actor, cancel_requested_at=now, detail=why)
    else:
        data = {"has_started": job.started_at is not None}
        transition(job=job, to=JobState.STOPPING, actor=actor, data=data, cancel_requested_at=now, detail=why)


def request_move(*, job: Job, why: str) -> Attempt | None:
    """Mark a job's open attempt as moved. Its end is then a platform fault, so it is free and another one starts.

    Return the attempt; None if none is open. The caller has locked `job`, and stops the run after the commit. In its
    grace period the code can write a checkpoint. `why` is shown to the customer. Safe to repeat.
    """
    attempt = job.attempts.filter(finished_at=None).last()
    if attempt and attempt.move_requested_at is None:
        attempt.move_requested_at = timezone.now()
        attempt.save(update_fields=["move_requested_at"])
        record_event(job=job, kind="moved_by_operator", attempt_number=attempt.number, data={"why": why})
    return attempt


def extend(*, job: Job, deadline_seconds: int, actor: User, data: dict[str, Any]) -> None:
    """Move the deadline of a running job, and write the event. The caller has locked `job` and raised its hold.

    The next reconciliation passes the new deadline to the backend.
    """
    job.deadline_seconds = deadline_seconds
    job.save(update_fields=["deadline_seconds"])
    record_event(job=job, kind="extended", actor=actor, data=data)
    publish_state(job.pk)


def claim(*, job: Job, cluster_name: str, nodes: int | None = None) -> Attempt:
    """Change QUEUED to STARTING and create the next attempt, on `nodes` nodes (default: all nodes of the order).

    Raises StaleTransition if another process claimed the job first.
    """
    with transaction.atomic(savepoint=False):
        transition(job=job, to=JobState.STARTING, waiting_code="", waiting_data={}, not_before=None)
        return Attempt.objects.create(
            job=job,
            number=job.attempts.count() + 1,
            backend=cluster_name,
            granted_nodes=nodes or job.nodes,
            claimed_at=timezone.now(),
        )


def return_to_queue(*, attempt: Attempt, waiting_code: str) -> None:
    """Change STARTING back to QUEUED and delete the attempt, because nothing was started for it. The events stay.

    If the job was cancelled meanwhile, end it instead. If another process has submitted the attempt, do nothing.
    """
    with transaction.atomic():
        locked = _lock(attempt)
        if locked is None or locked.finished_at or locked.submitted_at or locked.started_at:
            return
        if locked.job.state == JobState.STOPPING:
            _end_locked(attempt=locked, reason=EndReason.CANCELLED)
        else:
            transition(job=locked.job, to=JobState.QUEUED, waiting_code=waiting_code, waiting_data={})
            locked.delete()


def observe(*, attempt: Attempt, status: RunStatus) -> Job:
    """Update job and attempt to the status that the backend reports, and return the job.

    Safe to repeat and to call concurrently. A status that arrives after the end changes nothing.
    """
    with transaction.atomic(savepoint=False):
        locked = _lock(attempt)
        if locked is None:
            return Job.objects.get(pk=attempt.job_id)
        attempt, job = locked, locked.job
        if attempt.finished_at or job.is_ended:
            return job
        changed_columns = _copy_status(attempt, status)
        if job.state == JobState.STARTING:
            if attempt.started_at:
                transition(
                    job=job,
                    to=JobState.RUNNING,
                    attempt_number=attempt.number,
                    data={"nodes": attempt.current_nodes, "of_nodes": job.nodes},
                    started_at=attempt.started_at,
                    waiting_code="",
                    waiting_data={},
                )
            else:
                _update_waiting(job, status)
        if status.phase == RunPhase.ENDED and status.outcome:
            # `_end_locked` below saves the copied columns too.
            reason, failure = _reported_end(attempt, status.outcome, status.failure)
            finished_at = usage.to_datetime(status.finished_at)
            _end_locked(attempt=attempt, reason=reason, failure=failure, finished_at=finished_at)
            return job
        if changed_columns:
            attempt.save(update_fields=changed_columns)
        if attempt.started_at:
            _meter(job, [attempt] if attempt.number == 1 else None)  # the first attempt has no others before it
    return job


def end_attempt(*, attempt: Attempt, reason: EndReason, failure: Failure | None = None, is_final: bool = False) -> None:
    """End an open attempt that its backend has not reported as ended, such as one that it refused. Safe to repeat.

    `is_final`: the job ends too, without a retry.
    """
    with transaction.atomic():
        locked = _lock(attempt)
        if locked and locked.finished_at is None and not locked.job.is_ended:
            _end_locked(attempt=locked, reason=reason, failure=failure, is_final=is_final)


def end_queued(*, job_pk: int, reason: EndReason, detail: str) -> None:
    """End a job that cannot leave the queue, free of charge. Does nothing if it is no longer queued."""
    with transaction.atomic():
        jobs = Job.objects.select_for_update(of=("self",)).select_related("order__hold__quote", "order__product")
        job = jobs.get(pk=job_pk)
        if job.state == JobState.QUEUED:
            _finish(job, reason, detail=detail)


def longest_seconds(job: Job) -> int:
    """Return the limit on the billed seconds of all attempts together: the customer's own, or else the product's."""
    return job.order.hold.quote.purchase.get("max_seconds") or job.order.product.max_seconds


def _lock(attempt: Attempt) -> Attempt | None:
    """Lock the job and then the attempt until the transaction ends; None if the attempt was deleted.

    Every process that needs both locks takes them in this order, so that no two processes deadlock.
    """
    # `of`: the joined hold, quote and product stay unlocked.
    jobs = Job.objects.select_for_update(of=("self",)).select_related("order__hold__quote", "order__product")
    job = jobs.get(pk=attempt.job_id)
    locked = Attempt.objects.select_for_update().filter(pk=attempt.pk).first()
    if locked:
        locked.job = job
    return locked


def _end_locked(
    *,
    attempt: Attempt,
    reason: EndReason,
    failure: Failure | None = None,
    finished_at: datetime | None = None,
    is_final: bool = False,
) -> None:
    """End a locked attempt. Then return its job to the queue for a retry, or end it. `is_final`: no retry."""
    job = attempt.job
    attempt.finished_at = finished_at or timezone.now()
    attempt.reason = reason
    attempt.detail = failure.message if failure else ""
    attempt.failure = dataclasses.asdict(failure) if failure else None
    attempt.save(update_fields=["finished_at", "reason", "detail", "failure", *OBSERVED_COLUMNS])
    traces.export_on_commit(attempt)
    is_cancelled = job.cancel_requested_at is not None
    wait = None if is_cancelled or is_final else _retry_after(job, attempt)
    if wait is None:
        # After a cancel, a platform fault ends the job as cancelled. The attempt keeps its reason, so it stays free.
        _finish(job, EndReason.CANCELLED if is_cancelled and reason in PLATFORM_FAULTS else reason, attempt=attempt)
        return
    not_before = timezone.now() + wait if wait else None
    transition(
        job=job,
        to=JobState.QUEUED,
        attempt_number=attempt.number,
        data={
            "reason": reason,
            "failure": _failure_for_event(attempt),
            "is_moved": _was_moved(attempt),
            "retry": True,
            "wait_seconds": wait.total_seconds(),
        },
        started_at=None,
        not_before=not_before,
        waiting_code="backoff" if not_before else "retry",  # see `waiting.RETRY_CODES`
        waiting_data={
            "reason": reason,
            "is_moved": _was_moved(attempt),
            "at": not_before.isoformat() if not_before else "",
        },
    )
    _meter(job)  # an attempt that ended by a platform fault is now free


def _reported_end(attempt: Attempt, outcome: Outcome, failure: Failure | None) -> tuple[EndReason, Failure | None]:
    """Return why an attempt ended, from what its backend reports.

    A run that was stopped in order to be moved ended by a platform fault.
    """
    if outcome is Outcome.STOPPED and attempt.move_requested_at and attempt.job.cancel_requested_at is None:
        return EndReason.PLATFORM_ERROR, Failure("An administrator moved the run.", FailureCode.MOVED)
    return REASON_BY_OUTCOME[outcome], failure


def _retry_after(job: Job, attempt: Attempt) -> timedelta | None:
    """Return how long to wait before another attempt; None if the job gets none. `attempt` has just ended."""
    reason = EndReason(attempt.reason)
    if reason not in PLATFORM_FAULTS | CODE_FAILURES:
        return None
    if reason in CODE_FAILURES and (attempt.failure or {}).get("code") in IMAGE_FAILURES:
        # Another attempt would rarely succeed, and would occupy machines that nobody pays for meanwhile.
        return None
    attempts = list(job.attempts.all())  # including `attempt`, so each count below is at least 1
    if reason is EndReason.NO_CAPACITY:
        failed_placements = sum(each.reason == EndReason.NO_CAPACITY for each in attempts)
        may_retry = failed_placements < MAX_FAILED_PLACEMENTS
        wait = min(PLACEMENT_BACKOFF * 2 ** (failed_placements - 1), MAX_PLACEMENT_BACKOFF)
    elif reason in PLATFORM_FAULTS:
        faults = sum(
            each.reason in PLATFORM_FAULTS - {EndReason.NO_CAPACITY} and not _was_moved(each) for each in attempts
        )
        may_retry, wait = faults < MAX_PLATFORM_FAULTS, timedelta(0)
    elif reason is not EndReason.HUNG or job.on_hang == OnHang.RETRY:
        failures = sum(each.reason in CODE_FAILURES for each in attempts)
        may_retry = failures <= job.retries
        wait = min(timedelta(seconds=job.retry_backoff_seconds * 2 ** (failures - 1)), MAX_BACKOFF)
    else:
        return None
    # If the whole deadline is shorter than MIN_RETRY_SECONDS, a job gets another attempt only with all of it left.
    seconds_left = usage.left_seconds(job, attempts, nodes=job.nodes, longest_seconds=longest_seconds(job))
    return wait if may_retry and seconds_left >= min(MIN_RETRY_SECONDS, job.deadline_seconds) else None


def _was_moved(attempt: Attempt) -> bool:
    """Return whether the attempt ended only because an administrator moved its run."""
    return (attempt.failure or {}).get("code") == FailureCode.MOVED


def _update_waiting(job: Job, status: RunStatus) -> None:
    """Store why a submitted run does not run yet (`runtime.specs.WaitingCode`), if that has changed."""
    waiting_data = storable(status.waiting_data)  # it may quote a registry or a storage server
    if (job.waiting_code, job.waiting_data) == (status.waiting_code, waiting_data):
        return
    job.waiting_code, job.waiting_data = status.waiting_code, waiting_data
    job.save(update_fields=["waiting_code", "waiting_data"])
    publish_state(job.pk)


def _copy_status(attempt: Attempt, status: RunStatus) -> list[str]:
    """Copy a reported status to the attempt without saving it. Return the names of the columns that changed."""
    # If this report lacks a time, the time from an earlier report stays.
    values = {
        "nodes": [dataclasses.asdict(node) for node in status.nodes],
        "started_at": usage.to_datetime(status.started_at) or attempt.started_at,
        "spans": [dataclasses.asdict(span) for span in status.spans],
        "progress_at": usage.to_datetime(status.progress_at) or attempt.progress_at,
        "checkpoint_at": usage.to_datetime(status.checkpoint_at) or attempt.checkpoint_at,
        "restarts": status.restarts,
    }
    changed_columns = [name for name, value in values.items() if getattr(attempt, name) != value]
    for name in changed_columns:
        setattr(attempt, name, values[name])
    return changed_columns


def _meter(job: Job, attempts: list[Attempt] | None = None) -> None:
    """Update the cost shown for the job so far. Without `attempts`, all attempts of the job are read."""
    seconds = usage.billable_seconds(job, job.attempts.all() if attempts is None else attempts, timezone.now())
    charges.meter(hold=job.order.hold, billable_seconds=seconds)


def _failure_for_event(attempt: Attempt | None) -> dict[str, Any] | None:
    """Return the attempt's failure as an event stores it; None if it has none.

    The last lines of output are left out, because they are long, and the attempt keeps them.
    """
    failure = attempt.failure if attempt else None
    return failure and {name: value for name, value in failure.items() if name != "last_lines"}


def _finish(
    job: Job, reason: EndReason, *, attempt: Attempt | None = None, actor: User | None = None, **fields: Any
) -> None:
    """End a job and settle its hold, in the caller's transaction. `attempt` is the last one; None if there is none."""
    finished_at = (attempt.finished_at if attempt else None) or timezone.now()
    # Not set yet if the job was cancelled before it was observed to run.
    if attempt and attempt.started_at:
        fields["started_at"] = attempt.started_at
    # While a job is being cancelled, `detail` is an administrator's reason: see `request_cancel`.
    stop_reason = job.detail if reason is EndReason.CANCELLED else ""
    fields.setdefault("detail", stop_reason or (attempt.detail if attempt else ""))
    if reason is EndReason.COMPLETED:
        fields |= {"progress": 1.0, "epoch": job.epochs}
    transition(
        job=job,
        to=END_STATE[reason],
        actor=actor,
        attempt_number=attempt.number if attempt else None,
        data={"reason": reason, "failure": _failure_for_event(attempt)},
        reason=reason,
        finished_at=finished_at,
        not_before=None,
        awaits_packages=False,
        waiting_code="",
        waiting_data={},
        **fields,
    )
    # A last attempt with the number 1 is the only one, so the others need no query.
    attempts = [attempt] if attempt and attempt.number == 1 else list(job.attempts.all())
    billed = [time_range for each in attempts for time_range in usage.billed_ranges(each, finished_at)]
    # A fixed price is due for a completed job. A job that completed only after a cancel took effect pays for its time.
    has_completed = reason is EndReason.COMPLETED and bool(attempts) and usage.is_untouched_by_cancel(attempts[-1])
    receipt = charges.settle(
        hold=job.order.hold,
        usage=Usage.of(billed, completed=has_completed),
        title=f"#{job.pk} {job.name}",
        free_lines=usage.free_lines(job, attempts, finished_at),
    )
    is_trial = job.order.hold.parent_id is not None  # a trial's hold is a part of its sweep's
    # Of a sweep's trials only failures are published: one notification about the sweep's end covers the others.
    if not job.is_check and (not is_trial or job.state == JobState.FAILED):
        notifications.publish(
            organization=job.organization_id,
            kind=f"job.{job.state}",
            user=job.order.placed_by_id,
            data={
                "job": job.pk,
                "name": job.name,
                "reason": str(reason),
                "is_notebook": job.is_notebook,
                "is_hang_charged": pays_for_hang(attempt.failure if attempt else None),
                "charged_minor": receipt.total_minor,
                "currency": receipt.currency,
            },
        )
    record_event(job=job, kind="settled", data={"total_minor": receipt.total_minor, "currency": receipt.currency})

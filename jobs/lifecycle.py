"""The only writer of `Job.state`: transition, observe, and what an end means for money.

Hides compare-and-set: a change that somebody else has overtaken raises StaleTransition and writes nothing. The one
rule: the event, the receipt and the state change stand in one transaction.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

from django.db import transaction
from django.utils import timezone

from billing import charges
from billing.pricing import Line, Usage
from console.accounts.models import User
from jobs.bell import publish_state
from jobs.errors import StaleTransition
from jobs.models import Attempt, Job, JobEvent
from jobs.states import ACTIVE, BILLED, END_STATE, RETRIED, EndReason, JobState, may_follow
from runtime.specs import Outcome, RunPhase, RunStatus

MOST_ATTEMPTS = 3
"""After as many platform faults the job ends, free of charge, and says so."""

REASON_OF: dict[Outcome, EndReason] = {
    Outcome.COMPLETED: EndReason.COMPLETED,
    Outcome.CODE_FAILED: EndReason.CODE_FAILED,
    Outcome.OUT_OF_MEMORY: EndReason.OUT_OF_MEMORY,
    Outcome.STOPPED: EndReason.CANCELLED,
    Outcome.TIME_LIMIT: EndReason.TIME_LIMIT,
    Outcome.NODE_LOST: EndReason.NODE_LOST,
    Outcome.PLATFORM_ERROR: EndReason.PLATFORM_ERROR,
}


def note(
    *, job: Job, kind: str, actor: User | None = None, attempt: int | None = None, data: dict[str, Any] | None = None
) -> None:
    """Write an event of a job."""
    JobEvent.objects.create(job=job, kind=kind, actor=actor, attempt=attempt, data=data or {})


def transition(
    *,
    job: Job,
    to: JobState,
    actor: User | None = None,
    attempt: int | None = None,
    data: dict[str, Any] | None = None,
    **fields: Any,
) -> None:
    """Change a job's state from what `job` says to `to`, with `fields`, and write the event. Raises StaleTransition."""
    current = JobState(job.state)
    if not may_follow(current, to):
        raise StaleTransition
    with transaction.atomic():
        changed = Job.objects.filter(pk=job.pk, state=current).update(state=to, **fields)
        if changed != 1:
            raise StaleTransition
        note(job=job, kind=to, actor=actor, attempt=attempt, data=data)
        publish_state(job.pk)
    job.state = to
    for name, value in fields.items():
        setattr(job, name, value)


def request_cancel(*, job: Job, actor: User | None) -> None:
    """Begin the end that a customer asked for. `job` is locked by the caller. A waiting job ends here."""
    now = timezone.now()
    if job.state == JobState.QUEUED:
        _finish(job, EndReason.CANCELLED, "", actor=actor, cancel_requested_at=now)
    else:
        transition(job=job, to=JobState.STOPPING, actor=actor, cancel_requested_at=now)


def claim(*, job: Job, backend: str) -> Attempt:
    """QUEUED -> STARTING, with a new attempt. Raises StaleTransition where another worker was first."""
    with transaction.atomic():
        transition(job=job, to=JobState.STARTING, waiting_code="", waiting_data={})
        number = job.attempts.count() + 1
        return Attempt.objects.create(job=job, number=number, backend=backend, claimed_at=timezone.now())


def lock(attempt: Attempt) -> Attempt | None:
    """The attempt as it is now, locked until the transaction ends, and before it its job; None where it was given back.

    Whoever needs both locks takes them in this order.
    """
    job = Job.objects.select_for_update(of=("self",)).select_related("order__hold__quote").get(pk=attempt.job_id)
    locked = Attempt.objects.select_for_update().filter(pk=attempt.pk).first()
    if locked:
        locked.job = job
    return locked


def give_back(*, attempt: Attempt, waiting_code: str, waiting_data: dict[str, Any]) -> None:
    """STARTING -> QUEUED for an attempt of which nothing was started: it leaves no trace but the event.

    A cancel meanwhile ends the job. Where somebody else has handed the attempt over meanwhile, nothing changes.
    """
    with transaction.atomic():
        locked = lock(attempt)
        if locked is None or locked.finished_at or locked.submitted_at or locked.started_at:
            return
        if locked.job.state == JobState.STOPPING:
            end_attempt(attempt=locked, reason=EndReason.CANCELLED, detail="")
        else:
            transition(job=locked.job, to=JobState.QUEUED, waiting_code=waiting_code, waiting_data=waiting_data)
            locked.delete()


def refuse(*, job: Job, reason: EndReason, detail: str) -> None:
    """End a job that still waits: it can't be run at all. Nothing is charged."""
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",)).select_related("order__hold__quote").get(pk=job.pk)
        if job.state == JobState.QUEUED:
            _finish(job, reason, detail)


def observe(*, attempt: Attempt, status: RunStatus) -> Job:
    """Bring the rows up to what the backend says of a run. Safe to repeat, late, and by several workers at once."""
    with transaction.atomic():
        locked = lock(attempt)
        if locked is None:
            return Job.objects.get(pk=attempt.job_id)
        attempt, job = locked, locked.job
        if attempt.finished_at or job.is_ended:
            return job
        attempt.nodes = [dataclasses.asdict(node) for node in status.nodes]
        attempt.started_at = _moment(status.started_at) or attempt.started_at
        attempt.save(update_fields=["nodes", "started_at"])
        if attempt.started_at and job.state == JobState.STARTING:
            transition(job=job, to=JobState.RUNNING, attempt=attempt.number, started_at=attempt.started_at)
        if status.phase == RunPhase.ENDED and status.outcome:
            end_attempt(
                attempt=attempt,
                reason=REASON_OF[status.outcome],
                detail=status.failure.message if status.failure else "",
                failure=dataclasses.asdict(status.failure) if status.failure else None,
                finished_at=_moment(status.finished_at),
            )
        elif attempt.started_at:
            charges.meter(hold=job.order.hold, billable_seconds=(timezone.now() - attempt.started_at).total_seconds())
    return job


def end_attempt(
    *,
    attempt: Attempt,
    reason: EndReason,
    detail: str,
    failure: dict[str, Any] | None = None,
    finished_at: datetime | None = None,
    final: bool = False,
) -> None:
    """End an attempt, and with it the job, unless a platform fault is retried (`final`: trying again can't help).

    The caller has locked job and attempt.
    """
    job = attempt.job
    attempt.finished_at = finished_at or timezone.now()
    attempt.reason = reason
    attempt.detail = detail
    attempt.failure = failure
    attempt.save(update_fields=["finished_at", "reason", "detail", "failure"])
    cancelled = job.cancel_requested_at is not None
    if reason in RETRIED and not (cancelled or final or attempt.number >= MOST_ATTEMPTS):
        transition(
            job=job,
            to=JobState.QUEUED,
            attempt=attempt.number,
            data={"reason": reason, "detail": detail, "retry": True},
            started_at=None,
            waiting_code="retry",
            waiting_data={"reason": reason},
        )
        charges.meter(hold=job.order.hold, billable_seconds=0)
    else:
        # A cancelled run that the platform lost meanwhile is cancelled all the same, and still costs nothing.
        _finish(job, EndReason.CANCELLED if cancelled and reason in RETRIED else reason, detail, attempt=attempt)


def _finish(
    job: Job,
    reason: EndReason,
    detail: str,
    *,
    attempt: Attempt | None = None,
    actor: User | None = None,
    **fields: Any,
) -> None:
    """The end of a job: its state, and in the same transaction its receipt."""
    finished_at = (attempt.finished_at if attempt else None) or timezone.now()
    if attempt and attempt.started_at:
        fields["started_at"] = attempt.started_at
    if reason is EndReason.COMPLETED:
        fields |= {"progress": 1.0, "epoch": job.epochs}
    transition(
        job=job,
        to=END_STATE[reason],
        actor=actor,
        attempt=attempt.number if attempt else None,
        data={"reason": reason, "detail": detail},
        reason=reason,
        detail=detail,
        finished_at=finished_at,
        waiting_code="",
        waiting_data={},
        **fields,
    )
    usage, free = _usage(job, finished_at)
    receipt = charges.settle(
        hold=job.order.hold,
        usage=Usage(billable_seconds=usage, completed=reason is EndReason.COMPLETED),
        title=f"#{job.pk} {job.name}",
        free_lines=free,
    )
    note(job=job, kind="settled", data={"total_minor": receipt.total_minor, "currency": receipt.currency})


def _usage(job: Job, finished_at: datetime) -> tuple[float, list[Line]]:
    """Seconds to pay for, and what is shown at nothing: the queue, the starts, the platform's faults."""
    billable = queued = starting = faults = 0.0
    waiting_since = job.queued_at
    for attempt in job.attempts.all():
        ended = attempt.finished_at or finished_at
        queued += (attempt.claimed_at - waiting_since).total_seconds()
        waiting_since = ended
        started = attempt.started_at or ended
        starting += (started - attempt.claimed_at).total_seconds()
        ran = max(0.0, (ended - started).total_seconds())
        if EndReason(attempt.reason) in BILLED:
            billable += ran
        else:
            faults += ran
    queued += (finished_at - waiting_since).total_seconds()
    free = [charges.free_line(rule="queue", seconds=queued), charges.free_line(rule="start", seconds=starting)]
    if faults:
        free.append(charges.free_line(rule="platform_fault", seconds=faults))
    return billable, free


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def open_attempt(job: Job) -> Attempt | None:
    """The attempt that the backend may be running now."""
    if JobState(job.state) not in ACTIVE:
        return None
    return job.attempts.filter(finished_at=None).order_by("-number").first()

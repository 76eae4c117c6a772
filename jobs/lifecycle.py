"""The only writer of `Job.state`: transition, observe, and what an end means for money.

Hides compare-and-set: a change that somebody else has overtaken raises StaleTransition and writes nothing. The one
rule: the event, the receipt and the state change stand in one transaction.
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
from console.operations.kept import Kept, given
from jobs import traces, usage
from jobs.bell import publish_state
from jobs.errors import StaleTransition
from jobs.models import Attempt, Job, JobEvent
from jobs.states import END_STATE, RETRIABLE, RETRIED, EndReason, JobState, OnHang, may_follow
from runtime.specs import Outcome, RunPhase, RunStatus

MOST_ATTEMPTS = 3
"""After as many platform faults the job ends, free of charge, and says so."""
SEEN = ("nodes", "started_at", "spans", "progress_at", "checkpoint_at", "restarts")
"""Columns of an attempt that hold what the backend says of its run."""
LEAST_RETRY_SECONDS = 30
"""With less left of its time a job is not tried again: it could do nothing in it."""
LONGEST_BACKOFF = timedelta(hours=6)
MOST_PLACEMENTS = 12
"""How often a run is handed to a cluster that then places only some of its nodes: no fault of anybody, and free."""
PLACEMENT_BACKOFF = timedelta(seconds=30)
LONGEST_PLACEMENT_BACKOFF = timedelta(minutes=15)
_JOB = Kept(
    lambda: (
        Job.objects.select_for_update(of=("self",))
        .select_related("order__hold__quote", "order__product")
        .filter(pk=given("pk"))
    )
)
_ATTEMPT = Kept(lambda: Attempt.objects.select_for_update().filter(pk=given("pk")))
_NUMBERS = Kept(lambda: Attempt.objects.filter(job=given("job")).values_list("number"))

REASON_OF: dict[Outcome, EndReason] = {
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
    # Without a savepoint: nothing in the block fails but the database itself.
    with transaction.atomic(savepoint=False):
        changed = Job.objects.filter(pk=job.pk, state=current).update(state=to, **fields)
        if changed:
            note(job=job, kind=to, actor=actor, attempt=attempt, data=data)
            publish_state(job.pk)
    if not changed:
        raise StaleTransition
    job.state = to
    for name, value in fields.items():
        setattr(job, name, value)


def request_cancel(*, job: Job, actor: User | None) -> None:
    """Begin the end that a customer asked for. `job` is locked by the caller. A waiting job ends here."""
    now = timezone.now()
    if job.state == JobState.QUEUED:
        _finish(job, EndReason.CANCELLED, None, actor=actor, cancel_requested_at=now)
    else:
        transition(job=job, to=JobState.STOPPING, actor=actor, cancel_requested_at=now)


def claim(*, job: Job, backend: str, nodes: int | None = None) -> Attempt:
    """QUEUED -> STARTING, with a new attempt on `nodes` nodes (all that were bought).

    Raises StaleTransition where another worker was first.
    """
    with transaction.atomic(savepoint=False):
        transition(job=job, to=JobState.STARTING, waiting_code="", waiting_data={}, not_before=None)
        number = len(_NUMBERS.all(job=job)) + 1
        return Attempt.objects.create(
            job=job,
            number=number,
            backend=backend,
            granted_nodes=nodes or job.nodes,
            claimed_at=timezone.now(),
        )


def lock(attempt: Attempt) -> Attempt | None:
    """The attempt as it is now, locked until the transaction ends, and before it its job; None where it was given back.

    Whoever needs both locks takes them in this order.
    """
    job = _JOB.get(pk=attempt.job_id)
    locked = _ATTEMPT.first(pk=attempt.pk)
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
            end_attempt(attempt=locked, reason=EndReason.CANCELLED)
        else:
            transition(job=locked.job, to=JobState.QUEUED, waiting_code=waiting_code, waiting_data=waiting_data)
            locked.delete()


def observe(*, attempt: Attempt, status: RunStatus) -> Job:
    """Bring the rows up to what the backend says of a run. Safe to repeat, late, and by several workers at once."""
    with transaction.atomic(savepoint=False):
        locked = lock(attempt)
        if locked is None:
            return Job.objects.get(pk=attempt.job_id)
        attempt, job = locked, locked.job
        if attempt.finished_at or job.is_ended:
            return job
        changed = _take_in(attempt, status)
        if job.state == JobState.STARTING:
            if attempt.started_at:
                transition(
                    job=job,
                    to=JobState.RUNNING,
                    attempt=attempt.number,
                    started_at=attempt.started_at,
                    waiting_code="",
                    waiting_data={},
                )
            else:
                _tell_waiting(job, status)
        if status.phase == RunPhase.ENDED and status.outcome:
            end_attempt(
                attempt=attempt,
                reason=REASON_OF[status.outcome],
                failure=dataclasses.asdict(status.failure) if status.failure else None,
                finished_at=usage.moment(status.finished_at),
            )
            return job
        if changed:
            attempt.save(update_fields=changed)
        if attempt.started_at:
            _meter(job, [attempt] if attempt.number == 1 else None)
    return job


def end_attempt(
    *,
    attempt: Attempt,
    reason: EndReason,
    failure: dict[str, Any] | None = None,
    finished_at: datetime | None = None,
    final: bool = False,
) -> None:
    """End an attempt, and with it the job, unless it is tried again (`final`: that can't help).

    `failure`: the first cause, as `runtime.specs.Failure` or `sentences.failure` has it. The caller has locked job and
    attempt.
    """
    job = attempt.job
    attempt.finished_at = finished_at or timezone.now()
    attempt.reason = reason
    attempt.detail = str(failure["message"]) if failure else ""
    attempt.failure = failure
    attempt.save(update_fields=["finished_at", "reason", "detail", "failure", *SEEN])
    traces.tell(attempt)
    cancelled = job.cancel_requested_at is not None
    wait = None if cancelled or final else _retry_after(job, attempt)
    if wait is None:
        # A cancelled run that the platform lost meanwhile is cancelled all the same, and still costs nothing.
        _finish(job, EndReason.CANCELLED if cancelled and reason in RETRIED else reason, failure, attempt=attempt)
        return
    not_before = timezone.now() + wait if wait else None
    transition(
        job=job,
        to=JobState.QUEUED,
        attempt=attempt.number,
        data={"reason": reason, "failure": _cause(failure), "retry": True, "wait_seconds": wait.total_seconds()},
        started_at=None,
        not_before=not_before,
        waiting_code="backoff" if not_before else "retry",
        waiting_data={"reason": reason, "at": not_before.isoformat() if not_before else ""},
    )
    _meter(job)


def longest_seconds(job: Job) -> int:
    """How long all attempts may take by the clock: what the customer named, or else what the product allows."""
    return job.order.hold.quote.purchase.get("max_seconds") or job.order.product.max_seconds


def _retry_after(job: Job, attempt: Attempt) -> timedelta | None:
    """How long to wait before another attempt; None where there is none."""
    reason = EndReason(attempt.reason)
    if reason not in RETRIED | RETRIABLE:
        return None
    attempts = list(job.attempts.all())
    if reason is EndReason.NO_CAPACITY:
        tried = sum(each.reason == EndReason.NO_CAPACITY for each in attempts)
        again = tried < MOST_PLACEMENTS
        wait = min(PLACEMENT_BACKOFF * 2 ** (tried - 1), LONGEST_PLACEMENT_BACKOFF)
    elif reason in RETRIED:
        faults = sum(each.reason in RETRIED - {EndReason.NO_CAPACITY} for each in attempts)
        again, wait = faults < MOST_ATTEMPTS, timedelta(0)
    elif reason is not EndReason.HUNG or job.on_hang == OnHang.RETRY:
        tried = sum(each.reason in RETRIABLE for each in attempts)
        again = tried <= job.retries
        wait = min(timedelta(seconds=job.retry_backoff_seconds * 2 ** (tried - 1)), LONGEST_BACKOFF)
    else:
        return None
    left = usage.left_seconds(job, attempts, nodes=job.nodes, longest_seconds=longest_seconds(job))
    return wait if again and left >= min(LEAST_RETRY_SECONDS, job.deadline_seconds) else None


def _tell_waiting(job: Job, status: RunStatus) -> None:
    """Why a run that was handed over does not run yet, where that is news."""
    if (job.waiting_code, job.waiting_data) == (status.waiting_code, status.waiting_data):
        return
    job.waiting_code, job.waiting_data = status.waiting_code, status.waiting_data
    job.save(update_fields=["waiting_code", "waiting_data"])
    publish_state(job.pk)


def _take_in(attempt: Attempt, status: RunStatus) -> list[str]:
    """Put what the backend says of a run on its attempt, not yet saved; gives the columns that changed."""
    told = {
        "nodes": [dataclasses.asdict(node) for node in status.nodes],
        "started_at": usage.moment(status.started_at) or attempt.started_at,
        "spans": [dataclasses.asdict(span) for span in status.spans],
        "progress_at": usage.moment(status.progress_at) or attempt.progress_at,
        "checkpoint_at": usage.moment(status.checkpoint_at) or attempt.checkpoint_at,
        "restarts": status.restarts,
    }
    changed = [name for name, value in told.items() if getattr(attempt, name) != value]
    for name in changed:
        setattr(attempt, name, told[name])
    return changed


def _meter(job: Job, attempts: list[Attempt] | None = None) -> None:
    """Show what the run has cost so far."""
    used = usage.billable_seconds(job, job.attempts.all() if attempts is None else attempts, timezone.now())
    charges.meter(hold=job.order.hold, billable_seconds=used)


def _cause(failure: dict[str, Any] | None) -> dict[str, Any] | None:
    """A failure without the output that came with it: what an event keeps."""
    return None if failure is None else {name: value for name, value in failure.items() if name != "last_lines"}


def _finish(
    job: Job,
    reason: EndReason,
    failure: dict[str, Any] | None,
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
        data={"reason": reason, "failure": _cause(failure)},
        reason=reason,
        detail=str(failure["message"]) if failure else "",
        finished_at=finished_at,
        not_before=None,
        waiting_code="",
        waiting_data={},
        **fields,
    )
    attempts = [attempt] if attempt and attempt.number == 1 else list(job.attempts.all())
    paid = [part for each in attempts for part in usage.ranges(each, finished_at)]
    receipt = charges.settle(
        hold=job.order.hold,
        usage=Usage.of(paid, completed=reason is EndReason.COMPLETED),
        title=f"#{job.pk} {job.name}",
        free_lines=usage.free_lines(job, attempts, finished_at),
    )
    note(job=job, kind="settled", data={"total_minor": receipt.total_minor, "currency": receipt.currency})

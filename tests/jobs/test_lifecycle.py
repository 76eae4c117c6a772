"""The life cycle of a job: transitions, outcomes with their state and payer, retries and cancels."""

import dataclasses
import time
from datetime import timedelta

import pytest
from django.utils import timezone

from billing.models import Receipt
from jobs import dispatch, lifecycle, orders, reconciliation
from jobs.errors import StaleTransition
from jobs.models import Attempt, Job
from jobs.states import BILLED, END_STATE, EndReason, JobState
from runtime.specs import Failure, FailureCode, Outcome
from tests.factories.jobs import start
from tests.jobs.queueing import waiting
from tests.jobs.receipts import kinds, lines, quantities


def test_a_stale_transition_writes_nothing(customer):
    job = customer.job()
    stale = Job.objects.get(pk=job.pk)
    lifecycle.transition(job=job, to=JobState.STARTING)
    before = kinds(job)
    for each in (stale, job):  # `job` has been starting since the call above
        with pytest.raises(StaleTransition):
            lifecycle.transition(job=each, to=JobState.STARTING)
    assert kinds(job) == before
    assert stale.state == JobState.QUEUED


# Platform faults are free, and a hang is charged otherwise: see test_usage.
OUTCOMES_OF_CODE = sorted(set(Outcome) - {Outcome.HUNG, Outcome.NODE_LOST, Outcome.NO_CAPACITY, Outcome.PLATFORM_ERROR})


def test_an_outcome_of_the_code_ends_the_job_and_is_charged(customer):
    assert set(lifecycle.REASON_BY_OUTCOME) == set(Outcome)
    for number, outcome in enumerate(OUTCOMES_OF_CODE, start=1):
        reason = lifecycle.REASON_BY_OUTCOME[outcome]
        began = time.time() - 600
        job = customer.end(customer.started(at=began), outcome, at=began + 100, message="why")
        job.refresh_from_db()
        assert (job.state, job.reason) == (END_STATE[reason], reason)
        times = [job.started_at.timestamp(), job.finished_at.timestamp()]
        assert times == pytest.approx([began, began + 100], abs=0.01), "times are by the cluster's clock"
        # 100 s on two nodes at 90 cents per node-hour are exactly 5 cents, which is also the minimum charge.
        assert lines(job)["time_used"]["amount_minor"] == job.order.hold.metered_minor == 5
        assert (customer.wallet.posted_minor, customer.wallet.held_minor) == (100_000 - 5 * number, 0)
        assert reason in BILLED
        assert (job.progress, job.epoch) == ((1.0, 10) if outcome is Outcome.COMPLETED else (0.0, 0))


@pytest.mark.parametrize("outcome", [Outcome.NODE_LOST, Outcome.PLATFORM_ERROR])
def test_a_platform_fault_is_retried_free_up_to_a_limit(customer, outcome):
    began = time.time() - 1000
    attempt = customer.started(at=began)
    job = attempt.job
    for number in range(1, lifecycle.MAX_PLATFORM_FAULTS):
        job = customer.end(attempt, outcome, at=began + 60 * number, message="A node went away.")
        job.refresh_from_db()
        assert (job.state, job.reason, job.waiting_code) == (JobState.QUEUED, "", "retry")
        assert job.started_at is None
        assert job.order.hold.metered_minor == 0
        assert not Receipt.objects.exists()
        assert customer.wallet.held_minor == job.order.quote.ceiling_minor
        assert start(job)
        late = customer.backend.describe(attempt.run_name)
        observed = lifecycle.observe(attempt=attempt, status=late)
        assert observed.state == JobState.STARTING, "the status of an attempt that is over changes nothing"
        attempt = job.attempts.last()
        assert attempt.number == number + 1
        assert customer.backend.runs[attempt.run_name].spec.restart_count == number
        customer.backend.start(attempt.run_name, at=began + 60 * number + 30)
        reconciliation.reconcile_job(job_pk=job.pk)
    job = customer.end(attempt, outcome, at=began + 500)
    job.refresh_from_db()
    assert (job.state, job.reason) == (JobState.FAILED, lifecycle.REASON_BY_OUTCOME[outcome])
    assert Receipt.objects.get().total_minor == 0
    assert lines(job)["platform_fault"]["amount_minor"] == 0
    assert lines(job)["platform_fault"]["evidence"]["reason"] == lifecycle.REASON_BY_OUTCOME[outcome]
    # Seconds of the attempts: the second ran from 90 to 120, the third from 150 to 500.
    assert quantities(job, "platform_fault") == pytest.approx([60, 30, 500 - 150], abs=0.2)
    assert customer.wallet.available_minor == 100_000


def test_the_meter_shows_the_cost_so_far_and_never_more_than_the_ceiling(customer):
    attempt = customer.started(at=time.time() - 1800)
    hold = attempt.job.order.hold
    hold.refresh_from_db()
    assert hold.metered_minor == pytest.approx(90, abs=1)  # half an hour on two nodes at 90 cents per node-hour
    # As if the cluster reported that the run started eleven days ago:
    early = dataclasses.replace(customer.backend.describe(attempt.run_name), started_at=time.time() - 10**6, spans=())
    lifecycle.observe(attempt=attempt, status=early)
    hold.refresh_from_db()
    assert hold.metered_minor == hold.amount_minor == attempt.job.order.quote.ceiling_minor


def test_a_cancel_in_the_queue_ends_at_once_and_costs_nothing(customer):
    job = orders.cancel_job(membership=customer.membership, job=customer.job())
    assert (job.state, job.reason) == (JobState.CANCELLED, EndReason.CANCELLED)
    assert job.cancel_requested_at
    assert Receipt.objects.get().total_minor == 0
    assert customer.wallet.available_minor == 100_000
    assert kinds(job) == ["ordered", "cancelled", "settled"]
    assert job.events.get(kind="cancelled").actor == customer.membership.user


def test_an_attempt_returned_to_the_queue_is_deleted_and_a_cancelled_one_ends_its_job(customer):
    job = customer.job()
    attempt = lifecycle.claim(job=job, cluster_name="local")
    lifecycle.return_to_queue(attempt=attempt, waiting_code="capacity")
    job.refresh_from_db()
    assert (job.state, job.waiting_code) == (JobState.QUEUED, "capacity")
    assert not Attempt.objects.exists()
    attempt = lifecycle.claim(job=job, cluster_name="local")
    assert attempt.number == 1
    orders.cancel_job(membership=customer.membership, job=job)
    Attempt.objects.update(submitted_at=timezone.now())
    lifecycle.return_to_queue(attempt=attempt, waiting_code="capacity")
    assert Attempt.objects.exists(), "the cluster has accepted the run"
    Attempt.objects.update(submitted_at=None)
    for _ in range(2):  # the second call changes nothing
        lifecycle.return_to_queue(attempt=attempt, waiting_code="capacity")
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED
    assert Receipt.objects.get().total_minor == 0


def test_a_partly_placed_run_is_requeued_free_with_a_growing_pause(customer):
    job = customer.job()
    for number in range(1, lifecycle.MAX_FAILED_PLACEMENTS + 1):
        Job.objects.filter(pk=job.pk).update(not_before=None)
        dispatch.dispatch_queue()
        name = f"job-{job.pk}-{number}"
        customer.backend.end(name, Outcome.NO_CAPACITY)
        reconciliation.reconcile_job(job_pk=job.pk)
        job.refresh_from_db()
        if number == 1:
            assert (job.state, job.waiting_code) == (JobState.QUEUED, "backoff")
            assert "could not place all nodes at once. That attempt is free" in waiting(customer, job)
        if number < lifecycle.MAX_FAILED_PLACEMENTS:
            pause = job.not_before - timezone.now()
            expected = min(lifecycle.PLACEMENT_BACKOFF * 2 ** (number - 1), lifecycle.MAX_PLACEMENT_BACKOFF)
            assert timedelta(0) <= expected - pause < timedelta(seconds=20)
            assert not Receipt.objects.exists()
    assert (job.state, job.reason) == (JobState.FAILED, EndReason.NO_CAPACITY)
    assert Receipt.objects.get().total_minor == 0
    assert customer.wallet.available_minor == 100_000
    assert lines(job)["platform_fault"]["evidence"]["code"] == "nodes_not_placed"


def test_a_run_whose_image_cannot_be_used_is_not_retried(customer):
    """A retry would occupy nodes for the same image again, free of charge."""
    image_codes = {code for code in FailureCode if code.name.startswith("IMAGE_")}
    for code in sorted(image_codes | {FailureCode.RANK_EXITED}):
        job = customer.job(retries=3)
        assert start(job)
        failure = Failure("why", code)
        lifecycle.end_attempt(attempt=job.attempts.get(), reason=EndReason.CODE_FAILED, failure=failure)
        job.refresh_from_db()
        assert job.state == (JobState.FAILED if code in image_codes else JobState.QUEUED), code

"""Retries, hangs and fewer nodes: who pays for what, and what is left for the next attempt."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from billing.models import Receipt
from jobs import dispatch, lifecycle, orders, reconciliation, run_specs, selectors, usage
from jobs.models import Attempt, Job
from jobs.states import END_STATE, EndReason, JobState
from runtime.specs import Outcome
from tests.factories.jobs import start
from tests.jobs.queueing import waiting


@pytest.fixture(autouse=True)
def _stopped_clock(backend):
    """The cluster's clock stands still: a run ends when a test says so, or at its deadline if that is sooner."""
    backend.clock = lambda: 0.0


def receipt(job):
    return Receipt.objects.get(hold__order__job=job)


def lines(job, rule):
    return [line for line in receipt(job).lines if line["rule"] == rule]


def next_attempt(customer, job, *, at):
    """The next attempt, running since `at`, or not yet running if that is None."""
    Job.objects.filter(pk=job.pk).update(not_before=None)
    job.refresh_from_db()
    if at is None:
        assert start(job)
        return job.attempts.last()
    return customer.run(job, at=at)


def end(customer, attempt, *, at, outcome=Outcome.CODE_FAILED):
    """End the attempt's run, by default by a failure of the code; return its job."""
    job = customer.end(attempt, outcome, at=at)
    job.refresh_from_db()
    return job


def test_a_code_failure_is_retried_as_ordered_and_each_attempt_is_billed(customer):
    began = time.time() - 3000
    attempt = customer.started(at=began, retries=2, retry_backoff_seconds=60)
    job = end(customer, attempt, at=began + 100)
    assert (job.state, job.waiting_code) == (JobState.QUEUED, "backoff")
    assert "The next attempt starts after" in waiting(customer, job)
    assert job.order.hold.metered_minor == 5  # 2 nodes for 100 s
    assert job.not_before - timezone.now() == pytest.approx(timedelta(seconds=60), abs=timedelta(seconds=5))
    reconciliation.reconcile()
    job.refresh_from_db()
    assert job.state == JobState.QUEUED, "the wait before the retry is not over"
    Job.objects.filter(pk=job.pk).update(not_before=timezone.now() - timedelta(seconds=1))
    reconciliation.reconcile()
    job.refresh_from_db()
    assert (job.state, job.not_before) == (JobState.STARTING, None)
    attempt = job.attempts.last()
    customer.backend.start(attempt.run_name, at=began + 200)
    assert customer.backend.runs[attempt.run_name].spec.restart_count == 1
    job = end(customer, attempt, at=began + 400, outcome=Outcome.OUT_OF_MEMORY)
    # The wait doubles.
    assert job.not_before - timezone.now() == pytest.approx(timedelta(seconds=120), abs=timedelta(seconds=5))
    attempt = next_attempt(customer, job, at=began + 500)
    job = end(customer, attempt, at=began + 800, outcome=Outcome.OUT_OF_MEMORY)
    assert (job.state, job.reason) == (JobState.FAILED, EndReason.OUT_OF_MEMORY)
    # Node-hours of 100, 200 and 300 s on two nodes.
    assert [line["quantity"] for line in lines(job, "time_used")] == ["0.055556", "0.111111", "0.166667"]
    assert receipt(job).total_minor == 30  # 600 s on two nodes at 90 cents per node-hour
    assert customer.wallet.held_minor == 0


ENDS_AFTER_A_CANCEL = [
    (Outcome.STOPPED, 0, "cancelled", 100), (Outcome.STOPPED, 4, "cancelled", 104),
    (Outcome.COMPLETED, 10, "completed", 110), (Outcome.CODE_FAILED, 13, "code_failed", 110),
    (Outcome.STOPPED, 20, "cancelled", 110), (Outcome.STOPPED, 21, "cancelled", 100),
    (Outcome.TIME_LIMIT, 900, "time_limit", 100), (Outcome.NODE_LOST, 4, "cancelled", 0),
]  # fmt: skip
"""Outcome, seconds from the request to the end, the job's reason, and the seconds paid: the 100 until the request, and
after it at most the 10 of the grace period. Nothing after the request is paid if the run ended more than 10 s after the
grace period. A lost node makes all of it free."""


def test_a_cancelled_run_is_paid_to_the_end_of_its_grace_or_to_the_request(customer):
    """The grace period is paid if the cluster acted on the request, and free if the cluster was away or slow."""
    for outcome, took, reason, paid in ENDS_AFTER_A_CANCEL:
        began = int(time.time()) - 1000
        attempt = customer.started(at=began, retries=3)
        job = orders.cancel_job(membership=customer.membership, job=attempt.job)
        assert job.state == JobState.STOPPING
        requested = began + 100
        Job.objects.filter(pk=attempt.job_id).update(cancel_requested_at=usage.to_datetime(requested))
        job = end(customer, attempt, at=requested + took, outcome=outcome)
        assert (job.state, job.reason) == (END_STATE[EndReason(reason)], reason), outcome
        node_seconds = sum(float(line["quantity"]) for line in lines(job, "time_used")) * 3600
        assert node_seconds == pytest.approx(2 * paid, abs=0.01), took
        unpaid = sum(float(line["quantity"]) for line in lines(job, "after_cancel"))
        assert unpaid == pytest.approx(100 + took - paid if paid else 0)
        assert customer.wallet.held_minor == 0


def test_a_fixed_price_is_not_due_where_the_run_completed_long_after_its_cancel(customer):
    began = int(time.time()) - 1000
    attempt = customer.started(at=began, product="fixed", max_seconds=None)
    orders.cancel_job(membership=customer.membership, job=attempt.job)
    Job.objects.filter(pk=attempt.job_id).update(cancel_requested_at=usage.to_datetime(began + 100))
    job = end(customer, attempt, at=began + 400, outcome=Outcome.COMPLETED)
    assert not lines(job, "fixed_price")
    assert lines(job, "after_cancel")


def test_the_next_attempt_gets_what_is_left_of_the_ceiling_and_all_stay_under_it(customer):
    began = time.time() - 9000
    first = attempt = customer.started(at=began, retries=5, max_seconds=3600)
    ceiling = attempt.job.order.quote.ceiling_minor
    job = end(customer, attempt, at=began + 1000)
    first.refresh_from_db()
    attempt = next_attempt(customer, job, at=began + 1100)
    assert customer.backend.runs[attempt.run_name].spec.deadline_seconds == 2600
    # The ceiling has 2600 s on two nodes left, or twice that on one. But all attempts together take at most `longest`,
    # or the deadline if that is longer: here 3600 s, of which 1000 are used.
    for nodes, longest, left in ((1, 2600, 2600), (1, 10**6, 2 * 2600), (2, 10**6, 2600)):
        assert usage.left_seconds(job, [first], nodes=nodes, longest_seconds=longest) == left
    job = end(customer, attempt, at=began + 1100 + 2500)
    attempt = next_attempt(customer, job, at=began + 4000)
    assert customer.backend.runs[attempt.run_name].spec.deadline_seconds == 100
    customer.backend.end(attempt.run_name, Outcome.COMPLETED, at=began + 5000)  # the cluster ends it at its deadline
    reconciliation.reconcile()
    job.refresh_from_db()
    assert (job.state, job.reason) == (JobState.FAILED, EndReason.TIME_LIMIT)
    assert receipt(job).total_minor == ceiling
    attempt = customer.started(at=began, retries=5, max_seconds=3600)
    job = end(customer, attempt, at=began + 3600 - lifecycle.MIN_RETRY_SECONDS + 1)
    assert (job.state, job.reason) == (JobState.FAILED, EndReason.CODE_FAILED), "too little time is left"


PLATFORM_AND_CODE = ("no_capacity", "node_lost", "code_failed", "no_capacity", "platform_error", "code_failed")


def test_platform_faults_and_failed_placements_use_up_neither_the_retries_nor_each_other(customer):
    began = time.time() - 5000
    job = customer.job(retries=1, retry_backoff_seconds=0)
    for number, outcome in enumerate(map(Outcome, PLATFORM_AND_CODE)):
        assert job.state == JobState.QUEUED, f"after {number} attempts"
        assert not Receipt.objects.exists()
        attempt = next_attempt(customer, job, at=None if outcome is Outcome.NO_CAPACITY else began + 200 * number)
        job = end(customer, attempt, at=began + 200 * number + 100, outcome=outcome)
    assert job.state == JobState.FAILED
    assert receipt(job).total_minor == 10  # the two attempts that the code failed, 100 s each
    faults = [line["evidence"]["reason"] for line in lines(job, "platform_fault")]
    assert faults == [each for each in PLATFORM_AND_CODE if each != "code_failed"]


def hang(customer, attempt, *, at, progress_at):
    customer.backend.hang(attempt.run_name, at=at, progress_at=progress_at)
    reconciliation.reconcile_job(job_pk=attempt.job_id)
    return Job.objects.get(pk=attempt.job_id)


def test_a_hang_is_paid_up_to_the_last_progress(customer):
    for ended, progress, total_minor, free_seconds in (  # the first two in seconds after the start
        (1000, 400, 20, ["600.0"]),
        (200, -50, 0, ["200.0"]),  # no progress: free
        (200, 900, 10, []),  # progress reported after the end counts up to the end
    ):
        began = time.time() - 3000
        job = hang(customer, customer.started(at=began), at=began + ended, progress_at=began + progress)
        assert (job.state, job.reason) == (JobState.FAILED, EndReason.HUNG)
        assert receipt(job).total_minor == total_minor
        assert [line["quantity"] for line in lines(job, "hang")] == free_seconds
        assert all((line["amount_minor"], line["nodes"]) == (0, 2) for line in lines(job, "hang"))
        assert [stack["rank"] for stack in selectors.stacks(job)] == [0, 1]
        assert "all_reduce" in selectors.stacks(job)[1]["text"]


def test_the_hang_policy_of_the_order_applies(customer):
    began = time.time() - 3000
    for policy, hang_seconds in (("ignore", 0), ("retry", run_specs.HANG_SECONDS)):
        attempt = customer.started(at=began, retries=1, on_hang=policy)
        assert customer.backend.runs[attempt.run_name].spec.hang_seconds == hang_seconds
    assert hang(customer, attempt, at=began + 1000, progress_at=began + 400).state == JobState.QUEUED


def test_an_elastic_run_starts_on_free_nodes_and_pays_for_these(customer, backend):
    customer.quota(max_running_nodes=100)
    customer.started(node_spec="small", nodes=6)  # of the fake cluster's 8 cores
    job = customer.job(node_spec="small", nodes=4, min_nodes=2)
    dispatch.dispatch_queue()
    attempt = job.attempts.get()
    assert attempt.granted_nodes == 2
    spec = backend.runs[attempt.run_name].spec
    assert (spec.nodes, spec.min_nodes) == (2, 2)
    began = time.time() - 1000
    backend.start(attempt.run_name, at=began)
    backend.end(attempt.run_name, Outcome.COMPLETED, at=began + 900)
    reconciliation.reconcile()
    terms = job.order.quote.terms
    assert receipt(job).total_minor == int(float(terms["hourly"]) * 2 * 900 / 3600 + 0.5)  # rounded half up


def test_a_run_that_loses_a_node_pays_for_the_nodes_that_ran(customer):
    customer.quota(max_running_nodes=100)
    began = time.time() - 5000
    attempt = customer.started(at=began, nodes=4, min_nodes=2)
    customer.backend.shrink(attempt.run_name, 3, at=began + 1000)
    customer.backend.shrink(attempt.run_name, 2, at=began + 2000)
    reconciliation.reconcile()
    job = customer.end(attempt, Outcome.COMPLETED, at=began + 3000)
    attempt.refresh_from_db()
    assert [span["nodes"] for span in attempt.spans] == [4, 3, 2]
    assert attempt.restarts == 2
    used = lines(job, "time_used")
    assert [line["nodes"] for line in used] == [4, 3, 2]
    hourly = float(job.order.quote.terms["hourly"])
    assert receipt(job).total_minor == int(9 * 1000 * hourly / 3600 + 0.5)  # 4 + 3 + 2 nodes, rounded half up
    # 9000 node-seconds, as time of all four nodes:
    assert usage.billable_seconds(job, [attempt], timezone.now()) == pytest.approx(9000 / 4)


def test_work_after_the_last_checkpoint_is_lost():
    began = datetime(2026, 1, 1, tzinfo=UTC)
    ended = began + timedelta(seconds=100)
    attempt = Attempt(started_at=began, finished_at=ended, reason="code_failed", granted_nodes=1)
    assert usage.lost_seconds(attempt) == 100
    for checkpoint, lost in ((70, 30), (-500, 100), (150, 0)):
        attempt.checkpoint_at = began + timedelta(seconds=checkpoint)
        assert usage.lost_seconds(attempt) == lost
    attempt.reason = "completed"
    assert usage.lost_seconds(attempt) is None
    assert usage.lost_seconds(Attempt(reason="node_lost", finished_at=ended)) is None, "it never ran"

"""Retries, hangs and fewer nodes: who pays for what, and what is left for the next attempt."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from billing.models import Receipt
from jobs import dispatch, lifecycle, orders, selectors, usage
from jobs.models import Attempt, Job
from jobs.states import EndReason, JobState
from runtime.errors import InvalidSpec
from runtime.specs import Outcome


@pytest.fixture(autouse=True)
def _times_are_told(backend):
    """The cluster's clock stands still: a run ends when a test says so, or at its deadline if that is sooner."""
    backend.clock = lambda: 0.0


def receipt(job):
    return Receipt.objects.get(hold__order__job=job)


def lines(job, rule):
    return [line for line in receipt(job).lines if line["rule"] == rule]


def again(customer, job, *, at):
    """The next attempt, running since `at`."""
    Job.objects.filter(pk=job.pk).update(not_before=None)
    job.refresh_from_db()
    assert dispatch.start(job)
    attempt = job.attempts.last()
    customer.backend.start(attempt.run_name, at=at)
    dispatch.reconcile_job(job_pk=job.pk)
    return attempt


def fail(customer, attempt, *, at, outcome=Outcome.CODE_FAILED):
    job = customer.end(attempt, outcome, at=at)
    job.refresh_from_db()
    return job


@pytest.mark.parametrize("outcome", [Outcome.CODE_FAILED, Outcome.OUT_OF_MEMORY])
def test_a_fault_of_the_code_is_tried_again_as_bought_and_every_attempt_is_paid(customer, outcome):
    began = time.time() - 3000
    attempt = customer.started(at=began, retries=2, retry_backoff_seconds=60)
    job = fail(customer, attempt, at=began + 100, outcome=outcome)
    assert (job.state, job.waiting_code) == (JobState.QUEUED, "backoff")
    assert job.order.hold.metered_minor == 5  # 2 nodes for 100 s
    assert job.not_before - timezone.now() == pytest.approx(timedelta(seconds=60), abs=timedelta(seconds=5))
    attempt = again(customer, job, at=began + 200)
    assert customer.backend.runs[attempt.run_name].spec.restart_count == 1
    job = fail(customer, attempt, at=began + 400, outcome=outcome)
    assert job.not_before - timezone.now() == pytest.approx(timedelta(seconds=120), abs=timedelta(seconds=5))
    attempt = again(customer, job, at=began + 500)
    job = fail(customer, attempt, at=began + 800, outcome=outcome)
    assert (job.state, job.reason) == (JobState.FAILED, lifecycle.REASON_OF[outcome])
    assert [line["quantity"] for line in lines(job, "time_used")] == ["0.055556", "0.111111", "0.166667"]
    assert receipt(job).total_minor == 30  # 600 s on two nodes at 90 cents an hour
    assert customer.wallet.held_minor == 0


def test_without_retries_a_fault_of_the_code_ends_the_job(customer):
    job = fail(customer, customer.started(), at=time.time())
    assert job.state == JobState.FAILED
    assert job.attempts.count() == 1


def test_a_job_in_back_off_is_not_started_before_its_time_and_says_so(customer):
    began = time.time() - 100
    attempt = customer.started(at=began, retries=1, retry_backoff_seconds=600)
    job = fail(customer, attempt, at=began + 10)
    dispatch.reconcile()
    job.refresh_from_db()
    assert job.state == JobState.QUEUED
    told = selectors.waiting_for(selectors.job_for(customer.organization, job.pk))
    assert "It waits until" in told
    Job.objects.filter(pk=job.pk).update(not_before=timezone.now() - timedelta(seconds=1))
    dispatch.reconcile()
    job.refresh_from_db()
    assert (job.state, job.not_before) == (JobState.STARTING, None)


def test_a_cluster_that_is_away_does_not_hide_why_a_retry_waits(customer, backend):
    began = time.time() - 100
    job = fail(customer, customer.started(at=began, retries=1, retry_backoff_seconds=600), at=began + 10)
    other = customer.job()
    backend.available = False
    dispatch.dispatch_queue()
    job.refresh_from_db()
    told = [selectors.waiting_for(selectors.job_for(customer.organization, each.pk)) for each in (job, other)]
    assert "It waits until" in told[0]
    assert "does not answer" in told[1]


def test_a_job_cancelled_in_back_off_pays_for_what_it_used(customer):
    began = time.time() - 1000
    job = fail(customer, customer.started(at=began, retries=1), at=began + 200)
    job = orders.cancel_job(membership=customer.membership, job=job)
    assert job.state == JobState.CANCELLED
    assert receipt(job).total_minor == 10


def test_a_cancel_while_it_runs_is_not_tried_again(customer):
    attempt = customer.started(at=time.time() - 100, retries=3)
    orders.cancel_job(membership=customer.membership, job=attempt.job)
    assert fail(customer, attempt, at=time.time()).state == JobState.FAILED


def test_the_next_attempt_gets_what_is_left_of_the_ceiling_and_all_stay_under_it(customer):
    began = time.time() - 9000
    attempt = customer.started(at=began, retries=5, max_seconds=3600)
    ceiling = attempt.job.order.quote.ceiling_minor
    job = fail(customer, attempt, at=began + 1000)
    attempt = again(customer, job, at=began + 1100)
    assert customer.backend.runs[attempt.run_name].spec.deadline_seconds == 2600
    job = fail(customer, attempt, at=began + 1100 + 2500)
    attempt = again(customer, job, at=began + 4000)
    assert customer.backend.runs[attempt.run_name].spec.deadline_seconds == 100
    customer.backend.end(attempt.run_name, Outcome.COMPLETED, at=began + 5000)  # the cluster ends it at its deadline
    dispatch.reconcile()
    job.refresh_from_db()
    assert (job.state, job.reason) == (JobState.FAILED, EndReason.TIME_LIMIT)
    assert receipt(job).total_minor == ceiling


def test_with_too_little_left_it_is_not_tried_again(customer):
    began = time.time() - 9000
    attempt = customer.started(at=began, retries=5, max_seconds=3600)
    job = fail(customer, attempt, at=began + 3600 - lifecycle.LEAST_RETRY_SECONDS + 1)
    assert (job.state, job.reason) == (JobState.FAILED, EndReason.CODE_FAILED)


def test_faults_of_the_platform_do_not_use_up_the_retries(customer):
    began = time.time() - 5000
    attempt = customer.started(at=began, retries=1, retry_backoff_seconds=0)
    job = fail(customer, attempt, at=began + 100, outcome=Outcome.NODE_LOST)
    attempt = again(customer, job, at=began + 200)
    job = fail(customer, attempt, at=began + 300)
    assert (job.state, job.waiting_code) == (JobState.QUEUED, "retry")
    attempt = again(customer, job, at=began + 400)
    job = fail(customer, attempt, at=began + 500, outcome=Outcome.PLATFORM_ERROR)
    attempt = again(customer, job, at=began + 600)
    job = fail(customer, attempt, at=began + 700)
    assert job.state == JobState.FAILED
    assert receipt(job).total_minor == 10  # the two attempts that the code failed, 100 s each
    assert [line["evidence"]["reason"] for line in lines(job, "platform_fault")] == ["node_lost", "platform_error"]


def test_what_can_not_be_run_at_all_is_not_tried_again(customer, backend):
    job = customer.job(retries=3)
    backend.refuses[f"job-{job.pk}-1"] = InvalidSpec("There is no file.", field="script")
    dispatch.dispatch_queue()
    job.refresh_from_db()
    assert (job.state, job.reason) == (JobState.FAILED, EndReason.CODE_FAILED)


# --- Hangs ------------------------------------------------------------------------------------------------------------


def hang(customer, attempt, *, at, progress_at):
    customer.backend.hang(attempt.run_name, at=at, progress_at=progress_at)
    dispatch.reconcile_job(job_pk=attempt.job_id)
    return Job.objects.get(pk=attempt.job_id)


def test_a_hang_is_paid_to_the_last_sign_of_progress(customer):
    began = time.time() - 3000
    attempt = customer.started(at=began)
    job = hang(customer, attempt, at=began + 1000, progress_at=began + 400)
    assert (job.state, job.reason) == (JobState.FAILED, EndReason.HUNG)
    assert receipt(job).total_minor == 20
    (free,) = lines(job, "hang")
    assert (free["quantity"], free["amount_minor"], free["nodes"]) == ("600.0", 0, 2)
    assert [stack["rank"] for stack in selectors.stacks(job)] == [0, 1]
    assert "all_reduce" in selectors.stacks(job)[1]["text"]


def test_a_hang_without_any_progress_is_free(customer):
    began = time.time() - 3000
    job = hang(customer, customer.started(at=began), at=began + 200, progress_at=began - 50)
    assert receipt(job).total_minor == 0
    assert lines(job, "hang")[0]["quantity"] == "200.0"


def test_progress_told_after_the_end_is_not_paid_twice(customer):
    began = time.time() - 3000
    job = hang(customer, customer.started(at=began), at=began + 200, progress_at=began + 900)
    assert receipt(job).total_minor == 10
    assert lines(job, "hang") == []


@pytest.mark.parametrize(("policy", "state"), [("stop", JobState.FAILED), ("retry", JobState.QUEUED)])
def test_the_order_says_what_becomes_of_a_hang(customer, policy, state):
    began = time.time() - 3000
    attempt = customer.started(at=began, retries=1, on_hang=policy)
    assert customer.backend.runs[attempt.run_name].spec.hang_seconds == dispatch.HANG_SECONDS
    assert hang(customer, attempt, at=began + 1000, progress_at=began + 400).state == state


def test_an_order_can_have_hangs_not_watched(customer):
    attempt = customer.started(on_hang="ignore")
    assert customer.backend.runs[attempt.run_name].spec.hang_seconds == 0


# --- Fewer nodes ------------------------------------------------------------------------------------------------------


def test_an_elastic_run_starts_with_what_is_free_and_pays_for_that(customer, backend):
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
    dispatch.reconcile()
    terms = job.order.quote.terms
    assert receipt(job).total_minor == int(float(terms["hourly"]) * 2 * 900 / 3600 + 0.5)


def test_a_rigid_run_waits_where_an_elastic_one_starts(customer):
    customer.quota(max_running_nodes=100)
    customer.started(node_spec="small", nodes=6)
    rigid, elastic = customer.job(node_spec="small", nodes=4), customer.job(node_spec="small", nodes=4, min_nodes=1)
    dispatch.dispatch_queue()
    assert [Job.objects.get(pk=job.pk).state for job in (rigid, elastic)] == [JobState.QUEUED, JobState.STARTING]


def test_a_quota_counts_the_nodes_that_were_granted(customer):
    customer.quota(max_running_nodes=4)
    customer.started(nodes=3)
    elastic = customer.job(nodes=4, min_nodes=1)
    assert dispatch.start(elastic)
    assert elastic.attempts.get().granted_nodes == 1
    more = customer.job(nodes=1)
    assert not dispatch.start(more)


def test_a_run_that_loses_a_node_pays_for_the_nodes_that_ran(customer):
    customer.quota(max_running_nodes=100)
    began = time.time() - 5000
    attempt = customer.started(at=began, nodes=4, min_nodes=2)
    customer.backend.shrink(attempt.run_name, 3, at=began + 1000)
    customer.backend.shrink(attempt.run_name, 2, at=began + 2000)
    dispatch.reconcile()
    job = customer.end(attempt, Outcome.COMPLETED, at=began + 3000)
    attempt.refresh_from_db()
    assert [span["nodes"] for span in attempt.spans] == [4, 3, 2]
    assert attempt.restarts == 2
    used = lines(job, "time_used")
    assert [line["nodes"] for line in used] == [4, 3, 2]
    hourly = float(job.order.quote.terms["hourly"])
    assert receipt(job).total_minor == int(9 * 1000 * hourly / 3600 + 0.5)  # half up
    assert usage.billable_seconds(job, [attempt], timezone.now()) == pytest.approx(9000 / 4)


def test_fewer_nodes_may_take_longer_but_never_longer_than_the_customer_said(customer):
    job = customer.job(nodes=4, min_nodes=1, max_seconds=3600)
    assert usage.left_seconds(job, [], nodes=1, longest_seconds=3600) == 3600
    assert usage.left_seconds(job, [], nodes=1, longest_seconds=10**6) == 4 * 3600
    assert usage.left_seconds(job, [], nodes=4, longest_seconds=10**6) == 3600


# --- What is lost -----------------------------------------------------------------------------------------------------


def attempt_with(*, reason="code_failed", checkpoint=None):
    began = datetime(2026, 1, 1, tzinfo=UTC)
    return Attempt(
        started_at=began,
        finished_at=began + timedelta(seconds=100),
        reason=reason,
        checkpoint_at=None if checkpoint is None else began + timedelta(seconds=checkpoint),
        granted_nodes=1,
    )


@pytest.mark.parametrize(("checkpoint", "lost"), [(None, 100), (70, 30), (-500, 100), (150, 0)])
def test_lost_work_is_what_came_after_the_checkpoint(checkpoint, lost):
    assert usage.lost_seconds(attempt_with(checkpoint=checkpoint)) == lost


def test_nothing_is_lost_of_what_completed_or_never_ran():
    assert usage.lost_seconds(attempt_with(reason="completed")) is None
    assert usage.lost_seconds(Attempt(reason="node_lost", finished_at=timezone.now())) is None

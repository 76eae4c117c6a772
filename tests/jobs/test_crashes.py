"""The process dies at any step of a start or an end: the run is adopted, not doubled, and charged once."""

import time
from itertools import count

import pytest

from billing.models import Receipt, Transaction
from jobs import dispatch, reconciliation
from jobs.models import Attempt, Job
from jobs.states import JobState
from runtime.specs import Outcome
from tests.crashes import crash_at

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("sent_tasks")]


def reconcile_twice():
    for _ in range(2):
        reconciliation.reconcile()


def finish(customer, name, *, began):
    """Let the run start at `began` and complete after 400 s, and let its job follow."""
    customer.backend.start(name, at=began)
    reconciliation.reconcile()
    customer.backend.end(name, Outcome.COMPLETED, at=began + 400)
    reconcile_twice()


def ended(customer, outcome, **form):
    """A job's first attempt, whose run has ended after 400 s; the job does not know it yet."""
    began = time.time() - 1000
    attempt = customer.started(at=began, **form)
    customer.backend.end(attempt.run_name, outcome, at=began + 400)
    return attempt


def assert_charged_once(customer, job, *, minor=20):  # 400 s on two nodes at 90 cents per node-hour
    job.refresh_from_db()
    assert job.state == JobState.SUCCEEDED
    assert Attempt.objects.filter(job=job, reason="completed").count() == 1
    assert Receipt.objects.get(hold__order__job=job).total_minor == minor
    assert Transaction.objects.filter(reference__contains=str(job.order.quote_id), kind="charge").count() == 1
    kinds = list(job.events.values_list("kind", flat=True))
    assert kinds.count("settled") == kinds.count("succeeded") == 1
    assert customer.wallet.held_minor == 0


def test_a_process_may_be_killed_at_any_step_of_a_start(customer):
    for step in count(1):
        job = customer.job()
        if not crash_at(step, dispatch.dispatch_queue):
            break
        reconcile_twice()
        assert [run for run in customer.backend.names() if run.startswith(f"job-{job.pk}-")] == [f"job-{job.pk}-1"]
        finish(customer, f"job-{job.pk}-1", began=time.time() - 500)
        assert_charged_once(customer, job)
    assert step > 15, "too few steps were interrupted"


def test_a_process_may_be_killed_at_any_step_of_an_end(customer):
    for step in count(1):
        attempt = ended(customer, Outcome.COMPLETED)
        died = crash_at(step, lambda name=attempt.run_name: reconciliation.follow(run_name=name))
        receipts = Receipt.objects.filter(hold__order__job=attempt.job)
        assert (Job.objects.get(pk=attempt.job_id).state == JobState.SUCCEEDED) == receipts.exists()
        assert (customer.wallet.held_minor == 0) == receipts.exists()
        reconcile_twice()
        assert_charged_once(customer, attempt.job)
        if not died:
            break
    assert step > 15, "too few steps were interrupted"


def test_a_process_may_be_killed_at_any_step_of_a_retry(customer):
    for step in count(1):
        attempt = ended(customer, Outcome.CODE_FAILED, retries=1, retry_backoff_seconds=0)
        died = crash_at(step, lambda name=attempt.run_name: reconciliation.follow(run_name=name))
        reconcile_twice()
        assert attempt.job.attempts.count() == 2
        finish(customer, f"job-{attempt.job_id}-2", began=time.time() - 500)
        assert_charged_once(customer, attempt.job, minor=40)  # both attempts took 400 s
        if not died:
            break
    assert step > 8, "too few steps were interrupted"

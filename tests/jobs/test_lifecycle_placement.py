"""Starting on a cluster that others share: what a run waits for, and runs that were placed in part."""

from datetime import timedelta

from django.utils import timezone

from billing.models import Receipt
from jobs import dispatch, lifecycle, selectors
from jobs.models import Job
from jobs.states import EndReason, JobState
from runtime.specs import Outcome
from tests.jobs.receipts import lines


def told(customer, job):
    return selectors.waiting_for(selectors.job_for(customer.organization, job.pk))


def test_what_a_run_that_starts_waits_for_is_shown_until_it_runs(customer):
    job = customer.job()
    dispatch.start(job)
    name = f"job-{job.pk}-1"
    assert "A place was found" in told(customer, job)
    customer.backend.wait(name, "image_name", image="r.example/x:1")
    dispatch.reconcile()
    assert "There is no image r.example/x:1." in told(customer, job)
    customer.backend.wait(name, "gpus", wanted=1, gpu_type="H200", nodes=2, free=1)
    dispatch.reconcile()
    assert "1 × H200 on each of 2 nodes; 1 are free now." in told(customer, job)
    customer.backend.start(name)
    dispatch.reconcile()
    job.refresh_from_db()
    assert (job.state, job.waiting_code, job.waiting_data, told(customer, job)) == (JobState.RUNNING, "", {}, "")


def test_a_run_that_was_placed_in_part_is_queued_again_free_with_a_growing_pause(customer):
    job = customer.job()
    for number in range(1, lifecycle.MOST_PLACEMENTS + 1):
        Job.objects.filter(pk=job.pk).update(not_before=None)
        dispatch.dispatch_queue()
        name = f"job-{job.pk}-{number}"
        customer.backend.end(name, Outcome.NO_CAPACITY)
        dispatch.reconcile_job(job_pk=job.pk)
        job.refresh_from_db()
        if number == 1:
            assert (job.state, job.waiting_code) == (JobState.QUEUED, "backoff")
            assert "could not place all nodes at once, which costs nothing" in told(customer, job)
        if number < lifecycle.MOST_PLACEMENTS:
            pause = job.not_before - timezone.now()
            wanted = min(lifecycle.PLACEMENT_BACKOFF * 2 ** (number - 1), lifecycle.LONGEST_PLACEMENT_BACKOFF)
            assert timedelta(0) <= wanted - pause < timedelta(seconds=20)
            assert not Receipt.objects.exists()
    assert (job.state, job.reason) == (JobState.FAILED, EndReason.NO_CAPACITY)
    assert Receipt.objects.get().total_minor == 0
    assert customer.wallet.available_minor == 100_000
    assert lines(job)["platform_fault"]["evidence"]["code"] == "nodes_not_placed"


def test_placements_are_no_faults_of_the_platform_and_leave_its_retries(customer):
    job = customer.job()
    for outcome in (Outcome.NO_CAPACITY, Outcome.NODE_LOST, Outcome.NO_CAPACITY, Outcome.NODE_LOST):
        Job.objects.filter(pk=job.pk).update(not_before=None)
        dispatch.dispatch_queue()
        name = job.attempts.last().run_name
        if outcome is Outcome.NODE_LOST:
            customer.backend.start(name)
        customer.backend.end(name, outcome)
        dispatch.reconcile_job(job_pk=job.pk)
        assert Job.objects.get(pk=job.pk).state in {JobState.QUEUED, JobState.STARTING}
    assert not Receipt.objects.exists()

"""Which job starts next, and which waits: passes of the dispatcher over the queue."""

from datetime import timedelta

from billing.models import NodeSpec, Receipt
from jobs import dispatch, orders, queue
from jobs.models import Job
from jobs.states import JobState
from runtime.specs import Outcome
from tests.factories.jobs import never_fits
from tests.jobs.queueing import age, filled, states, waiting


def test_the_oldest_starts_first_and_all_that_fit_start(customer, backend):
    customer.quota(max_running_nodes=100)
    jobs = [customer.job(node_spec="small", nodes=3) for _ in range(3)]
    age(jobs[1], timedelta(minutes=2))
    age(jobs[2], timedelta(minutes=1))
    dispatch.dispatch_queue()
    assert states(*jobs) == ["queued", "starting", "starting"]
    assert backend.submissions == [f"job-{jobs[1].pk}-1", f"job-{jobs[2].pk}-1"]
    text = waiting(customer, jobs[0])
    assert text.startswith("Waiting for 3 free nodes of Small; 2 are free now.")
    assert "A run on 2 of them would start now." in text
    assert "0 jobs are before it." in text


def test_a_smaller_job_overtakes_until_patience_is_over(customer):
    attempt = filled(customer, nodes=6)
    large = customer.job(node_spec="small", nodes=4)
    small = customer.job(node_spec="nano", nodes=1)
    dispatch.dispatch_queue()
    assert states(large, small) == ["queued", "starting"]

    age(large, queue.PATIENCE + timedelta(seconds=1))
    late = customer.job(node_spec="nano", nodes=1)
    dispatch.dispatch_queue()
    assert states(large, late) == ["queued", "queued"]
    assert "kept free for a larger run" in waiting(customer, late)
    assert "1 job is before it." in waiting(customer, late)

    customer.end(attempt, Outcome.COMPLETED)
    dispatch.dispatch_queue()
    assert states(large, late) == ["starting", "starting"]


def test_a_quota_makes_an_organization_wait_and_nobody_else(customer, other):
    customer.quota(max_running_nodes=2)
    first, second = customer.job(), customer.job(nodes=1)
    theirs = other.job()
    dispatch.dispatch_queue()
    assert states(first, second, theirs) == ["starting", "queued", "starting"]
    assert "runs 2 nodes of the 2 it may; this run needs 1 more" in waiting(customer, second)
    age(second, timedelta(days=1))
    assert other.job().pk
    dispatch.dispatch_queue()
    assert not Job.objects.filter(organization=other.organization, state=JobState.QUEUED).exists()


def test_the_quota_is_looked_at_again_when_a_job_is_claimed(customer, backend):
    customer.quota(max_running_nodes=2)
    first, second = customer.job(), customer.job()
    assert dispatch.start(first)
    assert dispatch.start(second) is False
    assert states(first, second) == ["starting", "queued"]
    assert list(backend.runs) == [f"job-{first.pk}-1"]


def test_a_pass_over_the_queue_asks_no_more_for_more_jobs(customer, django_assert_max_num_queries):
    customer.quota(max_running_nodes=2)
    customer.job()
    dispatch.dispatch_queue()
    for _ in range(12):
        customer.job()
    dispatch.dispatch_queue()
    with django_assert_max_num_queries(6):
        dispatch.dispatch_queue()


def test_nothing_waiting_asks_nobody(customer, backend, django_assert_num_queries):
    backend.available = False
    with django_assert_num_queries(1):
        dispatch.dispatch_queue()


def test_a_cluster_that_became_too_small_keeps_no_room_and_the_job_waits(customer):
    large = customer.job(node_spec="medium", nodes=1)
    never_fits(customer)
    small = customer.job()
    age(large, timedelta(days=1))
    dispatch.dispatch_queue()
    assert states(large, small) == ["queued", "starting"]
    told = waiting(customer, large)
    assert "no machine any more that can hold a node of Medium" in told
    assert "cancel it, which costs nothing" in told
    dispatch.reconcile()
    assert states(large) == ["queued"]  # what was bought is never given up for the customer
    orders.cancel_job(membership=customer.membership, job=Job.objects.get(pk=large.pk))
    assert Receipt.objects.get().total_minor == 0
    assert customer.wallet.held_minor == small.order.hold.amount_minor


def test_a_cluster_that_grows_again_runs_it(customer):
    job = customer.job(node_spec="medium", nodes=1)
    never_fits(customer)
    dispatch.dispatch_queue()
    NodeSpec.objects.filter(name="medium").update(cpus=2)
    dispatch.dispatch_queue()
    assert states(job) == ["starting"]

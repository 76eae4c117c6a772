"""Which job starts next, and why the others wait, on the fake cluster of 8 cores."""

import random
from datetime import timedelta

import pytest
from django.utils import timezone

from billing.models import NodeSpec, Receipt
from jobs import dispatch, orders, reconciliation, scheduler
from jobs.availability import Forecast
from jobs.clusters import resources_of
from jobs.models import Attempt, CapacitySnapshot, Job
from jobs.states import JobState
from runtime.specs import Outcome, Resources
from tests.factories.jobs import make_medium_too_large
from tests.jobs.queueing import age, filled, states, waiting

pytestmark = pytest.mark.django_db


def starts_expected(jobs, quotas, capacity, now):
    """Return (id, granted nodes) of the jobs that start, by the documented rules of the queue, job by job."""
    # `reserved`: a job that does not fit has waited so long that no later job may start.
    started, reserved, running = [], False, dict.fromkeys(quotas, 0)
    for job in jobs:
        resources = resources_of(job.node_spec)
        room = quotas[job.organization_id] - running[job.organization_id]
        if room < job.least_nodes or capacity.nodes_ever(resources) < job.least_nodes:
            continue
        free = capacity.nodes_now(resources)
        if free < job.least_nodes:
            reserved = reserved or now - job.queued_at > scheduler.BACKFILL_LIMIT
        elif not reserved:
            granted = min(job.nodes, room, free)
            started.append((job.pk, granted))
            running[job.organization_id] += granted
            capacity = scheduler.capacity_without(capacity, resources, granted)
    return started


@pytest.mark.parametrize("seed", range(2))
def test_a_pass_starts_what_the_rules_say(customer, other, backend, seed):
    chance = random.Random(seed)
    for each in (customer, other):
        each.quota(max_running_nodes=100, max_open_jobs=1000)
    for _ in range(24):
        nodes = chance.choice([1, 1, 2, 3, 6])
        least = chance.choice([0, 0, 1]) if nodes > 1 else 0
        buyer = chance.choice([customer, other])
        job = buyer.job(node_spec=chance.choice(["nano", "small", "medium"]), nodes=min(nodes, 4), min_nodes=least)
        age(job, timedelta(minutes=chance.choice([0.1, 1, 5, 11, 20]) + chance.random()))
    for each in (customer, other):
        each.quota(max_running_nodes=chance.choice([2, 5, 50]))
    backend.total = Resources(chance.choice([1.5, 4.0, 8.0, 20.0]), 65536)
    waits = Job.objects.filter(state=JobState.QUEUED).select_related("node_spec").order_by("queued_at", "pk")
    quotas = {each.organization.pk: each.organization.quota.max_running_nodes for each in (customer, other)}
    expected = starts_expected(list(waits), quotas, backend.capacity(), timezone.now())
    dispatch.dispatch_queue()
    assert list(Attempt.objects.order_by("pk").values_list("job_id", "granted_nodes")) == expected
    assert expected or backend.total.cpus < 4, "nothing to compare"


def test_a_smaller_job_overtakes_a_larger_one_until_the_backfill_limit(customer):
    attempt = filled(customer, nodes=6)  # which leaves 2 of the 8 cores
    large = customer.job(node_spec="small", nodes=4)
    small = customer.job(node_spec="nano", nodes=1)
    dispatch.dispatch_queue()
    assert states(large, small) == ["queued", "starting"]

    age(large, scheduler.BACKFILL_LIMIT + timedelta(seconds=1))
    late = customer.job(node_spec="nano", nodes=1)
    dispatch.dispatch_queue()
    assert states(large, late) == ["queued", "queued"]
    assert "reserving capacity for a larger run" in waiting(customer, late)
    assert "1 job is ahead of yours." in waiting(customer, late)

    customer.end(attempt, Outcome.COMPLETED)
    dispatch.dispatch_queue()
    assert states(large, late) == ["starting", "starting"]


def test_capacity_that_was_kept_for_a_job_is_free_in_forecasts_once_the_job_does_not_wait(customer):
    filled(customer, nodes=6)  # which leaves 2 of the 8 cores
    large = customer.job(node_spec="small", nodes=4)
    age(large, scheduler.BACKFILL_LIMIT + timedelta(seconds=1))
    late = customer.job(node_spec="nano", nodes=1)
    dispatch.dispatch_queue()
    nano = NodeSpec.objects.get(name="nano")
    assert Forecast(customer.organization).start(nano, 1).code == "waits"
    orders.cancel_jobs(membership=customer.membership, jobs=[late, large])
    customer.job(node_spec="nano", nodes=5)  # 4 fit
    dispatch.dispatch_queue()
    assert Forecast(customer.organization).start(nano, 1).code == "now"


def test_a_pass_takes_no_more_queries_for_more_waiting_jobs(customer, other, django_assert_max_num_queries):
    with django_assert_max_num_queries(6):
        dispatch.dispatch_queue()  # an empty queue
    customer.quota(max_running_nodes=1)
    other.quota(max_running_nodes=100)
    for _ in range(12):
        customer.job(node_spec="small", nodes=1)
    dispatch.dispatch_queue()
    other.started(node_spec="small", nodes=7)
    for _ in range(6):
        other.job(node_spec="small", nodes=2)
    dispatch.dispatch_queue()
    with django_assert_max_num_queries(11) as queries:
        dispatch.dispatch_queue()
    assert not [query for query in queries if 'SELECT "jobs_job"."id"' in query["sql"]], "no job was loaded"


def test_a_cluster_that_became_too_small_reserves_nothing_and_the_job_waits(customer):
    large = customer.job(node_spec="medium", nodes=1)
    make_medium_too_large()
    small = customer.job()
    age(large, timedelta(days=1))
    reconciliation.reconcile()
    assert states(large, small) == ["queued", "starting"]
    text = waiting(customer, large)
    assert "no longer has a machine that is large enough for a node of Medium" in text
    assert "cancel it at no further cost" in text
    orders.cancel_job(membership=customer.membership, job=Job.objects.get(pk=large.pk))
    assert Receipt.objects.get().total_minor == 0
    assert customer.wallet.held_minor == small.order.hold.amount_minor


def test_what_a_job_waits_for_follows_the_cluster_without_a_write_to_the_job(customer):
    customer.quota(max_running_nodes=100)
    attempt = customer.started(node_spec="small", nodes=7)
    job = customer.job(node_spec="small", nodes=4)
    elastic = customer.job(node_spec="small", nodes=4, min_nodes=2)
    dispatch.dispatch_queue()
    assert "1 is free now." in waiting(customer, job)
    assert "Waiting for 2 free nodes of Small; 1 is free now." in waiting(customer, elastic)
    before = Job.objects.values().get(pk=job.pk)
    customer.quota(max_running_nodes=9)
    assert "is using 7 of its 9 nodes, and this run needs 4 more" in waiting(customer, job)
    customer.quota(max_running_nodes=8)
    assert "is using 7 of its 8 nodes, and this run needs 2 more" in waiting(customer, elastic)
    customer.quota(max_running_nodes=3)  # so no end of another run lets it start
    assert "can run at most 3 nodes at once, and this run needs 4." in waiting(customer, job)
    assert Job.objects.values().get(pk=job.pk) == before
    customer.quota(max_running_nodes=100)
    CapacitySnapshot.objects.update(answers=False)
    assert "is not responding" in waiting(customer, job)
    customer.end(attempt, Outcome.COMPLETED)
    dispatch.dispatch_queue()
    assert states(job) == ["starting"]

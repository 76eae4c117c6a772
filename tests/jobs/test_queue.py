"""The order of the queue on the fake cluster of 8 cores, and why a job waits. More in test_dispatch."""

import random
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from billing.models import NodeSpec
from jobs import dispatch, queue, selectors
from jobs.backend import resources_of
from jobs.models import Attempt, Job, Room
from jobs.states import JobState
from runtime.specs import Outcome

pytestmark = pytest.mark.django_db


def waiting(customer, job):
    return selectors.waiting_for(selectors.job_for(customer.organization, job.pk))


def age(job, minutes):
    Job.objects.filter(pk=job.pk).update(queued_at=timezone.now() - timedelta(minutes=minutes))


def by_the_book(jobs, running, quotas, capacity, now):
    """The rules of the queue as they are told to customers, job by job over the whole queue."""
    started, reserved = [], False
    running = dict(running)
    for job in jobs:
        resources = resources_of(job.node_spec)
        room = quotas[job.organization_id] - running.get(job.organization_id, 0)
        if room < job.least_nodes or capacity.nodes_ever(resources) < job.least_nodes:
            continue
        free = capacity.nodes_now(resources)
        if free < job.least_nodes:
            reserved = reserved or now - job.queued_at > queue.PATIENCE
        elif not reserved:
            granted = min(job.nodes, room, free)
            started.append((job.pk, granted))
            running[job.organization_id] = running.get(job.organization_id, 0) + granted
            capacity = queue.without(capacity, resources, granted)
    return started


@pytest.mark.parametrize("seed", range(6))
def test_what_starts_is_what_the_rules_say_whatever_the_queue(customer, other, backend, seed):
    chance = random.Random(seed)
    for each in (customer, other):
        each.quota(max_running_nodes=100, max_open_jobs=1000)
    for _ in range(24):
        nodes = chance.choice([1, 1, 2, 3, 6])
        least = chance.choice([0, 0, 1]) if nodes > 1 else 0
        buyer = chance.choice([customer, other])
        job = buyer.job(node_spec=chance.choice(["nano", "small", "medium"]), nodes=min(nodes, 4), min_nodes=least)
        age(job, chance.choice([0.1, 1, 5, 11, 20]) + chance.random())
    for each in (customer, other):
        each.quota(max_running_nodes=chance.choice([2, 5, 50]))
    backend.total = backend.total.__class__(chance.choice([1.5, 4.0, 8.0, 20.0]), 65536)
    waits = list(
        Job.objects.filter(state=JobState.QUEUED)
        .select_related("node_spec", "organization__quota")
        .order_by("queued_at", "pk")
    )
    quotas = {each.organization.pk: each.organization.quota.max_running_nodes for each in (customer, other)}
    wanted = by_the_book(waits, {}, quotas, backend.capacity(), timezone.now())
    dispatch.dispatch_queue()
    assert list(Attempt.objects.order_by("pk").values_list("job_id", "granted_nodes")) == wanted
    assert wanted or backend.total.cpus < 4


def test_a_pass_loads_no_job_that_cannot_start(customer):
    customer.quota(max_running_nodes=100)
    customer.started(node_spec="small", nodes=8)
    for _ in range(6):
        customer.job(node_spec="small", nodes=1)
    dispatch.dispatch_queue()
    with CaptureQueriesContext(connection) as asked:
        dispatch.dispatch_queue()
    loads = [query["sql"] for query in asked if 'SELECT "jobs_job"."id"' in query["sql"]]
    assert not loads
    assert len(asked) <= 5


def test_organizations_over_their_quota_are_met_once(customer, other):
    customer.quota(max_running_nodes=1)
    for _ in range(12):
        customer.job(nodes=1)
    theirs = other.job(nodes=1)
    dispatch.dispatch_queue()
    assert Attempt.objects.count() == 2
    assert Job.objects.get(pk=theirs.pk).state == JobState.STARTING
    with CaptureQueriesContext(connection) as asked:
        dispatch.dispatch_queue()
    assert len(asked) <= 7


def test_why_it_waits_follows_the_cluster_without_a_write_to_the_job(customer):
    customer.quota(max_running_nodes=100)
    attempt = customer.started(node_spec="small", nodes=7)
    job = customer.job(node_spec="small", nodes=4)
    dispatch.dispatch_queue()
    assert "1 is free now." in waiting(customer, job)
    before = Job.objects.values().get(pk=job.pk)
    customer.quota(max_running_nodes=9)
    assert "runs 7 nodes of the 9 it may; this run needs 4 more" in waiting(customer, job)
    assert Job.objects.values().get(pk=job.pk) == before
    customer.quota(max_running_nodes=100)
    Room.objects.update(answers=False)
    assert "does not answer" in waiting(customer, job)
    customer.end(attempt, Outcome.COMPLETED)
    dispatch.dispatch_queue()
    assert Job.objects.get(pk=job.pk).state == JobState.STARTING


def test_a_retry_that_waits_for_room_tells_both(customer, backend):
    customer.quota(max_running_nodes=100)
    attempt = customer.started(node_spec="small", nodes=8)
    job = customer.end(attempt, Outcome.NODE_LOST)
    customer.organization.quota.refresh_from_db()
    backend.total = backend.total.__class__(9.0, 65536)
    late = customer.job(node_spec="small", nodes=2)
    dispatch.start(late)
    dispatch.dispatch_queue()
    told = waiting(customer, job)
    assert "The platform lost the last attempt, which costs nothing." in told
    assert "Waiting for 8 free nodes of Small; 7 are free now." in told


def test_a_spec_that_nobody_waits_for_is_not_looked_at(customer):
    customer.job(node_spec="small", nodes=1)
    NodeSpec.objects.filter(name="nano").update(cpus=1)
    assert [spec.name for specs in queue.waiting_specs().values() for spec in specs] == ["small"]
    dispatch.dispatch_queue()
    assert list(Room.objects.values_list("node_spec__name", "most")) == [("small", 8)]

"""Several clusters: each has its jobs, one that is away stops its own alone, and loses none of them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from billing.models import NodeSpec, Receipt
from jobs import clusters, dispatch, purchase, queue, selectors, tasks
from jobs.backend import cluster
from jobs.models import Attempt, ClusterStatus, Job, Room
from jobs.states import JobState
from runtime.errors import BackendUnavailable
from runtime.specs import Outcome
from tests.factories.jobs import Customer
from tests.fakes import FakeBackend

pytestmark = pytest.mark.django_db


@pytest.fixture
def yards(settings, monkeypatch, tmp_path):
    """Two clusters: east, the first, and west, where Medium is sold."""
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": None}
    made = {name: FakeBackend(root=tmp_path / name) for name in settings.TRAINYARD_CLUSTERS}
    monkeypatch.setattr("jobs.backend._create", made.__getitem__)
    cluster.cache_clear()
    yield made
    cluster.cache_clear()


@pytest.fixture
def customer(yards):
    made = Customer(yards["east"])
    made.quota(max_running_nodes=100)
    NodeSpec.objects.filter(name="medium").update(cluster="west")
    return made


def states(*jobs):
    return [Job.objects.get(pk=job.pk).state for job in jobs]


def waiting(customer, job):
    return selectors.waiting_for(selectors.job_for(customer.organization, job.pk))


def test_a_job_runs_on_the_cluster_of_its_node_spec(customer, yards):
    near, far = customer.job(), customer.job(node_spec="medium")
    dispatch.dispatch_queue()
    assert yards["east"].names() == [f"job-{near.pk}-1"]
    assert yards["west"].names() == [f"job-{far.pk}-1"]
    assert list(Attempt.objects.order_by("job_id").values_list("backend", flat=True)) == ["east", "west"]


def test_room_on_one_cluster_is_none_on_another(customer, yards):
    yards["west"].total = yards["west"].total.__class__(2.0, 65536)
    first, second, near = (customer.job(node_spec=spec, nodes=1) for spec in ("medium", "medium", "small"))
    dispatch.dispatch_queue()
    assert states(first, second, near) == ["starting", "queued", "starting"]
    assert "Waiting for 1 free node of Medium; 0 are free now." in waiting(customer, second)
    assert "0 jobs are before it." in waiting(customer, second)


def test_a_quota_counts_on_all_clusters_together(customer, yards):
    customer.quota(max_running_nodes=2)
    near, far = customer.job(), customer.job(node_spec="medium")
    dispatch.dispatch_queue()
    assert sorted(states(near, far)) == ["queued", "starting"]
    assert "runs 2 nodes of the 2" in waiting(customer, next(job for job in (near, far) if states(job) == ["queued"]))


def test_one_that_is_away_stops_its_own_jobs_alone_says_so_and_loses_none(customer, yards):
    running = customer.job(node_spec="medium", nodes=1)
    dispatch.dispatch_queue()
    yards["west"].start(f"job-{running.pk}-1")
    dispatch.reconcile()
    near, far = customer.job(), customer.job(node_spec="medium", nodes=1)
    yards["west"].available = False
    dispatch.reconcile()
    assert states(running, near, far) == ["running", "starting", "queued"]
    assert "does not answer" in waiting(customer, far)
    west = {row.name: row for row in clusters.rows()}["west"]
    assert (west.answers, west.queued, west.running, west.detail) == (False, 1, 1, "The fake cluster is away.")
    yards["east"].start(f"job-{near.pk}-1")
    yards["east"].end(f"job-{near.pk}-1", Outcome.COMPLETED)
    dispatch.reconcile()
    assert states(running, near, far) == ["running", "succeeded", "queued"]

    yards["west"].available = True
    yards["west"].end(f"job-{running.pk}-1", Outcome.COMPLETED)
    dispatch.reconcile()
    assert states(running, far) == ["succeeded", "starting"]
    assert Receipt.objects.count() == 2
    assert {row.name: row.answers for row in clusters.rows()} == {"east": True, "west": True}


def test_a_job_that_starts_on_one_that_goes_away_says_so_and_is_submitted_when_it_is_back(customer, yards):
    far = customer.job(node_spec="medium", nodes=1)
    submit = yards["west"].submit

    def away(_spec):
        yards["west"].available = False
        raise BackendUnavailable("away")

    yards["west"].submit = away
    dispatch.dispatch_queue()
    dispatch.reconcile()
    assert states(far) == ["starting"]
    assert "does not answer" in waiting(customer, far)
    yards["west"].submit, yards["west"].available = submit, True
    dispatch.reconcile()
    dispatch.reconcile()
    assert yards["west"].names() == [f"job-{far.pk}-1"]
    assert "Nothing is charged yet." in waiting(customer, far)


def test_the_catalogue_and_quotes_ask_the_cluster_that_would_run_it(customer, yards):
    yards["west"].missing_images.add("pytorch")
    assert customer.quote().pk
    with pytest.raises(purchase.InvalidInput) as caught:
        customer.quote(node_spec="medium")
    assert "isn't ready on this cluster" in str(caught.value.fields["image"])
    assert selectors.is_runnable(selectors.job_for(customer.organization, customer.job().pk).image)
    yards["east"].missing_images.add("pytorch")
    assert not selectors.is_runnable(Job.objects.get().image)
    yards["east"].missing_images.clear()
    yards["east"].total = yards["east"].total.__class__(1.0, 65536)
    with pytest.raises(purchase.InvalidInput) as caught:
        customer.quote(nodes=3)
    assert "has room for 2" in str(caught.value.fields["nodes"])
    yards["west"].missing_images.clear()
    assert customer.quote(node_spec="medium", nodes=3).pk


def test_a_run_of_the_same_name_on_another_cluster_is_a_stray(customer, yards):
    near = customer.job()
    dispatch.dispatch_queue()
    yards["west"].submit(yards["east"].runs[f"job-{near.pk}-1"].spec)
    dispatch.reconcile()
    assert yards["west"].names() == []
    assert yards["east"].names() == [f"job-{near.pk}-1"]


def test_a_run_of_a_cluster_that_was_renamed_in_settings_is_left_alone(customer, yards, settings):
    far = customer.job(node_spec="medium", nodes=1)
    dispatch.dispatch_queue()
    settings.TRAINYARD_CLUSTERS = {"east": None, "far": None}
    yards["far"] = yards["west"]
    cluster.cache_clear()
    for _ in range(2):
        dispatch.reconcile()
    dispatch.forget_runs()
    assert yards["far"].names() == [f"job-{far.pk}-1"]
    assert states(far) == ["starting"]
    assert "names no cluster 'west'" in next(row.detail for row in clusters.rows() if row.name == "west")


def test_jobs_of_a_cluster_that_settings_no_longer_name_wait_and_are_shown(customer, yards, settings):
    running = customer.job(node_spec="medium", nodes=1)
    dispatch.dispatch_queue()
    settings.TRAINYARD_CLUSTERS = {"east": None}
    cluster.cache_clear()
    waits = customer.job()
    NodeSpec.objects.filter(name="nano").update(cluster="west")
    dispatch.reconcile()
    assert states(running, waits) == ["starting", "queued"]
    west = next(row for row in clusters.rows() if row.name == "west")
    assert (west.answers, west.is_local, west.queued, west.running) == (False, False, 1, 1)
    assert "names no cluster 'west'" in west.detail
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": None}
    dispatch.reconcile()
    assert states(running, waits) == ["starting", "starting"]


def test_old_runs_are_forgotten_on_each(customer, yards):
    jobs = [customer.job(), customer.job(node_spec="medium", nodes=1)]
    dispatch.dispatch_queue()
    for job, yard in zip(jobs, yards.values(), strict=True):
        yard.end(f"job-{job.pk}-1", Outcome.COMPLETED)
    dispatch.reconcile()
    Attempt.objects.update(finished_at=timezone.now() - dispatch.KEEP_RUNS - timedelta(seconds=1))
    yards["east"].available = False
    dispatch.forget_runs()
    assert (yards["west"].names(), yards["west"].checkpoints) == ([], set())
    yards["east"].available = True
    assert len(yards["east"].names()) == 1
    dispatch.forget_runs()
    assert yards["east"].names() == []


def test_the_sweep_goes_to_each_cluster_as_a_message_of_its_own(customer, yards, monkeypatch, settings):
    sent, done = [], []
    monkeypatch.setattr(tasks, "send", lambda task, name: sent.append((task.name.rsplit(".", 1)[-1], name)))
    monkeypatch.setattr(dispatch, "reconcile", done.append)
    monkeypatch.setattr(dispatch, "dispatch_queue", done.append)
    tasks.reconcile()
    tasks.dispatch_queue()
    assert sent == [(task, name) for task in ("reconcile", "dispatch_queue") for name in ("east", "west")]
    tasks.reconcile("west")
    tasks.dispatch_queue("east")
    assert done == ["west", "east"]
    settings.TRAINYARD_CLUSTERS = {"east": None}
    tasks.reconcile()
    assert done[2:] == ["east"]


def test_what_answers_is_written_down_when_it_changes(db):
    clusters.note(name="west", answers=True)
    began = ClusterStatus.objects.get().since
    clusters.note(name="west", answers=True)
    assert ClusterStatus.objects.get().since == began
    assert ClusterStatus.objects.get().checked_at > began
    clusters.note(name="west", answers=False, detail="No route.")
    status = ClusterStatus.objects.get()
    assert (status.answers, status.detail, status.since > began) == (False, "No route.", True)
    assert not clusters.does_answer("west")
    assert clusters.does_answer("east")


class TestAtOnce:
    pytestmark = pytest.mark.django_db(transaction=True)

    def test_a_cluster_has_one_sweep_at_a_time(self, transactional_db, together):
        def sweep():
            with clusters.only_sweep("west") as mine, clusters.only_sweep("east"):
                if mine:
                    # the second asks while the first holds it
                    assert together(lambda: self.is_mine("west"), lambda: self.is_mine("south")) == [False, True]
                return mine

        assert sweep()
        assert self.is_mine("west")

    def is_mine(self, name):
        with clusters.only_sweep(name) as mine:
            return mine

    def test_the_lock_goes_with_whoever_held_it(self, transactional_db, together):
        def die():
            with clusters.only_sweep("west"):
                connection.close()

        together(die)
        assert self.is_mine("west")


def test_a_pass_writes_only_what_changed(customer, yards):
    for _ in range(3):
        customer.job(node_spec="medium", nodes=4)
    dispatch.dispatch_queue()
    before = list(Room.objects.values())
    with CaptureQueriesContext(connection) as asked:
        dispatch.dispatch_queue()
    assert not [query["sql"] for query in asked if not query["sql"].startswith("SELECT")]
    assert list(Room.objects.values()) == before
    assert queue.waiting_specs("east") == {}
    assert Job.objects.filter(state=JobState.QUEUED).count() == 2

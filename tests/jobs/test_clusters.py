"""Clusters from the settings. A cluster that does not respond delays only its own jobs, and loses none of them."""

import dataclasses
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from billing.models import NodeSpec, Receipt
from jobs import circuit_breaker, clusters, dispatch, images, orders, reconciliation, results, selectors, tasks
from jobs.clusters import cluster, stored_names
from jobs.models import Attempt, CapacitySnapshot, ClusterStatus, Job
from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.local.backend import LocalBackend
from runtime.backends.slurm.config import SlurmConfig
from runtime.errors import BackendUnavailable, RunUnreadable
from runtime.specs import Outcome, Resources, RunPhase
from tests.caching import clear_cache
from tests.factories.billing import NodeSpecFactory
from tests.factories.jobs import Customer
from tests.fakes import FakeBackend
from tests.jobs.queueing import states, waiting

pytestmark = pytest.mark.django_db


@pytest.fixture
def backends(settings, monkeypatch, tmp_path):
    """Fake backends of two clusters by name: east, the first, and west, where Medium is sold."""
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": None}
    backends = {name: FakeBackend(root=tmp_path / name) for name in settings.TRAINYARD_CLUSTERS}
    monkeypatch.setattr("jobs.clusters._create", backends.__getitem__)
    cluster.cache_clear()
    yield backends
    cluster.cache_clear()


@pytest.fixture(autouse=True)
def _cleared_cache(embedded):
    """Forget the state of circuit breakers, which is in Redis; `embedded` starts it."""
    yield
    clear_cache()


@pytest.fixture
def customer(backends):
    """A customer of both clusters. In these tests a job of east is called `near`, one of west `far`."""
    buyer = Customer(backends["east"])
    buyer.quota(max_running_nodes=100)
    NodeSpec.objects.filter(name="medium").update(cluster="west")
    return buyer


def test_a_job_runs_on_the_cluster_of_its_node_spec_and_waits_for_its_capacity(customer, backends):
    backends["west"].total = Resources(2.0, 65536)
    first, second, near = (customer.job(node_spec=spec, nodes=1) for spec in ("medium", "medium", "small"))
    dispatch.dispatch_queue()
    assert states(first, second, near) == ["starting", "queued", "starting"]
    assert (backends["east"].names(), backends["west"].names()) == ([f"job-{near.pk}-1"], [f"job-{first.pk}-1"])
    assert list(Attempt.objects.order_by("job_id").values_list("backend", flat=True)) == ["west", "east"]
    assert "Waiting for 1 free node of Medium; 0 are free now." in waiting(customer, second)
    customer.quota(max_running_nodes=2)  # the quota counts nodes of all clusters together
    third = customer.job(node_spec="small", nodes=1)
    dispatch.dispatch_queue()
    assert "is using 2 of its 2" in waiting(customer, third)


def test_slurm_assigns_whole_cores_also_to_a_node_spec_with_a_part_of_one(customer, backends, settings):
    """Such as the starter node spec, or one whose cluster became Slurm. With more nodes Slurm would start no run."""
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": SlurmConfig.from_data("west", {})}
    NodeSpec.objects.update(cpus="1.5")
    backends["west"].total = backends["east"].total = Resources(9.0, 65536)
    for spec, most in (("small", 6), ("medium", 4)):
        assert f"at most {most}" in customer.refusals(node_spec=spec, nodes=most + 1)["nodes"]
        customer.quote(node_spec=spec, nodes=most)


def test_an_unavailable_cluster_delays_only_its_own_jobs_and_loses_none(customer, backends):
    running = customer.job(node_spec="medium", nodes=1)
    dispatch.dispatch_queue()
    backends["west"].start(f"job-{running.pk}-1")
    reconciliation.reconcile()
    near, far = customer.job(), customer.job(node_spec="medium", nodes=1)
    backends["west"].available = False
    reconciliation.reconcile()
    assert states(running, near, far) == ["running", "starting", "queued"]
    assert "is not responding" in waiting(customer, far)
    west = {row.name: row for row in clusters.status_rows()}["west"]
    assert (west.answers, west.queued, west.running, west.detail) == (False, 1, 1, "The fake cluster is away.")
    backends["east"].start(f"job-{near.pk}-1")
    backends["east"].end(f"job-{near.pk}-1", Outcome.COMPLETED)
    reconciliation.reconcile()
    assert states(running, near, far) == ["running", "succeeded", "queued"]

    backends["west"].available = True
    backends["west"].end(f"job-{running.pk}-1", Outcome.COMPLETED)
    reconciliation.reconcile()
    assert states(running, far) == ["succeeded", "starting"]
    assert Receipt.objects.count() == 2
    assert {row.name: row.answers for row in clusters.status_rows()} == {"east": True, "west": True}


def test_a_claimed_job_is_submitted_when_its_cluster_responds(customer, backends):
    far = customer.job(node_spec="medium", nodes=1)
    submit = backends["west"].submit

    def away(_spec):
        backends["west"].available = False
        raise BackendUnavailable("away")

    backends["west"].submit = away
    dispatch.dispatch_queue()
    reconciliation.reconcile()
    assert states(far) == ["starting"]
    assert "is not responding" in waiting(customer, far)
    backends["west"].submit, backends["west"].available = submit, True
    for _ in range(2):  # the first submits the run, the second reads its status
        reconciliation.reconcile()
    assert backends["west"].names() == [f"job-{far.pk}-1"]
    assert "Nothing is charged yet." in waiting(customer, far)


def test_a_run_that_cannot_be_submitted_says_so_and_why_is_logged_once(customer, backends, caplog):
    """Such as this machine without bubblewrap: its backend answers every other call, and has no circuit breaker."""
    job, submit = customer.job(nodes=1), backends["east"].submit

    def refuse(_spec):
        raise BackendUnavailable("no bubblewrap")

    backends["east"].submit = refuse
    for _pass in range(2):
        dispatch.dispatch_queue()
    assert (
        "The run could not be submitted to the cluster yet. The console tries again. If this continues, contact the "
        "administrator. Nothing is charged yet."
    ) in waiting(customer, job)
    assert [record.getMessage() for record in caplog.records if "bubblewrap" in record.getMessage()] == [
        f"Could not submit job-{job.pk}-1 to the cluster east. The next pass tries again: no bubblewrap"
    ]
    backends["east"].submit = submit
    for _ in range(2):
        reconciliation.reconcile()
    assert "The nodes are starting." in waiting(customer, job)


def test_a_cancel_takes_effect_at_the_first_reconciliation_after_the_cluster_answers(customer, backends, monkeypatch):
    """Even if the circuit breaker pauses calls for an hour."""
    backends["west"] = circuit_breaker.with_circuit_breaker("west", fake := backends["west"])
    monkeypatch.setattr(circuit_breaker, "PAUSES", (3600,))
    cluster.cache_clear()
    job = customer.job(node_spec="medium", nodes=1)
    dispatch.dispatch_queue()
    fake.start(f"job-{job.pk}-1")
    reconciliation.reconcile()
    fake.available = False
    reconciliation.reconcile()
    assert circuit_breaker.circuit_is_open("west")
    orders.cancel_job(membership=customer.membership, job=job)
    reconciliation.stop(job_pk=job.pk)
    reconciliation.reconcile()
    assert states(job) == ["stopping"]
    fake.available = True
    reconciliation.reconcile()
    assert fake.describe(f"job-{job.pk}-1").phase is RunPhase.STOPPING


def test_a_quote_asks_the_cluster_that_would_run_it(customer, backends):
    backends["west"].missing_images.add("pytorch")
    backends["east"].total = Resources(1.0, 65536)  # two nodes of nano, as many as a quote has here by default
    assert customer.quote().pk
    for field, sentence, form in (
        ("image", "is not ready on this cluster", {"node_spec": "medium"}),
        ("nodes", "has capacity for at most 2", {"nodes": 3}),
    ):
        assert sentence in customer.refusals(**form)[field]
    assert not images.problem(customer.job().image), "one cluster can run it"
    backends["east"].missing_images.add("pytorch")
    assert images.problem(Job.objects.get().image)
    backends["west"].missing_images.clear()
    assert customer.quote(node_spec="medium", nodes=3).pk


def test_a_run_of_the_same_name_on_another_cluster_is_deleted_and_a_pass_writes_only_changes(customer, backends):
    near, far = customer.job(), [customer.job(node_spec="medium", nodes=4) for _ in range(2)]
    dispatch.dispatch_queue()
    assert states(near, *far) == ["starting", "starting", "queued"]
    with CaptureQueriesContext(connection) as queries:
        dispatch.dispatch_queue()
    assert not [query["sql"] for query in queries if not query["sql"].startswith("SELECT")]
    backends["west"].lose(f"job-{far[0].pk}-1")  # to make room for the next line
    backends["west"].submit(backends["east"].runs[f"job-{near.pk}-1"].spec)
    reconciliation.reconcile()
    assert f"job-{near.pk}-1" not in backends["west"].names()
    assert backends["east"].names() == [f"job-{near.pk}-1"]


def test_a_run_of_a_cluster_that_was_renamed_in_settings_is_left_alone(customer, backends, settings):
    far = customer.job(node_spec="medium", nodes=1)
    dispatch.dispatch_queue()
    settings.TRAINYARD_CLUSTERS = {"east": None, "far": None}
    backends["far"] = backends["west"]
    cluster.cache_clear()
    for _ in range(2):
        reconciliation.reconcile()
    reconciliation.delete_old_runs()
    assert backends["far"].names() == [f"job-{far.pk}-1"]
    assert states(far) == ["starting"]


def test_jobs_of_a_cluster_that_settings_no_longer_name_wait_and_are_shown(customer, settings):
    running = customer.job(node_spec="medium", nodes=1)
    dispatch.dispatch_queue()
    settings.TRAINYARD_CLUSTERS = {"east": None}
    cluster.cache_clear()
    waits = customer.job()
    NodeSpec.objects.filter(name="nano").update(cluster="west")  # the node spec of the job that waits
    reconciliation.reconcile()
    assert states(running, waits) == ["starting", "queued"]
    west = next(row for row in clusters.status_rows() if row.name == "west")
    assert (west.answers, west.is_local, west.queued, west.running) == (False, False, 1, 1)
    assert "names no cluster 'west'" in west.detail
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": None}
    reconciliation.reconcile()
    assert states(running, waits) == ["starting", "starting"]


def test_old_runs_are_deleted_on_each_cluster(customer, backends, monkeypatch):
    jobs = [customer.job(), customer.job(node_spec="medium", nodes=1)]
    dispatch.dispatch_queue()
    for job, backend in zip(jobs, backends.values(), strict=True):
        backend.end(f"job-{job.pk}-1", Outcome.COMPLETED)
    reconciliation.reconcile()
    orphan = dataclasses.replace(  # there is no job of this number
        backends["west"].runs[f"job-{jobs[1].pk}-1"].spec, name="job-999999-1", checkpoint_key=""
    )
    backends["west"].submit(orphan)
    backends["west"].submit(dataclasses.replace(orphan, name="job-111111-1"))  # comes first
    delete = backends["west"].delete

    def delete_unless_unreadable(name):
        if name == "job-111111-1":
            raise RunUnreadable("Input/output error.")
        delete(name)

    monkeypatch.setattr(backends["west"], "delete", delete_unless_unreadable)
    reconciliation.reconcile()
    assert not ClusterStatus.objects.filter(answers=False).exists(), "one run's files are not the cluster"
    backends["west"].submit(orphan)
    backends["west"].end("job-999999-1", Outcome.COMPLETED)
    reconciliation.delete_old_runs()
    delete("job-111111-1")
    assert backends["west"].names() == [f"job-{jobs[1].pk}-1"]
    assert backends["west"].checkpoints == {f"job-{jobs[1].pk}"}
    Job.objects.update(finished_at=timezone.now() - results.DEFAULT_RETENTION - timedelta(seconds=1))
    backends["east"].available = False
    reconciliation.delete_old_runs()
    assert (backends["west"].names(), backends["west"].checkpoints) == ([], set())
    backends["east"].available = True
    assert len(backends["east"].names()) == 1
    reconciliation.delete_old_runs()
    assert backends["east"].names() == []


def test_the_reconciliation_of_each_cluster_is_a_task_of_its_own(monkeypatch, settings):
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": None}
    sent, reconciled = [], []
    monkeypatch.setattr(tasks, "send", lambda task, name: sent.append((task.name.rsplit(".", 1)[-1], name)))
    monkeypatch.setattr(reconciliation, "reconcile", reconciled.append)
    tasks.reconcile()
    assert sent == [("reconcile", "east"), ("reconcile", "west")]
    tasks.reconcile("west")
    settings.TRAINYARD_CLUSTERS = {"east": None}
    tasks.reconcile()  # a single cluster is reconciled in this task itself
    assert reconciled == ["west", "east"]


def test_the_status_of_a_cluster_is_stored_when_it_changes(db):
    clusters.record_status(name="west", answers=True)
    began = ClusterStatus.objects.get().since
    clusters.record_status(name="west", answers=True)
    assert ClusterStatus.objects.get().since == began < ClusterStatus.objects.get().checked_at
    clusters.record_status(name="west", answers=False, detail="No route.")
    status = ClusterStatus.objects.get()
    assert (status.answers, status.detail, status.since > began) == (False, "No route.", True)
    snapshot = CapacitySnapshot.objects.create(node_spec=NodeSpecFactory(cluster="west"))
    clusters.record_status(name="west", answers=False)
    snapshot.refresh_from_db()
    assert not snapshot.answers, "also if a pass of the scheduler has stored that it answers"
    # A cluster without a stored status counts as one that answers.
    assert (clusters.does_answer("west"), clusters.does_answer("east")) == (False, True)


def test_rows_without_a_name_or_with_local_belong_to_the_first_cluster(settings):
    settings.TRAINYARD_CLUSTERS = {"east": None, "west": None}
    cluster.cache_clear()
    assert cluster() is cluster("east") is cluster("local")
    assert cluster("west") is not cluster()
    assert stored_names("east") == {"east", "", "local"}
    assert stored_names("west") == {"west"}
    settings.TRAINYARD_CLUSTERS = {"east": None, "local": None}
    assert stored_names("local") == {"local"}
    with pytest.raises(BackendUnavailable, match="no cluster 'south'"):
        cluster("south")


def test_jobs_of_all_names_of_a_cluster_wait_in_one_queue(customer):
    NodeSpec.objects.filter(name="small").update(cluster="east")
    for spec in ("nano", "medium", "small"):  # whose clusters are "", west and east
        customer.job(node_spec=spec, nodes=1)
    assert [job.ahead for job in selectors.jobs_for(customer.organization)] == [1, 0, 0]  # newest first


def test_a_cluster_is_created_from_its_config(settings, tmp_path, monkeypatch):
    settings.LOCAL_CPUS, settings.LOCAL_MEMORY_MIB, settings.TRAINYARD_RUN_NETWORK = 3.5, 1000, "host"
    cluster.cache_clear()
    assert isinstance(cluster(), LocalBackend)
    assert cluster().capacity().machines[0].total == Resources(3.5, 1000)
    assert "The settings ask for that." in cluster().isolation_gaps()[0], "runs share the network of the host"
    assert cluster().run_folder("job-1-1") == tmp_path / "runs" / "job-1-1"
    config = ClusterConfig.from_data("west", {"volume": {"claim": "runs", "root": str(tmp_path)}})
    settings.TRAINYARD_CLUSTERS = {"west": config}
    cluster.cache_clear()
    created = []
    monkeypatch.setattr(
        "jobs.clusters.create", lambda kind, **options: created.append((kind, options)) or FakeBackend(root=tmp_path)
    )
    assert cluster("west").names() == []
    assert created == [("kubernetes", {"config": config, "root": tmp_path / "runs" / ".clusters" / "west"})]

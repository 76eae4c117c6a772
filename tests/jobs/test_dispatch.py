import dataclasses
from datetime import timedelta

import pytest
from django.utils import timezone

from billing.models import Receipt
from jobs import dispatch, lifecycle, orders, selectors
from jobs.models import Attempt
from jobs.states import EndReason
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity
from runtime.specs import Framework, Outcome, PullSecret, Resources, RunPhase
from storage import catalog, registries
from tests.factories.storage import DatasetFactory, DatasetVersionFactory
from tests.jobs.queueing import states, waiting

# --- What the backend may say -----------------------------------------------------------------------------------------


def test_the_spec_says_what_was_bought(customer, backend):
    versions = [
        DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name=name)) for name in "ba"
    ]
    job = customer.job(datasets=["b", "a"], arguments=["--x", "1 2"], workers_per_node=2, lr="1e-3")
    dispatch.start(job)
    spec = backend.runs[f"job-{job.pk}-1"].spec
    assert (spec.framework, spec.image.builtin, spec.script) == (Framework.PYTORCH, "pytorch", "train.py")
    assert (spec.nodes, spec.workers_per_node, spec.resources) == (2, 2, Resources(0.5, 1024))
    assert (spec.epochs, spec.lr, spec.batch_size) == (10, "1e-3", 32)
    assert (spec.arguments, spec.datasets) == (("--x", "1 2"), ("b", "a"))
    assert spec.deadline_seconds == job.order.quote.deadline_seconds == 3600
    assert spec.checkpoint_key == f"job-{job.pk}"
    assert [(mount.source.rsplit("/", 1)[-1], mount.target, mount.read_only) for mount in spec.mounts] == [
        (customer.workspace.folder, "/workspace", False),
        (versions[0].folder, "/datasets/b", True),
        (versions[1].folder, "/datasets/a", True),
    ]


def test_room_that_went_between_look_and_submit_gives_back_without_a_trace(customer, backend):
    job = customer.job()
    backend.refuses[f"job-{job.pk}-1"] = NoCapacity("taken")
    dispatch.dispatch_queue()
    assert states(job) == ["queued"]
    assert not Attempt.objects.exists()
    assert "0 are free now" in waiting(customer, job)
    backend.refuses.clear()
    dispatch.dispatch_queue()
    assert states(job) == ["starting"]


def test_a_spec_that_cannot_run_ends_free_and_is_not_tried_again(customer, backend):
    job = customer.job()
    backend.refuses[f"job-{job.pk}-1"] = InvalidSpec("The image is not built.", field="image")
    dispatch.dispatch_queue()
    job.refresh_from_db()
    assert (job.state, job.reason, job.detail) == ("failed", "platform_error", "The image is not built.")
    assert selectors.summary(selectors.job_for(customer.organization, job.pk))["detail"] == (
        "The image can't be used on this cluster now."
    )
    assert Receipt.objects.get().total_minor == 0
    assert customer.wallet.held_minor == 0


def test_a_script_that_went_since_is_the_customers_fault_and_still_free(customer, backend):
    job = customer.job()
    backend.refuses[f"job-{job.pk}-1"] = InvalidSpec("There is no file.", field="script")
    dispatch.dispatch_queue()
    job.refresh_from_db()
    assert (job.state, job.reason) == ("failed", "code_failed")
    assert Receipt.objects.get().total_minor == 0


def test_an_unforeseen_fault_of_one_job_does_not_stop_the_queue(customer, backend, caplog):
    broken, fine = customer.job(), customer.job()
    backend.refuses[f"job-{broken.pk}-1"] = RuntimeError("what?")
    dispatch.dispatch_queue()
    assert states(broken, fine) == ["starting", "starting"]
    assert "could not be started" in caplog.text
    backend.refuses.clear()
    dispatch.reconcile()
    assert f"job-{broken.pk}-1" in backend.runs


def test_an_unforeseen_fault_that_stays_ends_the_job_free_of_charge(customer, backend):
    job = customer.job()
    for number in (1, 2, 3):
        backend.refuses[f"job-{job.pk}-{number}"] = RuntimeError("what?")
    for _ in range(3):
        dispatch.reconcile()
        Attempt.objects.filter(finished_at=None).update(claimed_at=timezone.now() - dispatch.SUBMIT_PATIENCE * 2)
        dispatch.reconcile()
    job.refresh_from_db()
    assert (job.state, job.reason) == ("failed", EndReason.PLATFORM_ERROR)
    assert Receipt.objects.get(hold=job.order.hold).total_minor == 0


def test_a_cluster_that_is_away_is_told_and_waited_for(customer, backend):
    job = customer.job()
    backend.available = False
    dispatch.dispatch_queue()
    assert states(job) == ["queued"]
    assert "does not answer" in waiting(customer, job)
    backend.available = True
    dispatch.dispatch_queue()
    assert states(job) == ["starting"]


@pytest.mark.parametrize("call", ["submit", "describe", "stop", "names", "capacity", "delete"])
@pytest.mark.parametrize("moment", ["queued", "starting", "running", "stopping"])
def test_a_cluster_that_is_away_at_any_call_is_made_up_for(customer, backend, monkeypatch, call, moment):
    job = customer.job()
    if moment != "queued":
        dispatch.start(job)
    if moment in {"running", "stopping"}:
        backend.start(f"job-{job.pk}-1")
        dispatch.reconcile_job(job_pk=job.pk)
    if moment == "stopping":
        orders.cancel_job(membership=customer.membership, job=job)
    backend.submit(dispatch.run_spec(Attempt(job=job, number=9, granted_nodes=job.nodes)))

    def away(*_arguments, **_options):
        raise BackendUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(backend, call, away)
        dispatch.reconcile()
        dispatch.stop(job_pk=job.pk)
    dispatch.reconcile()
    assert f"job-{job.pk}-9" not in backend.names()
    name = f"job-{job.pk}-1"
    if moment == "stopping":
        assert backend.describe(name).phase is RunPhase.STOPPING
    else:
        backend.start(name)
    backend.end(name, Outcome.COMPLETED)
    dispatch.reconcile()
    assert states(job) == ["succeeded"]
    assert Receipt.objects.count() == 1
    assert backend.names() == [name]


def test_a_run_that_vanished_is_a_node_lost_and_started_again(customer, backend):
    attempt = customer.started()
    backend.lose(attempt.run_name)
    dispatch.reconcile()
    attempt.refresh_from_db()
    assert attempt.reason == EndReason.NODE_LOST
    assert list(backend.runs) == [f"job-{attempt.job_id}-2"]


def test_a_cancelled_run_that_vanished_is_cancelled(customer, backend):
    attempt = customer.started()
    orders.cancel_job(membership=customer.membership, job=attempt.job)
    backend.lose(attempt.run_name)
    dispatch.reconcile()
    assert states(attempt.job) == ["cancelled"]
    assert backend.names() == []


def test_a_cancel_between_claim_and_submit_starts_nothing_that_stays(customer, backend):
    job = customer.job()
    attempt = lifecycle.claim(job=job, backend="local")
    orders.cancel_job(membership=customer.membership, job=job)
    dispatch.submit(attempt)
    assert backend.describe(attempt.run_name).phase is RunPhase.STOPPING
    backend.end(attempt.run_name, Outcome.STOPPED)
    dispatch.reconcile()
    assert states(job) == ["cancelled"]


def test_a_cancel_that_ended_the_job_before_the_submit_stops_the_run_too(customer, backend):
    job = customer.job()
    attempt = lifecycle.claim(job=job, backend="local")
    orders.cancel_job(membership=customer.membership, job=job)
    dispatch.stop(job_pk=job.pk)
    assert states(job) == ["cancelled"]
    dispatch.submit(attempt)
    assert backend.describe(attempt.run_name).phase is RunPhase.STOPPING
    assert Receipt.objects.get().total_minor == 0


def test_what_code_wrote_never_keeps_a_run_from_being_settled(customer, backend, monkeypatch, caplog):
    attempt = customer.started()

    def explode(**_options):
        raise ValueError("hostile")

    monkeypatch.setattr("jobs.telemetry.ingest", explode)
    backend.end(attempt.run_name, Outcome.COMPLETED)
    dispatch.reconcile()
    assert states(attempt.job) == ["succeeded"]
    assert Receipt.objects.count() == 1
    assert "could not be taken in" in caplog.text


def test_one_broken_job_does_not_keep_the_sweep_from_the_others(customer, backend, monkeypatch):
    first, second = customer.started(nodes=1), customer.started(nodes=1)
    for attempt in (first, second):
        backend.end(attempt.run_name, Outcome.COMPLETED)
    describe = backend.describe

    def broken(name):
        if name == first.run_name:
            raise ZeroDivisionError
        return describe(name)

    monkeypatch.setattr(backend, "describe", broken)
    dispatch.reconcile()
    assert states(first.job, second.job) == ["running", "succeeded"]


# --- What is left behind ----------------------------------------------------------------------------------------------


def test_runs_that_no_row_knows_are_removed_and_strangers_left(customer, backend):
    attempt = customer.started()
    spec = backend.runs[attempt.run_name].spec
    for name in ("job-999999-1", f"job-{attempt.job_id}-7", "bench-1"):
        backend.submit(spec.__class__(**{**vars(spec), "name": name, "checkpoint_key": ""}))
    dispatch.reconcile()
    assert backend.names() == sorted(["bench-1", attempt.run_name])


@pytest.mark.parametrize("age", [timedelta(0), timedelta(hours=2), timedelta(days=90)], ids=str)
def test_a_run_that_outlived_its_attempt_is_stopped(customer, backend, age):
    attempt = customer.started()
    Attempt.objects.update(finished_at=timezone.now() - age, reason=EndReason.NODE_LOST)
    dispatch.reconcile()
    assert backend.describe(attempt.run_name).phase is RunPhase.STOPPING


def test_old_runs_are_forgotten(customer, backend):
    attempt = customer.started()
    customer.end(attempt, Outcome.COMPLETED)
    spec = backend.runs[attempt.run_name].spec
    backend.submit(dataclasses.replace(spec, name="job-999999-1", checkpoint_key=""))
    backend.end("job-999999-1", Outcome.COMPLETED)
    dispatch.forget_runs()
    assert backend.names() == [attempt.run_name]
    assert backend.checkpoints == {f"job-{attempt.job_id}"}
    Attempt.objects.update(finished_at=timezone.now() - dispatch.KEEP_RUNS - timedelta(seconds=1))
    backend.available = False
    dispatch.forget_runs()
    backend.available = True
    assert backend.names() == [attempt.run_name]
    dispatch.forget_runs()
    assert backend.names() == []
    assert backend.checkpoints == set()


def test_the_sweep_looks_at_no_run_that_has_ended(customer, backend, monkeypatch):
    customer.end(customer.started(), Outcome.COMPLETED)
    monkeypatch.setattr(backend, "describe", None)
    monkeypatch.setattr(backend, "stop", None)
    dispatch.reconcile()


def test_credentials_of_the_customers_registry_reach_the_run_and_no_log(customer, backend, caplog):
    image = catalog.create_image(
        organization=customer.organization, name="mine", title="Mine", frameworks=["pytorch"],
        reference="registry.example.com/team/train:1",
    )  # fmt: skip
    for host, password in (("registry.example.com", "s3cret-word"), ("other.example.com", "else")):
        registries.save_registry(organization=customer.organization, host=host, username="robot", password=password)
    caplog.set_level("DEBUG")
    own, builtin = customer.job(image=image.name), customer.job()
    dispatch.dispatch_queue()
    specs = [backend.runs[f"job-{job.pk}-1"].spec for job in (own, builtin)]
    assert specs[0].pull_secret == PullSecret("registry.example.com", "robot", "s3cret-word")
    assert specs[1].pull_secret is None
    assert specs[0].image.reference == "registry.example.com/team/train:1"
    assert "s3cret-word" not in caplog.text + repr(specs[0]) + specs[0].to_json()
    assert "s3cret-word" not in str(selectors.environment(selectors.job_for(customer.organization, own.pk)))


def test_the_cluster_is_told_what_kind_of_node_and_how_many_the_organization_may_run(customer, backend):
    customer.quota(max_running_nodes=7)
    job = customer.job(node_spec="small")
    dispatch.dispatch_queue()
    spec = backend.runs[f"job-{job.pk}-1"].spec
    assert (spec.node_kind, spec.organization_nodes) == ("small", 7)
    assert spec.labels["organization"] == customer.organization.slug

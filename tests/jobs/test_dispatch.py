"""Dispatch and reconciliation of jobs: the submitted RunSpec, refusals, faults of the cluster, and stray runs."""

from datetime import timedelta
from unittest.mock import Mock

import pytest
from django.utils import timezone

from billing.models import Receipt
from jobs import dispatch, lifecycle, orders, reconciliation, run_specs, selectors
from jobs.errors import QuotaExceeded
from jobs.models import Attempt
from jobs.states import EndReason
from runtime.errors import BackendUnavailable, InvalidSpec, NoCapacity, RunUnreadable
from runtime.specs import FailureCode, Framework, Outcome, PullSecret, Resources, RunPhase
from storage import images, registries
from storage import selectors as storage_selectors
from tests.factories.jobs import start
from tests.factories.storage import DatasetFactory, DatasetVersionFactory
from tests.jobs.queueing import states, waiting


def test_the_spec_has_what_was_bought(customer, backend):
    used = storage_selectors.storage_used(customer.organization)
    customer.quota(max_running_nodes=7, max_storage_bytes=used + (5 << 20) + 17)  # 17 bytes are less than a MiB
    versions = [
        DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name=name)) for name in "ba"
    ]
    job = customer.job(datasets=["b", "a"], arguments=["--x", "1 2"], workers_per_node=2, lr="1e-3")
    start(job)
    spec = backend.runs[f"job-{job.pk}-1"].spec
    assert (spec.framework, spec.image.builtin, spec.script) == (Framework.PYTORCH, "pytorch", "train.py")
    assert (spec.nodes, spec.workers_per_node, spec.resources) == (2, 2, Resources(0.5, 1024))
    assert (spec.epochs, spec.lr, spec.batch_size) == (10, "1e-3", 32)
    assert (spec.arguments, spec.datasets) == (("--x", "1 2"), ("b", "a"))
    assert spec.deadline_seconds == job.order.quote.deadline_seconds == 3600
    assert spec.checkpoint_key == f"job-{job.pk}"
    assert (spec.node_kind, spec.organization_nodes, spec.storage_left_mib) == ("nano", 7, 5)
    assert spec.labels["organization"] == customer.organization.slug
    assert [(mount.source.rsplit("/", 1)[-1], mount.target, mount.read_only) for mount in spec.mounts] == [
        (customer.workspace.folder, "/workspace", False),
        (versions[0].folder, "/datasets/b", True),
        (versions[1].folder, "/datasets/a", True),
    ]


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("sent_tasks")
def test_capacity_taken_before_the_submission_requeues_the_job(customer, backend, monkeypatch):
    monkeypatch.setattr(backend, "parallel_submissions", 4)  # `test_checkpoints` submits one at a time
    job = customer.job()
    backend.refuses[f"job-{job.pk}-1"] = NoCapacity("taken")
    dispatch.dispatch_queue()
    assert states(job) == ["queued"]
    assert not Attempt.objects.exists()
    assert waiting(customer, job) == "Waiting for 2 free nodes of Nano. You're next in the queue."
    backend.refuses.clear()
    dispatch.dispatch_queue()
    assert states(job) == ["starting"]


REFUSED_SPECS = [
    ("image", "platform_error", "The image can't be used on this cluster now."),
    ("account", "platform_error", "The cluster does not accept jobs of your organization on this node spec."),
    ("script", "code_failed", "The script is no longer in the workspace."),
]


def test_an_invalid_spec_ends_free_without_a_retry(customer, backend):
    for field, reason, sentence in REFUSED_SPECS:
        job = customer.job(retries=3)
        backend.refuses[f"job-{job.pk}-1"] = InvalidSpec("It was deleted.", field=field)
        dispatch.dispatch_queue()
        job.refresh_from_db()
        assert (job.state, job.reason, job.detail) == ("failed", reason, "It was deleted.")
        summary = selectors.summary(selectors.job_for(customer.organization, job.pk))
        assert summary["detail"].startswith(sentence)
        sentences = summary["sentence"], *(row.sentence for row in selectors.events(job))
        assert not [text for text in sentences if "You pay" in text]
        assert Receipt.objects.get(hold__order__job=job).total_minor == 0
    assert customer.wallet.held_minor == 0


def test_an_unexpected_error_stops_no_other_job_and_ends_its_job_free_if_it_persists(customer, backend, caplog):
    broken, fine = customer.job(), customer.job()
    for number in (1, 2, 3):
        backend.refuses[f"job-{broken.pk}-{number}"] = RuntimeError("what?")
    dispatch.dispatch_queue()
    assert states(broken, fine) == ["starting", "starting"]
    assert "could not be started" in caplog.text
    for _attempt in range(3):  # platform faults end a job with its third attempt
        Attempt.objects.filter(job=broken, finished_at=None).update(
            claimed_at=timezone.now() - dispatch.SUBMIT_RETRY_PERIOD * 2
        )
        for _ in range(2):  # the first ends the attempt, the second starts the next one
            reconciliation.reconcile()
    broken.refresh_from_db()
    assert (broken.state, broken.reason) == ("failed", EndReason.PLATFORM_ERROR)
    assert Receipt.objects.get(hold=broken.order.hold).total_minor == 0


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_run_that_stays_unreadable_is_killed_and_ends_free(customer, backend, monkeypatch, is_cancelled):
    attempt = customer.started()
    job, now = attempt.job, timezone.now()
    if is_cancelled:
        orders.cancel_job(membership=customer.membership, job=job)
    monkeypatch.setattr(backend, "describe", Mock(side_effect=RunUnreadable("Input/output error.")))
    kill = Mock(side_effect=BackendUnavailable)
    monkeypatch.setattr(backend, "kill", kill)
    ends_after = timedelta(seconds=20) if is_cancelled else timedelta(seconds=job.deadline_seconds)
    ends_at = now + ends_after + reconciliation.UNREADABLE_PERIOD
    first_failure_at = ends_at - reconciliation.UNREADABLE_PERIOD / 2
    # A run that is past its limit may be unreadable for a moment only.
    for at in (first_failure_at, ends_at + timedelta(minutes=5)):
        monkeypatch.setattr(reconciliation.timezone, "now", lambda at=at: at)
        reconciliation.reconcile_job(job_pk=job.pk)
        assert not kill.called
    at = first_failure_at + reconciliation.UNREADABLE_PERIOD + timedelta(seconds=1)
    monkeypatch.setattr(reconciliation.timezone, "now", lambda: at)
    reconciliation.reconcile_job(job_pk=job.pk)
    attempt.refresh_from_db()
    assert (kill.call_args.args, attempt.finished_at) == ((attempt.run_name,), None), "it may still compute"
    kill.side_effect = None
    reconciliation.reconcile_job(job_pk=job.pk)
    monkeypatch.undo()
    attempt.refresh_from_db()
    job.refresh_from_db()
    assert (attempt.reason, attempt.failure["code"]) == (EndReason.PLATFORM_ERROR, FailureCode.UNREADABLE)
    if is_cancelled:
        assert (job.state, Receipt.objects.get().total_minor, customer.wallet.held_minor) == ("cancelled", 0, 0)
    else:
        assert (job.state, job.order.hold.metered_minor) == ("queued", 0), "it gets another attempt"


@pytest.mark.parametrize("moment", ["queued", "starting", "running", "stopping"])
def test_an_unavailable_cluster_at_any_call_is_repaired_by_reconciliation(customer, backend, monkeypatch, moment):
    for call in ("submit", "describe", "stop", "names", "capacity", "delete"):
        assert_repaired(customer, backend, monkeypatch, call, moment)


def assert_repaired(customer, backend, monkeypatch, call, moment):
    """Let one call of the backend fail during a reconciliation of a job in a state: the job ends, charged once."""
    job = customer.job()
    if moment != "queued":
        start(job)
    if moment in {"running", "stopping"}:
        backend.start(f"job-{job.pk}-1")
        reconciliation.reconcile_job(job_pk=job.pk)
    if moment == "stopping":
        orders.cancel_job(membership=customer.membership, job=job)
    # A stray run: no attempt 9 is stored.
    backend.submit(run_specs.run_spec(Attempt(job=job, number=9, granted_nodes=job.nodes)))

    def away(*_arguments, **_options):
        raise BackendUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(backend, call, away)
        reconciliation.reconcile()
        reconciliation.stop(job_pk=job.pk)
    reconciliation.reconcile()
    assert f"job-{job.pk}-9" not in backend.names(), call
    name = f"job-{job.pk}-1"
    if moment == "stopping":
        assert backend.describe(name).phase is RunPhase.STOPPING
    else:
        backend.start(name)
    backend.end(name, Outcome.COMPLETED)
    reconciliation.reconcile()
    assert states(job) == ["succeeded"], call
    assert Receipt.objects.filter(hold__order__job=job).count() == 1
    assert [each for each in backend.names() if each.startswith(f"job-{job.pk}-")] == [name]


def test_a_cancel_between_claim_and_submit_stops_the_run(customer, backend):
    for has_ended in (False, True):  # before the submission, the job stops or has already ended
        job = customer.job()
        attempt = lifecycle.claim(job=job, cluster_name="local")
        orders.cancel_job(membership=customer.membership, job=job)
        if has_ended:
            reconciliation.stop(job_pk=job.pk)
            assert states(job) == ["cancelled"]
        dispatch.submit(attempt)
        assert backend.describe(attempt.run_name).phase is RunPhase.STOPPING
        backend.end(attempt.run_name, Outcome.STOPPED)
        reconciliation.reconcile()
        assert states(job) == ["cancelled"]
        assert Receipt.objects.get(hold__order__job=job).total_minor == 0


def test_an_error_with_one_job_stops_neither_its_settlement_nor_the_reconciliation(
    customer, backend, monkeypatch, caplog
):
    without_status, without_output = customer.started(nodes=1), customer.started(nodes=1)
    for attempt in (without_status, without_output):
        backend.end(attempt.run_name, Outcome.COMPLETED)
    describe = backend.describe
    monkeypatch.setattr(backend, "describe", lambda name: 1 / 0 if name == without_status.run_name else describe(name))
    monkeypatch.setattr("jobs.telemetry.ingest", lambda **_options: 1 / 0)
    reconciliation.reconcile()
    assert states(without_status.job, without_output.job) == ["running", "succeeded"]
    assert Receipt.objects.count() == 1
    assert "could not be read" in caplog.text


def test_a_run_that_outlived_its_attempt_is_stopped(customer, backend):
    attempts = [customer.started(nodes=1), customer.started(nodes=1)]
    spec = backend.runs[attempts[0].run_name].spec
    for name in ("job-999999-1", "bench-1"):  # of a job that does not exist; not of this console
        backend.submit(spec.__class__(**{**vars(spec), "name": name, "checkpoint_key": ""}))
    # A live run is stopped however long ago its attempt ended.
    for attempt, age in zip(attempts, (timedelta(0), timedelta(days=90)), strict=True):
        finished_at = timezone.now() - age
        Attempt.objects.filter(pk=attempt.pk).update(finished_at=finished_at, reason=EndReason.NODE_LOST)
    reconciliation.reconcile()
    assert {backend.describe(attempt.run_name).phase for attempt in attempts} == {RunPhase.STOPPING}
    # The run "job-999999-1" is deleted, and "bench-1", which somebody else started, is left alone.
    assert backend.names() == sorted(["bench-1", *(attempt.run_name for attempt in attempts)])


def test_registry_credentials_reach_the_run_and_no_log(customer, backend, caplog):
    image = images.create_image(
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


def test_no_run_is_sold_that_has_no_room_for_its_results(customer):
    customer.quota(max_storage_bytes=storage_selectors.storage_used(customer.organization))
    with pytest.raises(QuotaExceeded, match="storage quota is used up"):
        customer.order()

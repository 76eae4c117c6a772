"""Stored objects and jobs: what an open job needs is not deleted, and what a run leaves counts against the quota."""

import math
from datetime import timedelta

import pytest
from django.utils import formats, timezone

from console.accounts.models import AuditEvent
from jobs import orders, reconciliation, results
from jobs.errors import ChoiceUnavailable
from jobs.models import Order
from jobs.purchase import parse
from runtime.specs import Outcome
from storage import garbage_collection, retention, selectors, sharing, trees
from storage.errors import InUse
from storage.models import Allocation, DatasetVersion, Workspace
from tests.factories.jobs import start
from tests.factories.storage import DatasetFactory, DatasetVersionFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def version(customer):
    """The dataset version that the customer's jobs read."""
    return DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))


def deletions(customer, version):
    """Each way of deleting something that a job may need."""
    return [
        lambda: retention.delete_dataset(dataset=version.dataset, user=customer.membership.user),
        lambda: retention.delete_version(version=version, user=customer.membership.user),
        lambda: retention.delete_workspace(workspace=customer.workspace, user=customer.membership.user),
    ]


def bring(customer, job, state):
    """Bring a queued job into another state."""
    if state == "queued":
        return
    start(job)
    if state == "starting":
        return
    attempt = job.attempts.get()
    customer.backend.start(attempt.run_name)
    reconciliation.reconcile_job(job_pk=job.pk)
    if state == "retrying":
        customer.end(attempt, Outcome.NODE_LOST)
    elif state == "stopping":
        orders.cancel_job(membership=customer.membership, job=job)


def test_nothing_is_deleted_that_an_open_job_needs(customer, version):
    customer.quota(max_running_nodes=100)
    states = ("queued", "starting", "running", "retrying", "stopping")
    jobs = [customer.job(datasets=["digits"], nodes=1) for _state in states]
    for job, state in zip(jobs, states, strict=True):
        bring(customer, job, state)
        job.refresh_from_db()
        assert not job.is_ended
    for delete in deletions(customer, version):
        with pytest.raises(InUse) as refused:
            delete()
        sentence = str(refused.value.message)
        for job in jobs:
            end = f"not started; runs for at most {math.ceil(job.deadline_seconds / 60)} min"
            if job.started_at and job.attempts.filter(finished_at=None).exists():
                ends_at = timezone.localtime(job.started_at + timedelta(seconds=job.deadline_seconds))
                end = f"until {formats.date_format(ends_at, 'DATETIME_FORMAT')} at the latest"
            assert f"#{job.pk} train.py ({end})" in sentence
    assert selectors.dataset_named(customer.organization, "digits").latest == version
    assert not Workspace.objects.exclude(deleted_at=None).exists()


def test_files_that_an_open_job_needs_are_never_removed(customer, version):
    """Even if their row says that they are deleted: an older Trainyard or a restored database may have left it so."""
    attempt = customer.started(datasets=["digits"])
    past = timezone.now() - 2 * retention.KEPT_AFTER_DELETION
    for rows in (DatasetVersion.objects.all(), Workspace.objects.all()):
        rows.update(deleted_at=past, kept_until=past)
    folders = [selectors.version_folder(version), customer.folder]
    garbage_collection.collect()
    for item in (version, customer.workspace):
        with pytest.raises(InUse):
            retention.remove(item=item)
    assert all(folder.exists() for folder in folders)
    customer.end(attempt, Outcome.COMPLETED)
    garbage_collection.collect()
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize("number", range(3), ids=["dataset", "version", "workspace"])  # in the order of `deletions`
def test_a_choice_deleted_between_the_check_and_the_order_is_not_bought(customer, version, monkeypatch, number):
    quote = customer.quote(datasets=["digits"])

    def then_delete(**options):
        purchase = parse(**options)
        deletions(customer, version)[number]()
        return purchase

    monkeypatch.setattr(orders, "parse", then_delete)
    with pytest.raises(ChoiceUnavailable):
        customer.place(quote)
    assert not Order.objects.exists()


def test_a_shared_dataset_is_used_and_kept_until_the_runs_of_others_have_ended(customer, other, version):
    share, code = sharing.create_share(dataset=version.dataset, user=None, label="Other")
    sharing.accept_share(organization=other.organization, user=None, code=code)
    quote = other.quote(datasets=["digits"])
    attempt = other.started(datasets=["digits"])
    sharing.revoke_share(share=share, user=None)
    for delete in deletions(customer, version)[:2]:  # the dataset and its version; the run does not use this workspace
        with pytest.raises(InUse) as refused:
            delete()
        sentence = str(refused.value.message)
        assert "A run of another organization (until " in sentence
        assert f"#{attempt.job_id}" not in sentence
        assert attempt.job.name not in sentence
    with pytest.raises(ChoiceUnavailable):
        other.place(quote)
    other.end(attempt, Outcome.COMPLETED)
    for delete in deletions(customer, version)[:2]:
        delete()


# --- Results of runs --------------------------------------------------------------------------------------------------


def ended_with_results(customer):
    """A job whose run left 5000 bytes in its folder, 200 in its checkpoints, 100 in its outputs, and 70 in its
    workspace.
    """
    attempt = customer.started()
    for folder, size in (
        (customer.backend.run_folder(attempt.run_name) / "run", 5000),
        (customer.backend.checkpoint_folder(results.checkpoint_key(attempt.job_id)), 200),
        (customer.backend.output_folder(results.checkpoint_key(attempt.job_id)), 100),
        (customer.folder, 70),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "left").write_bytes(b"x" * size)
    return customer.end(attempt, Outcome.COMPLETED)


def test_results_of_a_run_count_until_they_are_removed(customer, monkeypatch):
    attempt = customer.started()
    with pytest.raises(InUse):
        results.remove(job=attempt.job, user=None)
    assert attempt.run_name in customer.backend.runs
    customer.end(attempt, Outcome.COMPLETED)
    before = selectors.usage(customer.organization)
    job = ended_with_results(customer)
    reconciliation.delete_old_runs()  # it also counts the storage that no worker has counted
    allocation = Allocation.objects.get(key=results.allocation_key(job.pk))
    assert allocation.size_bytes == 5300
    results.count_storage(job.pk)  # measures the workspace too
    assert allocation.kept_until == job.finished_at + results.DEFAULT_RETENTION
    counted = selectors.usage(customer.organization)
    assert counted.size_bytes >= before.size_bytes + 5370
    with monkeypatch.context() as unreadable:
        unreadable.setattr(trees, "measure", lambda **_root: trees.Measurement(trees.Usage(1, 2), is_complete=False))
        results.count_storage(job.pk)
    assert selectors.usage(customer.organization) == counted, "an incomplete measurement lowers no count"
    delete = customer.backend.delete

    def delete_and_die(name):
        delete(name)
        raise SystemExit

    # Once the cluster does not list the run, nothing would repeat what a killed process has not done yet.
    with monkeypatch.context() as dying:
        dying.setattr(customer.backend, "delete", delete_and_die)
        with pytest.raises(SystemExit):
            results.remove(job=job, user=customer.membership.user)
    assert not customer.backend.checkpoint_folder(results.checkpoint_key(job.pk)).exists()
    left = selectors.usage(customer.organization)
    assert counted.size_bytes - left.size_bytes == 5300
    assert counted.entry_count - left.entry_count == 7, "three files and four folders"
    assert not Allocation.objects.filter(key=results.allocation_key(job.pk)).exists()
    results.remove(job=job, user=customer.membership.user)
    assert AuditEvent.objects.filter(action="job.results_removed", target=f"job:{job.pk}").exists()


def test_a_workspace_is_measured_as_runs_end_though_others_go_on(customer):
    customer.started()
    first, second = ended_with_results(customer), ended_with_results(customer)
    results.count_storage(first.pk)
    measured = Workspace.objects.get()
    assert measured.size_bytes >= 70
    (customer.folder / "more").write_bytes(b"x" * 1000)
    results.count_storage(second.pk)
    assert Workspace.objects.get().size_bytes == measured.size_bytes, "it was measured a moment before"
    Workspace.objects.update(measured_at=timezone.now() - results.MIN_MEASURE_INTERVAL)
    results.count_storage(second.pk)
    assert Workspace.objects.get().size_bytes == measured.size_bytes + 1000

"""Jobs that start from the checkpoints of an earlier job."""

import contextlib

import pytest

from billing.models import NodeSpec
from jobs import dispatch, locks, orders, reconciliation, results, selectors
from jobs.models import Job
from runtime.errors import InvalidSpec, NoCapacity
from runtime.specs import Outcome, Resources
from storage import selectors as storage
from storage.errors import InUse
from storage.models import Allocation
from storage.trees import ENTRY_BYTES
from tests.factories import jobs as factories

pytestmark = pytest.mark.django_db


def start(job):
    """Claim a job, copy its checkpoints as a worker does, and submit it. Return whether the cluster has it."""
    assert factories.start(job), "nodes are kept for it while its checkpoints are copied"
    attempt = job.attempts.last()
    dispatch.copy_checkpoints(attempt.pk)
    attempt.refresh_from_db()
    return attempt.finished_at is None and dispatch.submit(attempt)


def folder_of(customer, job):
    return customer.backend.checkpoint_folder(f"job-{job.pk}")


@pytest.fixture
def trained(customer):
    """An ended job with a checkpoint, and a link `latest` to it, as some frameworks create."""
    attempt = customer.started()
    folder = folder_of(customer, attempt.job)
    (folder / "epoch-3").mkdir(parents=True)
    (folder / "epoch-3" / "weights.pt").write_bytes(b"12345")
    (folder / "latest").symlink_to("epoch-3")
    return customer.end(attempt, Outcome.COMPLETED)


def test_the_first_attempt_starts_with_a_copy(customer, trained):
    used = storage.storage_used(customer.organization)
    job = customer.job(from_checkpoint=trained.pk)
    with pytest.raises(InUse, match="starts from the checkpoints"):
        results.remove(job=trained, user=None)
    start(job)
    job.refresh_from_db()
    copy = folder_of(customer, job)
    assert (copy / "latest" / "weights.pt").read_bytes() == b"12345"
    assert job.checkpoints_copied_at
    assert storage.storage_used(customer.organization) == used + 5 + 4 * ENTRY_BYTES  # 5 bytes in 4 files and folders
    assert not Allocation.objects.filter(kind=Allocation.Kinds.UPLOAD).exists(), "a finished copy needs no reservation"
    # What the run writes stays, through every further attempt and without the earlier job.
    (copy / "epoch-3" / "weights.pt").write_bytes(b"67890")
    assert (folder_of(customer, trained) / "epoch-3" / "weights.pt").read_bytes() == b"12345"
    results.remove(job=trained, user=None)
    attempt = job.attempts.get()
    dispatch.submit(attempt)  # a repeated submission copies nothing again
    customer.backend.start(attempt.run_name)
    customer.end(attempt, Outcome.NODE_LOST)
    start(Job.objects.get(pk=job.pk))
    assert (copy / "epoch-3" / "weights.pt").read_bytes() == b"67890"
    assert customer.end(job.attempts.last(), Outcome.COMPLETED).is_ended


def test_a_copy_keeps_its_nodes_free_and_delays_no_other_job(customer, trained, sent_tasks, monkeypatch):
    customer.backend.total = Resources(cpus=float(NodeSpec.objects.get(name="nano").cpus) * 3, memory_mib=65536)
    copied, small, large = customer.job(from_checkpoint=trained.pk), customer.job(nodes=1), customer.job(nodes=2)
    sent_tasks.clear()
    for _twice in range(2):
        dispatch.dispatch_queue()
    attempt = copied.attempts.get()
    assert sent_tasks[:2] == [("copy_checkpoints", attempt.pk)] * 2, "each pass requests the copy, in case one was lost"
    # Of the three nodes, two are kept for the copied job.
    assert (small.attempts.count(), large.attempts.count()) == (1, 0)
    sentence = selectors.waiting_for(selectors.job_for(customer.organization, copied.pk))
    assert f"The checkpoints of job #{trained.pk} are copied." in sentence
    with monkeypatch.context() as patch:
        patch.setattr(locks, "copies_lock", lambda: contextlib.nullcontext(False))  # another process holds it
        dispatch.copy_checkpoints(attempt.pk)
    assert not folder_of(customer, copied).exists()
    sent_tasks.clear()
    dispatch.copy_checkpoints(attempt.pk)
    assert sent_tasks == [("dispatch", "default")]
    dispatch.dispatch_queue()
    attempt.refresh_from_db()
    assert attempt.submitted_at
    assert customer.backend.submissions.count(attempt.run_name) == 1


def test_a_job_that_is_cancelled_during_the_copy_leaves_no_copy(customer, trained, monkeypatch):
    job = customer.job(from_checkpoint=trained.pk)
    assert factories.start(job)
    used = storage.storage_used(customer.organization)
    fill = customer.backend.fill_checkpoints

    def fill_and_cancel(key, copy):
        fill(key, copy)
        orders.cancel_job(membership=customer.membership, job=job)

    monkeypatch.setattr(customer.backend, "fill_checkpoints", fill_and_cancel)
    dispatch.copy_checkpoints(job.attempts.get().pk)
    reconciliation.reconcile_job(job_pk=job.pk)
    job.refresh_from_db()
    assert (job.reason, folder_of(customer, job).exists()) == ("cancelled", False)
    assert storage.storage_used(customer.organization) == used


def test_a_copy_that_was_interrupted_begins_again(customer, trained):
    job = customer.job(from_checkpoint=trained.pk)
    (folder_of(customer, job) / "epoch-3").mkdir(parents=True)
    (folder_of(customer, job) / "epoch-3" / "weights.pt").write_bytes(b"12")
    start(job)
    assert (folder_of(customer, job) / "epoch-3" / "weights.pt").read_bytes() == b"12345"


@pytest.mark.parametrize("cancels", [False, True])
def test_a_console_that_ends_while_a_copy_is_deleted_leaves_nothing_of_it(customer, trained, monkeypatch, cancels):
    used = storage.storage_used(customer.organization)
    job = customer.job(from_checkpoint=trained.pk)
    customer.backend.refuses[f"job-{job.pk}-1"] = NoCapacity("full")

    def end_before_deleting(_key):
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(customer.backend, "delete_shared", end_before_deleting)
        with pytest.raises(SystemExit):
            start(job)
    attempt = job.attempts.get()
    if cancels:
        orders.cancel_job(membership=customer.membership, job=job)
        reconciliation.reconcile_job(job_pk=job.pk)
        monkeypatch.setattr(results, "is_expired", lambda expired: expired.pk == job.pk)
        reconciliation._clean_up_runs(attempt.backend)
        assert not folder_of(customer, job).exists()
        assert not Allocation.objects.filter(key=f"job:{job.pk}").exists()
        return
    customer.backend.refuses.clear()
    customer.quota(max_storage_bytes=used + 5 + 4 * ENTRY_BYTES)  # room for one copy
    assert dispatch.submit(attempt), "it waits for a new copy"
    dispatch.copy_checkpoints(attempt.pk)
    assert dispatch.submit(attempt)
    assert (folder_of(customer, job) / "latest" / "weights.pt").read_bytes() == b"12345"


def test_a_run_that_does_not_start_leaves_no_copy(customer, trained):
    used = storage.storage_used(customer.organization)
    full, refused = customer.job(from_checkpoint=trained.pk), customer.job(from_checkpoint=trained.pk)
    for job, fault in ((full, NoCapacity("full")), (refused, InvalidSpec("no", field="mounts"))):
        customer.backend.refuses[f"job-{job.pk}-1"] = fault
        assert not start(job)
        assert not folder_of(customer, job).exists()
        assert storage.storage_used(customer.organization) == used
    customer.backend.refuses.clear()
    assert start(Job.objects.get(pk=full.pk)), "a job without capacity is back in the queue"
    assert (folder_of(customer, full) / "latest").is_symlink()


@pytest.mark.parametrize("cause", ["deleted", "quota"])
def test_a_copy_that_fails_ends_the_job_at_no_charge(customer, trained, cause):
    job = customer.job(from_checkpoint=trained.pk)
    if cause == "deleted":
        customer.backend.delete_shared(f"job-{trained.pk}")
    else:
        # The copy has four files and folders; the quota has room for two.
        customer.quota(max_storage_bytes=storage.storage_used(customer.organization) + 2 * ENTRY_BYTES)
    assert not start(job)
    job.refresh_from_db()
    assert (job.reason, job.order.hold.metered_minor) == ("code_failed", 0)
    assert job.attempts.get().failure["data"] == {"field": "from_checkpoint"}
    assert not folder_of(customer, job).exists()


def test_an_unknown_open_empty_or_unreachable_job_is_refused_at_the_field(customer, other, trained, monkeypatch):
    foreign = other.end(other.started(), Outcome.COMPLETED)
    folder_of(other, foreign).mkdir(parents=True)
    (folder_of(other, foreign) / "theirs.pt").write_text("")
    running = customer.started().job
    empty = customer.end(customer.started(), Outcome.COMPLETED)
    for wrong in (foreign.pk, running.pk, empty.pk, 2**62, 0, -1, "x", True, 2**64):
        assert list(customer.refusals(from_checkpoint=wrong)) == ["from_checkpoint"]
    monkeypatch.setattr(type(customer.backend), "shares_storage", False)
    assert "does not share" in customer.refusals(from_checkpoint=trained.pk)["from_checkpoint"]


def test_the_copy_of_a_job_that_never_ran_is_deleted_when_its_retention_is_over(customer, trained, monkeypatch):
    job = customer.job(from_checkpoint=trained.pk)
    attempt = dispatch.claim(job)
    dispatch.copy_checkpoints(attempt.pk)
    customer.backend.available = False
    dispatch.submit(attempt)  # does not reach the cluster
    customer.backend.available = True
    orders.cancel_job(membership=customer.membership, job=job)
    reconciliation.reconcile_job(job_pk=job.pk)
    results.count_storage(job.pk)  # creates the allocation, whose deletion is tested below
    assert folder_of(customer, job).exists()
    monkeypatch.setattr(results, "is_expired", lambda expired: expired.pk == job.pk)
    reconciliation._clean_up_runs(attempt.backend)
    assert not folder_of(customer, job).exists()
    assert not Allocation.objects.filter(key=f"job:{job.pk}").exists()

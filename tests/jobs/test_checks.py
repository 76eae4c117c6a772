import json
import time
from datetime import timedelta

import pytest
from django.utils import timezone

from billing.models import Hold, Receipt
from console.accounts.errors import InvalidInput, ServiceInactive
from jobs import activation, checks, dispatch, orders
from jobs.errors import QuotaExceeded
from jobs.models import Job
from jobs.states import JobState
from runtime.specs import Outcome
from tests.factories.storage import DatasetFactory, DatasetVersionFactory

GOOD = {
    "environment": {}, "python": {"version": "3.11.7", "cpus": 2}, "names": {},
    "workspace": {"free_bytes": 5 << 30}, "checkpoint_dir": {"free_bytes": 5 << 30}, "run_dir": {"free_bytes": 5 << 30},
    "framework": {"framework": "torch", "version": "2.13.0", "device": "cpu"}, "meeting": {},
    "sum": {"ranks": 2, "milliseconds": 3.5}, "broadcast": {}, "clock": {"at": 1000.0},
}  # fmt: skip


def bought(customer, **changes):
    data = {"image": "pytorch", "node_spec": "nano", "nodes": 2} | changes
    return checks.place_check(membership=customer.membership, data=data).job


def running(customer, **changes):
    job = bought(customer, **changes)
    dispatch.start(job)
    return job, job.attempts.get()


def tell(customer, attempt, rank, **changes):
    """A rank's report, as `runtime.launcher.smoke` writes it; a change of None leaves the finding out."""
    findings = [
        {"name": name, "ok": True, "data": data, "error": ""} | changes.get(name, {})
        for name, data in GOOD.items()
        if changes.get(name, {}) is not None
    ]
    findings += changes.get("more", [])
    folder = customer.backend.run_folder(attempt.run_name) / "run" / "check"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "node": rank, "findings": findings}))


def items(job):
    return {item.name: item for item in checks.checklist(job)}


def test_a_check_is_bought_run_and_receipted_at_nothing(customer, backend):
    job, attempt = running(customer)
    spec = backend.runs[attempt.run_name].spec
    assert (spec.builtin_script, spec.script, spec.nodes, spec.deadline_seconds) == ("smoke", "", 2, 300)
    assert customer.wallet.held_minor == 0
    began = time.time() - 100
    backend.start(attempt.run_name, at=began)
    backend.end(attempt.run_name, Outcome.COMPLETED, at=began + 60)
    dispatch.reconcile()
    job.refresh_from_db()
    assert job.state == JobState.SUCCEEDED
    assert Receipt.objects.get().total_minor == 0
    assert Hold.objects.get().state == Hold.States.RELEASED
    assert customer.wallet.available_minor == 100_000


def test_it_needs_no_money(customer):
    customer.wallet.entries.model.objects.none()
    poor = type(customer)(customer.backend, balance_minor=0)
    assert bought(poor).state == JobState.QUEUED


def test_an_organization_has_so_many_a_day(customer):
    customer.quota(max_checks_per_day=2)
    first = bought(customer)
    bought(customer)
    with pytest.raises(QuotaExceeded, match="2 free checks"):
        bought(customer)
    Job.objects.filter(pk=first.pk).update(queued_at=timezone.now() - timedelta(hours=25))
    bought(customer)


def test_the_same_key_buys_once(customer):
    data = {"image": "pytorch", "node_spec": "nano", "nodes": 1}
    placed = [checks.place_check(membership=customer.membership, data=data, idempotency_key="k").pk for _ in range(2)]
    assert placed[0] == placed[1]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image": "nothing"}, "image"), ({"node_spec": ""}, "node_spec"), ({"nodes": 0}, "nodes"),
        ({"nodes": 99}, "nodes"), ({"framework": "horovod"}, "image"), ({"datasets": ["none"]}, "datasets"),
        ({"workspace": "none"}, "workspace"), ({"workers_per_node": 999}, "workers_per_node"),
    ],
    ids=str,
)  # fmt: skip
def test_what_can_not_be_is_told_at_its_field(customer, changes, field):
    with pytest.raises(InvalidInput) as caught:
        bought(customer, **changes)
    assert field in caught.value.fields


def test_without_the_service_there_is_none(customer):
    activation.deactivate(membership=customer.membership)
    with pytest.raises(ServiceInactive):
        bought(customer)


def test_a_check_can_be_cancelled(customer):
    job, _attempt = running(customer)
    assert orders.cancel_job(membership=customer.membership, job=job).state == JobState.STOPPING


# --- What it found ----------------------------------------------------------------------------------------------------


def test_all_is_well(customer):
    job, attempt = running(customer)
    assert all(item.ok is None for item in checks.checklist(job))
    for rank in range(2):
        tell(customer, attempt, rank)
    found = items(job)
    assert all(item.ok for item in found.values()), found
    assert found["framework"].detail == "torch 2.13.0, cpu"
    assert found["sum"].detail == "All 2 ranks add up; 4 MiB take 3.5 ms."
    assert found["workspace"].detail == "Writable; 5 GiB are free."
    assert "dataset" not in found


def test_a_fault_is_told_with_its_rank_and_what_to_do(customer):
    job, attempt = running(customer)
    tell(customer, attempt, 0)
    broken = {"ok": False, "error": "ImportError: no module named torch", "data": {}}
    tell(customer, attempt, 1, framework=broken, meeting=None, sum=None, broadcast=None, clock=None)
    found = items(job)
    assert found["framework"].ok is False
    assert found["framework"].detail == "Rank 1: ImportError: no module named torch"
    assert "Install it there" in found["framework"].remedy
    assert found["meeting"].ok is None
    assert found["python"].ok


def test_clocks_apart_and_little_room_are_faults(customer):
    job, attempt = running(customer)
    tell(customer, attempt, 0)
    tell(customer, attempt, 1, clock={"data": {"at": 1005.0}}, run_dir={"data": {"free_bytes": 10}})
    found = items(job)
    assert found["clock"].ok is False
    assert "5000 ms" in found["clock"].detail
    assert found["run_dir"].ok is False


def test_datasets_are_listed_with_their_files(customer):
    DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))
    job, attempt = running(customer, datasets="digits")
    assert customer.backend.runs[attempt.run_name].spec.datasets == ("digits",)
    for rank in range(2):
        data = {"name": "digits", "files": 4, "bytes": 100}
        tell(customer, attempt, rank, more=[{"name": "dataset", "ok": True, "data": data, "error": ""}])
    assert items(job)["dataset"].detail == "digits: 4 files"


def test_a_part_that_the_run_did_not_come_to_says_so_once_it_has_ended(customer, backend):
    job, attempt = running(customer)
    tell(customer, attempt, 0)
    backend.end(attempt.run_name, Outcome.CODE_FAILED)
    dispatch.reconcile()
    job.refresh_from_db()
    assert items(job)["sum"].ok is None
    assert items(job)["sum"].detail == "Not every rank came to this."


@pytest.mark.parametrize(
    "text",
    ["", "null", "[1]", "{", '{"findings": 3}', '{"findings": [1, {"name": ["x"], "ok": 1, "data": 7}]}', "[" * 10**5],
)
def test_a_hostile_report_breaks_nothing(customer, text, tmp_path):
    job, attempt = running(customer)
    folder = customer.backend.run_folder(attempt.run_name) / "run" / "check"
    folder.mkdir(parents=True)
    (folder / "rank-0.json").write_text(text)
    (tmp_path / "secret.json").write_text(json.dumps({"findings": [{"name": "python", "ok": False, "error": "leak"}]}))
    (folder / "rank-1.json").symlink_to(tmp_path / "secret.json")
    assert all(item.ok is None for item in checks.checklist(job))

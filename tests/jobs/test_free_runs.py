"""Free runs: checks of an image, and free estimates that measure before the first purchase."""

import json
import shutil
import time
from datetime import timedelta

import pytest
from django.utils import timezone, translation

from billing.models import BillingPolicy, Hold, Receipt, TopUp
from console.accounts.roles import Role
from console.core.errors import InvalidInput, ServiceInactive
from jobs import activation, checks, free_estimates, orders, reconciliation
from jobs.errors import IdempotencyConflict, QuotaExceeded
from jobs.models import Job
from jobs.selectors import title_of
from jobs.states import JobState
from runtime.specs import Outcome
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import TopUpFactory
from tests.factories.jobs import Customer, start
from tests.factories.storage import DatasetFactory, DatasetVersionFactory, ImageFactory

GOOD = {
    "environment": {}, "python": {"version": "3.11.7", "cpus": 2}, "names": {},
    "workspace": {"free_bytes": 5 << 30}, "checkpoint_dir": {"free_bytes": 5 << 30},
    "output_dir": {"free_bytes": 5 << 30}, "run_dir": {"free_bytes": 5 << 30},
    "framework": {"framework": "torch", "version": "2.13.0", "device": "cpu"}, "meeting": {},
    "sum": {"ranks": 2, "milliseconds": 3.5}, "broadcast": {}, "clock": {"at": 1000.0},
}  # fmt: skip
"""The findings of a rank on which every step of the check works, by step."""


def place_check(customer, **changes):
    data = {"image": "pytorch", "node_spec": "nano", "nodes": 2} | changes
    return checks.place_check(membership=customer.membership, data=data).job


def running(customer, **changes):
    """Start a check; return its job and attempt."""
    job = place_check(customer, **changes)
    start(job)
    return job, job.attempts.get()


def report(customer, attempt, rank, **changes):
    """Write a rank's report, as `runtime.launcher.smoke` does; a change of None leaves the finding out."""
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
    """Return the items of the check's list by name."""
    return {item.name: item for item in checks.checklist(job)}


def second_organization(customer):
    """Return the same person as a customer of another organization."""
    second = Customer(customer.backend)
    second.membership.user = customer.membership.user
    second.membership.save()
    return second


def test_a_check_has_an_order_and_a_receipt_of_zero(customer, backend):
    job, attempt = running(customer)
    spec = backend.runs[attempt.run_name].spec
    assert (spec.builtin_script, spec.script, spec.nodes, spec.deadline_seconds) == ("smoke", "", 2, 300)
    assert customer.wallet.held_minor == 0
    began = time.time() - 100
    backend.start(attempt.run_name, at=began)
    backend.end(attempt.run_name, Outcome.COMPLETED, at=began + 60)
    reconciliation.reconcile()
    job.refresh_from_db()
    assert job.state == JobState.SUCCEEDED
    assert Receipt.objects.get().total_minor == 0
    assert Hold.objects.get().state == Hold.States.RELEASED
    assert customer.wallet.available_minor == 100_000


def test_free_runs_are_named_in_the_language_of_the_reader(customer):
    with translation.override("zh-hans"):
        check = place_check(customer)
        free_estimate = free_estimates.order_free_estimate(membership=customer.membership, data=customer.form()).job
        assert (title_of(check), title_of(free_estimate)) == ("镜像检查：pytorch", "免费试测：train.py")
    assert (
        (title_of(check), title_of(free_estimate))
        == ("Check of pytorch", "Free estimate of train.py")
        == (check.name, free_estimate.name)
    )


def test_checks_a_day_are_limited_per_organization_and_per_person(customer):
    customer.quota(max_checks_per_day=2)
    data = {"image": "pytorch", "node_spec": "nano", "nodes": 1}
    check = lambda **changes: checks.place_check(
        membership=customer.membership, data=data | changes, idempotency_key="k"
    )
    first = check().job
    assert check().job == first
    with pytest.raises(IdempotencyConflict):  # the key has ordered a check of one node
        check(nodes=2)
    with pytest.raises(IdempotencyConflict):  # the key has ordered something else
        free_estimates.order_free_estimate(membership=customer.membership, data=customer.form(), idempotency_key="k")
    place_check(customer)
    with pytest.raises(QuotaExceeded, match="The limit is 2 per organization"):
        place_check(customer)
    other = second_organization(customer)
    other.quota(max_checks_per_day=2)
    with pytest.raises(QuotaExceeded, match="per person across all organizations"):
        place_check(other)
    Job.objects.filter(pk=first.pk).update(queued_at=timezone.now() - timedelta(hours=25))
    place_check(customer)


def test_invalid_values_are_reported_at_their_fields(customer):
    ImageFactory(name="empty", frameworks=[])
    for changes, field in (
        ({"image": "nothing"}, "image"), ({"node_spec": ""}, "node_spec"), ({"nodes": 0}, "nodes"),
        ({"nodes": 99}, "nodes"), ({"framework": "horovod"}, "image"), ({"datasets": ["none"]}, "datasets"),
        ({"workspace": "none"}, "workspace"), ({"workers_per_node": 999}, "workers_per_node"),
        ({"image": "empty"}, "image"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput) as caught:
            place_check(customer, **changes)
        assert field in caught.value.fields, changes


def test_findings_without_a_fault_pass_every_item_of_the_checklist(customer):
    DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization, name="digits"))
    job, attempt = running(customer, datasets="digits")
    assert customer.backend.runs[attempt.run_name].spec.datasets == ("digits",)
    assert all(item.ok is None for item in checks.checklist(job))
    data = {"name": "digits", "files": 4, "bytes": 100}
    for rank in range(2):
        report(customer, attempt, rank, more=[{"name": "dataset", "ok": True, "data": data, "error": ""}])
    results = items(job)
    assert all(item.ok for item in results.values()), results
    assert {name: results[name].detail for name in ("framework", "sum", "workspace", "dataset")} == {
        "framework": "torch 2.13.0, cpu",
        "sum": "The sum over all 2 ranks is correct; 4 MiB take 3.5 ms.",
        "workspace": "Writable, 5 GiB free.",
        "dataset": "digits: 4 files",
    }


def test_a_failed_test_names_its_rank_and_the_remedy(customer):
    job, attempt = running(customer)
    report(customer, attempt, 0)
    report(customer, attempt, 1, clock={"data": {"at": 1005.0}}, run_dir={"data": {"free_bytes": 10}})
    results = items(job)
    assert (results["clock"].ok, results["run_dir"].ok) == (False, False)
    assert "5000 ms" in results["clock"].detail
    assert "dataset" not in results
    broken = {"ok": False, "error": "ImportError: no module named torch", "data": {}}
    report(customer, attempt, 1, framework=broken, meeting=None, sum=None, broadcast=None, clock=None)
    results = items(job)
    assert (results["framework"].ok, results["meeting"].ok, results["python"].ok) == (False, None, True)
    assert results["framework"].detail == "Rank 1: ImportError: no module named torch"
    assert "Install a version" in results["framework"].remedy
    customer.end(attempt, Outcome.CODE_FAILED)
    job.refresh_from_db()
    assert (items(job)["sum"].ok, items(job)["sum"].detail) == (None, "Not all ranks reached this step.")


def test_hostile_reports_are_ignored(customer, tmp_path):
    job, attempt = running(customer)
    folder = customer.backend.run_folder(attempt.run_name) / "run" / "check"
    folder.mkdir(parents=True)
    (tmp_path / "secret.json").write_text(json.dumps({"findings": [{"name": "python", "ok": False, "error": "leak"}]}))
    (folder / "rank-1.json").symlink_to(tmp_path / "secret.json")
    findings = '{"findings": [1, {"name": ["x"], "ok": 1, "data": 7}]}'
    for text in ("", "null", "[1]", "{", '{"findings": 3}', findings, "[" * 10**5):
        (folder / "rank-0.json").write_text(text)
        assert all(item.ok is None for item in checks.checklist(job)), text[:50]
    other_job, other_attempt = running(customer)
    report(customer, other_attempt, 0, python={"ok": False, "error": "leak"})
    shutil.rmtree(folder)
    folder.symlink_to(customer.backend.run_folder(other_attempt.run_name) / "run" / "check")
    assert items(other_job)["python"].detail == "Rank 0: leak"
    assert all(item.ok is None for item in checks.checklist(job)), "the check's code replaced its folder by a link"


def test_forged_values_of_a_report_do_not_break_the_checklist(customer):
    job, attempt = running(customer, nodes=1)
    for value in (float("inf"), float("nan"), -1e308, 10**400, True):
        report(customer, attempt, 0, clock={"data": {"at": value}}, run_dir={"data": {"free_bytes": value}})
        assert items(job)["clock"].ok is not None, value


# --- Free estimates ---------------------------------------------------------------------------------------------------


def order_free_estimate(customer, key="", **changes):
    return free_estimates.order_free_estimate(
        membership=customer.membership, data=customer.form(**changes), idempotency_key=key
    )


def left(customer):
    """Return how many free estimates the customer may order today."""
    return free_estimates.left_today(customer.organization, customer.membership.user)


def test_free_estimates_a_day_are_limited_per_organization_and_per_person(customer):
    BillingPolicy.objects.create(probes_per_day=2)
    quote = customer.quote()
    assert free_estimates.is_worthwhile(quote)  # and may be ordered
    assert len({order_free_estimate(customer, "key").pk for _ in range(3)}) == 1, "one key is one order"
    for changes in ({"lr": "0.5"}, {"nodes": 3}, {"arguments": ["--x"]}, {"environment": {"A": "1"}}):
        with pytest.raises(IdempotencyConflict):
            order_free_estimate(customer, "key", **changes)
    assert left(customer) == 1
    second = second_organization(customer)
    order_free_estimate(second)
    for each in (customer, second, second_organization(customer)):
        assert not free_estimates.is_worthwhile(each.quote())
        with pytest.raises(QuotaExceeded, match="per person across all organizations"):
            order_free_estimate(each)
    colleague = MembershipFactory(organization=customer.organization, role=Role.MEMBER)
    assert free_estimates.left_today(customer.organization, colleague.user) == 1  # the organization has used one of two
    Job.objects.update(queued_at="2020-01-01T00:00Z")  # so that none is of today
    assert free_estimates.is_worthwhile(quote)
    quote.basis = {"source": "history", "runs": 1}
    assert not free_estimates.is_worthwhile(quote), "earlier runs are more accurate"


def test_a_policy_may_ask_for_a_first_payment_or_allow_no_free_estimates(customer):
    BillingPolicy.objects.create(probes_need_payment=True)
    assert not free_estimates.is_worthwhile(customer.quote())
    with pytest.raises(QuotaExceeded, match="after your first payment"):
        order_free_estimate(customer)
    TopUpFactory(account=customer.wallet, state=TopUp.States.PAID)
    assert free_estimates.is_worthwhile(customer.quote())
    order_free_estimate(customer)
    BillingPolicy.objects.update(probes_per_day=0)
    with pytest.raises(QuotaExceeded):
        order_free_estimate(customer)


def test_an_error_is_reported_at_its_field(customer):
    for versions in (5, "1", {"a": 1}, ["x"], [None], [True], [0], [2**63]):
        with pytest.raises(InvalidInput) as refused:
            order_free_estimate(customer, lr="x", dataset_versions=versions)
        assert set(refused.value.fields) == {"lr", "dataset_versions"}, versions
    activation.deactivate(membership=customer.membership)
    with pytest.raises(ServiceInactive):
        order_free_estimate(customer)


def test_a_free_estimate_is_limited_and_its_rerun_is_paid(customer):
    BillingPolicy.objects.create(probes_per_day=2)
    job = order_free_estimate(customer, nodes=8, max_seconds=86_400, retries=3, ceiling_minor=5).job
    assert (job.nodes, job.deadline_seconds, job.retries, job.min_nodes) == (1, 60, 0, 0)
    order = orders.rerun(membership=customer.membership, job=job, changes={"ceiling_minor": None})
    assert (order.job.nodes, order.job.retries, order.quote.purchase["max_seconds"]) == (8, 3, 86_400), "as asked for"
    assert order.quote.ceiling_minor > 0
    assert "probe" not in order.quote.purchase
    assert left(customer) == 1, "the rerun is no free estimate"
    data = customer.form()
    del data["nodes"]  # which is always 1, so that requests may leave it out
    order = free_estimates.order_free_estimate(membership=customer.membership, data=data)
    assert order.job.nodes == 1

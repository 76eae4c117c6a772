"""The dispatcher killed anywhere, and many of it at once: a run is started once and charged once."""

import time

import pytest

from billing import charges
from billing.models import Receipt, Transaction
from console.accounts.models import Quota
from jobs import dispatch, lifecycle, orders, selectors
from jobs.models import Attempt, Job
from jobs.states import ACTIVE, JobState
from runtime.specs import Outcome
from tests.factories.jobs import Customer
from tests.jobs.queueing import states


class Crash(BaseException):
    """The process is killed here."""


def crashing(function, *, after):
    def crash(*arguments, **options):
        if after:
            function(*arguments, **options)
        raise Crash

    return crash


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "step",
    [
        "jobs.lifecycle.claim", "jobs.dispatch.submit", "jobs.dispatch.run_spec", "backend.submit",
        "jobs.dispatch._stop_if_unwanted", "jobs.lifecycle.transition",
    ],
)  # fmt: skip
def test_killed_while_it_starts_the_run_is_adopted_not_doubled(customer, backend, monkeypatch, step, after):
    job = customer.job()
    with monkeypatch.context() as patch:
        target, name = (backend, "submit") if step == "backend.submit" else step.rsplit(".", 1)
        if isinstance(target, str):
            target = {"jobs.lifecycle": lifecycle, "jobs.dispatch": dispatch}[target]
        patch.setattr(target, name, crashing(getattr(target, name), after=after))
        with pytest.raises(Crash):
            dispatch.dispatch_queue()
    dispatch.reconcile()
    dispatch.reconcile()
    assert Attempt.objects.count() == 1
    assert backend.names() == [f"job-{job.pk}-1"]
    began = time.time() - 400
    backend.start(f"job-{job.pk}-1", at=began)
    dispatch.reconcile()
    backend.end(f"job-{job.pk}-1", Outcome.COMPLETED, at=began + 400)
    dispatch.reconcile()
    dispatch.reconcile()
    assert states(job) == ["succeeded"]
    assert Receipt.objects.get().total_minor == 20
    assert Transaction.objects.filter(kind="charge").count() == 1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "step",
    [
        (dispatch.telemetry, "ingest_all"), (lifecycle, "observe"), (lifecycle, "end_attempt"), (charges, "settle"),
        (lifecycle, "note"), (lifecycle, "transition"), (lifecycle, "publish_state"),
    ],
    ids=lambda step: step[1],
)  # fmt: skip
def test_killed_while_it_ends_the_run_is_charged_once(customer, backend, monkeypatch, step, after):
    owner, name = step
    began = time.time() - 400
    attempt = customer.started(at=began)
    backend.end(attempt.run_name, Outcome.COMPLETED, at=began + 400)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crashing(getattr(owner, name), after=after))
        with pytest.raises(Crash):
            dispatch.reconcile_job(job_pk=attempt.job_id)
    job = Job.objects.get()
    assert (job.state == JobState.SUCCEEDED) == Receipt.objects.exists()
    assert (customer.wallet.held_minor == 0) == Receipt.objects.exists()
    dispatch.reconcile()
    dispatch.reconcile()
    assert states(job) == ["succeeded"]
    assert Receipt.objects.get().total_minor == 20
    assert customer.wallet.posted_minor == 100_000 - 20
    assert list(job.events.values_list("kind", flat=True)).count("settled") == 1


class TestAtOnce:
    pytestmark = pytest.mark.django_db(transaction=True)

    @pytest.fixture
    def customer(self, transactional_db, backend, hints):
        return Customer(backend)

    def test_many_workers_start_each_job_once_within_quota_and_room(self, customer, backend, together):
        customer.quota(max_running_nodes=6)
        jobs = [customer.job(nodes=nodes) for nodes in (4, 1, 1, 2, 1)]
        for _ in range(2):
            results = together(*[dispatch.dispatch_queue] * 4)
            assert results == [None] * 4
        running = Job.objects.filter(state__in=ACTIVE)
        assert sum(job.nodes for job in running) == 6
        assert Attempt.objects.count() == running.count() == len(backend.runs)
        assert states(*jobs[:3]) == ["starting"] * 3
        most = Quota.objects.get(organization=customer.organization).max_running_nodes
        assert most == 6

    def test_the_last_nodes_of_a_quota_are_taken_once(self, customer, backend, together):
        customer.quota(max_running_nodes=2)
        jobs = [customer.job() for _ in range(4)]
        results = together(*[lambda job=job: dispatch.start(Job.objects.get(pk=job.pk)) for job in jobs])
        assert sorted(results) == [False, False, False, True]
        assert Attempt.objects.count() == len(backend.runs) == 1

    def test_an_end_starts_the_next_at_once(self, customer, backend):
        customer.quota(max_running_nodes=2)
        attempt = customer.started()
        waits = customer.job()
        dispatch.dispatch_queue()
        assert states(waits) == ["queued"]
        backend.end(attempt.run_name, Outcome.COMPLETED)
        dispatch.reconcile_job(job_pk=attempt.job_id)
        assert states(attempt.job, waits) == ["succeeded", "starting"]

    def test_a_lost_cancelled_run_starts_the_next_at_once(self, customer, backend):
        customer.quota(max_running_nodes=2)
        attempt = customer.started()
        waits = customer.job()
        orders.cancel_job(membership=customer.membership, job=attempt.job)
        backend.lose(attempt.run_name)
        dispatch.stop(job_pk=attempt.job_id)
        assert states(attempt.job, waits) == ["cancelled", "starting"]

    def test_reconciling_and_ingesting_at_once_never_lock_each_other_out(self, customer, backend, together):
        attempt = customer.started()
        folder = backend.run_folder(attempt.run_name) / "run"
        for number in range(15):
            backend.write(attempt.run_name, f"epoch {number % 10} loss 0.{number}\n")
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(f'{{"epoch": {number % 10}, "other": {number}}}\n')
            calls = [
                lambda: dispatch.reconcile_job(job_pk=attempt.job_id),
                lambda: dispatch.telemetry.ingest(attempt=attempt),
                lambda: dispatch.telemetry.ingest(attempt=attempt),
            ]
            results = together(*calls)
            assert not [result for result in results if isinstance(result, Exception)], results
        curves, _last = selectors.metrics(attempt.job)
        assert [value for _step, value in curves["other"]] == list(range(15))
        assert len(curves["loss"]) == 15

import dataclasses
import time

import pytest
from django.utils import timezone

from billing.models import Entry, Receipt, Transaction
from jobs import dispatch, lifecycle, orders
from jobs.errors import StaleTransition
from jobs.models import Attempt, Job, JobEvent
from jobs.states import BILLED, END_STATE, EndReason, JobState
from runtime.specs import NodeStatus, Outcome, RunPhase, RunStatus
from tests.factories.jobs import Customer
from tests.jobs.receipts import kinds, lines, quantities


def test_a_transition_that_somebody_overtook_writes_nothing(customer):
    job = customer.job()
    stale = Job.objects.get(pk=job.pk)
    lifecycle.transition(job=job, to=JobState.STARTING)
    before = kinds(job)
    with pytest.raises(StaleTransition):
        lifecycle.transition(job=stale, to=JobState.STARTING)
    with pytest.raises(StaleTransition):
        lifecycle.transition(job=job, to=JobState.STARTING)
    assert kinds(job) == before
    assert stale.state == JobState.QUEUED


def test_nothing_follows_an_end(customer):
    job = customer.end(customer.started(), Outcome.COMPLETED)
    for state in JobState:
        with pytest.raises(StaleTransition):
            lifecycle.transition(job=job, to=state)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.COMPLETED, EndReason.COMPLETED),
        (Outcome.CODE_FAILED, EndReason.CODE_FAILED),
        (Outcome.OUT_OF_MEMORY, EndReason.OUT_OF_MEMORY),
        (Outcome.DISK_FULL, EndReason.DISK_FULL),
        (Outcome.STOPPED, EndReason.CANCELLED),
        (Outcome.TIME_LIMIT, EndReason.TIME_LIMIT),
    ],
)
def test_an_outcome_of_the_code_ends_the_job_and_is_charged(customer, outcome, reason):
    began = time.time() - 600
    job = customer.end(customer.started(at=began), outcome, at=began + 100, message="why")
    job.refresh_from_db()
    assert (job.state, job.reason) == (END_STATE[reason], reason)
    # 2 nodes of nano at 90 cents an hour for 100 seconds, exactly: 5 cents, which is also the least charge.
    assert lines(job)["time_used"]["amount_minor"] == 5
    assert job.order.hold.metered_minor == 5
    assert customer.wallet.posted_minor == 100_000 - 5
    assert customer.wallet.held_minor == 0
    assert customer.wallet.posted_minor == sum(
        Entry.objects.filter(account=customer.wallet).values_list("amount_minor", flat=True)
    )
    assert reason in BILLED
    assert (job.progress, job.epoch) == ((1.0, 10) if outcome is Outcome.COMPLETED else (0.0, 0))


def test_every_outcome_has_a_reason():
    assert set(lifecycle.REASON_OF) == set(Outcome)


@pytest.mark.parametrize("outcome", [Outcome.NODE_LOST, Outcome.PLATFORM_ERROR])
def test_a_platform_fault_is_retried_free_and_not_for_ever(customer, outcome):
    began = time.time() - 1000
    attempt = customer.started(at=began)
    job = attempt.job
    for number in range(1, lifecycle.MOST_ATTEMPTS):
        job = customer.end(attempt, outcome, at=began + 60 * number, message="A node went away.")
        job.refresh_from_db()
        assert (job.state, job.reason, job.waiting_code) == (JobState.QUEUED, "", "retry")
        assert job.started_at is None
        assert job.order.hold.metered_minor == 0
        assert not Receipt.objects.exists()
        assert customer.wallet.held_minor == job.order.quote.ceiling_minor
        assert dispatch.start(job)
        attempt = job.attempts.last()
        assert attempt.number == number + 1
        assert customer.backend.runs[attempt.run_name].spec.restart_count == number
        customer.backend.start(attempt.run_name, at=began + 60 * number + 30)
        dispatch.reconcile_job(job_pk=job.pk)
    job = customer.end(attempt, outcome, at=began + 500)
    job.refresh_from_db()
    assert (job.state, job.reason) == (JobState.FAILED, lifecycle.REASON_OF[outcome])
    assert Receipt.objects.get().total_minor == 0
    assert lines(job)["platform_fault"]["amount_minor"] == 0
    assert lines(job)["platform_fault"]["evidence"]["reason"] == lifecycle.REASON_OF[outcome]
    assert quantities(job, "platform_fault") == pytest.approx([60, 30, 500 - 150], abs=0.2)
    assert customer.wallet.available_minor == 100_000


def test_only_the_good_attempt_is_charged(customer):
    began = time.time() - 1000
    first = customer.started(at=began)
    job = customer.end(first, Outcome.NODE_LOST, at=began + 400)
    dispatch.start(job)
    second = job.attempts.last()
    customer.backend.start(second.run_name, at=began + 500)
    dispatch.reconcile_job(job_pk=job.pk)
    job = customer.end(second, Outcome.COMPLETED, at=began + 700)
    job.refresh_from_db()
    assert lines(job)["time_used"]["quantity"] == "0.111111"  # 2 nodes for 200 s
    assert lines(job)["platform_fault"]["quantity"] == "400.0"
    assert list(job.attempts.values_list("reason", flat=True)) == ["node_lost", "completed"]
    assert job.started_at.timestamp() == pytest.approx(began + 500, abs=0.01)
    assert [kind for kind in kinds(job) if kind not in {"ordered", "settled"}] == [
        "starting", "running", "queued", "starting", "running", "succeeded",
    ]  # fmt: skip


def test_times_are_the_backends(customer):
    began = time.time() - 2000
    attempt = customer.started(at=began)
    job = customer.end(attempt, Outcome.COMPLETED, at=began + 1234.5)
    job.refresh_from_db()
    attempt.refresh_from_db()
    assert job.started_at.timestamp() == attempt.started_at.timestamp() == pytest.approx(began, abs=0.01)
    assert job.finished_at.timestamp() == attempt.finished_at.timestamp() == pytest.approx(began + 1234.5, abs=0.01)


def test_the_receipt_shows_queue_and_start_at_nothing(customer):
    job = customer.job()
    Job.objects.filter(pk=job.pk).update(queued_at=timezone.now() - timezone.timedelta(seconds=100))
    dispatch.start(job)
    attempt = job.attempts.get()
    claimed = attempt.claimed_at.timestamp()
    customer.backend.start(attempt.run_name, at=claimed + 7)
    dispatch.reconcile_job(job_pk=job.pk)
    customer.end(attempt, Outcome.COMPLETED, at=claimed + 57)
    found = lines(job)
    assert list(found)[:2] == ["queue", "start"]
    assert float(found["queue"]["quantity"]) == pytest.approx(100, abs=5)
    assert found["start"]["quantity"] == "7.0"
    assert found["queue"]["amount_minor"] == found["start"]["amount_minor"] == 0
    assert "platform_fault" not in found


def test_a_run_that_never_ran_costs_nothing(customer):
    job = customer.job()
    dispatch.start(job)
    attempt = job.attempts.get()
    job = customer.end(attempt, Outcome.CODE_FAILED, message="no such module")
    assert job.state == JobState.FAILED
    assert job.detail == "no such module"
    assert Receipt.objects.get().total_minor == 0
    assert customer.wallet.available_minor == 100_000


def test_observing_again_and_late_changes_nothing(customer):
    began = time.time() - 100
    attempt = customer.started(at=began)
    running = customer.backend.describe(attempt.run_name)
    customer.end(attempt, Outcome.COMPLETED, at=began + 50)
    ended = customer.backend.describe(attempt.run_name)
    before = kinds(attempt.job), Transaction.objects.count()
    for status in (ended, running, ended):
        assert lifecycle.observe(attempt=attempt, status=status).state == JobState.SUCCEEDED
    failed = dataclasses.replace(ended, outcome=Outcome.CODE_FAILED)
    assert lifecycle.observe(attempt=attempt, status=failed).reason == EndReason.COMPLETED
    assert (kinds(attempt.job), Transaction.objects.count()) == before
    assert Receipt.objects.count() == 1


def test_a_status_of_an_earlier_attempt_does_not_touch_the_next(customer):
    first = customer.started(at=time.time() - 100)
    customer.end(first, Outcome.NODE_LOST)
    lost = customer.backend.describe(first.run_name)
    job = Job.objects.get()
    dispatch.start(job)
    lifecycle.observe(attempt=first, status=lost)
    job.refresh_from_db()
    assert job.state == JobState.STARTING
    assert job.attempts.filter(finished_at=None).count() == 1


def test_the_nodes_are_kept_as_the_backend_tells_them(customer):
    job = customer.job()
    dispatch.start(job)
    attempt = job.attempts.get()
    nodes = (NodeStatus(0, RunPhase.RUNNING, "10.0.0.1", 5.0), NodeStatus(1, RunPhase.STARTING))
    status = RunStatus(attempt.run_name, RunPhase.STARTING, nodes, submitted_at=4.0)
    assert lifecycle.observe(attempt=attempt, status=status).state == JobState.STARTING
    attempt.refresh_from_db()
    assert [node["phase"] for node in attempt.nodes] == ["running", "starting"]
    assert attempt.nodes[0]["address"] == "10.0.0.1"


def test_the_meter_shows_the_cost_so_far_and_never_more_than_the_ceiling(customer):
    attempt = customer.started(at=time.time() - 1800)
    hold = attempt.job.order.hold
    hold.refresh_from_db()
    assert hold.metered_minor == pytest.approx(90, abs=1)
    customer.backend.start(attempt.run_name)
    late = dataclasses.replace(customer.backend.describe(attempt.run_name), started_at=time.time() - 10**6, spans=())
    lifecycle.observe(attempt=attempt, status=late)
    hold.refresh_from_db()
    assert hold.metered_minor == hold.amount_minor == attempt.job.order.quote.ceiling_minor


def test_a_cancel_in_the_queue_ends_at_once_and_costs_nothing(customer):
    job = orders.cancel_job(membership=customer.membership, job=customer.job())
    assert (job.state, job.reason) == (JobState.CANCELLED, EndReason.CANCELLED)
    assert job.cancel_requested_at
    assert Receipt.objects.get().total_minor == 0
    assert customer.wallet.available_minor == 100_000
    assert kinds(job) == ["ordered", "cancelled", "settled"]
    assert job.events.get(kind="cancelled").actor == customer.membership.user


def test_a_cancel_while_it_runs_stops_and_charges_the_time(customer):
    attempt = customer.started(at=time.time() - 200)
    job = orders.cancel_job(membership=customer.membership, job=attempt.job)
    assert job.state == JobState.STOPPING
    job = customer.end(attempt, Outcome.STOPPED, at=time.time())
    assert (job.state, job.reason) == (JobState.CANCELLED, EndReason.CANCELLED)
    assert Receipt.objects.get().total_minor == pytest.approx(10, abs=1)


def test_a_run_that_completes_while_it_is_cancelled_has_completed(customer):
    attempt = customer.started(at=time.time() - 200)
    orders.cancel_job(membership=customer.membership, job=attempt.job)
    job = customer.end(attempt, Outcome.COMPLETED)
    assert (job.state, job.reason) == (JobState.SUCCEEDED, EndReason.COMPLETED)


def test_a_cancelled_run_that_the_platform_lost_is_cancelled_free_and_not_retried(customer):
    attempt = customer.started(at=time.time() - 200)
    orders.cancel_job(membership=customer.membership, job=attempt.job)
    job = customer.end(attempt, Outcome.NODE_LOST)
    job.refresh_from_db()
    assert (job.state, job.reason) == (JobState.CANCELLED, EndReason.CANCELLED)
    assert Receipt.objects.get().total_minor == 0
    assert lines(job)["platform_fault"]


def test_a_job_cancelled_while_it_starts_still_says_when_it_ran(customer):
    job = customer.job()
    dispatch.start(job)
    orders.cancel_job(membership=customer.membership, job=job)
    attempt = job.attempts.get()
    customer.backend.start(attempt.run_name, at=time.time() - 60)
    job = customer.end(attempt, Outcome.STOPPED)
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED
    assert job.finished_at - job.started_at > timezone.timedelta(seconds=59)


def test_what_is_given_back_leaves_no_attempt(customer):
    job = customer.job()
    attempt = lifecycle.claim(job=job, backend="local")
    lifecycle.give_back(attempt=attempt, waiting_code="capacity", waiting_data={})
    job.refresh_from_db()
    assert (job.state, job.waiting_code) == (JobState.QUEUED, "capacity")
    assert not Attempt.objects.exists()
    assert lifecycle.claim(job=job, backend="local").number == 1


def test_what_somebody_else_handed_over_is_not_given_back(customer):
    job = customer.job()
    attempt = lifecycle.claim(job=job, backend="local")
    Attempt.objects.update(submitted_at=timezone.now())
    lifecycle.give_back(attempt=attempt, waiting_code="capacity", waiting_data={})
    job.refresh_from_db()
    assert job.state == JobState.STARTING
    assert Attempt.objects.exists()


def test_giving_back_a_cancelled_attempt_ends_the_job(customer):
    job = customer.job()
    attempt = lifecycle.claim(job=job, backend="local")
    orders.cancel_job(membership=customer.membership, job=job)
    lifecycle.give_back(attempt=attempt, waiting_code="capacity", waiting_data={})
    lifecycle.give_back(attempt=attempt, waiting_code="capacity", waiting_data={})
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED
    assert Receipt.objects.get().total_minor == 0


def test_a_fixed_price_is_charged_whole_when_it_completes_and_by_time_when_not(customer):
    began = time.time() - 3000
    done = customer.end(customer.started(product="fixed", at=began), Outcome.COMPLETED, at=began + 1)
    price = done.order.quote.ceiling_minor
    assert Receipt.objects.get().total_minor == price
    failed = customer.end(customer.started(product="fixed", at=began), Outcome.CODE_FAILED, at=began + 1)
    assert Receipt.objects.get(hold__order__job=failed).total_minor <= price


class TestAtOnce:
    pytestmark = pytest.mark.django_db(transaction=True)

    @pytest.fixture
    def customer(self, transactional_db, backend, hints):
        return Customer(backend)

    def test_one_of_many_claims_wins(self, customer, together):
        job = customer.job()
        calls = [lambda: lifecycle.claim(job=Job.objects.get(pk=job.pk), backend="local")] * 4
        results = together(*calls)
        assert sum(isinstance(result, Attempt) for result in results) == 1
        assert sum(isinstance(result, StaleTransition) for result in results) == 3
        assert Attempt.objects.count() == 1

    def test_the_end_is_seen_by_many_and_charged_once(self, customer, together):
        for _ in range(3):
            attempt = customer.started(at=time.time() - 500)
            customer.backend.end(attempt.run_name, Outcome.COMPLETED)
            status = customer.backend.describe(attempt.run_name)
            results = together(*[lambda a=attempt, s=status: lifecycle.observe(attempt=a, status=s)] * 4)
            assert all(isinstance(result, Job) for result in results), results
            assert JobEvent.objects.filter(job=attempt.job, kind="settled").count() == 1
        assert Receipt.objects.count() == 3
        assert customer.wallet.held_minor == 0

    def test_a_cancel_and_an_end_at_once(self, customer, together):
        for _ in range(5):
            attempt = customer.started(at=time.time() - 500)
            customer.backend.end(attempt.run_name, Outcome.COMPLETED)
            status = customer.backend.describe(attempt.run_name)
            together(
                lambda a=attempt: orders.cancel_job(membership=customer.membership, job=a.job),
                lambda a=attempt, s=status: lifecycle.observe(attempt=a, status=s),
            )
            job = Job.objects.get(pk=attempt.job_id)
            assert job.state in {JobState.SUCCEEDED, JobState.STOPPING}
            dispatch.reconcile_job(job_pk=job.pk)
            job.refresh_from_db()
            assert job.state == JobState.SUCCEEDED
            assert JobEvent.objects.filter(job=job, kind="settled").count() == 1

"""Orders, sweeps, holds, top-ups, settlements, cancels and retries in random order and at once, on a real PostgreSQL.

Hypothesis calls the services themselves; the cluster is a fake that keeps its contract, the payment provider is the
sandbox behind the real client (`tests.payers`). Workers crash at any statement, events and messages come in any order.
What must hold is read by SQL after every step (`tests.books`), not from the objects that the services return.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from math import floor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from billing import charges, credit, events, gateway, pricebooks
from billing.errors import InsufficientFunds
from billing.models import CreditGrant, Hold, Receipt, TopUp
from billing.pricing import Usage
from billing.selectors import wallet
from console.accounts.models import Membership
from console.core import enqueue
from jobs import activation, catalogue, clusters, dispatch, lifecycle, orders, reconciliation
from jobs.errors import AlreadyEnded, StaleTransition
from jobs.lifecycle import MAX_PLATFORM_FAULTS
from jobs.models import Attempt, Job, Order, Sweep
from jobs.states import BILLED, EndReason, JobState
from jobs.sweeps import progress
from jobs.sweeps.purchase import stop_sweep
from runtime.specs import Outcome, RunPhase
from storage.models import Workspace
from storage.selectors import workspace_folder
from tests.books import BROKEN_BOOKS, BROKEN_ORDERS, broken
from tests.crashes import crash_at
from tests.factories.accounts import MembershipFactory
from tests.factories.jobs import Customer, start
from tests.fakes import FakeBackend
from tests.payers import PROVIDERS, WRONG, Payers
from tests.provider import GOOD
from tests.racing import raised, together
from tests.sweepers import Sweepers

MESSAGES: list[tuple[Any, tuple[Any, ...]]] = []
"""Messages to workers that were not delivered yet: a task and its arguments."""
CLUSTER: list[FakeBackend] = []
"""The cluster of the running example."""


def node_seconds(attempt: Attempt) -> Fraction:
    """Return the node time of an attempt that is charged.

    Time after the last progress of a hung attempt is free, and so is time after the grace period of a cancelled one.
    If the cluster took more than twice the grace period to end it, the grace period is free, too.
    """
    last = attempt.finished_at.timestamp()
    if attempt.job.cancel_requested_at is not None:
        requested = attempt.job.cancel_requested_at.timestamp()
        is_late = last > requested + 2 * dispatch.GRACE_SECONDS
        last = requested if is_late else min(last, requested + dispatch.GRACE_SECONDS)
    if attempt.reason == EndReason.HUNG:
        last = min(last, attempt.progress_at.timestamp())
    total = Fraction(0)
    for span in attempt.spans:
        began, ended = (datetime.fromtimestamp(at, UTC) for at in (span["started_at"], min(span["finished_at"], last)))
        total += span["nodes"] * max(Fraction(0), Fraction(str((ended - began).total_seconds())))
    return total


class Simulation(Sweepers, RuleBasedStateMachine):
    """Two customers, one cluster, and everything that may happen to their money.

    The order of threads decides results, so no draw depends on a result: a rule draws numbers, which count jobs,
    sweeps or payments from the newest.
    """

    customers, threads, which = Payers.customers, Payers.threads, Payers.which

    @initialize(balances=st.tuples(st.integers(0, 1500), st.integers(500, 3000)))
    def begin(self, balances: tuple[int, int]) -> None:
        self.now = time.time()
        self.cluster = CLUSTER[0]
        self.cluster.runs.clear()
        self.cluster.available = self.cluster.keeps_deadlines = True
        self.cluster.clock = lambda: self.now
        MESSAGES.clear()
        catalogue.seed()
        self.prices_change(Decimal(90))  # minor units for an hour of a node
        self.members: list[Membership] = []
        self.open_payments()
        self.granted: dict[int, int] = {}
        self.bought: dict[str, uuid.UUID] = {}
        self.jobs: list[int] = []
        for balance in balances:
            member = MembershipFactory()
            activation.activate(membership=member, accept_terms=True)
            folder = workspace_folder(Workspace.objects.get(organization=member.organization))
            (folder / "train.py").write_text("print('epoch 1 loss 0.5')\n")
            self.members.append(member)
            self.granted[member.organization_id] = balance
            if balance:
                self.grant(member, balance)
        for customer in (0, 1):  # each saves a card, for automatic top-ups
            self.begin_top_up(customer, 500, save=True)
            self.pay(0, GOOD)
        self.events_arrive(seed=0, share=1, copies=1)

    def play_script(self) -> None:
        """Apply rules in a fixed order, since Hypothesis may leave out any of them."""
        # Customers pay, and buy runs.
        for customer in (0, 1, 1):
            self.begin_top_up(customer, 500, save=True)
            self.pay(0, GOOD)
            self.events_arrive(seed=customer, share=1, copies=3)
            events.fetch_undelivered()
            events.apply_waiting()
            self.buy(customer=customer, product="metered", nodes=2, seconds=1800, resilience={"retries": 2}, threads=2)
        # Events do not match their top-ups.
        for wrong in WRONG:
            self.begin_top_up(0, 500, save=False)
            self.something_is_wrong_with_an_event(0, wrong, off=0)
            self.something_is_wrong_with_an_event(0, wrong, off=900)
        # Money goes back, and cards are charged automatically. Numbers of payments count from the newest.
        self.refund(4, 200, threads=2)
        self.refund(5, 500, threads=1)
        self.switch_automatic_on(0, threshold=3000, amount=500)
        self.the_network_fails("charge", arrives=True, customer=0)
        self.work_on_payments("charge", threads=2)
        self.customer_is_deleted(0)
        self.begin_top_up(0, 500, save=True)
        self.dispute(1)
        self.events_arrive(seed=7, share=1, copies=2)
        self.end_dispute(0, won=True)
        self.events_arrive(seed=9, share=1, copies=2)
        self.bank_reopens_a_dispute(0)
        self.events_arrive(seed=8, share=1, copies=2)
        # Runs end. The first argument counts jobs from the newest.
        self.end_run(2, Outcome.COMPLETED, 700, observers=2)
        self.settle_again(2, 100, completed=True, threads=2)
        self.end_run(1, Outcome.NODE_LOST, 500, observers=2)
        self.cluster.keeps_deadlines = False  # so the run lasts 9000 s, of which its customer bought 1800
        self.end_run(1, Outcome.CODE_FAILED, 9000, observers=1)
        self.cluster.keeps_deadlines = True
        self.cancel(0, threads=2, beside=True)
        # A sweep loses a node and a worker, and is stopped.
        self.buy_sweep(customer=1, trials=6, concurrency=2, share=None, threads=2)
        self.end_run(0, Outcome.COMPLETED, 300, observers=2)
        self.advance(0, threads=2)
        self.end_run(0, Outcome.NODE_LOST, 100, observers=1)
        self.a_worker_of_sweeps_dies(0, statement=30)
        self.end_run(0, Outcome.COMPLETED, 100, observers=1)
        self.a_sweep_is_stopped_just_before_its_next_trial_is_ordered()
        self.stop(0, threads=2)

    def a_sweep_is_stopped_just_before_its_next_trial_is_ordered(self) -> None:
        """Stop it when the worker asks for the trial's price, before it locks the sweep."""
        sweep, pricing_inputs = Sweep.objects.latest("pk"), orders.pricing_inputs
        stops = []

        def stop_and_continue(*inputs: Any) -> Any:
            stops.append(stop_sweep(membership=self.members[1], sweep=sweep))
            return pricing_inputs(*inputs)

        count = sweep.trials.count()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(orders, "pricing_inputs", stop_and_continue)
            progress.advance(sweep_pk=sweep.pk)
        assert (len(stops), sweep.trials.count()) == (1, count)

    def grant(self, member: Membership, amount: int) -> None:
        given = CreditGrant(organization=member.organization, amount_minor=amount, reason="A test")
        credit.grant(credit_grant=given, user=member.user, account=wallet(member.organization))

    # What the cluster does

    @rule(seconds=st.integers(1, 4000))
    def time_passes(self, seconds: int) -> None:
        """Let time pass at the cluster, whose clock is not the console's."""
        self.now += seconds

    def run_of(self, job: int) -> str | None:
        attempt = Attempt.objects.filter(job_id=job, finished_at=None).last()
        return attempt.run_name if attempt and attempt.run_name in self.cluster.runs else None

    @rule(
        which=which,
        ends=st.sampled_from([True, True, False]),
        outcome=st.sampled_from([Outcome.COMPLETED, *Outcome]),
        seconds=st.integers(0, 9000),
        quiet=st.integers(0, 9000),
        loses=st.booleans(),
        observers=st.integers(0, 3),
    )
    def run_goes_on(
        self, *, which: int, ends: bool, outcome: Outcome, seconds: int, quiet: int, loses: bool, observers: int
    ) -> None:
        """Submit and run a job, which perhaps loses a node or ends; workers observe it now or later.

        `quiet` is how long before its end a hung run made its last progress, in seconds.
        """
        if (job := self.job(which)) is None:
            return
        self.work(dispatch.dispatch_queue)
        if name := self.run_of(job):
            self.cluster.start(name)
            self.cluster.write(name, "epoch 1 loss 0.5\n")
            run = self.cluster.runs[name]
            began = run.status.started_at or self.now
            if loses and run.spec.min_nodes and run.status.spans[-1].nodes > run.spec.min_nodes:
                self.cluster.shrink(name, run.status.spans[-1].nodes - 1, at=max(self.now, began))
            if ends and outcome is Outcome.HUNG:
                self.cluster.hang(name, at=began + seconds, progress_at=began + seconds - quiet)
            elif ends:
                self.cluster.end(name, outcome, at=began + seconds)
        if observers:
            self.work(*[lambda: reconciliation.reconcile_job(job_pk=job)] * observers)

    def end_run(self, which: int, outcome: Outcome, seconds: int, *, observers: int) -> None:
        self.run_goes_on(
            which=which, ends=True, outcome=outcome, seconds=seconds, quiet=0, loses=False, observers=observers
        )

    @rule(which=which)
    def run_is_lost(self, which: int) -> None:
        if (job := self.job(which)) is None:
            return
        if name := self.run_of(job):
            self.cluster.lose(name)

    @rule(available=st.sampled_from([True, True, False]), punctual=st.booleans())
    def cluster_is_unreliable(self, available: bool, punctual: bool) -> None:
        """The cluster does not answer, or lets runs pass their deadline, which the customer must not pay."""
        self.cluster.available, self.cluster.keeps_deadlines = available, punctual

    # What the workers do

    @rule(work=st.sampled_from([dispatch.dispatch_queue, reconciliation.reconcile]), threads=threads)
    def periodic_work(self, work: Callable[[], None], threads: int) -> None:
        self.work(*[work] * threads)

    @rule(which=which, threads=threads)
    def observe(self, which: int, threads: int) -> None:
        if (job := self.job(which)) is None:
            return
        self.work(*[lambda: reconciliation.reconcile_job(job_pk=job)] * threads)

    @rule(number=st.integers(0, 30), threads=threads)
    def messages_arrive(self, number: int, threads: int) -> None:
        """Deliver a message in any order, late, more than once or never."""
        if MESSAGES:
            task, arguments = MESSAGES.pop(number % len(MESSAGES))
            self.work(*[lambda: task(*arguments)] * threads)

    def work(self, *calls: Callable[[], Any]) -> None:
        assert raised(together(*calls)) == []

    @rule(statement=st.integers(1, 60), work=st.sampled_from([dispatch.dispatch_queue, reconciliation.reconcile]))
    def a_worker_of_runs_dies(self, statement: int, work: Callable[[], None]) -> None:
        crash_at(statement, work)

    @rule(customer=customers, seconds=st.integers(60, 7200), statement=st.integers(1, 60))
    def the_console_dies_over_an_order(self, customer: int, seconds: int, statement: int) -> None:
        """The customer repeats the order with the same key."""
        member, quote = self.members[customer], self.quote(customer, "metered", 1, seconds)
        key = uuid.uuid4().hex
        order = lambda: orders.place_order(membership=member, quote=quote, idempotency_key=key)
        try:
            crash_at(statement, order)
            self.remember(order())
        except InsufficientFunds:
            assert not Order.objects.filter(idempotency_key=key).exists()

    # Ends

    @rule(which=which, threads=threads, beside=st.booleans())
    def cancel(self, which: int, threads: int, beside: bool) -> None:
        """Cancel several times at once, and perhaps while a worker observes the job."""
        if (job := self.job(which)) is None:
            return
        row = Job.objects.get(pk=job)
        member = self.member_of(row.organization_id)
        calls: list[Callable[[], Any]] = [lambda: orders.cancel_job(membership=member, job=row)] * threads
        if beside:
            calls += [lambda: reconciliation.reconcile_job(job_pk=job), dispatch.dispatch_queue]
        errors = raised(together(*calls))
        assert {type(error) for error in errors} <= {AlreadyEnded, StaleTransition}
        row.refresh_from_db()
        assert row.is_ended or row.state == JobState.STOPPING

    @rule(which=which, seconds=st.integers(0, 10**6), completed=st.booleans(), threads=threads)
    def settle_again(self, which: int, seconds: int, completed: bool, threads: int) -> None:
        """Settle an ended run with other usage: its receipt stays as it is."""
        if (job := self.job(which)) is None:
            return
        hold = Hold.objects.get(order__job=job)
        if hold.state == Hold.States.HELD:
            return
        usage = Usage(seconds, completed=completed)
        before = Receipt.objects.get(hold=hold)
        receipts = together(*[lambda: charges.settle(hold=hold, usage=usage, title="Again")] * threads)
        assert [receipt.pk for receipt in receipts] == [before.pk] * threads
        assert [receipt.total_minor for receipt in receipts] == [before.total_minor] * threads

    @rule(hourly=st.decimals(20, 300, places=4))
    def prices_change(self, hourly: Decimal) -> None:
        draft = pricebooks.copy(book=pricebooks.current_book(currency="USD"))
        draft.prices.filter(kind="node_hour").update(amount=hourly)
        pricebooks.publish(book=draft)

    # What must hold

    @invariant()
    def the_orders_are_whole(self) -> None:
        assert broken(BROKEN_ORDERS) == {}

    @invariant()
    def every_cent_that_came_in_is_known(self) -> None:
        for member in self.members:
            rows = wallet(member.organization).entries.filter(transaction__kind__in=["top-up", "credit"])
            paid = TopUp.objects.filter(account__organization=member.organization_id, state=TopUp.States.PAID)
            came = self.granted[member.organization_id] + sum(paid.values_list("amount_minor", flat=True))
            assert sum(rows.values_list("amount_minor", flat=True)) == came

    @invariant()
    def what_was_charged_is_what_the_cluster_saw(self) -> None:
        """Compute it from the attempts, in fractions and without `billing.pricing`."""
        receipts = Receipt.objects.filter(organization__in=self.organizations)
        for receipt in receipts.select_related("hold__quote", "hold__order__job"):
            job, terms = receipt.hold.order.job, receipt.hold.quote.terms
            seconds = sum(
                node_seconds(attempt)
                for attempt in job.attempts.filter(started_at__isnull=False)
                if EndReason(attempt.reason) in BILLED
            )
            # Half a minor unit more before `floor`: prices are rounded half up.
            due = floor(seconds * Fraction(terms["hourly"]) / 3600 + Fraction(1, 2))
            if terms["mode"] == "fixed":
                price = floor(Fraction(terms["per_epoch"]) * terms["epochs"] + Fraction(1, 2))
                extra = max(Fraction(0), seconds - terms["included_seconds"] * terms["nodes"])
                price += floor(extra * Fraction(terms["hourly"]) / 3600 + Fraction(1, 2))
                due = price if job.reason == EndReason.COMPLETED else min(due, price)
            due = max(due, terms["minimum_minor"]) if seconds else 0
            assert receipt.total_minor == min(due, receipt.ceiling_minor)

    def teardown(self) -> None:
        """Let everything run, cancel it while workers observe, and see that nothing stays held."""
        if not hasattr(self, "members"):  # `begin` was not called
            return
        self.cluster.available = True
        self.work(reconciliation.reconcile, reconciliation.reconcile)
        for name in self.cluster.names():
            self.cluster.start(name)
        self.work(reconciliation.reconcile)
        self.now += 500  # runs that were just started have used some time when they are cancelled
        self.stop_sweeps()
        for job in Job.objects.filter(organization__in=self.organizations, finished_at=None):
            member = self.member_of(job.organization_id)
            outcomes = together(
                lambda member=member, job=job: orders.cancel_job(membership=member, job=job),
                lambda job=job: reconciliation.reconcile_job(job_pk=job.pk),
            )
            assert {type(error) for error in raised(outcomes)} <= {AlreadyEnded, StaleTransition}
        reconciliation.reconcile()
        self.now += dispatch.GRACE_SECONDS
        reconciliation.reconcile()
        assert not Job.objects.filter(organization__in=self.organizations, finished_at=None).exists()
        self.end_sweeps()
        assert [wallet(member.organization).held_minor for member in self.members] == [0, 0]
        assert all(run.status.phase is RunPhase.ENDED for run in self.cluster.runs.values())
        self.close_payments()
        self.the_orders_are_whole()
        self.what_was_charged_is_what_the_cluster_saw()


@pytest.fixture
def _a_simulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """A fake cluster and payment page; messages to workers wait in `MESSAGES` until a rule delivers them."""
    fake = FakeBackend(root=tmp_path / "runs", cpus=4.0)
    CLUSTER[:] = [fake]
    monkeypatch.setattr(clusters, "create", lambda *_args, **_options: fake)
    # The console dates a cancellation; its clock follows the cluster's.
    clock = SimpleNamespace(now=lambda: datetime.fromtimestamp(CLUSTER[0].clock(), UTC))
    monkeypatch.setattr(lifecycle, "timezone", clock)
    monkeypatch.setattr(enqueue, "_send_or_warn", lambda task, arguments: MESSAGES.append((task, arguments)))
    monkeypatch.setattr(gateway, "_client", lambda: PROVIDERS[0].client)
    clusters.cluster.cache_clear()
    yield
    clusters.cluster.cache_clear()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("_a_simulation")
def test_a_fixed_script_of_events_loses_or_doubles_no_cent() -> None:
    simulation = Simulation()
    simulation.begin((1000, 3000))
    simulation.play_script()
    simulation.the_orders_are_whole()
    simulation.the_books_are_whole()
    simulation.every_cent_that_came_in_is_known()
    simulation.teardown()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("_a_simulation")
def test_no_order_of_events_loses_or_doubles_a_cent(pytestconfig: pytest.Config) -> None:
    run_state_machine_as_test(
        Simulation,
        settings=settings(
            max_examples=1 if pytestconfig.getoption("--fast") else 4,
            phases=[Phase.generate],  # no shrinking, which would repeat a failed example many times
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.django_db
def test_a_job_that_ends_by_a_platform_fault_is_charged_for_an_earlier_attempt(customer: Customer) -> None:
    """The rules of `tests.books` allow this, which only looks like a fault.

    The code ends the first attempt after 100 s. The retry is lost with its node each time, until no attempt is left.
    """
    began = time.time() - 1000
    attempt = customer.started(at=began, retries=1, retry_backoff_seconds=0)
    customer.end(attempt, Outcome.CODE_FAILED, at=began + 100)
    for _fault in range(MAX_PLATFORM_FAULTS):
        job = Job.objects.get(pk=attempt.job_id)
        start(job)
        attempt = job.attempts.latest("number")
        customer.backend.start(attempt.run_name, at=began + 200)
        job = customer.end(attempt, Outcome.NODE_LOST, at=began + 300)
    assert job.reason == "node_lost"
    assert job.order.hold.metered_minor > 0  # the charge, once a hold is settled
    assert broken(BROKEN_BOOKS | BROKEN_ORDERS) == {}

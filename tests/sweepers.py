"""Customers who buy and stop sweeps, and the workers that order trials, for `test_money_properties`.

That test calls these rules in random order and checks by SQL that no money is lost or charged twice. They are mixed
into its Hypothesis machine. `which` counts sweeps from the newest.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import rule

from billing.errors import InsufficientFunds
from billing.selectors import wallet
from jobs.errors import AlreadyEnded
from jobs.models import Job, Sweep, Trial
from jobs.sweeps import progress
from jobs.sweeps.purchase import place_sweep, quote_sweep, stop_sweep
from tests.buyers import Buyers
from tests.crashes import crash_at
from tests.payers import Payers
from tests.racing import raised, together


class Sweepers(Buyers):
    """Rules about sweeps. Their trials join `jobs`, so everything that happens to jobs happens to them."""

    work: Callable[..., None]
    """Makes calls at once, none of which may raise."""

    customers, threads, which = Payers.customers, Payers.threads, Payers.which

    def sweep_of(self, which: int) -> Sweep | None:
        sweeps = Sweep.objects.filter(organization__in=self.organizations)
        ordered = list(sweeps.order_by("-pk"))
        return ordered[which % len(ordered)] if ordered else None

    def remember_trials(self) -> None:
        trials = Trial.objects.filter(sweep__organization__in=self.organizations)
        new = set(trials.values_list("job", flat=True)) - set(self.jobs)
        self.jobs.extend(sorted(new))

    @rule(
        customer=customers,
        trials=st.integers(1, 5),
        concurrency=st.integers(1, 3),
        share=st.sampled_from([None, None, 0.5]),
        threads=threads,
    )
    def buy_sweep(self, *, customer: int, trials: int, concurrency: int, share: float | None, threads: int) -> None:
        """Buy one quote several times at once with the same key: one sweep with one hold, or only refusals.

        With `share`, the customer lowers the ceiling to this part of what all trials may cost.
        """
        member = self.members[customer]
        data = self.form(
            customer,
            max_seconds=1800,
            space={"LR": {"type": "float", "low": 0.001, "high": 0.1, "log": True}},
            objective={"metric": "loss", "goal": "minimize"},
            method="random",
            trials=trials,
            concurrency=concurrency,
        )
        quote = quote_sweep(membership=member, data=data)
        if share and trials > 1:
            # at least what one trial may cost
            ceiling = max(quote.ceiling_minor // trials, int(quote.ceiling_minor * share))
            quote = quote_sweep(membership=member, data=data | {"ceiling_minor": ceiling})
        available = wallet(member.organization).available_minor
        key = uuid.uuid4().hex
        outcomes = together(*[lambda: place_sweep(membership=member, quote=quote, idempotency_key=key)] * threads)
        if available < quote.ceiling_minor:
            assert {type(outcome) for outcome in outcomes} == {InsufficientFunds}
            return
        assert not raised(outcomes)
        assert len({sweep.pk for sweep in outcomes if isinstance(sweep, Sweep)}) == 1
        self.advance(which=0, threads=threads)  # orders its first trials

    @rule(which=which, threads=threads)
    def advance(self, which: int, threads: int) -> None:
        """Let several workers continue a sweep at once. None of its trials is ordered twice."""
        if sweep := self.sweep_of(which):
            self.work(*[lambda: progress.advance(sweep_pk=sweep.pk)] * threads)
            self.remember_trials()

    # An advance that orders one trial executes about 50 statements, so 80 reaches into the second trial.
    @rule(which=which, statement=st.integers(1, 80))
    def a_worker_of_sweeps_dies(self, which: int, statement: int) -> None:
        if sweep := self.sweep_of(which):
            crash_at(statement, lambda: progress.advance(sweep_pk=sweep.pk))
            self.remember_trials()

    @rule(which=which, threads=threads)
    def stop(self, which: int, threads: int) -> None:
        """Stop a sweep while a worker orders its next trials."""
        if (sweep := self.sweep_of(which)) is None:
            return
        member = self.member_of(sweep.organization_id)
        outcomes = together(
            *[lambda: stop_sweep(membership=member, sweep=sweep)] * threads,
            lambda: progress.advance(sweep_pk=sweep.pk),
        )
        assert {type(error) for error in raised(outcomes)} <= {AlreadyEnded}
        self.advance(which, threads=1)  # whatever the race left open

    def end_sweeps(self) -> None:
        """Check that every sweep ends once its jobs have ended.

        The queries `BROKEN_ORDERS` of `tests.books` check that a sweep that has ended holds no money.
        """
        sweeps = Sweep.objects.filter(organization__in=self.organizations)
        for sweep in sweeps:
            progress.advance(sweep_pk=sweep.pk)
        assert not Job.objects.filter(trial__sweep__in=sweeps, finished_at=None).exists()
        assert not sweeps.filter(ended_at=None).exists()

    def stop_sweeps(self) -> None:
        """Stop all sweeps."""
        for which in range(Sweep.objects.count()):
            self.stop(which, threads=1)

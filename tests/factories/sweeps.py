"""A customer who buys sweeps on the fake cluster, and lets their trials run."""

from __future__ import annotations

from typing import Any

from billing.models import Quote
from jobs import reconciliation
from jobs.models import Sweep, Trial
from jobs.sweeps import progress
from jobs.sweeps.purchase import place_sweep, quote_sweep
from runtime.specs import Outcome
from tests.factories.jobs import Customer

SPACE = {
    "LR": {"type": "float", "low": 1e-4, "high": 1e-1, "log": True},
    "--hidden": {"type": "categorical", "choices": [32, 64]},
    "DEPTH": {"type": "int", "low": 1, "high": 4},
}


class Sweeper:
    """Buys a sweep of a customer on the fake cluster, and lets its trials run."""

    def __init__(self, customer: Customer) -> None:
        self.customer = customer

    def form(self, **changes: Any) -> dict[str, Any]:
        """Return the body of a request for a sweep's quote."""
        plan = {"space": SPACE, "objective": {"metric": "accuracy", "goal": "maximize"}, "method": "random"}
        return self.customer.form(trials=4, concurrency=2, nodes=1) | plan | changes

    def quote(self, **changes: Any) -> Quote:
        return quote_sweep(membership=self.customer.membership, data=self.form(**changes))

    def buy(self, **changes: Any) -> Sweep:
        """Buy a sweep, and order as many trials as may run at once."""
        sweep = place_sweep(membership=self.customer.membership, quote=self.quote(**changes))
        progress.advance(sweep_pk=sweep.pk)
        return sweep

    def run(self, trial: Trial, *values: float, outcome: Outcome = Outcome.COMPLETED, ends: bool = True) -> None:
        """Let a trial's job run, report values of the metric, and end. `progress.advance` then continues the sweep."""
        attempt, backend = self.customer.run(trial.job), self.customer.backend
        for epoch, value in enumerate(values, start=1):
            backend.write(attempt.run_name, f"epoch {epoch} accuracy {value}\n")
        if ends:
            backend.end(attempt.run_name, outcome)
        reconciliation.follow(run_name=attempt.run_name)

    def finish(self, sweep: Sweep) -> None:
        """Let every trial run to its end with a value that grows with its number."""
        while opened := list(sweep.trials.filter(outcome="", job__finished_at=None)):
            for trial in opened:
                self.run(trial, 0.5 + trial.number / 100)
            progress.advance(sweep_pk=sweep.pk)
        sweep.refresh_from_db()

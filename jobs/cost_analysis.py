"""Analyze a job: its cost on other numbers of nodes, its free time's price, and its cost to reach a metric's value.

Reads only; nothing here is charged. Amounts are in minor units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from django.utils import timezone

from billing import pricing
from billing.pricebooks import price_rows
from jobs import curves, estimates, usage
from jobs.curves import Better, Curve
from jobs.models import Job
from jobs.states import JobState

NODE_COUNTS = (1, 2, 4)
"""Numbers of nodes that a run is compared with, besides its own: enough to show how it scales."""
MIN_FREE_SECONDS = 1
"""Shortest free time that is listed, in seconds. Shorter times would have cost next to nothing."""
HELD_OUT = frozenset({"test", "val", "valid", "validation", "dev", "eval", "evaluation"})
"""Words in the names of curves of data that the model was not trained on."""


class Basis(StrEnum):
    """How the time of an alternative is known."""

    OWN = "own"
    """The time of the run itself."""
    MEASURED = "measured"
    """From completed runs of the script on this number of nodes."""
    SCALED = "scaled"
    """From runs on other numbers of nodes, with the efficiency measured between them."""
    ASSUMED = "assumed"
    """From runs on one other number of nodes, with an assumed efficiency: `estimates.ASSUMED_SCALING`."""


@dataclass(frozen=True)
class Alternative:
    """A complete run on a number of nodes, at the prices of the job's quote."""

    nodes: int
    seconds: float
    cost_minor: int
    basis: Basis
    efficiency: float | None
    """Share of linear scaling from one node; None if there is no time for one node."""


def alternatives(job: Job) -> list[Alternative]:
    """Return what a complete run costs on NODE_COUNTS and on the job's own number of nodes, fewest nodes first.

    Numbers of nodes without an estimate or a price are left out; the list is empty if no run of the script completed.
    The times are estimates. If the job completed in one attempt on all its nodes, the times are all multiplied by one
    factor, so that the estimate for its own number of nodes becomes its actual time.
    """
    runs = estimates.earlier_runs_like(job)
    counts = sorted({count for count in (*NODE_COUNTS, job.nodes) if count <= job.order.product.max_nodes})
    all_estimates = {count: estimates.estimate_from_runs(runs, nodes=count, epochs=job.epochs) for count in counts}
    estimate_by_nodes = {count: each for count, each in all_estimates.items() if each}
    own_seconds = _own_seconds(job)
    own_estimate = estimate_by_nodes.get(job.nodes)
    factor = 1.0
    if own_seconds and own_estimate and own_estimate.p50_seconds:
        factor = own_seconds / own_estimate.p50_seconds
    times = {count: each.p50_seconds * factor for count, each in estimate_by_nodes.items()}
    prices = price_rows(job.order.quote.book) if times else []
    result = []
    for count, seconds in times.items():
        # A free estimate cost nothing. Its own row has the price of a paid run, as the other rows have.
        if own_seconds and count == job.nodes and job.order.quote.ceiling_minor:
            basis = Basis.OWN
            # For a completed job, this is the receipt's total once it is settled.
            cost_minor: int | None = job.order.hold.metered_minor
        else:
            basis = _basis(estimate_by_nodes[count])
            cost_minor = _estimated_cost(job, prices, count, seconds)
        if cost_minor is not None:
            efficiency = times[1] / seconds / count if 1 in times and seconds else None
            result.append(Alternative(count, seconds, cost_minor, basis, efficiency))
    return result


def _basis(estimate: pricing.Estimate) -> Basis:
    """Return what an estimate rests on."""
    if not estimate.measured_nodes:  # they are set only if the estimate was scaled from other numbers of nodes
        return Basis.MEASURED
    return Basis.ASSUMED if estimate.efficiency is None else Basis.SCALED


def _own_seconds(job: Job) -> float | None:
    """Return the running time of a job that completed in one attempt on all its nodes; None for any other job."""
    attempts = list(job.attempts.all())
    if job.state != JobState.SUCCEEDED or len(attempts) != 1 or attempts[0].granted_nodes != job.nodes:
        return None
    started_at, finished_at = attempts[0].started_at, attempts[0].finished_at
    if started_at is None or finished_at is None or len(attempts[0].spans) > 1:
        return None  # more than one span: the number of nodes changed during the run
    return (finished_at - started_at).total_seconds() or None


def _estimated_cost(job: Job, prices: list[pricing.PriceRow], nodes: int, seconds: float) -> int | None:
    """Return the cost of a complete run; None if the price book has no price for this number of nodes."""
    terms = pricing.Terms.from_json(job.order.quote.terms)
    purchase = pricing.Purchase(job.order.product.name, terms.mode, job.node_spec.name, nodes, job.epochs)
    try:
        offer = pricing.quote(
            prices,
            purchase,
            pricing.Estimate(p50_seconds=seconds, p90_seconds=seconds, source=""),  # not shown, so it needs no source
            headroom=Decimal(1),  # the price is that of a run of exactly `seconds`
            min_deadline_seconds=0,
            max_deadline_seconds=max(job.order.product.max_seconds, int(seconds) + 1),  # never less than `seconds`
            included_seconds=terms.included_seconds,
        )
    except pricing.PricingError:
        return None
    return offer.p50_minor


@dataclass(frozen=True)
class FreeTime:
    """Free time of a job, the rule that made it free, and what the nodes would have cost in that time."""

    rule: str
    seconds: float
    worth_minor: Decimal


def free_times(job: Job) -> list[FreeTime]:
    """Return the free time of a job by rule (queue, start, hang, platform fault, …), with its price in minor units.

    Empty for a free job, whose quote has no price of a node.
    """
    terms = pricing.Terms.from_json(job.order.quote.terms)
    if not terms.hourly:
        return []
    lines = usage.free_lines(job, job.attempts.all(), job.finished_at or timezone.now())
    by_rule: dict[str, FreeTime] = {}
    for line in lines:
        seconds = Decimal(line.quantity)
        # The lines of queue and start have no number of nodes.
        worth = seconds * (line.nodes or job.nodes) * terms.hourly / pricing.SECONDS_PER_HOUR
        total = by_rule.get(line.rule, FreeTime(line.rule, 0.0, Decimal(0)))
        by_rule[line.rule] = FreeTime(line.rule, total.seconds + float(seconds), total.worth_minor + worth)
    return [each for each in by_rule.values() if each.seconds >= MIN_FREE_SECONDS]


@dataclass(frozen=True)
class CostOfValue:
    """The cost of a run until a curve's best value, and its cost and time until a target value."""

    job: Job
    best: float
    """The curve's best value."""
    best_minor: float
    """The cost until that value."""
    reached_minor: float | None
    """The cost until the target; None if the run did not reach it."""
    reached_seconds: float | None
    """The time until the target, from the job's first start."""


def comparable_jobs(job: Job, limit: int) -> list[Job]:
    """Return the job, followed by the latest other paid runs of its script in the same currency.

    Looks at no more than `limit` other runs.
    """
    quote = job.order.quote
    others = [each for each in curves.other_runs(job, limit) if each.order.quote.ceiling_minor]
    return [job, *(each for each in others if each.order.quote.currency == quote.currency)]


def curve_names(job: Job) -> list[str]:
    """Return the names of the job's curves for which it is known whether lower or higher values are better.

    Curves where higher is better come first, then losses. In each group, curves of test or validation data come first.
    """
    extent_by_name = curves.extents([job])[job.pk]
    names = [name for name in extent_by_name if curves.better(name)]

    def rank(name: str) -> tuple[bool, bool, str]:
        is_held_out = bool(curves.name_words(name) & HELD_OUT)
        return curves.better(name) is not Better.HIGHER, not is_held_out, name

    return sorted(names, key=rank)


def costs_of_value(jobs: Sequence[Job], name: str, target: float | None = None) -> tuple[float, list[CostOfValue]]:
    """Return the target, by default the best value of the first job, and the costs of each job that has the curve.

    The costs are in the order of `jobs`. Raises ValueError if the first job does not have the curve.
    """
    job_curves = [(job, curve) for job in jobs for curve in curves.curves(job, limit=None, name=name).curves]
    if not job_curves or job_curves[0][0] != jobs[0]:
        raise ValueError(name)
    first_curve = job_curves[0][1]
    sign = -1 if curves.better(name) is Better.LOWER else 1  # the best value has the highest `sign * value`
    goal = first_curve.value[_best_index(first_curve, sign)] if target is None else target
    costs = []
    for job, curve in job_curves:
        best = _best_index(curve, sign)
        at_goal = [index for index, value in enumerate(curve.value) if sign * value >= sign * goal]
        # The points are sorted by attempt and step, which need not be the order of time.
        first = min(at_goal, key=curve.seconds.__getitem__, default=None)
        costs.append(
            CostOfValue(
                job,
                curve.value[best],
                curve.cost_minor[best],
                None if first is None else curve.cost_minor[first],
                None if first is None else curve.seconds[first],
            )
        )
    return goal, costs


def _best_index(curve: Curve, sign: int) -> int:
    """Return the index of the best value, the earliest of equal ones. `sign` is -1 if lower values are better."""
    return max(range(len(curve.value)), key=lambda index: (sign * curve.value[index], -curve.seconds[index]))

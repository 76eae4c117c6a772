"""Read sweeps for pages and API: their state, trials, best trial, cost and receipts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Count, Max, Min, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce
from django.utils.translation import gettext as _

from billing.models import Hold, Receipt
from console.accounts.models import Organization
from console.core.errors import NotFound
from jobs.models import MetricPoint, Sweep, Trial
from jobs.sweeps import suggestions
from jobs.sweeps.plan import Plan
from jobs.sweeps.suggestions import PastTrial


@dataclass(frozen=True)
class TrialRow:
    """A trial as pages and API show it. `name` and `state` are those of its job.

    `cost_minor` is its cost so far, `value` the metric's latest value.
    """

    number: int
    job_id: int
    name: str
    state: str
    outcome: str
    is_pruned: bool
    parameters: dict[str, Any]
    value: float | None
    cost_minor: int
    is_best: bool = False
    is_efficient: bool = False
    """Whether no other completed trial is both better and cheaper."""


def sweeps_for(organization: Organization) -> QuerySet[Sweep]:
    """Return the organization's sweeps, newest first."""
    return Sweep.objects.filter(organization=organization).select_related("quote", "hold", "product", "placed_by")


def list_queryset(organization: Organization) -> QuerySet[Sweep]:
    """Return the organization's sweeps, newest first, annotated for `list_row`.

    The annotations are `done` (the number of ended trials), `lowest` and `highest` (of the values of completed trials;
    None before the first one), and `metered_minor` (the cost so far).
    """
    trials = Trial.objects.filter(sweep=OuterRef("pk")).order_by().values("sweep")
    completed = trials.filter(outcome=Trial.Outcomes.COMPLETED)
    trial_holds = Hold.objects.filter(parent=OuterRef("hold")).order_by().values("parent")
    return sweeps_for(organization).annotate(
        done=Coalesce(Subquery(trials.exclude(outcome="").annotate(result=Count("pk")).values("result")), 0),
        lowest=Subquery(completed.annotate(result=Min("value")).values("result")),
        highest=Subquery(completed.annotate(result=Max("value")).values("result")),
        metered_minor=Coalesce(Subquery(trial_holds.annotate(result=Sum("metered_minor")).values("result")), 0),
    )


def list_row(sweep: Any) -> dict[str, Any]:
    """Return a sweep from `list_queryset` as the list of sweeps shows it."""
    plan = plan_of(sweep)
    return {
        "sweep": sweep,
        "plan": plan,
        "done": sweep.done,
        "fraction": sweep.done / plan.trials,
        "best": sweep.highest if plan.goal == "maximize" else sweep.lowest,
        "cost_minor": sweep.metered_minor,
    }


def sweep_for(organization: Organization, pk: int) -> Sweep:
    """Return a sweep of the organization. Raises NotFound."""
    sweep = sweeps_for(organization).filter(pk=pk).first()
    if sweep is None:
        raise NotFound(_("This sweep does not exist."))
    sweep.organization = organization  # saves a query
    return sweep


def sweeps_of_search(first_pk: int) -> QuerySet[Sweep]:
    """Return the sweeps of a search: its first sweep, and the sweeps that extend it."""
    return Sweep.objects.filter(Q(pk=first_pk) | Q(extends=first_pk))


def earlier_trials(sweep: Sweep) -> QuerySet[Trial]:
    """Return the trials of the earlier sweeps of the same search, in the order in which they were ordered."""
    if sweep.extends_id is None:
        return Trial.objects.none()
    trials = Trial.objects.filter(sweep__in=sweeps_of_search(sweep.extends_id), sweep__lt=sweep.pk)
    return trials.select_related("job__order__hold").order_by("sweep_id", "number")


def plan_of(sweep: Sweep) -> Plan:
    """Return the plan of a sweep."""
    return Plan.from_json(sweep.quote.purchase["sweep"])


def cost_minor(sweep: Sweep) -> int:
    """Return the cost of all trials so far, in minor units."""
    total = sweep.hold.children.aggregate(total=Sum("metered_minor"))["total"]
    return int(total or 0)


def best_trial(sweep: Sweep, plan: Plan) -> Trial | None:
    """Return the completed trial with the best value, the earliest of equal ones; None if no trial completed."""
    order = "-value" if plan.goal == "maximize" else "value"
    completed = sweep.trials.filter(outcome=Trial.Outcomes.COMPLETED).select_related("job")
    return completed.order_by(order, "number").first()


def end_data(sweep: Sweep, plan: Plan) -> dict[str, Any]:
    """Return the data of the notification about the end of a sweep, for `jobs.messages.sweep_end_sentence`."""
    best = best_trial(sweep, plan)
    return {
        "sweep": sweep.pk,
        "name": sweep.name,
        "reason": str(sweep.reason),
        "trials": sweep.trials.count(),
        "trials_completed": sweep.trials.filter(outcome=Trial.Outcomes.COMPLETED).count(),
        "metric": plan.metric,
        "best": best and {"job": best.job_id, "parameters": best.parameters, "value": best.value},
        "charged_minor": cost_minor(sweep),
        "ceiling_minor": sweep.quote.ceiling_minor,
        "currency": sweep.quote.currency,
    }


def summary(sweep: Sweep) -> dict[str, Any]:
    """Return the sweep as the API shows it."""
    plan = plan_of(sweep)
    best = best_trial(sweep, plan)
    was_refused = sweep.reason == Sweep.Reasons.UNAVAILABLE  # `sweep.waiting` then says why no trial could be ordered
    return {
        "id": sweep.pk,
        "name": sweep.name,
        "state": sweep.state,
        "reason": sweep.reason,
        "waiting_for": sweep.waiting if was_refused or sweep.state == Sweep.States.RUNNING else "",
        "objective": {"metric": plan.metric, "goal": plan.goal, "against_cost": plan.minimizes_cost},
        "method": plan.method.value,
        "pruner": plan.pruner.value,
        "concurrency": plan.concurrency,
        "trials_total": plan.trials,
        "trials_done": sweep.trials.exclude(outcome="").count(),
        "best": best and {"trial": best.number, "job": best.job_id, "parameters": best.parameters, "value": best.value},
        "currency": sweep.quote.currency,
        "cost_minor": cost_minor(sweep),
        "ceiling_minor": sweep.quote.ceiling_minor,
        "extends": sweep.extends_id,
        "created_at": sweep.created_at,
        "ended_at": sweep.ended_at,
    }


def importance(sweep: Sweep) -> dict[str, float]:
    """Return the importance of each parameter in all trials of the search so far; see `suggestions.importance`."""
    plan = plan_of(sweep)
    trials = [*earlier_trials(sweep), *sweep.trials.all()]
    past = [PastTrial(trial.parameters, trial.value, is_ended=bool(trial.outcome)) for trial in trials]
    return suggestions.importance(space=plan.space, goal=plan.goal, trials=past)


def trial_rows(sweep: Sweep) -> list[TrialRow]:
    """Return all trials in order of number. An open trial shows the metric's latest value so far."""
    plan = plan_of(sweep)
    best = best_trial(sweep, plan)
    trials = list(sweep.trials.select_related("job__order__hold"))
    efficient = _efficient_pks(plan, trials)
    latest = _latest_values([trial.job_id for trial in trials if not trial.outcome], plan.metric)
    return [
        TrialRow(
            number=trial.number,
            job_id=trial.job_id,
            name=trial.job.name,
            state=trial.job.state,
            outcome=trial.outcome,
            is_pruned=trial.is_pruned,
            parameters=trial.parameters,
            value=trial.value if trial.outcome else latest.get(trial.job_id),
            cost_minor=trial.job.order.hold.metered_minor,
            is_best=best is not None and best.pk == trial.pk,
            is_efficient=trial.pk in efficient,
        )
        for trial in trials
    ]


def _efficient_pks(plan: Plan, trials: Sequence[Trial]) -> set[int]:
    """Return the ids of the efficient completed trials: those that are better than every cheaper one.

    Of trials with the same cost and value, only the oldest is efficient.
    """
    completed = [trial for trial in trials if trial.outcome == Trial.Outcomes.COMPLETED and trial.value is not None]
    sign = -1 if plan.goal == "maximize" else 1
    # From the cheapest to the most expensive; of the same cost, the best value first, then the oldest trial.
    completed.sort(key=lambda trial: (trial.job.order.hold.metered_minor, sign * (trial.value or 0), trial.number))
    efficient: set[int] = set()
    best: float | None = None
    for trial in completed:
        if trial.value is not None and (best is None or plan.is_better(trial.value, best)):
            best = trial.value
            efficient.add(trial.pk)
    return efficient


def _latest_values(job_ids: Sequence[int], metric: str) -> dict[int, float]:
    """Return the last reported value of a metric by job id. Jobs that have not reported it are left out."""
    points = MetricPoint.objects.filter(job__in=job_ids, name=metric).order_by("job", "-pk").distinct("job")
    return dict(points.values_list("job", "value"))


def receipts(sweep: Sweep) -> QuerySet[Receipt]:
    """Return the receipts of the ended trials, in order of number. Each trial is charged separately."""
    return Receipt.objects.filter(hold__parent=sweep.hold).order_by("hold__order__job__trial__number")

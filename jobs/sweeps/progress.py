"""Advance a sweep: store the outcomes of its trials, stop unpromising trials, order the next ones, and end the sweep.

`advance` reads everything from the rows, so any process may call it at any time. A crash between two steps loses
nothing, because the row, the part of the hold, the order and the job of a trial are written in one transaction.

Rows are locked in this order: the sweep, the organization's quota, the sweep's hold, the wallet. No job is locked while
its sweep is.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from datetime import timedelta

from celery import shared_task
from django.conf import settings
from django.db import transaction
from django.utils import timezone, translation
from django.utils.translation import gettext as _

from billing import charges
from billing.errors import HoldUsedUp
from billing.quotes import make_quote
from console.accounts.models import Membership
from console.accounts.services import require_active
from console.core.enqueue import send
from console.core.errors import CustomerError
from console.notifications import services as notifications
from jobs import estimates, orders, packages, quotas, telemetry
from jobs.errors import AlreadyEnded, ChoiceUnavailable, QuotaExceeded
from jobs.models import Job, MetricPoint, Sweep, Trial
from jobs.purchase import parse
from jobs.states import JobState
from jobs.sweeps import selectors
from jobs.sweeps.plan import Plan, apply_parameters
from jobs.sweeps.suggestions import Method, PastTrial, Pruner, Suggestion, judge, suggest

logger = logging.getLogger(__name__)

FAILING_TRIALS = 3
"""A sweep ends if at least this many trials have ended and all of them failed: then probably the script is at fault."""
MAX_OUTPUT_DELAY = timedelta(minutes=10)
"""How long the value of an ended trial waits for the rest of its output. `telemetry.read_rest` reads large outputs in
minutes; a cluster that does not answer for longer must not keep the sweep open."""
MAX_VALUES_JUDGED = 200
"""How many values of a trial's metric, from its first, a pruner compares. Scripts usually report one per epoch."""


@shared_task
def advance_sweep(sweep_pk: int) -> None:
    """Advance one sweep."""
    advance(sweep_pk=sweep_pk)


@shared_task
def advance_sweeps() -> None:
    """Advance all open sweeps, one task each, so that a slow sweep delays no other."""
    for pk in Sweep.objects.filter(ended_at=None).values_list("pk", flat=True):
        send(advance_sweep, pk)


def advance(*, sweep_pk: int) -> None:
    """Advance a sweep as far as possible now. Safe to repeat, and to run at the same time in several processes."""
    sweep = Sweep.objects.select_related("organization", "quote__book", "product", "placed_by").get(pk=sweep_pk)
    plan = Plan.from_json(sweep.quote.purchase["sweep"])
    # After a stop, `_cancel_open` cancels all trials, so that none needs pruning.
    if plan.pruner is not Pruner.NONE and sweep.reason != Sweep.Reasons.STOPPED:
        _prune(sweep, plan)
    record_ends(sweep, plan)
    # A refusal is stored as a sentence (`Sweep.waiting`), so it must be in the buyer's language.
    language = sweep.placed_by.language if sweep.placed_by else ""
    with translation.override(language or settings.LANGUAGE_CODE):
        while sweep.state == Sweep.States.RUNNING and _order_next(sweep, plan):
            sweep.refresh_from_db(fields=["state"])
    _cancel_open(sweep)
    _end(sweep)


def record_ends(sweep: Sweep, plan: Plan) -> None:
    """Store the outcome and the metric's value of trials whose jobs have ended and whose output is read.

    A trial that failed, or that was cancelled but not pruned, has no value, so nothing waits for its output. Until the
    outcome is stored, the trial counts as open: it takes a place of `concurrency`, and the sweep keeps its hold.
    """
    ended = sweep.trials.filter(outcome="", job__finished_at__isnull=False).select_related("job")
    for trial in ended.prefetch_related("job__attempts"):
        can_have_value = trial.is_pruned or trial.job.state == JobState.SUCCEEDED
        is_unread = can_have_value and any(telemetry.has_rest(attempt) for attempt in trial.job.attempts.all())
        if is_unread and timezone.now() - trial.job.finished_at < MAX_OUTPUT_DELAY:  # type: ignore[operator]
            continue
        values = _values(trial, plan)
        value = values[-1] if values and math.isfinite(values[-1]) else None
        if trial.is_pruned and trial.job.state == JobState.CANCELLED:
            outcome = Trial.Outcomes.PRUNED
        elif trial.job.state == JobState.SUCCEEDED and value is not None:
            outcome = Trial.Outcomes.COMPLETED
        else:
            outcome, value = Trial.Outcomes.FAILED, None
        Trial.objects.filter(pk=trial.pk, outcome="").update(outcome=outcome, value=value)


def _values(trial: Trial, plan: Plan) -> list[float]:
    """Return the values of the sweep's metric that a trial has reported, in order."""
    points = MetricPoint.objects.filter(job=trial.job_id, name=plan.metric).order_by("pk")
    return list(points.values_list("value", flat=True))


def _past_trials(trials: list[Trial], metric_values: dict[int, list[float]] | None = None) -> list[PastTrial]:
    """Return trials as `suggestions` needs them. `metric_values` are all values of the metric by job id, for pruners.

    `sampler_state` has what the sampler stored when it suggested the trial, and what the pruner has added since.
    """
    return [
        PastTrial(
            parameters=trial.parameters,
            value=trial.value,
            cost=trial.job.order.hold.metered_minor,
            is_ended=bool(trial.outcome),
            state=trial.sampler_state,
            metric_values=(metric_values or {}).get(trial.job_id, []),
        )
        for trial in trials
    ]


def _prune(sweep: Sweep, plan: Plan) -> None:
    """Mark the trials that the pruner stops. `_cancel_open` cancels their jobs.

    Trials whose jobs have ended since the last call are judged too. Successive halving stores how far each trial came,
    and compares other trials with it.
    """
    trials = list(sweep.trials.select_related("job__order__hold").order_by("number"))  # the order that `judge` needs
    values: dict[int, list[float]] = {}
    points = MetricPoint.objects.filter(job__trial__sweep=sweep, name=plan.metric).order_by("pk")
    for job_pk, value in points.values_list("job", "value"):
        job_values = values.setdefault(job_pk, [])
        if math.isfinite(value) and len(job_values) < MAX_VALUES_JUDGED:
            job_values.append(value)
    for trial in trials:
        if trial.outcome or trial.is_pruned or not values.get(trial.job_id):
            continue
        decision = judge(
            space=plan.space,
            goal=plan.goal,
            pruner=plan.pruner,
            trials=_past_trials(trials, values),  # built again, because the last decision changed a trial's state
            number=trial.number,
        )
        trial.sampler_state, trial.is_pruned = decision.state, decision.is_pruned and not trial.job.is_ended
        # Another process may have marked the trial or stored its outcome since it was read here. Both are final.
        open_trial = Trial.objects.filter(pk=trial.pk, outcome="", is_pruned=False)
        open_trial.update(sampler_state=trial.sampler_state, is_pruned=trial.is_pruned)


def _cancel_open(sweep: Sweep) -> None:
    """Cancel the jobs of pruned trials, or all open jobs if the customer has stopped the sweep."""
    open_trials = sweep.trials.filter(outcome="", job__finished_at=None, job__cancel_requested_at=None)
    # Read again, because the customer may have stopped the sweep meanwhile.
    if not Sweep.objects.filter(pk=sweep.pk, reason=Sweep.Reasons.STOPPED).exists():
        open_trials = open_trials.filter(is_pruned=True)
    for job in Job.objects.filter(trial__in=open_trials):
        with suppress(AlreadyEnded):  # it ended since the query
            orders.cancel_trial(job=job)


def _order_next(sweep: Sweep, plan: Plan) -> bool:
    """Order the next trial if the plan's number of trials and concurrency allow it. Return whether one was ordered.

    If the order is refused, store the reason for the customer. Order no more trials if all ended ones have failed, if
    the ceiling is reached, or if the purchase is no longer possible.
    """
    trials = list(sweep.trials.select_related("job__order__hold").order_by("number"))
    if len(trials) >= plan.trials or sum(not trial.outcome for trial in trials) >= plan.concurrency:
        return False
    outcomes = [trial.outcome for trial in trials if trial.outcome]
    if len(outcomes) >= FAILING_TRIALS and all(outcome == Trial.Outcomes.FAILED for outcome in outcomes):
        _order_no_more(sweep, Sweep.Reasons.FAILING)
        return False
    suggestion = _suggest(sweep, plan, trials)
    try:
        is_ordered = _order_trial(sweep, suggestion, number=len(trials))
    except QuotaExceeded as error:
        Sweep.objects.filter(pk=sweep.pk).update(waiting=str(error.message))
        return False
    except HoldUsedUp:
        if all(trial.outcome for trial in trials):  # an open trial could return a part of the hold when it ends
            _order_no_more(sweep, Sweep.Reasons.CEILING)
        return False
    except CustomerError as error:
        logger.info("Sweep %s can order no trial: %s %s", sweep.pk, error.code, error.fields)
        sentence = " ".join(map(str, error.fields.values())) or str(error.message)
        Sweep.objects.filter(pk=sweep.pk).update(waiting=sentence)
        _order_no_more(sweep, Sweep.Reasons.UNAVAILABLE)
        return False
    return is_ordered


def _suggest(sweep: Sweep, plan: Plan, trials: list[Trial]) -> Suggestion:
    """Return the parameters of the next trial.

    They depend on `trials`, those of this sweep so far, and on the trials of the earlier sweeps that it extends.
    """
    if plan.method is Method.GRID:
        return Suggestion(plan.grid()[len(trials)], state={})
    return suggest(
        space=plan.space,
        goal=plan.goal,
        method=plan.method,
        seed=sweep.quote_id.int % 2**32,  # the same in every call, so that a repeated call gives the same suggestion
        trials=_past_trials([*selectors.earlier_trials(sweep), *trials]),
        minimizes_cost=plan.minimizes_cost,
    )


def _order_trial(sweep: Sweep, suggestion: Suggestion, *, number: int) -> bool:
    """Order trial `number`. Return False if another process has ordered it, or stopped the sweep, in the meantime.

    Raises QuotaExceeded, HoldUsedUp, and other CustomerErrors if the purchase is no longer possible.
    """
    organization = sweep.organization
    require_active(organization=organization)
    if sweep.placed_by is None:
        raise ChoiceUnavailable(_("The account of the person who bought this sweep was deleted."))
    data = {name: value for name, value in sweep.quote.purchase.items() if name != "sweep"}
    data["name"] = f"{sweep.name[:80]} trial {number}"  # cut, because a job's name has at most 100 characters
    # All trials read the versions of datasets and models that the sweep's quote names.
    purchase = parse(
        organization=organization, data=apply_parameters(data, suggestion.parameters), uses_given_versions=True
    )
    # A search is a sweep and those that extend it. All its trials run the script and the requirements of its first
    # trial, because the files may have changed since.
    search_trials = Trial.objects.filter(sweep__in=selectors.sweeps_of_search(sweep.extends_id or sweep.pk))
    first_trial = search_trials.select_related("job__script", "job__packages").order_by("sweep_id", "number").first()
    script = None if first_trial else orders.read_purchased_script(purchase)
    requirements = packages.requirements_of(first_trial.job) if first_trial else purchase.requirements
    pricing = orders.pricing_inputs(purchase, estimates.estimate(purchase))
    with transaction.atomic():
        locked = Sweep.objects.select_for_update(of=("self",)).select_related("hold").get(pk=sweep.pk)
        if locked.state != Sweep.States.RUNNING or locked.trials.count() != number:
            return False
        quota = quotas.lock_quota(organization)
        quote = make_quote(
            organization=organization,
            user=sweep.placed_by,
            payload=purchase.to_json() | {"pinned_image": sweep.quote.purchase["pinned_image"]},
            book=sweep.quote.book,  # at the prices at which the sweep was quoted
            **pricing,
        )
        order = orders.write_order(
            # No stored membership: the buyer may have left the organization since, and the sweep goes on.
            membership=Membership(organization=organization, user=sweep.placed_by),
            quote=quote,
            product=sweep.product,
            idempotency_key=f"quote:{quote.pk}",  # only has to be unique: the check above prevents a second order
            quota=quota,
            versions=purchase.dataset_versions,
            requirements=requirements,
            models=purchase.model_versions,
            columns=orders.job_columns(purchase, script)
            | {"image_digest": orders.pinned_digest(sweep.quote, purchase.image)}
            | ({"script": first_trial.job.script} if first_trial else {}),
            parent=locked.hold,
        )
        Trial.objects.create(
            sweep=locked,
            number=number,
            job=order.job,
            parameters=suggestion.parameters,
            sampler_state=suggestion.state,
        )
        Sweep.objects.filter(pk=sweep.pk).exclude(waiting="").update(waiting="")
    return True


def _order_no_more(sweep: Sweep, reason: Sweep.Reasons) -> None:
    """Order no more trials. Open trials continue."""
    Sweep.objects.filter(pk=sweep.pk, state=Sweep.States.RUNNING).update(state=Sweep.States.STOPPING, reason=reason)


def _end(sweep: Sweep) -> None:
    """End the sweep if no trial is open and none will start: release the rest of its hold, and publish the end."""
    with transaction.atomic():
        locked = Sweep.objects.select_for_update(of=("self",)).select_related("hold", "quote").get(pk=sweep.pk)
        if locked.state == Sweep.States.ENDED or locked.trials.filter(outcome="").exists():
            return
        plan = selectors.plan_of(locked)
        if locked.state == Sweep.States.RUNNING and locked.trials.count() < plan.trials:
            return
        charges.release(hold=locked.hold)
        locked.reason = locked.reason or Sweep.Reasons.COMPLETED
        locked.state, locked.ended_at = Sweep.States.ENDED, timezone.now()
        locked.save(update_fields=["state", "reason", "ended_at"])
        notifications.publish(
            organization=locked.organization_id,
            kind="sweep.ended",
            user=locked.placed_by_id,
            data=selectors.end_data(locked, plan),
        )

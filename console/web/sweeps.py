"""Pages of sweeps: the list, the form with its live quote, and one sweep with its trials and charts.

A trial is one job of a sweep, with its own values of the sweep's parameters.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_POST
from django_htmx.http import HttpResponseClientRedirect

from billing import selectors as billing
from billing.errors import BudgetExceeded, InsufficientFunds
from billing.models import Quote
from billing.quotes import quote_for
from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.accounts.services import is_active
from console.core.errors import CustomerError, InvalidInput, NotFound
from console.web.access import MemberRequest, error_text, errors_as_message, member
from console.web.amounts import parse_row_id
from console.web.quote_cards import currency_of, posted_ceiling, posted_key, quote_card, refused_card
from jobs import cost_analysis, curves, rows
from jobs import selectors as jobs
from jobs.errors import QuotaExceeded
from jobs.messages import SWEEP_END_SENTENCES
from jobs.models import Job, Sweep, Trial
from jobs.purchase import purchase_data
from jobs.sweeps import purchase, selectors
from jobs.sweeps.plan import MAX_CONCURRENCY, MAX_TRIALS, PURCHASE_FIELDS, Goal, Plan
from jobs.sweeps.space import Condition, Parameter, Value
from jobs.sweeps.suggestions import Method, Pruner

PAGE_SIZE = 50
"""How many sweeps one page of the list shows, and how many trials one page of a sweep."""
MAX_OFFERED_JOBS = 20
"""How many earlier jobs the form offers to start from."""
ROW_FIELDS = ("name", "type", "low", "high", "scale", "step", "choices", "when")
"""The form controls of one parameter; their names begin with `parameter_`. The form sends each once per parameter."""
ERROR_FIELDS = ("space", "objective", "method", "pruner", "trials", "concurrency", "ceiling_minor", "name")
"""The API's fields whose errors the form shows beside its controls. The card shows all other errors, such as those of
the training's own fields."""
EXTENSION_FIELDS = ("trials", "ceiling_minor")
"""The API's fields whose errors are shown beside the controls of the form for more trials of an ended sweep."""
EXCLUDED_FIELDS = {"sweep", "pinned_image", "ceiling_minor", "exact", "rerun_of"}
"""Fields of the earlier order that a sweep does not copy. The ceiling, for example, limits one run only."""
METHODS = {
    Method.TPE: gettext_lazy("Bayesian (TPE): learns from ended trials"),
    Method.RANDOM: gettext_lazy("Random"),
    Method.GRID: gettext_lazy("Grid: every combination"),
    Method.CMAES: gettext_lazy("CMA-ES: for many numeric parameters"),
}
PRUNERS = {
    Pruner.NONE: gettext_lazy("Never"),
    Pruner.MEDIAN: gettext_lazy("Worse than the median"),
    Pruner.ASHA: gettext_lazy("Not in the best third (ASHA)"),
}
GOALS = {Goal.MAXIMIZE: gettext_lazy("Highest value"), Goal.MINIMIZE: gettext_lazy("Lowest value")}
KINDS = {
    "float": gettext_lazy("Decimal number"),
    "int": gettext_lazy("Whole number"),
    "categorical": gettext_lazy("Choices"),
}
"""The labels of the form's choices: methods, pruners, goals, and types of parameters."""
SORT_ORDERS = {
    "": gettext_lazy("By number"),
    "newest": gettext_lazy("Newest first"),
    "best": gettext_lazy("Best first"),
    "cheapest": gettext_lazy("Cheapest first"),
}
"""Orders of the trials, by their names in the URL."""
OPEN = "open"
"""The filter for trials without an outcome."""


@require_GET
@member(Capability.VIEW)
def sweep_list(request: MemberRequest) -> HttpResponse:
    """List the sweeps, newest first. While one is open, htmx polls the rows."""
    sweeps = selectors.list_queryset(request.membership.organization)
    page = Paginator(sweeps, PAGE_SIZE).get_page(request.GET.get("page"))
    context = {
        "page": page,
        "rows": [selectors.list_row(sweep) for sweep in page],
        "has_open": any(sweep.ended_at is None for sweep in page),
    }
    return render(request, "jobs/_sweep_rows.html" if request.htmx else "jobs/sweep_list.html", context)


@require_GET
@member(Capability.RUN)
def sweep_new(request: MemberRequest) -> HttpResponse:
    """Show the form. `?job=` starts from a training, `?sweep=` from an earlier sweep. Without either, offer jobs."""
    organization = request.membership.organization
    if billing.wallet(organization) is None or not is_active(organization):
        return render(request, "jobs/training_inactive.html", {"heading": _("New sweep")})
    origin = _find_origin(organization, request.GET)
    if origin is None:
        trainings = rows.queryset(organization).filter(builtin_script="", started_at__isnull=False).order_by("-pk")
        job_rows = [rows.row(job) for job in trainings.only(*rows.FIELDS)[:MAX_OFFERED_JOBS]]
        return render(request, "jobs/sweep_new_start.html", {"rows": job_rows})
    base = _base_purchase(origin)
    # The job whose node spec and curves the form shows; None for a sweep without trials.
    if isinstance(origin, Job):
        job: Job | None = origin
    else:
        first_trial = origin.trials.select_related("job__node_spec").first()
        job = first_trial.job if first_trial else None
    context = {
        "origin": origin,
        "origin_kind": "job" if isinstance(origin, Job) else "sweep",
        "base": base,
        "spec_title": job.node_spec.title if job else base["node_spec"],
        "currency": currency_of(organization),
        "values": _values_of_job(origin) if isinstance(origin, Job) else _values_of_sweep(origin),
        "metrics": cost_analysis.curve_names(job) if job else [],
        "names": _parameter_names(base),
        "methods": METHODS,
        "pruners": PRUNERS,
        "goals": GOALS,
        "kinds": KINDS,
        "max_trials": MAX_TRIALS,
        "max_concurrency": MAX_CONCURRENCY,
    }
    return render(request, "jobs/sweep_new.html", context)


@require_POST
@member(Capability.RUN)
def sweep_quote(request: MemberRequest) -> HttpResponse:
    """Return the quote card for the form's values, or their errors."""
    organization = request.membership.organization
    origin = _find_origin(organization, request.POST)
    if origin is None:
        raise NotFound
    try:
        data = _base_purchase(origin) | _api_data(request.POST, currency_of(organization))
        quote = purchase.quote_sweep(membership=request.membership, data=data)
    except CustomerError as error:
        return refused_card(request, error, ERROR_FIELDS)
    return _quote_card(request, quote, ERROR_FIELDS)


@require_POST
@member(Capability.RUN)
def sweep_order(request: MemberRequest) -> HttpResponse:
    """Buy the displayed quote. Submitting it twice buys once."""
    quote = quote_for(organization=request.membership.organization, quote_id=request.POST.get("quote", ""))
    try:
        sweep = purchase.place_sweep(
            membership=request.membership,
            quote=quote,
            idempotency_key=posted_key(request.POST),
        )
    except (InsufficientFunds, BudgetExceeded, QuotaExceeded) as error:  # the quote stays valid and can be bought later
        return _quote_card(request, quote, problem=str(error.message))
    except CustomerError as error:
        return _quote_card(request, quote, problem=error_text(error), stale=True)
    messages.success(request, _("Sweep ordered. Its ceiling is held in your wallet."))
    return HttpResponseClientRedirect(reverse("sweep_detail", args=[sweep.pk]))


@require_GET
@member(Capability.VIEW)
def sweep_detail(request: MemberRequest, pk: int) -> HttpResponse:
    """Show a sweep. htmx gets only the part that changes while it runs. `?sort=` and `?outcome=` choose its trials."""
    sweep = selectors.sweep_for(request.membership.organization, pk)
    plan = selectors.plan_of(sweep)
    all_trials = selectors.trial_rows(sweep)
    sort, outcome = request.GET.get("sort", ""), request.GET.get("outcome", "")
    trials = _sort_trials(all_trials, sort, is_highest_best=plan.goal == "maximize")
    outcomes = {OPEN: _("Open"), **dict(Trial.Outcomes.choices)}
    if outcome in outcomes:
        trials = [trial for trial in trials if (trial.outcome or OPEN) == outcome]
    page = Paginator(trials, PAGE_SIZE).get_page(request.GET.get("page"))
    summary = selectors.summary(sweep)
    best = summary["best"]
    context: dict[str, Any] = {
        "sweep": sweep,
        "summary": summary,
        "best_parameters": _parameter_values(plan, best["parameters"]) if best else [],
        "reason": SWEEP_END_SENTENCES.get(sweep.reason, ""),
        "plan": plan,
        "fraction": summary["trials_done"] / plan.trials,
        "page": page,
        "rows": [(trial, _parameter_values(plan, trial.parameters)) for trial in page],
        "has_trials": bool(all_trials),
    }
    if request.htmx:
        return render(request, "jobs/_sweep_live.html", context)
    context |= {
        "sort": sort,
        "outcome": outcome,
        "orders": SORT_ORDERS,
        "outcomes": outcomes,
        # All sweeps of the same search: the first one, to which `extends` leads, and those that extend it.
        "search": selectors.sweeps_of_search(sweep.extends_id or sweep.pk).order_by("pk"),
        "chart": _chart_data(sweep),
        "method": METHODS[plan.method],
        "pruner": PRUNERS[plan.pruner],
        "importance": selectors.importance(sweep),
        "max_trials": MAX_TRIALS,
    }
    return render(request, "jobs/sweep_detail.html", context)


@require_GET
@member(Capability.VIEW)
def sweep_importance(request: MemberRequest, pk: int) -> HttpResponse:
    """Return how much each parameter matters, for htmx."""
    sweep = selectors.sweep_for(request.membership.organization, pk)
    context = {"sweep": sweep, "importance": selectors.importance(sweep)}
    return render(request, "jobs/_sweep_importance.html", context)


@require_POST
@member(Capability.RUN)
def sweep_stop(request: MemberRequest, pk: int) -> HttpResponse:
    """Start no more trials, and cancel the open ones."""
    sweep = selectors.sweep_for(request.membership.organization, pk)
    with errors_as_message(request):
        purchase.stop_sweep(membership=request.membership, sweep=sweep)
        messages.success(request, _("The sweep is stopping. Its open trials are being cancelled."))
    return redirect("sweep_detail", pk)


@require_POST
@member(Capability.RUN)
def sweep_extend(request: MemberRequest, pk: int) -> HttpResponse:
    """Return the quote card for more trials of an ended sweep, or the errors."""
    sweep = selectors.sweep_for(request.membership.organization, pk)
    try:
        data = {"trials": _parse_number(request.POST.get("trials", ""))} | posted_ceiling(
            request.POST, sweep.quote.currency
        )
        quote = purchase.quote_extension(membership=request.membership, sweep=sweep, data=data)
    except CustomerError as error:
        return refused_card(request, error, EXTENSION_FIELDS)
    return _quote_card(request, quote, EXTENSION_FIELDS)


def _find_origin(organization: Organization, data: QueryDict) -> Job | Sweep | None:
    """Return the job or sweep that a form starts from; None if `data` names neither. Raises NotFound."""
    if (pk := parse_row_id(data.get("job", ""))) is not None:
        job = jobs.job_for(organization, pk)
        if job.builtin_script:  # an image check or a notebook has no parameters to search
            raise NotFound
        return job
    if (pk := parse_row_id(data.get("sweep", ""))) is not None:
        return selectors.sweep_for(organization, pk)
    return None


def _base_purchase(origin: Job | Sweep) -> dict[str, Any]:
    """Return the purchase that each trial repeats with other parameters, as the API's fields."""
    quote = origin.order.quote if isinstance(origin, Job) else origin.quote
    return {name: value for name, value in purchase_data(quote.purchase).items() if name not in EXCLUDED_FIELDS}


def _values_of_job(job: Job) -> dict[str, Any]:
    """Return the form's values for a search around a job: learning rates from a tenth to ten times the job's."""
    lr = float(job.lr)
    names = cost_analysis.curve_names(job)
    metric = names[0] if names else ""
    is_lower = curves.better(metric) is curves.Better.LOWER
    # Rounded, because 0.7 / 10 gives 0.06999999999999999.
    space = [Parameter("LR", "float", low=float(f"{lr / 10:.6g}"), high=float(f"{lr * 10:.6g}"), log=True)]
    return {
        "name": job.name,
        "parameters": [_control_values(parameter) for parameter in space],
        "metric": metric,
        "goal": Goal.MINIMIZE if is_lower else Goal.MAXIMIZE,
        "against_cost": False,
        "method": Method.TPE,
        "pruner": Pruner.NONE,
        "trials": 12,
        "concurrency": 2,
        "ceiling": "",
    }


def _values_of_sweep(sweep: Sweep) -> dict[str, Any]:
    """Return the form's values for the search of an earlier sweep."""
    plan = selectors.plan_of(sweep)
    return {
        "name": sweep.name,
        "parameters": [_control_values(parameter) for parameter in plan.space],
        "metric": plan.metric,
        "goal": plan.goal,
        "against_cost": plan.minimizes_cost,
        "method": plan.method,
        "pruner": plan.pruner,
        "trials": plan.trials,
        "concurrency": plan.concurrency,
        "ceiling": "",
    }


def _control_values(parameter: Parameter) -> dict[str, Any]:
    """Return a parameter as the values of its controls."""
    is_range = parameter.kind != "categorical"
    return {
        "name": parameter.name,
        "type": parameter.kind,
        "low": str(parameter.low) if is_range else "",
        "high": str(parameter.high) if is_range else "",
        "scale": "log" if parameter.log else "linear",
        "step": str(parameter.step) if parameter.step is not None else "",
        "choices": _choices_text(parameter.choices),
        "when": _condition_text(parameter.when),  # the condition as JSON, which a hidden control sends back
        "condition": parameter.when,  # the condition itself, for the text that the row shows
    }


def _choices_text(choices: Sequence[Value]) -> str:
    """Return choices as a row of CSV: a choice that contains a comma is quoted. `_parse_choices` reads it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(choices)
    return text.getvalue()


def _condition_text(when: Condition | None) -> str:
    """Return the condition under which a parameter is used, as the API's JSON; empty without a condition."""
    return "" if when is None else json.dumps({"parameter": when.parameter, "in": list(when.values)})


def _parameter_names(base: Mapping[str, Any]) -> list[str]:
    """Return the names of parameters that the form suggests.

    They are those of PURCHASE_FIELDS, and the arguments and environment variables of the earlier order.
    """
    arguments = [word.partition("=")[0] for word in base.get("arguments") or [] if word.startswith("--")]
    return [*PURCHASE_FIELDS, *dict.fromkeys(arguments), *(base.get("environment") or {})]


def _api_data(posted: QueryDict, currency: str) -> dict[str, Any]:
    """Return the form as fields of the API. Raises InvalidInput."""
    return {
        "name": posted.get("name", ""),
        "space": _parse_space(posted),
        "objective": {
            "metric": posted.get("metric", ""),
            "goal": posted.get("goal", ""),
            "against_cost": "against_cost" in posted,
        },
        "method": posted.get("method", ""),
        "pruner": posted.get("pruner", ""),
        "trials": _parse_number(posted.get("trials", "")),
        "concurrency": _parse_number(posted.get("concurrency", "")),
    } | posted_ceiling(posted, currency)


def _parse_space(posted: QueryDict) -> dict[str, Any]:
    """Return the search space of the form's parameters. Rows without a name are left out. Raises InvalidInput."""
    columns = [posted.getlist(f"parameter_{name}") for name in ROW_FIELDS]
    space: dict[str, Any] = {}
    for cells in zip(*columns, strict=False):  # only a forged form has columns of different lengths
        row = dict(zip(ROW_FIELDS, map(str.strip, cells), strict=True))
        name = row["name"]
        if not name:
            continue
        if name in space:
            raise InvalidInput(fields={"space": _("%(name)s is listed twice.") % {"name": name}})
        if row["type"] == "categorical":
            space[name] = {"type": row["type"], "choices": _parse_choices(row["choices"])}
        else:
            space[name] = {"type": row["type"], "low": _parse_number(row["low"]), "high": _parse_number(row["high"])}
            if row["scale"] == "log":
                space[name]["log"] = True
            if row["step"]:
                space[name]["step"] = _parse_number(row["step"])
        if row["when"]:
            try:
                space[name]["when"] = json.loads(row["when"])
            except (ValueError, RecursionError):  # RecursionError: deeply nested brackets
                raise InvalidInput(fields={"space": _("The condition of a parameter is invalid.")}) from None
    return space


def _parse_choices(text: str) -> list[Value]:
    """Return the choices in a row of CSV. Raises InvalidInput."""
    try:
        cells = [cell.strip() for row in csv.reader([text], skipinitialspace=True) for cell in row]
    except csv.Error:
        raise InvalidInput(fields={"space": _("The choices of a parameter are invalid.")}) from None
    return [_parse_choice(cell) for cell in cells if cell]


def _parse_choice(text: str) -> Value:
    """Return a choice as a number if the number is written the same way. "007" and "1.10" would lose zeros."""
    number = _parse_number(text)
    return number if str(number) == text else text


def _parse_number(text: str) -> int | float | str:
    """Parse a number. Return any other text unchanged, so that the validation of its field refuses it."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _sort_trials(trials: list[selectors.TrialRow], sort: str, *, is_highest_best: bool) -> list[selectors.TrialRow]:
    """Return the trials in one of SORT_ORDERS. The order `best` has trials without a value last."""
    if sort == "newest":
        return trials[::-1]
    if sort == "cheapest":
        return sorted(trials, key=lambda trial: (trial.cost_minor, trial.number))
    if sort == "best":
        sign = -1 if is_highest_best else 1
        return sorted(trials, key=lambda trial: (trial.value is None, sign * (trial.value or 0), trial.number))
    return trials


def _parameter_values(plan: Plan, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return each parameter's name and value, in the space's order. The value is None if its condition was not met."""
    return [(parameter.name, values.get(parameter.name)) for parameter in plan.space]


def _chart_data(sweep: Sweep) -> dict[str, Any]:
    """Return the data for the script that draws the charts. The script gets the trials from the API."""
    plan = selectors.plan_of(sweep)
    axes = [
        {"name": parameter.name, "choices": [str(choice) for choice in parameter.choices], "log": parameter.log}
        for parameter in plan.space
    ]
    return {
        "trials": reverse("api_sweep_trials", args=[sweep.pk]),
        "job": reverse("job_detail", args=[0]),  # the script replaces 0 by the number of a trial's job
        "axes": axes,
        "metric": plan.metric,
        "goal": plan.goal,
        "against_cost": plan.minimizes_cost,
        "currency": sweep.quote.currency,
    }


def _quote_card(
    request: MemberRequest, quote: Quote, fields: Sequence[str] = (), *, problem: str = "", stale: bool = False
) -> HttpResponse:
    """Render the card of a quote for a new sweep or for more trials."""
    return quote_card(
        request, quote, template="jobs/_sweep_quote.html", order_url=reverse("sweep_order"), fields=fields,
        problem=problem, stale=stale, trials=quote.purchase["sweep"]["trials"],
    )  # fmt: skip

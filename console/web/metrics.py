"""Curves of jobs: the tab *Metrics*, points as a table and CSV, compared runs, and what it cost to reach a value."""

from __future__ import annotations

import csv
import math
from typing import Any
from urllib.parse import urlencode

from django.core.paginator import Paginator
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.core.errors import NotFound
from console.web.access import MemberRequest, member
from console.web.amounts import parse_row_id
from jobs import cost_analysis, curves, estimates, rows, selectors
from jobs.models import Attempt, Job, MetricPoint

MAX_COMPARED = 8
"""Largest number of runs in one chart: a chart has eight colors."""
MAX_SIBLINGS = 12
"""How many other runs of the same script the tab offers for a comparison."""
MAX_CURVES_IN_TABLE = 6
"""How many curves the table of compared runs shows, since each takes a column. The charts show every curve."""
POINTS_PER_PAGE = 50
"""How many rows one page of the table of points shows."""


@require_GET
@member(Capability.VIEW)
def job_metrics(request: MemberRequest, pk: int) -> HttpResponse:
    """Return the tab *Metrics* of a job, for htmx; its script requests the points from the API."""
    job = selectors.job_for(request.membership.organization, pk)
    siblings = curves.other_runs(job, MAX_SIBLINGS)
    context = {"job": job, "runs": [_chart_run(job)], "siblings": siblings, "limit": MAX_COMPARED - 1}
    return render(request, "jobs/_job_metrics.html", context)


@require_GET
@member(Capability.VIEW)
def job_points(request: MemberRequest, pk: int) -> HttpResponse:
    """List the points of a job's curves: the latest attempt first, then by curve, then the latest step first.

    `?curve=` selects one curve by its name.
    """
    job = selectors.job_for(request.membership.organization, pk)
    names = list(MetricPoint.objects.filter(job=job).order_by("name").values_list("name", flat=True).distinct())
    requested = request.GET.get("curve", "")
    chosen = requested if requested in names else ""
    points = MetricPoint.objects.filter(job=job)
    if chosen:
        points = points.filter(name=chosen)
    page = Paginator(points.order_by("-attempt", "name", "-position", "-pk"), POINTS_PER_PAGE).get_page(
        request.GET.get("page")
    )
    context = {"job": job, "title": selectors.title_of(job), "names": names, "chosen": chosen, "page": page}
    return render(request, "jobs/points.html", context)


@require_GET
@member(Capability.VIEW)
def job_points_csv(request: MemberRequest, pk: int) -> HttpResponse:
    """Download every point of a job as CSV.

    Names of curves begin with a letter, digit or underscore, so a spreadsheet takes none of them for a formula.
    """
    job = selectors.job_for(request.membership.organization, pk)
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="job-{job.pk}-points.csv"'
    writer = csv.writer(response)
    writer.writerow(curves.CSV_HEADER)
    writer.writerows(curves.csv_rows(curves.curves(job, limit=None)))
    return response


@require_POST
@member(Capability.VIEW)
def jobs_compare(request: MemberRequest) -> HttpResponse:
    """Lead from the selected rows of the list of jobs to their comparison."""
    return redirect(f"{reverse('job_compare')}?{urlencode({'jobs': ','.join(request.POST.getlist('job'))})}")


@require_GET
@member(Capability.VIEW)
def job_compare(request: MemberRequest) -> HttpResponse:
    """Compare runs in one chart per curve. `?jobs=1,2,3`, or `jobs` several times, names at most MAX_COMPARED."""
    organization = request.membership.organization
    jobs = _compared_jobs(organization, ",".join(request.GET.getlist("jobs")))
    extents = curves.extents(jobs)  # by job id and curve name: lowest, highest and best value
    all_names = {name for extents_by_name in extents.values() for name in extents_by_name}
    # The table shows the best value of each curve, so it needs to know whether higher or lower is better.
    judged_names = {name for name in all_names if curves.better(name) is not curves.Better.UNKNOWN}
    names = sorted(judged_names)[:MAX_CURVES_IN_TABLE]

    def best_values(job: Any) -> list[tuple[str, float | None]]:
        extents_by_name = extents[job.pk]
        return [(name, extents_by_name[name].best if name in extents_by_name else None) for name in names]

    context = {
        "names": names,
        "rows": [(rows.row(job), best_values(job)) for job in jobs],
        "runs": [_chart_run(job, is_free_estimate=job.is_free_estimate) for job in jobs],
        "limit": MAX_COMPARED,
    }
    return render(request, "jobs/compare.html", context)


def _chart_run(job: Job, *, is_free_estimate: bool | None = None) -> dict[str, Any]:
    """Return the id and title of a run, for the script that draws the charts.

    `is_free_estimate`: whether the job is a free estimate, which has another title. None: `title_of` finds out, which
    may cost a query.
    """
    return {"id": job.pk, "title": f"#{job.pk} {selectors.title_of(job, is_free_estimate=is_free_estimate)}"}


def _compared_jobs(organization: Organization, text: str) -> list[Any]:
    """Return the organization's jobs whose numbers `text` lists, in that order. Raises NotFound if one is missing.

    The type is Any, because the query adds attributes such as `is_free_estimate`.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    numbers = list(dict.fromkeys(map(parse_row_id, parts)))[:MAX_COMPARED]
    pks = [number for number in numbers if number is not None]
    if len(pks) < len(numbers):
        raise NotFound(_("Name the jobs by their numbers, for example ?jobs=12,15."))
    listed = rows.queryset(organization).filter(pk__in=pks).only(*rows.FIELDS, "lr", "batch_size")
    jobs_by_pk: dict[int, Any] = {job.pk: job for job in listed}
    if not set(pks) <= set(jobs_by_pk):
        raise NotFound
    return [jobs_by_pk[pk] for pk in pks]


@require_GET
@member(Capability.VIEW)
def job_cost(request: MemberRequest, pk: int) -> HttpResponse:
    """Show the cost analysis of a job. `?curve=` and `?target=` choose a value. htmx gets only a part of the page."""
    job = selectors.job_for(request.membership.organization, pk)
    free_times = cost_analysis.free_times(job)
    context = {
        "job": job,
        "title": selectors.title_of(job),
        "quote": job.order.quote,
        "free": [vars(free_time) for free_time in free_times],
        "free_minor": sum(free_time.worth_minor for free_time in free_times),
        "alternatives": [] if job.builtin_script else cost_analysis.alternatives(job),
        "assumed_speedup": 2**estimates.ASSUMED_SCALING,  # how much faster a run is with twice the nodes
    } | _cost_of_value(job, request.GET.get("curve", ""), request.GET.get("target", "").strip())
    return render(request, "jobs/_cost_analysis.html" if request.htmx else "jobs/cost_analysis.html", context)


def _cost_of_value(job: Job, curve: str, text: str) -> dict[str, Any]:
    """Return what jobs of the same script spent until a curve reached a value. Empty for free jobs and without curves.

    `text` is the typed value. If it is empty, `cost_analysis` chooses the value.
    """
    names = cost_analysis.curve_names(job)
    if not names:
        return {}
    no_attempts: list[Attempt] = []  # `is_free` depends on the quote alone: neither attempts nor the time matter
    if curves.Spending(job, no_attempts, job.queued_at).is_free:
        return {}
    name = curve if curve in names else names[0]
    # A value that was typed for another curve means nothing for this one.
    target, error = _parse_target(text if name == curve else "")
    compared_jobs = cost_analysis.comparable_jobs(job, MAX_COMPARED - 1)
    # `goal` is `target`, or the value that `cost_analysis` chose instead of None.
    goal, costs = cost_analysis.costs_of_value(compared_jobs, name, target)
    amounts = [cost.reached_minor for cost in costs if cost.reached_minor is not None]
    return {
        "names": names,
        "name": name,
        "goal": f"{goal:.6g}",
        "target_error": error,
        "is_lower": curves.better(name) is curves.Better.LOWER,
        "costs": costs,
        "cheapest_minor": min(amounts, default=None) if len(costs) > 1 else None,
        "runs": [_chart_run(cost.job) for cost in costs],
    }


def _parse_target(text: str) -> tuple[float | None, str]:
    """Return the typed value and an error. The value is None if the text is empty or no number."""
    if not text:
        return None, ""
    try:
        value = float(text.replace(",", "."))
    except ValueError:
        value = math.nan
    return (value, "") if math.isfinite(value) else (None, _("Enter a number, for example 0.95."))

"""Curves of jobs: the tab *Metrics*, points as a table and as CSV, several runs in one chart, and what values cost."""

from __future__ import annotations

import csv
import math
from typing import Any

from django.core.paginator import Paginator
from django.db.models import Q
from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET

from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.core.errors import NotFound
from console.web.access import MemberRequest, member
from jobs import cost_analysis, curves, estimates, free_runs, rows, selectors
from jobs.models import Job, MetricPoint

MAX_COMPARED = 8
"""Runs in one chart: each has one of the eight colors of a chart."""
MAX_SIBLINGS = 12
"""Other runs of the script that the tab offers for a comparison."""
MAX_ID_DIGITS = 18
"""Digits of a job's number: within its 64-bit column."""
MAX_CURVES_IN_TABLE = 6
"""Columns of best values in the table of compared runs. The charts show every curve."""
POINTS_PER_PAGE = 100


@require_GET
@member(Capability.VIEW)
def job_metrics(request: MemberRequest, pk: int) -> HttpResponse:
    """Return the tab *Metrics* of a job, for htmx; its script requests the points from the API."""
    job = selectors.job_for(request.membership.organization, pk)
    siblings = curves.siblings(job, MAX_SIBLINGS)
    context = {"job": job, "runs": [_run(job)], "siblings": siblings, "limit": MAX_COMPARED - 1}
    return render(request, "jobs/_job_metrics.html", context)


@require_GET
@member(Capability.VIEW)
def job_points(request: MemberRequest, pk: int) -> HttpResponse:
    """List the points of a job's curves, the latest attempt and step first. `?curve=` selects one by its name."""
    job = selectors.job_for(request.membership.organization, pk)
    names = list(MetricPoint.objects.filter(job=job).order_by("name").values_list("name", flat=True).distinct())
    chosen = request.GET.get("curve", "")
    chosen = chosen if chosen in names else ""
    points = MetricPoint.objects.filter(job=job).filter(Q(name=chosen) if chosen else Q())
    page = Paginator(points.order_by("-attempt", "name", "-position", "-pk"), POINTS_PER_PAGE).get_page(
        request.GET.get("page")
    )
    context = {"job": job, "title": free_runs.title(job), "names": names, "chosen": chosen, "page": page}
    return render(request, "jobs/points.html", context)


@require_GET
@member(Capability.VIEW)
def job_points_csv(request: MemberRequest, pk: int) -> HttpResponse:
    """Download every point of a job as CSV. Names of curves begin with a letter or digit, so none is a formula."""
    job = selectors.job_for(request.membership.organization, pk)
    answer = HttpResponse(content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = f'attachment; filename="job-{job.pk}-points.csv"'
    writer = csv.writer(answer)
    writer.writerow(curves.CSV_HEADER)
    writer.writerows(curves.table(curves.curves(job, limit=None)))
    return answer


@require_GET
@member(Capability.VIEW)
def job_compare(request: MemberRequest) -> HttpResponse:
    """Compare runs in one chart per curve. `?jobs=1,2,3`, or `jobs` several times, names at most MAX_COMPARED."""
    organization = request.membership.organization
    chosen = _jobs(organization, ",".join(request.GET.getlist("jobs")))
    extents = curves.extents(chosen)
    names = sorted({name for each in extents.values() for name in each if curves.better(name)})[:MAX_CURVES_IN_TABLE]
    context = {
        "names": names,
        "rows": [
            rows.row(job)
            | {"best": [(name, extent.best if (extent := extents[job.pk].get(name)) else None) for name in names]}
            for job in chosen
        ],
        "runs": [_run(job, is_probe=job.was_probe) for job in chosen],
        "limit": MAX_COMPARED,
    }
    return render(request, "jobs/compare.html", context)


def _run(job: Job, *, is_probe: bool | None = None) -> dict[str, Any]:
    """Return what the charts' script needs to know about a run."""
    return {"id": job.pk, "title": f"#{job.pk} {free_runs.title(job, is_probe=is_probe)}"}


def _jobs(organization: Organization, text: str) -> list[Any]:
    """Return the organization's jobs that the text names, in its order. Raises NotFound if one does not exist."""
    numbers = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))[:MAX_COMPARED]
    if not all(number.isdecimal() and len(number) <= MAX_ID_DIGITS for number in numbers):
        raise NotFound(_("Name the jobs by their numbers, for example ?jobs=12,15."))
    listed = rows.listed(organization).filter(pk__in=numbers).only(*rows.FIELDS, "lr", "batch_size")
    found: dict[int, Any] = {job.pk: job for job in listed}
    chosen = [found.get(int(number)) for number in numbers]
    if None in chosen:
        raise NotFound
    return [job for job in chosen if job is not None]


@require_GET
@member(Capability.VIEW)
def job_cost(request: MemberRequest, pk: int) -> HttpResponse:
    """Show what a job's money bought. `?curve=` and `?target=` choose a value. htmx gets the part of the tab."""
    job = selectors.job_for(request.membership.organization, pk)
    free = cost_analysis.free_times(job)
    context = {
        "job": job,
        "title": free_runs.title(job),
        "quote": job.order.quote,
        "free": [vars(each) for each in free],
        "free_minor": sum(each.worth_minor for each in free),
        "alternatives": [] if job.builtin_script else cost_analysis.alternatives(job),
        "gain": 2**estimates.ASSUMED_SCALING,
    } | _cost_of_value(job, request.GET.get("curve", ""), request.GET.get("target", "").strip())
    return render(request, "jobs/_cost_analysis.html" if request.htmx else "jobs/cost_analysis.html", context)


def _cost_of_value(job: Job, curve: str, text: str) -> dict[str, Any]:
    """Return what the job and its siblings spent until a curve reached a value; empty without curves."""
    names = cost_analysis.names_of(job)
    if not names or curves.Spending(job, [], job.queued_at).is_free:
        return {}
    name = curve if curve in names else names[0]
    target, error = _target(text if name == curve else "")
    goal, found = cost_analysis.costs_of_value(cost_analysis.compared(job, MAX_COMPARED - 1), name, target)
    reached = [each.reached_minor for each in found if each.reached_minor is not None]
    return {
        "names": names,
        "name": name,
        "goal": f"{goal:.6g}",
        "target_error": error,
        "is_lower": curves.better(name) is curves.Better.LOWER,
        "costs": found,
        "cheapest_minor": min(reached, default=None) if len(found) > 1 else None,
        "runs": [_run(each.job) for each in found],
    }


def _target(text: str) -> tuple[float | None, str]:
    """Return the typed value, None for none; and what is wrong with it."""
    if not text:
        return None, ""
    try:
        value = float(text.replace(",", "."))
    except ValueError:
        value = math.nan
    return (value, "") if math.isfinite(value) else (None, _("Enter a number, for example 0.95."))

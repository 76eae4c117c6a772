"""Jobs: the list, and everything there is to see about one.

The page asks for `job_live` whenever the job's stream has news, so that words and money come in the reader's language.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import Count
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_POST

from console.accounts.errors import CustomerError
from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member, tell
from jobs import calibration, checks, orders, selectors
from jobs.models import Job
from jobs.states import ENDED, JobState

PAGE = 25
OPEN = tuple(sorted(set(JobState) - ENDED))
FILTERS = {
    "": (gettext_lazy("All"), tuple(JobState)),
    "open": (gettext_lazy("Open"), OPEN),
    "succeeded": (gettext_lazy("Succeeded"), (JobState.SUCCEEDED,)),
    "failed": (gettext_lazy("Failed"), (JobState.FAILED,)),
    "cancelled": (gettext_lazy("Cancelled"), (JobState.CANCELLED,)),
}
"""A choice of the list -> its title and the states it shows."""


@require_GET
@member(Capability.VIEW)
def job_list(request: MemberRequest) -> HttpResponse:
    """Every job, newest first. `?state=` is one of FILTERS. htmx asks for the rows alone while something moves."""
    organization = request.membership.organization
    chosen = request.GET.get("state", "")
    chosen = chosen if chosen in FILTERS else ""
    found = selectors.jobs_for(organization).filter(state__in=FILTERS[chosen][1])
    page = Paginator(found, PAGE).get_page(request.GET.get("page"))
    context = {"page": page, "rows": rows(page), "moving": any(not job.is_ended for job in page)}
    if request.htmx:
        return render(request, "jobs/_job_rows.html", context)
    counts = _counts(organization)
    filters = [
        {
            "value": value,
            "title": title,
            "count": sum(counts.get(state, 0) for state in states),
            "is_chosen": value == chosen,
        }
        for value, (title, states) in FILTERS.items()
    ]
    return render(request, "jobs/job_list.html", context | {"filters": filters, "chosen": chosen})


def rows(jobs: Any) -> list[dict[str, Any]]:
    """Jobs as a list shows them. No query for each."""
    return [
        {
            "job": job,
            "progress": selectors.progress(job),
            "cost_minor": selectors.cost_minor(job),
            "quote": job.order.quote,
        }
        for job in jobs
    ]


@require_GET
@member(Capability.VIEW)
def job_detail(request: MemberRequest, pk: int) -> HttpResponse:
    """One job, with all its tabs."""
    job = selectors.job_for(request.membership.organization, pk)
    context = _live(job) | {
        "ranks": range(job.nodes * job.workers_per_node),
        "environment": _environment(job),
        "attempt_numbers": [attempt["number"] for attempt in selectors.summary(job)["attempts"]],
    }
    return render(request, "jobs/job_detail.html", context)


@require_GET
@member(Capability.VIEW)
def job_live(request: MemberRequest, pk: int) -> HttpResponse:
    """The parts that change: the header, and out of band the overview, nodes, events and cost."""
    return render(request, "jobs/_live.html", _live(selectors.job_for(request.membership.organization, pk)))


@require_GET
@member(Capability.VIEW)
def job_stacks(request: MemberRequest, pk: int, attempt: int) -> HttpResponse:
    """Where the ranks of a hung attempt stood: alike ones told together, then each in full."""
    stacks = selectors.stacks(selectors.job_for(request.membership.organization, pk), attempt)
    places: dict[str, list[int]] = {}
    for stack in stacks:
        places.setdefault(_innermost(stack["text"]), []).append(stack["rank"])
    frames = [{"place": place, "ranks": ranks} for place, ranks in places.items() if place]
    return render(request, "jobs/_job_stacks.html", {"stacks": stacks, "frames": frames})


@require_POST
@member(Capability.RUN)
def job_cancel(request: MemberRequest, pk: int) -> HttpResponse:
    """End a job."""
    job = selectors.job_for(request.membership.organization, pk)
    try:
        orders.cancel_job(membership=request.membership, job=job)
        messages.success(request, _("Cancelling. Your code gets a moment to write a checkpoint."))
    except CustomerError as error:
        tell(request, error)
    return redirect("job_detail", pk)


def _live(job: Job) -> dict[str, Any]:
    summary = selectors.summary(job)
    summary["attempts"] = [_attempt(attempt) for attempt in summary["attempts"]]
    failures = [attempt for attempt in summary["attempts"] if attempt["failure"]]
    return {
        "job": job,
        "summary": summary,
        "quote": job.order.quote,
        "nodes": [_node(node) for node in selectors.nodes(job)],
        "events": selectors.events(job),
        "receipt": selectors.receipt(job),
        "outcome": calibration.outcome(job),
        "failure": failures[-1]["failure"] if failures and job.state == JobState.FAILED else None,
        "datasets": [row.version for row in job.job_datasets.select_related("version__dataset")],
        "checklist": checks.checklist(job) if job.builtin_script else [],
        "may_cancel": not job.is_ended and job.state != JobState.STOPPING,
    }


def _attempt(attempt: dict[str, Any]) -> dict[str, Any]:
    """An attempt with what its row shows besides."""
    seconds = [(span["finished_at"] - span["started_at"]).total_seconds() for span in attempt["spans"]]
    spans = [span | {"seconds": length} for span, length in zip(attempt["spans"], seconds, strict=True)]
    began, saved = attempt["started_at"], attempt["checkpoint_at"]
    return attempt | {
        "reason_title": Job.Reasons(attempt["reason"]).label if attempt["reason"] else "",
        "ran_seconds": sum(seconds) if seconds else None,
        "spans": spans,
        "has_checkpoint": bool(began and saved and saved >= began),
    }


def _node(node: dict[str, Any]) -> dict[str, Any]:
    """A node with its times as moments; the backend gives Unix seconds."""
    times = ("started_at", "finished_at")
    return node | {
        name: datetime.fromtimestamp(node[name], tz=UTC) if node.get(name) is not None else None for name in times
    }


def _innermost(text: str) -> str:
    """The first frame of faulthandler's word for the main thread: the call that it is in."""
    _before, current, after = text.partition("Current thread")
    lines = (after if current else text).splitlines()
    return next((line.strip() for line in lines if line.lstrip().startswith("File ")), "")


def _environment(job: Job) -> dict[str, str]:
    try:
        return selectors.environment(job)
    except CustomerError:
        return {}


def _counts(organization: Organization) -> dict[str, int]:
    return dict(
        Job.objects.filter(organization=organization).order_by().values_list("state").annotate(found=Count("pk"))
    )

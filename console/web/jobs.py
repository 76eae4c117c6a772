"""Pages of jobs: the list, a job's configuration, and the forms of the job page (`console.web.job_page`)."""

from __future__ import annotations

from datetime import date, datetime, time
from typing import Any
from urllib.parse import parse_qsl

from django.contrib import messages
from django.http import HttpResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_POST

from billing.models import NodeSpec
from console.accounts import selectors as accounts
from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.core.errors import InvalidInput
from console.web.access import MemberRequest, errors_as_message, member
from console.web.amounts import parse_row_id
from console.web.costs import csv_file
from jobs import exports, job_search, orders, reruns, rows, selectors, snapshots, tensorboards
from jobs.details import update_details
from jobs.job_search import JobSearch
from jobs.messages import stopping_sentence
from jobs.models import Job
from storage import selectors as storage

MAX_SELECTED = 100
"""Maximum number of jobs that one form may cancel. The page sends 25 at most; the limit bounds what a script sends."""


@require_GET
@member(Capability.VIEW)
def job_list(request: MemberRequest) -> HttpResponse:
    """List the jobs of a search. While a job is open, htmx requests the rows again and again.

    The parameters are those of `JobSearch`. `?after=<job>` shows the page that follows a job, `?before=<job>` the page
    that precedes it, and `?filters=1` shows all filters.
    """
    organization = request.membership.organization
    search = JobSearch.parse(request.GET.dict())
    edges = {name: parse_row_id(request.GET.get(name, "")) for name in ("after", "before")}
    page = job_search.page(organization, search, **edges)
    context: dict[str, Any] = {
        "search": search,
        "page": page,
        "rows": [rows.row(job) for job in page.jobs],
        "has_open": any(not job.is_ended for job in page.jobs),
        "has_tensorboard": tensorboards.is_available(),
    }
    if request.htmx:
        return render(request, "jobs/_job_rows.html", context)
    counts = {} if search.is_filtered else job_search.counts_by_state(organization)
    context |= {
        "tabs": [_state_tab(search, state, counts) for state in ("", *job_search.STATES)],
        # The ways to sort the list, and the member's saved searches.
        "orders": {name: title for name, (title, _columns) in job_search.SORT_ORDERS.items()},
        "views": job_search.views(request.membership),
    }
    if search.is_filtered or "filters" in request.GET:
        context |= _filter_choices(organization)
    return render(request, "jobs/job_list.html", context)


def _state_tab(search: JobSearch, state: str, counts: dict[str, int]) -> dict[str, Any]:
    """Return the tab of a state; an empty `state` means all jobs. Without `counts`, the tab shows no count.

    `job_search.counts_by_state` stops counting just above COUNT_LIMIT. The tab then shows the limit with a plus sign.
    """
    count, is_capped = None, False
    if counts and state:
        count = counts.get(state)
        is_capped = count is not None and count > job_search.COUNT_LIMIT
    elif counts:
        count = sum(counts.values())
        is_capped = max(counts.values()) > job_search.COUNT_LIMIT
    return {
        "title": job_search.STATES[state][0] if state else _("All"),
        "query": search.in_state(state).query_string,
        "count": job_search.COUNT_LIMIT if is_capped else count,
        "is_capped": is_capped,
        "is_chosen": search.state == state,
    }


def _filter_choices(organization: Organization) -> dict[str, list[Any]]:
    """Return the choices of the filters: names of workspaces, names and titles of node specs, addresses of members."""
    return {
        "workspaces": list(storage.workspaces_for(organization).order_by("name").values_list("name", flat=True)),
        "node_specs": list(NodeSpec.objects.order_by("title").values_list("name", "title")),
        "members": list(accounts.members(organization=organization).values_list("user__email", flat=True)),
    }


@require_GET
@member(Capability.VIEW)
def job_export(request: MemberRequest) -> StreamingHttpResponse:
    """Return the jobs of a search as CSV. The parameters are those of the list."""
    organization = request.membership.organization
    jobs = job_search.export(organization, JobSearch.parse(request.GET.dict()))
    return csv_file(exports.jobs_csv(jobs), f"trainyard-{organization.slug}-jobs.csv")


@require_POST
@member(Capability.RUN)
def job_cancel_selected(request: MemberRequest) -> HttpResponse:
    """Cancel the selected jobs that are open. Jobs of other organizations are ignored."""
    selected_pks = [pk for pk in map(parse_row_id, request.POST.getlist("job")[:MAX_SELECTED]) if pk]
    jobs = Job.objects.filter(organization=request.membership.organization, pk__in=selected_pks).order_by("pk")
    cancelled_count = orders.cancel_jobs(membership=request.membership, jobs=jobs)
    messages.success(
        request,
        ngettext("%(count)d job is being cancelled.", "%(count)d jobs are being cancelled.", cancelled_count)
        % {"count": cancelled_count},
    )
    return _back_to_list(request.POST.get("query", ""))


@require_POST
@member(Capability.VIEW)
def job_view_save(request: MemberRequest) -> HttpResponse:
    """Save the search of the form as a view with a name."""
    search = JobSearch.parse(dict(parse_qsl(request.POST.get("query", ""))))
    with errors_as_message(request):
        view = job_search.save_view(membership=request.membership, name=request.POST.get("name", ""), search=search)
        messages.success(request, _("The view %(name)s was saved.") % {"name": view})
    return _back_to_list(search.query_string)


@require_POST
@member(Capability.VIEW)
def job_view_delete(request: MemberRequest, pk: int) -> HttpResponse:
    """Delete one of the member's saved views."""
    job_search.delete_view(membership=request.membership, pk=pk)
    messages.success(request, _("The view was deleted."))
    return redirect("job_list")


def _back_to_list(query: str) -> HttpResponse:
    """Redirect to the list with the search of a query string."""
    search = JobSearch.parse(dict(parse_qsl(query)))
    return redirect(f"{reverse('job_list')}?{search.query_string}")


@require_GET
@member(Capability.VIEW)
def job_configuration(request: MemberRequest, pk: int) -> HttpResponse:
    """Show the choices of a job's order, and which of them have changed since."""
    job = selectors.job_for(request.membership.organization, pk)
    context = {
        "job": job,
        "title": selectors.title_of(job),
        "configuration": reruns.configuration(job),
        "script_path": snapshots.script_path(job),
    }
    return render(request, "jobs/configuration.html", context)


@require_POST
@member(Capability.STORE)
def job_edit(request: MemberRequest, pk: int) -> HttpResponse:
    """Change a job's name, tags and notes, or how long its files are kept: only the fields that the form sends.

    This needs STORE, because files that are kept count against the storage quota.
    """
    job = selectors.job_for(request.membership.organization, pk)
    data: dict[str, Any] = {name: request.POST[name] for name in ("name", "tags", "notes") if name in request.POST}
    with errors_as_message(request):
        if "keep_until" in request.POST:
            data["keep_until"] = _end_of_day(request.POST["keep_until"])
        update_details(job=job, user=request.membership.user, data=data)
        messages.success(request, _("The changes were saved."))
    return redirect("job_detail", pk)


@require_POST
@member(Capability.RUN)
def job_cancel(request: MemberRequest, pk: int) -> HttpResponse:
    """Stop a job."""
    job = selectors.job_for(request.membership.organization, pk)
    with errors_as_message(request):
        job = orders.cancel_job(membership=request.membership, job=job)
        # A queued job has already ended here. A started one is still stopping.
        ended = _("The notebook was stopped.") if job.is_notebook else _("The job was cancelled.")
        stopping = stopping_sentence(has_started=job.started_at is not None, is_notebook=job.is_notebook)
        messages.success(request, ended if job.is_ended else stopping)
    return redirect("job_detail", pk)


def _end_of_day(text: str) -> datetime | None:
    """Return the last minute of a day in the reader's time zone; None for an empty text. Raises InvalidInput."""
    if not text:
        return None
    try:
        return timezone.make_aware(datetime.combine(date.fromisoformat(text), time(23, 59)))
    except (ValueError, OverflowError):
        raise InvalidInput(fields={"keep_until": _("Enter a date, for example 2027-01-31.")}) from None

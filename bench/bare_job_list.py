"""The baseline of the list of jobs in `bench.pages`: the URLs of the console, and the smallest view of the same rows.

The view has the console's middleware, log-in and check of the role. With the console's own search, it reads what a row
of the list shows. It writes a line of plain text for each job, without a template.
"""

from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from console import urls
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member
from jobs import job_search, rows


@member(Capability.VIEW)
def bare_job_list(request: MemberRequest) -> HttpResponse:
    """Return the first page of the organization's jobs as plain text."""
    search = job_search.JobSearch.parse(request.GET.dict())
    page = job_search.page(request.membership.organization, search)
    lines = [
        f"{row.number} {row.title} {row.script} {row.tags} {row.state} {row.progress} {row.machines} {row.queued_at} "
        f"{row.placed_by_email} {row.cost_minor} {row.ceiling_minor} {row.currency}\n"
        for row in map(rows.row, page.jobs)
    ]
    return HttpResponse("".join(lines), content_type="text/plain")


urlpatterns = [path("bare/jobs/", bare_job_list, name="bare_job_list"), *urls.urlpatterns]

"""The page of a customer's job for administrators: most tabs of the job page, read-only.

The templates are those of the job page, with `read_only`. The administrator is no member of the customer's
organization, so files, shells, notebooks, TensorBoard and every form remain out of reach: their URLs return 404.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django.http import Http404, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, render
from django.urls import path, reverse
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_GET

from console.accounts.services import record
from console.web import job_page
from console.web.access import operator
from jobs import curves, free_runs, selectors
from jobs.models import Job
from jobs.serializers import CurvesSerializer

METRICS = "metrics"
TABS = {
    job_page.OVERVIEW: _("Overview"),
    "logs": _("Logs"),
    METRICS: _("Metrics"),
    "nodes": _("Nodes"),
    "events": _("Events"),
    "cost": _("Cost"),
    "configuration": _("Configuration"),
}
"""The tabs and their titles. *Files* is not among them: support needs no customer's files."""


@require_GET
@operator("jobs.view_job")
def operator_job(request: Any, pk: int, tab: str = job_page.OVERVIEW) -> HttpResponse:
    """Show a tab of a customer's job, and record in the audit log who opened it."""
    if tab not in TABS:
        raise Http404
    job = _open_job(request, pk, tab)
    context = job_page.header(job) | {
        "title": free_runs.title(job),
        "tabs": TABS,
        "chosen": tab,
        "read_only": True,
    }
    if tab == METRICS:
        context |= {"runs": [{"id": job.pk, "title": context["title"]}], "template": "jobs/_charts.html"}
        context |= {"curves_url": reverse("operator_job_curves", args=[job.pk])}
    else:
        context |= job_page.TABS[tab](job) | {"template": f"jobs/_job_{tab}.html"}
    if "configuration" in context:
        # The script is a file of the customer's. Its size, hash and differences in settings are shown.
        context["configuration"] = replace(context["configuration"], text=None, diff=[])
    return render(request, "jobs/operator_page.html", context)


@require_GET
@operator("jobs.view_job")
def operator_job_curves(request: Any, pk: int) -> HttpResponse:
    """Return the curves of a customer's job for the script of the tab *Metrics*, which reads them once."""
    return JsonResponse(CurvesSerializer(curves.curves(_open_job(request, pk, "curves"))).data)


def _open_job(request: Any, pk: int, tab: str) -> Job:
    """Return a job of any organization, and record in that organization's audit log who opened it. Raises Http404."""
    organization = get_object_or_404(Job.objects.select_related("organization"), pk=pk).organization
    job = selectors.job_for(organization, pk)
    record(
        organization=organization,
        actor=request.user,
        action="job.page_opened_by_operator",
        target=f"job:{job.pk}",
        data={"tab": tab},
    )
    return job


urlpatterns = [
    path("admin/jobs/job/<int:pk>/page/", operator_job, name="operator_job"),
    path("admin/jobs/job/<int:pk>/page/curves/", operator_job_curves, name="operator_job_curves"),
    path("admin/jobs/job/<int:pk>/page/<slug:tab>/", operator_job, name="operator_job"),
]
"""Below `/admin/`, so that a proxy's rules for it apply. They are not routes of the admin site, whose content security
policy is less strict."""

"""The page on which an operator reads a customer's job: most tabs of the job page, read-only.

An operator is an administrator of the installation, who is no member of the customer's organization. The page uses the
templates of the job page, with `read_only`. Files, shells, notebooks, TensorBoard and all forms have URLs of their own.
These require a membership of the customer's organization, so an operator never gets there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django.http import Http404, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, render
from django.urls import path, reverse
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_GET

from console.accounts.models import Organization
from console.accounts.services import record_audit_event
from console.web import job_page
from console.web.access import operator
from jobs import curves, selectors
from jobs.models import Job
from jobs.serializers import CurvesSerializer

METRICS = "metrics"
"""The tab that `job_page.TABS` does not have, because the browser draws the curves (`metrics.js`)."""
TAB_TITLES = {
    job_page.OVERVIEW: _("Overview"),
    "logs": _("Logs"),
    METRICS: _("Metrics"),
    "nodes": _("Nodes"),
    "events": _("Events"),
    "cost": _("Cost"),
    "configuration": _("Configuration"),
}
"""The titles of the tabs: METRICS, and those of `job_page.TABS`. There is no tab *Files*: operators do not see
customers' data."""


@require_GET
@operator("jobs.view_job")
def operator_job(request: Any, pk: int, tab: str = job_page.OVERVIEW) -> HttpResponse:
    """Show a tab of a customer's job, and write an audit log entry that names the operator."""
    if tab not in TAB_TITLES:
        raise Http404
    job = _audited_job(request, pk, tab)
    context = job_page.header_context(job) | {
        "title": selectors.title_of(job),
        "tabs": TAB_TITLES,
        "active_tab": tab,
        "read_only": True,
    }
    if tab == METRICS:
        # The template draws the curves of several jobs, and calls each a run.
        context |= {"runs": [{"id": job.pk, "title": context["title"]}], "template": "jobs/_charts.html"}
        context |= {"curves_url": reverse("operator_job_curves", args=[job.pk])}
    else:
        context |= job_page.TABS[tab](job) | {"template": f"jobs/_job_{tab}.html"}
    if "configuration" in context:
        # Operators do not see the script's text or changes, which are a customer's data. They see its size and hash.
        context["configuration"] = replace(context["configuration"], text=None, diff=[])
    return render(request, "jobs/operator_page.html", context)


@require_GET
@operator("jobs.view_job")
def operator_job_curves(request: Any, pk: int) -> HttpResponse:
    """Return the curves of a customer's job as JSON, which `metrics.js` requests once in the tab *Metrics*."""
    return JsonResponse(CurvesSerializer(curves.curves(_audited_job(request, pk, "curves"))).data)


def _audited_job(request: Any, pk: int, tab: str) -> Job:
    """Return a job of any organization, and write to that organization's audit log who opened it. Raises Http404."""
    organization = get_object_or_404(Organization, jobs=pk)
    job = selectors.job_for(organization, pk)
    record_audit_event(
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
"""The paths begin with `/admin/`, so that a proxy's rules for administrators apply to them too. The views do not belong
to Django's admin site, because that site has a looser Content-Security-Policy (`console.content_security`)."""

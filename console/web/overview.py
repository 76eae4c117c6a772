"""The overview page: current state and next steps."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_GET

from billing import budgets, costs
from billing import selectors as billing
from billing.models import Account
from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.accounts.services import is_active
from console.web import attention
from console.web.access import MemberRequest, member
from console.web.training import has_script
from jobs import clusters, rows, selectors
from jobs.clusters import cluster_names
from jobs.models import Job
from jobs.states import ENDED, OPEN, JobState
from storage import selectors as storage

MAX_ROWS = 6
"""How many jobs each of the two lists shows: open jobs, and ended ones."""


@dataclass(frozen=True)
class Step:
    """A step from sign-up to the first run. A member needs `capability` to take it."""

    title: str | Promise
    text: str | Promise
    url: str
    capability: Capability
    is_done: bool


@require_GET
@member(Capability.VIEW)
def overview(request: MemberRequest) -> HttpResponse:
    """Show jobs, spend, storage, capacity and notices. Until a first run has ended, also show the steps to it."""
    organization = request.membership.organization
    account = billing.wallet_with_settings(organization)
    ended_jobs = list(rows.queryset(organization).filter(state__in=ENDED)[:MAX_ROWS])
    totals = selectors.open_totals(organization)
    open_jobs = _open_jobs(organization) if totals.running or totals.waiting else []
    steps = [] if ended_jobs else _steps(organization, account, has_job=bool(open_jobs))
    usage, quota_bytes = storage.usage(organization), organization.quota.max_storage_bytes
    budget_states, cluster_totals = budgets.states_of(account) if account else [], _cluster_totals()
    notice_data = attention.OverviewData(
        membership=request.membership,
        account=account,
        runway=budgets.runway_of(account) if account else None,
        budgets=budget_states,
        usage=usage,
        silent_clusters=[name for name, capacity in cluster_totals.items() if capacity is None],
    )
    return render(
        request,
        "overview.html",
        {
            "account": account,
            "wallet": account,  # its name in base.html, which would query the wallet again
            "notices": attention.notices(notice_data),
            "open": totals,
            "budget": next((state for state in budget_states if state.budget.user is None), None),
            "spent_minor": costs.spent_minor(organization, costs.month_of()) if account else None,
            "usage": usage,
            "quota_bytes": quota_bytes,
            "storage_fraction": usage.counted_bytes / quota_bytes if quota_bytes else 1,
            "open_rows": _open_rows(organization, open_jobs),
            "last_rows": [rows.row(job) for job in ended_jobs],
            "clusters": cluster_totals,
            "steps": steps,
            "next_step": next((step for step in steps if not step.is_done), None),
            "done_count": sum(step.is_done for step in steps),
        },
    )


def _open_jobs(organization: Organization) -> list[Job]:
    """Return the newest open jobs for `rows.row`.

    Each state has its own query, for which an index returns the rows in order. One query for all states would be a
    prepared statement, which PostgreSQL plans without the states' values. For an organization without open jobs, such
    a plan would read every job.
    """
    first, *others = [
        Job.objects.filter(organization=organization, state=state).order_by("-queued_at", "-id").values("pk")[:MAX_ROWS]
        for state in sorted(OPEN)
    ]
    newest = [row["pk"] for row in first.union(*others, all=True)]
    return list(rows.with_ids(newest)[:MAX_ROWS])


def _open_rows(organization: Organization, jobs: list[Job]) -> list[rows.Row]:
    """Return the rows of open jobs. The row of a job that waits or starts says why it does not run yet."""
    waiting_pks = [job.pk for job in jobs if job.state in {JobState.QUEUED, JobState.STARTING}]
    waiting_jobs = selectors.jobs_for(organization).filter(pk__in=waiting_pks) if waiting_pks else ()
    reasons = {job.pk: selectors.waiting_for(job) for job in waiting_jobs}
    return [rows.row(job, reasons.get(job.pk, "")) for job in jobs]


def _cluster_totals() -> dict[str, clusters.ClusterTotals | None]:
    """Return the total and free capacity by cluster name; None for clusters that do not answer."""
    capacities = selectors.capacities_now()
    return {name: clusters.totals(capacities[name]) if name in capacities else None for name in cluster_names()}


def _steps(organization: Organization, account: Account | None, *, has_job: bool) -> list[Step]:
    """Return the steps in order. `has_job`: the organization has an open job."""
    workspace = storage.workspaces_for(organization).first()
    return [
        Step(
            _("Activate the service"),
            _("Read and accept the terms. This creates your wallet and a first workspace."),
            reverse("activation"),
            Capability.MANAGE,
            is_done=is_active(organization),
        ),
        Step(
            _("Top up the wallet"),
            _("Runs are paid in advance; unused funds are returned."),
            reverse("wallet"),
            Capability.PAY,
            is_done=bool(account and account.posted_minor > 0),
        ),
        Step(
            _("Upload a dataset"),
            _("Upload an archive or a folder. Your code reads it from $DATASETS_PATH/<name>."),
            reverse("dataset_list"),
            Capability.STORE,
            is_done=storage.datasets_for(organization).filter(latest__isnull=False).exists(),
        ),
        Step(
            _("Add a script to the workspace"),
            _("Upload a script or write one in the editor."),
            reverse("workspace_detail", args=[workspace.name]) if workspace else reverse("workspace_list"),
            Capability.STORE,
            is_done=bool(workspace and has_script(workspace)),
        ),
        Step(
            _("Buy your first run"),
            _("Choose nodes and settings. The price and the ceiling update as you type."),
            reverse("training_new"),
            Capability.RUN,
            is_done=has_job,
        ),
    ]

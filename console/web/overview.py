"""The first page: where one stands, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_GET

from billing import budgets
from billing import selectors as billing
from billing.models import Account
from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.accounts.services import is_active
from console.web.access import MemberRequest, member
from console.web.jobs import rows
from console.web.training import has_script
from jobs import clusters
from jobs import selectors as jobs
from jobs.backend import cluster_names
from jobs.states import ENDED
from storage import selectors as storage

SHOWN = 6


@dataclass(frozen=True)
class Step:
    """One step from sign-up to the first run; `capability` is what it takes."""

    title: str | Promise
    text: str | Promise
    url: str
    capability: Capability
    is_done: bool


@require_GET
@member(Capability.VIEW)
def overview(request: MemberRequest) -> HttpResponse:
    """Wallet, open jobs, last runs, the cluster's capacity; until the first run, the steps to it."""
    organization = request.membership.organization
    account = billing.wallet(organization)
    last = list(jobs.jobs_for(organization).filter(state__in=ENDED)[:SHOWN])
    running = list(jobs.open_jobs(organization)[:SHOWN])
    steps = [] if last else _steps(organization, account, has_job=bool(running))
    return render(
        request,
        "overview.html",
        {
            "account": account,
            "budgets": budgets.states(organization),
            "balance": budgets.balance(account) if account else None,
            "open_rows": rows(running),
            "last_rows": rows(last),
            "clusters": _rooms(),
            "steps": steps,
            "next_step": next((step for step in steps if not step.is_done), None),
            "done_count": sum(step.is_done for step in steps),
        },
    )


def _rooms() -> dict[str, clusters.Sums | None]:
    """What each cluster has; None for one that does not answer."""
    answered = jobs.capacities_now()
    return {name: clusters.sums(answered[name]) if name in answered else None for name in cluster_names()}


def _steps(organization: Organization, account: Account | None, *, has_job: bool) -> list[Step]:
    workspace = storage.workspaces_for(organization).first()
    return [
        Step(
            _("Activate the service"),
            _("Read the terms and accept them. That makes your wallet and a first workspace."),
            reverse("activation"),
            Capability.MANAGE,
            is_active(organization),
        ),
        Step(
            _("Top up the wallet"),
            _("Runs are paid in advance; what a run does not use is yours again."),
            reverse("wallet"),
            Capability.PAY,
            bool(account and account.posted_minor > 0),
        ),
        Step(
            _("Upload a dataset"),
            _("An archive or a folder. Your code finds it at $DATASETS_PATH/<name>."),
            reverse("dataset_list"),
            Capability.STORE,
            storage.datasets_for(organization).filter(latest__isnull=False).exists(),
        ),
        Step(
            _("Put a script in the workspace"),
            _("Upload it, or write it in the editor."),
            reverse("workspace_detail", args=[workspace.name]) if workspace else reverse("workspace_list"),
            Capability.STORE,
            bool(workspace and has_script(workspace)),
        ),
        Step(
            _("Buy the first run"),
            _("Choose nodes and settings; the price and its ceiling stand beside them."),
            reverse("training_new"),
            Capability.RUN,
            has_job,
        ),
    ]

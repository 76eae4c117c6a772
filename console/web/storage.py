"""The storage page: usage against the quota, deleted items and their retention, immediate removal."""

from __future__ import annotations

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from billing import storage_charges
from billing.policy import policy
from billing.selectors import wallet
from console.accounts.roles import Capability
from console.web.access import MemberRequest, errors_as_message, member
from jobs import expiry, results
from jobs import selectors as jobs
from storage import recycle_bin, retention, selectors
from storage.models import Allocation
from storage.trees import ENTRY_BYTES

PAGE_SIZE = 50
"""How many runs with results one page shows."""


@require_GET
@member(Capability.VIEW)
def storage_usage(request: MemberRequest) -> HttpResponse:
    """Show how much of the quota each item uses."""
    organization = request.membership.organization
    usage, quota_bytes = selectors.usage(organization), organization.quota.max_storage_bytes
    # What uploads in progress and results of runs take of the quota.
    allocations = selectors.allocations(organization).order_by("-size_bytes", "-id")
    runs = allocations.filter(kind=Allocation.Kinds.RUN)
    account = wallet(organization)
    soon = timezone.now() + expiry.NOTICE
    return render(
        request,
        "storage/storage_usage.html",
        {
            "usage": usage,
            "quota_bytes": quota_bytes,
            "left_bytes": max(0, quota_bytes - usage.counted_bytes),
            "fraction": usage.counted_bytes / quota_bytes if quota_bytes else 1,
            "entry_bytes": ENTRY_BYTES,  # what each file or folder uses besides its content
            "limits": selectors.limits(organization, usage),  # the quota's other limits, such as the number of files
            "shares": selectors.usage_by_kind(organization),
            "deleted": selectors.deleted(organization),
            "bins": recycle_bin.bins_of(organization),
            "uploads": allocations.filter(kind=Allocation.Kinds.UPLOAD),
            "price": storage_charges.storage_price(account.currency) if account else None,
            "currency": account.currency if account else "",
            "free_bytes": policy().free_storage_gb * storage_charges.GB,
            "unpaid_minor": storage_charges.unpaid_minor(account) if account else 0,
            "soon": soon,  # the page marks files that are deleted before this time
            "soon_count": runs.filter(kept_until__lte=soon).count(),
            "page": Paginator(runs, PAGE_SIZE).get_page(request.GET.get("page")),
        },
    )


@require_POST
@member(Capability.STORE)
def storage_restore(request: MemberRequest, kind: str, pk: int) -> HttpResponse:
    """Restore a deleted item. `kind` is a key of `selectors.KEPT_ITEMS_BY_KIND`."""
    item = selectors.deleted_item(request.membership.organization, kind, pk)
    with errors_as_message(request):
        retention.restore(item=item, user=request.membership.user)
        messages.success(request, _("%(name)s was restored.") % {"name": item})
    return redirect("storage_usage")


@require_POST
@member(Capability.STORE)
def storage_remove(request: MemberRequest, kind: str, pk: int) -> HttpResponse:
    """Remove a deleted item permanently. `kind` is a key of `selectors.KEPT_ITEMS_BY_KIND`."""
    item = selectors.deleted_item(request.membership.organization, kind, pk)
    with errors_as_message(request):
        retention.remove(item=item, user=request.membership.user)
        messages.success(request, _("%(name)s was permanently deleted.") % {"name": item})
    return redirect("storage_usage")


@require_POST
@member(Capability.STORE)
def storage_remove_results(request: MemberRequest, pk: int) -> HttpResponse:
    """Remove the result files of a run."""
    job = jobs.job_for(request.membership.organization, pk)
    with errors_as_message(request):
        results.remove(job=job, user=request.membership.user)
        messages.success(request, _("The results of #%(job)d were permanently deleted.") % {"job": job.pk})
    return redirect("storage_usage")

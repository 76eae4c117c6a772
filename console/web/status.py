"""The status page: clusters and their queues for every member, their problems for administrators."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from billing.models import NodeSpec
from console.accounts import second_factors
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member
from jobs import clusters, selectors
from jobs.clusters import ClusterRow, ClusterTotals, resolve_cluster_name


@dataclass(frozen=True)
class Card:
    """A cluster on the status page."""

    row: ClusterRow
    totals: ClusterTotals | None
    """The cluster's total and free capacity; None if it does not respond."""
    specs: tuple[str, ...]
    """The titles of the node specs that the cluster offers."""


@require_GET
@member(Capability.VIEW)
def status(request: MemberRequest) -> HttpResponse:
    """Show all clusters. htmx polls only the cards."""
    is_administrator = second_factors.may_administer(request.membership.user)
    # Only administrators see a cluster's isolation gaps. To read the gaps takes a request to each cluster.
    rows = clusters.status_rows(with_gaps=is_administrator)
    capacities = selectors.capacities_now()
    specs_by_cluster: dict[str, list[str]] = {}
    for spec in NodeSpec.objects.filter(is_active=True):
        specs_by_cluster.setdefault(resolve_cluster_name(spec.cluster), []).append(spec.title)
    cards = [
        Card(
            row,
            clusters.totals(capacities[row.name]) if row.name in capacities else None,
            tuple(specs_by_cluster.get(row.name, ())),
        )
        for row in rows
    ]
    context = {
        "cards": cards,
        "unresponsive_count": sum(row.answers is False for row in rows),  # None means: not checked yet
        "is_administrator": is_administrator,
    }
    return render(request, "jobs/_clusters.html" if request.htmx else "jobs/status.html", context)

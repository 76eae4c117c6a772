"""Which clusters answer, and how many wait for each: for every member; what is amiss with them, for administrators."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from billing.models import NodeSpec
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member
from jobs import clusters, selectors
from jobs.backend import cluster_named
from jobs.clusters import ClusterRow, Sums


@dataclass(frozen=True)
class Card:
    """A cluster as the page shows it."""

    row: ClusterRow
    room: Sums | None
    """What it has and what is free; None where it does not answer."""
    specs: tuple[str, ...]
    """What is sold there."""


@require_GET
@member(Capability.VIEW)
def status(request: MemberRequest) -> HttpResponse:
    """Every cluster. htmx asks for the cards alone, again and again."""
    is_administrator = request.user.is_staff
    rows = clusters.rows(with_gaps=is_administrator)
    capacities = selectors.capacities_now()
    sold: dict[str, list[str]] = {}
    for spec in NodeSpec.objects.filter(is_active=True):
        sold.setdefault(cluster_named(spec.cluster), []).append(spec.title)
    cards = [
        Card(
            row,
            clusters.sums(capacities[row.name]) if row.name in capacities else None,
            tuple(sold.get(row.name, ())),
        )
        for row in rows
    ]
    context = {
        "cards": cards,
        "away": sum(row.answers is False for row in rows),
        "is_administrator": is_administrator,
    }
    return render(request, "jobs/_clusters.html" if request.htmx else "jobs/status.html", context)

"""Find jobs, datasets, models and workspaces of an organization by a part of their names, for the command palette."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Model, QuerySet

from console.accounts.models import Organization
from jobs import job_search, selectors
from jobs.fields import is_storable_text
from jobs.job_search import JobSearch
from jobs.models import Job
from storage import selectors as storage

MAX_PER_KIND = 5
"""Objects of each kind that are returned: the palette shows all of them without scrolling."""
MAX_QUERY_LENGTH = 100
"""Characters of a query. No name is longer."""
MAX_NUMBER_DIGITS = 15
"""Digits of a job's number: more than any job has, and within the 64-bit column."""

MAX_DETAIL_LENGTH = 80
"""Characters of a description that are returned: one line of the palette."""


@dataclass(frozen=True)
class Hit:
    """An object that matches the query. `id` is what URLs contain: a job's number, or the name of another object."""

    kind: str
    """`job`, `dataset`, `model` or `workspace`."""
    id: str
    title: str
    detail: str = ""
    """The state of a job, or the beginning of another object's description."""


def search(organization: Organization, query: str) -> list[Hit]:
    """Return at most MAX_PER_KIND objects of each kind whose name contains the query, and the job of that number."""
    query = query.strip()
    if not query or len(query) > MAX_QUERY_LENGTH or not is_storable_text(query):  # PostgreSQL refuses NUL
        return []
    return [
        *_jobs(organization, query),
        *_find_by_name("dataset", storage.datasets_for(organization), query),
        *_find_by_name("model", storage.models_for(organization), query),
        *_find_by_name("workspace", storage.workspaces_for(organization), query),
    ]


def _jobs(organization: Organization, query: str) -> list[Hit]:
    """Return the job with the number `query`, and jobs whose name contains it."""
    number = query.removeprefix("#")
    job_ids: list[int] = []
    if number.isdecimal() and len(number) <= MAX_NUMBER_DIGITS:
        job_ids += Job.objects.filter(organization=organization, pk=int(number)).values_list("pk", flat=True)
    job_ids += job_search.matching(organization, JobSearch(q=query)).values_list("pk", flat=True)[:MAX_PER_KIND]
    shown_ids = list(dict.fromkeys(job_ids))[:MAX_PER_KIND]  # a job may match by its number and by its name
    jobs = Job.objects.filter(pk__in=shown_ids).select_related("image", "order__quote").in_bulk()
    return [Hit("job", str(pk), f"#{pk} {selectors.title_of(jobs[pk])}", jobs[pk].state_title) for pk in shown_ids]


def _find_by_name(kind: str, objects: QuerySet[Model], query: str) -> list[Hit]:
    """Return the objects whose name contains the query, sorted by name."""
    rows = objects.filter(name__icontains=query).order_by("name").values_list("name", "description")[:MAX_PER_KIND]
    return [Hit(kind, name, name, description[:MAX_DETAIL_LENGTH]) for name, description in rows]

"""Jobs for list pages: one query per page, with only the columns that a row shows. Reads only."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import F, QuerySet

from console.accounts.models import Organization
from jobs import free_runs, selectors
from jobs.models import Job

FIELDS = (
    "id", "name", "tags", "code_path", "state", "epochs", "epoch", "progress", "nodes", "deadline_seconds",
    "queued_at", "started_at", "builtin_script", "image__name",
)  # fmt: skip
"""The columns of a job that `row` reads."""


def queryset(organization: Organization) -> QuerySet[Job]:
    """Return an organization's jobs, newest first, annotated for `row`."""
    return annotated(Job.objects.filter(organization=organization))


def with_ids(pks: list[int]) -> QuerySet[Job]:
    """Return these jobs, newest first, annotated for `row`. The caller has read the ids of one organization's jobs.

    Without a filter by organization: with it, PostgreSQL would search the index of all the organization's jobs.
    """
    return annotated(Job.objects.filter(pk__in=pks))


def annotated(jobs: QuerySet[Job]) -> QuerySet[Job]:
    """Return the jobs, newest first, annotated for `row`."""
    return (
        jobs.annotate(
            workspace_name=F("workspace__name"),
            spec_title=F("node_spec__title"),
            metered_minor=F("order__hold__metered_minor"),
            placed_by_email=F("placed_by__email"),
            currency=F("order__quote__currency"),
            ceiling_minor=F("order__hold__amount_minor"),
            is_free_estimate=free_runs.FREE_ESTIMATES,
            p50_seconds=F("order__quote__basis__p50_seconds"),
        )
        .select_related("image")
        .only(*FIELDS)
        .order_by("-id")
    )


@dataclass(frozen=True)
class Row:
    """A row of a list of jobs. Its HTML is cached under its text (`str`), which has all values but `job`.

    `script` is the script's path after the name of its workspace; without a script, that name alone. `progress` is what
    `selectors.progress` returns, with 0 epochs for a notebook or a check. `machines` is a text such as "2 × Nano".
    `waiting_for` is what `selectors.waiting_for` returns; empty on pages that do not show why jobs wait.
    """

    job: Any = field(repr=False)
    number: int
    title: str
    script: str
    tags: list[str]
    state: str
    is_notebook: bool
    is_ended: bool
    progress: dict[str, Any]
    machines: str
    queued_at: datetime
    placed_by_email: str | None
    cost_minor: int
    ceiling_minor: int
    currency: str
    waiting_for: str = ""


def row(job: Any, waiting_for: str = "") -> Row:
    """Return a row; `job` comes from a queryset of `annotated`."""
    progress = selectors.progress(job, p50_seconds=float(job.p50_seconds or 0))
    if job.builtin_script:  # a notebook or a check has no epochs
        progress["epochs"] = 0
    return Row(
        job=job,
        number=job.pk,
        title=selectors.title_of(job, is_free_estimate=job.is_free_estimate),
        script=f"{job.workspace_name}/{job.code_path}" if job.code_path else job.workspace_name,
        tags=job.tags,
        state=job.state,
        is_notebook=job.is_notebook,
        is_ended=job.is_ended,
        progress=progress,
        machines=f"{job.nodes} × {job.spec_title}",
        queued_at=job.queued_at,
        placed_by_email=job.placed_by_email,
        cost_minor=job.metered_minor,
        ceiling_minor=job.ceiling_minor,
        currency=job.currency,
        waiting_for=waiting_for,
    )

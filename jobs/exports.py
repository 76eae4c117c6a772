"""CSV export of jobs. Texts of customers are escaped, so that no spreadsheet executes them as formulas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from billing.amounts import to_major
from billing.exports import csv_row, escape_formula
from jobs import selectors

COLUMNS = (
    "job", "name", "state", "reason", "workspace", "script", "image", "node_spec", "nodes", "member", "tags",
    "ordered_at", "started_at", "finished_at", "cost", "ceiling", "currency",
)  # fmt: skip
"""The header. `jobs_csv` writes the columns in this order. `cost` is an ended job's charge, else the cost so far."""


def jobs_csv(jobs: Iterable[Any]) -> Iterator[str]:
    """Yield a CSV row per job; `jobs` come from `job_search.export`."""
    yield csv_row(COLUMNS)
    for job in jobs:
        yield csv_row(
            (
                str(job.pk),
                # The job's name, or a title for checks and free estimates, whose names nobody chose.
                escape_formula(selectors.title_of(job, is_free_estimate=job.is_free_estimate)),
                job.state,
                job.reason,
                escape_formula(job.workspace_name),
                escape_formula(job.code_path),
                escape_formula(job.image.name),
                escape_formula(job.spec_title),
                str(job.nodes),
                escape_formula(job.placed_by_email or ""),
                escape_formula(" ".join(job.tags)),
                # `queued_at` is the time of the order, since a retry does not change it.
                *(_text(at) for at in (job.queued_at, job.started_at, job.finished_at)),
                f"{to_major(job.metered_minor, job.currency):f}",  # `charges.settle` sets it to the charge
                f"{to_major(job.ceiling_minor, job.currency):f}",
                job.currency,
            )
        )


def _text(at: datetime | None) -> str:
    """Return a time in ISO format; empty for None."""
    return at.isoformat(timespec="seconds") if at else ""

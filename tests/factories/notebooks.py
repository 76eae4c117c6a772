"""Notebooks of a customer, on the fake cluster."""

from __future__ import annotations

from typing import Any

from jobs import notebooks, reconciliation
from jobs.models import Attempt
from tests.factories.jobs import Customer, start


def notebook_form(customer: Customer, **changes: Any) -> dict[str, Any]:
    """The body of a request for a notebook's quote."""
    chosen = {"workspace": customer.workspace.name, "image": "pytorch", "node_spec": "nano", "max_seconds": 7200}
    return chosen | changes


def sell_notebook(customer: Customer) -> Attempt:
    """Buy a notebook, and start it. JupyterLab does not listen."""
    quote = notebooks.quote_notebook(membership=customer.membership, data=notebook_form(customer))
    job = notebooks.place_notebook(membership=customer.membership, quote=quote).job
    start(job)
    attempt = job.attempts.get()
    customer.backend.start(attempt.run_name)
    reconciliation.reconcile_job(job_pk=job.pk)
    return attempt

"""A customer who can buy runs on the fake cluster: with an active service, money, a script and the first catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from billing.models import Account, NodeSpec, Quote
from console.accounts.models import Membership
from console.accounts.roles import Role
from console.core.errors import InvalidInput
from jobs import activation, dispatch, lifecycle, orders, reconciliation, results
from jobs.catalogue import seed
from jobs.models import Attempt, Job, Order
from runtime.specs import Outcome
from storage import catalog
from storage.models import Workspace
from storage.selectors import workspace_folder
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import wallet
from tests.factories.storage import WorkspaceFactory
from tests.fakes import FakeBackend

SCRIPT = "train.py"


class Customer:
    """Buys runs on the fake cluster, and starts and ends them as a test needs it."""

    def __init__(self, backend: FakeBackend, *, balance_minor: int = 100_000) -> None:
        seed()
        self.backend = backend
        self.membership: Membership = MembershipFactory(role=Role.OWNER)
        self.organization = self.membership.organization
        # The first workspace, a folder with a README, as activation would create it, which takes 48 queries.
        self.workspace: Workspace = WorkspaceFactory(
            organization=self.organization, name=catalog.FIRST_WORKSPACE, created_by=self.membership.user,
            size_bytes=len(catalog.README.encode()), entry_count=2,
        )  # fmt: skip
        self.write("README.md", catalog.README)
        activation.activate(membership=self.membership, accept_terms=True)
        wallet(self.organization, balance_minor=balance_minor)
        self.write(SCRIPT)

    @property
    def folder(self) -> Path:
        """Return the workspace's folder."""
        return workspace_folder(self.workspace)

    @property
    def wallet(self) -> Account:
        """Read the wallet from the database."""
        return Account.objects.get(organization=self.organization, kind=Account.Kinds.WALLET)

    def write(self, path: str, text: str = "print('hello')\n") -> None:
        """Put a file into the workspace."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def quota(self, **changes: int) -> None:
        """Change the organization's quota."""
        for name, value in changes.items():
            setattr(self.organization.quota, name, value)
        self.organization.quota.save()

    def form(self, **changes: Any) -> dict[str, Any]:
        """Return the body of a request for a quote."""
        return {
            "product": "metered",
            "framework": "pytorch",
            "image": "pytorch",
            "workspace": self.workspace.name,
            "code_path": SCRIPT,
            "epochs": 10,
            "lr": "0.01",
            "batch_size": 32,
            "node_spec": "nano",
            "nodes": 2,
            "workers_per_node": 1,
            "max_seconds": 3600,
        } | changes

    def quote(self, **changes: Any) -> Quote:
        """Create a quote."""
        return orders.quote_order(membership=self.membership, data=self.form(**changes))

    def refusals(self, **changes: Any) -> dict[str, str]:
        """Return the messages, by field, of a request for a quote with invalid values."""
        with pytest.raises(InvalidInput) as refused:
            self.quote(**changes)
        return {name: str(message) for name, message in refused.value.fields.items()}

    def order(self, **changes: Any) -> Order:
        """Buy a new quote."""
        return self.place(self.quote(**changes))

    def place(self, quote: Quote, key: str = "") -> Order:
        """Buy a quote, by default without an idempotency key."""
        return orders.place_order(membership=self.membership, quote=quote, idempotency_key=key)

    def job(self, **changes: Any) -> Job:
        """Return a job in the queue."""
        return self.order(**changes).job

    def started(self, *, at: float | None = None, **changes: Any) -> Attempt:
        """Return a new job's first attempt, which runs as `run` lets it."""
        return self.run(self.job(**changes), at=at)

    def run(self, job: Job, *, at: float | None = None) -> Attempt:
        """Return a queued job's next attempt, which runs on all its nodes since `at` (Unix seconds; default: now)."""
        assert start(job)
        attempt = job.attempts.last()
        self.backend.start(attempt.run_name, at=at)
        reconciliation.reconcile_job(job_pk=job.pk)
        return attempt

    def end(self, attempt: Attempt, outcome: Outcome, **details: Any) -> Job:
        """End an attempt's run by `FakeBackend.end`, and let the console observe it. Return the job afterwards."""
        self.backend.end(attempt.run_name, outcome, **details)
        return lifecycle.observe(attempt=attempt, status=self.backend.describe(attempt.run_name))

    def ended_with_log(self, **changes: Any) -> Job:
        """Return a completed job that has left a file, which counts as storage."""
        attempt = self.started(**changes)
        folder = self.backend.run_folder(attempt.run_name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log").write_bytes(b"x" * 100)
        job = self.end(attempt, Outcome.COMPLETED)
        results.count_storage(job.pk)
        return job


def start(job: Job) -> bool:
    """Claim and submit one job, also if others are ahead of it in the queue. Return whether the cluster has it."""
    attempt = dispatch.claim(job)
    return attempt is not None and dispatch.submit(attempt)


def make_medium_too_large() -> None:
    """Make the node spec `medium`, which has a price, too large for the fake cluster."""
    NodeSpec.objects.filter(name="medium").update(cpus=1000)

"""A customer who has bought, and browsers logged in as each role of the same organization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.test import Client

from console.accounts.models import Membership
from console.accounts.roles import Role
from jobs.backend import cluster
from jobs.models import Job
from runtime.specs import Outcome
from tests.factories.accounts import MembershipFactory
from tests.factories.jobs import Customer
from tests.fakes import FakeBackend


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeBackend]:
    """The cluster, faked."""
    fake = FakeBackend(root=tmp_path / "runs")
    monkeypatch.setattr("jobs.backend.create", lambda _kind, **_options: fake)
    cluster.cache_clear()
    yield fake
    cluster.cache_clear()


@pytest.fixture
def customer(db: None, backend: FakeBackend) -> Customer:
    """Active, with money, a workspace and a script."""
    return Customer(backend)


@pytest.fixture
def done(customer: Customer) -> Job:
    """A job that has completed and has its receipt."""
    return customer.end(customer.started(), Outcome.COMPLETED)


@pytest.fixture
def browser() -> Callable[[Membership], Client]:
    """`browser(membership)` is a client that is logged in as the member."""

    def client(membership: Membership) -> Client:
        made = Client()
        made.force_login(membership.user)
        return made

    return client


@pytest.fixture
def owner_page(customer: Customer, browser: Callable[[Membership], Client]) -> Client:
    """The owner's browser."""
    return browser(customer.membership)


@pytest.fixture(params=list(Role))
def any_member(request: pytest.FixtureRequest, customer: Customer) -> Membership:
    """A member of the customer's organization, of each role in turn."""
    if request.param == Role.OWNER:
        return customer.membership
    made: Membership = MembershipFactory(role=request.param, organization=customer.organization)
    return made

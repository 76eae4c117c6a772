"""Hypothesis as these tests want it (the same examples each time, and no clock on a busy machine); a served sandbox."""

from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis

from billing import gateway
from tests.billing.serving import Console, running, serving
from tests.factories.billing import book, wallet

hypothesis.register_profile(
    "billing", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis.load_profile("billing")


@pytest.fixture
def console():
    webhook_target = Console()
    with serving(webhook_target.server):
        yield webhook_target


@pytest.fixture
def start(tmp_path, console, settings):
    """`with start() as served:` is the sandbox, serving and delivering; its state outlives it."""

    @contextmanager
    def run(url=console.url):
        with running(tmp_path / "sandbox" / "journal.jsonl", url) as served:
            settings.SANDBOX_URL = served.account.base_url
            yield served

    return run


@pytest.fixture
def served(start):
    with start() as provider:
        yield provider


@pytest.fixture
def customer(served):
    return gateway.create_customer(reference="1", name="Acme & Sons", email="a@example.com")


@pytest.fixture
def account(db):
    """A wallet with 10,000; nodes cost 360 an hour: 1 for 10 seconds."""
    book()
    return wallet(balance_minor=10_000)

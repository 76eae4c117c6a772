"""A profile of Hypothesis (the same examples each time, and no time limits), and a served sandbox."""

from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis

from billing import gateway
from tests.billing.serving import WebhookReceiver, running, serving
from tests.factories.billing import book, wallet

hypothesis.register_profile(
    "billing", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis.load_profile("billing")


@pytest.fixture
def receiver():
    """A running WebhookReceiver."""
    receiver = WebhookReceiver()
    with serving(receiver.server):
        yield receiver


@pytest.fixture
def start(tmp_path, receiver, settings):
    """A context manager that serves a sandbox and delivers its webhooks, by default to `receiver`.

    The sandbox's state stays for the next call.
    """

    @contextmanager
    def run(url=receiver.url):
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
    """The id of a customer of the served sandbox."""
    return gateway.create_customer(reference="1", name="Acme & Sons", email="a@example.com")


@pytest.fixture
def account(owner):
    """The owner's wallet with 10,000 minor units; a node costs 360 an hour, so ten seconds cost 1."""
    book()
    return wallet(owner.organization, balance_minor=10_000)

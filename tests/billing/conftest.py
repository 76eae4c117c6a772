"""A receiver of webhooks, a served sandbox, a paid top-up and a wallet."""

from contextlib import contextmanager

import pytest

from billing import gateway
from tests.billing.serving import WebhookReceiver, running
from tests.factories.billing import book, paid_top_up, wallet
from tests.http_server import serving


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
    """The provider of a sandbox that is served until the test ends."""
    with start() as provider:
        yield provider


@pytest.fixture
def customer(served):
    """The id of a customer of the served sandbox."""
    return gateway.create_customer(reference="1", name="Acme & Sons", email="a@example.com")


@pytest.fixture
def top_up(provider):
    """A paid top-up of $50 whose card was saved."""
    return paid_top_up(provider)


@pytest.fixture
def account(owner):
    """The owner's wallet with 10,000 minor units; a node costs 360 an hour, so ten seconds cost 1."""
    book()
    return wallet(owner.organization, balance_minor=10_000)

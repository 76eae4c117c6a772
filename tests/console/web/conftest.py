"""A customer who has bought, and browsers logged in as each role of the same organization."""

import pytest
from django.test import Client

from runtime.specs import Outcome


@pytest.fixture
def done(customer):
    """A job that has completed and has its receipt."""
    return customer.end(customer.started(), Outcome.COMPLETED)


@pytest.fixture
def browser():
    """`browser(membership)` is a client that is logged in as the member."""

    def client(membership):
        logged_in = Client()
        logged_in.force_login(membership.user)
        return logged_in

    return client


@pytest.fixture
def owner_page(customer, browser):
    """The owner's browser."""
    return browser(customer.membership)

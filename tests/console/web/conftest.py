"""A completed job, and Django's test clients in place of browsers, logged in as members."""

import pytest
from django.test import Client

from runtime.specs import Outcome


@pytest.fixture
def completed_job(customer):
    """A completed job of the customer, with its receipt."""
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
    """The test client in which the customer, the owner of the organization, is logged in."""
    return browser(customer.membership)

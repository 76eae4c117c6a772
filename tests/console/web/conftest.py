"""A completed job, and Django's test clients in place of browsers, logged in as members."""

import pytest

from runtime.specs import Outcome
from tests.factories.accounts import logged_in


@pytest.fixture
def completed_job(customer):
    """A completed job of the customer, with its receipt."""
    return customer.end(customer.started(), Outcome.COMPLETED)


@pytest.fixture
def browser():
    """`browser(membership)` is a client that is logged in as the member."""
    return lambda membership: logged_in(membership.user)


@pytest.fixture
def owner_page(customer, browser):
    """The test client in which the customer, the owner of the organization, is logged in."""
    return browser(customer.membership)

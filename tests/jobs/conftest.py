"""Fixtures of the tests of jobs: sent tasks, other customers, and a running notebook."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from console.core import enqueue
from tests.factories.jobs import Customer
from tests.factories.notebooks import sell_notebook


@pytest.fixture
def sent_tasks(monkeypatch):
    """The tasks sent to a worker: (name, arguments ...)."""
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        enqueue, "_send_or_warn", lambda task, arguments: sent.append((task.name.rsplit(".", 1)[-1], *arguments))
    )
    return sent


@pytest.fixture
def database_without_rows(django_db_setup, django_db_blocker):
    """The database without a transaction around the test, for real commits. The test must write no row."""
    with django_db_blocker.unblock():
        yield
        connection.close()


@pytest.fixture
def other(db, backend):
    """A customer of another organization."""
    return Customer(backend)


@pytest.fixture
def notebook(customer):
    """The attempt of a running notebook of two hours."""
    return sell_notebook(customer)

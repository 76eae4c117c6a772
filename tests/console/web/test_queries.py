"""Lists ask the database the same number of times, however long they are."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from runtime.specs import Outcome
from tests.factories.jobs import Customer
from tests.factories.storage import DatasetFactory, DatasetVersionFactory, WorkspaceFactory


def _queries(client: Client, name: str) -> int:
    client.get(reverse(name))
    with CaptureQueriesContext(connection) as captured:
        assert client.get(reverse(name)).status_code == 200
    return len(captured)


def _fill(customer: Customer) -> None:
    organization = customer.organization
    DatasetVersionFactory(dataset=DatasetFactory(organization=organization))
    WorkspaceFactory(organization=organization)
    customer.job()
    customer.end(customer.started(), Outcome.COMPLETED)


@pytest.mark.parametrize(
    "name",
    [
        "overview",
        "job_list",
        "status",
        "wallet",
        "receipt_list",
        "cost_list",
        "credit_list",
        "invoice_list",
        "dataset_list",
        "workspace_list",
        "organization",
    ],
)
def test_constant_in_rows(customer: Customer, owner_page: Client, name: str) -> None:
    _fill(customer)
    few = _queries(owner_page, name)
    for _ in range(3):
        _fill(customer)
    assert _queries(owner_page, name) == few

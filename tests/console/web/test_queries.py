"""Lists take the same number of queries however long they are."""

from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from jobs.models import Job
from runtime.specs import Outcome
from tests.factories.accounts import MembershipFactory
from tests.factories.billing import NodeSpecFactory
from tests.factories.notebooks import sell_notebook
from tests.factories.storage import (
    DatasetFactory,
    DatasetVersionFactory,
    ImageFactory,
    ModelVersionFactory,
    WorkspaceFactory,
)

LISTS = (
    "overview", "job_list", "status", "wallet", "receipt_list", "cost_list", "credit_list", "invoice_list",
    "dataset_list", "model_list", "workspace_list", "organization", "sweep_list",
    "images", "datasets", "models", "workspaces", "storage", "api_members", "api_jobs", "api_notebooks",
    "api_receipts", "api_holds", "api_node_specs", "api_costs", "api_tokens", "api_invitations", "api_service_accounts",
)  # fmt: skip
"""Pages, then lists of the API."""
LIMITS = {"job_list": 8, "overview": 25, "wallet": 16, "training_new": 21, "job_detail": 9}
"""The most queries of the busiest pages: one for each kind of row, and some for the session, user and navigation."""


def _queries(client, name):
    arguments = [Job.objects.latest("pk").pk] if name == "job_detail" else []
    client.get(reverse(name, args=arguments))  # fills the caches
    with CaptureQueriesContext(connection) as captured:
        assert client.get(reverse(name, args=arguments)).status_code == 200
    return len(captured)


def _fill(customer, sweeper):
    DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization))
    ModelVersionFactory(model__organization=customer.organization)
    WorkspaceFactory(organization=customer.organization)
    ImageFactory(organization=customer.organization)
    MembershipFactory(organization=customer.organization)
    NodeSpecFactory()
    sell_notebook(customer)
    customer.job()
    sweeper.finish(sweeper.buy(trials=1))
    customer.end(customer.started(), Outcome.COMPLETED)


def test_more_rows_take_no_more_queries(customer, sweeper, owner_page):
    _fill(customer, sweeper)
    few = {name: _queries(owner_page, name) for name in LISTS}
    busiest = {name: _queries(owner_page, name) for name in LIMITS}
    assert {name: count for name, count in busiest.items() if count > LIMITS[name]} == {}
    for _ in range(2):
        _fill(customer, sweeper)
    assert {name: _queries(owner_page, name) for name in LISTS} == few

"""Free probes: what limits them; on PostgreSQL."""

from __future__ import annotations

import pytest

from billing.models import BillingPolicy
from console.accounts.errors import InvalidInput, ServiceInactive
from jobs import activation, orders, probes
from jobs.errors import QuotaExceeded
from jobs.models import Job, Order
from tests.factories.jobs import Customer


@pytest.fixture
def two_a_day(db):
    return BillingPolicy.objects.create(probes_per_day=2)


def place(customer, key="", **changes):
    return probes.place_probe(membership=customer.membership, data=customer.form(**changes), idempotency_key=key)


def test_so_many_a_day(customer, two_a_day):
    place(customer)
    place(customer)
    assert probes.left_today(customer.organization) == 0
    with pytest.raises(QuotaExceeded):
        place(customer)
    Job.objects.update(queued_at="2020-01-01T00:00Z")
    place(customer)


def test_none_where_the_policy_has_none(customer):
    BillingPolicy.objects.create(probes_per_day=0)
    with pytest.raises(QuotaExceeded):
        place(customer)


def test_the_same_key_is_the_same_probe(customer, two_a_day):
    assert len({place(customer, "key").pk for _ in range(3)}) == 1
    assert probes.left_today(customer.organization) == 1


def test_what_is_wrong_is_told_at_its_field(customer):
    with pytest.raises(InvalidInput) as refused:
        place(customer, lr="x")
    assert set(refused.value.fields) == {"lr"}
    activation.deactivate(membership=customer.membership)
    with pytest.raises(ServiceInactive):
        place(customer)


def test_what_a_probe_asked_for_beyond_its_limits_is_not_had(customer, two_a_day):
    job = place(customer, nodes=8, max_seconds=86_400, retries=3, ceiling_minor=5).job
    assert (job.nodes, job.deadline_seconds, job.retries, job.min_nodes) == (1, 60, 0, 0)


def test_running_it_again_is_a_run_that_costs(customer, two_a_day):
    probe = place(customer).job
    order = orders.rerun(membership=customer.membership, job=probe, changes={"nodes": 2})
    assert order.quote.ceiling_minor > 0
    assert "probe" not in order.quote.purchase
    assert probes.left_today(customer.organization) == 1


def test_when_it_is_worthwhile(customer, two_a_day):
    quote = customer.quote()
    assert probes.is_worthwhile(quote)
    quote.basis = {"source": "history", "runs": 1}
    assert not probes.is_worthwhile(quote)
    place(customer)
    place(customer)
    assert not probes.is_worthwhile(customer.quote())


def test_at_once_no_more_than_it_may(transactional_db, backend, hints, together):
    customer = Customer(backend)
    BillingPolicy.objects.create(probes_per_day=2)
    results = together(*[lambda: place(customer)] * 5)
    assert sum(isinstance(result, Order) for result in results) == 2
    assert sum(isinstance(result, QuotaExceeded) for result in results) == 3

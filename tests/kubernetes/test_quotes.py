"""What the (fake) cluster can never hold is refused at the quote; what was bought before it shrank waits."""

import pytest

from billing.models import NodeSpec
from console.accounts.errors import InvalidInput
from jobs import dispatch, selectors
from jobs.backend import cluster
from jobs.models import Job
from jobs.purchase import parse
from jobs.states import JobState
from tests.factories.jobs import Customer

pytestmark = pytest.mark.django_db


@pytest.fixture
def on(monkeypatch, own_yard):
    """Make the fake cluster the console's, with these settings."""

    def choose(**settings):
        backend = own_yard.another(**settings)
        monkeypatch.setattr("jobs.backend.create", lambda _kind, **_options: backend)
        cluster.cache_clear()
        return backend

    yield choose
    cluster.cache_clear()


@pytest.fixture
def customer(on):
    made = Customer(on())
    made.quota(max_running_nodes=1000)
    NodeSpec.objects.filter(name="medium").update(cpus=12)
    return made


def refusal(customer, **changes):
    with pytest.raises(InvalidInput) as caught:
        parse(organization=customer.organization, data=customer.form(**changes))
    assert set(caught.value.fields) == {"nodes"}
    return str(caught.value.fields["nodes"])


def test_what_no_machine_or_not_enough_of_them_can_hold_is_refused_with_words(customer, on):
    assert refusal(customer, node_spec="medium", nodes=1) == (
        "No machine of this cluster can hold a node of medium. Choose another node spec."
    )
    assert "can never fit this cluster: it has room for 16" in refusal(customer, node_spec="small", nodes=17)
    assert parse(organization=customer.organization, data=customer.form(node_spec="small", nodes=16)).nodes == 16
    on(node_selectors={"small": {"pool": "small"}})
    assert "can hold a node of small" in refusal(customer, node_spec="small", nodes=1)


def test_a_pool_that_may_be_empty_refuses_only_what_it_can_never_grow_to(customer, on):
    on(elastic=True)
    assert parse(organization=customer.organization, data=customer.form(node_spec="medium", nodes=5)).nodes == 5
    on(elastic=True, capacity=[{"cpus": 12, "memory_mib": 65536, "count": 2}])
    assert "it has room for 2" in refusal(customer, node_spec="medium", nodes=3)


def test_what_was_bought_before_the_cluster_shrank_waits_and_says_so(customer, on):
    on(elastic=True, capacity=[{"cpus": 12, "memory_mib": 65536}])
    job = customer.job(node_spec="medium", nodes=1)
    on()
    for _ in range(2):
        dispatch.reconcile()
    assert Job.objects.get(pk=job.pk).state == JobState.QUEUED
    told = selectors.waiting_for(selectors.job_for(customer.organization, job.pk))
    assert told.startswith("The cluster has no machine any more that can hold a node of Medium.")

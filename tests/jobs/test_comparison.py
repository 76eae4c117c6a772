"""A quote beside its alternatives: each figure is what a new quote would say, and the forecast of the wait."""

from dataclasses import replace
from datetime import timedelta

import pytest
from django.utils import timezone

from billing.models import Quote
from jobs import availability, checks, comparison
from jobs.availability import Load, wait_seconds
from jobs.errors import ChoiceUnavailable
from jobs.models import Job
from runtime.specs import Capacity, NodeCapacity, Outcome, Resources

FIGURES = ("p50_minor", "p90_minor", "ceiling_minor", "deadline_seconds")


def figures(quote):
    return {name: getattr(quote, name) for name in FIGURES}


def test_an_alternative_has_the_price_that_a_quote_for_it_has(customer):
    for limits in ({"max_seconds": ""}, {"ceiling_minor": 500}, {"product": "fixed"}):  # the first has no time limit
        quote = customer.quote(**limits)
        before = Quote.objects.count()
        compared = comparison.compare(quote)
        assert Quote.objects.count() == before, "a comparison stores no quote"
        assert [each.nodes for each in compared.by_nodes] == [1, 2, 4]
        for each in [*compared.by_nodes, *compared.by_spec]:
            chosen = {"nodes": each.nodes, "node_spec": each.node_spec.name, "workers_per_node": each.workers_per_node}
            assert figures(each.figures) == figures(customer.quote(**limits, **chosen)), limits
            assert each.is_quoted == (each.nodes == 2 and each.node_spec.name == "nano")


def test_an_alternative_that_cannot_be_quoted_says_why(customer):
    customer.quota(max_running_nodes=2)
    quote = customer.quote()
    refusals = {each.nodes: each.refusal for each in comparison.compare(quote).by_nodes}
    assert refusals == {1: "", 2: "", 4: customer.refusals(nodes=4)["nodes"]}
    (customer.folder / "train.py").unlink()
    with pytest.raises(ChoiceUnavailable):
        comparison.compare(quote)


def test_the_quote_of_an_image_check_has_no_alternatives(customer, api):
    check = checks.place_check(
        membership=customer.membership, data={"image": "pytorch", "node_spec": "nano", "nodes": 1}
    )
    client = api(customer.membership)
    assert client.get(f"/api/v1/quotes/{check.quote_id}/").json()["learning_rate"] is None
    for route in ("comparison", "environment"):
        assert client.get(f"/api/v1/quotes/{check.quote_id}/{route}/").status_code == 400


def ran(customer, nodes, seconds):
    """Let a run on this many nodes have completed in this many seconds."""
    job = customer.end(customer.started(nodes=nodes), Outcome.COMPLETED)
    began = timezone.now() - timedelta(days=1)
    Job.objects.filter(pk=job.pk).update(started_at=began, finished_at=began + timedelta(seconds=seconds))


def test_efficiency_is_measured_by_runs_on_different_numbers_of_nodes(customer):
    # Without measurements, twice the nodes are assumed to be 2 ** 0.8 times as fast.
    efficiency = lambda: {
        each.nodes: (each.efficiency, each.is_measured) for each in comparison.compare(customer.quote()).by_nodes
    }
    ran(customer, nodes=1, seconds=100)
    assert efficiency() == {
        1: (1, False),
        2: (pytest.approx(2**-0.2, abs=0.001), False),
        4: (pytest.approx(4**-0.2, abs=0.001), False),
    }
    ran(customer, nodes=2, seconds=62.5)
    # 62.5 s on two nodes instead of 100 s on one: 80 % for each doubling.
    assert efficiency() == {1: (1, True), 2: (0.8, True), 4: (pytest.approx(0.64, abs=0.001), True)}


def test_a_run_starts_now_or_after_the_runs_that_occupy_its_nodes(customer, monkeypatch):
    quote = customer.quote(node_spec="medium", nodes=4)  # all 8 cores of the fake cluster
    start = lambda: {each.nodes: each.start.code for each in comparison.compare(quote).by_nodes}
    assert start() == {1: "now", 2: "now", 4: "now"}
    customer.started(node_spec="medium", nodes=2, max_seconds=600)
    assert start() == {1: "now", 2: "now", 4: "waits"}
    elastic = comparison.compare(customer.quote(node_spec="medium", nodes=4, min_nodes=2))
    assert [each.start and each.start.code for each in elastic.by_nodes] == ["now"] * 3
    customer.job(node_spec="medium", nodes=4, max_seconds=600)
    waiting = comparison.compare(quote).by_nodes[-1].start
    assert waiting.ahead == 1
    assert 0 < waiting.seconds <= 1200  # the running job takes at most 600 s, and so does the one in the queue
    with monkeypatch.context() as patch:
        patch.setattr(availability, "MAX_OPEN_JOBS", 0)  # so that only the running job is read
        waiting = comparison.compare(quote).by_nodes[-1].start
        assert (waiting.seconds, waiting.ahead) == (None, 1)
    customer.quota(max_running_nodes=5)  # of which two run
    assert start() == {1: "now", 2: "now", 4: "quota"}
    capacity = customer.backend.capacity()
    monkeypatch.setattr(customer.backend, "capacity", lambda: replace(capacity, elastic=True))
    waiting = comparison.compare(quote).by_nodes[-1].start
    assert (waiting.code, waiting.ahead) == ("quota", 1)
    customer.backend.available = False
    monkeypatch.undo()
    assert set(start().values()) == {"unknown"}


def machines(*free):
    """Return machines of four cores. Each number says how many cores of a machine are free."""
    return Capacity(tuple(NodeCapacity(str(each), Resources(4, 4096), Resources(each, 1024 * each)) for each in free))


def load(nodes, seconds, cpus=1):
    """Return a run on nodes of so many cores, which ends after at most these seconds."""
    return Load(Resources(cpus, 1024 * cpus), kind="", nodes=nodes, seconds=seconds)


# Capacity, running jobs, the queue that ends with the job in question, and the seconds until it starts.
WAITS = {
    "enough is free": (machines(4), [], [load(4, 1)], 0),
    "it waits for the first end that leaves enough": (machines(0), [load(1, 10), load(3, 30)], [load(2, 1)], 30),
    "jobs ahead of it in the queue start first": (machines(0), [load(4, 10)], [load(4, 60), load(4, 1)], 70),
    "a node needs all its cores on one machine": (machines(1, 1), [load(3, 20), load(3, 40)], [load(1, 1, cpus=4)], 20),
    "the ends of the running jobs leave too little": (machines(0), [load(2, 10)], [load(3, 1)], None),
}


def test_a_wait_is_forecast_from_the_running_and_queued_jobs():
    for name, (capacity, running, queue, seconds) in WAITS.items():
        assert wait_seconds(capacity, running, queue) == seconds, name

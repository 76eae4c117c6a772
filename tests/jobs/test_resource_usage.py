"""Resource usage of nodes and ranks: curves, ranks that the others wait for, and scaling efficiency."""

import json
import time

import pytest

from jobs import resource_usage, selectors
from jobs.messages import efficiency_sentence
from jobs.models import Job, JobDataset
from runtime.specs import Outcome
from tests.factories.storage import DatasetFactory, DatasetVersionFactory


def rank(number, *, steps=10, step_seconds=1.0, comm_seconds=0.2, cpu=0.9):
    """Return a rank's part of a sample."""
    return {
        "rank": number, "cpu": cpu, "memory": 1000 + number, "steps": steps, "step_seconds": step_seconds,
        "comm_seconds": comm_seconds,
    }  # fmt: skip


def fill(backend, name, *, node, ranks, count=20, **more):
    """Store samples of a node, one a second."""
    for number in range(count):
        sample = {"at": 1000.0 + number, "seconds": 1.0, "cpu": number, "memory": 5, "net_rx": None, "ranks": ranks}
        backend.sample(name, sample | more, node=node)


def test_usage_is_shown_by_node_and_rank_of_the_attempt(customer, backend):
    attempt = customer.started()
    empty = {"attempt": None, "nodes": [], "ranks": [], "efficiency": None, "sentences": []}
    missing_attempt = 7
    assert selectors.resource_usage_data(customer.job()) == empty
    assert selectors.resource_usage_data(attempt.job, missing_attempt) == empty
    fill(backend, attempt.run_name, node=0, ranks=[rank(0)], gpus=[{"utilization": 40}, {"utilization": 60}])
    fill(backend, attempt.run_name, node=1, ranks=[rank(1)])
    data = selectors.resource_usage_data(attempt.job)
    assert (data["attempt"], data["efficiency"], data["sentences"]) == (1, None, [])
    first, second = data["nodes"]
    assert first["at"] == [1000.0 + number for number in range(20)]
    assert (first["series"]["cpu"], first["series"]["gpu"]) == (list(range(20)), [50.0] * 20)
    assert "net_rx" not in first["series"]
    assert "gpu" not in second["series"]
    # 20 samples of 10 steps each, which took 1.0 s, 0.2 s of it to wait for the other rank.
    assert data["ranks"][1] == {
        "rank": 1, "node": 1, "cpu": 0.9, "memory": 1001.0, "steps": 200, "seconds_per_step": pytest.approx(0.1),
        "comm_share": pytest.approx(0.2), "is_slow": False,
    }  # fmt: skip
    backend.lose(attempt.run_name)
    assert selectors.resource_usage_data(attempt.job)["nodes"] == []


def test_long_files_are_read_in_pieces_up_to_a_limit_and_averaged(customer, backend, monkeypatch):
    monkeypatch.setattr(resource_usage, "CHUNK_BYTES", 4096)
    attempt = customer.started(nodes=1)
    fill(backend, attempt.run_name, node=0, ranks=[rank(0)], count=5000)
    (node,) = resource_usage.usage_of(attempt.job).nodes
    assert len(node.at) <= resource_usage.POINTS_SHOWN
    assert node.at[-1] == 1000.0 + 4999
    cpu = [value for value in node.series["cpu"] if value is not None]
    assert cpu == sorted(cpu)
    # Averages of the first and of the last samples, which go from 0 to 4999.
    assert cpu[0] < 50
    assert cpu[-1] > 4900
    monkeypatch.setattr(resource_usage, "MAX_BYTES", 3 * 4096)
    reads = []
    monkeypatch.setattr(backend, "samples", lambda *given, real=backend.samples: reads.append(given) or real(*given))
    resource_usage.usage_of(attempt.job)
    assert 3 <= len(reads) <= 4, "MAX_BYTES are three pieces, or four, as each ends with a whole line"
    monkeypatch.setattr(resource_usage, "MAX_TOTAL_BYTES", 4096)
    reads.clear()
    (node,) = resource_usage.usage_of(attempt.job).nodes
    assert (len(reads), node.at[-1]) == (2, 1000.0 + 4999), "the latest samples"


def test_chart_and_table_agree_on_the_cpu_of_the_last_minute(customer, backend):
    attempt = customer.started(nodes=1, workers_per_node=2)
    # The ranks use 0.25 cores, then 0.5 in the last 60 s; rank 1 is absent from the first half of these.
    for number in range(100):
        cpu = 0.25 if number < 40 else 0.5
        ranks = [rank(0, cpu=cpu)] if 40 <= number < 70 else [rank(0, cpu=cpu), rank(1, cpu=cpu)]
        sample = {"at": 1000.0 + number, "seconds": 1.0, "cpu": cpu * len(ranks), "ranks": ranks}
        backend.sample(attempt.run_name, sample, node=0)
    data = selectors.resource_usage_data(attempt.job)
    (node,) = data["nodes"]
    assert [each["cpu"] for each in data["ranks"]] == [0.5, 0.25]
    assert node["recent_cpu"] == sum(each["cpu"] for each in data["ranks"])
    assert node["recent_cpu"] == sum(node["series"]["cpu"][-60:]) / 60


HOSTILE = [
    "", "null", "[]", "{", "[" * 100_000, '{"at": "soon"}', '{"at": true}', '{"at": NaN}', '{"at": -1}',
    json.dumps({"at": 5, "cpu": "much", "ranks": "no", "gpus": [1, {"utilization": []}]}),
    json.dumps({"at": 6, "cpu": 1e999, "ranks": [{"rank": "x"}, {"rank": -3}, {"rank": 0, "steps": -5}, 7]}),
]  # fmt: skip


def test_hostile_samples_are_ignored(customer, backend):
    attempt = customer.started(nodes=1)
    backend.runs[attempt.run_name].samples[0] = ("\n".join([*HOSTILE, json.dumps({"at": 7, "cpu": 2})]) + "\n").encode()
    data = selectors.resource_usage_data(attempt.job)
    assert data["nodes"][0]["at"] == [5.0, 6.0, 7.0]
    assert data["nodes"][0]["series"] == {"cpu": [None, None, 2.0]}
    assert [each["rank"] for each in data["ranks"]] == [0]
    json.dumps(data, allow_nan=False)  # would raise ValueError for a value that browsers cannot read


def test_a_rank_that_the_others_wait_for_is_named(customer, backend):
    attempt = customer.started(workers_per_node=2)
    # All steps take equally long, because the others wait for rank 3: of 1.0 s they compute for 0.4 s, rank 3 always.
    fill(backend, attempt.run_name, node=0, ranks=[rank(0, comm_seconds=0.6), rank(1, comm_seconds=0.6)])
    fill(backend, attempt.run_name, node=1, ranks=[rank(2, comm_seconds=0.6), rank(3, comm_seconds=0.0)])
    data = selectors.resource_usage_data(attempt.job)
    assert [each["rank"] for each in data["ranks"] if each["is_slow"]] == [3]
    (sentence,) = data["sentences"]
    assert sentence.startswith("Rank 3 on node 1 is slow: its compute time per step is 2.5 times")


def test_only_recent_steps_count_for_slowness():
    def use(number, seconds):
        return resource_usage.RankUse(rank=number, node=0, recent_steps=10, recent_compute_seconds=seconds)

    unknown = resource_usage.RankUse(rank=2, node=1, steps=10, step_seconds=9.0)  # without recent steps
    slow = resource_usage.Straggler(rank=1, node=0, ratio=pytest.approx(1.31))  # from 1.3 times the time of the others
    assert resource_usage.stragglers([use(0, 1.0), use(1, 1.31), unknown]) == [slow]
    assert resource_usage.stragglers([use(0, 1.0), use(1, 1.29)]) == resource_usage.stragglers([use(1, 1.31)]) == []


def completed(customer, *, seconds, step_seconds=None, **changes):
    """A completed run; with `step_seconds`, also with samples in which ten steps take that long."""
    began = time.time() - 5000
    attempt = customer.started(at=began, max_seconds=36_000, **changes)
    if step_seconds is not None:
        for node in range(attempt.granted_nodes):
            fill(customer.backend, attempt.run_name, node=node, ranks=[rank(node, step_seconds=step_seconds)])
    return customer.end(attempt, Outcome.COMPLETED, at=began + seconds)


def test_efficiency_is_relative_to_a_one_node_run_of_the_same_code(customer):
    alone = completed(customer, seconds=1000, nodes=1)
    efficiency = resource_usage.usage_of(completed(customer, seconds=500, nodes=4)).efficiency  # 1000 / (4 * 500)
    assert efficiency == resource_usage.Efficiency(pytest.approx(0.5), 4, alone.pk, "epochs")
    assert "epochs per second" in efficiency_sentence(efficiency)
    # If both runs have samples, their steps are compared: 1.0 / 1.25.
    alone = completed(customer, seconds=1000, nodes=1, step_seconds=1.0)
    data = selectors.resource_usage_data(completed(customer, seconds=500, nodes=4, step_seconds=1.25))
    assert data["efficiency"] == {"value": pytest.approx(0.8), "nodes": 4, "job": alone.pk, "by": "steps"}
    assert "Scaling efficiency 80 %: 4 nodes process 3.2 times as much data per second" in data["sentences"][0]
    assert f"#{alone.pk}" in data["sentences"][0]
    assert selectors.resource_usage_data(alone)["efficiency"] is None


def test_efficiency_needs_a_completed_run_of_the_same_code_data_and_nodes(customer):
    customer.write("other.py")
    for changes in ({"code_path": "other.py"}, {"node_spec": "small"}, {"workers_per_node": 2}):
        completed(customer, seconds=1000, nodes=1, **changes)
    other_data, failed = (completed(customer, seconds=1000, nodes=1) for _ in range(2))
    version = DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization))
    JobDataset.objects.create(job=other_data, version=version, position=0)
    Job.objects.filter(pk=failed.pk).update(state="failed")
    assert resource_usage.usage_of(completed(customer, seconds=500, nodes=4)).efficiency is None

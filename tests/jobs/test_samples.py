import json
import time

import pytest

from jobs import samples, selectors
from jobs.models import JobDataset
from jobs.sentences import efficiency_sentence, straggler_sentence
from runtime.specs import Outcome
from tests.factories.storage import DatasetFactory, DatasetVersionFactory


def rank(number, *, steps=10, step_seconds=1.0, comm_seconds=0.2, **more):
    told = {"rank": number, "cpu": 0.9, "memory": 1000 + number, "steps": steps, "step_seconds": step_seconds}
    return told | {"comm_seconds": comm_seconds} | more


def fill(backend, name, *, node, ranks, count=20, **more):
    for number in range(count):
        backend.sample(
            name,
            {"at": 1000.0 + number, "seconds": 1.0, "cpu": number, "memory": 5, "net_rx": None, "ranks": ranks} | more,
            node=node,
        )


def test_nodes_and_ranks_of_an_attempt(customer, backend):
    attempt = customer.started()
    fill(backend, attempt.run_name, node=0, ranks=[rank(0)], gpus=[{"utilization": 40}, {"utilization": 60}])
    fill(backend, attempt.run_name, node=1, ranks=[rank(1)])
    told = selectors.telemetry(attempt.job)
    assert told["attempt"] == 1
    assert [node["node"] for node in told["nodes"]] == [0, 1]
    first = told["nodes"][0]
    assert first["at"] == [1000.0 + number for number in range(20)]
    assert first["series"]["cpu"] == list(range(20))
    assert first["series"]["gpu"] == [50.0] * 20
    assert "net_rx" not in first["series"]
    assert "gpu" not in told["nodes"][1]["series"]
    assert told["ranks"][1] == {
        "rank": 1, "node": 1, "cpu": 0.9, "memory": 1001.0, "steps": 200, "seconds_per_step": pytest.approx(0.1),
        "comm_share": pytest.approx(0.2), "is_slow": False,
    }  # fmt: skip
    assert told["efficiency"] is None
    assert told["sentences"] == []


def test_nothing_is_known_before_a_run_begins_or_of_another_attempt(customer, backend):
    job = customer.job()
    empty = {"attempt": None, "nodes": [], "ranks": [], "efficiency": None, "sentences": []}
    assert selectors.telemetry(job) == empty
    attempt = customer.started()
    assert selectors.telemetry(attempt.job, 7) == empty
    backend.lose(attempt.run_name)
    assert selectors.telemetry(attempt.job)["nodes"] == []


def test_long_files_are_read_in_pieces_thinned_and_averaged(customer, backend, monkeypatch):
    monkeypatch.setattr(samples, "PIECE_BYTES", 4096)
    attempt = customer.started(nodes=1)
    fill(backend, attempt.run_name, node=0, ranks=[rank(0)], count=5000)
    (node,) = samples.telemetry(attempt.job).nodes
    assert len(node.at) <= samples.POINTS_SHOWN
    assert node.at[-1] == 1000.0 + 4999
    cpu = [value for value in node.series["cpu"] if value is not None]
    assert cpu == sorted(cpu)
    assert cpu[0] < 50
    assert cpu[-1] > 4900


def test_no_more_is_read_than_the_bound(customer, backend, monkeypatch):
    monkeypatch.setattr(samples, "PIECE_BYTES", 2000)
    monkeypatch.setattr(samples, "MOST_BYTES", 6000)
    attempt = customer.started(nodes=1)
    fill(backend, attempt.run_name, node=0, ranks=[], count=1000)
    read = []
    monkeypatch.setattr(backend, "samples", lambda *given, real=backend.samples: read.append(given) or real(*given))
    samples.telemetry(attempt.job)
    assert 3 <= len(read) <= 4


HOSTILE = [
    "", "null", "[]", "{", "[" * 100_000, '{"at": "soon"}', '{"at": true}', '{"at": NaN}', '{"at": -1}',
    json.dumps({"at": 5, "cpu": "much", "ranks": "no", "gpus": [1, {"utilization": []}]}),
    json.dumps({"at": 6, "cpu": 1e999, "ranks": [{"rank": "x"}, {"rank": -3}, {"rank": 0, "steps": -5}, 7]}),
]  # fmt: skip


def test_hostile_samples_break_nothing(customer, backend):
    attempt = customer.started(nodes=1)
    backend.runs[attempt.run_name].samples[0] = ("\n".join([*HOSTILE, json.dumps({"at": 7, "cpu": 2})]) + "\n").encode()
    told = selectors.telemetry(attempt.job)
    assert told["nodes"][0]["at"] == [5.0, 6.0, 7.0]
    assert told["nodes"][0]["series"] == {"cpu": [None, None, 2.0]}
    assert [each["rank"] for each in told["ranks"]] == [0]
    json.dumps(told, allow_nan=False)


def test_a_rank_that_the_others_wait_for_is_named(customer, backend):
    attempt = customer.started(workers_per_node=2)
    # All steps take as long, since all wait for rank 3: what tells it is how little it waits itself.
    fill(backend, attempt.run_name, node=0, ranks=[rank(0, comm_seconds=0.6), rank(1, comm_seconds=0.6)])
    fill(backend, attempt.run_name, node=1, ranks=[rank(2, comm_seconds=0.6), rank(3, comm_seconds=0.0)])
    told = selectors.telemetry(attempt.job)
    assert [each["rank"] for each in told["ranks"] if each["is_slow"]] == [3]
    (sentence,) = told["sentences"]
    assert sentence.startswith("Rank 3 on node 1 is slow: it computes 2.5 times as long")


def test_only_of_late_counts_for_slowness():
    use = samples.RankUse(0, 0, recent_steps=10, recent_compute_seconds=1.0)
    slow = samples.RankUse(1, 0, recent_steps=10, recent_compute_seconds=1.31)
    unknown = samples.RankUse(2, 1, steps=10, step_seconds=9.0)
    assert samples.stragglers([use, slow, unknown]) == [samples.Straggler(1, 0, pytest.approx(1.31))]
    assert samples.stragglers([use, samples.RankUse(1, 0, recent_steps=10, recent_compute_seconds=1.29)]) == []
    assert samples.stragglers([slow]) == []
    assert straggler_sentence(samples.Straggler(1, 0, 1.31)).startswith("Rank 1 on node 0")


# --- Scaling ----------------------------------------------------------------------------------------------------------


def ran(customer, *, seconds, step_seconds=None, **changes):
    began = time.time() - 5000
    attempt = customer.started(at=began, max_seconds=36_000, **changes)
    if step_seconds is not None:
        for node in range(attempt.granted_nodes):
            fill(customer.backend, attempt.run_name, node=node, ranks=[rank(node, step_seconds=step_seconds)])
    return customer.end(attempt, Outcome.COMPLETED, at=began + seconds)


def test_scaling_is_told_against_the_one_node_run_of_the_same_code(customer):
    alone = ran(customer, seconds=1000, nodes=1, step_seconds=1.0)
    many = ran(customer, seconds=500, nodes=4, step_seconds=1.25)
    told = selectors.telemetry(many)
    assert told["efficiency"] == {"value": pytest.approx(0.8), "nodes": 4, "job": alone.pk, "by": "steps"}
    assert "Scaling efficiency 80 %: 4 nodes train on 3.2 times the data per second" in told["sentences"][0]
    assert f"#{alone.pk}" in told["sentences"][0]
    assert selectors.telemetry(alone)["efficiency"] is None


def test_without_steps_epochs_are_compared(customer):
    alone = ran(customer, seconds=1000, nodes=1)
    many = ran(customer, seconds=500, nodes=4)
    found = samples.telemetry(many).efficiency
    assert found == samples.Efficiency(pytest.approx(0.5), 4, alone.pk, "epochs")
    assert "epochs per second" in efficiency_sentence(found)


@pytest.mark.parametrize("other", ["script", "spec", "processes", "data", "failed"])
def test_a_run_of_something_else_is_no_measure(customer, other):
    customer.write("other.py")
    changes = {
        "script": {"code_path": "other.py"},
        "spec": {"node_spec": "small"},
        "processes": {"workers_per_node": 2},
    }
    alone = ran(customer, seconds=1000, nodes=1, **changes.get(other, {}))
    if other == "data":
        version = DatasetVersionFactory(dataset=DatasetFactory(organization=customer.organization))
        JobDataset.objects.create(job=alone, version=version, position=0)
    if other == "failed":
        type(alone).objects.filter(pk=alone.pk).update(state="failed")
    assert samples.telemetry(ran(customer, seconds=500, nodes=4)).efficiency is None

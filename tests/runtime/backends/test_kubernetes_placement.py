"""Runs that wait for machines, images, quotas and queues, and not for ever."""

import time

import pytest

from runtime.backends import kubernetes_guard
from runtime.specs import (
    ANY_NUMBER,
    FailureCode,
    Image,
    Outcome,
    PullSecret,
    Resources,
    RunPhase,
    WaitingCode,
)
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.yard import ClusterYard
from tests.runtime.backends.going import NAME, SLEEP, job_of, waits_for


def test_a_run_that_is_placed_in_part_is_taken_down_whole(own_yard: ClusterYard) -> None:
    own_yard.backend = own_yard.another(gang_seconds=2)
    own_yard.backend.submit(own_yard.spec(SLEEP, nodes=3, resources=Resources(5, 256)))
    status = waits_for(own_yard, WaitingCode.CPUS)
    assert status.waiting_data == {"wanted": 5.0, "nodes": 1, "free": 3.0}
    ended = own_yard.wait_for_end()
    assert ended.failure is not None
    assert (ended.outcome, ended.started_at, ended.spans) == (Outcome.NO_CAPACITY, None, ())
    assert ended.failure.data["placed"] == 2
    time.sleep(1.1)  # what was counted is a second old at most
    assert [machine.free.cpus for machine in own_yard.backend.capacity().machines] == [8.0, 8.0]


def test_gpus_that_are_not_free_are_counted(own_yard: ClusterYard, fake: FakeCluster) -> None:
    offers = {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": "4"}
    fake.add_node("gpu-a", offers, **{"nvidia.com/gpu.product": "A100"})
    own_yard.backend.submit(own_yard.spec(SLEEP, nodes=2, resources=Resources(1, 256, gpus=3, gpu_type="A100")))
    status = waits_for(own_yard, WaitingCode.GPUS)
    assert status.waiting_data == {"wanted": 3, "gpu_type": "A100", "nodes": 1, "free": 1}


def test_a_run_that_no_machine_can_hold_says_so_and_starts_once_one_can(
    own_yard: ClusterYard, fake: FakeCluster
) -> None:
    large = Resources(12, 256)
    assert own_yard.backend.capacity().nodes_ever(large) == 0
    own_yard.backend.submit(own_yard.spec(SLEEP, resources=large))
    assert "that large" in waits_for(own_yard, WaitingCode.TOO_LARGE).waiting_for
    fake.add_node("large", {"cpu": "16", "memory": "16Gi"})
    own_yard.wait_for_text("up")
    time.sleep(1.1)  # what was counted is a second old at most
    assert own_yard.backend.capacity().nodes_ever(large) == 1


def test_a_node_kind_that_no_machine_is_for_has_no_room(own_yard: ClusterYard, fake: FakeCluster) -> None:
    own = own_yard.another(node_selectors={"large": {"pool": "large"}}).capacity()
    assert [own.nodes_ever(Resources(1, 256), kind) for kind in ("large", "small")] == [0, 16]
    fake.add_node("large", {"cpu": "16", "memory": "16Gi"}, pool="large")
    own = own_yard.another(node_selectors={"large": {"pool": "large"}}).capacity()
    assert own.nodes_ever(Resources(1, 256), "large") == 16


def test_an_elastic_cluster_takes_what_its_machines_of_now_could_not(own_yard: ClusterYard, fake: FakeCluster) -> None:
    large = Resources(12, 256)
    assert own_yard.another(elastic=True).capacity().nodes_now(large) == ANY_NUMBER
    # Where the most that there can be is known, that counts.
    pool = own_yard.another(elastic=True, capacity=[{"cpus": 12, "memory_mib": 4096, "count": 2}])
    assert pool.capacity().nodes_ever(large) == 2
    own_yard.backend = pool
    pool.submit(own_yard.spec(SLEEP, resources=large))
    assert waits_for(own_yard, WaitingCode.CPUS).waiting_data["wanted"] == 12.0
    assert pool.capacity().nodes_now(large) == 1
    fake.add_node("large", {"cpu": "16", "memory": "16Gi"})
    own_yard.wait_for_text("up")


@pytest.mark.parametrize(
    ("reference", "code", "outcome"),
    [
        ("registry.acme.example/none:1", WaitingCode.IMAGE_NAME, Outcome.CODE_FAILED),
        ("private.acme.example/vision:1", WaitingCode.IMAGE_CREDENTIALS, Outcome.CODE_FAILED),
        ("away.acme.example/vision:1", WaitingCode.IMAGE_NETWORK, Outcome.PLATFORM_ERROR),
    ],
)
def test_an_image_that_cannot_be_pulled_says_why_and_is_given_up_free(  # noqa: PLR0917 - fixtures and a table
    own_yard: ClusterYard,
    fake: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    reference: str,
    code: WaitingCode,
    outcome: Outcome,
) -> None:
    fake.registry.passwords["private.acme.example"] = "right"
    fake.registry.dead.add("away.acme.example")
    monkeypatch.setattr(kubernetes_guard, "HOPELESS_SECONDS", 2.0)
    own_yard.backend = own_yard.another(start_seconds=2)
    secret = PullSecret("private.acme.example", "acme", "wrong")
    own_yard.backend.submit(own_yard.spec(SLEEP, image=Image(reference=reference), pull_secret=secret))
    assert waits_for(own_yard, code).waiting_data["image"] == reference
    ended = own_yard.wait_for_end()
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.code, ended.started_at) == (outcome, code.value, None)


def test_a_private_image_is_pulled_with_its_registrys_credentials(own_yard: ClusterYard, fake: FakeCluster) -> None:
    reference = "private.acme.example/vision:1"
    fake.registry.passwords["private.acme.example"] = "right"
    fake.registry.images[reference] = next(iter(fake.registry.images.values()))
    secret = PullSecret("private.acme.example", "acme", "right")
    assert own_yard.run("print(1)", image=Image(reference=reference), pull_secret=secret).outcome is Outcome.COMPLETED


def test_a_namespace_whose_quota_is_used_up(own_yard: ClusterYard, fake: FakeCluster) -> None:
    fake.make("resourcequotas", own_yard.site.namespace, "few", spec={"hard": {"pods": "1"}})
    own_yard.backend.submit(own_yard.spec(SLEEP, nodes=2))
    assert "exceeded quota" in waits_for(own_yard, WaitingCode.QUOTA).waiting_data["detail"]


# Kueue


def test_a_queue_lets_runs_begin_and_taking_them_back_ends_them_free(own_yard: ClusterYard, fake: FakeCluster) -> None:
    own_yard.backend = own_yard.another(queue="training")
    own_yard.backend.submit(own_yard.spec(SLEEP))
    assert waits_for(own_yard, WaitingCode.ADMISSION).waiting_data["queue"] == "training"
    assert job_of(fake)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    fake.store.edit("jobs", own_yard.site.namespace, NAME, lambda job: job["spec"].update(suspend=False))
    own_yard.wait_for_text("up")
    own_yard.wait(NAME, lambda status: status.started_at is not None)
    fake.store.edit("jobs", own_yard.site.namespace, NAME, lambda job: job["spec"].update(suspend=True))
    ended = own_yard.wait_for_end()
    assert ended.failure is not None
    assert (ended.outcome, ended.failure.code) == (Outcome.NODE_LOST, FailureCode.PREEMPTED)


def test_a_run_that_waits_for_its_queue_is_stopped_at_once(own_yard: ClusterYard, fake: FakeCluster) -> None:
    own_yard.backend = own_yard.another(queue="training")
    own_yard.backend.submit(own_yard.spec(SLEEP))
    own_yard.backend.stop(NAME, 10)
    status = own_yard.backend.describe(NAME)
    assert (status.phase, status.outcome, status.started_at) == (RunPhase.ENDED, Outcome.STOPPED, None)
    assert own_yard.backend.names(live=True) == []
    # Were it let begin now, it would have nothing to run.
    assert job_of(fake)["spec"]["parallelism"] == 0

import dataclasses
from typing import Any

import pytest

from runtime.backends.kubernetes_config import ClusterConfig
from runtime.backends.kubernetes_facts import JobFact, PodFact
from runtime.backends.kubernetes_guard import HOPELESS_SECONDS, verdict
from runtime.specs import FailureCode, Outcome, RunPhase, RunStatus, Waiting, WaitingCode
from tests.runtime.backends.test_kubernetes_outcome import JOB

VOLUME = {"claim": "c", "root": "/srv"}
CONFIG = ClusterConfig.from_data("east", {"volume": VOLUME, "gang_seconds": 100, "start_seconds": 200})
GPUS = Waiting(WaitingCode.GPUS, {"wanted": 1}, "Not enough GPUs are free.")
NAME = Waiting(WaitingCode.IMAGE_NAME, {"image": "x"}, "There is no image x.")
NETWORK = Waiting(WaitingCode.IMAGE_NETWORK, {"image": "x"}, "The registry does not answer.")
BEGUN = 1000.0
JUST = dataclasses.replace(JOB, begun_at=BEGUN)


def placed(node: int, at: float = BEGUN, **changes: Any) -> PodFact:
    return PodFact(node, uid=f"p{node}", created_at=at, machine="m", placed_at=at, **changes)


def judge(
    *pods: PodFact,
    waiting: Waiting | None = GPUS,
    now: float = BEGUN + 101,
    job: JobFact = JUST,
    started_at: float | None = None,
    config: ClusterConfig = CONFIG,
) -> dict[str, Any] | None:
    status = RunStatus("job-1-1", RunPhase.STARTING, started_at=started_at)
    return verdict(job, {pod.node: pod for pod in pods}, status, waiting, config=config, now=now)


def test_a_run_that_was_placed_in_part_is_taken_down_whole() -> None:
    why = judge(placed(0))
    assert why is not None
    assert (why["kind"], why["code"]) == (Outcome.NO_CAPACITY, FailureCode.NODES_NOT_PLACED)
    assert why["data"] == {"placed": 1, "nodes": 2, "seconds": 100, "waiting_code": "gpus"}


@pytest.mark.parametrize(
    ("pods", "changes"),
    [
        ((placed(0),), {"now": BEGUN + 99}),
        ((), {}),
        ((placed(0), placed(1)), {}),
        ((placed(0),), {"started_at": 1001.0, "waiting": None}),
        ((placed(0),), {"job": dataclasses.replace(JUST, suspended=True)}),
        ((placed(0),), {"job": dataclasses.replace(JUST, failing=True)}),
        ((placed(0),), {"job": dataclasses.replace(JUST, taken_down={"kind": "stopped"})}),
        ((placed(0),), {"config": dataclasses.replace(CONFIG, queue="training")}),
    ],
    ids=["early", "nothing held", "whole", "ran", "suspended", "failing", "taken down", "kueue"],
)
def test_a_run_is_left_alone(pods: tuple[PodFact, ...], changes: dict[str, Any]) -> None:
    assert judge(*pods, **changes) is None


@pytest.mark.parametrize(
    ("waiting", "builtin", "seconds", "outcome", "code"),
    [
        (NAME, False, HOPELESS_SECONDS, Outcome.CODE_FAILED, FailureCode.IMAGE_NAME),
        (NAME, True, HOPELESS_SECONDS, Outcome.PLATFORM_ERROR, FailureCode.IMAGE_NAME),
        (NETWORK, False, 200, Outcome.PLATFORM_ERROR, FailureCode.IMAGE_NETWORK),
        (
            Waiting(WaitingCode.VOLUME, {"claim": "c"}, "No."),
            False,
            200,
            Outcome.PLATFORM_ERROR,
            FailureCode.NODE_NOT_STARTED,
        ),
    ],
)
def test_what_keeps_every_node_from_starting_ends_the_run_free(
    waiting: Waiting, *, builtin: bool, seconds: float, outcome: Outcome, code: FailureCode
) -> None:
    job = dataclasses.replace(JUST, told={**JUST.told, "builtin": builtin})
    pods = (placed(0, started_at=BEGUN), placed(1, BEGUN + 10))
    assert judge(*pods, waiting=waiting, job=job, now=BEGUN + 10 + seconds - 1) is None
    why = judge(*pods, waiting=waiting, job=job, now=BEGUN + 10 + seconds + 1)
    assert why is not None
    assert (why["kind"], why["code"], why["data"]["node"]) == (outcome, code, 1)


def test_an_image_that_does_not_exist_is_not_waited_for_until_all_nodes_are_placed() -> None:
    why = judge(placed(0), waiting=NAME, now=BEGUN + HOPELESS_SECONDS + 1)
    assert why is not None
    assert why["code"] == FailureCode.IMAGE_NAME


def test_a_run_whose_quota_a_queue_took_back_has_ended() -> None:
    job = dataclasses.replace(JUST, suspended=True)
    why = judge(job=job, started_at=1001.0, waiting=None)
    assert why is not None
    assert (why["kind"], why["code"]) == (Outcome.NODE_LOST, FailureCode.PREEMPTED)

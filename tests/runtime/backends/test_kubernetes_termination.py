"""When the console ends a run that cannot start, that Kueue suspends, or that ignores its deadline."""

import dataclasses

import pytest

from runtime.backends.kubernetes.config import ClusterConfig
from runtime.backends.kubernetes.pending import DEADLINE_MARGIN_SECONDS, IMAGE_REFUSED_SECONDS, find_termination
from runtime.backends.kubernetes.state import PodState, Termination
from runtime.specs import FailureCode, Outcome, RunPhase, RunStatus, Waiting, WaitingCode
from tests.runtime.backends.samples import JOB

VOLUME = {"claim": "c", "root": "/srv"}
CONFIG = ClusterConfig.from_data("east", {"volume": VOLUME, "gang_seconds": 100, "start_seconds": 200})
GPUS = Waiting(WaitingCode.GPUS, {"wanted": 1}, "Not enough GPUs are free.")
NO_IMAGE = Waiting(WaitingCode.IMAGE_NAME, {"image": "x"}, "There is no image x.")
NO_REGISTRY = Waiting(WaitingCode.IMAGE_NETWORK, {"image": "x"}, "The registry does not answer.")
START = 1000.0
STARTED_JOB = dataclasses.replace(JOB, start_time=START)
STOPPED = Termination(Outcome.STOPPED, FailureCode.STOPPED, "stopped", START)


def scheduled_pod(node, at=START, **changes):
    return PodState(node, uid=f"p{node}", created_at=at, machine="m", scheduled_at=at, **changes)


def termination_of(*pods, waiting=GPUS, now=START + 101, job=STARTED_JOB, started_at=None, config=CONFIG, phase=None):
    phase = phase or (RunPhase.STARTING if started_at is None else RunPhase.RUNNING)
    status = RunStatus("job-1-1", phase, started_at=started_at)
    return find_termination(job, {pod.node: pod for pod in pods}, status, waiting, config=config, now=now)


def test_a_partly_placed_run_ends():
    termination = termination_of(scheduled_pod(0))
    assert (termination.outcome, termination.code) == (Outcome.NO_CAPACITY, FailureCode.NODES_NOT_PLACED)
    assert termination.data == {"placed": 1, "nodes": 2, "seconds": 100, "waiting_code": "gpus"}


@pytest.mark.parametrize(
    ("pods", "changes"),
    [
        ((scheduled_pod(0),), {"now": START + 99}),
        ((), {}),
        ((scheduled_pod(0), scheduled_pod(1)), {}),
        ((scheduled_pod(0),), {"started_at": 1001.0, "waiting": None}),
        ((scheduled_pod(0),), {"job": dataclasses.replace(STARTED_JOB, suspended=True)}),
        ((scheduled_pod(0),), {"job": dataclasses.replace(STARTED_JOB, is_failing=True)}),
        ((scheduled_pod(0),), {"job": dataclasses.replace(STARTED_JOB, termination=STOPPED)}),
        ((scheduled_pod(0),), {"config": dataclasses.replace(CONFIG, queue="training")}),
    ],
    ids=["early", "nothing placed", "all placed", "started", "suspended", "failing", "stopped", "kueue"],
)
def test_a_run_is_ended_neither_early_nor_in_another_state(pods, changes):
    assert termination_of(*pods, **changes) is None


@pytest.mark.parametrize(
    ("waiting", "builtin", "seconds", "outcome", "code"),
    [
        (NO_IMAGE, False, IMAGE_REFUSED_SECONDS, Outcome.CODE_FAILED, FailureCode.IMAGE_NAME),
        (NO_IMAGE, True, IMAGE_REFUSED_SECONDS, Outcome.PLATFORM_ERROR, FailureCode.IMAGE_NAME),
        (NO_REGISTRY, False, CONFIG.start_seconds, Outcome.PLATFORM_ERROR, FailureCode.IMAGE_NETWORK),
        (
            Waiting(WaitingCode.VOLUME, {"claim": "c"}, "No."),
            False,
            CONFIG.start_seconds,
            Outcome.PLATFORM_ERROR,
            FailureCode.NODE_NOT_STARTED,
        ),
    ],
    ids=["a refused image of the customer", "a refused platform image", "a silent registry", "a volume"],
)
def test_a_run_whose_nodes_cannot_start_ends(waiting, *, builtin, seconds, outcome, code):
    job = dataclasses.replace(STARTED_JOB, spec=dataclasses.replace(STARTED_JOB.spec, builtin=builtin))
    pods = (scheduled_pod(0, started_at=START), scheduled_pod(1, START + 10))  # the limit counts from the last one
    assert termination_of(*pods, waiting=waiting, job=job, now=START + 10 + seconds - 1) is None
    termination = termination_of(*pods, waiting=waiting, job=job, now=START + 10 + seconds + 1)
    assert (termination.outcome, termination.code, termination.data["node"]) == (outcome, code, 1)


def test_a_missing_image_ends_a_partly_placed_run_early():
    """After `IMAGE_REFUSED_SECONDS` (60), not `gang_seconds` (100)."""
    termination = termination_of(scheduled_pod(0), waiting=NO_IMAGE, now=START + IMAGE_REFUSED_SECONDS + 1)
    assert termination.code == FailureCode.IMAGE_NAME


def test_a_run_that_kueue_suspends_ends():
    job = dataclasses.replace(STARTED_JOB, suspended=True)
    termination = termination_of(job=job, started_at=1001.0, waiting=None)
    assert (termination.outcome, termination.code) == (Outcome.NODE_LOST, FailureCode.PREEMPTED)


@pytest.mark.parametrize(
    ("builtin", "seconds_late", "phase", "is_ended"),
    [
        (False, 1, RunPhase.RUNNING, True),
        (False, 1, RunPhase.STARTING, True),  # a lost node of a large elastic run has no saved Pod
        (False, 1, RunPhase.STOPPING, False),
        (False, -1, RunPhase.RUNNING, False),
        (True, 1, RunPhase.RUNNING, False),
    ],
    ids=["an own image", "without one pod", "stopping", "an own image, in time", "a platform image"],
)
def test_a_run_whose_own_image_ignores_the_deadline_ends(builtin, seconds_late, phase, *, is_ended):
    spec = dataclasses.replace(STARTED_JOB.spec, builtin=builtin, deadline_seconds=100)
    now = START + 100 + DEADLINE_MARGIN_SECONDS + seconds_late
    job = dataclasses.replace(STARTED_JOB, spec=spec)
    termination = termination_of(scheduled_pod(0), job=job, started_at=START, waiting=None, now=now, phase=phase)
    assert (termination is not None) is is_ended
    assert termination is None or termination.outcome is Outcome.TIME_LIMIT

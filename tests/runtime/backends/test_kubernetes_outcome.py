"""The table of `docs/kubernetes.md`, line by line: what the API server and the pods say, and what it comes to."""

import dataclasses
from typing import Any

import pytest

from runtime.backends.kubernetes_facts import JobFact, PodFact, pack_status, unpack_status
from runtime.backends.kubernetes_guard import taken_down
from runtime.backends.kubernetes_outcome import merge
from runtime.specs import FailureCode, Outcome, RunPhase, RunStatus, Span
from tests.runtime.backends.samples import END, FAILED, JOB, START, over, pod


def record(*causes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"phase": "ended", "started_at": START, "causes": list(causes), **more}


def cause(kind: str, code: str, at: float = END - 1, node: int = 0, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "code": code, "at": at, "node": node, **more}


RANK = cause("code_failed", "rank_exited", rank=1, node=1, exit_code=3, last_lines=["boom"])


def run(job: JobFact, *pods: PodFact, records: Any = None, lost: Any = None, now: float = END + 5) -> RunStatus:
    return merge(job, {one.node: one for one in pods}, records or {}, now=now, lost=lost)


def test_a_run_that_completed_is_metered_from_its_last_nodes_start_to_its_last_end() -> None:
    done = dataclasses.replace(JOB, ended_as="Complete", ended_at=END + 2)
    status = run(done, over(0), over(1, finished_at=END - 3))
    assert (status.phase, status.outcome, status.failure) == (RunPhase.ENDED, Outcome.COMPLETED, None)
    assert (status.started_at, status.finished_at) == (START, END)
    assert status.spans == (Span(2, START, END),)


def test_both_pods_ended_well_before_the_job_says_so() -> None:
    assert run(JOB, over(0), over(1)).outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("pods", "phase"),
    [
        ((), RunPhase.STARTING),
        ((pod(0), pod(1, started_at=None)), RunPhase.STARTING),
        ((pod(0),), RunPhase.STARTING),
        ((pod(0), pod(1)), RunPhase.RUNNING),
        ((pod(0), over(1)), RunPhase.RUNNING),
        ((pod(0), pod(1, deleted_at=END + 60)), RunPhase.STOPPING),
    ],
)
def test_a_run_runs_once_every_node_does(pods: tuple[PodFact, ...], phase: RunPhase) -> None:
    status = run(JOB, *pods)
    assert status.phase is phase
    assert status.outcome is None
    assert (status.started_at is None) == (phase is RunPhase.STARTING)


def test_a_run_that_fails_is_stopping_until_its_last_pod_ended() -> None:
    failing = dataclasses.replace(JOB, failing=True, failed_at=END, end_reason="BackoffLimitExceeded")
    status = run(failing, over(1, 1), pod(0, deleted_at=END + 30), records={1: record(RANK)})
    assert (status.phase, status.outcome) == (RunPhase.STOPPING, None)


def test_pods_that_are_told_late_to_end_sooner_have_their_time_from_then() -> None:
    stopped = taken_down(Outcome.STOPPED, FailureCode.STOPPED, "stopped", END)
    # A shortened grace counts from the first request: by its own time this pod was due long ago.
    late = pod(0, deleted_at=END + 1)
    hurried = dataclasses.replace(JOB, taken_down=stopped, hurried_until=END + 100)
    assert run(hurried, late, over(1, 1), now=END + 110).phase is RunPhase.STOPPING
    assert run(hurried, late, over(1, 1), now=END + 116).phase is RunPhase.ENDED


# One line each: what is said of node 0, by the API server or by itself, while node 1 failed with it or not.
TABLE = {
    "code exited": ((over(0), over(1, 1)), {1: record(RANK)}, Outcome.CODE_FAILED, FailureCode.RANK_EXITED),
    "code exited without a record": ((over(0), over(1, 3)), {}, Outcome.CODE_FAILED, FailureCode.RANK_EXITED),
    "out of memory, by the kubelet": (
        (over(0, 137, container_reason="OOMKilled"), over(1, 1)),
        {1: record(cause("code_failed", "rank_exited", at=END + 0.5, node=1))},
        Outcome.OUT_OF_MEMORY,
        FailureCode.OUT_OF_MEMORY,
    ),
    "killed, and nobody says what for": (
        (over(0, 137), over(1, 1, finished_at=END + 1)),
        {},
        Outcome.OUT_OF_MEMORY,
        FailureCode.OUT_OF_MEMORY,
    ),
    "machine started anew": (
        (over(0, 255, container_reason="Unknown"), over(1, 1)),
        {1: record(cause("code_failed", "rank_exited", at=END - 5, node=1))},
        Outcome.NODE_LOST,
        FailureCode.NODE_LOST,
    ),
    "machine started anew, and its container is gone": (
        (over(0, 137, container_reason="ContainerStatusUnknown"), over(1, 1)),
        {},
        Outcome.NODE_LOST,
        FailureCode.NODE_LOST,
    ),
    "deleted by its Job before its container began": (
        (over(0, 137, container_reason="ContainerStatusUnknown", started_at=None, deleted_at=END), over(1, 1)),
        {1: record(RANK)},
        Outcome.CODE_FAILED,
        FailureCode.RANK_EXITED,
    ),
    "out of memory, by its record": (
        (over(0, 1), over(1, 1)),
        {0: record(cause("out_of_memory", "out_of_memory"))},
        Outcome.OUT_OF_MEMORY,
        FailureCode.OUT_OF_MEMORY,
    ),
    "evicted for its machine's sake": (
        (over(0, 137, pod_reason="Evicted", disruption="TerminationByKubelet", disrupted_at=END), over(1, 1)),
        {},
        Outcome.NODE_LOST,
        FailureCode.EVICTED,
    ),
    "evicted for its own": (
        (
            over(
                0,
                137,
                pod_reason="Evicted",
                disruption="TerminationByKubelet",
                disrupted_at=END,
                pod_message='Usage of EmptyDir volume "tmp" exceeds the limit "512Mi".',
            ),
            over(1, 1),
        ),
        {},
        Outcome.DISK_FULL,
        FailureCode.DISK_FULL,
    ),
    "drained": (
        (over(0, 1, disruption="EvictionByEvictionAPI", disrupted_at=END - 1), over(1, 1)),
        {1: record(cause("node_lost", "node_lost", at=END))},
        Outcome.NODE_LOST,
        FailureCode.EVICTED,
    ),
    "preempted": (
        (over(0, 1, disruption="PreemptionByScheduler", disrupted_at=END - 1), over(1, 1)),
        {1: record(cause("code_failed", "rank_exited", at=END, node=1))},
        Outcome.NODE_LOST,
        FailureCode.PREEMPTED,
    ),
    "machine out of reach, found late": (
        (pod(0, disruption="DeletionByTaintManager", disrupted_at=END + 60, deleted_at=END), over(1, 1)),
        {1: record(cause("code_failed", "rank_exited", at=END - 5, node=1))},
        Outcome.NODE_LOST,
        FailureCode.NODE_LOST,
    ),
    "machine shut down": (
        (over(0, 137, pod_reason="Terminated", disrupted_at=END), over(1, 1)),
        {},
        Outcome.NODE_LOST,
        FailureCode.NODE_LOST,
    ),
    "no room on its machine": (
        (over(0, None, pod_reason="OutOfcpu", started_at=None), over(1, 1)),
        {},
        Outcome.NO_CAPACITY,
        FailureCode.NODES_NOT_PLACED,
    ),
    "the pod's own deadline": (
        (over(0, 137, pod_reason="DeadlineExceeded"), over(1, 1)),
        {},
        Outcome.TIME_LIMIT,
        FailureCode.TIME_LIMIT,
    ),
    "the run's deadline": (
        (over(0, 1), over(1, 1)),
        {0: record(cause("time_limit", "time_limit"))},
        Outcome.TIME_LIMIT,
        FailureCode.TIME_LIMIT,
    ),
    "disk full": (
        (over(0, 1), over(1, 1)),
        {0: record(cause("disk_full", "disk_full"))},
        Outcome.DISK_FULL,
        FailureCode.DISK_FULL,
    ),
    "our image has no Python": (
        (over(0, 128, container_reason="StartError", started_at=None), over(1, 1)),
        {},
        Outcome.PLATFORM_ERROR,
        FailureCode.IMAGE_UNUSABLE,
    ),
    "pods that never met, in our image": (
        (over(0, 1), over(1, 1)),
        {0: record(cause("platform_error", "nodes_not_met"), started_at=None)},
        Outcome.PLATFORM_ERROR,
        FailureCode.NODES_NOT_MET,
    ),
    "a peer that was lost, by the word of the other": (
        (over(0, 1), over(1, 1)),
        {1: record(cause("node_lost", "node_silent"))},
        Outcome.CODE_FAILED,
        FailureCode.NODE_SILENT,
    ),
    "a platform error, by its own word": (
        (over(0, 1), over(1, 1)),
        {0: record(cause("platform_error", "platform_error"))},
        Outcome.CODE_FAILED,
        FailureCode.PLATFORM_ERROR,
    ),
    "the code failed well before a drain": (
        (over(0, 1, disruption="EvictionByEvictionAPI", disrupted_at=END), over(1, 1)),
        {1: record({**RANK, "at": END - 30})},
        Outcome.CODE_FAILED,
        FailureCode.RANK_EXITED,
    ),
}


@pytest.mark.parametrize("line", TABLE)
def test_the_table_of_ends(line: str) -> None:
    pods, records, outcome, code = TABLE[line]
    lost = {0: END} if not pods[0].ended else None
    status = run(FAILED, *pods, records=records, lost=lost)
    assert status.phase is RunPhase.ENDED
    assert status.failure is not None
    assert (status.outcome, status.failure.code) == (outcome, code)


NEVER_FREE = ("node_lost", "platform_error", "no_capacity", "stopped")


@pytest.mark.parametrize("builtin", [True, False])
@pytest.mark.parametrize("kind", NEVER_FREE)
@pytest.mark.parametrize("code", ["node_lost", "node_silent", "nodes_not_met", "evicted", "platform_error", "made up"])
def test_nothing_said_from_inside_a_pod_makes_a_run_free(kind: str, code: str, *, builtin: bool) -> None:
    job = dataclasses.replace(FAILED, told={**FAILED.told, "builtin": builtin})
    status = run(job, over(0, 1), over(1, 1), records={0: record(cause(kind, code)), 1: record(cause(kind, code))})
    assert status.outcome is Outcome.CODE_FAILED
    assert (status.started_at, status.finished_at) == (START, END)


def test_an_image_of_the_customers_may_say_what_it_likes_of_never_having_begun() -> None:
    job = dataclasses.replace(FAILED, told={**FAILED.told, "builtin": False})
    told = record(cause("platform_error", "nodes_not_met"), started_at=None)
    status = run(job, over(0, 1), over(1, 1), records={0: told, 1: told})
    assert (status.outcome, status.started_at) == (Outcome.CODE_FAILED, START)


def test_a_hang_is_paid_to_the_last_sign_by_our_image_and_whole_by_the_customers() -> None:
    told = {0: record(cause("hung", "hung", data={"progress_at": START + 20}), progress_at=START + 30)}
    assert run(FAILED, over(0, 1), over(1, 1), records=told).progress_at == START + 20
    theirs = dataclasses.replace(FAILED, told={**FAILED.told, "builtin": False})
    assert run(theirs, over(0, 1), over(1, 1), records=told).progress_at == END


def test_an_image_without_python_that_the_customer_chose_is_the_customers() -> None:
    theirs = dataclasses.replace(FAILED, told={**FAILED.told, "builtin": False})
    status = run(
        theirs, over(0, 128, container_reason="StartError", started_at=None), pod(1, started_at=None, ended=True)
    )
    assert status.outcome is Outcome.CODE_FAILED
    assert status.started_at is None


def test_what_was_stopped_was_stopped_though_its_code_fails_of_it() -> None:
    why = taken_down(Outcome.STOPPED, FailureCode.STOPPED, "The run was stopped on request.", END - 2)
    job = dataclasses.replace(FAILED, taken_down=why, end_reason="DeadlineExceeded")
    status = run(job, over(0, 1), over(1, 1), records={1: record({**RANK, "at": END})})
    assert status.outcome is Outcome.STOPPED


def test_what_had_failed_before_it_was_stopped_had_failed() -> None:
    why = taken_down(Outcome.STOPPED, FailureCode.STOPPED, "The run was stopped on request.", END)
    job = dataclasses.replace(FAILED, taken_down=why)
    assert run(job, over(0, 1), over(1, 1), records={1: record({**RANK, "at": END - 5})}).outcome is Outcome.CODE_FAILED


def test_a_stop_that_came_too_late_changes_nothing() -> None:
    why = taken_down(Outcome.STOPPED, FailureCode.STOPPED, "The run was stopped on request.", END)
    done = dataclasses.replace(JOB, taken_down=why, ended_as="Complete", ended_at=END)
    assert run(done, over(0), over(1)).outcome is Outcome.COMPLETED


def test_what_never_began_ends_at_once_when_it_is_stopped() -> None:
    why = taken_down(Outcome.STOPPED, FailureCode.STOPPED, "The run was stopped on request.", END)
    waiting = dataclasses.replace(JOB, suspended=True, begun_at=None, taken_down=why)
    status = run(waiting)
    assert (status.phase, status.outcome, status.started_at) == (RunPhase.ENDED, Outcome.STOPPED, None)


def test_a_gang_that_was_taken_down_never_ran() -> None:
    why = taken_down(Outcome.NO_CAPACITY, FailureCode.NODES_NOT_PLACED, "Only 1 of 2.", END, placed=1, nodes=2)
    job = dataclasses.replace(FAILED, taken_down=why, end_reason="DeadlineExceeded")
    status = run(job, over(0, 1))
    assert (status.outcome, status.started_at, status.spans) == (Outcome.NO_CAPACITY, None, ())
    assert status.failure is not None
    assert status.failure.data == {"placed": 1, "nodes": 2}


def test_pods_that_went_without_a_trace_are_not_the_customers_fault() -> None:
    status = run(dataclasses.replace(FAILED, started_at=START))
    assert status.outcome is Outcome.PLATFORM_ERROR
    assert status.finished_at == END + 1


def test_a_disruption_counts_though_its_pod_has_gone() -> None:
    message = "Pod runs/job-1-1-0-x7k2p has condition DisruptionTarget matching FailJob rule at index 0"
    job = dataclasses.replace(FAILED, end_reason="PodFailurePolicy", end_message=message)
    status = run(job, over(1, 1), records={1: record(cause("node_lost", "node_lost"))})
    assert status.failure is not None
    assert (status.outcome, status.failure.code, status.failure.node) == (Outcome.NODE_LOST, FailureCode.EVICTED, 0)


def test_a_pod_that_should_be_gone_and_is_not_heard_of_is_lost() -> None:
    hanging = pod(0, deleted_at=END + 20)
    waiting = run(dataclasses.replace(JOB, failing=True), hanging, over(1, 1), now=END + 25)
    assert waiting.phase is RunPhase.STOPPING
    late = run(dataclasses.replace(JOB, failing=True), hanging, over(1, 1), now=END + 60)
    assert (late.phase, late.outcome) == (RunPhase.ENDED, Outcome.NODE_LOST)


def test_when_a_run_began_is_kept_though_its_pods_are_gone() -> None:
    kept = dataclasses.replace(FAILED, started_at=START)
    assert run(kept, over(1, 1), records={1: record(RANK)}).started_at == START
    told = run(FAILED, over(1, 1), records={1: record(RANK)})
    assert told.started_at == START


def test_a_run_is_not_metered_from_before_it_was_ordered() -> None:
    early = dataclasses.replace(JOB, submitted_at=START + 0.4)
    assert run(early, pod(0), pod(1)).started_at == START + 0.4


def test_an_elastic_run_goes_on_without_a_node_and_pays_for_the_others() -> None:
    elastic = dataclasses.replace(JOB, told={**JOB.told, "min_nodes": 1})
    lost = over(0, 1, finished_at=START + 50, disruption="EvictionByEvictionAPI", disrupted_at=START + 49)
    going = run(elastic, lost, pod(1))
    assert going.phase is RunPhase.RUNNING
    assert going.spans == (Span(2, START, START + 50), Span(1, START + 50, None))
    ended = dataclasses.replace(elastic, failing=True, ended_as="Failed", ended_at=END, end_reason="FailedIndexes")
    done = run(ended, lost, over(1))
    assert (done.outcome, done.failure) == (Outcome.COMPLETED, None)
    assert done.spans == (Span(2, START, START + 50), Span(1, START + 50, END))


def test_how_it_ended_survives_its_way_through_an_annotation() -> None:
    status = run(FAILED, over(0), over(1, 1), records={1: record(RANK)})
    assert unpack_status(pack_status(status)) == status

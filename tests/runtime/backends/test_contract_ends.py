"""How runs end on every backend: the other half of `test_contract_backends.py`."""

from __future__ import annotations

from runtime.errors import RunNotFound
from runtime.specs import FailureCode, Outcome, Resources, RunPhase
from tests.runtime.any_yard import AnyYard
from tests.runtime.backends.contract import POLITE, STUBBORN, WAIT


def test_a_stopped_run_has_its_grace(any_yard: AnyYard) -> None:
    any_yard.backend.submit(any_yard.spec(POLITE, nodes=2))
    for rank in range(2):
        any_yard.wait_for_text("ready", rank=rank)
    any_yard.backend.stop("job-1-1", 20)
    any_yard.backend.stop("job-1-1", 30)
    ended = any_yard.wait_for_end()
    assert ended.outcome is Outcome.STOPPED
    assert ended.failure is not None
    assert ended.failure.code is FailureCode.STOPPED
    for rank in range(2) if any_yard.keeps_output else ():
        assert any_yard.log(rank) == "ready\nsaved\n"


def test_a_sooner_end_counts(any_yard: AnyYard) -> None:
    # Where storage is not shared, no word reaches the pod: its run has ended, and it stays for its first grace.
    grace = 600 if any_yard.keeps_output else 60
    any_yard.backend.submit(any_yard.spec(STUBBORN, grace_seconds=grace, deadline_seconds=3600))
    any_yard.wait_for_text("ready")
    any_yard.backend.stop("job-1-1", grace)
    status = any_yard.wait("job-1-1", lambda status: status.phase is not RunPhase.RUNNING)
    assert status.phase is RunPhase.STOPPING
    any_yard.backend.stop("job-1-1", 0)
    assert any_yard.wait_for_end().outcome is Outcome.STOPPED


def test_a_run_that_is_stopped_at_once_never_ran_or_was_stopped(any_yard: AnyYard) -> None:
    any_yard.backend.submit(any_yard.spec(WAIT, nodes=2))
    any_yard.backend.stop("job-1-1", 5)
    try:
        ended = any_yard.wait_for_end()
    except RunNotFound:
        return
    assert ended.outcome is Outcome.STOPPED


def test_a_run_ends_at_its_deadline_after_its_grace(any_yard: AnyYard) -> None:
    ended = any_yard.run(POLITE, nodes=2, deadline_seconds=8, grace_seconds=4)
    assert ended.outcome is Outcome.TIME_LIMIT, any_yard.all_logs("job-1-1")
    assert any_yard.log(0) == "ready\nsaved\n"
    assert ended.started_at is not None
    assert ended.finished_at is not None
    # The deadline counts from when all nodes know each other; a cluster's clock counts whole seconds.
    assert ended.finished_at - ended.started_at <= 8 + any_yard.late_seconds


def test_the_deadline_kills_whoever_does_not_leave(any_yard: AnyYard) -> None:
    ended = any_yard.run(STUBBORN, deadline_seconds=4, grace_seconds=2)
    assert ended.outcome is Outcome.TIME_LIMIT
    assert ended.started_at is not None
    assert ended.finished_at is not None
    assert 3 <= ended.finished_at - ended.started_at <= 4 + 2 + any_yard.late_seconds


def test_the_first_failure_is_told_with_its_rank_and_last_lines(any_yard: AnyYard) -> None:
    script = """
    import os, signal, sys, time
    if os.environ["RANK"] == "3":
        print("about to fail", flush=True)
        sys.exit(7)
    while True:
        signal.pause()
    """
    ended = any_yard.run(script, nodes=2, workers_per_node=2)
    assert ended.outcome is Outcome.CODE_FAILED, any_yard.all_logs("job-1-1")
    assert ended.failure is not None
    told = ended.failure
    assert (told.code, told.node, told.rank, told.exit_code) == (FailureCode.RANK_EXITED, 1, 3, 7)
    assert told.last_lines == ("about to fail",)


def test_a_rank_that_is_killed_is_told_by_its_signal(any_yard: AnyYard) -> None:
    ended = any_yard.run("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert ended.outcome is Outcome.CODE_FAILED
    assert ended.failure is not None
    assert (ended.failure.code, ended.failure.signal) == (FailureCode.RANK_KILLED, "SIGSEGV")


def test_code_that_takes_too_much_memory_is_ended_for_that(any_yard: AnyYard) -> None:
    script = """
    import time
    taken = []
    while True:
        taken.append(bytearray(b"x") * (8 << 20))
        time.sleep(0.02)
    """
    ended = any_yard.run(script, resources=Resources(cpus=0.25, memory_mib=192))
    assert ended.outcome is Outcome.OUT_OF_MEMORY, any_yard.all_logs("job-1-1")
    assert ended.failure is not None
    assert ended.failure.code is FailureCode.OUT_OF_MEMORY


def test_a_node_that_is_taken_away_is_lost_and_no_fault_of_the_code(any_yard: AnyYard) -> None:
    any_yard.backend.submit(any_yard.spec(WAIT, nodes=2))
    for rank in range(2):
        any_yard.wait_for_text("ready", rank=rank)
    any_yard.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    any_yard.lose_node(1)
    ended = any_yard.wait_for_end()
    assert ended.outcome is Outcome.NODE_LOST, any_yard.all_logs("job-1-1")
    assert ended.failure is not None
    assert ended.failure.node == 1
    assert ended.finished_at is not None


def test_an_elastic_run_goes_on_without_a_node_that_is_lost(any_yard: AnyYard) -> None:
    script = """
    import os, signal, time
    if os.environ["WORLD_SIZE"] == "2":
        print("both", flush=True)
        while True:
            signal.pause()
    print("alone after", os.environ["RESTART_COUNT"], flush=True)
    time.sleep(3)  # a cluster's clock counts whole seconds
    """
    any_yard.backend.submit(any_yard.spec(script, nodes=2, min_nodes=1))
    for rank in range(2):
        any_yard.wait_for_text("both", rank=rank)
    any_yard.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    any_yard.lose_node(1)
    ended = any_yard.wait_for_end()
    assert ended.outcome is Outcome.COMPLETED, any_yard.all_logs("job-1-1")
    assert [span.nodes for span in ended.spans] == [2, 1]
    assert ended.restarts == 1
    assert "alone after 1\n" in any_yard.log(0)

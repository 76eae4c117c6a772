from __future__ import annotations

from typing import Any

from runtime.backends.outcome import merge
from runtime.specs import FailureCode, Outcome, RunPhase, Span


def record(node: int, phase: str = "ended", **changes: Any) -> dict[str, Any]:
    return {
        "node": node,
        "phase": phase,
        "address": "127.0.0.1",
        "started_at": 10.0 + node,
        "finished_at": 20.0 + node if phase == "ended" else None,
        "exit_code": 0 if phase == "ended" else None,
        "detail": "",
        "causes": [],
        "alive": phase != "ended",
        "seen_at": 15.0,
        **changes,
    }


def cause(kind: str, at: float, node: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "at": at, "node": node, **more}


def test_a_run_starts_with_its_last_node_and_ends_with_its_last() -> None:
    status = merge("r", 1.0, [record(0), record(1)])
    assert (status.submitted_at, status.started_at, status.finished_at) == (1.0, 11.0, 21.0)
    assert (status.phase, status.outcome, status.failure) == (RunPhase.ENDED, Outcome.COMPLETED, None)


def test_a_run_runs_when_all_nodes_do() -> None:
    starting = record(1, "starting", started_at=None)
    status = merge("r", 1.0, [record(0, "running"), starting])
    assert (status.phase, status.started_at) == (RunPhase.STARTING, None)
    assert status.waiting_for == "Waiting for node 1 to start."
    status = merge("r", 1.0, [starting, starting])
    assert status.waiting_for == "Waiting for 2 nodes to start."
    status = merge("r", 1.0, [record(0, "running"), record(1, "running")])
    assert (status.phase, status.started_at, status.waiting_for) == (RunPhase.RUNNING, 11.0, "")


def test_it_runs_until_the_last_node_has_ended_and_stops_with_the_first_that_stops() -> None:
    assert merge("r", 1.0, [record(0), record(1, "running")]).phase is RunPhase.RUNNING
    assert merge("r", 1.0, [record(0, "stopping"), record(1, "running")]).phase is RunPhase.STOPPING


def test_a_node_without_a_last_word_is_lost() -> None:
    status = merge("r", 1.0, [record(0), record(1, "running", alive=False)])
    assert status.phase is RunPhase.ENDED
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure is not None
    assert status.failure.node == 1
    assert status.nodes[1].phase is RunPhase.ENDED
    assert status.finished_at == 20.0


def test_what_others_say_of_a_loss_is_an_echo() -> None:
    memory = cause("out_of_memory", 12.5, 1, message="too much", rank=1)
    status = merge(
        "r", 1.0, [record(0, causes=[cause("node_lost", 12.0, 1, message="gone")]), record(1, causes=[memory])]
    )
    assert status.outcome is Outcome.OUT_OF_MEMORY
    assert status.failure is not None
    assert status.failure.message == "too much"


def test_the_limit_that_one_node_reached_first_is_everybodys() -> None:
    causes = [cause("time_limit", 12.0, 0, message="time"), cause("code_failed", 12.1, 0, rank=0, exit_code=1)]
    other = [cause("code_failed", 12.05, 1, rank=1, exit_code=None, signal="SIGABRT")]
    assert merge("r", 1.0, [record(0, causes=causes), record(1, causes=other)]).outcome is Outcome.TIME_LIMIT


def test_a_failure_is_one_sentence() -> None:
    failed = cause("code_failed", 12.0, 0, rank=3, exit_code=None, signal="SIGSEGV", last_lines=["a", "b"])
    status = merge("r", 1.0, [record(0, causes=[failed])])
    assert status.failure is not None
    assert status.failure.message == "Rank 3 on node 0 was ended by SIGSEGV."
    assert status.failure.last_lines == ("a", "b")


def test_progress_is_the_latest_sign_of_any_node_but_in_a_hang_what_its_finder_says() -> None:
    records = [record(0, progress_at=12.0), record(1, progress_at=14.0)]
    assert merge("r", 1.0, records).progress_at == 14.0
    records[0]["causes"] = [cause("hung", 20.0, 0, message="hung", data={"progress_at": 13.0})]
    assert merge("r", 1.0, records).progress_at == 13.0
    records[0]["causes"] = [cause("hung", 20.0, 0, message="hung", data={"progress_at": 15.0})]
    assert merge("r", 1.0, records).progress_at == 14.0, "a sign is a sign: never later than any node has seen"


def members(*changes: tuple[list[int], int, float]) -> list[dict[str, Any]]:
    return [{"nodes": nodes, "round": number, "at": at} for nodes, number, at in changes]


def test_a_run_that_goes_on_without_a_node_has_spans_and_no_failure() -> None:
    hub = record(0, members=members(([0, 2], 1, 15.0)), round=1)
    lost = record(1, "running", alive=False, seen_at=14.0)
    status = merge("r", 1.0, [hub, lost, record(2, round=1)])
    assert (status.outcome, status.failure, status.restarts) == (Outcome.COMPLETED, None, 1)
    assert status.spans == (Span(3, 12.0, 15.0), Span(2, 15.0, 22.0))


def test_what_a_node_says_that_takes_no_part_any_more_is_nobodys_cause() -> None:
    left = record(1, causes=[cause("node_lost", 14.0, 0, message="node 0 is silent")])
    failed = cause("code_failed", 19.0, 0, rank=0, exit_code=3)
    hub = record(0, members=members(([0], 1, 15.0)), causes=[failed], round=1)
    status = merge("r", 1.0, [hub, left])
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert status.failure.exit_code == 3


def test_the_span_of_a_run_that_goes_has_no_end() -> None:
    status = merge("r", 1.0, [record(0, "running"), record(1, "running")])
    assert status.spans == (Span(2, 11.0, None),)
    assert merge("r", 1.0, [record(0, "starting", started_at=None)]).spans == ()


def test_a_run_that_began_without_a_node_began() -> None:
    hub = record(0, "running", members=members(([0, 1], 0, 11.5)))
    missing = record(2, "starting", started_at=None)
    status = merge("r", 1.0, [hub, record(1, "running"), missing])
    assert status.started_at == 11.0
    assert [span.nodes for span in status.spans] == [2]


def test_the_last_sign_of_progress_of_any_node_counts() -> None:
    status = merge("r", 1.0, [record(0, progress_at=12.0, checkpoint_at=9.0), record(1, progress_at=14.0)])
    assert (status.progress_at, status.checkpoint_at) == (14.0, 9.0)


def test_a_silent_node_is_told_from_a_lost_one() -> None:
    told = cause("node_lost", 16.0, 1, message="Too few are left.")
    status = merge("r", 1.0, [record(0, causes=[told]), record(1, "running", alive=False, silent=True)])
    assert status.failure is not None
    assert status.failure.code is FailureCode.NODE_SILENT
    assert status.failure.message.endswith("Too few are left.")


def test_codes_and_data_are_passed_on() -> None:
    full = cause("disk_full", 12.0, 0, code="disk_full", data={"limit_mib": 5}, message="Full.")
    status = merge("r", 1.0, [record(0, causes=[full])])
    assert status.failure is not None
    assert (status.failure.code, status.failure.data) == (FailureCode.DISK_FULL, {"limit_mib": 5})
    killed = merge(
        "r", 1.0, [record(0, causes=[cause("code_failed", 12.0, 0, rank=0, exit_code=None, signal="SIGKILL")])]
    )
    assert killed.failure is not None
    assert killed.failure.code is FailureCode.RANK_KILLED


def test_nodes_that_each_call_the_other_lost_have_not_completed() -> None:
    """Cut off from each other: each knows only that, and an echo of an echo is no end that went well."""
    word = {"code": "node_silent", "message": "It stopped answering."}
    told = [cause("node_lost", 14.2, 1, **word), cause("node_lost", 14.0, 0, **word)]
    status = merge("r", 1.0, [record(0, causes=told[:1]), record(1, causes=told[1:])])
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure is not None
    assert (status.failure.node, status.failure.code) == (0, FailureCode.NODE_SILENT)

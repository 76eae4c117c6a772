"""The status and outcome of a run, merged from the records of its nodes. The run `r` was submitted at 1.0."""

import pytest

from runtime.backends.supervision.outcome import merge
from runtime.specs import FailureCode, Outcome, RunPhase, Span


def record(node, phase="ended", **changes):
    """Return the record of a node, which starts at 10 + its number and ends at 20 + its number.

    Without `alive`, its supervisor has died. With `silent` too, it was killed because it sent no heartbeat.
    """
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


def cause(kind, at, node, **more):
    return {"kind": kind, "at": at, "node": node, **more}


@pytest.mark.parametrize(
    ("phases", "phase", "waiting_for"),
    [
        (("running", "starting"), RunPhase.STARTING, "Waiting for node 1 to start."),
        (("starting", "starting"), RunPhase.STARTING, "Waiting for 2 nodes to start."),
        (("running", "running"), RunPhase.RUNNING, ""),
        (("ended", "running"), RunPhase.RUNNING, ""),
        (("stopping", "running"), RunPhase.STOPPING, ""),
        (("ended", "ended"), RunPhase.ENDED, ""),
    ],
)
def test_a_run_runs_from_the_start_of_its_last_node_to_the_end_of_its_last(phases, phase, waiting_for):
    times = {"starting": {"started_at": None}}
    status = merge("r", 1.0, [record(node, each, **times.get(each, {})) for node, each in enumerate(phases)])
    assert (status.phase, status.waiting_for) == (phase, waiting_for)
    assert (status.submitted_at, status.started_at) == (1.0, None if "starting" in phases else 11.0)
    assert status.finished_at == (21.0 if phase is RunPhase.ENDED else None)
    assert (status.outcome, status.failure) == (Outcome.COMPLETED if phase is RunPhase.ENDED else None, None)


def test_a_node_without_a_final_record_is_lost():
    status = merge("r", 1.0, [record(0), record(1, "running", alive=False)])
    assert status.phase is RunPhase.ENDED
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure.node == 1
    assert status.nodes[1].phase is RunPhase.ENDED
    assert status.finished_at == 20.0, "the end of node 0: node 1 was last seen before, at 15"


def test_other_nodes_reports_of_a_loss_are_echoes():
    memory = cause("out_of_memory", 12.5, 1, message="too much", rank=1)
    status = merge(
        "r", 1.0, [record(0, causes=[cause("node_lost", 12.0, 1, message="gone")]), record(1, causes=[memory])]
    )
    assert status.outcome is Outcome.OUT_OF_MEMORY
    assert status.failure.message == "too much"


def test_the_limit_that_one_node_reached_first_ends_the_run():
    causes = [cause("time_limit", 12.0, 0, message="time"), cause("code_failed", 12.1, 0, rank=0, exit_code=1)]
    other = [cause("code_failed", 12.05, 1, rank=1, exit_code=None, signal="SIGABRT")]
    assert merge("r", 1.0, [record(0, causes=causes), record(1, causes=other)]).outcome is Outcome.TIME_LIMIT


def test_a_cause_becomes_a_failure_with_its_code_and_data():
    killed = cause("code_failed", 12.0, 0, rank=3, exit_code=None, signal="SIGSEGV", last_lines=["a", "b"])
    failure = merge("r", 1.0, [record(0, causes=[killed])]).failure
    assert (failure.code, failure.last_lines) == (FailureCode.RANK_KILLED, ("a", "b"))
    assert failure.message == "Rank 3 on node 0 was killed by SIGSEGV."
    full = cause("disk_full", 12.0, 0, code="disk_full", data={"limit_mib": 5}, message="Full.")
    failure = merge("r", 1.0, [record(0, causes=[full])]).failure
    assert (failure.code, failure.data, failure.message) == (FailureCode.DISK_FULL, {"limit_mib": 5}, "Full.")


def test_characters_that_no_database_stores_are_replaced():
    lines, data = ["a\0b", "c\ud800"], {"exception": "E\0"}
    failed = cause("code_failed", 12.0, 0, code="rank_raised", rank=0, data=data, last_lines=lines)
    status = merge("r", 1.0, [record(0, causes=[failed], detail="d\0")])
    assert status.failure.last_lines == ("a\ufffdb", "c\ufffd")
    assert (status.failure.message, status.nodes[0].detail) == ("Rank 0 on node 0 raised E\ufffd", "d\ufffd")


def test_a_kind_that_cannot_be_read_is_a_failure_of_the_code():
    status = merge("r", 1.0, [record(0, causes=[cause("***", 12.0, 0, code="***", rank=0, exit_code=3)])])
    assert (status.outcome, status.failure.code) == (Outcome.CODE_FAILED, FailureCode.RANK_EXITED)


def test_progress_is_the_latest_sign_of_any_node_or_the_date_of_a_hang():
    records = [record(0, progress_at=12.0), record(1, progress_at=14.0)]
    assert merge("r", 1.0, records).progress_at == 14.0
    records[0]["causes"] = [cause("hung", 20.0, 0, message="hung", data={"progress_at": 13.0})]
    assert merge("r", 1.0, records).progress_at == 13.0
    records[0]["causes"] = [cause("hung", 20.0, 0, message="hung", data={"progress_at": 15.0})]
    assert merge("r", 1.0, records).progress_at == 14.0, "never later than the latest sign that a node recorded"
    records[0]["causes"] = [cause("hung", 20.0, 0, message="hung", data={"progress_at": 13.0, "used_seconds": 2.5})]
    assert merge("r", 1.0, records).progress_at == 15.5, "what it used of its cores while it hung is paid"


def members(*changes):
    """Return the rounds that node 0 recorded, each with the nodes that take part, its number and its start."""
    return [{"nodes": nodes, "round": number, "at": at} for nodes, number, at in changes]


def test_a_run_that_goes_on_without_a_node_has_spans_and_no_failure():
    hub = record(0, members=members(([0, 2], 1, 15.0)), round=1)
    lost = record(1, "running", alive=False, seen_at=14.0)
    status = merge("r", 1.0, [hub, lost, record(2, round=1)])
    assert (status.outcome, status.failure, status.restarts) == (Outcome.COMPLETED, None, 1)
    assert status.spans == (Span(3, 12.0, 15.0), Span(2, 15.0, 22.0))


def test_causes_of_excluded_nodes_do_not_count():
    left = record(1, causes=[cause("node_lost", 14.0, 0, message="node 0 is silent")])
    failed = cause("code_failed", 19.0, 0, rank=0, exit_code=3)
    hub = record(0, members=members(([0], 1, 15.0)), causes=[failed], round=1)
    status = merge("r", 1.0, [hub, left])
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure.exit_code == 3


def test_a_silent_node_is_distinguished_from_a_lost_one():
    claim = cause("node_lost", 16.0, 1, message="Too few are left.")
    status = merge("r", 1.0, [record(0, causes=[claim]), record(1, "running", alive=False, silent=True)])
    assert status.failure.code is FailureCode.NODE_SILENT
    assert status.failure.message.endswith("Too few are left.")


def test_a_launchers_claim_alone_makes_no_run_free():
    """Otherwise code that keeps the launchers from reaching each other would get its time for free.

    Both supervisors have written their last records, so no machine was lost.
    """
    silence = {"code": "node_silent", "message": "It stopped answering."}
    # Each node claims that the other one is lost.
    claims = [cause("node_lost", 14.2, 1, **silence), cause("node_lost", 14.0, 0, **silence)]
    status = merge("r", 1.0, [record(0, causes=claims[:1]), record(1, causes=claims[1:])])
    assert status.outcome is Outcome.CODE_FAILED
    assert (status.failure.node, status.failure.code) == (0, FailureCode.LAUNCHER_KILLED)
    # Ranks that do not end keep the nodes of an elastic run from meeting for the next round.
    unmet = cause("platform_error", 14.0, 0, code="nodes_not_met", message="The ranks of node 0 did not end.")
    assert merge("r", 1.0, [record(0, causes=[unmet]), record(1)]).outcome is Outcome.CODE_FAILED


@pytest.mark.parametrize(
    ("begun_at", "starter", "outcome", "code"),
    [
        (10.0, "mpirun", Outcome.CODE_FAILED, FailureCode.RANKS_NOT_STARTED),
        (None, "mpirun", Outcome.PLATFORM_ERROR, FailureCode.NODE_NOT_STARTED),
        (10.0, None, Outcome.PLATFORM_ERROR, FailureCode.NODE_NOT_STARTED),  # such as a node without a record on Slurm
    ],
)
def test_a_node_that_code_of_another_kept_from_starting_is_paid_from_the_start_of_that_code(
    begun_at, starter, outcome, code
):
    data = {"node": 1, "starter": starter} if starter else {}
    fault = cause("platform_error", 14.0, 1, code="node_not_started", message="They did not start.", data=data)
    heard = record(0, started_at=begun_at, causes=[{**fault, "heard": True}])
    status = merge("r", 1.0, [heard, record(1, started_at=None, causes=[fault])])
    assert (status.outcome, status.failure.code, status.failure.node) == (outcome, code, 1)
    assert status.started_at == begun_at
    assert sum(span.nodes for span in status.spans) == (2 if begun_at else 0)


def test_a_launchers_claim_counts_if_a_supervisor_confirms_it_or_no_code_had_begun():
    claim = cause("node_lost", 14.2, 1, code="node_silent", message="It stopped answering.")
    silent = record(1, "running", alive=False, silent=True, seen_at=14.0)
    assert merge("r", 1.0, [record(0, causes=[claim]), silent]).outcome is Outcome.NODE_LOST
    own = cause("node_lost", 14.2, 1, code="node_lost", message="The sandbox of node 1 was ended (SIGKILL).")
    assert merge("r", 1.0, [record(0, causes=[claim]), record(1, causes=[own])]).outcome is Outcome.NODE_LOST
    before = [record(0, started_at=None, causes=[claim]), record(1, started_at=None)]
    assert merge("r", 1.0, before).outcome is Outcome.NODE_LOST

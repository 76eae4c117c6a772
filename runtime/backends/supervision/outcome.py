"""Merge the records of a run's nodes, as their supervisors wrote them, into one RunStatus. Pure.

All nodes share one outcome, which the first cause decides. A node is lost if its supervisor died without a last record.
What other nodes report about that loss is only an effect. If an elastic run continued without a lost node, that loss is
not a cause.

A launcher's report alone never makes a run free of charge: customer code runs beside the launcher and can keep
launchers from reaching each other. Once code has started, a report of a lost node counts only if that node's supervisor
died. Otherwise the code is held responsible. The same holds for a node whose ranks do not start while others run: their
code can stop mpirun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.backends.records import failure_from, latest, outcome_from, progress_at, restarts
from runtime.json_values import storable
from runtime.launcher.causes import first_cause
from runtime.specs import FailureCode, NodeStatus, Outcome, RunPhase, RunStatus, Span

RecordData = dict[str, Any]
"""A node's record (`runtime.launcher.record.Record`), as decoded from JSON. Its values need no checks, because customer
code cannot write it."""
Cause = dict[str, Any]
"""A cause in a record; `runtime.launcher.protocol` documents its fields."""
Members = dict[str, Any]
"""A message `members` of `runtime.launcher.protocol`: the nodes that take part in a round, and since when."""


def merge(name: str, submitted_at: float, records: Sequence[RecordData]) -> RunStatus:
    """Return the status of a run that was submitted at `submitted_at` (Unix seconds).

    `records` has one record per node, as its supervisor wrote it, with fields that the backend has added. `alive`:
    whether the supervisor runs. `seen_at`: the time of its last heartbeat. `silent`: whether it was killed because it
    sent no heartbeat. A backend that knows why a supervisor died also adds `loss`, a cause with `kind`, `code` and
    `message`. Without `loss`, the death of a supervisor counts as the loss of its node. A backend that knows when a
    supervisor died sets `finished_at`.
    """
    nodes = tuple(_node_status(record) for record in records)
    phase = _phase(nodes)
    changes = _membership_changes(records)
    all_members = {node.node for node in nodes}
    last_members = set(changes[-1]["nodes"]) if changes else all_members
    # If an elastic run starts without some of its nodes, its first change is of round 0 and lists the nodes that run.
    # The run's metered time begins when these nodes run.
    first_members = set(changes[0]["nodes"]) if changes and changes[0]["round"] == 0 else all_members
    started_at = _latest_unless_missing([node.started_at for node in nodes if node.node in first_members])
    if started_at is None and phase is RunPhase.ENDED:
        # The code that ran on some nodes may have kept the others from starting, so its time counts.
        started_at = min((node.started_at for node in nodes if node.started_at is not None), default=None)
    # A node without which an elastic run went on ends neither the run nor its metered time.
    end_times = [node.finished_at for node in nodes if node.node in last_members and node.finished_at is not None]
    has_ended = phase is RunPhase.ENDED
    finished_at = max(end_times, default=submitted_at) if has_ended else None
    cause = first_cause(_causes(records, last_members)) if has_ended else None
    outcome = outcome_from(cause) if cause else Outcome.COMPLETED
    return RunStatus(
        name=name,
        phase=phase,
        nodes=nodes,
        submitted_at=submitted_at,
        started_at=started_at,
        finished_at=finished_at,
        outcome=outcome if has_ended else None,
        failure=failure_from(cause) if cause else None,
        spans=() if started_at is None else _spans(len(first_members), started_at, finished_at, changes),
        # The data of a hang's cause says when progress ended.
        progress_at=progress_at(records, (cause.get("data") or {}) if cause and outcome is Outcome.HUNG else None),
        checkpoint_at=latest(records, "checkpoint_at"),
        restarts=restarts(records),
        waiting_for=_waiting_for(nodes) if phase is RunPhase.STARTING else "",
    )


def _latest_unless_missing(times: Sequence[float | None]) -> float | None:
    """Return the latest of these times; None if one of them is None, or if there are none."""
    known_times = [time for time in times if time is not None]
    return max(known_times, default=None) if len(known_times) == len(times) else None


def _membership_changes(records: Sequence[RecordData]) -> list[Members]:
    """Return the run's messages `members` (`runtime.launcher.protocol`), oldest first.

    Only node 0's record has such messages, so its list is the longest.
    """
    return max((record.get("members", []) for record in records), key=len, default=[])


def _spans(nodes: int, started_at: float, finished_at: float | None, changes: Sequence[Members]) -> tuple[Span, ...]:
    """Return the periods with a constant number of nodes, from `started_at` to `finished_at`.

    `nodes` is the number of nodes at the start.
    """
    spans: list[Span] = []
    span_start = started_at
    for change in changes:
        if len(change["nodes"]) == nodes:
            continue
        changed_at = max(span_start, float(change["at"]))
        if finished_at is not None:
            changed_at = min(changed_at, finished_at)
        if changed_at > span_start:  # a span without length is dropped
            spans.append(Span(nodes, span_start, changed_at))
            span_start = changed_at
        nodes = len(change["nodes"])
    return (*spans, Span(nodes, span_start, finished_at))


def _is_lost(record: RecordData) -> bool:
    """Return whether the node's supervisor died without a last record."""
    return record["phase"] != "ended" and not record["alive"]


def _node_status(record: RecordData) -> NodeStatus:
    """Return a node's status from its record. A lost node has ended, at its last heartbeat if no end is known."""
    is_lost = _is_lost(record)
    return NodeStatus(
        node=record["node"],
        phase=RunPhase.ENDED if is_lost else RunPhase(record["phase"]),
        address=record["address"],
        started_at=record["started_at"],
        finished_at=record["seen_at"] if is_lost and record["finished_at"] is None else record["finished_at"],
        exit_code=record["exit_code"],
        detail="The node's supervisor ended before the run did." if is_lost else storable(record["detail"]),
    )


def _phase(nodes: Sequence[NodeStatus]) -> RunPhase:
    """Return the run's phase, from the phases of its nodes."""
    phases = {node.phase for node in nodes}
    if phases == {RunPhase.ENDED}:
        return RunPhase.ENDED
    if RunPhase.STOPPING in phases:
        return RunPhase.STOPPING
    return RunPhase.STARTING if RunPhase.STARTING in phases else RunPhase.RUNNING


def _waiting_for(nodes: Sequence[NodeStatus]) -> str:
    waiting_nodes = [str(node.node) for node in nodes if node.phase is RunPhase.STARTING]
    if len(waiting_nodes) == 1:
        return f"Waiting for node {waiting_nodes[0]} to start."
    return f"Waiting for {len(waiting_nodes)} nodes to start."


def _causes(records: Sequence[RecordData], members: set[int]) -> list[Cause]:
    """Return the causes that may have ended the run: those about its last `members`.

    Causes about other nodes do not count, since an elastic run continued without them. A report that another node was
    lost is dropped if that node's own record explains its end. A record that only reports the loss of others explains
    nothing: two nodes that are cut off from each other report each other as lost.
    """
    records = [record for record in records if record["node"] in members]
    explained_nodes = {
        record["node"]
        for record in records
        if record["phase"] == "ended" and any(not _is_about_another_node(cause, record) for cause in record["causes"])
    }
    lost_records = [record for record in records if _is_lost(record)]
    nodes_lost_by_platform = {record["node"] for record in lost_records if _is_loss_by_platform(record)}
    has_code_started = any(record["started_at"] is not None for record in records)
    causes = []
    for record in records:
        for cause in record["causes"]:
            is_about_another_node = _is_about_another_node(cause, record)
            if cause.get("node") not in members | {None}:  # None: a cause that is no single node's
                continue
            if is_about_another_node and cause.get("node") in explained_nodes:
                continue
            is_confirmed = cause.get("node") in nodes_lost_by_platform
            causes.append(cause if is_confirmed or not has_code_started else _blame_code_for_report(cause, record))
    return causes + [_loss_cause(record, causes) for record in lost_records]


def _blame_code_for_report(cause: Cause, record: RecordData) -> Cause:
    """Turn an unconfirmed report about other nodes, or that mpirun started no ranks, into a failure of the code.

    Return any other cause unchanged. Only customer code can keep launchers from reaching each other while all
    supervisors live: it has killed a launcher, or cut it off from the others. NODES_NOT_MET is such a report, too, also
    about the node's own launcher. mpirun had reached all nodes before the code of one ran, so only code can keep it
    from starting the ranks of another.
    """
    if (cause.get("data") or {}).get("starter") == "mpirun":
        return {**cause, "kind": Outcome.CODE_FAILED, "code": FailureCode.RANKS_NOT_STARTED}
    if not _is_about_another_node(cause, record) and cause.get("code") != FailureCode.NODES_NOT_MET:
        return cause
    return {**cause, "kind": Outcome.CODE_FAILED, "code": FailureCode.LAUNCHER_KILLED}


def _is_about_another_node(cause: Cause, record: RecordData) -> bool:
    """Return whether the record reports another node's loss, or repeats a cause that another node reported."""
    is_other_node = cause.get("node") != record["node"]
    return bool(cause.get("heard") or (cause["kind"] == Outcome.NODE_LOST and is_other_node))


def _is_loss_by_platform(record: RecordData) -> bool:
    """Return whether the platform is responsible for the loss of this node, as far as the backend knows."""
    return "loss" not in record or record["loss"]["kind"] in {Outcome.NODE_LOST, Outcome.PLATFORM_ERROR}


def _loss_cause(record: RecordData, causes: Sequence[Cause]) -> Cause:
    """Return a node's loss as a cause, dated at its last heartbeat unless the backend gives another time.

    If other nodes reported the loss, the message quotes the first report.
    """
    node = record["node"]
    if "loss" in record:
        return {"at": record["seen_at"], "node": node, **record["loss"]}
    code, reason = FailureCode.NODE_LOST, "its supervisor was killed or the machine went down"
    if record.get("silent"):
        code, reason = FailureCode.NODE_SILENT, "its supervisor was frozen and sent no heartbeat"
    reports = [cause["message"] for cause in causes if cause.get("node") == node and cause["kind"] == Outcome.NODE_LOST]
    message = " ".join([f"Node {node} was lost: {reason}.", *reports[:1]])
    return {"kind": Outcome.NODE_LOST, "code": code, "at": record["seen_at"], "node": node, "message": message}

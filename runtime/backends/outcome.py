"""From what each node's supervisor wrote down to one RunStatus. PURE: records in, status out.

The one rule: all nodes share one outcome, that of the first cause. A node that has gone without a last record is lost,
and whatever the others say about its loss is an echo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.launcher.report import first_cause
from runtime.specs import Failure, NodeStatus, Outcome, RunPhase, RunStatus

Record = dict[str, Any]


def merge(name: str, submitted_at: float, records: Sequence[Record]) -> RunStatus:
    """The run's status.

    A record is what the supervisor wrote, with `alive` (whether that process runs) and `seen_at` (its last sign of
    life) added by who read it.
    """
    nodes = tuple(_node_status(record) for record in records)
    phase = _phase(nodes)
    begun = [node.started_at for node in nodes]
    started_at = max((at for at in begun if at is not None), default=None) if None not in begun else None
    status = RunStatus(
        name=name,
        phase=phase,
        nodes=nodes,
        submitted_at=submitted_at,
        started_at=started_at,
        waiting_for=_waiting_for(nodes) if phase is RunPhase.STARTING else "",
    )
    if phase is not RunPhase.ENDED:
        return status
    cause = first_cause(_causes(records))
    ends = [node.finished_at for node in nodes if node.finished_at is not None]
    return RunStatus(
        name=name,
        phase=phase,
        nodes=nodes,
        submitted_at=submitted_at,
        started_at=started_at,
        finished_at=max(ends, default=submitted_at),
        outcome=Outcome(cause["kind"]) if cause else Outcome.COMPLETED,
        failure=_failure(cause) if cause else None,
    )


def _is_lost(record: Record) -> bool:
    return record["phase"] != "ended" and not record["alive"]


def _node_status(record: Record) -> NodeStatus:
    lost = _is_lost(record)
    return NodeStatus(
        node=record["node"],
        phase=RunPhase.ENDED if lost else RunPhase(record["phase"]),
        address=record["address"],
        started_at=record["started_at"],
        finished_at=record["seen_at"] if lost else record["finished_at"],
        exit_code=record["exit_code"],
        detail="The node's supervisor ended before the run did." if lost else record["detail"],
    )


def _phase(nodes: Sequence[NodeStatus]) -> RunPhase:
    phases = {node.phase for node in nodes}
    if phases == {RunPhase.ENDED}:
        return RunPhase.ENDED
    if RunPhase.STOPPING in phases:
        return RunPhase.STOPPING
    return RunPhase.STARTING if RunPhase.STARTING in phases else RunPhase.RUNNING


def _waiting_for(nodes: Sequence[NodeStatus]) -> str:
    waiting = [str(node.node) for node in nodes if node.phase is RunPhase.STARTING]
    if len(waiting) == 1:
        return f"Waiting for node {waiting[0]} to start."
    return f"Waiting for {len(waiting)} nodes to start."


def _causes(records: Sequence[Record]) -> list[Record]:
    explained = {record["node"] for record in records if record["phase"] == "ended" and record["causes"]}
    causes = [
        cause
        for record in records
        for cause in record["causes"]
        if not (cause["kind"] == "node_lost" and cause["node"] != record["node"] and cause["node"] in explained)
    ]
    lost = [record for record in records if _is_lost(record)]
    for record in lost:
        message = f"Node {record['node']} was lost: its supervisor was killed or the machine went down."
        causes.append({"kind": "node_lost", "at": record["seen_at"], "node": record["node"], "message": message})
    return causes


def _failure(cause: Record) -> Failure:
    return Failure(
        message=cause.get("message") or _sentence(cause),
        node=cause.get("node"),
        rank=cause.get("rank"),
        exit_code=cause.get("exit_code"),
        signal=cause.get("signal") or "",
        last_lines=tuple(cause.get("last_lines", ())),
    )


def _sentence(cause: Record) -> str:
    who = f"Rank {cause['rank']} on node {cause['node']}"
    if cause.get("signal"):
        return f"{who} was ended by {cause['signal']}."
    return f"{who} exited with code {cause['exit_code']}."

"""From what each node's supervisor wrote down to one RunStatus. PURE: records in, status out.

The one rule: all nodes share one outcome, that of the first cause. A node that has gone without a last record is lost,
and whatever the others say about its loss is an echo. A node that the run went on without is nobody's cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.launcher.report import first_cause
from runtime.specs import Failure, FailureCode, NodeStatus, Outcome, RunPhase, RunStatus, Span

Record = dict[str, Any]


def merge(name: str, submitted_at: float, records: Sequence[Record]) -> RunStatus:
    """The run's status.

    A record is what the supervisor wrote, with `alive` (whether that process runs), `seen_at` (its last sign of life)
    and `silent` (whether it was ended for not giving any) added by who read it.
    """
    nodes = tuple(_node_status(record) for record in records)
    phase = _phase(nodes)
    changes = _changes(records)
    members = set(changes[-1]["nodes"]) if changes else {node.node for node in nodes}
    # A run that began without a node, as its order allowed, was never to run on it.
    first = set(changes[0]["nodes"]) if changes and not changes[0]["round"] else {node.node for node in nodes}
    begun = [node.started_at for node in nodes if node.node in first]
    started_at = max((at for at in begun if at is not None), default=None) if None not in begun else None
    ends = [node.finished_at for node in nodes if node.finished_at is not None]
    ended = phase is RunPhase.ENDED
    finished_at = max(ends, default=submitted_at) if ended else None
    cause = first_cause(_causes(records, members)) if ended else None
    outcome = Outcome(cause["kind"]) if cause else Outcome.COMPLETED
    return RunStatus(
        name=name,
        phase=phase,
        nodes=nodes,
        submitted_at=submitted_at,
        started_at=started_at,
        finished_at=finished_at,
        outcome=outcome if ended else None,
        failure=_failure(cause) if cause else None,
        spans=() if started_at is None else _spans(len(first), started_at, finished_at, changes),
        progress_at=_progress_at(records, cause),
        checkpoint_at=_latest(records, "checkpoint_at"),
        restarts=max((record.get("round", 0) for record in records), default=0),
        waiting_for=_waiting_for(nodes) if phase is RunPhase.STARTING else "",
    )


def _changes(records: Sequence[Record]) -> list[Record]:
    """Who took part, from when on, as the hub told its supervisor."""
    return max((record.get("members", []) for record in records), key=len, default=[])


def _spans(nodes: int, started_at: float, finished_at: float | None, changes: Sequence[Record]) -> tuple[Span, ...]:
    spans = [Span(nodes, started_at)]
    for change in changes:
        count = len(change["nodes"])
        at = max(started_at, float(change["at"]))
        at = at if finished_at is None else min(at, finished_at)
        if count == spans[-1].nodes:
            continue
        last = spans.pop()
        if at > last.started_at:
            spans.append(Span(last.nodes, last.started_at, at))
        spans.append(Span(count, max(at, last.started_at)))
    last = spans.pop()
    return (*spans, Span(last.nodes, last.started_at, finished_at))


def _progress_at(records: Sequence[Record], cause: Record | None) -> float | None:
    """The last sign of progress; of a run that hung, not what its ranks said while they were ended."""
    latest = _latest(records, "progress_at")
    told = (cause or {}).get("data", {}).get("progress_at") if cause and cause["kind"] == Outcome.HUNG else None
    return latest if told is None or latest is None else min(latest, float(told))


def _latest(records: Sequence[Record], what: str) -> float | None:
    return max((record[what] for record in records if record.get(what) is not None), default=None)


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


def _causes(records: Sequence[Record], members: set[int]) -> list[Record]:
    """What went wrong for the nodes that still take part: a run that goes on without a node has not failed with it.

    That a node was lost is an echo where that node says itself what became of it. That it lost others is no such word:
    nodes that are cut off from each other each say that of the other, and nobody else says anything.
    """
    records = [record for record in records if record["node"] in members]
    explained = {
        record["node"]
        for record in records
        if record["phase"] == "ended" and any(not _of_another(cause, record) for cause in record["causes"])
    }
    causes = [
        cause
        for record in records
        for cause in record["causes"]
        if cause.get("node") in members | {None} and not (_of_another(cause, record) and cause["node"] in explained)
    ]
    return causes + [_loss(record, causes) for record in records if _is_lost(record)]


def _of_another(cause: Record, record: Record) -> bool:
    """Whether this is what a node says of another one's loss."""
    return bool(cause["kind"] == Outcome.NODE_LOST and cause.get("node") != record["node"])


def _loss(record: Record, causes: Sequence[Record]) -> Record:
    """The loss of a node, from its last sign of life on; what the others say of it says why it mattered."""
    node = record["node"]
    code, why = FailureCode.NODE_LOST, "its supervisor was killed or the machine went down"
    if record.get("silent"):
        code, why = FailureCode.NODE_SILENT, "its supervisor stood still and gave no sign of life"
    told = [cause["message"] for cause in causes if cause["node"] == node and cause["kind"] == Outcome.NODE_LOST]
    message = " ".join([f"Node {node} was lost: {why}.", *told[:1]])
    return {"kind": Outcome.NODE_LOST, "code": code, "at": record["seen_at"], "node": node, "message": message}


def _failure(cause: Record) -> Failure:
    return Failure(
        message=cause.get("message") or _sentence(cause),
        code=_code(cause),
        data=cause.get("data") or {},
        node=cause.get("node"),
        rank=cause.get("rank"),
        exit_code=cause.get("exit_code"),
        signal=cause.get("signal") or "",
        last_lines=tuple(cause.get("last_lines", ())),
    )


def _code(cause: Record) -> FailureCode:
    """What the cause says it is, or what follows from its kind."""
    told = cause.get("code")
    if told in {code.value for code in FailureCode}:
        return FailureCode(told)
    if cause["kind"] == Outcome.CODE_FAILED:
        return FailureCode.RANK_KILLED if cause.get("signal") else FailureCode.RANK_EXITED
    return FailureCode(cause["kind"])


def _sentence(cause: Record) -> str:
    who = f"Rank {cause['rank']} on node {cause['node']}"
    if cause.get("signal"):
        return f"{who} was ended by {cause['signal']}."
    return f"{who} exited with code {cause['exit_code']}."

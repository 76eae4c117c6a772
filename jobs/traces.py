"""How an attempt went, as spans: its wait, its start, its run, each rank. Written when it has ended, from its row.

The one rule: the times are the rows', which are the backend's; the run's own span has the place that its ranks were
told (TRACEPARENT), so that what the customer's code sends of itself hangs below it.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any

from django.db import transaction

from console.operations import tracing
from console.operations.tracing import Recorded
from jobs.models import Attempt
from jobs.states import BILLED, EndReason

MOST_RANKS = 1024
"""Of a larger run, the first ones."""


def place_of(attempt: Attempt) -> str:
    """The place of a run's span, known before it begins; empty where its job was bought outside of any trace."""
    return tracing.child(attempt.job.traceparent, attempt.run_name)


def facts_of(attempt: Attempt) -> dict[str, str | int]:
    """What each span of an attempt says."""
    return {
        "trainyard.job": attempt.job_id,
        "trainyard.organization": attempt.job.organization_id,
        "trainyard.run": attempt.run_name,
        "trainyard.cluster": attempt.backend,
    }


def tell(attempt: Attempt) -> None:
    """Send the spans of an attempt that ends in this transaction, once it is committed."""
    if tracing.is_on() and place_of(attempt):
        transaction.on_commit(partial(tracing.record, spans(attempt)))


def spans(attempt: Attempt) -> list[Recorded]:
    """The spans of an ended attempt: the run's, and below it its wait, its start, and the life of each rank."""
    job, place = attempt.job, place_of(attempt)
    finished = _seconds(attempt.finished_at or attempt.claimed_at)
    queued, claimed = _queued_at(attempt), _seconds(attempt.claimed_at)
    started = _seconds(attempt.started_at) if attempt.started_at else finished
    about = facts_of(attempt)
    failed = attempt.reason != EndReason.COMPLETED
    platform = failed and EndReason(attempt.reason) not in BILLED
    run = {
        **about, "trainyard.reason": attempt.reason, "trainyard.nodes": attempt.granted_nodes,
        "trainyard.restarts": attempt.restarts, "trainyard.platform_fault": platform,
    }  # fmt: skip
    error = attempt.reason if failed and attempt.reason != EndReason.CANCELLED else ""

    def below(name: str, begun: float, ended: float, more: dict[str, Any], wrong: str = "") -> Recorded:
        return Recorded(name, tracing.child(place, name), place, begun, max(begun, ended), {**about, **more}, wrong)

    return [
        Recorded(f"run {attempt.run_name}", place, job.traceparent, queued, max(queued, finished), run, error),
        below("queue", queued, claimed, {}),
        below("start", claimed, started, {}),
        *(below(*rank) for rank in _ranks(attempt, finished)),
    ]


def _ranks(attempt: Attempt, finished: float) -> list[tuple[str, float, float, dict[str, Any], str]]:
    """Name, beginning, end, facts and fault of each rank; its times are those of its node."""
    workers, failure = attempt.job.workers_per_node, attempt.failure or {}
    found = []
    for node in attempt.nodes:
        if node.get("started_at") is None:
            continue
        for local in range(workers):
            rank = node["node"] * workers + local
            wrong = str(failure.get("code", "")) if failure.get("rank") == rank else ""
            facts = {
                "trainyard.rank": rank,
                "trainyard.node": node["node"],
                "trainyard.address": node.get("address", ""),
            }
            found.append((f"rank {rank}", node["started_at"], node.get("finished_at") or finished, facts, wrong))
    return found[:MOST_RANKS]


def _queued_at(attempt: Attempt) -> float:
    """When it began to wait: when the job was queued, or when the attempt before it ended."""
    before = attempt.job.attempts.filter(number__lt=attempt.number, finished_at__isnull=False).last()
    return _seconds(before.finished_at if before and before.finished_at else attempt.job.queued_at)


def _seconds(moment: datetime) -> float:
    return moment.timestamp()

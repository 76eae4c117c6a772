"""Export an ended attempt as OpenTelemetry spans: its wait, its start, its run and each rank.

The backend's clock says when a run and its ranks started and ended. The console's clock says when the job was queued
and claimed. The ranks find the id of the run's span in TRACEPARENT, so that spans of the customer's code become its
children.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from django.db import transaction

from console.observability import tracing
from console.observability.tracing import FinishedSpan
from jobs.models import Attempt
from jobs.states import PLATFORM_FAULTS, EndReason

MAX_RANKS = 1024
"""Ranks that get a span. The span exporter queues 2,048 spans of all runs, so one run fills only about half of it."""


def traceparent_of(attempt: Attempt) -> str:
    """Return the traceparent of a run's span; empty if its order had no trace.

    It depends only on the order's trace and the run's name, so the ranks can get it before the span is exported.
    """
    return tracing.child_traceparent(attempt.job.traceparent, attempt.run_name)


def attributes_of(attempt: Attempt) -> dict[str, str | int]:
    """Return the attributes of every span of an attempt."""
    return {
        "trainyard.job": attempt.job_id,
        "trainyard.organization": attempt.job.organization_id,
        "trainyard.run": attempt.run_name,
        "trainyard.cluster": attempt.backend,  # the column has the name of a cluster
    }


def export_on_commit(attempt: Attempt) -> None:
    """Export the spans of an attempt that ends in this transaction, after its commit."""
    if tracing.is_on() and traceparent_of(attempt):
        transaction.on_commit(partial(tracing.export, spans(attempt)))


def spans(attempt: Attempt) -> list[FinishedSpan]:
    """Return the run's span and its children: the wait, the start and each rank."""
    run_traceparent = traceparent_of(attempt)
    # Times are in Unix seconds. An attempt that never started has no run, so its start lasted until its end.
    finished_at = _seconds(attempt.finished_at or attempt.claimed_at)
    queued_at, claimed_at = _queued_at(attempt), _seconds(attempt.claimed_at)
    started_at = _seconds(attempt.started_at) if attempt.started_at else finished_at
    attributes = attributes_of(attempt)

    def child(name: str, start: float, end: float, own_attributes: dict[str, Any], error: str = "") -> FinishedSpan:
        return FinishedSpan(
            name=name,
            traceparent=tracing.child_traceparent(run_traceparent, name),
            parent=run_traceparent,
            started_at=start,
            finished_at=max(start, end),  # `end` may be earlier, because another machine's clock may have set it
            attributes=attributes | own_attributes,
            error=error,
        )

    return [
        FinishedSpan(
            name=f"run {attempt.run_name}",
            traceparent=run_traceparent,
            parent=attempt.job.traceparent,
            started_at=queued_at,
            finished_at=max(queued_at, finished_at),
            attributes={
                **attributes,
                "trainyard.reason": attempt.reason,
                "trainyard.nodes": attempt.granted_nodes,
                "trainyard.restarts": attempt.restarts,
                "trainyard.platform_fault": attempt.reason in PLATFORM_FAULTS,
            },
            error="" if attempt.reason in {EndReason.COMPLETED, EndReason.CANCELLED} else attempt.reason,
        ),
        child("queue", queued_at, claimed_at, own_attributes={}),
        child("start", claimed_at, started_at, own_attributes={}),
        *(child(*rank_span) for rank_span in _rank_spans(attempt, finished_at)),
    ]


class _RankSpan(NamedTuple):
    """The span of a rank, with the times of its node in Unix seconds. `error` is empty if the rank did not fail."""

    name: str
    start: float
    end: float
    attributes: dict[str, Any]
    error: str


def _rank_spans(attempt: Attempt, finished_at: float) -> list[_RankSpan]:
    """Return the spans of the first MAX_RANKS ranks. They end at `finished_at` on nodes that reported no end."""
    workers_per_node, failure = attempt.job.workers_per_node, attempt.failure or {}
    rank_spans = []
    for node in attempt.nodes:
        if node.get("started_at") is None:
            continue
        for local_rank in range(workers_per_node):
            rank = node["node"] * workers_per_node + local_rank
            error = str(failure.get("code", "")) if failure.get("rank") == rank else ""
            attributes = {
                "trainyard.rank": rank,
                "trainyard.node": node["node"],
                "trainyard.address": node.get("address", ""),
            }
            end = node.get("finished_at") or finished_at
            rank_spans.append(_RankSpan(f"rank {rank}", node["started_at"], end, attributes, error))
    return rank_spans[:MAX_RANKS]


def _queued_at(attempt: Attempt) -> float:
    """Return when the attempt's wait began, in Unix seconds: when the job was queued or the previous attempt ended."""
    previous = attempt.job.attempts.filter(number__lt=attempt.number, finished_at__isnull=False).last()
    return _seconds(previous.finished_at if previous and previous.finished_at else attempt.job.queued_at)


def _seconds(moment: datetime) -> float:
    return moment.timestamp()

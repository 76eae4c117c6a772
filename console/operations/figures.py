"""What the rows say, as numbers for Prometheus: the queue, the times of transitions, ends, payment events.

Hides the SQL, and that nothing here counts over what has ended: waiting rows are found by partial indexes, and what
happened is added up as it happens, from the jobs' events in their order. The one rule: a figure is a function of rows,
so no restart of anything loses one; what was added up is kept in Redis only to be spared, and is added up again from
the rows where it is gone.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import redis
from django.conf import settings
from django.db import connection
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from console.operations import store
from jobs.backend import cluster_named
from jobs.states import TRANSITIONS, JobState

BUCKETS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0)
"""Seconds, from a warm start to a long run."""
SETTLED_SECONDS = 5
"""Events so young may still be joined by one with a smaller number, whose transaction is not committed yet."""
EVENTS_AT_ONCE = 20_000
LAG_OVER_SECONDS = 300
LAG_OVER_EVENTS = 500
STATES = tuple(str(state) for state in TRANSITIONS)
VERSION = 1
"""Of what is kept in Redis: another one is added up anew."""

QUEUE = """
SELECT COALESCE(NULLIF(spec.cluster, ''), %s), spec.name, count(*),
       COALESCE(EXTRACT(EPOCH FROM statement_timestamp() - min(GREATEST(job.queued_at, job.not_before))
                FILTER (WHERE job.not_before IS NULL OR job.not_before <= statement_timestamp())), 0)::float
FROM jobs_job job JOIN billing_nodespec spec ON spec.id = job.node_spec_id
WHERE job.state = 'queued' GROUP BY 1, 2 ORDER BY 1, 2
"""
ACTIVE = """
SELECT state, count(*) FROM jobs_job WHERE state IN ('starting', 'running', 'stopping') GROUP BY state
"""
UNFINISHED = """
SELECT COALESCE(EXTRACT(EPOCH FROM statement_timestamp() - min(claimed_at)
                FILTER (WHERE submitted_at IS NULL)), 0)::float,
       COALESCE(EXTRACT(EPOCH FROM statement_timestamp() - min(job.cancel_requested_at)
                FILTER (WHERE job.state = 'stopping')), 0)::float,
       COALESCE(sum(granted_nodes), 0)
FROM jobs_attempt attempt JOIN jobs_job job ON job.id = attempt.job_id
WHERE attempt.finished_at IS NULL AND job.state IN ('starting', 'running', 'stopping')
"""
PAYMENTS = """
SELECT state, count(*), EXTRACT(EPOCH FROM statement_timestamp() - min(received_at))::float FROM billing_stripeevent
WHERE state IN ('received', 'parked') GROUP BY state
UNION ALL
SELECT 'quarantined', count(*), EXTRACT(EPOCH FROM statement_timestamp() - min(received_at))::float
FROM billing_stripeevent WHERE state = 'quarantined'
"""
LAG = """
SELECT COALESCE(max(EXTRACT(EPOCH FROM COALESCE(applied_at, statement_timestamp()) - received_at)), 0)::float
FROM (SELECT * FROM billing_stripeevent ORDER BY id DESC LIMIT %s) newest
WHERE received_at > statement_timestamp() - make_interval(secs => %s) AND state <> 'parked'
"""
EVENTS = """
SELECT event.id, event.kind, COALESCE(event.data ->> 'reason', ''), before.kind,
       EXTRACT(EPOCH FROM event.created_at - before.created_at)::float,
       EXTRACT(EPOCH FROM attempt.submitted_at - attempt.claimed_at)::float
FROM jobs_jobevent event
LEFT JOIN LATERAL (
    SELECT kind, created_at FROM jobs_jobevent earlier
    WHERE earlier.job_id = event.job_id AND earlier.id < event.id AND earlier.kind = ANY(%(before)s)
    ORDER BY earlier.id DESC LIMIT 1) before ON true
LEFT JOIN jobs_attempt attempt
    ON event.kind = 'running' AND attempt.job_id = event.job_id AND attempt.number = event.attempt
WHERE event.id > %(after)s AND event.kind = ANY(%(states)s)
      AND event.created_at < statement_timestamp() - make_interval(secs => %(settled)s)
ORDER BY event.id LIMIT %(most)s
"""
BEGINNING = "ordered"
"""The event that stands for the first `queued`."""


def waiting() -> Iterator[Metric]:
    """What is open now: jobs by where they wait, what is stuck, payment events."""
    queued = GaugeMetricFamily("trainyard_jobs_queued", "Jobs that wait.", labels=("cluster", "node_spec"))
    oldest = GaugeMetricFamily(
        "trainyard_queue_oldest_seconds",
        "How long the oldest job that may start has waited.",
        labels=("cluster", "node_spec"),
    )
    for cluster, spec, count, age in _rows(QUEUE, [cluster_named("")]):
        queued.add_metric((cluster, spec), count)
        oldest.add_metric((cluster, spec), age)
    yield queued
    yield oldest
    active = GaugeMetricFamily("trainyard_jobs_active", "Jobs that the cluster has.", labels=("state",))
    found = dict(_rows(ACTIVE))
    for state in (JobState.STARTING, JobState.RUNNING, JobState.STOPPING):
        active.add_metric((str(state),), found.get(str(state), 0))
    yield active
    [(unsubmitted, stopping, nodes)] = _rows(UNFINISHED)
    for name, text, value in (
        ("trainyard_unsubmitted_oldest_seconds", "Age of the oldest claim that no backend has taken yet.", unsubmitted),
        ("trainyard_stopping_oldest_seconds", "Age of the oldest cancel that has not ended its run.", stopping),
        ("trainyard_nodes_granted", "Nodes that open attempts hold.", nodes),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    yield from _payment_events()


def _payment_events() -> Iterator[Metric]:
    events = GaugeMetricFamily("trainyard_payment_events", "Payment events that are not done.", labels=("state",))
    oldest = GaugeMetricFamily(
        "trainyard_payment_events_oldest_seconds", "Age of the oldest of them.", labels=("state",)
    )
    found = {state: (count, age) for state, count, age in _rows(PAYMENTS)}
    for state in ("received", "parked", "quarantined"):
        count, age = found.get(state, (0, None))
        events.add_metric((state,), count)
        oldest.add_metric((state,), age or 0.0)
    yield events
    yield oldest
    [(lag,)] = _rows(LAG, [LAG_OVER_EVENTS, LAG_OVER_SECONDS])
    yield GaugeMetricFamily(
        "trainyard_webhook_lag_seconds", "Longest time from receipt to application, over five minutes.", value=lag
    )


def happened() -> Iterator[Metric]:
    """What has happened since the first job: times between states, ends, how long handing over took."""
    sums = _added_up()
    transitions = HistogramMetricFamily(
        "trainyard_transition_seconds", "Time that a job was in a state before the next.", labels=("before", "after")
    )
    dispatch = HistogramMetricFamily(
        "trainyard_dispatch_seconds", "Time from the claim of a job to the backend's having it.", labels=()
    )
    for key, (counts, total) in sorted(sums["times"].items()):
        buckets = _cumulative(counts)
        if key == "dispatch":
            dispatch.add_metric((), buckets, total)
        else:
            transitions.add_metric(key.split(" "), buckets, total)
    yield transitions
    yield dispatch
    ends = CounterMetricFamily(
        "trainyard_runs_ended", "Attempts that ended, by why; tried again or not.", labels=("reason", "retried")
    )
    for key, count in sorted(sums["ends"].items()):
        ends.add_metric(key.split(" "), count)
    yield ends
    yield GaugeMetricFamily(
        "trainyard_figures_behind", "Whether there are older events still to be added up.", value=sums["behind"]
    )


def _added_up() -> dict[str, Any]:
    """What is kept, and what has happened since; kept again. Where Redis is away, from the beginning as far as it gets.

    Two that do this at once both come to the same sums, whoever is the later to keep them.
    """
    name = store.key("figures")
    try:
        kept: dict[str, Any] = json.loads(store.client().get(name) or "{}")
    except redis.RedisError:
        kept = {}
    if kept.get("version") != VERSION or kept["database"] != settings.DATABASES["default"]["NAME"]:
        kept = _nothing()
    after = kept["after"]
    kept["times"] = defaultdict(lambda: [[0] * (len(BUCKETS) + 1), 0.0], kept["times"])
    kept["ends"] = defaultdict(int, kept["ends"])
    values = {
        "after": after, "states": list(STATES), "before": [*STATES, BEGINNING], "settled": SETTLED_SECONDS,
        "most": EVENTS_AT_ONCE,
    }  # fmt: skip
    rows = _rows(EVENTS, values)
    for number, kind, reason, before, seconds, submitting in rows:
        kept["after"] = number
        if before is not None:
            _note(kept["times"][f"{JobState.QUEUED if before == BEGINNING else before} {kind}"], seconds)
        if submitting is not None:
            _note(kept["times"]["dispatch"], submitting)
        if reason:
            kept["ends"][f"{reason} {'yes' if kind == JobState.QUEUED else 'no'}"] += 1
    kept["behind"] = int(len(rows) == EVENTS_AT_ONCE)
    if kept["after"] != after:
        try:
            store.client().set(name, json.dumps(kept))
        except redis.RedisError:
            kept["behind"] = int(after == 0 and bool(rows)) or kept["behind"]
    return kept


def _nothing() -> dict[str, Any]:
    return {
        "version": VERSION,
        "database": settings.DATABASES["default"]["NAME"],
        "after": 0,
        "times": {},
        "ends": {},
        "behind": 0,
    }


def _note(histogram: list[Any], seconds: float) -> None:
    histogram[0][bisect_left(BUCKETS, seconds)] += 1
    histogram[1] += max(0.0, seconds)


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    edges = [*(str(edge) for edge in BUCKETS), "+Inf"]
    return [(edge, float(sum(counts[: number + 1]))) for number, edge in enumerate(edges)]


def _rows(sql: str, values: Any = None) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return list(cursor.fetchall())

"""Metrics from the database: the queue, durations of job states, ended runs, payment events.

Gauges count open rows, which partial indexes find. Counters and histograms sum the job events of all time: each scrape
adds the events since the last scrape to sums that are cached in Redis. If Redis loses the sums, they are computed again
from the first event, so they stay exact.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from typing import Any

import redis
from django.conf import settings
from django.db import connection
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from console.observability import redis_client
from jobs.clusters import resolve_cluster_name
from jobs.states import TRANSITIONS, JobState

BUCKETS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0)
"""The upper edges of the histograms' buckets in seconds, from a warm start to a long run."""
MIN_EVENT_AGE_SECONDS = 5
"""Younger events are left to a later scrape. A transaction that is still open may add an event with a smaller id, which
would never be summed once the sums have passed that id. Transactions take less than this."""
MAX_EVENTS_PER_SCRAPE = 20_000
"""How many events one scrape sums; they take about a second. The next scrapes sum the rest."""
LAG_SECONDS, LAG_EVENTS = 300, 500
"""The webhook lag covers the payment events of the last LAG_SECONDS, and at most LAG_EVENTS of them, so that its query
stays fast."""
STATES = tuple(str(state) for state in TRANSITIONS)
"""All states of jobs. A job event whose kind is a state is the transition to this state."""
SUMS_VERSION = 1
"""The format of the cached sums. Increase it when a change makes older sums wrong: they are then computed again."""

QUEUE = """
SELECT COALESCE(NULLIF(spec.cluster, ''), %s), spec.name, count(*),
       COALESCE(EXTRACT(EPOCH FROM statement_timestamp() - min(GREATEST(job.queued_at, job.not_before))
                FILTER (WHERE job.not_before IS NULL OR job.not_before <= statement_timestamp())), 0)::float
FROM jobs_job job JOIN billing_nodespec spec ON spec.id = job.node_spec_id
WHERE job.state = 'queued' GROUP BY 1, 2 ORDER BY 1, 2
"""
"""For each cluster and node spec: the number of queued jobs, and how long the oldest that may start has waited, in
seconds. A job that is retried after a pause may start from `not_before` on."""
ACTIVE = """
SELECT state, count(*) FROM jobs_job WHERE state IN ('starting', 'running', 'stopping') GROUP BY state
"""
"""The number of jobs in each active state."""
UNFINISHED = """
SELECT COALESCE(EXTRACT(EPOCH FROM statement_timestamp() - min(claimed_at)
                FILTER (WHERE submitted_at IS NULL)), 0)::float,
       COALESCE(EXTRACT(EPOCH FROM statement_timestamp() - min(job.cancel_requested_at)
                FILTER (WHERE job.state = 'stopping')), 0)::float,
       COALESCE(sum(granted_nodes), 0)
FROM jobs_attempt attempt JOIN jobs_job job ON job.id = attempt.job_id
WHERE attempt.finished_at IS NULL AND job.state IN ('starting', 'running', 'stopping')
"""
"""One row: the seconds since the oldest claim without a submission, the seconds since the oldest cancellation whose run
still exists, and the number of nodes of open attempts."""
PAYMENTS = """
SELECT state, count(*), EXTRACT(EPOCH FROM statement_timestamp() - min(received_at))::float FROM billing_stripeevent
WHERE state IN ('received', 'parked') GROUP BY state
UNION ALL
SELECT 'quarantined', count(*), EXTRACT(EPOCH FROM statement_timestamp() - min(received_at))::float
FROM billing_stripeevent WHERE state = 'quarantined'
"""
"""For each open state of payment events (`StripeEvent.States`): their number, and the age of the oldest in seconds.
Parked events are retried, and quarantined ones wait for an administrator's decision. Two queries, because one
partial index has the states of the first query, and another index has the state of the second."""
LAG = """
SELECT COALESCE(max(EXTRACT(EPOCH FROM COALESCE(applied_at, statement_timestamp()) - received_at)), 0)::float
FROM (SELECT * FROM billing_stripeevent ORDER BY id DESC LIMIT %s) newest
WHERE received_at > statement_timestamp() - make_interval(secs => %s) AND state <> 'parked'
"""
"""The longest time in seconds from the receipt of a recent payment event until it was applied, ignored or quarantined
(each sets `applied_at`), or until now. Parked events are left out, because they cannot be applied yet."""
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
      AND event.created_at < statement_timestamp() - make_interval(secs => %(min_age)s)
ORDER BY event.id LIMIT %(limit)s
"""
"""The next job events to sum: id, new state, reason, kind of the event before, seconds between both, and, if the new
state is running, seconds from claim to submission. A kind is a state or ORDERED."""
ORDERED = "ordered"
"""The kind of the event of a purchase, after which the job is in the queue for the first time."""


def open_work() -> Iterator[Metric]:
    """Yield gauges of open work: queued and active jobs, old claims and cancellations, payment events."""
    queued = GaugeMetricFamily("trainyard_jobs_queued", "Waiting jobs.", labels=("cluster", "node_spec"))
    oldest = GaugeMetricFamily(
        "trainyard_queue_oldest_seconds", "Wait of the oldest job that may start.", labels=("cluster", "node_spec")
    )
    default_cluster = resolve_cluster_name("")  # node specs that name no cluster belong to it
    for cluster, spec, count, age in _query(QUEUE, [default_cluster]):
        queued.add_metric((cluster, spec), count)
        oldest.add_metric((cluster, spec), age)
    yield queued
    yield oldest
    active = GaugeMetricFamily("trainyard_jobs_active", "Jobs on the clusters.", labels=("state",))
    active_counts = dict(_query(ACTIVE))
    for state in (JobState.STARTING, JobState.RUNNING, JobState.STOPPING):
        active.add_metric((str(state),), active_counts.get(str(state), 0))
    yield active
    [(unsubmitted, stopping, nodes)] = _query(UNFINISHED)
    for name, text, value in (
        ("trainyard_unsubmitted_oldest_seconds", "Age of the oldest claim that no cluster has accepted.", unsubmitted),
        ("trainyard_stopping_oldest_seconds", "Age of the oldest cancel whose run still exists.", stopping),
        ("trainyard_nodes_granted", "Nodes held by open attempts.", nodes),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    yield from _collect_payment_events()


def _collect_payment_events() -> Iterator[Metric]:
    """Yield gauges of payment events that are not applied, by state."""
    events = GaugeMetricFamily("trainyard_payment_events", "Open payment events.", labels=("state",))
    oldest = GaugeMetricFamily(
        "trainyard_payment_events_oldest_seconds", "Age of the oldest of them.", labels=("state",)
    )
    events_by_state = {state: (count, age) for state, count, age in _query(PAYMENTS)}
    for state in ("received", "parked", "quarantined"):
        count, age = events_by_state.get(state, (0, None))
        events.add_metric((state,), count)
        oldest.add_metric((state,), age or 0.0)
    yield events
    yield oldest
    [(lag,)] = _query(LAG, [LAG_EVENTS, LAG_SECONDS])
    yield GaugeMetricFamily(
        "trainyard_webhook_lag_seconds", "Longest time from receipt to application, over five minutes.", value=lag
    )


def history() -> Iterator[Metric]:
    """Yield histograms of state and dispatch durations, and counters of ended runs, since the first job."""
    sums = _update_sums()
    transitions = HistogramMetricFamily(
        "trainyard_transition_seconds", "Time that a job was in a state before the next.", labels=("before", "after")
    )
    dispatch = HistogramMetricFamily(
        "trainyard_dispatch_seconds", "Time from the claim of a job to the cluster's acceptance.", labels=()
    )
    for key, (counts, total) in sorted(sums["times"].items()):
        buckets = _cumulative_buckets(counts)
        if key == "dispatch":
            dispatch.add_metric((), buckets, total)
        else:
            transitions.add_metric(key.split(" "), buckets, total)
    yield transitions
    yield dispatch
    ends = CounterMetricFamily(
        "trainyard_runs_ended", "Ended attempts by reason, retried or not.", labels=("reason", "retried")
    )
    for key, count in sorted(sums["ends"].items()):
        ends.add_metric(key.split(" "), count)
    yield ends
    yield GaugeMetricFamily(
        "trainyard_figures_behind", "1 while older events are still being summed.", value=sums["behind"]
    )


def _update_sums() -> dict[str, Any]:
    """Return the cached sums plus the events since then, and cache the result. Without Redis, sum from the first event.

    In the result, `times` has a histogram `[counts by bucket, total seconds]` by "<state> <next state>" or "dispatch";
    `ends` has the number of ended attempts by "<reason> <retried: yes or no>", and counts a job that ended in the queue
    too; `after` is the id of the last summed event; `behind` is 1 if there are more events to sum. Two processes that
    do this at once both compute correct sums, so it does not matter which writes last.
    """
    key = redis_client.key("figures")  # an old name of the sums: two versions share the key during an upgrade
    try:
        sums: dict[str, Any] = json.loads(redis_client.client().get(key) or "{}")
    except redis.RedisError:
        sums = {}
    if sums.get("version") != SUMS_VERSION or sums["database"] != settings.DATABASES["default"]["NAME"]:
        sums = _new_sums()
    after_id = sums["after"]
    sums["times"] = defaultdict(lambda: [[0] * (len(BUCKETS) + 1), 0.0], sums["times"])
    sums["ends"] = defaultdict(int, sums["ends"])
    values = {
        "after": after_id, "states": list(STATES), "before": [*STATES, ORDERED],
        "min_age": MIN_EVENT_AGE_SECONDS, "limit": MAX_EVENTS_PER_SCRAPE,
    }  # fmt: skip
    rows = _query(EVENTS, values)
    for event_id, kind, reason, kind_before, seconds, submit_seconds in rows:
        sums["after"] = event_id
        if kind_before is not None:
            state_before = JobState.QUEUED if kind_before == ORDERED else kind_before
            _add_duration(sums["times"][f"{state_before} {kind}"], seconds)
        if submit_seconds is not None:
            _add_duration(sums["times"]["dispatch"], submit_seconds)
        if reason:
            retried = "yes" if kind == JobState.QUEUED else "no"
            sums["ends"][f"{reason} {retried}"] += 1
    sums["behind"] = int(len(rows) == MAX_EVENTS_PER_SCRAPE)
    if sums["after"] != after_id:
        with suppress(redis.RedisError):  # while Redis is down, each scrape sums the same events again
            redis_client.client().set(key, json.dumps(sums))
    return sums


def _new_sums() -> dict[str, Any]:
    """Return the sums before the first event. They name their database, because several databases may share a Redis."""
    return {
        "version": SUMS_VERSION,
        "database": settings.DATABASES["default"]["NAME"],
        "after": 0,
        "times": {},
        "ends": {},
        "behind": 0,
    }


def _add_duration(histogram: list[Any], seconds: float) -> None:
    """Add one duration to a histogram `[counts by bucket, total seconds]`."""
    histogram[0][bisect_left(BUCKETS, seconds)] += 1
    histogram[1] += max(0.0, seconds)


def _cumulative_buckets(counts: list[int]) -> list[tuple[str, float]]:
    """Return Prometheus's buckets: each upper edge with the number of durations up to it."""
    edges = [*(str(edge) for edge in BUCKETS), "+Inf"]
    return [(edge, float(total)) for edge, total in zip(edges, accumulate(counts), strict=True)]


def _query(sql: str, values: Any = None) -> list[Any]:
    """Return the rows of a query. `values` are its parameters, by position or by name."""
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return list(cursor.fetchall())

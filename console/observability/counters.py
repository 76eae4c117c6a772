"""Counters of requests and tasks, summed over all processes of the installation in Redis.

Counting adds to a buffer in memory; a thread of each process adds the buffer to Redis once a second. A killed process
loses at most a second of counts. Metrics that must be exact are read from the database (`monitoring.db_metrics`).

The multiprocess mode of prometheus_client sums only the processes of one machine, and its counts are lost with the
machine. Here any web process returns the counts of all processes, so Prometheus scrapes one address.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import redis

from console.observability import redis_client

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
"""The interval between two transfers to Redis."""
RETRY_SECONDS = 5.0
"""How long to wait before the next transfer after Redis did not answer."""
MAX_BUFFER_KEYS = 5000
"""Largest number of keys in the buffer. Counts of further keys are dropped, so a bug in labels cannot fill memory."""
SUM, COUNT = "sum", "count"
"""Parts of a series in Redis. A counter has COUNT; a histogram has SUM and a part per bucket, named by its index."""


@dataclass(frozen=True)
class Metric:
    """A counter with its labels; with `buckets` (seconds), a histogram of durations."""

    name: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()


class Series(NamedTuple):
    """One metric with one set of label values. `counts` has the cumulative count of each bucket, or a counter's count.

    `total` is the sum of a histogram's durations in seconds; 0 for a counter.
    """

    labels: tuple[str, ...]
    counts: tuple[int, ...]
    total: float


HTTP_SECONDS = Metric(
    "trainyard_http_request_seconds",
    "Time to answer a request, by the pattern of its address; event streams are not in it.",
    ("route", "method"),
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
HTTP_TOTAL = Metric("trainyard_http_requests", "Requests answered.", ("route", "method", "status"))
TASK_SECONDS = Metric(
    "trainyard_task_seconds",
    "Time that a Celery task took.",
    ("task",),
    (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0),
)
TASK_TOTAL = Metric("trainyard_tasks", "Celery tasks that ended, by how.", ("task", "outcome"))
METRICS = (HTTP_SECONDS, HTTP_TOTAL, TASK_SECONDS, TASK_TOTAL)

Key = tuple[str, tuple[str, ...], str]
"""Metric, label values, and part."""


class Buffer:
    """The counts of this process that are not in Redis yet."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.flush)

    def _reset(self) -> None:
        """Start with empty counts. A forked process does so too: the counts that it inherits are its parent's."""
        self._lock, self._flush_lock = threading.Lock(), threading.Lock()
        self._has_counts = threading.Event()
        self._counts: dict[Key, float] = defaultdict(int)
        self._thread: threading.Thread | None = None

    def count(self, metric: Metric, **labels: str) -> None:
        """Add one to a counter."""
        self._add({(metric.name, _values(metric, labels), COUNT): 1})

    def observe(self, metric: Metric, seconds: float, **labels: str) -> None:
        """Add one duration to a histogram."""
        values = _values(metric, labels)
        bucket = str(bisect_left(metric.buckets, seconds))
        self._add({(metric.name, values, bucket): 1, (metric.name, values, SUM): seconds})

    def flush(self) -> bool:
        """Add the buffer to Redis. Return False if Redis did not answer; the counts then stay in the buffer.

        Waits for a transfer by another thread, so that all earlier counts are in Redis on return.
        """
        with self._flush_lock:
            return self._flush()

    def _flush(self) -> bool:
        with self._lock:
            counts, self._counts = self._counts, defaultdict(int)
        if not counts:
            return True
        try:
            with redis_client.client().pipeline(transaction=True) as pipe:
                for (name, labels, part), amount in counts.items():
                    field = json.dumps([*labels, part], separators=(",", ":"))
                    if part == SUM:
                        pipe.hincrbyfloat(_key(name), field, amount)
                    else:
                        pipe.hincrby(_key(name), field, int(amount))
                pipe.execute()
        except redis.RedisError as error:
            logger.debug("counts wait for Redis: %s", error)
            with self._lock:
                for key, amount in counts.items():
                    self._counts[key] += amount
            return False
        return True

    def _add(self, amounts: dict[Key, float]) -> None:
        with self._lock:
            for key, amount in amounts.items():
                if key in self._counts or len(self._counts) < MAX_BUFFER_KEYS:
                    self._counts[key] += amount
        self._has_counts.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._flush_regularly, daemon=True, name="counters")
                    self._thread.start()

    def _flush_regularly(self) -> None:
        pause = threading.Event()  # never set
        while True:
            self._has_counts.wait()
            pause.wait(FLUSH_SECONDS)
            self._has_counts.clear()
            if not self.flush():
                pause.wait(RETRY_SECONDS)
                self._has_counts.set()


def read_series(metric: Metric) -> Iterator[Series]:
    """Yield each series of a metric, summed over all processes. Raises redis.RedisError."""
    parts_by_labels: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for field, value in redis_client.client().hgetall(_key(metric.name)).items():
        *labels, part = json.loads(field)
        if len(labels) == len(metric.labels):  # series of an older version may have other labels
            parts_by_labels[tuple(labels)][part] = float(value)
    for label_values, parts in sorted(parts_by_labels.items()):
        if metric.buckets:
            counts = (int(parts.get(str(bucket), 0)) for bucket in range(len(metric.buckets) + 1))
            yield Series(label_values, tuple(accumulate(counts)), parts.get(SUM, 0.0))
        else:
            yield Series(label_values, (int(parts.get(COUNT, 0)),), 0.0)


def _values(metric: Metric, labels: dict[str, str]) -> tuple[str, ...]:
    return tuple(labels[name] for name in metric.labels)


def _key(name: str) -> str:
    return redis_client.key(f"tally:{name}")


buffer = Buffer()

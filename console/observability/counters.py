"""Counters of requests and tasks, summed in Redis over all processes of the installation.

A process counts in a buffer in memory, which one of its threads adds to Redis once a second. The counts are not exact:
a killed process loses up to a second of them. If Redis's response to a transfer is lost, the transfer is repeated and
counts twice. Metrics that must be exact are read from the database (`console.monitoring.db_metrics`).

prometheus_client has a multiprocess mode, but it sums only the processes of one machine. Here any web process returns
the counts of all processes, so Prometheus needs to scrape only one address.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
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
"""How often the buffer is added to Redis. A killed process loses the counts of this time."""
RETRY_SECONDS = 5.0
"""How long to wait before the next transfer after Redis did not answer."""
MAX_BUFFER_KEYS = 5000
"""How many keys the buffer may have, several times what all routes and tasks need. Counts of further keys are dropped,
so that a bug in label values cannot fill the memory."""
SUM, COUNT = "sum", "count"
"""Names of the values that a series has in Redis. A counter has COUNT. A histogram has SUM, and for each bucket a value
that is named by the bucket's index."""


@dataclass(frozen=True)
class Metric:
    """A counter with its labels. With `buckets`, upper edges in seconds, it is a histogram of durations instead."""

    name: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()


class Series(NamedTuple):
    """The values of one metric for one set of label values.

    For a histogram, `counts` has the number of durations up to the edge of each bucket, and `total_seconds` is the sum
    of all durations. For a counter, `counts` has one number, and `total_seconds` is 0.
    """

    labels: tuple[str, ...]
    counts: tuple[int, ...]
    total_seconds: float


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
TASK_TOTAL = Metric("trainyard_tasks", "Finished Celery tasks, by outcome.", ("task", "outcome"))
METRICS = (HTTP_SECONDS, HTTP_TOTAL, TASK_SECONDS, TASK_TOTAL)

Key = tuple[str, tuple[str, ...], str]
"""The key of a count in the buffer: the metric's name, its label values, and SUM, COUNT or a bucket's index."""


class Buffer:
    """The counts of this process that are not in Redis yet. It is thread-safe."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        atexit.register(self.flush)

    def _reset(self) -> None:
        """Start with an empty buffer. A forked process does this too, because its parent flushes the inherited counts.

        Locks and threads are new, because a fork copies a held lock, but not the thread that holds it.
        """
        self._lock, self._flush_lock = threading.Lock(), threading.Lock()
        self._has_counts = threading.Event()
        self._counts: dict[Key, float] = defaultdict(int)
        self._thread: threading.Thread | None = None

    def count(self, metric: Metric, **labels: str) -> None:
        """Add one to a counter."""
        self._add({(metric.name, _label_values(metric, labels), COUNT): 1})

    def observe(self, metric: Metric, seconds: float, **labels: str) -> None:
        """Add one duration to a histogram."""
        values = _label_values(metric, labels)
        bucket = str(bisect_left(metric.buckets, seconds))
        self._add({(metric.name, values, bucket): 1, (metric.name, values, SUM): seconds})

    def flush(self) -> bool:
        """Add the buffer to Redis. Return False if Redis did not answer; the counts then stay in the buffer.

        If another thread is flushing, wait for it, so that all earlier counts are in Redis on return.
        """
        with self._flush_lock:
            return self._flush_locked()

    def _flush_locked(self) -> bool:
        """Do what `flush` says. The caller holds `_flush_lock`."""
        with self._lock:
            counts, self._counts = self._counts, defaultdict(int)
        if not counts:
            return True
        try:
            with redis_client.client().pipeline(transaction=True) as pipe:
                for (name, labels, value_name), amount in counts.items():
                    field = json.dumps([*labels, value_name], separators=(",", ":"))
                    if value_name == SUM:
                        pipe.hincrbyfloat(_redis_key(name), field, amount)
                    else:
                        pipe.hincrby(_redis_key(name), field, int(amount))
                pipe.execute()
        except redis.RedisError as error:
            logger.debug("counts wait for Redis: %s", error)
            with self._lock:
                for key, amount in counts.items():
                    self._counts[key] += amount
            return False
        return True

    def _add(self, amounts: dict[Key, float]) -> None:
        """Add amounts to the buffer. The first call starts the thread that flushes it: most commands count nothing."""
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
        """Flush the buffer FLUSH_SECONDS after a count, for ever."""
        while True:
            self._has_counts.wait()
            time.sleep(FLUSH_SECONDS)  # the counts of this time are transferred together
            self._has_counts.clear()
            if not self.flush():
                time.sleep(RETRY_SECONDS)  # no event tells that Redis is back
                self._has_counts.set()


def read_series(metric: Metric) -> Iterator[Series]:
    """Yield each series of a metric, summed over all processes. Raises redis.RedisError."""
    values_by_labels: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for field, value in redis_client.client().hgetall(_redis_key(metric.name)).items():
        *labels, value_name = json.loads(field)
        if len(labels) == len(metric.labels):  # series of an older version may have other labels
            values_by_labels[tuple(labels)][value_name] = float(value)
    for label_values, values in sorted(values_by_labels.items()):
        if metric.buckets:
            counts = (int(values.get(str(bucket), 0)) for bucket in range(len(metric.buckets) + 1))
            yield Series(label_values, tuple(accumulate(counts)), values.get(SUM, 0.0))
        else:
            yield Series(label_values, (int(values.get(COUNT, 0)),), 0.0)


def _label_values(metric: Metric, labels: dict[str, str]) -> tuple[str, ...]:
    """Return the values of all labels, in the order of the metric's labels."""
    return tuple(labels[name] for name in metric.labels)


def _redis_key(name: str) -> str:
    """Return the key of a metric's hash in Redis. "tally" is an old name, kept so that no upgrade loses counts."""
    return redis_client.key(f"tally:{name}")


buffer = Buffer()
"""The buffer of this process."""

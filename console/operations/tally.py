"""Counts that outlive the process that counted: requests, tasks. Kept in Redis, for the whole installation.

Hides buffering: to count costs an addition in memory, and a thread of each process sends what came together once a
second. The one rule: a count lost with a killed process is at most a second's; what must be exact is read from rows.

prometheus_client's multiprocess mode would keep files on each machine, for each process that ever ran: the worker, beat
and each web pod would be asked one by one, and would forget at a restart. Here any web process answers for all.
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
from typing import NamedTuple

import redis

from console.operations import store

logger = logging.getLogger(__name__)

GAP_SECONDS = 1.0
PAUSE_SECONDS = 5.0
"""After Redis did not answer."""
MOST_SERIES = 5000
"""More kinds of things than this are not counted apart: a fault in labels must not fill memory."""
SUM = "sum"
COUNT = "count"


@dataclass(frozen=True)
class Metric:
    """Something that is counted, with its labels; with `buckets` (seconds), how long it took as well."""

    name: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()


class Series(NamedTuple):
    """What was counted of one metric under one set of labels. `counts`: for each bucket and above, or the one count."""

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


class Tally:
    """The counts of this process that are not in Redis yet."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self.flush)

    def _begin(self) -> None:
        """A process that was forked counts from nothing: what its parent counted, its parent sends."""
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._due = threading.Event()
        self._counts: dict[Key, float] = defaultdict(int)
        self._thread: threading.Thread | None = None

    def count(self, metric: Metric, **labels: str) -> None:
        """One more."""
        self._add({(metric.name, _values(metric, labels), COUNT): 1})

    def observe(self, metric: Metric, seconds: float, **labels: str) -> None:
        """One more, that took so long."""
        values = _values(metric, labels)
        bucket = str(bisect_left(metric.buckets, seconds))
        self._add({(metric.name, values, bucket): 1, (metric.name, values, SUM): seconds})

    def flush(self) -> bool:
        """Send what was counted. Gives whether Redis has it; what it hasn't is sent the next time.

        Waits for another thread's sending, so that all that was counted before is there.
        """
        with self._sending:
            return self._flush()

    def _flush(self) -> bool:
        with self._lock:
            counts, self._counts = self._counts, defaultdict(int)
        if not counts:
            return True
        try:
            with store.client().pipeline(transaction=True) as pipe:
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
                if key in self._counts or len(self._counts) < MOST_SERIES:
                    self._counts[key] += amount
        if not self._due.is_set():
            self._due.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._send, daemon=True, name="tally")
                    self._thread.start()

    def _send(self) -> None:
        gap = threading.Event()
        while True:
            self._due.wait()
            gap.wait(GAP_SECONDS)
            self._due.clear()
            if not self.flush():
                gap.wait(PAUSE_SECONDS)
                self._due.set()


def read(metric: Metric) -> Iterator[Series]:
    """What all processes counted of a metric. Raises redis.RedisError."""
    found: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for field, value in store.client().hgetall(_key(metric.name)).items():
        *labels, part = json.loads(field)
        if len(labels) == len(metric.labels):  # else: of a version with other labels
            found[tuple(labels)][part] = float(value)
    for values, parts in sorted(found.items()):
        if metric.buckets:
            each = [int(parts.get(str(number), 0)) for number in range(len(metric.buckets) + 1)]
            yield Series(values, tuple(sum(each[: number + 1]) for number in range(len(each))), parts.get(SUM, 0.0))
        else:
            yield Series(values, (int(parts.get(COUNT, 0)),), 0.0)


def _values(metric: Metric, labels: dict[str, str]) -> tuple[str, ...]:
    return tuple(labels[name] for name in metric.labels)


def _key(name: str) -> str:
    return store.key(f"tally:{name}")


tally = Tally()

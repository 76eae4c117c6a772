"""`/metrics`: Prometheus metrics. Every web process returns those of the whole installation.

A scrape reads indexed rows, counters and heartbeats, and never calls a cluster or a worker. If the database or Redis is
unavailable, their metrics are missing, and `trainyard_up` is 0 for this part.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import redis
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from console.monitoring import db_metrics
from console.observability import counters, heartbeats, redis_client
from jobs.models import ClusterStatus

logger = logging.getLogger(__name__)

CACHE_SECONDS = 3.0
"""How long collected metrics are reused, so that several Prometheus servers cost no more than one."""
STATEMENT_SECONDS = 5
"""How long one query may take. It normally takes milliseconds, and Prometheus waits ten seconds for all metrics."""
LIVE_SECONDS = 30.0
"""A process whose last heartbeat is older is not counted as running: each sends one at least every five seconds."""
QUEUES = ("celery", "dispatch")
"""The queues of Celery, each of which is a Redis list of this name."""
UNACKNOWLEDGED = "unacked"
"""The Redis hash in which Celery keeps the messages that a worker has taken but not finished."""


@never_cache
@require_safe
def metrics(request: HttpRequest) -> HttpResponseBase:
    """Return the metrics to a request with METRICS_TOKEN, and 404 to every other request."""
    if not has_metrics_token(request):
        return HttpResponse(status=404)
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(REGISTRY), content_type=content_type)


def has_metrics_token(request: HttpRequest) -> bool:
    """Return whether the request has the header `Authorization: Bearer METRICS_TOKEN`, and this setting is set."""
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    token: str = settings.METRICS_TOKEN
    return (
        bool(token) and scheme.lower() == "bearer" and hmac.compare_digest(credentials.strip().encode(), token.encode())
    )


class Collector:
    """Collects all metrics for `prometheus_client`, at most once in CACHE_SECONDS."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._collected_at = float("-inf")
        self._cached: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        """Return all metrics (the method that `prometheus_client` calls)."""
        with self._lock:
            if time.monotonic() - self._collected_at > CACHE_SECONDS:
                self._cached, self._collected_at = list(collect_metrics()), time.monotonic()
            return iter(self._cached)


def collect_metrics() -> Iterator[Metric]:
    """Yield all metrics. The last is `trainyard_up`, which tells whether the database and Redis answered."""
    up = GaugeMetricFamily("trainyard_up", "Whether this part answered.", labels=("part",))
    for part, sources in (
        ("database", (_collect_database,)),
        ("redis", (_collect_counters, _collect_heartbeats, _collect_task_queue)),
    ):
        metrics, is_up = _collect_from(sources)
        up.add_metric((part,), float(is_up))
        yield from metrics
    yield up


def _collect_from(sources: tuple[Callable[[], Iterator[Metric]], ...]) -> tuple[list[Metric], bool]:
    """Return the metrics of the sources up to the first that fails, and whether all succeeded."""
    metrics: list[Metric] = []
    try:
        for source in sources:
            metrics += source()
    except (DatabaseError, redis.RedisError) as error:
        logger.warning("a scrape is incomplete: %s", error)
        return metrics, False
    return metrics, True


def _collect_database() -> Iterator[Metric]:
    """Yield the metrics from the database. Raises DatabaseError."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL statement_timeout = '{STATEMENT_SECONDS}s'")
        yield from db_metrics.open_work()
        yield from db_metrics.history()
        reachable = GaugeMetricFamily("trainyard_cluster_up", "Whether a cluster answers.", labels=("cluster",))
        for status in ClusterStatus.objects.filter(name__in=settings.TRAINYARD_CLUSTERS):
            reachable.add_metric((status.name,), float(status.answers))
        yield reachable


def _collect_counters() -> Iterator[Metric]:
    """Yield the counters and histograms of requests and tasks. Raises redis.RedisError."""
    for metric in counters.METRICS:
        if not metric.buckets:
            counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            for series in counters.read_series(metric):
                counter.add_metric(series.labels, series.counts[0])
            yield counter
            continue
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        edges = [*(str(edge) for edge in metric.buckets), "+Inf"]
        for series in counters.read_series(metric):
            histogram.add_metric(series.labels, list(zip(edges, series.counts, strict=True)), series.total_seconds)
        yield histogram


def _collect_heartbeats() -> Iterator[Metric]:
    """Yield the metrics from heartbeats. Raises redis.RedisError.

    A heartbeat shows that a process works. Heartbeats about clusters and the ledger also carry reports in `details`.
    """
    cluster_kinds = (heartbeats.WATCHER, heartbeats.CLUSTER)
    current = [
        heartbeat
        for heartbeat in heartbeats.recent()
        # The `part` of these kinds is a cluster. One that was removed from the settings still has a last heartbeat.
        if heartbeat.kind not in cluster_kinds or heartbeat.part in settings.TRAINYARD_CLUSTERS
    ]
    last = GaugeMetricFamily(
        "trainyard_last_sign_timestamp_seconds", "Last heartbeat of a process type.", labels=("process", "part")
    )
    for kind in heartbeats.KINDS:
        for part, heartbeat in heartbeats.latest(current, kind).items():
            last.add_metric((kind, part), heartbeat.at)
    yield last
    live = [heartbeat for heartbeat in current if heartbeat.age_seconds < LIVE_SECONDS]
    processes = GaugeMetricFamily("trainyard_processes", "Processes with a recent heartbeat.", labels=("process",))
    for kind in heartbeats.PROCESS_KINDS:
        processes.add_metric((kind,), len({heartbeat.process for heartbeat in live if heartbeat.kind == kind}))
    yield processes
    streams = sum(int(heartbeat.details.get("streams", 0)) for heartbeat in live if heartbeat.kind == heartbeats.WEB)
    yield GaugeMetricFamily("trainyard_live_streams", "Open event streams.", value=streams)
    yield from _collect_capacity(heartbeats.latest(current, heartbeats.CLUSTER))
    yield from _collect_ledger(heartbeats.latest(current, heartbeats.LEDGER).get(""))


def _collect_capacity(clusters: dict[str, heartbeats.Heartbeat]) -> Iterator[Metric]:
    """Yield capacity and isolation gaps of clusters, from the last heartbeat about each (`heartbeats.CLUSTER`)."""
    labels = ("cluster", "resource", "gpu_type")
    total = GaugeMetricFamily("trainyard_capacity", "Total capacity of a cluster: cores, MiB, GPUs.", labels=labels)
    free = GaugeMetricFamily("trainyard_capacity_free", "Free capacity of a cluster: cores, MiB, GPUs.", labels=labels)
    gaps = GaugeMetricFamily("trainyard_isolation_gaps", "Isolation gaps of a cluster.", labels=("cluster",))
    for name, heartbeat in clusters.items():
        for family, amounts in ((total, heartbeat.details.get("total", [])), (free, heartbeat.details.get("free", []))):
            for resource, gpu_type, amount in amounts:
                family.add_metric((name, resource, gpu_type), amount)
        gaps.add_metric((name,), len(heartbeat.details.get("gaps", [])))
    yield total
    yield free
    yield gaps


def _collect_ledger(heartbeat: heartbeats.Heartbeat | None) -> Iterator[Metric]:
    """Yield the numbers of findings of the last check of the ledger, by kind."""
    findings = GaugeMetricFamily("trainyard_ledger_wrong", "Findings of the last ledger check.", labels=("what",))
    counts = heartbeat.details.get("wrong", {}) if heartbeat else {}
    for kind, count in counts.items():
        findings.add_metric((kind,), count)
    yield findings


def _collect_task_queue() -> Iterator[Metric]:
    """Yield how many messages wait in Celery's queues, and how many are being worked on. Raises redis.RedisError."""
    client: Any = redis_client.client()
    for name, text, value in (
        ("trainyard_task_queue_length", "Messages that no worker has taken.", sum(map(client.llen, QUEUES))),
        ("trainyard_tasks_unacknowledged", "Messages that a worker has not finished.", client.hlen(UNACKNOWLEDGED)),
    ):
        yield GaugeMetricFamily(name, text, value=value)


REGISTRY = CollectorRegistry(auto_describe=False)  # else `register` would collect, and so read the database on import
REGISTRY.register(Collector())

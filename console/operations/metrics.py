"""`/metrics`: everything Prometheus asks for, of the whole installation, from any web process.

The one rule: a scrape is cheap and never waits for a cluster or a worker: it reads rows by their indexes and what the
processes said last. What a part that is away would have said is left out; `trainyard_up` says which one it was.
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
from django.contrib.auth.decorators import login_not_required
from django.db import Error as DatabaseError
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from console.operations import figures, signs, store, tally
from jobs.models import ClusterStatus

logger = logging.getLogger(__name__)

KEPT_SECONDS = 3.0
STATEMENT_SECONDS = 5
LATELY_SECONDS = 30.0
"""A process that said nothing for longer is not counted."""
QUEUE = "celery"
UNACKNOWLEDGED = "unacked"


@never_cache
@require_safe
@login_not_required
def metrics(request: HttpRequest) -> HttpResponseBase:
    """For whoever has METRICS_TOKEN; without one set, or with another, there is nothing at this address."""
    if not is_operator(request):
        return HttpResponse(status=404)
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(REGISTRY), content_type=content_type)


def is_operator(request: HttpRequest) -> bool:
    """Whether the request carries `Authorization: Bearer METRICS_TOKEN`."""
    scheme, _, word = request.headers.get("Authorization", "").partition(" ")
    token: str = settings.METRICS_TOKEN
    return bool(token) and scheme.lower() == "bearer" and hmac.compare_digest(word.strip().encode(), token.encode())


class Collector:
    """Everything, computed at most every few seconds whoever asks how often."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at = float("-inf")
        self._kept: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's way to ask."""
        with self._lock:
            if time.monotonic() - self._at > KEPT_SECONDS:
                self._kept, self._at = list(families()), time.monotonic()
            return iter(self._kept)


def families() -> Iterator[Metric]:
    """Every family, fresh."""
    up = GaugeMetricFamily("trainyard_up", "Whether this part could be asked.", labels=("part",))
    for part, sources in (("database", (_of_rows,)), ("redis", (_of_tally, _of_signs, _of_tasks))):
        found, answered = _all_of(sources)
        up.add_metric((part,), float(answered))
        yield from found
    yield up


def _all_of(sources: tuple[Callable[[], Iterator[Metric]], ...]) -> tuple[list[Metric], bool]:
    found: list[Metric] = []
    try:
        for source in sources:
            found += source()
    except (DatabaseError, redis.RedisError) as error:
        logger.warning("a scrape is not whole: %s", error)
        return found, False
    return found, True


def _of_rows() -> Iterator[Metric]:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL statement_timeout = '{STATEMENT_SECONDS}s'")
        yield from figures.waiting()
        yield from figures.happened()
        reachable = GaugeMetricFamily("trainyard_cluster_up", "Whether a cluster answers.", labels=("cluster",))
        for status in ClusterStatus.objects.filter(name__in=settings.TRAINYARD_CLUSTERS):
            reachable.add_metric((status.name,), float(status.answers))
        yield reachable


def _of_tally() -> Iterator[Metric]:
    for metric in tally.METRICS:
        if not metric.buckets:
            counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            for series in tally.read(metric):
                counter.add_metric(series.labels, series.counts[0])
            yield counter
            continue
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        edges = [*(str(edge) for edge in metric.buckets), "+Inf"]
        for series in tally.read(metric):
            histogram.add_metric(series.labels, list(zip(edges, series.counts, strict=True)), series.total)
        yield histogram


def _of_signs() -> Iterator[Metric]:
    clusters = (signs.WATCHER, signs.CLUSTER)  # of one that the settings no longer name, nothing is expected
    seen = [sign for sign in signs.seen() if sign.kind not in clusters or sign.part in settings.TRAINYARD_CLUSTERS]
    last = GaugeMetricFamily(
        "trainyard_last_sign_timestamp_seconds", "When a kind of process last gave a sign.", labels=("process", "part")
    )
    for kind in (signs.BEAT, signs.WORKER, signs.WATCHER, signs.LIVE, signs.CLUSTER, signs.BOOKS):
        for part, sign in signs.newest(seen, kind).items():
            last.add_metric((kind, part), sign.at)
    yield last
    lately = [sign for sign in seen if sign.age_seconds < LATELY_SECONDS]
    processes = GaugeMetricFamily("trainyard_processes", "Processes that gave a sign of late.", labels=("process",))
    for kind in (signs.BEAT, signs.WORKER, signs.WATCHER, signs.LIVE):
        processes.add_metric((kind,), len({sign.process for sign in lately if sign.kind == kind}))
    yield processes
    streams = sum(int(sign.facts.get("streams", 0)) for sign in lately if sign.kind == signs.LIVE)
    yield GaugeMetricFamily("trainyard_live_streams", "Event streams that are open.", value=streams)
    yield from _capacity(signs.newest(seen, signs.CLUSTER))
    yield from _books(signs.newest(seen, signs.BOOKS).get(""))


def _capacity(clusters: dict[str, signs.Sign]) -> Iterator[Metric]:
    labels = ("cluster", "resource", "gpu_type")
    total = GaugeMetricFamily("trainyard_capacity", "What a cluster has: cores, MiB, GPUs.", labels=labels)
    free = GaugeMetricFamily("trainyard_capacity_free", "What of it no run holds.", labels=labels)
    gaps = GaugeMetricFamily(
        "trainyard_isolation_gaps", "What a cluster cannot keep apart or limit as it should.", labels=("cluster",)
    )
    for name, sign in clusters.items():
        for family, amounts in ((total, sign.facts.get("total", [])), (free, sign.facts.get("free", []))):
            for resource, gpu_type, amount in amounts:
                family.add_metric((name, resource, gpu_type), amount)
        gaps.add_metric((name,), len(sign.facts.get("gaps", [])))
    yield total
    yield free
    yield gaps


def _books(sign: signs.Sign | None) -> Iterator[Metric]:
    wrong = GaugeMetricFamily("trainyard_ledger_wrong", "What the last check of the books found.", labels=("what",))
    for what, count in (sign.facts.get("wrong", {}) if sign else {}).items():
        wrong.add_metric((what,), count)
    yield wrong


def _of_tasks() -> Iterator[Metric]:
    client: Any = store.client()
    for name, text, value in (
        ("trainyard_task_queue_length", "Messages that no worker has taken.", client.llen(QUEUE)),
        ("trainyard_tasks_unacknowledged", "Messages that a worker has and has not done.", client.hlen(UNACKNOWLEDGED)),
    ):
        yield GaugeMetricFamily(name, text, value=value)


REGISTRY = CollectorRegistry(auto_describe=False)
REGISTRY.register(Collector())

"""What a run's nodes and ranks used over time: the launchers' samples, made small enough to show, and what they mean.

Hides files of any length: what is read is bounded, thinned and averaged; nothing is kept. The one rule: samples come
from a place that shares a user with the customer's code, so they are parsed leniently and decide nothing about money.
`runtime.launcher.sampling` says what is in one.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from jobs.backend import cluster
from jobs.models import Attempt, Job
from jobs.states import JobState
from runtime.errors import RuntimeFault

PIECE_BYTES = 1024 * 1024
MOST_BYTES = 16 * PIECE_BYTES
"""Read of one node."""
MOST_PARSED = 1200
"""Samples looked at of one node; of more, every second, third ... is."""
POINTS_SHOWN = 240
RECENT_SECONDS = 60
SLOW = 1.3
"""A rank that computes this much longer for a step than the median rank keeps the others waiting."""
RUNS_COMPARED = 20
GPU_SERIES = {"gpu": "utilization", "gpu_memory": "memory"}
SERIES = ("cpu", "memory", "net_rx", "net_tx", "disk_read", "disk_write")


@dataclass
class NodeUse:
    """One node over time. `series` by name, as long as `at` (Unix seconds), None where nothing is known."""

    node: int
    at: list[float] = field(default_factory=list)
    series: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass
class RankUse:
    """One rank: the most it used of late, and its steps over the whole attempt and of late. Bytes, cores, seconds."""

    rank: int
    node: int
    cpu: float | None = None
    memory: float | None = None
    steps: float = 0.0
    step_seconds: float = 0.0
    comm_seconds: float | None = None
    recent_steps: float = 0.0
    recent_compute_seconds: float | None = None

    @property
    def seconds_per_step(self) -> float | None:
        """How long one step takes, waiting included."""
        return self.step_seconds / self.steps if self.steps else None

    @property
    def comm_share(self) -> float | None:
        """The share of its steps that it waits for other ranks, 0..1."""
        if self.comm_seconds is None or self.step_seconds <= 0:
            return None
        return min(1.0, self.comm_seconds / self.step_seconds)


@dataclass(frozen=True)
class Straggler:
    """A rank that others wait for: how many times as long as the median rank it computes for a step."""

    rank: int
    node: int
    ratio: float


@dataclass(frozen=True)
class Efficiency:
    """How much of `nodes` times the work of one node is done: 1.0 is all of it. `job` is the one-node run."""

    value: float
    nodes: int
    job: int
    by: str
    """`steps` or `epochs`."""


@dataclass(frozen=True)
class Telemetry:
    """All of one attempt."""

    attempt: int | None
    nodes: list[NodeUse]
    ranks: list[RankUse]
    stragglers: list[Straggler]
    efficiency: Efficiency | None


def telemetry(job: Job, attempt_number: int | None = None) -> Telemetry:
    """What an attempt (the latest) used, and how well it scales."""
    attempts = list(job.attempts.all())
    chosen = [each for each in attempts if attempt_number in {None, each.number}]
    if not chosen:
        return Telemetry(None, [], [], [], None)
    nodes, ranks = _read(chosen[-1])
    return Telemetry(chosen[-1].number, nodes, ranks, stragglers(ranks), _efficiency(job, chosen[-1], ranks))


def stragglers(ranks: Iterable[RankUse]) -> list[Straggler]:
    """The ranks that the others wait for."""
    known = [
        (each, each.recent_compute_seconds / each.recent_steps)
        for each in ranks
        if each.recent_compute_seconds is not None and each.recent_steps > 0
    ]
    if len(known) < 2:
        return []
    usual = statistics.median_low([seconds for _rank, seconds in known])
    return [
        Straggler(each.rank, each.node, seconds / usual)
        for each, seconds in known
        if usual > 0 and seconds > SLOW * usual
    ]


def _read(attempt: Attempt) -> tuple[list[NodeUse], list[RankUse]]:
    nodes: list[NodeUse] = []
    ranks: dict[int, RankUse] = {}
    for node in range(attempt.granted_nodes):
        samples = _samples(attempt, node)
        if samples:
            nodes.append(_node_use(node, samples))
            _add_ranks(ranks, node, samples)
    return nodes, [ranks[rank] for rank in sorted(ranks)]


def _samples(attempt: Attempt, node: int) -> list[dict[str, Any]]:
    """A node's samples in order, at most about MOST_PARSED of them, the last minute among them whole."""
    lines: list[str] = []
    offset = 0
    try:
        while offset < MOST_BYTES:
            chunk = cluster(attempt.backend).samples(attempt.run_name, node, offset, PIECE_BYTES)
            if not chunk.text:
                break
            lines += chunk.text.splitlines()
            offset = chunk.next_offset
    except RuntimeFault:
        return []
    stride = math.ceil(len(lines) / MOST_PARSED) if lines else 1
    recent = max(0, len(lines) - RECENT_SECONDS)
    kept = [*lines[:recent:stride], *lines[recent:]]
    return [sample for sample in map(_parse, kept) if sample is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return sample if isinstance(sample, dict) and _number(sample.get("at")) is not None else None


def _node_use(node: int, samples: list[dict[str, Any]]) -> NodeUse:
    size = math.ceil(len(samples) / POINTS_SHOWN)
    buckets = [samples[start : start + size] for start in range(0, len(samples), size)]
    use = NodeUse(node, at=[float(bucket[-1]["at"]) for bucket in buckets])
    values = {name: [_mean(sample.get(name) for sample in bucket) for bucket in buckets] for name in SERIES}
    for name, source in GPU_SERIES.items():
        values[name] = [
            _mean(gpu.get(source) for sample in bucket for gpu in _parts(sample, "gpus")) for bucket in buckets
        ]
    use.series = {name: points for name, points in values.items() if any(point is not None for point in points)}
    return use


def _add_ranks(ranks: dict[int, RankUse], node: int, samples: list[dict[str, Any]]) -> None:
    since = float(samples[-1]["at"]) - RECENT_SECONDS
    for sample in samples:
        for part in _parts(sample, "ranks"):
            number = _number(part.get("rank"))
            if number is None:
                continue
            use = ranks.setdefault(int(number), RankUse(int(number), node))
            is_recent = float(sample["at"]) >= since
            if is_recent:
                use.cpu = _most(use.cpu, _number(part.get("cpu")))
                use.memory = _most(use.memory, _number(part.get("memory")))
            steps, seconds = _number(part.get("steps")) or 0.0, _number(part.get("step_seconds")) or 0.0
            waited = _number(part.get("comm_seconds"))
            use.steps += steps
            use.step_seconds += seconds
            if waited is not None:
                use.comm_seconds = (use.comm_seconds or 0.0) + waited
            if is_recent and waited is not None:
                use.recent_steps += steps
                use.recent_compute_seconds = (use.recent_compute_seconds or 0.0) + max(0.0, seconds - waited)


def _efficiency(job: Job, attempt: Attempt, ranks: list[RankUse]) -> Efficiency | None:
    """Against the newest completed run of the same code on one such node with the same data."""
    nodes = attempt.granted_nodes
    if nodes < 2 or (alone := _one_node_run(job)) is None:
        return None
    base = alone.attempts.filter(reason="completed").last()
    if base is None:
        return None
    many = _samples_per_second(job, nodes, ranks)
    one = _samples_per_second(alone, 1, _read(base)[1]) if many else None
    if many and one:
        return Efficiency(many / (nodes * one), nodes, alone.pk, "steps")
    many, one = _epochs_per_second(job, attempt), _epochs_per_second(alone, base)
    return Efficiency(many / (nodes * one), nodes, alone.pk, "epochs") if many and one else None


def _one_node_run(job: Job) -> Job | None:
    alike = Job.objects.filter(
        organization=job.organization_id,
        code_key=job.code_key,
        node_spec=job.node_spec_id,
        workers_per_node=job.workers_per_node,
        nodes=1,
        state=JobState.SUCCEEDED,
    ).order_by("-id")[:RUNS_COMPARED]
    data = _data_of(job)
    return next((each for each in alike.prefetch_related("job_datasets") if _data_of(each) == data), None)


def _data_of(job: Job) -> set[int]:
    return {item.version_id for item in job.job_datasets.all()}


def _samples_per_second(job: Job, nodes: int, ranks: list[RankUse]) -> float | None:
    """Of training data, by all ranks together while they step."""
    steps, seconds = sum(each.steps for each in ranks), sum(each.step_seconds for each in ranks)
    return nodes * job.workers_per_node * job.batch_size * steps / seconds if steps and seconds > 0 else None


def _epochs_per_second(job: Job, attempt: Attempt) -> float | None:
    if attempt.reason != "completed" or attempt.started_at is None or attempt.finished_at is None:
        return None
    seconds = (attempt.finished_at - attempt.started_at) / timedelta(seconds=1)
    return job.epochs / seconds if seconds > 0 else None


def _parts(sample: dict[str, Any], name: str) -> list[dict[str, Any]]:
    parts = sample.get(name)
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _number(value: Any) -> float | None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e300
    return float(value) if ok else None


def _most(known: float | None, more: float | None) -> float | None:
    return more if known is None else known if more is None else max(known, more)


def _mean(values: Iterable[Any]) -> float | None:
    known = [number for number in map(_number, values) if number is not None]
    return sum(known) / len(known) if known else None

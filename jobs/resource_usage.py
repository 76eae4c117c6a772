"""Resource usage of a run's nodes and ranks over time, its slow ranks and its scaling efficiency.

The launchers' samples (`runtime.launcher.telemetry.sampling`) are read with a limit, thinned and averaged; nothing is
stored. The customer's code can write to them, so they are parsed leniently and never affect money.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from jobs.clusters import cluster
from jobs.models import Attempt, Job
from jobs.states import JobState
from runtime.errors import RuntimeFault

CHUNK_BYTES = 1024 * 1024
"""Bytes of samples that one call to the cluster reads, so that no call takes long."""
MAX_BYTES = 16 * CHUNK_BYTES
"""Bytes of samples that are read per node: the latest ones, which cover about a day."""
MAX_TOTAL_BYTES = 256 * CHUNK_BYTES
"""Limit of the bytes of samples that are read of all nodes together, because customers' code can fill the files.
Reading as many takes some seconds. With 200 nodes, each node's share covers about the latest two hours."""
MAX_SAMPLES = 1200
"""Samples parsed per node. Of more samples only every nth is parsed, because charts show far fewer points."""
POINTS_SHOWN = 240
"""Points per chart: about one for every two pixels."""
RECENT_SECONDS = 60
"""The period that counts as recent: current usage and slow ranks are means over it. It covers several steps."""
SLOW_RATIO = 1.3
"""A rank whose steps take this much longer than those of the median rank is slow. Smaller differences are noise."""
MAX_RUNS_COMPARED = 20
"""How many of the latest one-node runs are searched for a run with the same datasets. Older runs rarely have them."""
GPU_SERIES = {"gpu": "utilization", "gpu_memory": "memory"}
"""Series that average over a node's GPUs, and the keys of a GPU's sample that they show."""
SERIES = ("cpu", "memory", "net_rx", "net_tx", "disk_read", "disk_write")
"""Series of a node, by their keys in a sample."""


@dataclass
class NodeUse:
    """The usage of one node over time. Each of `series` has a value for each of `at` (Unix seconds); None if missing.

    `recent_cpu` is the mean of the last RECENT_SECONDS, in cores: about the sum of its ranks' `cpu`.
    """

    node: int
    recent_cpu: float | None = None
    at: list[float] = field(default_factory=list)
    series: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass
class RankUse:
    """The usage and the steps of one rank. Recent values are those of the last RECENT_SECONDS.

    `cpu` is the recent mean in cores, where samples without the rank count as zero. `memory` is the recent maximum in
    bytes. `steps` and `step_seconds` are sums over the parsed samples, which are not all samples of a long attempt (see
    MAX_SAMPLES). `comm_seconds` is the part of `step_seconds` that the rank waited for others, None if unknown.
    `recent_compute_seconds` is the step time without these waits, and `recent_steps` the number of steps in it.
    """

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
        """Return the time per step, including waits for other ranks."""
        return self.step_seconds / self.steps if self.steps else None

    @property
    def comm_share(self) -> float | None:
        """Return the share of step time spent waiting for other ranks, 0..1."""
        if self.comm_seconds is None or self.step_seconds <= 0:
            return None
        return min(1.0, self.comm_seconds / self.step_seconds)


@dataclass(frozen=True)
class Straggler:
    """A slow rank; `ratio` is its compute time per step divided by that of the median rank."""

    rank: int
    node: int
    ratio: float


@dataclass(frozen=True)
class Efficiency:
    """Scaling efficiency: 1.0 means `nodes` times the throughput of the one-node run with the id `job_id`."""

    value: float
    nodes: int
    job_id: int
    by: str
    """What the two throughputs count: `steps` or `epochs`."""


@dataclass(frozen=True)
class AttemptUsage:
    """The resource usage of an attempt. `attempt` is its number; None if the job has no such attempt."""

    attempt: int | None
    nodes: list[NodeUse]
    ranks: list[RankUse]
    stragglers: list[Straggler]
    efficiency: Efficiency | None


def usage_of(job: Job, attempt_number: int | None = None) -> AttemptUsage:
    """Return the resource usage of an attempt (default: the latest)."""
    attempts = list(job.attempts.all())
    if attempt_number is not None:
        attempts = [each for each in attempts if each.number == attempt_number]
    attempt = attempts[-1] if attempts else None
    if attempt is None:
        return AttemptUsage(attempt=None, nodes=[], ranks=[], stragglers=[], efficiency=None)
    nodes, ranks = _read(attempt)
    return AttemptUsage(attempt.number, nodes, ranks, stragglers(ranks), _efficiency(job, attempt, ranks))


def stragglers(ranks: Iterable[RankUse]) -> list[Straggler]:
    """Return the ranks whose recent compute time per step is above SLOW_RATIO times that of the median rank."""
    step_times = [
        (each, each.recent_compute_seconds / each.recent_steps)
        for each in ranks
        if each.recent_compute_seconds is not None and each.recent_steps > 0
    ]
    if len(step_times) < 2:
        return []
    # The low median: with two ranks it is the time of the faster one, so that the slower one can be found.
    median = statistics.median_low([seconds for _rank, seconds in step_times])
    return [
        Straggler(each.rank, each.node, seconds / median)
        for each, seconds in step_times
        if median > 0 and seconds > SLOW_RATIO * median
    ]


class _Usage(NamedTuple):
    """The usage of an attempt's nodes and ranks, in order of their numbers."""

    nodes: list[NodeUse]
    ranks: list[RankUse]


def _read(attempt: Attempt) -> _Usage:
    """Return the usage of an attempt's nodes and ranks."""
    nodes: list[NodeUse] = []
    ranks: dict[int, RankUse] = {}
    for node in range(attempt.granted_nodes):
        samples = _read_samples(attempt, node, min(MAX_BYTES, MAX_TOTAL_BYTES // attempt.granted_nodes))
        if samples:
            nodes.append(_node_use(node, samples))
            _add_ranks(ranks, node, samples)
    return _Usage(nodes, [ranks[rank] for rank in sorted(ranks)])


def _read_samples(attempt: Attempt, node: int, max_bytes: int) -> list[dict[str, Any]]:
    """Return a node's samples in order: about MAX_SAMPLES of the last `max_bytes`, and all of the last minute.

    Empty if the cluster does not answer.
    """
    lines: list[str] = []
    offset = -max_bytes
    chunk_bytes = min(CHUNK_BYTES, max_bytes)
    try:
        # One more read, because a chunk ends with its last complete line.
        for _chunk in range(math.ceil(max_bytes / chunk_bytes) + 1):
            chunk = cluster(attempt.backend).samples(attempt.run_name, node, offset, chunk_bytes)
            if not chunk.text:
                break
            lines += chunk.text.splitlines()
            offset = chunk.next_offset
    except RuntimeFault:
        return []
    stride = math.ceil(len(lines) / MAX_SAMPLES) if lines else 1
    # Launchers write at most one sample a second, so all recent samples are among the last RECENT_SECONDS lines.
    recent_from = max(0, len(lines) - RECENT_SECONDS)
    lines_to_parse = [*lines[:recent_from:stride], *lines[recent_from:]]
    return [sample for sample in map(_parse, lines_to_parse) if sample is not None]


def _parse(line: str) -> dict[str, Any] | None:
    """Return a sample; None if the line is not one. Only `at` is checked, the time in Unix seconds."""
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: deeply nested JSON
        return None
    return sample if isinstance(sample, dict) and _number(sample.get("at")) is not None else None


def _node_use(node: int, samples: list[dict[str, Any]]) -> NodeUse:
    """Return a node's series. Each of at most POINTS_SHOWN points is the mean of some successive samples."""
    since = _recent_since(samples)
    recent_cpu = _mean(sample.get("cpu") for sample in samples if float(sample["at"]) > since)
    size = math.ceil(len(samples) / POINTS_SHOWN)
    buckets = [samples[start : start + size] for start in range(0, len(samples), size)]
    use = NodeUse(node, recent_cpu, at=[float(bucket[-1]["at"]) for bucket in buckets])
    values = {name: [_mean(sample.get(name) for sample in bucket) for bucket in buckets] for name in SERIES}
    for name, source in GPU_SERIES.items():
        values[name] = [
            _mean(gpu.get(source) for sample in bucket for gpu in _parts(sample, "gpus")) for bucket in buckets
        ]
    use.series = {name: points for name, points in values.items() if any(point is not None for point in points)}
    return use


def _add_ranks(ranks: dict[int, RankUse], node: int, samples: list[dict[str, Any]]) -> None:
    """Add the usage and steps of a node's ranks to `ranks`."""
    since = _recent_since(samples)
    recent_samples = 0
    recent_cpu: dict[int, float] = {}
    for sample in samples:
        is_recent = float(sample["at"]) > since
        recent_samples += is_recent
        for part in _parts(sample, "ranks"):
            number = _number(part.get("rank"))
            if number is None:
                continue
            use = ranks.setdefault(int(number), RankUse(int(number), node))
            if is_recent:
                if (cpu := _number(part.get("cpu"))) is not None:
                    recent_cpu[use.rank] = recent_cpu.get(use.rank, 0.0) + cpu
                use.memory = _maximum(use.memory, _number(part.get("memory")))
            steps, seconds = _number(part.get("steps")) or 0.0, _number(part.get("step_seconds")) or 0.0
            comm_seconds = _number(part.get("comm_seconds"))
            use.steps += steps
            use.step_seconds += seconds
            if comm_seconds is not None:
                use.comm_seconds = (use.comm_seconds or 0.0) + comm_seconds
            if is_recent and comm_seconds is not None:  # otherwise the compute time is unknown
                use.recent_steps += steps
                use.recent_compute_seconds = (use.recent_compute_seconds or 0.0) + max(0.0, seconds - comm_seconds)
    for number, cores in recent_cpu.items():
        ranks[number].cpu = cores / recent_samples


def _recent_since(samples: list[dict[str, Any]]) -> float:
    """Return the time (Unix seconds) that is RECENT_SECONDS before a node's last sample."""
    return float(samples[-1]["at"]) - RECENT_SECONDS


def _efficiency(job: Job, attempt: Attempt, ranks: list[RankUse]) -> Efficiency | None:
    """Compare the attempt with the latest completed run of the same code and data on one node of the same node spec.

    Return None if there is no such run, or neither steps nor epochs can be compared.
    """
    nodes = attempt.granted_nodes
    if nodes < 2 or (one_node_job := _one_node_run(job)) is None:
        return None
    baseline = one_node_job.attempts.filter(reason="completed").last()
    if baseline is None:
        return None
    rate = _throughput(job, nodes, ranks)
    base_rate = _throughput(one_node_job, nodes=1, ranks=_read(baseline).ranks) if rate else None
    if rate and base_rate:
        return Efficiency(rate / (nodes * base_rate), nodes, one_node_job.pk, "steps")
    rate, base_rate = _epochs_per_second(job, attempt), _epochs_per_second(one_node_job, baseline)
    return Efficiency(rate / (nodes * base_rate), nodes, one_node_job.pk, "epochs") if rate and base_rate else None


def _one_node_run(job: Job) -> Job | None:
    """Return the latest completed run of the same code and data on one node of the spec, if any."""
    one_node_jobs = Job.objects.filter(
        organization=job.organization_id,
        code_key=job.code_key,
        node_spec=job.node_spec_id,
        workers_per_node=job.workers_per_node,
        nodes=1,
        state=JobState.SUCCEEDED,
    ).order_by("-id")[:MAX_RUNS_COMPARED]
    versions = _dataset_versions(job)
    candidates = one_node_jobs.prefetch_related("job_datasets")
    return next((each for each in candidates if _dataset_versions(each) == versions), None)


def _dataset_versions(job: Job) -> set[int]:
    """Return the ids of the dataset versions that a job mounts."""
    return {item.version_id for item in job.job_datasets.all()}


def _throughput(job: Job, nodes: int, ranks: list[RankUse]) -> float | None:
    """Return how many training examples all ranks together process per second of step time.

    In a step each rank processes a batch.
    """
    steps, seconds = sum(each.steps for each in ranks), sum(each.step_seconds for each in ranks)
    return nodes * job.workers_per_node * job.batch_size * steps / seconds if steps and seconds > 0 else None


def _epochs_per_second(job: Job, attempt: Attempt) -> float | None:
    """Return the epochs per second of a completed attempt; None for any other."""
    if attempt.reason != "completed" or attempt.started_at is None or attempt.finished_at is None:
        return None
    seconds = (attempt.finished_at - attempt.started_at) / timedelta(seconds=1)
    return job.epochs / seconds if seconds > 0 else None


def _parts(sample: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the objects in a list of a sample, such as its `ranks`. Invalid ones are left out."""
    parts = sample.get(name)
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _number(value: Any) -> float | None:
    """Return a value that is a number and not negative, NaN or infinite; None for any other."""
    # The upper bound excludes infinity, NaN, and whole numbers that are too large for a float.
    is_valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e300
    return float(value) if is_valid else None


def _maximum(first: float | None, second: float | None) -> float | None:
    """Return the larger number; None if both are None."""
    return max((value for value in (first, second) if value is not None), default=None)


def _mean(values: Iterable[Any]) -> float | None:
    """Return the mean of the values that `_number` accepts; None if there is none."""
    numbers = [number for number in map(_number, values) if number is not None]
    return sum(numbers) / len(numbers) if numbers else None

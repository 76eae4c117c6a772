"""Estimate how long a run takes, from earlier runs of the same code on the same node spec.

A run takes a start-up time plus a time per epoch. From one number of nodes to another, times are scaled by the
efficiency that earlier runs on several numbers of nodes show, or else by an assumed one. Only runs that completed in
one attempt count. Without any, free estimates of the script count, and without these the product's reference speed.
Every assumption that replaces a measurement makes p90 larger.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from django.contrib.postgres.expressions import ArraySubquery
from django.db.models import F, OuterRef, QuerySet

from billing.pricing import Estimate
from jobs import free_runs, telemetry
from jobs.models import Attempt, Job, JobDataset
from jobs.purchase import Purchase
from jobs.states import EndReason, JobState

MAX_RUNS = 60
"""Runs that an estimate uses, the latest ones: enough for stable quantiles, few enough to read for every quote."""
MAX_JOBS_SEARCHED = 120
"""Successful jobs among which these runs are searched, the latest ones: twice MAX_RUNS, because jobs that succeeded
only after a retry do not count."""
FEW_RUNS = 5
FEW_RUNS_SPREAD = 1.2
"""Minimum ratio of p90 to p50 if there are fewer than FEW_RUNS runs. A few similar times say little about the next.
Both numbers are judgements."""
OTHER_BATCH_SPREAD = 1.2
OTHER_DATA_SPREAD = 1.5
SCALED_SPREAD = 1.2
UNMEASURED_SPREAD = 1.5
"""Factors by which p90 grows if no earlier run had this batch size, these dataset versions, or this number of nodes.
Instead of SCALED_SPREAD, UNMEASURED_SPREAD applies if all runs had the same number of nodes, so that no efficiency was
measured. The factors are judgements; *Estimate accuracy* in the admin shows whether nine of ten runs end within p90."""
ASSUMED_SCALING = 0.8
"""Assumed exponent by which speed grows with the number of nodes, if it was not measured. With 0.8, twice the nodes are
1.74 times as fast, as is common for data parallel training."""
REFERENCE_SPREAD = 1.5
FREE_ESTIMATE_SPREAD = 1.5
"""Factors by which p90 is above p50 in estimates that no completed run supports: from the product's reference speed
(`Product.reference_seconds_per_epoch`), and from one-minute free estimates, for which the factors above apply too. Both
are judgements, as above."""
MIN_RUNS_FOR_START_UP = 4
"""Runs that are needed to tell start-up time from time per epoch. With three, one outlier would decide the slope."""


@dataclass(frozen=True)
class EarlierRun:
    """The time of one earlier run, and whether its batch size and dataset versions are those of the purchase."""

    nodes: int
    epochs: float
    seconds: float
    has_same_batch: bool = True
    has_same_data: bool = True


@dataclass(frozen=True)
class Pace:
    """The times fitted to runs on one number of nodes. `ratios`: the actual time of each run over its fitted time."""

    start_seconds: float
    epoch_seconds: float
    ratios: tuple[float, ...]

    def seconds(self, epochs: float) -> float:
        """Return the predicted time of a run with this many epochs."""
        return self.start_seconds + self.epoch_seconds * epochs


@dataclass(frozen=True)
class History:
    """Earlier runs of a purchase's script on its node spec, on any number of nodes."""

    runs: Sequence[EarlierRun]
    free_estimates: Sequence[EarlierRun]
    """The script's free estimates; read only if there are no runs."""

    @property
    def measures_scaling(self) -> bool:
        """Whether the runs that an estimate uses had different numbers of nodes, and so show the efficiency."""
        return len({run.nodes for run in _most_similar(self.runs).runs}) > 1


def history(purchase: Purchase) -> History:
    """Read the earlier runs for `estimate_from`."""
    runs = earlier_runs(purchase)
    return History(runs, () if runs else free_estimate_runs(purchase))


def estimate(purchase: Purchase) -> Estimate:
    """Estimate a purchase's total time: from earlier runs, else free estimates, else the product's reference speed."""
    return estimate_from(history(purchase), purchase)


def estimate_from(earlier: History, purchase: Purchase) -> Estimate:
    """Estimate a purchase's total time from its `history`; if that is empty, from the product's reference speed."""
    if from_runs := estimate_from_runs(earlier.runs, nodes=purchase.nodes, epochs=purchase.epochs):
        return from_runs
    measured = _estimate_from_free_estimates(earlier.free_estimates, nodes=purchase.nodes, epochs=purchase.epochs)
    if measured:
        return measured
    # The reference speed is taken to grow linearly with the number of nodes.
    reference = float(purchase.product.reference_seconds_per_epoch) * purchase.epochs / purchase.nodes
    # A run cannot take longer than the customer's own time limit, so p90 is that limit if it is lower.
    if purchase.max_seconds and purchase.max_seconds < reference * REFERENCE_SPREAD:
        return Estimate(
            p50_seconds=min(reference, purchase.max_seconds), p90_seconds=purchase.max_seconds, source="customer"
        )
    return Estimate(p50_seconds=reference, p90_seconds=reference * REFERENCE_SPREAD, source="reference")


def included_seconds(purchase: Purchase) -> int:
    """Return the running time included in a fixed price: the reference p90 on one node, times the headroom.

    Earlier runs do not count, because slow runs would give more node time at the same price. The time is the same for
    any number of nodes: more nodes give more node time, but the price grows with them.
    """
    product = purchase.product
    p90 = product.reference_seconds_per_epoch * purchase.epochs * Decimal(str(REFERENCE_SPREAD))
    return min(product.max_seconds, math.ceil(p90 * product.headroom))


# --- Earlier runs -----------------------------------------------------------------------------------------------------


def earlier_runs(purchase: Purchase) -> list[EarlierRun]:
    """Return the latest runs of this script on this node spec that completed in one attempt.

    All have as many workers per node as the purchase. Elastic runs whose number of nodes changed are left out.
    """
    versions = {version.pk for version in purchase.dataset_versions}
    return _earlier_runs_matching(_code_filter(purchase), purchase.workers_per_node, purchase.batch_size, versions)


def earlier_runs_like(job: Job) -> list[EarlierRun]:
    """Return the latest runs of a job's script on its node spec, as `earlier_runs` does for a purchase's script."""
    code_filter = {"organization": job.organization_id, "code_key": job.code_key, "node_spec": job.node_spec_id}
    versions = set(JobDataset.objects.filter(job=job).values_list("version", flat=True))
    return _earlier_runs_matching(code_filter, job.workers_per_node, job.batch_size, versions)


def _earlier_runs_matching(
    code_filter: Mapping[str, Any], workers_per_node: int, batch_size: int, versions: set[int]
) -> list[EarlierRun]:
    """Return the completed runs that match `code_filter`, compared with a batch size and ids of dataset versions.

    `code_filter` is a result of `_code_filter`, or has the same keys.
    """
    runs = _completed_first_attempts(code_filter, workers_per_node)
    candidates = [
        EarlierRun(
            nodes=nodes,
            epochs=epochs,
            seconds=(finished_at - started_at).total_seconds(),
            has_same_batch=run_batch_size == batch_size,
            has_same_data=set(run_versions) == versions,
        )
        for epochs, run_batch_size, started_at, finished_at, spans, nodes, run_versions in runs
        if started_at and finished_at and len(spans) <= 1  # more spans: the number of nodes changed during the run
    ]
    return [run for run in candidates if run.seconds > 0]


def free_estimate_runs(purchase: Purchase) -> list[EarlierRun]:
    """Return the free estimates of this script. One that the time limit ended counts up to its last finished epoch."""
    jobs = (
        _runs_of(_code_filter(purchase))
        .filter(free_runs.FREE_ESTIMATES, epoch__gt=0, workers_per_node=purchase.workers_per_node)
        .filter(reason__in=[EndReason.COMPLETED, EndReason.TIME_LIMIT], started_at__isnull=False)
        .annotate(versions=_version_ids("pk"))
        .order_by("-id")[:MAX_RUNS]
    )
    purchased_versions = {version.pk for version in purchase.dataset_versions}
    result = []
    for job in jobs:
        if job.started_at is None or job.finished_at is None:
            continue
        # A run that reached its time limit was cut off during an epoch, whose time does not count. If the end of the
        # last finished epoch is unknown, all the time counts.
        last_epoch_at = telemetry.epoch_finished_at(job) if job.reason == EndReason.TIME_LIMIT else None
        until = last_epoch_at or job.finished_at
        seconds = (until - job.started_at).total_seconds()
        if seconds > 0:
            result.append(
                EarlierRun(
                    nodes=1,
                    epochs=job.epoch,
                    seconds=seconds,
                    has_same_batch=job.batch_size == purchase.batch_size,
                    has_same_data=set(job.versions) == purchased_versions,
                )
            )
    return result


def _code_filter(purchase: Purchase) -> dict[str, Any]:
    """Return the filter for jobs with the purchase's script (`Purchase.code_key`) on its node spec."""
    organization = purchase.workspace.organization_id
    return {"organization": organization, "code_key": purchase.code_key, "node_spec": purchase.node_spec}


def _runs_of(code_filter: Mapping[str, Any]) -> QuerySet[Job]:
    """Return the trainings that match `code_filter`: no checks and no notebooks, which run a script of the platform."""
    return Job.objects.filter(builtin_script="", **code_filter)


def _completed_first_attempts(
    code_filter: Mapping[str, Any], workers_per_node: int
) -> QuerySet[Attempt, tuple[Any, ...]]:
    """Return epochs, batch size, start, end, spans, nodes and the ids of dataset versions of runs, newest first.

    A first attempt that completed was the job's only one. Spans are periods with one number of nodes (`Attempt.spans`).
    Every quote makes this query, so it reads only these columns.
    """
    succeeded = _runs_of(code_filter).filter(state=JobState.SUCCEEDED, workers_per_node=workers_per_node)
    # Limited, because an organization may have run the same code 100,000 times.
    latest = succeeded.filter(started_at__isnull=False, finished_at__isnull=False).order_by("-pk")[:MAX_JOBS_SEARCHED]
    return (
        Attempt.objects.filter(number=1, reason=EndReason.COMPLETED, job__in=latest.values("pk"))
        .order_by("-job_id")
        .values_list("job__epochs", "job__batch_size", "job__started_at", "job__finished_at", "spans", "granted_nodes")
        .annotate(versions=_version_ids("job"))[:MAX_RUNS]
    )


def _version_ids(job: str) -> ArraySubquery:
    """Return the ids of the dataset versions of the job whose id is in the column `job`."""
    return ArraySubquery(JobDataset.objects.filter(job=OuterRef(job)).order_by().values("version"))


# --- Estimates (pure) ------------------------------------------------------------------------------------------------


def estimate_from_runs(runs: Sequence[EarlierRun], *, nodes: int, epochs: int) -> Estimate | None:
    """Estimate a run of `epochs` on `nodes` from earlier runs; None if there are none.

    The most similar runs are used: those with the same data and batch size, else with the same data, else all. If some
    of them had this number of nodes, only those count. Otherwise those with the closest number are scaled.
    """
    similar, p90_factor = _most_similar(runs)
    if not similar:
        return None
    counts = {run.nodes for run in similar}
    paces = {count: pace_of([run for run in similar if run.nodes == count]) for count in counts}
    if nodes in paces:
        pace = paces[nodes]
        p50 = pace.seconds(epochs)
        return _from_history(p50, p90_factor * _p90_ratio(pace.ratios), runs=len(pace.ratios))
    scaling = _scaling({count: pace.seconds(epochs) for count, pace in paces.items()})
    # The closest number by ratio: 2 and 8 nodes are equally close to 4. Of two such numbers the smaller one is used.
    closest = min(paces, key=lambda count: (abs(math.log(count / nodes)), count))
    exponent = ASSUMED_SCALING if scaling is None else scaling
    p50 = paces[closest].seconds(epochs) * (closest / nodes) ** exponent
    ratios = [ratio for pace in paces.values() for ratio in pace.ratios]
    p90_factor *= UNMEASURED_SPREAD if scaling is None else SCALED_SPREAD
    return _from_history(
        p50,
        p90_factor * _p90_ratio(ratios),
        runs=len(ratios),
        measured_nodes=tuple(sorted(paces)),
        efficiency=None if scaling is None else round((nodes / closest) ** (scaling - 1), 3),
    )


def pace_of(runs: Sequence[EarlierRun]) -> Pace:
    """Return the pace of runs on one number of nodes.

    If the runs had different numbers of epochs, the time per epoch is the median slope over all pairs of runs. Outliers
    hardly change it (Theil-Sen estimator). With fewer than MIN_RUNS_FOR_START_UP runs, or if the start-up time were
    negative, all time is attributed to the epochs.
    """
    if len({run.epochs for run in runs}) > 1 and len(runs) >= MIN_RUNS_FOR_START_UP:
        slopes = [
            (first.seconds - second.seconds) / (first.epochs - second.epochs)
            for first, second in itertools.combinations(runs, 2)
            if first.epochs != second.epochs
        ]
        epoch_seconds = statistics.median(slopes)
        start_seconds = statistics.median(run.seconds - epoch_seconds * run.epochs for run in runs)
        if epoch_seconds > 0 and start_seconds >= 0:  # otherwise the times differ for other reasons than the epochs
            ratios = tuple(run.seconds / (start_seconds + epoch_seconds * run.epochs) for run in runs)
            return Pace(start_seconds, epoch_seconds, ratios)
    epoch_seconds = statistics.median(run.seconds / run.epochs for run in runs)
    return Pace(0.0, epoch_seconds, tuple(run.seconds / (epoch_seconds * run.epochs) for run in runs))


def _estimate_from_free_estimates(runs: Sequence[EarlierRun], *, nodes: int, epochs: int) -> Estimate | None:
    """Estimate a run from free estimates, which all ran on one node; None if there are none.

    The most similar ones are used, as in `estimate_from_runs`.
    """
    similar, p90_factor = _most_similar(runs)
    if not similar:
        return None
    pace = pace_of(similar)
    p50 = pace.seconds(epochs) / nodes**ASSUMED_SCALING
    p90_factor *= FREE_ESTIMATE_SPREAD * (1 if nodes == 1 else UNMEASURED_SPREAD) * _p90_ratio(pace.ratios)
    return Estimate(round(p50, 3), round(p50 * p90_factor, 3), "probe", len(similar))


class _SimilarRuns(NamedTuple):
    """Earlier runs that are equally similar to the purchase, and the factor on p90 for their differences from it."""

    runs: Sequence[EarlierRun]
    p90_factor: float


def _most_similar(runs: Sequence[EarlierRun]) -> _SimilarRuns:
    """Return the runs that are most similar to the purchase; no runs if there are none."""
    groups = [
        _SimilarRuns([run for run in runs if run.has_same_data and run.has_same_batch], 1.0),
        _SimilarRuns([run for run in runs if run.has_same_data], OTHER_BATCH_SPREAD),
        _SimilarRuns(runs, OTHER_DATA_SPREAD),
    ]
    return next((group for group in groups if group.runs), _SimilarRuns([], 1.0))


def _scaling(seconds: dict[int, float]) -> float | None:
    """Return the measured exponent by which speed grows with nodes; None if all runs had the same number of nodes.

    `seconds` is the time by number of nodes. The exponent is limited to -1..1: a speed that grows faster than the
    number of nodes is noise.
    """
    slopes = [
        math.log(seconds[fewer] / seconds[more]) / math.log(more / fewer)
        for fewer, more in itertools.combinations(sorted(seconds), 2)
    ]
    return max(-1.0, min(1.0, statistics.median(slopes))) if slopes else None


def _from_history(
    p50: float, p90_factor: float, *, runs: int, measured_nodes: tuple[int, ...] = (), efficiency: float | None = None
) -> Estimate:
    """Return an estimate from `runs` runs. Its p90 is `p90_factor` times p50, and at least p50.

    If the runs had other numbers of nodes, these are `measured_nodes`. `efficiency` is then the measured share of
    linear scaling, or None if a share was assumed.
    """
    p90 = p50 * max(1.0, p90_factor)
    return Estimate(round(p50, 3), round(p90, 3), "history", runs, measured_nodes, efficiency)


def _p90_ratio(ratios: Iterable[float]) -> float:
    """Return the 90th percentile of the ratios of actual to fitted times, with a minimum if there are few runs."""
    values = list(ratios)
    p90 = values[0] if len(values) == 1 else statistics.quantiles(values, n=10, method="inclusive")[-1]
    return max(p90, FEW_RUNS_SPREAD if len(values) < FEW_RUNS else 1.0)


# --- Accuracy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EstimateOutcome:
    """A completed run compared with its quote."""

    job: Job
    source: str
    p50_seconds: float
    p90_seconds: float
    actual_seconds: float

    @property
    def error(self) -> float:
        """Return the relative error of p50: 0.2 means that the run took 20% longer."""
        return self.actual_seconds / self.p50_seconds - 1 if self.p50_seconds else 0.0

    @property
    def saved_share(self) -> float:
        """Return the share of p50 that the run did not need; negative if the run took longer than p50."""
        return -self.error

    @property
    def is_within_p90(self) -> bool:
        """Whether the run took no longer than its p90."""
        return self.actual_seconds <= self.p90_seconds


def outcome(job: Job) -> EstimateOutcome | None:
    """Compare a job, loaded with its quote, with its estimate; None if it did not complete or was a free run."""
    basis = job.order.quote.basis  # the estimate, as the quote stores it; that of a free run is only its time limit
    is_complete = job.state == JobState.SUCCEEDED and basis.get("source") != "free"
    if not is_complete or job.started_at is None or job.finished_at is None:
        return None
    return EstimateOutcome(
        job=job,
        source=str(basis.get("source", "")),
        p50_seconds=float(basis["p50_seconds"]),
        p90_seconds=float(basis["p90_seconds"]),
        actual_seconds=(job.finished_at - job.started_at).total_seconds(),
    )


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of the estimates of runs that ended in one ISO week, for one source of estimates or for all (`all`).

    Errors are fractions.
    """

    week: str
    source: str
    runs: int
    median_error: float
    """Median of the absolute errors of p50."""
    within_p90: float
    """Share of the runs that took no longer than p90; 0.9 is the target."""


def accuracy(outcomes: Iterable[EstimateOutcome]) -> list[Accuracy]:
    """Return the accuracy by week and source, newest week first. Free runs are left out. Pure."""
    groups: dict[str, dict[str, list[EstimateOutcome]]] = {}  # by week and source
    for each in outcomes:
        finished_at = each.job.finished_at
        if finished_at is None or not each.p50_seconds or each.source == "free":
            continue
        week = f"{finished_at.isocalendar().year}-W{finished_at.isocalendar().week:02d}"
        for source in (each.source, "all"):
            groups.setdefault(week, {}).setdefault(source, []).append(each)
    return [
        Accuracy(
            week,
            source,
            len(group),
            statistics.median(abs(each.error) for each in group),
            sum(each.is_within_p90 for each in group) / len(group),
        )
        for week, by_source in sorted(groups.items(), reverse=True)
        for source, group in sorted(by_source.items(), key=lambda item: (item[0] != "all", item[0]))  # `all` first
    ]


def completed_jobs() -> QuerySet[Job]:
    """Return completed, paid runs with their quotes, newest first."""
    return (
        Job.objects.filter(state=JobState.SUCCEEDED, builtin_script="", order__quote__ceiling_minor__gt=0)
        .select_related("order__quote", "organization", "node_spec")
        .order_by(F("finished_at").desc())
    )

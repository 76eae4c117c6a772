"""How long a run will take, learnt from earlier runs of the same code on the same kind of node.

Hides the reckoning: a start-up time and a time for each epoch where runs of several lengths tell them apart, scaled
over nodes by the efficiency that runs on several node counts show. The one rule: only runs that went through in one go
are learnt from, and an estimate says how many they were; what is guessed widens p90, never p50.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib.postgres.expressions import ArraySubquery
from django.db.models import Case, F, Min, OuterRef, QuerySet, When

from billing.pricing import Estimate
from console.operations.kept import Kept, given
from jobs.models import Attempt, Job, JobDataset, MetricPoint
from jobs.purchase import Purchase
from jobs.states import EndReason, JobState

RUNS_LEARNT_FROM = 60
FEW_RUNS = 5
FEW_RUNS_SPREAD = 1.2
"""p90 over p50 of a few runs at least: that they took about the same time doesn't show how far the next may stray."""
OTHER_BATCH_SPREAD = 1.2
OTHER_DATA_SPREAD = 1.5
SCALED_SPREAD = 1.2
UNMEASURED_SPREAD = 1.5
"""What p90 is widened by where no run had this batch size, these dataset versions, this number of nodes, and where runs
on one number of nodes alone can't show how the code scales."""
USUAL_SCALING = 0.8
"""The exponent of speed over nodes where it was not measured: twice the nodes are 1.74 times as fast."""
REFERENCE_SPREAD = 1.5
PROBE_SPREAD = 1.5
LEAST_RUNS_FOR_A_START = 4


@dataclass(frozen=True)
class Sample:
    """One earlier run: on how many nodes, over how many epochs, in how many seconds, and what it had in common."""

    nodes: int
    epochs: float
    seconds: float
    same_batch: bool = True
    same_data: bool = True


@dataclass(frozen=True)
class Pace:
    """Seconds of runs on one number of nodes: `start`, and `epoch` for each. `ratios` are actual over predicted."""

    start: float
    epoch: float
    ratios: tuple[float, ...]

    def seconds(self, epochs: float) -> float:
        """Of a run of so many epochs."""
        return self.start + self.epoch * epochs


def estimate(purchase: Purchase) -> Estimate:
    """How long a purchase will take, whole: from earlier runs, else a probe, else the product's reference speed."""
    runs = samples(purchase)
    if learnt := learn(runs, nodes=purchase.nodes, epochs=purchase.epochs):
        return learnt
    if probed := _from_probes(probe_samples(purchase), nodes=purchase.nodes, epochs=purchase.epochs):
        return probed
    reference = float(purchase.product.reference_seconds_per_epoch) * purchase.epochs / purchase.nodes
    if purchase.max_seconds and purchase.max_seconds < reference * REFERENCE_SPREAD:
        return Estimate(min(reference, purchase.max_seconds), purchase.max_seconds, "customer")
    return Estimate(reference, reference * REFERENCE_SPREAD, "reference")


# --- What there is to learn from --------------------------------------------------------------------------------------


def samples(purchase: Purchase) -> list[Sample]:
    """The last runs of this script on this kind of node that went through in one go, on one number of nodes."""
    wanted = {version.pk for version in purchase.dataset_versions}
    # A first attempt that completed was the only one. Its columns alone are read: every quote does this.
    runs = _WENT_THROUGH.all(**_code_of(purchase), workers_per_node=purchase.workers_per_node)
    found = [
        Sample(
            nodes=nodes,
            epochs=epochs,
            seconds=(finished_at - started_at).total_seconds(),
            same_batch=batch_size == purchase.batch_size,
            same_data=set(data) == wanted,
        )
        for epochs, batch_size, started_at, finished_at, spans, nodes, data in runs
        if started_at and finished_at and len(spans) <= 1
    ]
    return [sample for sample in found if sample.seconds > 0]


def probe_samples(purchase: Purchase) -> list[Sample]:
    """What free probes of this script saw: how far each came, by the moments of its metrics, else by its end."""
    probes = (
        _runs_of(_code_of(purchase))
        .filter(order__quote__purchase__has_key="probe", epoch__gt=0)
        .filter(reason__in=[EndReason.COMPLETED, EndReason.TIME_LIMIT], started_at__isnull=False)
        .order_by("-id")[:RUNS_LEARNT_FROM]
    )
    found = []
    for probe in probes:
        if probe.started_at is None or probe.finished_at is None:
            continue
        # An epoch is told when it is done: what came after the last one was no whole epoch.
        reached = MetricPoint.objects.filter(job=probe, epoch__gte=probe.epoch).aggregate(at=Min("at"))["at"]
        until = reached if probe.reason == EndReason.TIME_LIMIT and reached else probe.finished_at
        seconds = (until - probe.started_at).total_seconds()
        if seconds > 0:
            found.append(Sample(1, probe.epoch, seconds, same_batch=probe.batch_size == purchase.batch_size))
    return found


def _code_of(purchase: Purchase) -> dict[str, Any]:
    """What runs of the same code on the same kind of node have in common."""
    organization = purchase.workspace.organization_id
    return {"organization": organization, "code_key": purchase.code_key, "node_spec": purchase.node_spec}


def _runs_of(code: Mapping[str, Any]) -> QuerySet[Job]:
    return Job.objects.filter(builtin_script="", **code)


_WENT_THROUGH = Kept(
    lambda: (
        Attempt.objects.filter(number=1, reason=EndReason.COMPLETED)
        .filter(job__in=_runs_of({name: given(name) for name in ("organization", "code_key", "node_spec")}))
        .filter(job__state=JobState.SUCCEEDED, job__workers_per_node=given("workers_per_node"))
        .filter(job__started_at__isnull=False, job__finished_at__isnull=False)
        .order_by("-job_id")
        .values_list("job__epochs", "job__batch_size", "job__started_at", "job__finished_at", "spans")
        .annotate(
            ran_on=Case(When(granted_nodes__gt=0, then="granted_nodes"), default="job__nodes"),
            data=ArraySubquery(JobDataset.objects.filter(job=OuterRef("job")).order_by().values("version")),
        )[:RUNS_LEARNT_FROM]
    )
)


# --- What it says: pure -----------------------------------------------------------------------------------------------


def learn(runs: Sequence[Sample], *, nodes: int, epochs: int) -> Estimate | None:
    """An estimate for a run of `epochs` on `nodes`, from earlier ones; None where there are none.

    The runs nearest to it are taken: the same data and batch size, else the same data, else any. Runs on as many nodes
    count alone; without one, those of the nearest number of nodes are scaled.
    """
    near, spread = _nearest(runs)
    if not near:
        return None
    paces = {count: pace_of([run for run in near if run.nodes == count]) for count in {run.nodes for run in near}}
    if nodes in paces:
        pace = paces[nodes]
        p50 = pace.seconds(epochs)
        return _told(p50, p50 * spread * _stray(pace.ratios), len(pace.ratios))
    scaling = _scaling({count: pace.seconds(epochs) for count, pace in paces.items()})
    base = min(paces, key=lambda count: (abs(math.log(count / nodes)), count))
    alpha = USUAL_SCALING if scaling is None else scaling
    p50 = paces[base].seconds(epochs) * (base / nodes) ** alpha
    ratios = [ratio for pace in paces.values() for ratio in pace.ratios]
    spread *= SCALED_SPREAD if scaling is not None else UNMEASURED_SPREAD
    estimated = _told(p50, p50 * spread * _stray(ratios), len(ratios))
    return Estimate(
        estimated.p50_seconds,
        estimated.p90_seconds,
        "history",
        estimated.runs,
        measured_nodes=tuple(sorted(paces)),
        efficiency=None if scaling is None else round((nodes / base) ** (scaling - 1), 3),
    )


def pace_of(runs: Sequence[Sample]) -> Pace:
    """The pace of runs on one number of nodes.

    Runs of different lengths tell the start-up time from that of an epoch (by the median of all pairs, which no single
    odd run bends); from fewer, all of the time is the epochs'.
    """
    lengths = {run.epochs for run in runs}
    if len(lengths) > 1 and len(runs) >= LEAST_RUNS_FOR_A_START:
        slopes = [
            (one.seconds - other.seconds) / (one.epochs - other.epochs)
            for one, other in itertools.combinations(runs, 2)
            if one.epochs != other.epochs
        ]
        epoch = statistics.median(slopes)
        start = statistics.median(run.seconds - epoch * run.epochs for run in runs)
        if epoch > 0 and start >= 0:
            return Pace(start, epoch, tuple(run.seconds / (start + epoch * run.epochs) for run in runs))
    epoch = statistics.median(run.seconds / run.epochs for run in runs)
    return Pace(0.0, epoch, tuple(run.seconds / (epoch * run.epochs) for run in runs))


def _from_probes(probes: Sequence[Sample], *, nodes: int, epochs: int) -> Estimate | None:
    if not probes:
        return None
    pace = pace_of(probes)
    p50 = pace.seconds(epochs) / nodes**USUAL_SCALING
    spread = PROBE_SPREAD * (1 if nodes == 1 else UNMEASURED_SPREAD) * _stray(pace.ratios)
    return Estimate(round(p50, 3), round(p50 * spread, 3), "probe", len(probes))


def _nearest(runs: Sequence[Sample]) -> tuple[list[Sample], float]:
    tiers: list[tuple[list[Sample], float]] = [
        ([run for run in runs if run.same_data and run.same_batch], 1.0),
        ([run for run in runs if run.same_data], OTHER_BATCH_SPREAD),
        (list(runs), OTHER_DATA_SPREAD),
    ]
    return next(((kept, spread) for kept, spread in tiers if kept), ([], 1.0))


def _scaling(seconds: dict[int, float]) -> float | None:
    """The exponent of speed over nodes that runs on several node counts show; None for one count alone.

    Not above 1 (no code gains more than the nodes it gets, for long) nor below -1.
    """
    slopes = [
        math.log(seconds[one] / seconds[other]) / math.log(other / one)
        for one, other in itertools.combinations(sorted(seconds), 2)
    ]
    return max(-1.0, min(1.0, statistics.median(slopes))) if slopes else None


def _told(p50: float, p90: float, runs: int) -> Estimate:
    return Estimate(round(p50, 3), round(max(p50, p90), 3), "history", runs)


def _stray(ratios: Iterable[float]) -> float:
    """How far 9 of 10 runs stay under their prediction; a few runs leave room for the next."""
    known = sorted(ratios)
    p90 = known[0] if len(known) == 1 else statistics.quantiles(known, n=10, method="inclusive")[-1]
    return max(p90, FEW_RUNS_SPREAD if len(known) < FEW_RUNS else 1.0)


# --- How good it was --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A completed run beside its quote."""

    job: Job
    source: str
    p50_seconds: float
    p90_seconds: float
    actual_seconds: float

    @property
    def error(self) -> float:
        """Actual over estimated, less 1: 0.2 is a fifth longer."""
        return self.actual_seconds / self.p50_seconds - 1 if self.p50_seconds else 0.0

    @property
    def shorter(self) -> float:
        """The same of a run that took less, as a positive fraction."""
        return -self.error

    @property
    def is_within_p90(self) -> bool:
        """Whether it took no longer than 9 of 10 should."""
        return self.actual_seconds <= self.p90_seconds


def outcome(job: Job) -> Outcome | None:
    """A job beside its quote; None for one that did not complete. Its quote is loaded."""
    if job.state != JobState.SUCCEEDED or job.started_at is None or job.finished_at is None:
        return None
    basis = job.order.quote.basis
    return Outcome(
        job=job,
        source=str(basis.get("source", "")),
        p50_seconds=float(basis["p50_seconds"]),
        p90_seconds=float(basis["p90_seconds"]),
        actual_seconds=(job.finished_at - job.started_at).total_seconds(),
    )


@dataclass(frozen=True)
class Accuracy:
    """How good the estimates of a week were, of one source or all. Errors as fractions."""

    week: str
    source: str
    runs: int
    median_error: float
    """Half of the runs missed p50 by less, in either direction."""
    within_p90: float
    """What share took no longer than p90; 0.9 is what it should be."""


def accuracy(outcomes: Iterable[Outcome]) -> list[Accuracy]:
    """Week by week and source by source, the newest first; `all` stands for every source. Pure."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for each in outcomes:
        ended = each.job.finished_at
        if ended is None or not each.p50_seconds or each.source == "free":
            continue
        week = f"{ended.isocalendar().year}-W{ended.isocalendar().week:02d}"
        for source in (each.source, "all"):
            groups.setdefault((week, source), []).append(each)
    return [
        Accuracy(
            week,
            source,
            len(kept),
            statistics.median(abs(each.error) for each in kept),
            sum(each.is_within_p90 for each in kept) / len(kept),
        )
        for week in sorted({week for week, _source in groups}, reverse=True)
        for source in sorted({source for _week, source in groups}, key=lambda name: (name != "all", name))
        if (kept := groups.get((week, source)))
    ]


def completed_jobs() -> QuerySet[Job]:
    """Runs that completed and were paid for, with their quotes, newest first."""
    return (
        Job.objects.filter(state=JobState.SUCCEEDED, builtin_script="", order__quote__ceiling_minor__gt=0)
        .select_related("order__quote", "organization", "node_spec")
        .order_by(F("finished_at").desc())
    )

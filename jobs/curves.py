"""Curves of jobs for charts, tables and exports: each point with its epoch, time and money spent. Reads only."""

from __future__ import annotations

import bisect
import enum
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import Count, Max, Min
from django.utils import timezone

from billing.pricing import SECONDS_PER_HOUR, Terms
from jobs import usage
from jobs.models import Attempt, Job, MetricPoint
from jobs.points import thinned_indexes

POINTS_SHOWN = 1000
"""Points per curve in one response, more than a chart has pixels. A longer curve is thinned so that its lowest and
highest values remain."""


class Better(enum.StrEnum):
    """Which values of a curve are better."""

    LOWER = "lower"
    HIGHER = "higher"
    UNKNOWN = ""
    """Empty, so that it counts as false."""


LOWER_IS_BETTER = frozenset(
    {"loss", "error", "err", "perplexity", "ppl", "mse", "rmse", "mae", "nll", "wer", "cer", "fid", "bce", "entropy"}
)
HIGHER_IS_BETTER = frozenset(
    {"accuracy", "acc", "top1", "top5", "f1", "auc", "precision", "recall", "bleu", "rouge", "map", "iou", "dice"}
    | {"score", "reward", "return", "r2", "psnr", "ssim"}
)
"""Words in the names of curves whose best value is the lowest, and of those whose best value is the highest."""


def name_words(name: str) -> set[str]:
    """Return the words in the name of a curve: `val` and `loss` for `val/loss`."""
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def better(name: str) -> Better:
    """Return which values of the curve are better, by the words of its name."""
    words = name_words(name)
    if words & LOWER_IS_BETTER:
        return Better.LOWER
    return Better.HIGHER if words & HIGHER_IS_BETTER else Better.UNKNOWN


class Spending:
    """The cost of a job's node time up to any moment: the node-seconds billed until then, at the quote's price.

    The minimum charge and the price of completed epochs are left out, because they do not grow with time. The cost
    never exceeds the ceiling. A free run costs 0.
    """

    def __init__(self, job: Job, attempts: Iterable[Attempt], now: datetime) -> None:
        terms = Terms.from_json(job.order.quote.terms)
        self._per_second = float(terms.hourly) / SECONDS_PER_HOUR  # minor units per node-second
        self._ceiling_minor = job.order.hold.amount_minor
        self._moments: list[float] = []  # starts and ends of the billed spans, in Unix seconds
        self._node_seconds: list[float] = []  # node-seconds billed up to each moment
        used = 0.0
        for attempt in attempts:
            for nodes, began_at, ended_at in usage.billed_spans(attempt, now):
                self._moments += [began_at.timestamp(), ended_at.timestamp()]
                used_before, used = used, used + nodes * (ended_at - began_at).total_seconds()
                self._node_seconds += [used_before, used]

    @property
    def is_free(self) -> bool:
        """Whether node time costs nothing."""
        return self._per_second == 0

    def cost_minor(self, at: datetime) -> float:
        """Return the cost until `at`, in minor units with fractions."""
        moment = at.timestamp()
        index = bisect.bisect_right(self._moments, moment)  # of the first moment after `at`
        if index == 0:
            return 0.0
        node_seconds = self._node_seconds[index - 1]
        if index < len(self._moments):
            # Interpolate between two moments. Between two spans both have the same node-seconds, so nothing is added.
            previous, following = self._moments[index - 1], self._moments[index]
            node_seconds += (self._node_seconds[index] - node_seconds) * (moment - previous) / (following - previous)
        return min(float(self._ceiling_minor), node_seconds * self._per_second)


@dataclass
class Curve:
    """One curve of a job, as lists of equal length: point by point, sorted by attempt and step.

    `step` continues where the script restarts its count (`MetricPoint.position`); `reported_step` and `epoch` are as
    reported. `seconds` count from the job's first start; `cost_minor` comes from `Spending`.
    """

    name: str
    attempt: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    reported_step: list[int] = field(default_factory=list)
    epoch: list[float | None] = field(default_factory=list)
    at: list[datetime] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cost_minor: list[float] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    @property
    def better(self) -> Better:
        """Return which values are better."""
        return better(self.name)

    def keep(self, indexes: Sequence[int]) -> None:
        """Keep only the points at these indexes."""
        for name in COLUMNS:
            column = getattr(self, name)
            setattr(self, name, [column[index] for index in indexes])


COLUMNS = ("attempt", "step", "reported_step", "epoch", "at", "seconds", "cost_minor", "value")
"""The lists of a `Curve`."""


@dataclass(frozen=True)
class Curves:
    """The curves of a job, sorted by name."""

    job_id: int
    currency: str
    is_free: bool
    last: int
    """Highest id of the job's points so far. `after=last` in the next call returns only newer points."""
    kept_every: int
    """n if only every nth point is stored, because the job reported more than `telemetry.MAX_POINTS`; 1 if all are."""
    curves: list[Curve]


def curves(job: Job, *, after: int = 0, limit: int | None = POINTS_SHOWN, name: str = "") -> Curves:
    """Return the curves of a job from points with an id above `after`; with `name` only that curve.

    A curve with more than `limit` points is thinned to about that number.
    """
    now = timezone.now()
    attempts = list(job.attempts.all())
    spending = Spending(job, attempts, now)
    by_number = {attempt.number: attempt for attempt in attempts}
    origin = min((each.started_at for each in attempts if each.started_at), default=job.queued_at)
    by_name: dict[str, Curve] = {}
    last = after
    points = MetricPoint.objects.filter(job=job, pk__gt=after).order_by("attempt", "position", "pk")
    if name:
        points = points.filter(name=name)
    columns = ("pk", "attempt", "name", "position", "step", "epoch", "value", "at")
    for pk, attempt, curve_name, position, step, epoch, value, at in points.values_list(*columns):
        last = max(last, pk)
        curve = by_name.setdefault(curve_name, Curve(curve_name))
        moment = _within(at, by_number.get(attempt), origin)
        curve.attempt.append(attempt)
        curve.step.append(position)
        curve.reported_step.append(step)
        curve.epoch.append(epoch)
        curve.at.append(at)
        curve.seconds.append(round((moment - origin).total_seconds(), 3))
        curve.cost_minor.append(round(spending.cost_minor(moment), 4))
        curve.value.append(value)
    if limit is not None:
        for curve in by_name.values():
            if len(curve.value) > limit:
                curve.keep(thinned_indexes(curve.value, limit))
    # `telemetry` keeps its state, such as `kept_every`, in `Attempt.cursor`.
    kept_every = max((each.cursor.get("kept_every", 1) for each in attempts), default=1)
    return Curves(
        job_id=job.pk,
        currency=job.order.quote.currency,
        is_free=spending.is_free,
        last=last,
        kept_every=kept_every,
        curves=[by_name[each] for each in sorted(by_name)],
    )


def _within(at: datetime, attempt: Attempt | None, origin: datetime) -> datetime:
    """Return a reported time, limited to the running time of its attempt: customers' code may report any time.

    `origin`, the job's first start, replaces an unknown start.
    """
    started_at = (attempt.started_at if attempt else None) or origin
    finished_at = attempt.finished_at if attempt else None
    return max(started_at, min(at, finished_at) if finished_at else at)


@dataclass(frozen=True)
class Extent:
    """The number of points of a curve, and its lowest and highest values."""

    name: str
    points: int
    lowest: float
    highest: float

    @property
    def best(self) -> float | None:
        """Return the best value; None if it is unknown which values are better."""
        return {Better.LOWER: self.lowest, Better.HIGHER: self.highest}.get(better(self.name))


def extents(jobs: Sequence[Job]) -> dict[int, dict[str, Extent]]:
    """Return the extents of the jobs' curves, by job id and curve name."""
    rows = (
        MetricPoint.objects.filter(job__in=jobs)
        .order_by("name")
        .values_list("job", "name")
        .annotate(points=Count("pk"), lowest=Min("value"), highest=Max("value"))
    )
    by_job: dict[int, dict[str, Extent]] = {job.pk: {} for job in jobs}
    for job, name, points, lowest, highest in rows:
        by_job[job][name] = Extent(name, points, lowest, highest)
    return by_job


def other_runs(job: Job, limit: int) -> list[Job]:
    """Return the latest other jobs with the same script in the same workspace that have started, newest first."""
    runs = Job.objects.filter(organization=job.organization_id, code_key=job.code_key, builtin_script="")
    return list(
        runs.exclude(pk=job.pk)
        .filter(started_at__isnull=False)
        .select_related("order__quote", "order__hold", "node_spec", "image")
        .order_by("-pk")[:limit]
    )


CSV_HEADER = ("curve", "attempt", "step", "reported_step", "epoch", "time", "seconds", "cost_minor", "value")


def csv_rows(job_curves: Curves) -> Iterator[tuple[Any, ...]]:
    """Yield a row of cells for each point, in the order of CSV_HEADER."""
    for curve in job_curves.curves:
        columns = (curve.attempt, curve.step, curve.reported_step, curve.epoch)
        times = (each.isoformat() for each in curve.at)
        for row in zip(*columns, times, curve.seconds, curve.cost_minor, curve.value, strict=True):
            yield (curve.name, *("" if cell is None else cell for cell in row))

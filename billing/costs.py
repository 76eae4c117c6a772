"""Cost reports: spend by day, member, workspace and node spec; open holds; the month's forecast. Read-only.

A cost counts on the day on which its run ended and was charged. Open holds are not yet spend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

from django.db.models import CharField, Count, F, Q, QuerySet, Sum, Value
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Coalesce, TruncDate
from django.utils import timezone

from billing.models import Account, Hold, Invoice, Receipt
from console.accounts.models import Organization
from console.accounts.zones import installation_time
from console.core import optional_cache

DIMENSIONS = ("member", "workspace", "node_spec")
"""The dimensions by which spend can be grouped."""
MAX_SERIES = 6
"""Largest number of series in a chart: a reader can tell six colors apart. If there are more groups, the last series
adds up the smallest ones."""
OTHER_SERIES = "…"
"""Name of the series that adds up the smallest groups."""
MAX_MONTHS = 12
"""Number of months that the page of costs offers: a year. An older month can still be opened by its URL."""
PAST_DAYS_DELAY = timedelta(hours=1)
"""How long after its end a day's spend is final. A receipt of the day can become visible after midnight, when the
receipt's transaction commits; no such transaction takes nearly an hour."""
PAST_DAYS_KEPT_SECONDS = 3600
"""How long the spend of past days is cached. A member's changed email address appears in reports after this time."""
FORECAST_DAYS = 14
"""Days of recent spend that a forecast continues: two weeks level out weekends."""


@dataclass(frozen=True)
class Month:
    """A calendar month in the installation's time zone. `end` is the first moment of the next month."""

    start: datetime
    end: datetime

    @property
    def name(self) -> str:
        """Return the month as in URLs: `2026-11`."""
        return f"{self.start:%Y-%m}"

    @property
    def days(self) -> list[date]:
        """Return all days of the month."""
        first = self.start.date()
        return [first + timedelta(days=day) for day in range((self.end.date() - first).days)]

    @property
    def previous(self) -> Month:
        """Return the previous month."""
        return month_of(self.start - timedelta(days=1))

    @property
    def is_current(self) -> bool:
        """Return whether this is the current month."""
        return self.start <= timezone.now() < self.end


@dataclass(frozen=True)
class Spend:
    """The cost of one member's runs in one workspace on one node spec and one day.

    `member` is an email address. A name is empty if the receipt does not have it.
    """

    member: str
    workspace: str
    node_spec: str
    day: date
    amount_minor: int
    runs: int


@dataclass(frozen=True)
class Share:
    """The cost of one member, workspace or node spec in a month, and its fraction (0 to 1) of the total.

    `name` is empty for the receipts without such a name.
    """

    name: str
    amount_minor: int
    runs: int
    fraction: float


class DailySpend(NamedTuple):
    """The names of a chart's series, and for each day the amount of each series in minor units."""

    names: list[str]
    days: dict[date, list[int]]


@dataclass(frozen=True)
class Forecast:
    """The forecast of a month's cost in minor units: spent so far plus the recent daily spend until the month's end."""

    spent_minor: int
    daily_minor: Decimal
    days_left: Decimal

    @property
    def total_minor(self) -> int:
        """Return the forecast for the whole month."""
        rest_minor = (self.daily_minor * self.days_left).quantize(Decimal(1), rounding=ROUND_HALF_UP)
        return self.spent_minor + int(rest_minor)


def month_of(at: datetime | None = None) -> Month:
    """Return the month of a time (default: now)."""
    start = installation_time(at).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    # 32 days after the first of a month is always in the next month.
    return Month(start, (start + timedelta(days=32)).replace(day=1))


def parse_month(name: str) -> Month:
    """Parse a month such as `2026-11`. Returns the current month if `name` is not a month."""
    try:
        start = datetime.strptime(name, "%Y-%m").replace(tzinfo=timezone.get_default_timezone())
    except ValueError:
        return month_of()
    # Near the years 1 and 9999, the limits of `datetime`, the arithmetic of `month_of` would overflow.
    return month_of(start) if 2000 <= start.year <= 9000 else month_of()


def receipts(organization: Organization, month: Month) -> QuerySet[Receipt]:
    """Return the receipts of a month, oldest first."""
    return Receipt.objects.filter(
        organization=organization, created_at__gte=month.start, created_at__lt=month.end
    ).order_by("pk")


def spent_minor(organization: Organization, month: Month) -> int:
    """Return the total spend of a month in minor units."""
    return int(receipts(organization, month).aggregate(total=Sum("total_minor", default=0))["total"])


def returned_minor(organization: Organization, month: Month) -> int:
    """Return what the credit notes of a month returned, in minor units, without tax that was added on top."""
    notes = Invoice.objects.filter(
        organization=organization,
        kind=Invoice.Kinds.CREDIT_NOTE,
        issued_at__gte=month.start,
        issued_at__lt=month.end,
    )
    return -int(notes.aggregate(total=Sum("subtotal_minor", default=0))["total"])


def spending(organization: Organization, month: Month) -> list[Spend]:
    """Return a month's spend. `shares_by` and `by_day` group it further, so one query serves all reports.

    A month can have 100,000 receipts, but receipts never change. So the spend of past days is cached for an hour.
    """
    # The start (midnight) of the first day whose spend is not final yet.
    final_until = installation_time(timezone.now() - PAST_DAYS_DELAY).replace(hour=0, minute=0, second=0, microsecond=0)
    past_until = min(max(final_until, month.start), month.end)
    past = optional_cache.get_or_compute(
        f"billing.costs:{organization.pk}:{month.start.isoformat()}:{past_until.isoformat()}",
        lambda: _rows_of_spending(organization, month.start, past_until),
        PAST_DAYS_KEPT_SECONDS,
    )
    return [Spend(**row) for row in [*past, *_rows_of_spending(organization, past_until, month.end)]]


def _rows_of_spending(organization: Organization, start: datetime, end: datetime) -> list[dict[str, Any]]:
    """Return the fields of each Spend from `start` to `end`, both at midnight, so that no day is split."""
    rows = (
        Receipt.objects.filter(organization=organization, created_at__gte=start, created_at__lt=end)
        .annotate(
            **{dimension: _name_expression(dimension) for dimension in DIMENSIONS},
            day=TruncDate("created_at", tzinfo=timezone.get_default_timezone()),
        )
        .values(*DIMENSIONS, "day")
        # Charges for storage are no runs. `hold` is a column of the index "receipts_and_amounts", so PostgreSQL reads
        # only that index, not the table of receipts.
        .annotate(
            amount_minor=Sum("total_minor"),
            runs=Count("hold", filter=~Q(hold__reference__startswith=Hold.STORAGE_PREFIX)),
        )
        .order_by()
    )
    return list(rows) if start < end else []


def shares_by(spends: Sequence[Spend], dimension: str) -> list[Share]:
    """Return the spend grouped by one of `DIMENSIONS`, largest first, including groups that cost nothing."""
    amounts: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for spend in spends:
        name = getattr(spend, dimension)
        amounts[name] += spend.amount_minor
        runs[name] += spend.runs
    total = amounts.total() or 1  # not 0: if all groups are free, their fractions are 0
    names = sorted(amounts, key=lambda name: (-amounts[name], name))
    return [Share(name, amounts[name], runs[name], amounts[name] / total) for name in names]


def by_day(spends: Sequence[Spend], month: Month, dimension: str) -> DailySpend:
    """Return the spend of each day of a month, in one series for each group.

    Groups that cost nothing are left out. If there are more than MAX_SERIES groups, the last series is the
    sum of the smallest ones.
    """
    groups = [share.name for share in shares_by(spends, dimension) if share.amount_minor]
    names = groups if len(groups) <= MAX_SERIES else [*groups[: MAX_SERIES - 1], OTHER_SERIES]
    positions = {name: position for position, name in enumerate(names)}
    days = {day: [0] * len(names) for day in month.days}
    last = len(names) - 1  # the series of all groups that have no series of their own
    for spend in spends:
        if spend.amount_minor:
            position = positions.get(getattr(spend, dimension), last)
            days[spend.day][position] += spend.amount_minor
    return DailySpend(names, days)


def forecast(organization: Organization, spent_minor: int, now: datetime | None = None) -> Forecast:
    """Forecast the cost of the month of `now` (default: this month) from the spend of the last two weeks.

    `spent_minor` is the month's spend until then, which the callers already know.
    """
    at = now or timezone.now()
    month = month_of(at)
    since = at - timedelta(days=FORECAST_DAYS)
    recent = Receipt.objects.filter(organization=organization, created_at__gte=since, created_at__lte=at)
    first_charge = Receipt.objects.filter(organization=organization, total_minor__gt=0).order_by("created_at").first()
    period = timedelta(days=FORECAST_DAYS)
    if first_charge:  # for a new customer, average only over the time since the first charge, at least one day
        period = min(period, at - first_charge.created_at)
    recent_minor = Decimal(recent.aggregate(total=Sum("total_minor", default=0))["total"])
    return Forecast(
        spent_minor=spent_minor,
        daily_minor=recent_minor / _days(max(period, timedelta(days=1))),
        days_left=_days(month.end - at),
    )


def _days(period: timedelta) -> Decimal:
    """Return a period as a number of days."""
    return Decimal(str(period / timedelta(days=1)))


def largest_open_holds(account: Account) -> QuerySet[Hold]:
    """Return the open holds, largest first: one for each open job and one for each open sweep."""
    return account.holds.filter(state=Hold.States.HELD).select_related("placed_by").order_by("-amount_minor", "pk")


def months_with_costs(organization: Organization) -> Sequence[Month]:
    """Return the months from the first receipt to now, newest first, at most the last MAX_MONTHS."""
    first_receipt = Receipt.objects.filter(organization=organization).order_by("created_at").first()
    months = [month_of()]
    while first_receipt and months[-1].start > first_receipt.created_at and len(months) < MAX_MONTHS:
        months.append(months[-1].previous)
    return months


def _name_expression(dimension: str) -> Coalesce:
    """Return the SQL expression that gives a receipt's member, workspace or node spec."""
    sources: dict[str, F | KeyTextTransform] = {
        "member": F("hold__placed_by__email"),
        "workspace": KeyTextTransform("workspace", "hold__labels"),
        "node_spec": KeyTextTransform("node_spec", "hold__labels"),
    }
    return Coalesce(sources[dimension], Value(""), output_field=CharField())

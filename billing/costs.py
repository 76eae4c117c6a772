"""Where the money went: spend by day, member, workspace, node spec; what is held; where the month will end. Reads only.

The one rule: a cost counts on the day its run ended, when it was charged; what still runs is held, not spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal

from django.db.models import CharField, Count, F, QuerySet, Sum, Value
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Coalesce, TruncDate
from django.utils import timezone

from billing.models import Account, Hold, Receipt
from console.accounts.models import Organization

DIMENSIONS = ("member", "workspace", "node_spec")
"""What spend can be told apart by."""
NAMES_SHOWN = 6
"""In a chart; the others are one."""
OTHERS = "…"
FORECAST_DAYS = 14


@dataclass(frozen=True)
class Month:
    """A calendar month in the installation's time zone: from its first moment to the first of the next."""

    start: datetime
    end: datetime

    @property
    def name(self) -> str:
        """As in addresses: `2026-11`."""
        return f"{self.start:%Y-%m}"

    @property
    def days(self) -> list[date]:
        """Every day of it."""
        first = self.start.date()
        return [first + timedelta(days=day) for day in range((self.end.date() - first).days)]

    @property
    def before(self) -> Month:
        """The month before."""
        return month_of(self.start - timedelta(days=1))

    @property
    def after(self) -> Month:
        """The next one."""
        return month_of(self.end)

    @property
    def is_now(self) -> bool:
        """Whether it is the present one."""
        return self.start <= timezone.now() < self.end


@dataclass(frozen=True)
class Share:
    """What one member, workspace or node spec cost in a month. `name` is empty where it is not known."""

    name: str
    amount_minor: int
    runs: int
    fraction: float


@dataclass(frozen=True)
class Forecast:
    """Where this month will end, in minor units: spent so far, and as much a day as of late until its end."""

    spent_minor: int
    daily_minor: Decimal
    days_left: Decimal

    @property
    def total_minor(self) -> int:
        """The whole month."""
        rest = (self.daily_minor * self.days_left).quantize(Decimal(1), rounding=ROUND_HALF_UP)
        return self.spent_minor + int(rest)


def month_of(at: datetime | None = None) -> Month:
    """The month of a moment (now)."""
    start = timezone.localtime(at).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (start + timedelta(days=32)).replace(day=1)
    # Once more through the zone: clocks may have been set meanwhile.
    zone = timezone.get_current_timezone()
    return Month(start, datetime(following.year, following.month, 1, tzinfo=zone))


def month_named(name: str) -> Month:
    """The month of `2026-11`; the present one where that is no month."""
    try:
        wanted = datetime.strptime(name, "%Y-%m").replace(tzinfo=timezone.get_current_timezone())
    except ValueError:
        return month_of()
    return month_of(wanted) if 2000 <= wanted.year <= 9000 else month_of()


def receipts(organization: Organization, month: Month) -> QuerySet[Receipt]:
    """What was charged in a month."""
    return Receipt.objects.filter(
        organization=organization, created_at__gte=month.start, created_at__lt=month.end
    ).order_by("pk")


def spent_minor(organization: Organization, month: Month) -> int:
    """All of it."""
    return int(receipts(organization, month).aggregate(total=Sum("total_minor"))["total"] or 0)


def by(organization: Organization, month: Month, dimension: str) -> list[Share]:
    """A month's spend by one of `DIMENSIONS`, the largest first; names that cost nothing are shown too."""
    rows = list(
        receipts(organization, month)
        .annotate(name=_name(dimension))
        .values("name")
        .annotate(amount=Sum("total_minor"), runs=Count("pk"))
        .order_by("-amount", "name")
    )
    whole = sum(row["amount"] for row in rows) or 1
    return [Share(row["name"], row["amount"], row["runs"], row["amount"] / whole) for row in rows]


def by_day(organization: Organization, month: Month, dimension: str) -> tuple[list[str], dict[date, list[int]]]:
    """Spend of each day of a month, told apart: the names, and for each day an amount for each of them."""
    shares = [share.name for share in by(organization, month, dimension) if share.amount_minor]
    names = shares if len(shares) <= NAMES_SHOWN else [*shares[: NAMES_SHOWN - 1], OTHERS]
    days = {day: [0] * len(names) for day in month.days}
    rows = (
        receipts(organization, month)
        .filter(total_minor__gt=0)
        .annotate(name=_name(dimension), day=TruncDate("created_at", tzinfo=timezone.get_current_timezone()))
        .values("name", "day")
        .annotate(amount=Sum("total_minor"))
        .order_by()
    )
    for row in rows:
        place = names.index(row["name"]) if row["name"] in names else len(names) - 1
        days[row["day"]][place] += row["amount"]
    return names, days


def forecast(organization: Organization, now: datetime | None = None) -> Forecast:
    """Where this month will end, at the pace of the last two weeks."""
    at = now or timezone.now()
    month = month_of(at)
    since = at - timedelta(days=FORECAST_DAYS)
    recent = Receipt.objects.filter(organization=organization, created_at__gte=since, created_at__lte=at)
    first = Receipt.objects.filter(organization=organization, total_minor__gt=0).order_by("created_at").first()
    # A young customer's pace is that of the days since the first charge, one day at least.
    known = min(timedelta(days=FORECAST_DAYS), at - first.created_at) if first else timedelta(days=FORECAST_DAYS)
    days = Decimal(str(max(known, timedelta(days=1)) / timedelta(days=1)))
    pace = Decimal(recent.aggregate(total=Sum("total_minor"))["total"] or 0) / days
    return Forecast(spent_minor(organization, month), pace, Decimal(str((month.end - at) / timedelta(days=1))))


def held(account: Account) -> QuerySet[Hold]:
    """What is held now; each hold is of one open job."""
    return account.holds.filter(state=Hold.States.HELD).select_related("placed_by").order_by("-amount_minor", "pk")


def months_with_costs(organization: Organization) -> Sequence[Month]:
    """From the first month that cost something to the present one, newest first; a year's at most."""
    first = Receipt.objects.filter(organization=organization).order_by("created_at").first()
    month = month_of()
    found = [month]
    while first and found[-1].start > first.created_at and len(found) < 12:
        found.append(found[-1].before)
    return found


def _name(dimension: str) -> Coalesce:
    sources: dict[str, F | KeyTextTransform] = {
        "member": F("hold__placed_by__email"),
        "workspace": KeyTextTransform("workspace", "hold__labels"),
        "node_spec": KeyTextTransform("node_spec", "hold__labels"),
    }
    return Coalesce(sources[dimension], Value(""), output_field=CharField())

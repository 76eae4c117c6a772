"""Time zones: the reader's, for pages and mails, and the installation's, for accounting.

Months, invoices and budgets use the installation's zone (`TIME_ZONE`) for every reader. All other times are shown in
the active zone, with its name.
"""

from __future__ import annotations

from datetime import datetime
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

from django.conf import settings
from django.utils import timezone

COOKIE = "time_zone"
"""Cookie with the browser's time zone, an IANA name."""
MAX_NAME_LENGTH = 64
"""The length of the database columns that hold a time zone."""
REGIONS = ("Africa", "America", "Antarctica", "Arctic", "Asia", "Atlantic", "Australia", "Europe", "Indian", "Pacific")
"""The regions of zones with the name of a place. Other names are aliases or misleading: Etc/GMT+2 is behind UTC."""


@cache
def names() -> tuple[str, ...]:
    """Return the time zones on offer: UTC, and all with the name of a place."""
    return ("UTC", *sorted(name for name in available_timezones() if name.partition("/")[0] in REGIONS))


@cache
def _known_names() -> frozenset[str]:
    """Return the names of all time zones; `available_timezones` searches the disk at each call."""
    return frozenset(available_timezones())


def is_known(name: str) -> bool:
    """Return whether a time zone exists. Browsers also send zones that are not on offer, such as `Etc/GMT+2`."""
    return len(name) <= MAX_NAME_LENGTH and name in _known_names()


def zone(*candidates: str) -> ZoneInfo:
    """Return the first valid time zone, or the installation's."""
    return ZoneInfo(next((name for name in candidates if is_known(name)), settings.TIME_ZONE))


def abbreviation(at: datetime) -> str:
    """Return the short name of a time's zone, such as CET, or `UTC+08` if it has none."""
    name = at.tzname() or ""
    return f"UTC{name}" if name[:1] in {"+", "-"} else name


def installation_time(at: datetime | None = None) -> datetime:
    """Return a time (default: now) in the installation's zone."""
    return timezone.localtime(at, timezone.get_default_timezone())

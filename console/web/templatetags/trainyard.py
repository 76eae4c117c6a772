"""How values look: money, times, sizes, icons, states, form controls.

The one rule: a template never formats a value itself; what depends on language or currency is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from babel.core import Locale
from babel.dates import format_date, format_datetime, format_skeleton, format_timedelta
from babel.numbers import format_decimal, format_percent
from django import template
from django.conf import settings
from django.forms import BoundField, CheckboxInput, Select
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import get_language, to_locale
from django.utils.translation import gettext as _

from billing import wording
from jobs.models import Job
from jobs.sentences import failure_sentence
from jobs.states import JobState

register = template.Library()

ICONS = settings.BASE_DIR / "static" / "vendor" / "tabler-icons"
STATE_COLOURS = {
    JobState.QUEUED: "azure",
    JobState.STARTING: "cyan",
    JobState.RUNNING: "blue",
    JobState.STOPPING: "orange",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "secondary",
}
MOVING = {JobState.STARTING, JobState.RUNNING, JobState.STOPPING}
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _locale() -> Locale:
    return Locale.parse(to_locale(get_language() or "en"))


@cache
def _drawing(name: str) -> str:
    text = (ICONS / f"{name}.svg").read_text()
    return text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")].strip()


@register.simple_tag
def icon(name: str, classes: str = "") -> SafeString:
    """An icon of Tabler's outline set, inline; decoration only, so it is hidden from screen readers."""
    return format_html(
        '<svg class="icon {}" viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2"'
        ' stroke-linecap="round" stroke-linejoin="round" width="20" height="20" aria-hidden="true">{}</svg>',
        classes,
        mark_safe(_drawing(name)),  # noqa: S308  # a file of ours, named by a template
    )


@register.filter
def money(amount_minor: Decimal | int | str | None, currency: str) -> str:
    """An amount in minor units, in the reader's language; a dash for none."""
    if amount_minor in {None, ""}:
        return "–"
    return wording.money(Decimal(str(amount_minor)), currency)


@register.filter
def signed_money(amount_minor: int, currency: str) -> str:
    """An amount with its sign."""
    return ("+" if amount_minor > 0 else "−" if amount_minor < 0 else "") + wording.money(abs(amount_minor), currency)


@register.filter
def rate(amount_minor: Decimal | str | None, currency: str) -> str:
    """A price per unit, with every decimal it has."""
    if amount_minor in {None, ""}:
        return "–"
    return wording.money(Decimal(str(amount_minor)), currency, exact=True)


@register.filter
def number(value: Decimal | float | str | None) -> str:
    """A number in the reader's language, to at most six decimals."""
    try:
        return str(format_decimal(Decimal(str(value)), format="#,##0.######", locale=_locale()))
    except InvalidOperation:
        return "–"


@register.filter
def percent(fraction: float | None) -> str:
    """A fraction as whole percents."""
    return str(format_percent(fraction or 0, format="#,##0%", locale=_locale()))


@register.filter
def plain(fraction: float | None) -> str:
    """A fraction as HTML reads it, whatever the language."""
    return f"{max(0.0, min(1.0, fraction or 0)):.4f}"


@register.filter
def duration(seconds: float | str | None) -> str:
    """Seconds as `45 s`, `12 min 05 s`, `3 h 20 min`, `2 d 4 h`."""
    if seconds in {None, ""}:
        return "–"
    whole = round(float(str(seconds)))
    minutes, rest = divmod(max(0, whole), 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return _("%(days)d d %(hours)d h") % {"days": days, "hours": hours_left}
    if hours:
        return _("%(hours)d h %(minutes)02d min") % {"hours": hours, "minutes": minutes_left}
    if minutes:
        return _("%(minutes)d min %(seconds)02d s") % {"minutes": minutes, "seconds": rest}
    return _("%(seconds)d s") % {"seconds": rest}


@register.filter(name="bytes")
def bytes_(size: float | None) -> str:
    """A size in bytes as B, KiB, MiB ..."""
    amount, unit = float(size or 0), 0
    while amount >= 1024 and unit < len(BINARY_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    pattern = "#,##0.#" if amount < 100 and unit else "#,##0"
    return f"{format_decimal(amount, format=pattern, locale=_locale())} {BINARY_UNITS[unit]}"


@register.filter
def memory(mebibytes: int | None) -> str:
    """A size in MiB as MiB, GiB ..."""
    return bytes_((mebibytes or 0) * 1024**2)


def as_datetime(value: datetime | str | None) -> datetime | None:
    """A moment as the services give it: a datetime, an ISO 8601 text, or nothing."""
    if isinstance(value, str):
        return datetime.fromisoformat(value) if value else None
    return value


def _full(value: datetime) -> str:
    return str(format_datetime(timezone.localtime(value), "medium", locale=_locale()))


@register.filter
def moment(value: datetime | str | None) -> str:
    """A moment in full, in the reader's language and the installation's time zone."""
    at = as_datetime(value)
    if at is None:
        return "–"
    return format_html('<time datetime="{}">{}</time>', at.isoformat(), _full(at))


@register.filter
def day(value: datetime | date | str | None) -> str:
    """A day in the reader's language; of a moment, in the installation's time zone."""
    at = value if isinstance(value, date) and not isinstance(value, datetime) else as_datetime(value)
    if at is None:
        return "–"
    return str(format_date(timezone.localdate(at) if isinstance(at, datetime) else at, "medium", locale=_locale()))


@register.filter
def month(value: datetime) -> str:
    """The month of a moment, in the reader's language."""
    return str(format_skeleton("yMMMM", timezone.localtime(value), locale=_locale()))


@register.filter
def ago(value: datetime | str | None) -> str:
    """How long ago a moment was; the whole of it in the title."""
    at = as_datetime(value)
    if at is None:
        return "–"
    words = format_timedelta(at - timezone.now(), add_direction=True, locale=_locale(), threshold=1.2)
    if abs(at - timezone.now()) < timedelta(seconds=10):
        words = _("just now")
    return format_html('<time datetime="{}" title="{}">{}</time>', at.isoformat(), _full(at), words)


@register.simple_tag
def state_badge(state: str) -> SafeString:
    """The state of a job, as a word with its colour."""
    dot = "status-dot-animated" if JobState(state) in MOVING else ""
    return format_html(
        '<span class="status text-nowrap status-{}" data-state="{}"><span class="status-dot {}"></span>{}</span>',
        STATE_COLOURS[JobState(state)],
        state,
        dot,
        Job.States(state).label,
    )


@register.simple_tag
def state_colour(state: str) -> str:
    """The colour of a job's state, by Tabler's names."""
    return STATE_COLOURS[JobState(state)]


@register.filter
def run_seconds(job: Job) -> float | None:
    """For how long a job has run, or ran."""
    return ((job.finished_at or timezone.now()) - job.started_at).total_seconds() if job.started_at else None


@register.filter
def control(field: BoundField, classes: str = "") -> SafeString:
    """A form field's control, with the classes of our looks and its error told to assistive technology."""
    widget = field.field.widget
    if isinstance(widget, CheckboxInput):
        base = "form-check-input"
    elif isinstance(widget, Select):
        base = "form-select"
    else:
        base = "form-control"
    invalid = "is-invalid" if field.errors else ""
    return field.as_widget(attrs={"class": " ".join(filter(None, [base, classes, invalid]))})


@register.filter
def is_checkbox(field: BoundField) -> bool:
    """Whether a field is one box to tick."""
    return isinstance(field.field.widget, CheckboxInput)


@register.filter
def get(mapping: Mapping[str, Any], key: str) -> Any:
    """What a mapping holds under a key that is itself a variable."""
    return mapping.get(key)


@register.filter
def line_title(line: Mapping[str, Any]) -> str:
    """What a line of a quote or receipt is for."""
    return wording.line_title(line)


@register.filter
def line_unit(line: Mapping[str, Any]) -> str:
    """How much of what a line counts, in words."""
    units = {
        "node_hours": _("%(quantity)s node-hours"),
        "epochs": _("%(quantity)s epochs"),
        "seconds": _("%(quantity)s s"),
        "run": _("once per run"),
    }
    return units.get(str(line["unit"]), "%(quantity)s") % {"quantity": number(line["quantity"])}


@register.filter
def evidence_sentence(evidence: Mapping[str, Any]) -> str:
    """Why a line is free: the fault as a sentence, with the attempt it was of and its moment."""
    what = failure_sentence({"rank": None, **evidence})
    return _("Attempt %(attempt)s: %(what)s (%(when)s)") % {
        "attempt": evidence.get("attempt", "1"),
        "what": what.rstrip(".。"),
        "when": _full(as_datetime(evidence["at"]) or timezone.now()),
    }


@register.filter
def basis_sentence(basis: Mapping[str, Any]) -> str:
    """Where an estimate comes from."""
    return wording.basis_sentence(basis)

"""Template tags and filters that format money, times, sizes, icons, states and form controls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta, tzinfo
from decimal import Decimal, InvalidOperation
from functools import cache, lru_cache
from typing import Any
from urllib.parse import urlencode

from babel.core import Locale
from babel.dates import format_date, format_datetime, format_skeleton, format_timedelta
from babel.numbers import format_decimal, format_percent
from django import template
from django.conf import settings
from django.forms import BoundField, CheckboxInput, Select
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import get_language, ngettext
from django.utils.translation import gettext as _

from billing import amounts, messages
from billing.models import Receipt
from console.accounts import zones
from console.web import activity
from jobs import selectors
from jobs.messages import failure_sentence
from jobs.models import Job, title_of_state
from jobs.purchase import FREE_ESTIMATE_MARK
from jobs.states import JobState
from runtime.specs import Framework

register = template.Library()
register.filter("line_title", messages.line_title)
register.filter("p90_label", messages.p90_label)
register.filter("basis_sentence", messages.basis_sentence)  # the basis of an estimate
register.filter("audit_description", activity.describe)

ICONS_FOLDER = settings.BASE_DIR / "static" / "vendor" / "tabler-icons"
STATE_COLOURS = {
    JobState.QUEUED: "azure",
    JobState.STARTING: "cyan",
    JobState.RUNNING: "blue",
    JobState.STOPPING: "orange",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "secondary",
}
"""Tabler's name of each state's colour."""
FRAMEWORK_TITLES = {
    Framework.PYTORCH.value: "PyTorch",
    Framework.HOROVOD.value: "Horovod",
    Framework.TENSORFLOW.value: "TensorFlow",
}
"""Product names, which are not translated."""
ACTIVE_STATES = {JobState.STARTING, JobState.RUNNING, JobState.STOPPING}
"""States whose badge has an animated dot."""
MAX_CACHED_TEXTS = 4096
"""How many results of each formatting function below a process caches. Pages show the same times and numbers again and
again, and most of the time of a long table is spent on formatting them. A full cache of one function takes about 1 MB.
"""
DIGIT_BEFORE_CHINESE = re.compile(r"(\d)(?=[\u4e00-\u9fff])")
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _locale() -> Locale:
    return amounts.locale_of(get_language() or "en")


@register.simple_tag
@cache
def icon(name: str, classes: str = "") -> SafeString:
    """Render an icon of Tabler's outline set inline, hidden from screen readers."""
    text = (ICONS_FOLDER / f"{name}.svg").read_text()
    start_tag_end = text.index(">", text.index("<svg"))
    shapes = text[start_tag_end + 1 : text.rindex("</svg>")].strip()
    return format_html(
        '<svg class="icon {}" viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2"'
        ' stroke-linecap="round" stroke-linejoin="round" width="20" height="20" aria-hidden="true">{}</svg>',
        classes,
        mark_safe(shapes),  # noqa: S308  # a file of ours, named by a template
    )


@register.simple_tag(takes_context=True)
def href(context: template.Context, url_name: str, *args: Any, **query: Any) -> str:
    """Return the attribute `href` of a link; empty on a customer's page that an administrator reads (`read_only`).

    A link on such a page would open the object of the same name in the administrator's own organization, or nothing.
    """
    if context.get("read_only"):
        return ""
    url = reverse(url_name, args=args)
    return format_html(' href="{}"', f"{url}?{urlencode(query)}" if query else url)


@register.filter
def money(amount_minor: Decimal | int | str | None, currency: str) -> str:
    """Format an amount in minor units, a dash for None."""
    if amount_minor in {None, ""}:
        return "–"
    return amounts.money(Decimal(str(amount_minor)), currency)


@register.filter
def signed_money(amount_minor: int, currency: str) -> str:
    """Format an amount with its sign."""
    text = amounts.money(amount_minor, currency)
    return f"+{text}" if amount_minor > 0 else text


@register.filter
def rate(amount_minor: Decimal | str | None, currency: str) -> str:
    """Format a unit price with all its decimals."""
    if amount_minor in {None, ""}:
        return "–"
    return amounts.money(Decimal(str(amount_minor)), currency, exact=True)


@register.filter
def small_money(amount_minor: Decimal | float, currency: str) -> str:
    """Format minor units with at least two significant digits, because parts of a run may cost less than a cent."""
    amount = Decimal(str(amount_minor))
    # `adjusted` is the exponent of the first digit: 0.0123 has -2, and so keeps three decimals.
    digits = max(0, 1 - amount.adjusted()) if amount else 0
    # Amounts of 100 minor units or more are rounded to minor units; smaller ones keep the decimals computed here.
    return amounts.money(round(amount, digits), currency, exact=(0 < amount < 100))


@lru_cache(maxsize=MAX_CACHED_TEXTS)
def _format_number(value: Decimal | float, pattern: str, language: str) -> str:
    return str(format_decimal(value, format=pattern, locale=amounts.locale_of(language)))


@register.filter
def number(value: Decimal | float | str | None) -> str:
    """Format a number with at most six decimals."""
    try:
        return _format_number(Decimal(str(value)), "#,##0.######", get_language() or "en")
    except InvalidOperation:
        return "–"


@register.filter
def significant(value: float | str) -> str:
    """Format a value of a curve or parameter. A float gets at most six significant digits; others stay unchanged."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@register.filter
def significant_decimal(text: str) -> str:
    """Format a number that is stored as text, such as a learning rate, with at most six significant digits."""
    try:
        return f"{Decimal(text):.6g}"
    except InvalidOperation:
        return text


@register.filter
def framework(name: str) -> str:
    """Return the product name of a framework."""
    return FRAMEWORK_TITLES.get(name, name)


@register.filter
def percent(fraction: float | None) -> str:
    """Format a fraction as a whole percentage."""
    return str(format_percent(fraction or 0, format="#,##0%", locale=_locale()))


@register.filter
def query_string(parameters: Mapping[str, str]) -> str:
    """Return the query string of a URL."""
    return urlencode(parameters)


@register.filter
def attribute_fraction(fraction: float | None) -> str:
    """Format a fraction for an HTML attribute, independent of the language."""
    return f"{max(0.0, min(1.0, fraction or 0)):.4f}"


@register.filter
def duration(seconds: float | str | None) -> str:
    """Format seconds as `45 s`, `12 min 5 s`, `3 h 20 min` or `2 d`: at most two units, no zero, no padding."""
    if seconds in {None, ""}:
        return "–"
    total_minutes, whole_seconds = divmod(max(0, round(float(str(seconds)))), 60)
    total_hours, minutes = divmod(total_minutes, 60)
    days, hours = divmod(total_hours, 24)
    amounts_by_unit = [
        (days, _("%(days)d d") % {"days": days}),
        (hours, _("%(hours)d h") % {"hours": hours}),
        (minutes, _("%(minutes)d min") % {"minutes": minutes}),
        (whole_seconds, _("%(seconds)d s") % {"seconds": whole_seconds}),
    ]
    seconds_index = len(amounts_by_unit) - 1  # 0 seconds are "0 s"
    largest = next((index for index, (amount, _text) in enumerate(amounts_by_unit) if amount), seconds_index)
    smaller = [text for amount, text in amounts_by_unit[largest + 1 : largest + 2] if amount]
    return " ".join([amounts_by_unit[largest][1], *smaller])


@register.filter(name="bytes")
def bytes_(size: float | None) -> str:
    """Format a size in bytes as B, KiB, MiB and so on."""
    amount, unit_index = float(size or 0), 0
    while amount >= 1024 and unit_index < len(BINARY_UNITS) - 1:
        amount, unit_index = amount / 1024, unit_index + 1
    pattern = "#,##0.#" if amount < 100 and unit_index else "#,##0"
    return f"{_format_number(amount, pattern, get_language() or 'en')} {BINARY_UNITS[unit_index]}"


@register.filter
def memory(mebibytes: int | None) -> str:
    """Format a size in MiB as MiB, GiB and so on."""
    return bytes_((mebibytes or 0) * 1024**2)


def as_datetime(value: datetime | str | None) -> datetime | None:
    """Parse a time given as a datetime, an ISO 8601 string or None."""
    if isinstance(value, str):
        return datetime.fromisoformat(value) if value else None
    return value


def _format_time(value: datetime) -> str:
    return _format_time_in(value, timezone.get_current_timezone(), get_language() or "en")


@lru_cache(maxsize=MAX_CACHED_TEXTS)
def _format_time_in(value: datetime, zone: tzinfo, language: str) -> str:
    at = timezone.localtime(value, zone)
    return f"{format_datetime(at, 'medium', locale=amounts.locale_of(language))} {zones.abbreviation(at)}"


@register.filter
def moment(value: datetime | str | None) -> str:
    """Format a time in the reader's language and time zone, with the zone's full name as title."""
    at = as_datetime(value)
    if at is None:
        return "–"
    return _time_element(at, timezone.get_current_timezone(), get_language() or "en")


@lru_cache(maxsize=MAX_CACHED_TEXTS)
def _time_element(at: datetime, zone: tzinfo, language: str) -> SafeString:
    """Render a time in a zone, whose name is the title."""
    text = _format_time_in(at, zone, language)
    return format_html('<time datetime="{}" title="{}">{}</time>', at.isoformat(), zone.tzname(None) or str(zone), text)


@register.filter
def moment_text(value: datetime) -> str:
    """Format a time as plain text, for emails."""
    return _format_time(value)


@register.filter
def day(value: datetime | date | str | None) -> str:
    """Format a date, or the day of a time in the installation's time zone."""
    if isinstance(value, date) and not isinstance(value, datetime):
        return str(format_date(value, "medium", locale=_locale()))
    at = as_datetime(value)
    return str(format_date(zones.installation_time(at), "medium", locale=_locale())) if at else "–"


@register.filter
def month(value: datetime) -> str:
    """Format the month of a time in the installation's time zone."""
    return str(format_skeleton("yMMMM", zones.installation_time(value), locale=_locale()))


@register.filter
def ago(value: datetime | str | None) -> str:
    """Format how long ago a time was, with the full time as title."""
    at = as_datetime(value)
    if at is None:
        return "–"
    seconds = round((at - timezone.now()).total_seconds())
    # Rounded, so that pages that refresh find the text in the cache: up to 10 seconds are "just now", and from an hour
    # on whole minutes are enough.
    if abs(seconds) < 10:
        seconds = 0
    elif abs(seconds) > 3600:
        seconds = int(seconds / 60) * 60
    return _distance_element(at, seconds, timezone.get_current_timezone(), get_language() or "en")


@lru_cache(maxsize=MAX_CACHED_TEXTS)
def _distance_element(at: datetime, seconds: int, zone: tzinfo, language: str) -> SafeString:
    """Render a time by its distance from now, 0 for "just now". Zone and language are those of the reader."""
    if seconds == 0:
        text = _("just now")
    else:
        locale = amounts.locale_of(language)
        # From 1.2 hours on, Babel counts in hours: 71 minutes are "71 minutes ago", 72 are "1 hour ago".
        text = format_timedelta(timedelta(seconds=seconds), add_direction=True, locale=locale, threshold=1.2)
        # Babel writes "5分钟前"; the console's Chinese texts have a space after digits, at which no line may end.
        text = DIGIT_BEFORE_CHINESE.sub("\\1\N{NO-BREAK SPACE}", text)
    title = _format_time_in(at, zone, language)
    return format_html('<time class="ago" datetime="{}" title="{}">{}</time>', at.isoformat(), title, text)


@register.simple_tag
def state_badge(state: str, is_notebook: bool = False) -> SafeString:
    """Render a job's state as a coloured badge."""
    return _render_state_badge(state, is_notebook, get_language())


@cache
def _render_state_badge(state: str, is_notebook: bool, _language: str | None) -> SafeString:
    """Render the badge. The label is in the active language, which is a parameter to be part of the cache's key."""
    dot_class = "status-dot-animated" if JobState(state) in ACTIVE_STATES else ""
    return format_html(
        '<span class="status text-nowrap status-{}" data-state="{}"><span class="status-dot {}"></span>{}</span>',
        STATE_COLOURS[JobState(state)],
        state,
        dot_class,
        title_of_state(state, is_notebook=is_notebook),
    )


@register.simple_tag
def state_colour(state: str) -> str:
    """Return the Tabler colour of a job's state."""
    return STATE_COLOURS[JobState(state)]


@register.simple_tag
def job_progress(state: str, progress: Mapping[str, Any], label: str) -> SafeString:
    """Render the progress of a job in this state: bar, epoch and estimated time left."""
    if state == JobState.QUEUED:
        return format_html('<span class="text-secondary">{}</span>', _("waiting"))
    return _progress_bar(state, label=label, language=get_language(), **progress)


@lru_cache(maxsize=MAX_CACHED_TEXTS)
def _progress_bar(
    state: str, *, fraction: float, epoch: int, epochs: int, eta_seconds: float | None, label: str, language: str | None
) -> SafeString:
    """Render the bar, or only the time left if there are no epochs. The active language is part of the cache's key."""
    left = "" if eta_seconds is None else _("%(left)s left") % {"left": duration(eta_seconds)}
    if not epochs:
        return format_html('<span class="small text-secondary num">{}</span>', left or "–")
    text = " · ".join(filter(None, (_("epoch %(epoch)s of %(epochs)s") % {"epoch": epoch, "epochs": epochs}, left)))
    return format_html(
        '<div class="w-100"><progress class="progress progress-sm is-{}" value="{}" max="1" aria-label="{}"></progress>'
        '<span class="small text-secondary num">{}</span></div>',
        STATE_COLOURS[JobState(state)],
        fraction,
        label,
        text,
    )


@register.filter
def run_seconds(job: Job) -> float | None:
    """Return for how many seconds a job has run; None before its start."""
    return ((job.finished_at or timezone.now()) - job.started_at).total_seconds() if job.started_at else None


@register.filter
def control(field: BoundField, classes: str = "") -> SafeString:
    """Render a form field's control with our CSS classes and an accessible error."""
    widget = field.field.widget
    if isinstance(widget, CheckboxInput):
        base = "form-check-input"
    elif isinstance(widget, Select):
        base = "form-select"
    else:
        base = "form-control"
    invalid = "is-invalid" if field.errors else ""
    return field.as_widget(attrs={"class": " ".join(filter(None, [base, classes, invalid]))})


@register.simple_tag
def error_slot(name: str, sentence: str = "", *, oob: bool = False) -> SafeString:
    """Render the element that shows the error of the field `name`.

    The response to a quote contains the element again, rendered with `oob`: htmx replaces the one on the page.
    """
    return format_html(
        '<div class="invalid-feedback d-block" id="error-{}" role="alert"{}>{}</div>',
        name,
        format_html(' hx-swap-oob="{}"', "true") if oob else "",
        sentence,
    )


@register.simple_tag
def options(choices: Iterable[tuple[object, object]], chosen: object) -> SafeString:
    """Render `<option>` elements for pairs of a value and its title. The option with the value `chosen` is selected."""
    return format_html_join(
        "",
        '<option value="{}"{}>{}</option>',
        ((value, mark_safe(" selected") if value == chosen else "", title) for value, title in choices),
    )


@register.filter
def is_checkbox(field: BoundField) -> bool:
    """Return whether a field is a checkbox."""
    return isinstance(field.field.widget, CheckboxInput)


@register.filter
def get(mapping: Mapping[str, Any], key: str) -> Any:
    """Return a mapping's value for a variable key."""
    return mapping.get(key)


@register.filter
def line_unit(line: Mapping[str, Any]) -> str:
    """Format the quantity and unit of a receipt line."""
    plural = 1 if line["quantity"] == "1" else 2  # `ngettext` takes an integer, and a quantity may be a fraction
    units = {
        "node_hours": ngettext("%(quantity)s node-hour", "%(quantity)s node-hours", plural),
        "epochs": ngettext("%(quantity)s epoch", "%(quantity)s epochs", plural),
        "seconds": _("%(quantity)s s"),
        "run": _("once per run"),
        "gigabytes": _("%(quantity)s GB"),
    }
    if line["rule"] == "minimum":
        return _("raises the total to the minimum")
    return units.get(str(line["unit"]), "%(quantity)s") % {"quantity": number(line["quantity"])}


@register.filter
def evidence_sentence(evidence: Mapping[str, Any]) -> str:
    """Return the sentence that says why a receipt line is free: the fault, with its attempt and time."""
    fault = failure_sentence(evidence)
    return _("Attempt %(attempt)s: %(what)s (%(when)s)") % {
        "attempt": evidence.get("attempt", "1"),
        "what": fault.rstrip(".。"),  # it becomes a part of this sentence
        "when": _format_time(datetime.fromisoformat(evidence["at"])),
    }


@register.filter
def receipt_title(receipt: Receipt) -> str:
    """Return a receipt's title in the reader's language: the job's number and name, or the day of a storage charge."""
    purchase = receipt.hold.quote.purchase  # what was quoted: a job, or the storage of a day
    if not hasattr(receipt.hold, "order"):  # not the receipt of a job
        day_charged = purchase.get("storage")
        return _("Storage on %(day)s") % {"day": day(date.fromisoformat(day_charged))} if day_charged else receipt.title
    job = receipt.hold.order.job
    return f"#{job.pk} {selectors.title_of(job, is_free_estimate=FREE_ESTIMATE_MARK in purchase)}"

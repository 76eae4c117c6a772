"""Read-only report pages of the admin, with figures and tables, for the packages above such as billing and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.contrib.admin import ModelAdmin
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render


@dataclass(frozen=True)
class Table:
    """A table of a report, with formatted cells."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Report:
    """A report. `figures` are (name, value) pairs, `notes` are sentences, and `back` is the URL of the link back."""

    title: str
    figures: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    tables: Sequence[Table] = field(default_factory=tuple)
    back: str = ""


def show(request: HttpRequest, admin: ModelAdmin[Any], report: Report) -> HttpResponse:
    """Render a report in the admin's layout."""
    return render(request, "admin/report.html", {**admin.admin_site.each_context(request), **vars(report)})

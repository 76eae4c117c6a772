"""Reports of the admin: pages of figures and tables. The one rule: they show, and change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.contrib.admin import ModelAdmin
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render


@dataclass(frozen=True)
class Table:
    """One table of a report; its cells are shown as they are."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Report:
    """What a report shows. `figures` are names with values; `back` is where its last link leads."""

    title: str
    figures: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    tables: Sequence[Table] = field(default_factory=tuple)
    back: str = ""


def show(request: HttpRequest, admin: ModelAdmin[Any], report: Report) -> HttpResponse:
    """A report in the frame of the admin."""
    return render(request, "admin/report.html", {**admin.admin_site.each_context(request), **vars(report)})

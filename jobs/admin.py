"""Administrators' work on jobs: products are theirs to change; orders, jobs and attempts are there to be read."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.admin import ModelAdmin
from unfold.decorators import action

from console.accounts.readonly import ReadOnlyAdmin, ReadOnlyInline
from console.accounts.reports import Report, Table, show
from jobs import calibration, models

REPORTED = timedelta(days=90)
"""How far the report of estimates looks back."""
SHOWN = 50


@admin.register(models.Product)
class ProductAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """What is sold."""

    list_display = ("name", "title", "mode", "reference_seconds_per_epoch", "headroom", "position", "is_active")
    list_editable = ("position", "is_active")

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Never: orders of the past name it. Take it off the offer instead."""
        return False

    def get_readonly_fields(self, _request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """Prices name a product by its name, and its mode decides how it is priced."""
        return ("name", "mode") if obj else ()


class AttemptInline(ReadOnlyInline):
    """The tries."""

    model = models.Attempt
    fields = ("number", "claimed_at", "started_at", "finished_at", "reason", "detail")


class EventInline(ReadOnlyInline):
    """What happened."""

    model = models.JobEvent
    fields = ("created_at", "kind", "attempt", "actor", "data")


@admin.register(models.Job)
class JobAdmin(ReadOnlyAdmin):
    """Jobs, read-only: their state is the lifecycle's."""

    list_display = ("id", "organization", "name", "state", "reason", "node_spec", "nodes", "queued_at", "finished_at")
    list_filter = ("state", "reason", "framework")
    list_select_related = ("organization", "node_spec")
    search_fields = ("id", "name", "organization__name")
    inlines = (AttemptInline, EventInline)
    actions_list = ("calibration",)

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("How good the estimates are"), permissions=("view",)
    )
    def calibration(self, request: HttpRequest) -> HttpResponse:
        """The error of quotes over time, and the newest completed runs beside theirs."""
        jobs = calibration.completed_jobs().filter(finished_at__gte=timezone.now() - REPORTED)
        outcomes = [found for job in jobs.iterator(chunk_size=500) if (found := calibration.outcome(job))]
        return show(request, self, _calibration_report(outcomes))


@admin.register(models.Order)
class OrderAdmin(ReadOnlyAdmin):
    """Orders."""

    list_display = ("id", "organization", "product", "placed_by", "created_at")
    list_select_related = ("organization", "product", "placed_by")
    search_fields = ("id", "organization__name")


def _calibration_report(outcomes: list[calibration.Outcome]) -> Report:
    weeks = calibration.accuracy(outcomes)
    newest = [
        [
            f"#{each.job.pk} {each.job.name}",
            each.job.organization.name,
            each.source,
            each.job.order.quote.basis.get("runs", 0),
            f"{each.p50_seconds:.0f}",
            f"{each.p90_seconds:.0f}",
            f"{each.actual_seconds:.0f}",
            f"{each.error:+.0%}",
        ]
        for each in outcomes[:SHOWN]
    ]
    return Report(
        title=_("How good the estimates are"),
        figures=((_("Completed runs"), str(len(outcomes))),),
        notes=(
            _(
                "The error is how far a run's time is from the p50 of its quote, in either direction."
                " Half of the runs miss by less."
            ),
            _("Of good estimates, 9 of 10 runs end within p90."),
        ),
        tables=(
            Table(
                _("Week by week"),
                (_("Week"), _("Estimated from"), _("Runs"), _("Median error"), _("Within p90")),
                [[row.week, row.source, row.runs, f"{row.median_error:.0%}", f"{row.within_p90:.0%}"] for row in weeks],
            ),
            Table(
                _("The newest runs"),
                (
                    _("Job"),
                    _("Customer"),
                    _("Estimated from"),
                    _("Runs"),
                    _("p50 (s)"),
                    _("p90 (s)"),
                    _("Actual (s)"),
                    _("Error"),
                ),
                newest,
            ),
        ),
        back=reverse("admin:jobs_job_changelist"),
    )

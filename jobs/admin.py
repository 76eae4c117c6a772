"""The admin pages of jobs: products can be edited; orders, jobs, attempts and sweeps are read-only."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext
from unfold.admin import ModelAdmin
from unfold.decorators import action

from billing.amounts import money
from console.accounts.models import User
from console.accounts.reports import Report, Table, show
from console.accounts.services import record_audit_event
from console.core.errors import CustomerError
from console.core.readonly import LargeTableAdmin, ReadOnlyAdmin, ReadOnlyInline, row_or_404
from jobs import estimates, models, operations, orders, selectors
from jobs.messages import event_sentence
from jobs.sweeps.purchase import stop_sweep_as_operator
from runtime.specs import Framework

REPORT_PERIOD = timedelta(days=90)
"""Period that the report on estimates covers: a quarter, so that single weeks do not dominate."""
RUNS_SHOWN = 50
"""Runs that the report on estimates lists, the latest ones: a few screens."""
TRIALS_SHOWN = 100
"""Trials on one page of the list on a sweep's page: a few screens. A sweep may have 1,000."""
MAX_OFFSET_DIGITS = 15
"""Digits of an offset in a log: enough for any file, and within the range of a seek."""


@admin.register(models.Product)
class ProductAdmin(ModelAdmin):  # type: ignore[misc]  # unfold publishes no types
    """Products."""

    list_display = ("name", "title", "mode", "reference_seconds_per_epoch", "headroom", "position", "is_active")
    list_editable = ("position", "is_active")

    def has_delete_permission(self, _request: HttpRequest, _obj: Any = None) -> bool:
        """Return False: past orders refer to the product. Clear `is_active`, labelled *offered*, instead."""
        return False

    def get_readonly_fields(self, _request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """Return name and mode of an existing product: prices refer to the name, and the mode decides the pricing."""
        return ("name", "mode") if obj else ()


class AttemptInline(ReadOnlyInline):
    """Attempts of a job."""

    model = models.Attempt
    fields = ("number", "claimed_at", "started_at", "finished_at", "reason", "detail")
    hide_title = True  # it would repeat the number


class EventInline(ReadOnlyInline):
    """Events of a job."""

    model = models.JobEvent
    fields = ("created_at", "sentence", "attempt", "actor", "details")
    hide_title = True  # the title would be `str(event)`, which reads the job for each row

    def get_queryset(self, request: HttpRequest) -> QuerySet[models.JobEvent]:
        """Return the events with the people who caused them, and with the job and its price for their sentences."""
        events: QuerySet[models.JobEvent] = super().get_queryset(request)
        return events.select_related("actor", "job__order__hold", "job__order__quote")

    @admin.display(description=gettext_lazy("what happened"))
    def sentence(self, event: models.JobEvent) -> str:
        """Return what the customer reads on the page of the job."""
        job = event.job
        return event_sentence(
            event.kind,
            event.data,
            is_free=selectors.cost_minor(job) == 0,
            costs_nothing=job.order.quote.ceiling_minor == 0,
            is_notebook=job.is_notebook,
        )

    @admin.display(description=gettext_lazy("details"))
    def details(self, event: models.JobEvent) -> str:
        """Return the data on one line."""
        return " ".join(f"{name}={value}" for name, value in event.data.items())


class FrameworkFilter(admin.SimpleListFilter):
    """A filter by framework. Django's own filter would read all jobs to find which frameworks there are."""

    title = gettext_lazy("framework")
    parameter_name = "framework"

    def lookups(self, _request: HttpRequest, _model_admin: Any) -> list[tuple[str, str]]:
        """Return the frameworks."""
        return [(framework.value, framework.value) for framework in Framework]

    def queryset(self, _request: HttpRequest, queryset: QuerySet[models.Job]) -> QuerySet[models.Job]:
        """Return the jobs of the framework that was selected; all jobs if none was."""
        return queryset.filter(framework=self.value()) if self.value() else queryset


@admin.register(models.Job)
class JobAdmin(LargeTableAdmin):
    """Jobs, read-only, because only `lifecycle` changes them. Operators can read, stop and move a run."""

    list_display = ("id", "organization", "name", "state", "reason", "node_spec", "nodes", "queued_at", "finished_at")
    list_filter = ("state", "reason", FrameworkFilter)
    list_select_related = ("organization", "node_spec")
    search_fields = ("id", "name", "organization__name")
    # The customer's page, one click away, has the configuration and what the run reports. With all columns, this page
    # would take 0.1 s of CPU.
    fields = (
        "organization", "order", "placed_by", "name", "state", "reason", "detail", "waiting", "node_spec", "nodes",
        "queued_at", "not_before", "started_at", "cancel_requested_at", "finished_at", "deadline_seconds",
        "traceparent",
    )  # fmt: skip
    readonly_fields = ("waiting",)
    inlines = (AttemptInline, EventInline)
    actions_list = ("calibration",)
    actions_detail = ("customers_page", "log", "stop", "move")

    def get_queryset(self, request: HttpRequest) -> QuerySet[models.Job]:
        """Return the jobs; for the page of a single job, with the related objects that it shows."""
        jobs: QuerySet[models.Job] = super().get_queryset(request)
        is_list = request.resolver_match is None or "object_id" not in request.resolver_match.kwargs
        return jobs if is_list else jobs.select_related("organization", "order", "placed_by", "node_spec")

    @admin.display(description=gettext_lazy("waiting for"))
    def waiting(self, job: models.Job) -> str:
        """Return why a queued or starting job waits, as its customer reads it."""
        return selectors.waiting_for(selectors.job_for(job.organization, job.pk))

    def has_stop_permission(self, request: HttpRequest, _object_id: str | None = None) -> bool:
        """Return whether the user may change jobs: stop or move them. Unfold calls it for `permissions=("stop",)`."""
        return request.user.has_perm("jobs.change_job")

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Page"), permissions=("view",)
    )
    def customers_page(self, _request: HttpRequest, object_id: str) -> HttpResponse:
        """Redirect to the customer's page, read-only (`console.web.operator_page`)."""
        return redirect("operator_job", row_or_404(models.Job, object_id).pk)

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Log"), permissions=("view",)
    )
    def log(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show a part of a rank's output, and write an audit log entry that names the administrator."""
        job = row_or_404(models.Job, object_id)
        ranks = job.nodes * job.workers_per_node
        rank, offset, attempt_number = (_query_number(request, name) for name in ("rank", "offset", "attempt"))
        rank = min(rank, ranks - 1)
        chunk = selectors.log(job, rank, offset, attempt_number or None)
        record_audit_event(
            organization=job.organization,
            actor=_person(request),
            action="job.log_read_by_operator",
            target=f"job:{job.pk}",
            data={"rank": rank, "attempt": attempt_number, "offset": offset},
        )
        return render(
            request,
            "admin/job_log.html",
            {
                **self.admin_site.each_context(request),
                "title": _("Log of job %(job)d") % {"job": job.pk},
                "job": job,
                "text": chunk.text,
                "rank": rank,
                "ranks": range(ranks),
                "attempts": [attempt.number for attempt in job.attempts.all()],
                "attempt": attempt_number,
                "next_offset": chunk.next_offset if chunk.text else None,
                "back": reverse("admin:jobs_job_change", args=[job.pk]),
            },
        )

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Stop"), permissions=("stop",)
    )
    def stop(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for a reason, and stop the job."""
        job = row_or_404(models.Job, object_id)
        return _ask_reason(
            request,
            self,
            title=_("Stop job %(job)d") % {"job": job.pk},
            text=_(
                "%(name)s of %(organization)s ends as if the customer had cancelled it. The time used is charged, and "
                "the rest of the hold is released."
            )
            % {"name": job.name, "organization": job.organization.name},
            button=_("Stop job"),
            success=_("The job is being stopped."),
            back=reverse("admin:jobs_job_change", args=[job.pk]),
            perform=lambda person, why: orders.stop_job_as_operator(actor=person, job=job, why=why),
        )

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Move"), permissions=("stop",)
    )
    def move(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for a reason, end the job's run free of charge, and start another attempt."""
        job = row_or_404(models.Job, object_id)
        return _ask_reason(
            request,
            self,
            title=_("Move job %(job)d") % {"job": job.pk},
            text=_(
                "The run of %(name)s of %(organization)s is stopped, and another attempt starts as soon as a cluster "
                "has room. It resumes from the last checkpoint. The attempt that ends is free for the customer."
            )
            % {"name": job.name, "organization": job.organization.name},
            button=_("Move job"),
            success=_("The job is being moved."),
            back=reverse("admin:jobs_job_change", args=[job.pk]),
            perform=lambda person, why: operations.move_job(actor=person, job=job, why=why),
        )

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Estimate accuracy"), permissions=("view",)
    )
    def calibration(self, request: HttpRequest) -> HttpResponse:
        """Show the accuracy of estimates over time, and the latest completed runs.

        The method's name is in the URL, so it stays `calibration`.
        """
        jobs = estimates.completed_jobs().filter(finished_at__gte=timezone.now() - REPORT_PERIOD)
        outcomes = [outcome for job in jobs.iterator(chunk_size=500) if (outcome := estimates.outcome(job))]
        return show(request, self, _accuracy_report(outcomes))


class TrialInline(ReadOnlyInline):
    """Trials of a sweep."""

    model = models.Trial
    fields = ("number", "job_link", "state", "outcome", "value", "cost", "parameters_line")
    hide_title = True  # it would repeat the number
    per_page = TRIALS_SHOWN

    def get_queryset(self, request: HttpRequest) -> QuerySet[models.Trial]:
        """Return the trials with all that a row shows."""
        trials: QuerySet[models.Trial] = super().get_queryset(request)
        return trials.select_related("sweep", "job__order__hold", "job__order__quote")

    @admin.display(description=gettext_lazy("job"))
    def job_link(self, trial: models.Trial) -> str:
        """Return a link to the page of the job."""
        address = reverse("admin:jobs_job_change", args=[trial.job_id])
        return format_html('<a class="text-primary-600 dark:text-primary-500" href="{}">#{}</a>', address, trial.job_id)

    @admin.display(description=gettext_lazy("parameters"))
    def parameters_line(self, trial: models.Trial) -> str:
        """Return the parameters on one line."""
        return " ".join(f"{name}={value}" for name, value in trial.parameters.items())

    @admin.display(description=gettext_lazy("state"))
    def state(self, trial: models.Trial) -> str:
        """Return the state of the job."""
        return trial.job.get_state_display()

    @admin.display(description=gettext_lazy("cost"))
    def cost(self, trial: models.Trial) -> str:
        """Return what the trial has cost so far."""
        order = trial.job.order
        return money(order.hold.metered_minor, order.quote.currency)


@admin.register(models.Sweep)
class SweepAdmin(ReadOnlyAdmin):
    """Sweeps, read-only, because only `sweeps.progress` changes them. Operators can stop one."""

    list_display = ("id", "organization", "name", "state", "reason", "created_at", "ended_at")
    list_filter = ("state", "reason")
    list_select_related = ("organization",)
    search_fields = ("id", "name", "organization__name")
    inlines = (TrialInline,)
    actions_detail = ("stop",)

    def has_stop_permission(self, request: HttpRequest, _object_id: str | None = None) -> bool:
        """Return whether the user may change sweeps: stop them."""
        return request.user.has_perm("jobs.change_sweep")

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Stop"), permissions=("stop",)
    )
    def stop(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for a reason, and stop the sweep."""
        sweep = row_or_404(models.Sweep, object_id)
        return _ask_reason(
            request,
            self,
            title=_("Stop sweep %(sweep)d") % {"sweep": sweep.pk},
            text=_(
                "%(name)s of %(organization)s starts no more trials, and the open ones end as if the customer had "
                "cancelled them. The time used is charged, and the rest of the hold is released."
            )
            % {"name": sweep.name, "organization": sweep.organization.name},
            button=_("Stop sweep"),
            success=_("The sweep is being stopped."),
            back=reverse("admin:jobs_sweep_change", args=[sweep.pk]),
            perform=lambda person, why: stop_sweep_as_operator(actor=person, sweep=sweep, why=why),
        )


@admin.register(models.ClusterStatus)
class ClusterAdmin(ReadOnlyAdmin):
    """Clusters. Operators can drain one: no run starts there until they resume it."""

    list_display = ("name", "answers", "since", "checked_at", "drained_since", "drain_reason")
    actions_detail = ("drain", "resume")

    def has_operate_permission(self, request: HttpRequest, _object_id: str | None = None) -> bool:
        """Return whether the user may drain and resume clusters."""
        return request.user.has_perm("jobs.change_clusterstatus")

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Drain"), permissions=("operate",)
    )
    def drain(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for a reason, and let no more runs start on the cluster."""
        status = row_or_404(models.ClusterStatus, object_id)
        return _ask_reason(
            request,
            self,
            title=_("Drain the cluster %(name)s") % {"name": status.name},
            text=_("No run starts on it until you resume it. Runs that have started go on; each can be moved."),
            button=_("Drain"),
            success=_("No run starts on this cluster any more."),
            back=reverse("admin:jobs_clusterstatus_change", args=[status.pk]),
            perform=lambda person, why: operations.drain(cluster_name=status.name, actor=person, why=why),
        )

    @action(  # type: ignore[untyped-decorator]  # unfold publishes no types
        description=gettext_lazy("Resume"), permissions=("operate",)
    )
    def resume(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for confirmation, and let runs start on the cluster again."""
        status = row_or_404(models.ClusterStatus, object_id)
        return _ask_reason(
            request,
            self,
            title=_("Resume the cluster %(name)s") % {"name": status.name},
            text=_("Waiting jobs start on it again, oldest first."),
            button=_("Resume"),
            success=_("Runs start on this cluster again."),
            back=reverse("admin:jobs_clusterstatus_change", args=[status.pk]),
            perform=lambda person, _why: operations.resume(cluster_name=status.name, actor=person),
            needs_reason=False,
        )


@admin.register(models.Order)
class OrderAdmin(LargeTableAdmin):
    """Orders."""

    list_display = ("id", "organization", "product", "placed_by", "created_at")
    list_select_related = ("organization", "product", "placed_by")
    search_fields = ("id", "organization__name")


@admin.register(models.PackageLayer)
class PackageLayerAdmin(ReadOnlyAdmin):
    """Packages of customers' requirements files."""

    list_display = ("organization", "image", "cluster", "state", "size_bytes", "requested_at", "used_at")
    list_select_related = ("organization", "image")
    list_filter = ("state",)
    search_fields = ("organization__name", "requirements")


def _query_number(request: HttpRequest, name: str) -> int:
    """Return a number of the URL's query; 0 if it is missing or invalid."""
    text = request.GET.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= MAX_OFFSET_DIGITS else 0


def _ask_reason(
    request: HttpRequest,
    model_admin: ModelAdmin,
    *,
    title: str,
    text: str,
    button: str,
    success: str,
    back: str,
    perform: Callable[[User, str], object],
    needs_reason: bool = True,
) -> HttpResponse:
    """Show a page that asks for a reason, or only for confirmation.

    On POST, call `perform` with the user and the reason, show the message `success`, and redirect to the URL `back`.
    """
    why, error, person = request.POST.get("why", ""), "", _person(request)
    if request.method == "POST" and person:
        try:
            perform(person, why)
        except CustomerError as refused:
            error = " ".join(map(str, refused.fields.values())) or str(refused.message)
        else:
            messages.success(request, success)
            return redirect(back)
    context: dict[str, Any] = {"title": title, "text": text, "button": button, "why": why, "error": error, "back": back}
    context |= {"needs_reason": needs_reason}
    return render(request, "admin/ask_reason.html", {**model_admin.admin_site.each_context(request), **context})


def _person(request: HttpRequest) -> User | None:
    """Return the logged-in user, as a `User` for the type checker; None if nobody is logged in."""
    return request.user if isinstance(request.user, User) else None


def _accuracy_report(outcomes: list[estimates.EstimateOutcome]) -> Report:
    """Return the report on the accuracy of estimates. `outcomes` begin with the latest run."""
    weeks = estimates.accuracy(outcomes)
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
        for each in outcomes[:RUNS_SHOWN]
    ]
    return Report(
        title=_("Estimate accuracy"),
        figures=((_("Completed runs"), str(len(outcomes))),),
        notes=(
            _(
                "The error is the difference between a run's time and the p50 of its quote, in either "
                "direction. Half of the runs have a smaller error than the median."
            ),
            _("With good estimates, 9 of 10 runs end within p90."),
        ),
        tables=(
            Table(
                _("By week"),
                (_("Week"), _("Basis"), _("Runs"), _("Median error"), _("Within p90")),
                [[row.week, row.source, row.runs, f"{row.median_error:.0%}", f"{row.within_p90:.0%}"] for row in weeks],
            ),
            Table(
                _("Latest runs"),
                (
                    _("Job"),
                    _("Customer"),
                    _("Basis"),
                    _("Runs"),
                    _("p50 (s)"),
                    _("p90 (s)"),
                    _("Actual (s)"),
                    pgettext("of an estimate", "Error"),
                ),
                newest,
            ),
        ),
        back=reverse("admin:jobs_job_changelist"),
    )

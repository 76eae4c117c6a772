"""The page of a job: its header, and tabs that are rendered when they are opened.

The job's event stream sends no texts. When it reports a change, the page requests `job_live`, which renders the header
and the visible tab in the reader's language.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.db.models import prefetch_related_objects
from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET

from billing.amounts import money
from console.accounts.roles import Capability
from console.core.errors import CustomerError, NotFound
from console.web.access import MemberRequest, member
from jobs import (
    checks,
    estimates,
    expiry,
    failures,
    notebooks,
    packages,
    reruns,
    results,
    run_specs,
    selectors,
    shells,
    snapshots,
    telemetry,
    tensorboards,
)
from jobs.diagnosis import Fix
from jobs.failures import Explanation
from jobs.messages import running_sentence, stopping_sentence
from jobs.models import Job, title_of_reason
from jobs.states import PLATFORM_FAULTS, JobState
from runtime.errors import RuntimeFault
from storage import selectors as storage
from storage.models import Allocation

OVERVIEW = "overview"
LIVE_TABS = frozenset({OVERVIEW, "nodes", "events", "cost"})
"""Tabs that `job_live` renders again when the job changes. The other tabs have their own streams, or never change."""
LOG_BYTES_SHOWN = 16 * 1024
"""How many bytes at the end of a log the page contains: a few screens. The script then loads more."""
EXTERNAL_TABS = frozenset({"files", "metrics", "telemetry"})
"""Tabs that this module does not render. htmx or a script loads their contents from other URLs."""


@require_GET
@member(Capability.VIEW)
def job_detail(request: MemberRequest, pk: int) -> HttpResponse:
    """Show a job with one tab, the overview unless `?tab=` names another."""
    job = selectors.job_for(request.membership.organization, pk)
    chosen = request.GET.get("tab", "")
    chosen = chosen if chosen in TABS or chosen in EXTERNAL_TABS else OVERVIEW
    context = header_context(job) | {"title": selectors.title_of(job), "chosen": chosen}
    if chosen in TABS:
        context |= TABS[chosen](job)
    return render(request, "jobs/job_detail.html", context)


@require_GET
@member(Capability.VIEW)
def job_tab(request: MemberRequest, pk: int, tab: str) -> HttpResponse:
    """Return the contents of a tab of the job page. `tab` is a key of TABS."""
    if tab not in TABS:
        raise NotFound
    job = selectors.job_for(request.membership.organization, pk)
    return render(request, f"jobs/_job_{tab}.html", _shared_context(job) | TABS[tab](job))


@require_GET
@member(Capability.VIEW)
def job_live(request: MemberRequest, pk: int) -> HttpResponse:
    """Return the header of the job page and, out of band, the tab that `?tab=` names if it is one of LIVE_TABS."""
    job = selectors.job_for(request.membership.organization, pk)
    context = header_context(job)
    tab = request.GET.get("tab", "")
    if tab in LIVE_TABS:
        context |= {"tab": tab, "tab_template": f"jobs/_job_{tab}.html"} | TABS[tab](job)
    return render(request, "jobs/_live.html", context)


@require_GET
@member(Capability.VIEW)
def job_stacks(request: MemberRequest, pk: int, attempt: int) -> HttpResponse:
    """Show the stacks of a hung attempt's ranks, and which ranks stopped at which line."""
    stacks = selectors.stacks(selectors.job_for(request.membership.organization, pk), attempt)
    ranks_by_frame: dict[str, list[int]] = {}
    for stack in stacks:
        ranks_by_frame.setdefault(_innermost_frame(stack["text"]), []).append(stack["rank"])
    frames = [{"line": frame, "ranks": ranks} for frame, ranks in ranks_by_frame.items() if frame]
    return render(request, "jobs/_job_stacks.html", {"stacks": stacks, "frames": frames})


def _shared_context(job: Job) -> dict[str, Any]:
    """Return the context of the header and most tabs: the job, its state, and until when its files are kept."""
    prefetch_related_objects([job], "attempts")
    summary = selectors.summary(job)
    summary["attempts"] = [_attempt_row(job, attempt) for attempt in summary["attempts"]]
    return {
        "job": job,
        "summary": summary,
        # The quote by which the job is charged: the quote of the order, or of a notebook's last extension.
        "quote": notebooks.current_quote(job),
        "files_end": _deletion_time(job),
        "keep_days": results.DEFAULT_RETENTION.days,
    }


def header_context(job: Job) -> dict[str, Any]:
    """Return the context of the header and of the parts that all tabs share."""
    shared = _shared_context(job)
    attempt_failures = [attempt["failure"] for attempt in shared["summary"]["attempts"] if attempt["failure"]]
    explanation = failures.explain(job)
    attempts = list(job.attempts.all())
    # Not `job.started_at`: if the start is observed after the cancel, only the attempt's time is set.
    has_started = bool(attempts) and attempts[-1].started_at is not None
    return shared | {
        "receipt": selectors.receipt(job) if job.is_ended else None,
        # What the last failed attempt reported. `explanation` is the console's diagnosis of it.
        "failure": attempt_failures[-1] if attempt_failures and job.state == JobState.FAILED else None,
        "explanation": explanation,
        "measures_purchase": selectors.measures_purchase(job),  # whether the job is a free estimate
        # Whether an attempt ended before all of its output was read, so that points of curves may still be missing.
        "has_unread_output": any(telemetry.has_rest(attempt) for attempt in attempts),
        "fix": _fix_button(job, explanation, has_files=shared["files_end"] is not None) if explanation else None,
        "files_expire_soon": expiry.files_expire_soon(job),
        # The price of a notebook in which the member can look into a failed job; None if the page offers none.
        "inspect_hourly_minor": notebooks.hourly_price_to_inspect(job),
        "has_tensorboard": job.started_at is not None and tensorboards.is_available(),
        "is_notebook_open": job.is_notebook and notebooks.socket_of(job) is not None,
        "may_extend": job.is_notebook and notebooks.is_extensible(job),
        "time_limit": _time_limit(job),
        "running": running_sentence(attempts[-1].current_nodes if attempts else 0, job.nodes),
        "stopping": stopping_sentence(has_started=has_started, is_notebook=job.is_notebook),
        "may_cancel": not job.is_ended and job.state != JobState.STOPPING,
    }


def _time_limit(job: Job) -> dict[str, Any] | None:
    """Return when a running notebook reaches its time limit, and how many seconds earlier the page begins to warn."""
    limit = notebooks.time_limit(job) if job.is_notebook else None
    if limit is None:
        return None
    seconds_left = max(0, math.ceil((limit.ends_at - timezone.now()).total_seconds()))
    warn_seconds = int(notebooks.notice_before_end(job).total_seconds())
    return {
        "ends_at": limit.ends_at,
        "seconds_left": seconds_left,
        "warn_seconds": warn_seconds,
        "is_near": seconds_left <= warn_seconds,
    }


def _overview(job: Job) -> dict[str, Any]:
    quote = job.order.quote
    return {
        # The quote names datasets and models. If it names none, no query is necessary.
        "datasets": run_specs.mounted_dataset_versions(job) if selectors.datasets_of(quote) else [],
        "models": run_specs.mounted_model_versions(job) if selectors.models_of(quote) else [],
        "published": storage.model_versions_of_job(job.organization, job.pk).only("number", "model__name")
        if job.is_ended
        else [],
        "packages": {"layer": job.packages, "log": packages.log_of(job.packages)} if job.packages else None,
        "checklist": checks.checklist(job) if job.is_check else [],
    }


def _logs(job: Job) -> dict[str, Any]:
    attempts = list(job.attempts.all())
    last_attempt = attempts[-1] if attempts else None
    failure = (last_attempt.failure if last_attempt else None) or {}
    shown_rank = failure.get("rank") or 0  # the rank that failed first; without one, rank 0
    last_number = last_attempt.number if last_attempt else 1
    return {
        "ranks": range(job.nodes * job.workers_per_node),
        "shown_rank": shown_rank,
        "attempt_numbers": [attempt.number for attempt in attempts],
        # The script replaces attempt and rank in this path by those that the reader chooses.
        "log_path": f"logs/attempt-{last_number}/rank-0.log",
        # A negative offset counts from the end. `at_line` leaves out the line that is cut at the beginning.
        "text": selectors.log(job, shown_rank, -LOG_BYTES_SHOWN, at_line=True).text,
    }


def _nodes(job: Job) -> dict[str, Any]:
    return {"nodes": [_node_row(node) for node in selectors.nodes(job)], "has_shells": shells.is_offered(job)}


def _events(job: Job) -> dict[str, Any]:
    return {"events": selectors.events(job)}


def _cost(job: Job) -> dict[str, Any]:
    return {
        "receipt": selectors.receipt(job) if job.is_ended else None,
        "outcome": None if job.is_notebook else estimates.outcome(job),  # a notebook's quote has no estimate
    }


def _configuration(job: Job) -> dict[str, Any]:
    context: dict[str, Any] = {
        "environment": _environment(job),
        # The last day that the form offers for keeping the job's files: its end is at most MAX_KEEP_DAYS from now.
        "latest_keep": timezone.now() + timedelta(days=settings.MAX_KEEP_DAYS - 1),
    }
    if not job.builtin_script:  # a notebook or image check runs a script of the console instead of a customer's
        context |= {"configuration": reruns.configuration(job), "script_path": snapshots.script_path(job)}
    return context


TABS: dict[str, Callable[[Job], dict[str, Any]]] = {
    OVERVIEW: _overview,
    "logs": _logs,
    "nodes": _nodes,
    "events": _events,
    "cost": _cost,
    "configuration": _configuration,
}
"""Functions that return the context of each tab besides `_shared_context`. The template is `jobs/_job_<tab>.html`."""


def _fix_button(job: Job, explanation: Explanation, *, has_files: bool) -> dict[str, str]:
    """Return the button beside a diagnosis, as `url`, `title` and `icon`. It leads to what the customer can do now."""
    fix, frame = explanation.diagnosis.fix, explanation.diagnosis.frame
    order_url = f"{reverse('training_new')}?"
    if explanation.changes:  # an order with these changes would avoid the failure
        url = order_url + urlencode({"rerun": job.pk, **explanation.changes})
        if explanation.hourly_minor is None:  # only a change of the node spec has a price
            title = _("Run again with batch size %(size)s") % {"size": explanation.changes["batch_size"]}
        else:
            title = _("Run again on %(spec)s, %(price)s per node-hour") % {
                "spec": explanation.spec_title,
                "price": money(explanation.hourly_minor, job.order.quote.currency),
            }
        return {"url": url, "title": title, "icon": "repeat"}
    if fix is Fix.LONGER and has_files:
        url = order_url + urlencode({"rerun": job.pk, "from_checkpoint": job.pk})
        return {"url": url, "title": _("Continue with a higher time limit"), "icon": "rocket"}
    if fix is Fix.FILES and has_files:
        return {"url": reverse("job_files", args=[job.pk]), "title": _("Look at the files"), "icon": "folder"}
    if fix is Fix.REQUIREMENTS and not job.workspace.deleted_at:
        path = job.requirements_path or posixpath.join(posixpath.dirname(job.code_path), "requirements.txt")
        url = reverse("workspace_file", args=[job.workspace.name, path])
        return {"url": f"{url}?new=1", "title": _("Open requirements.txt"), "icon": "file-text"}
    if fix is Fix.EDIT and frame is not None and not job.workspace.deleted_at:
        path = _path_in_workspace(job, frame.file)
        url = reverse("workspace_file", args=[job.workspace.name, path or job.code_path])
        title = _("Open %(file)s") % {"file": posixpath.basename(path or job.code_path)}
        return {"url": f"{url}#L{frame.line}" if path else url, "title": title, "icon": "file-text"}
    url = order_url + urlencode({"rerun": job.pk})
    # After a fault of the platform, nothing in the order needs a change.
    title = _("Run again") if job.reason in PLATFORM_FAULTS else _("Change the order and run again")
    return {"url": url, "title": title, "icon": "repeat"}


def _path_in_workspace(job: Job, file: str) -> str:
    """Return the path in the workspace of a file that a traceback names; empty if the file is not in the workspace."""
    prefix = f"{run_specs.WORKSPACE_PATH}/"
    if not file.startswith(prefix):
        # The launcher may report the file's name without its folder.
        return job.code_path if posixpath.basename(file) == posixpath.basename(job.code_path) else ""
    path = file.removeprefix(prefix)
    is_inside = posixpath.normpath(path) == path and not path.startswith(("/", ".."))
    return path if is_inside else ""


def _deletion_time(job: Job) -> datetime | None:
    """Return when the job's files will be deleted. None if the job is open, or its files are already deleted."""
    end = results.deletion_time(job)
    has_files = end is not None and Allocation.objects.filter(key=results.allocation_key(job.pk)).exists()
    return end if has_files else None


def _attempt_row(job: Job, attempt: dict[str, Any]) -> dict[str, Any]:
    """Return an attempt with the values that its table row shows. A span is a time with a constant number of nodes."""
    spans = [
        span | {"seconds": (span["finished_at"] - span["started_at"]).total_seconds()} for span in attempt["spans"]
    ]
    started_at, checkpoint_at = attempt["started_at"], attempt["checkpoint_at"]
    return attempt | {
        "reason_title": title_of_reason(attempt["reason"], is_notebook=job.is_notebook),
        "ran_seconds": sum(span["seconds"] for span in spans) if spans else None,
        "spans": spans,
        # An older checkpoint was written by an earlier attempt.
        "has_checkpoint": bool(started_at and checkpoint_at and checkpoint_at >= started_at),
    }


def _node_row(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node with its Unix times converted to datetimes."""
    times = ("started_at", "finished_at")
    return node | {
        name: datetime.fromtimestamp(node[name], tz=UTC) if node.get(name) is not None else None for name in times
    }


def _innermost_frame(text: str) -> str:
    """Return the innermost frame (`File "...", line ...`) of the current thread in faulthandler's output, or "".

    faulthandler writes the innermost frame of each thread first.
    """
    _before, current, after = text.partition("Current thread")
    lines = (after if current else text).splitlines()
    return next((line.strip() for line in lines if line.lstrip().startswith("File ")), "")


def _environment(job: Job) -> dict[str, str]:
    """Return the environment variables of rank 0; none after an error, so that the tab still shows its other parts."""
    try:
        return selectors.environment(job)
    except (CustomerError, RuntimeFault):  # RuntimeFault: the cluster is no longer in the settings
        return {}

"""Pages of a job's files: outputs, checkpoints and logs. Downloads go directly to the API."""

from __future__ import annotations

import posixpath
from typing import Any
from urllib.parse import urlencode

from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET

from console.accounts.roles import Capability
from console.core.errors import CustomerError, NotFound
from console.web.access import MemberRequest, error_text, member
from jobs import job_files as files
from jobs import results, selectors
from jobs.models import Job
from storage.downloads import show_image
from storage.errors import WrongKind
from storage.previews import preview

PAGE_ROWS = 200
"""How many entries of a folder one page shows. A folder may have millions."""


@require_GET
@member(Capability.VIEW)
def job_files(request: MemberRequest, pk: int, path: str = "") -> HttpResponse:
    """Show a folder of a job's files. htmx gets only the contents of the tab *Files* on the job's page."""
    job = selectors.job_without_relations(request.membership.organization, pk)
    context: dict[str, Any] = {
        "job": job,
        "path": path.strip("/"),
        "crumbs": _crumbs(job, path),
        # The deletion time is set when the job ends. Until then, show the one that the customer asked for, if any.
        "deletion_at": results.deletion_time(job) or job.keep_until,
        "keep_days": results.DEFAULT_RETENTION.days,
    }
    try:
        page = files.list_files(job, path, limit=PAGE_ROWS, after=request.GET.get("after", ""))
    except WrongKind:  # a file, not a folder
        return redirect("job_file", pk, path)
    except CustomerError as error:
        context["problem"] = error_text(error)
    else:
        context["rows"] = [(entry, posixpath.basename(entry.path)) for entry in page.entries]
        # Folders at the top and below `logs` are listed even before the run creates them.
        context["has_files"] = any(entry.exists for entry in page.entries)
        context["next_url"] = page.next and f"{_folder_url(job, path)}?{urlencode({'after': page.next})}"
    return render(request, "jobs/_job_files.html" if request.htmx else "jobs/job_files.html", context)


@require_GET
@member(Capability.VIEW)
def job_file(request: MemberRequest, pk: int, path: str) -> HttpResponse:
    """Show the beginning of a file, or why it cannot be shown."""
    job = selectors.job_without_relations(request.membership.organization, pk)
    name = posixpath.basename(path)
    context: dict[str, Any] = {"job": job, "path": path, "crumbs": _crumbs(job, posixpath.dirname(path)), "name": name}
    try:
        file = files.read(job, path)
    except CustomerError as error:
        context["problem"] = error_text(error)
        return render(request, "jobs/job_file.html", context)
    with file.stream:
        context |= {"file": file, "preview": preview(file, name=name)}
    return render(request, "jobs/job_file.html", context)


@require_GET
@member(Capability.VIEW)
def job_picture(request: MemberRequest, pk: int, path: str) -> HttpResponseBase:
    """Return a file of the job that is a picture, for the page `job_file`. A file of another type gives 404."""
    try:
        file = files.read(selectors.job_without_relations(request.membership.organization, pk), path)
    except CustomerError as error:
        raise NotFound(error.message) from error
    return show_image(request, file)


def _folder_url(job: Job, path: str) -> str:
    return reverse("job_folder", args=[job.pk, path]) if path else reverse("job_files", args=[job.pk])


def _crumbs(job: Job, path: str) -> list[tuple[str, str]]:
    """Return the name and the URL of each folder on the way to `path`, from the top."""
    parts = [part for part in path.split("/") if part]
    urls = [_folder_url(job, "/".join(parts[:end])) for end in range(1, len(parts) + 1)]
    return [(_("Files"), _folder_url(job, "")), *zip(parts, urls, strict=True)]

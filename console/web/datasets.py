"""Pages of datasets, their versions and the files in them. `static/js/upload.js` uploads files directly to the API."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Any

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.accounts.roles import Capability
from console.core.errors import CustomerError, InvalidInput, NotFound
from console.web.access import MemberRequest, errors_as_message, errors_in_form, member, show_error
from console.web.amounts import parse_row_id
from console.web.searching import search_and_sort
from jobs import dataset_publishing
from jobs import selectors as jobs
from storage import (
    bucket_import,
    catalog,
    dataset_files,
    direct_uploads,
    imports,
    previews,
    retention,
    secret_store,
    selectors,
    sharing,
)
from storage.downloads import download, show_image
from storage.errors import WrongKind
from storage.models import Dataset, DatasetVersion

PAGE_SIZE = 50
"""Datasets or workspaces per page of a list."""


@dataclass(frozen=True)
class Crumb:
    """A folder in a breadcrumb. `path` begins at the top of the dataset version or workspace."""

    name: str
    path: str


class NamedForm(forms.Form):
    """The form of a new dataset or workspace. The services validate the name."""

    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=63,
        help_text=gettext_lazy("Lowercase letters, digits, hyphens and underscores."),
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}),
    )
    description = forms.CharField(
        label=gettext_lazy("Description"), required=False, widget=forms.Textarea(attrs={"rows": 3})
    )


@require_GET
@member(Capability.VIEW)
def dataset_list(request: MemberRequest) -> HttpResponse:
    """List the datasets of a search with their latest versions.

    Below them are the datasets of other organizations that this one may read (`borrowed`).
    """
    datasets, search = search_and_sort(request, selectors.datasets_for(request.membership.organization))
    page = Paginator(datasets, PAGE_SIZE).get_page(request.GET.get("page"))
    context = search | {"page": page, "borrowed": sharing.borrowed_datasets(request.membership.organization)}
    return render(request, "storage/dataset_list.html", context)


@require_http_methods(["GET", "POST"])
@member(Capability.STORE)
def dataset_new(request: MemberRequest) -> HttpResponse:
    """Create a dataset. Its files are uploaded on its page."""
    form = NamedForm(request.POST if request.method == "POST" else None)
    if form.is_valid():
        with errors_in_form(form):
            dataset = catalog.create_dataset(
                organization=request.membership.organization, user=request.membership.user, **form.cleaned_data
            )
            return redirect("dataset_detail", dataset.name)
    return render(request, "storage/dataset_new.html", {"form": form})


@require_GET
@member(Capability.VIEW)
def dataset_detail(request: MemberRequest, name: str) -> HttpResponse:
    """Show a dataset's versions. Members of its own organization also see its shares and the form for an upload."""
    return _render_dataset(request, sharing.usable_dataset_named(request.membership.organization, name))


@require_POST
@member(Capability.STORE)
def dataset_copy(request: MemberRequest, name: str) -> HttpResponse:
    """Publish files of a workspace or of a job as the next version."""
    organization, user = request.membership.organization, request.membership.user
    dataset = selectors.dataset_named(organization, name)
    path = request.POST.get("path", "").strip()
    job_pk = parse_row_id(request.POST.get("job", "").lstrip("#"))  # pages show job 12 as "#12"
    with errors_as_message(request):
        if "job" in request.POST:  # one of the page's two forms; the other names a workspace
            if job_pk is None:
                raise InvalidInput(fields={"job": _("Enter the number of a job.")})
            job = jobs.job_for(organization, job_pk)
            version = dataset_publishing.publish_job_files(dataset=dataset, user=user, job=job, path=path)
        else:
            workspace = selectors.workspace_named(organization, request.POST.get("workspace", ""))
            version = dataset_publishing.publish_workspace_folder(
                dataset=dataset, user=user, workspace=workspace, path=path
            )
        messages.success(request, _("%(version)s was published.") % {"version": version})
    return redirect("dataset_detail", name)


@require_http_methods(["GET", "POST"])
@member(Capability.STORE)
def dataset_import(request: MemberRequest, name: str) -> HttpResponse:
    """Start an import (POST), or return the progress of imports for the dataset's page (GET)."""
    dataset = selectors.dataset_named(request.membership.organization, name)
    if request.method == "GET":
        response = render(request, "storage/_imports.html", {"dataset": dataset} | _imports_context(dataset))
        if not imports.open_imports().filter(dataset=dataset).exists():
            response["HX-Refresh"] = "true"  # htmx reloads the whole page, which then shows the new version
        return response
    with errors_as_message(request):
        fields = ("url", "endpoint", "access_key_id_secret", "secret_access_key_secret")
        values = {field: request.POST.get(field, "") for field in fields}
        imports.start_import(dataset=dataset, user=request.membership.user, **values)
        messages.success(request, _("The import has started."))
    return redirect("dataset_detail", name)


@require_POST
@member(Capability.STORE)
def share_new(request: MemberRequest, name: str) -> HttpResponse:
    """Create a share, and show once the code with which another organization accepts it."""
    dataset = selectors.dataset_named(request.membership.organization, name)
    code = ""
    with errors_as_message(request):
        _share, code = sharing.create_share(
            dataset=dataset, user=request.membership.user, label=request.POST.get("label", "")
        )
    return _render_dataset(request, dataset, code) if code else redirect("dataset_detail", name)


@require_POST
@member(Capability.STORE)
def share_revoke(request: MemberRequest, name: str, pk: int) -> HttpResponse:
    """End a share."""
    share = sharing.share_of(selectors.dataset_named(request.membership.organization, name), pk)
    with errors_as_message(request):
        sharing.revoke_share(share=share, user=request.membership.user)
        messages.success(request, _("The share was revoked. Runs that were already ordered go on."))
    return redirect("dataset_detail", name)


@require_POST
@member(Capability.STORE)
def share_accept(request: MemberRequest) -> HttpResponse:
    """Accept a share by its code."""
    organization, user = request.membership.organization, request.membership.user
    name = ""
    with errors_as_message(request):
        name = sharing.accept_share(organization=organization, user=user, code=request.POST.get("code", "")).name
        messages.success(request, _("You can now use the dataset %(name)s.") % {"name": name})
    return redirect("dataset_detail", name) if name else redirect("dataset_list")


@require_POST
@member(Capability.STORE)
def share_leave(request: MemberRequest, name: str) -> HttpResponse:
    """Give up a shared dataset."""
    sharing.leave_share(organization=request.membership.organization, user=request.membership.user, name=name)
    messages.success(request, _("You no longer use the shared dataset %(name)s.") % {"name": name})
    return redirect("dataset_list")


@require_POST
@member(Capability.STORE)
def dataset_delete(request: MemberRequest, name: str) -> HttpResponse:
    """Delete a dataset with all its versions."""
    dataset = selectors.dataset_named(request.membership.organization, name)
    try:
        retention.delete_dataset(dataset=dataset, user=request.membership.user)
    except CustomerError as error:
        show_error(request, error)
        return redirect("dataset_detail", name)
    messages.success(request, _("The dataset %(name)s was deleted.") % {"name": name})
    return redirect("dataset_list")


@require_POST
@member(Capability.STORE)
def version_delete(request: MemberRequest, name: str, number: int) -> HttpResponse:
    """Delete one version of a dataset."""
    version = selectors.version_numbered(selectors.dataset_named(request.membership.organization, name), number)
    with errors_as_message(request):
        retention.delete_version(version=version, user=request.membership.user)
        messages.success(request, _("%(version)s was deleted.") % {"version": version})
    return redirect("dataset_detail", name)


@require_GET
@member(Capability.VIEW)
def version_detail(request: MemberRequest, name: str, number: int, path: str = "") -> HttpResponse:
    """Show a folder of a version with its README. The path of a file redirects to its preview."""
    version, after = _version(request, name, number), request.GET.get("after", "")
    try:
        page = dataset_files.list_page(version=version, path=path, after=after)
    except WrongKind:
        return redirect("dataset_file", name, number, path)
    except CustomerError as error:
        if not path and not after:  # the first page of the version: a redirect would lead to it again
            raise
        show_error(request, error)
        return redirect("dataset_version", name, number)
    context = {
        "dataset": version.dataset,
        "version": version,
        "path": path,
        "crumbs": crumbs_of(path),
        "page": page,
        "readme": dataset_files.readme(version=version, folder=path),
    }
    return render(request, "storage/dataset_version.html", context)


@require_GET
@member(Capability.VIEW)
def version_file(request: MemberRequest, name: str, number: int, path: str) -> HttpResponse:
    """Show a preview of a file, with its hash and number of lines."""
    version = _version(request, name, number)
    try:
        file = dataset_files.read(version=version, path=path)
    except CustomerError as error:
        show_error(request, error)
        return redirect("dataset_version", name, number)
    with file.stream:
        preview = previews.preview(file, name=path)
        is_text = preview.text is not None or bool(preview.rows)
        lines = previews.line_count(file) if is_text else None
    context = {
        "dataset": version.dataset,
        "version": version,
        "path": path,
        "crumbs": crumbs_of(path)[:-1],  # only the folders; the page shows the file's name by itself
        "file_name": posixpath.basename(path),
        "file": file,
        "sha256": dataset_files.sha256(version=version, path=path),
        "preview": preview,
        "lines": lines,
    }
    return render(request, "storage/dataset_file.html", context)


@require_GET
@member(Capability.VIEW)
def version_download(request: MemberRequest, name: str, number: int, path: str) -> HttpResponseBase:
    """Download a file."""
    version = _version(request, name, number)
    try:
        file = dataset_files.read(version=version, path=path)
    except CustomerError as error:
        show_error(request, error)
        return redirect("dataset_version", name, number)
    return download(request, file, name=posixpath.basename(path))


@require_GET
@member(Capability.VIEW)
def version_image(request: MemberRequest, name: str, number: int, path: str) -> HttpResponseBase:
    """Return a picture, for the page that shows the file. A file of another type gives 404."""
    version = _version(request, name, number)
    try:
        file = dataset_files.read(version=version, path=path)
    except CustomerError as error:
        raise NotFound(error.message) from error
    return show_image(request, file)


def crumbs_of(path: str) -> list[Crumb]:
    """Return the breadcrumb of a path, from the top."""
    parts = [part for part in path.split("/") if part]
    return [Crumb(part, "/".join(parts[: index + 1])) for index, part in enumerate(parts)]


def _imports_context(dataset: Dataset) -> dict[str, Any]:
    """Return the context of `_imports.html`."""
    rows = imports.shown_imports(dataset)
    return {"imports": rows, "imports_open": any(row.ended_at is None for row in rows)}


def _version(request: MemberRequest, name: str, number: int) -> DatasetVersion:
    return selectors.version_numbered(sharing.usable_dataset_named(request.membership.organization, name), number)


def _render_dataset(request: MemberRequest, dataset: Dataset, code: str = "") -> HttpResponse:
    """Render a dataset's page. `code` is the code of a share that was just created."""
    is_own = dataset.organization_id == request.membership.organization_id
    context = {
        "dataset": dataset,
        "versions": selectors.versions_of(dataset),
        "workspaces": selectors.workspaces_for(request.membership.organization),
        "is_own": is_own,
        "may_store": is_own and request.membership.allows(Capability.STORE),
        "shares": sharing.open_shares(dataset) if is_own else (),
        "code": code,
        # From this size on, the browser uploads a file directly to the operator's bucket; None: never.
        "direct_from_bytes": direct_uploads.min_bytes_in_pages(),
        "offers_imports": imports.is_offered(),
        "endpoints": bucket_import.allowed_endpoints(),  # the object storage from which imports may read
        # An import from a bucket takes its credentials from secrets.
        "secrets": secret_store.secrets_for(request.membership.organization)
        if bucket_import.allowed_endpoints()
        else (),
    } | (_imports_context(dataset) if is_own else {})
    response = render(request, "storage/dataset_detail.html", context)
    if code:
        # The code is a secret: it lets any organization use the dataset.
        response["Cache-Control"] = "private, no-store"
    return response

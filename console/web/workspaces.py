"""Workspaces: their files in the browser, and the editor. Uploads go from the browser straight to the API.

The one rule: a path is never touched here; `storage.files` says what it means and what is safe.
"""

from __future__ import annotations

import io
import json
import posixpath
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.accounts.errors import CustomerError
from console.accounts.roles import Capability
from console.web.access import MemberRequest, member, refuse, tell
from console.web.datasets import PAGE, NamedForm
from storage import catalog, files, selectors
from storage.errors import FileMissing, NotText, WrongKind
from storage.models import Workspace
from storage.paths import Kind

ROWS_SHOWN = 1000
MODES = {
    ".py": "python",
    ".sh": "shell",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "javascript",
    ".js": "javascript",
    ".md": "markdown",
}
"""File name's ending -> CodeMirror's mode."""


@dataclass(frozen=True)
class Crumb:
    """One folder on the way to where one is."""

    name: str
    path: str


@require_GET
@member(Capability.VIEW)
def workspace_list(request: MemberRequest) -> HttpResponse:
    """Every workspace."""
    page = Paginator(selectors.workspaces_for(request.membership.organization), PAGE).get_page(request.GET.get("page"))
    return render(request, "storage/workspace_list.html", {"page": page})


@require_http_methods(["GET", "POST"])
@member(Capability.STORE)
def workspace_new(request: MemberRequest) -> HttpResponse:
    """Make an empty workspace."""
    form = NamedForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            made = catalog.create_workspace(
                organization=request.membership.organization, user=request.membership.user, **form.cleaned_data
            )
        except CustomerError as error:
            refuse(form, error)
        else:
            return redirect("workspace_detail", made.name)
    return render(request, "storage/workspace_new.html", {"form": form})


@require_GET
@member(Capability.VIEW)
def workspace_detail(request: MemberRequest, name: str, path: str = "") -> HttpResponse:
    """A folder of a workspace."""
    workspace = _workspace(request, name)
    try:
        listing = files.list_folder(root=selectors.workspace_folder(workspace), path=path, limit=ROWS_SHOWN)
    except WrongKind:
        return redirect("workspace_file", name, path)
    except CustomerError as error:
        if not path:
            raise
        tell(request, error)
        return redirect("workspace_detail", name)
    entries = sorted(listing.entries, key=lambda entry: (entry.kind != Kind.FOLDER, entry.name.lower()))
    return render(
        request,
        "storage/workspace_detail.html",
        {
            "workspace": workspace,
            "path": path,
            "crumbs": _crumbs(path),
            "rows": [(entry, posixpath.join(path, entry.name)) for entry in entries],
            "truncated": listing.truncated,
        },
    )


@require_GET
@member(Capability.VIEW)
def workspace_file(request: MemberRequest, name: str, path: str) -> HttpResponse:
    """One file in the editor; a sentence where it can't be shown as text. `?new=1` opens one that is not there yet."""
    workspace = _workspace(request, name)
    root = selectors.workspace_folder(workspace)
    mode = MODES.get(posixpath.splitext(path)[1].lower(), "")
    context: dict[str, Any] = {
        "workspace": workspace,
        "path": path,
        "crumbs": _crumbs(path)[:-1],
        "file_name": posixpath.basename(path),
        "mode": mode,
        "mode_script": f"vendor/codemirror/mode/{mode}.js" if mode else "",
        "text_limit": files.TEXT_LIMIT,
    }
    try:
        context["text"] = files.read_text(root=root, path=path)
        context["entry"] = files.stat(root=root, path=path)
    except FileMissing as error:
        if "new" not in request.GET:
            tell(request, error)
            return redirect("workspace_detail", name)
        context |= {"text": "", "is_new": True}
    except NotText as error:
        context |= {"refusal": error.message, "entry": files.stat(root=root, path=path)}
    except WrongKind:
        return redirect("workspace_folder", name, path)
    except CustomerError as error:
        tell(request, error)
        return redirect("workspace_detail", name)
    return render(request, "storage/workspace_file.html", context)


@require_POST
@member(Capability.STORE)
def workspace_save(request: MemberRequest, name: str, path: str) -> JsonResponse:
    """Write a file's text, sent as JSON `{text}`, so that its line ends come as they are."""
    workspace = _workspace(request, name)
    try:
        text = str(json.loads(request.body)["text"])
        if len(text.encode()) > files.TEXT_LIMIT:
            raise NotText(_("This is larger than the editor may save. Upload the file instead."))
        catalog.write_file(workspace=workspace, path=path, stream=io.BytesIO(text.encode()))
    except (ValueError, KeyError, TypeError):
        return JsonResponse({"message": _("The text did not come whole. Save again.")}, status=400)
    except CustomerError as error:
        return JsonResponse({"message": str(error.message)}, status=400)
    return JsonResponse({"message": _("Saved.")})


@require_GET
@member(Capability.VIEW)
def workspace_download(request: MemberRequest, name: str, path: str) -> HttpResponseBase:
    """A file as it is, to be saved."""
    workspace = _workspace(request, name)
    try:
        opened = files.read(root=selectors.workspace_folder(workspace), path=path)
    except CustomerError as error:
        tell(request, error)
        return redirect("workspace_detail", name)
    headers = {
        "Content-Disposition": content_disposition_header(as_attachment=True, filename=posixpath.basename(path)) or "",
        "Content-Length": str(opened.size),
    }
    return StreamingHttpResponse(opened, content_type="application/octet-stream", headers=headers)


@require_POST
@member(Capability.STORE)
def workspace_new_entry(request: MemberRequest, name: str) -> HttpResponse:
    """Make a folder, or open a new file in the editor."""
    workspace = _workspace(request, name)
    folder, entry = request.POST.get("folder", ""), request.POST.get("name", "").strip()
    path = posixpath.join(folder, entry.strip("/"))
    if not entry:
        messages.error(request, _("Give a name."))
        return _to_folder(name, folder)
    if request.POST.get("kind") == "file":
        return redirect(f"{_file_url(name, path)}?new=1")
    try:
        files.make_folder(root=selectors.workspace_folder(workspace), path=path)
    except CustomerError as error:
        tell(request, error)
        return _to_folder(name, folder)
    return redirect("workspace_folder", name, path)


@require_POST
@member(Capability.STORE)
def workspace_move(request: MemberRequest, name: str) -> HttpResponse:
    """Rename or move a file or folder."""
    workspace = _workspace(request, name)
    source, target = request.POST.get("source", ""), request.POST.get("target", "").strip().strip("/")
    try:
        files.move(root=selectors.workspace_folder(workspace), source=source, target=target)
        messages.success(request, _("It is at %(path)s now.") % {"path": target})
    except CustomerError as error:
        tell(request, error)
    return _to_folder(name, posixpath.dirname(source))


@require_POST
@member(Capability.STORE)
def workspace_delete_entry(request: MemberRequest, name: str) -> HttpResponse:
    """Delete a file, or a folder with all in it."""
    workspace = _workspace(request, name)
    path = request.POST.get("path", "")
    try:
        catalog.delete_file(workspace=workspace, path=path)
        messages.success(request, _("%(path)s was deleted.") % {"path": path})
    except CustomerError as error:
        tell(request, error)
    return _to_folder(name, posixpath.dirname(path))


@require_POST
@member(Capability.STORE)
def workspace_delete(request: MemberRequest, name: str) -> HttpResponse:
    """Delete a workspace with all its files."""
    workspace = _workspace(request, name)
    try:
        catalog.delete_workspace(workspace=workspace, user=request.membership.user)
    except CustomerError as error:
        tell(request, error)
        return redirect("workspace_detail", name)
    messages.success(request, _("The workspace %(name)s was deleted.") % {"name": name})
    return redirect("workspace_list")


def _workspace(request: MemberRequest, name: str) -> Workspace:
    return selectors.workspace_named(request.membership.organization, name)


def _crumbs(path: str) -> list[Crumb]:
    parts = [part for part in path.split("/") if part]
    return [Crumb(part, "/".join(parts[: at + 1])) for at, part in enumerate(parts)]


def _to_folder(name: str, folder: str) -> HttpResponse:
    return redirect("workspace_folder", name, folder) if folder else redirect("workspace_detail", name)


def _file_url(name: str, path: str) -> str:
    return reverse("workspace_file", args=[name, path])

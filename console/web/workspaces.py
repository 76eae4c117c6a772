"""Pages of workspaces: file browser and editor.

The browser uploads directly to the API. `storage.files` resolves all paths, so no view checks them.
"""

from __future__ import annotations

import io
import json
import posixpath
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.accounts.models import Organization
from console.accounts.roles import Capability
from console.core.errors import CustomerError, NotFound
from console.web.access import MemberRequest, errors_as_message, errors_in_form, member, show_error
from console.web.datasets import PAGE_SIZE, NamedForm, crumbs_of
from console.web.searching import search_and_sort
from storage import (
    catalog,
    copies,
    direct_uploads,
    files,
    recycle_bin,
    retention,
    search,
    secret_store,
    selectors,
    workspace_imports,
)
from storage.diffs import line_diff
from storage.downloads import download, show_image
from storage.errors import FileChanged, FileMissing, NameTaken, NotText, WrongKind
from storage.models import Workspace, WorkspaceImport
from storage.notebooks import EXPORT_MARK, read_notebook, script_of
from storage.paths import Kind
from storage.previews import IMAGE_BYTES, image_type
from storage.workspace_sources import start_workspace
from storage.workspace_templates import templates

PAGE_ROWS = 500
"""How many entries of a folder one page shows. Longer tables are slow in browsers."""
MAX_EXISTING_NAMED = 10
"""How many of the files that an upload would replace the page names when it asks. An ellipsis stands for the others."""
MAX_PATHS_LOOKED_UP = 20_000
"""For how many files of an upload `workspace_existing` looks up whether they exist. 20,000 take half a second, but a
request of the size that the server accepts could name a million."""
SIGNATURE_BYTES = 16
"""How many bytes of a file `image_type` gets. The longest signature that it knows has 12."""
EDITOR_MODES = {
    ".py": "python",
    ".sh": "shell",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "javascript",
    ".js": "javascript",
    ".md": "markdown",
}
"""CodeMirror mode by file extension. The mode `javascript` covers JSON."""


class WorkspaceForm(NamedForm):
    """The form of a new workspace. The services validate the choice of its first files."""

    template = forms.ChoiceField(label=gettext_lazy("Start with an example"), required=False)
    copy_of = forms.ChoiceField(label=gettext_lazy("Or with a copy of a workspace"), required=False)
    git_url = forms.CharField(
        label=gettext_lazy("Or with a git repository"),
        required=False,
        max_length=500,
        help_text=gettext_lazy("Its https address. The files of one commit are copied, without the history."),
        widget=forms.URLInput(attrs={"placeholder": "https://github.com/name/repository.git"}),
    )
    git_branch = forms.CharField(label=gettext_lazy("Branch or tag"), required=False, max_length=200)
    git_secret = forms.ChoiceField(
        label=gettext_lazy("Access token"),
        required=False,
        help_text=gettext_lazy("For a private repository: a secret that contains a token with read access."),
    )

    def __init__(self, *args: Any, organization: Organization, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = selectors.workspaces_for(organization).values_list("name", flat=True)
        secrets = [(secret.name, secret.name) for secret in secret_store.secrets_for(organization)]
        cast("forms.ChoiceField", self.fields["git_secret"]).choices = [("", _("None")), *secrets]
        examples = [(template.name, f"{template.name}: {template.title}") for template in templates().values()]
        cast("forms.ChoiceField", self.fields["template"]).choices = [("", _("No example")), *examples]
        cast("forms.ChoiceField", self.fields["copy_of"]).choices = [
            ("", _("No copy")),
            *((name, name) for name in names),
        ]


@require_GET
@member(Capability.VIEW)
def workspace_list(request: MemberRequest) -> HttpResponse:
    """List the workspaces of a search."""
    workspaces, search_context = search_and_sort(request, selectors.workspaces_for(request.membership.organization))
    page = Paginator(workspaces, PAGE_SIZE).get_page(request.GET.get("page"))
    context = {"page": page, **search_context, **_imports_context(request)}
    return render(request, "storage/workspace_list.html", context)


@require_GET
@member(Capability.VIEW)
def workspace_imports_progress(request: MemberRequest) -> HttpResponse:
    """Return the progress of imports, for the list of workspaces."""
    context = _imports_context(request)
    response = render(request, "storage/_workspace_imports.html", context)
    if not context["imports_open"]:
        response["HX-Refresh"] = "true"  # htmx reloads the whole list, which then shows the new workspace
    return response


def _imports_context(request: MemberRequest) -> dict[str, Any]:
    """Return the context of `_workspace_imports.html`."""
    rows = workspace_imports.shown_imports(request.membership.organization)
    return {"imports": rows, "imports_open": any(row.ended_at is None for row in rows)}


@require_http_methods(["GET", "POST"])
@member(Capability.STORE)
def workspace_new(request: MemberRequest) -> HttpResponse:
    """Create a workspace: empty, with an example, as a copy, or with the files of a git repository."""
    organization = request.membership.organization
    form = WorkspaceForm(
        request.POST if request.method == "POST" else None,
        organization=organization,
        initial={"template": request.GET.get("template", ""), "copy_of": request.GET.get("copy_of", "")},
    )
    if form.is_valid():
        with errors_in_form(form):
            created = start_workspace(organization=organization, user=request.membership.user, **form.cleaned_data)
            if isinstance(created, WorkspaceImport):
                messages.success(request, _("The import has started."))
                return redirect("workspace_list")
            return redirect("workspace_detail", created.name)
    return render(request, "storage/workspace_new.html", {"form": form})


@require_GET
@member(Capability.VIEW)
def workspace_detail(request: MemberRequest, name: str, path: str = "") -> HttpResponse:
    """Show one page of a workspace's folder, folders first. The path of a file redirects to the editor."""
    workspace = _workspace(request, name)
    organization, after = request.membership.organization, request.GET.get("after", "")
    try:
        listing = files.list_folder(
            root=selectors.workspace_folder(workspace), path=path, limit=PAGE_ROWS, after=after, folders_first=True
        )
    except WrongKind:
        return redirect("workspace_file", name, path)
    except CustomerError as error:
        if not path and not after:  # the first page of the workspace: a redirect would lead to it again
            raise
        show_error(request, error)
        return redirect("workspace_detail", name)
    return render(
        request,
        "storage/workspace_detail.html",
        {
            "workspace": workspace,
            "path": path,
            "crumbs": crumbs_of(path),
            "rows": [(entry, posixpath.join(path, entry.name)) for entry in listing.entries],
            "after": after,
            "next": listing.next,
            "used_bytes": selectors.storage_used(organization),
            "quota_bytes": organization.quota.max_storage_bytes,
            # From this size on, the browser uploads a file directly to the operator's bucket; None: never.
            "direct_from_bytes": direct_uploads.min_bytes_in_pages(),
        },
    )


@require_GET
@member(Capability.VIEW)
def workspace_file(request: MemberRequest, name: str, path: str) -> HttpResponse:
    """Open a file in the editor, or show why the editor cannot open it. `?new=1` opens a new file.

    A notebook (`.ipynb`) is shown with its cells and outputs; `?source=1` opens its text in the editor.
    """
    workspace = _workspace(request, name)
    root = selectors.workspace_folder(workspace)
    mode = EDITOR_MODES.get(posixpath.splitext(path)[1].lower(), "")
    context: dict[str, Any] = {
        "workspace": workspace,
        "path": path,
        "crumbs": crumbs_of(path)[:-1],  # only the folders; the page shows the file's name by itself
        "file_name": posixpath.basename(path),
        "mode": mode,
        "mode_script": f"vendor/codemirror/mode/{mode}.js" if mode else "",
        "text_limit": files.TEXT_LIMIT,
    }
    try:
        file = files.read_versioned_text(root=root, path=path)
        if path.lower().endswith(".ipynb") and "source" not in request.GET:
            with suppress(NotText):  # the file is no notebook or too large: go on, and open its text
                return render(request, "storage/workspace_notebook.html", context | _notebook_context(root, path))
        context |= {"text": file.text, "version": file.version}
        context["entry"] = files.stat(root=root, path=path)
    except FileMissing as error:
        if "new" not in request.GET:
            show_error(request, error)
            return redirect("workspace_detail", name)
        context |= {"text": "", "is_new": True}
    except NotText as error:
        context |= {"refusal": error.message, "entry": files.stat(root=root, path=path)}
        with suppress(CustomerError):  # then the page shows only the refusal
            context |= _viewer_context(root, path)
    except WrongKind:
        return redirect("workspace_folder", name, path)
    except CustomerError as error:
        show_error(request, error)
        return redirect("workspace_detail", name)
    return render(request, "storage/workspace_file.html", context)


def _viewer_context(root: Path, path: str) -> dict[str, Any]:
    """Return the context that shows a file that the editor cannot open: a notebook (`.ipynb`) or a picture."""
    if path.lower().endswith(".ipynb"):
        return _notebook_context(root, path)
    file = files.read(root=root, path=path)
    with file.stream as stream:
        return {"is_picture": bool(image_type(stream.read(SIGNATURE_BYTES))) and file.size <= IMAGE_BYTES}


def _notebook_context(root: Path, path: str) -> dict[str, Any]:
    file = files.read(root=root, path=path)
    with file.stream:
        return {"notebook": read_notebook(file), "entry": files.stat(root=root, path=path)}


@require_POST
@member(Capability.STORE)
def workspace_train(request: MemberRequest, name: str, path: str) -> HttpResponse:
    """Export a notebook (`.ipynb`) as a script beside it, and open the form of a training with that script."""
    workspace = _workspace(request, name)
    root = selectors.workspace_folder(workspace)
    script_path = f"{posixpath.splitext(path)[0]}.py"
    try:
        file = files.read(root=root, path=path)
        with file.stream:
            script = script_of(file)
        expected_versions: list[str] = []  # none: the script must not exist yet
        with suppress(FileMissing):
            earlier = files.read_versioned_text(root=root, path=script_path)
            if not earlier.text.startswith(EXPORT_MARK):
                message = _("%(path)s exists and was not exported from a notebook. Rename it, or the notebook.")
                raise NameTaken(message % {"path": script_path})
            expected_versions = [earlier.version]
        catalog.write_file(
            workspace=workspace,
            path=script_path,
            stream=io.BytesIO(script.encode()),
            expected_versions=expected_versions,
        )
    except CustomerError as error:
        show_error(request, error)
        return redirect("workspace_file", name, path)
    messages.success(request, _("The notebook was exported to %(path)s.") % {"path": script_path})
    return redirect(f"{reverse('training_new')}?{urlencode({'workspace': name, 'code_path': script_path})}")


@require_GET
@member(Capability.VIEW)
def workspace_picture(request: MemberRequest, name: str, path: str) -> HttpResponseBase:
    """Return a picture, for the page that shows the file. A file of another type gives 404."""
    try:
        file = files.read(root=selectors.workspace_folder(_workspace(request, name)), path=path)
    except CustomerError as error:
        raise NotFound(error.message) from error
    return show_image(request, file)


@require_POST
@member(Capability.STORE)
def workspace_save(request: MemberRequest, name: str, path: str) -> JsonResponse:
    """Save a file's text, sent as JSON `{"text", "version"}`: a form would change line ends to CRLF.

    `version` is the one that the editor loaded, empty for a new file. If the file has another version now, nothing is
    saved, and the response is a 409 with the file's text and version, and a diff from that text to the sent one.
    """
    workspace = _workspace(request, name)
    try:
        body = json.loads(request.body)
        text, version = str(body["text"]), str(body["version"])
        if len(text.encode()) > files.TEXT_LIMIT:
            raise NotText(_("This file is too large for the editor. Upload it instead."))
        written = catalog.write_file(
            workspace=workspace,
            path=path,
            stream=io.BytesIO(text.encode()),
            expected_versions=[version] if version else [],
        )
    except (ValueError, KeyError, TypeError, RecursionError):  # RecursionError: deeply nested JSON
        return JsonResponse({"message": _("The upload was incomplete. Save again.")}, status=400)
    except FileChanged:
        return _conflict_response(workspace, path, text)
    except CustomerError as error:
        return JsonResponse({"message": str(error.message)}, status=400)
    return JsonResponse({"message": _("Saved."), "version": written.version})


def _conflict_response(workspace: Workspace, path: str, text: str) -> JsonResponse:
    """Return the response to a save of a file that changed after the editor loaded it. `text` was not saved."""
    try:
        stored = files.read_versioned_text(root=selectors.workspace_folder(workspace), path=path)
        message = _("This file changed after you opened it. Nothing was saved.")
    except FileMissing:
        stored = files.TextFile("", "")
        message = _("This file was deleted or moved after you opened it. Nothing was saved.")
    except CustomerError as error:  # the file no longer contains text
        return JsonResponse({"message": str(error.message)}, status=400)
    lines = [[line.sign, line.text] for line in line_diff(old=stored.text, new=text)]
    return JsonResponse({"message": message, "text": stored.text, "version": stored.version, "diff": lines}, status=409)


@require_POST
@member(Capability.STORE)
def workspace_existing(request: MemberRequest, name: str) -> JsonResponse:
    """Return which files an upload would replace, as a list, so that the page can ask before it uploads.

    After MAX_EXISTING_NAMED files an ellipsis stands for the others. The answer is null for more than
    MAX_PATHS_LOOKED_UP paths; the page then asks without names. The request's body is the JSON list of the paths.
    Invalid paths are skipped here, because the upload refuses them.
    """
    root = selectors.workspace_folder(_workspace(request, name))
    try:
        paths = [str(path) for path in json.loads(request.body)]
    except (ValueError, TypeError, RecursionError):  # RecursionError: deeply nested JSON
        return JsonResponse({"message": _("The upload was incomplete. Save again.")}, status=400)
    if len(paths) > MAX_PATHS_LOOKED_UP:
        return JsonResponse(None, safe=False)
    existing: list[str] = []
    for path in paths:
        with suppress(CustomerError):
            if files.stat(root=root, path=path).kind is not Kind.FOLDER:
                existing.append(path)
        if len(existing) > MAX_EXISTING_NAMED:
            existing[-1] = "…"
            break
    return JsonResponse(existing, safe=False)


@require_GET
@member(Capability.VIEW)
def workspace_download(request: MemberRequest, name: str, path: str) -> HttpResponseBase:
    """Download a file."""
    workspace = _workspace(request, name)
    try:
        content = files.read(root=selectors.workspace_folder(workspace), path=path)
    except CustomerError as error:
        show_error(request, error)
        return redirect("workspace_detail", name)
    return download(request, content, name=posixpath.basename(path))


@require_POST
@member(Capability.STORE)
def workspace_new_entry(request: MemberRequest, name: str) -> HttpResponse:
    """Create a folder, or open a new file in the editor."""
    workspace = _workspace(request, name)
    folder, entry_name = request.POST.get("folder", ""), request.POST.get("name", "").strip()
    path = posixpath.join(folder, entry_name.strip("/"))
    if not entry_name:
        messages.error(request, _("Enter a name."))
        return _redirect_to_folder(name, folder)
    if request.POST.get("kind") == "file":
        return redirect(f"{_file_url(name, path)}?new=1")
    try:
        catalog.make_folder(workspace=workspace, path=path)
    except CustomerError as error:
        show_error(request, error)
        return _redirect_to_folder(name, folder)
    return redirect("workspace_folder", name, path)


@require_POST
@member(Capability.STORE)
def workspace_move(request: MemberRequest, name: str) -> HttpResponse:
    """Rename or move a file or folder."""
    workspace = _workspace(request, name)
    source, target = request.POST.get("source", ""), request.POST.get("target", "").strip().strip("/")
    with errors_as_message(request):
        catalog.move_file(workspace=workspace, source=source, target=target)
        messages.success(request, _("Moved to %(path)s.") % {"path": target})
    return _redirect_to_folder(name, posixpath.dirname(source))


@require_POST
@member(Capability.STORE)
def workspace_copy_entry(request: MemberRequest, name: str) -> HttpResponse:
    """Copy a file or folder."""
    workspace = _workspace(request, name)
    source, target = request.POST.get("source", ""), request.POST.get("target", "").strip().strip("/")
    with errors_as_message(request):
        skipped = copies.copy_entry(workspace=workspace, source=source, target=target)
        messages.success(request, _("Copied to %(path)s.") % {"path": target})
        if skipped:
            messages.info(request, _("%(count)d links, pipes or devices were not copied.") % {"count": skipped})
    return _redirect_to_folder(name, posixpath.dirname(source))


@require_POST
@member(Capability.STORE)
def workspace_delete_entry(request: MemberRequest, name: str) -> HttpResponse:
    """Move a file, or a folder with its contents, to the recycle bin. Delete other entries, such as links, at once."""
    workspace = _workspace(request, name)
    path = request.POST.get("path", "")
    with errors_as_message(request):
        if recycle_bin.delete(workspace=workspace, path=path, user=request.membership.user):
            messages.success(request, _("%(path)s was moved to the recycle bin.") % {"path": path})
        else:
            messages.success(request, _("%(path)s was deleted.") % {"path": path})
    return _redirect_to_folder(name, posixpath.dirname(path))


@require_GET
@member(Capability.VIEW)
def workspace_search(request: MemberRequest, name: str) -> HttpResponse:
    """Show the files and folders whose names contain `?q=`, below the folder `?path=`."""
    workspace = _workspace(request, name)
    text, path = request.GET.get("q", ""), request.GET.get("path", "")
    context: dict[str, Any] = {"workspace": workspace, "path": path, "crumbs": crumbs_of(path), "text": text}
    if text:
        try:
            result = search.find(root=selectors.workspace_folder(workspace), text=text, path=path)
        except CustomerError as error:
            show_error(request, error)
            return redirect("workspace_detail", name)
        context |= {"search_result": result, "max_matches": search.MAX_MATCHES, "max_entries": search.MAX_ENTRIES}
    return render(request, "storage/workspace_search.html", context)


@require_GET
@member(Capability.VIEW)
def workspace_bin(request: MemberRequest, name: str) -> HttpResponse:
    """Show the recycle bin."""
    workspace = _workspace(request, name)
    items = recycle_bin.items_of(workspace).select_related("deleted_by")
    page = Paginator(items, PAGE_SIZE).get_page(request.GET.get("page"))
    return render(request, "storage/workspace_bin.html", {"workspace": workspace, "page": page})


@require_POST
@member(Capability.STORE)
def workspace_bin_restore(request: MemberRequest, name: str, pk: int) -> HttpResponse:
    """Restore a deleted file or folder."""
    item = recycle_bin.item_of(_workspace(request, name), pk)
    with errors_as_message(request):
        path = recycle_bin.restore(item=item)
        messages.success(request, _("Restored as %(path)s.") % {"path": path})
    return redirect("workspace_bin", name)


@require_POST
@member(Capability.STORE)
def workspace_bin_remove(request: MemberRequest, name: str, pk: int) -> HttpResponse:
    """Remove a deleted file or folder permanently."""
    item = recycle_bin.item_of(_workspace(request, name), pk)
    with errors_as_message(request):
        recycle_bin.remove(item=item)
        messages.success(request, _("%(name)s was permanently deleted.") % {"name": item})
    return redirect("workspace_bin", name)


@require_POST
@member(Capability.STORE)
def workspace_bin_empty(request: MemberRequest, name: str) -> HttpResponse:
    """Remove everything in the recycle bin permanently."""
    workspace = _workspace(request, name)
    with errors_as_message(request):
        recycle_bin.empty(workspace=workspace)
        messages.success(request, _("The recycle bin of %(name)s is empty.") % {"name": name})
    return redirect("workspace_bin", name)


@require_POST
@member(Capability.STORE)
def workspace_delete(request: MemberRequest, name: str) -> HttpResponse:
    """Delete a workspace with all its files."""
    workspace = _workspace(request, name)
    try:
        retention.delete_workspace(workspace=workspace, user=request.membership.user)
    except CustomerError as error:
        show_error(request, error)
        return redirect("workspace_detail", name)
    messages.success(request, _("The workspace %(name)s was deleted.") % {"name": name})
    return redirect("workspace_list")


def _workspace(request: MemberRequest, name: str) -> Workspace:
    return selectors.workspace_named(request.membership.organization, name)


def _redirect_to_folder(name: str, folder: str) -> HttpResponse:
    """Redirect to a folder of the workspace `name`, or to the workspace's top if `folder` is empty."""
    return redirect("workspace_folder", name, folder) if folder else redirect("workspace_detail", name)


def _file_url(name: str, path: str) -> str:
    return reverse("workspace_file", args=[name, path])

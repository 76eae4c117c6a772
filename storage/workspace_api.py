"""API of workspaces other than their files: archive, comparison, copy, search, recycle bin, and the examples."""

from __future__ import annotations

from typing import Any, ClassVar

from django.http import HttpRequest, HttpResponseBase
from django.urls import path
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.pagination import NewestFirst
from storage import comparison, copies, files, folder_archives, recycle_bin, search, selectors
from storage.api import READ_AND_WRITE, EntrySerializer, page_of
from storage.downloads import download_archive
from storage.folder_archives import Source
from storage.models import DeletedFile, Workspace
from storage.workspace_templates import templates


class SearchQuery(serializers.Serializer[Any]):
    """A search by name."""

    q = serializers.CharField(
        max_length=255, trim_whitespace=False, help_text="A part of the name. Upper and lower case are the same."
    )
    path = serializers.CharField(
        default="", allow_blank=True, trim_whitespace=False, help_text="Search below this folder."
    )


class MatchSerializer(EntrySerializer):
    """An entry that was found. `path` is below the workspace's folder."""

    path = serializers.CharField()


class FoundSerializer(serializers.Serializer[Any]):
    """The matches of a search. `stopped` says which limit ended it early; null if it saw every entry."""

    results = MatchSerializer(many=True)
    stopped = serializers.ChoiceField(choices=[stop.value for stop in search.StopReason], allow_null=True)


class DeletedFileSerializer(serializers.ModelSerializer[DeletedFile]):
    """A file or folder in the recycle bin. `path` is where it was."""

    class Meta:
        model = DeletedFile
        fields = ("id", "path", "is_folder", "size_bytes", "entry_count", "deleted_at", "kept_until")


class RestoreSerializer(serializers.Serializer[Any]):
    """The path to restore to. Without it, the old path, or a free name in the same folder if the old one is taken."""

    path = serializers.CharField(default="", allow_blank=True, trim_whitespace=False)


class RestoredSerializer(serializers.Serializer[Any]):
    """Where a restored file or folder is now."""

    path = serializers.CharField()


class CopySerializer(serializers.Serializer[Any]):
    """A file or folder to copy, and the free path of the copy."""

    path = serializers.CharField(trim_whitespace=False)
    target = serializers.CharField(trim_whitespace=False)


class CopiedSerializer(serializers.Serializer[Any]):
    """A finished copy. `skipped_count` is the number of links, pipes and devices that were left out."""

    path = serializers.CharField()
    skipped_count = serializers.IntegerField()


class TemplateSerializer(serializers.Serializer[Any]):
    """An example that a workspace can start with."""

    name = serializers.CharField()
    title = serializers.CharField()


class ArchiveQuery(serializers.Serializer[Any]):
    """The folder to pack."""

    path = serializers.CharField(default="", allow_blank=True, trim_whitespace=False)


class ClientFileSerializer(serializers.Serializer[Any]):
    """A file as the client has it. `size` is in bytes."""

    path = serializers.CharField(trim_whitespace=False)
    size = serializers.IntegerField(min_value=0)
    sha256 = serializers.RegexField("^[0-9a-f]{64}$")


class ComparisonSerializer(serializers.Serializer[Any]):
    """Files to compare with those of the workspace."""

    files = serializers.ListField(child=ClientFileSerializer(), max_length=comparison.MAX_FILES)


class DifferingSerializer(serializers.Serializer[Any]):
    """The paths of the files that are missing or different in the workspace."""

    differing = serializers.ListField(child=serializers.CharField())


class _WorkspaceView(TenantView):
    """Base of the views of one workspace."""

    capabilities: ClassVar = READ_AND_WRITE

    def workspace(self, name: str) -> Workspace:
        """Return the organization's workspace. Raises NotFound."""
        return selectors.workspace_named(self.organization, name)


class SearchView(_WorkspaceView):
    """Search in a workspace."""

    @extend_schema(operation_id="workspaces_search", parameters=[SearchQuery], responses=FoundSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Find files and folders by name. The response tells if a limit kept the search from reading all entries."""
        query = SearchQuery(data=request.query_params)
        query.is_valid(raise_exception=True)
        result = search.find(
            root=selectors.workspace_folder(self.workspace(name)),
            text=query.validated_data["q"],
            path=query.validated_data["path"],
        )
        results = [{**vars(match.entry), "path": match.path} for match in result.matches]
        return Response(FoundSerializer({"results": results, "stopped": result.stopped}).data)


class CopyView(_WorkspaceView):
    """Copying within a workspace."""

    @extend_schema(operation_id="workspaces_copy", request=CopySerializer, responses={201: CopiedSerializer})
    def post(self, request: Request, name: str) -> Response:
        """Copy a file or folder. Only files and folders are copied, no links."""
        form = CopySerializer(data=request.data)
        form.is_valid(raise_exception=True)
        skipped = copies.copy_entry(
            workspace=self.workspace(name), source=form.validated_data["path"], target=form.validated_data["target"]
        )
        return Response({"path": form.validated_data["target"], "skipped_count": skipped}, status=201)


class CompareView(_WorkspaceView):
    """Comparison of a folder elsewhere with a workspace."""

    capabilities: ClassVar = {"POST": Capability.VIEW}  # reads only; a URL is too short for the list of files

    @extend_schema(
        operation_id="workspaces_compare", request=ComparisonSerializer, responses={200: DifferingSerializer}
    )
    def post(self, request: Request, name: str) -> Response:
        """Return which of your files are missing or different in the workspace, so that you send only these."""
        form = ComparisonSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        paths = comparison.differing(
            root=selectors.workspace_folder(self.workspace(name)),
            client_files=[comparison.ClientFile(**each) for each in form.validated_data["files"]],
        )
        return Response({"differing": paths})


class ArchiveView(_WorkspaceView):
    """A workspace, or a folder of it, as an archive."""

    @extend_schema(
        operation_id="workspaces_archive",
        parameters=[ArchiveQuery],
        responses={(200, "application/gzip"): OpenApiTypes.BINARY},
    )
    def get(self, request: Request, name: str) -> HttpResponseBase:
        """Return a .tar.gz of files and folders, made while it is sent. Links, pipes and devices are left out."""
        query = ArchiveQuery(data=request.query_params)
        query.is_valid(raise_exception=True)
        return archive_of(request, self.workspace(name), query.validated_data["path"])


class TemplatesView(TenantView):
    """The examples that a workspace can start with."""

    capabilities: ClassVar = READ_AND_WRITE

    @extend_schema(operation_id="workspaces_templates", responses=TemplateSerializer(many=True))
    def get(self, _request: Request) -> Response:
        """List the examples."""
        return Response(TemplateSerializer(list(templates().values()), many=True).data)


def archive_of(request: HttpRequest | Request, workspace: Workspace, folder: str) -> HttpResponseBase:
    """Return the workspace or a folder of it as a .tar.gz. Raises FileMissing, UnsafePath."""
    root = selectors.workspace_folder(workspace)
    entry = files.stat(root=root, path=folder)  # raises if it is missing, before the response has begun
    name = entry.name or workspace.name
    return download_archive(request, folder_archives.pack([Source(root, folder, name)]), name=f"{name}.tar.gz")


class BinView(_WorkspaceView):
    """A workspace's recycle bin."""

    @extend_schema(operation_id="workspaces_bin_list", responses=page_of(DeletedFileSerializer))
    def get(self, request: Request, name: str) -> Response:
        """List the deleted files and folders, the latest first."""
        paginator = NewestFirst()
        page = paginator.paginate_queryset(recycle_bin.items_of(self.workspace(name)), request, view=self) or ()
        return paginator.get_paginated_response(DeletedFileSerializer(page, many=True).data)

    @extend_schema(operation_id="workspaces_bin_empty", responses={204: None})
    def delete(self, _request: Request, name: str) -> Response:
        """Remove everything in the recycle bin now."""
        recycle_bin.empty(workspace=self.workspace(name))
        return Response(status=204)


class BinItemView(_WorkspaceView):
    """A deleted file or folder."""

    @extend_schema(operation_id="workspaces_bin_remove", responses={204: None})
    def delete(self, _request: Request, name: str, pk: int) -> Response:
        """Remove the file or folder now."""
        recycle_bin.remove(item=recycle_bin.item_of(self.workspace(name), pk))
        return Response(status=204)


class BinRestoreView(_WorkspaceView):
    """Restoring a deleted file or folder."""

    @extend_schema(operation_id="workspaces_bin_restore", request=RestoreSerializer, responses=RestoredSerializer)
    def post(self, request: Request, name: str, pk: int) -> Response:
        """Move the file or folder back. If its old path is taken, it gets a free name in the same folder."""
        form = RestoreSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        item = recycle_bin.item_of(self.workspace(name), pk)
        return Response({"path": recycle_bin.restore(item=item, path=form.validated_data["path"])})


urlpatterns = [
    path("workspace-templates/", TemplatesView.as_view(), name="workspace-templates"),
    path("workspaces/<str:name>/archive/", ArchiveView.as_view(), name="api_workspace_archive"),
    path("workspaces/<str:name>/compare/", CompareView.as_view(), name="workspace-compare"),
    path("workspaces/<str:name>/copy/", CopyView.as_view(), name="workspace-copy"),
    path("workspaces/<str:name>/search/", SearchView.as_view(), name="workspace-search"),
    path("workspaces/<str:name>/bin/", BinView.as_view(), name="workspace-bin"),
    path("workspaces/<str:name>/bin/<int:pk>/", BinItemView.as_view(), name="workspace-bin-item"),
    path("workspaces/<str:name>/bin/<int:pk>/restore/", BinRestoreView.as_view(), name="workspace-bin-restore"),
]

"""API of datasets, workspaces and their files. Bodies with files are streamed, so they may have any size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from django.conf import settings
from django.db.models import Model, QuerySet
from django.http.response import HttpResponseBase
from django.urls import path, reverse
from django.utils.http import parse_etags, quote_etag, urlencode
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field, inline_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.pagination import NewestFirst
from storage import catalog, files, recycle_bin, retention, selectors, sharing, workspace_imports
from storage.converters import FILE_ROUTE
from storage.downloads import download
from storage.models import Dataset, DatasetVersion, Workspace, WorkspaceImport
from storage.paths import Kind
from storage.upload_stream import RawBody, body_of
from storage.workspace_sources import start_workspace

BINARY = {"application/octet-stream": OpenApiTypes.BINARY}
"""A request body of bytes, for the API schema."""
DEFAULT_PAGE = 1000
"""How many entries a page of a listing has, unless the client asks for another number. A page of `files.LIST_LIMIT`
(10,000) entries takes half a second."""
READ_AND_WRITE: dict[str, Capability] = {
    "GET": Capability.VIEW,
    "POST": Capability.STORE,
    "PUT": Capability.STORE,
    "DELETE": Capability.STORE,
}
"""The capability that each method needs."""


# --- Serializers ------------------------------------------------------------------------------------------------------


class VersionSerializer(serializers.ModelSerializer[DatasetVersion]):
    """One published, immutable version of a dataset."""

    version = serializers.IntegerField(source="number", read_only=True)

    class Meta:
        model = DatasetVersion
        fields = ("version", "size_bytes", "file_count", "sha256", "published_at")


class DatasetSerializer(serializers.ModelSerializer[Dataset]):
    """A dataset. `latest` is null until a version is published."""

    latest = VersionSerializer(read_only=True, allow_null=True)

    class Meta:
        model = Dataset
        fields = ("name", "description", "created_at", "latest")


class DatasetDetailSerializer(DatasetSerializer):
    """A dataset with all its versions, newest first."""

    versions = serializers.SerializerMethodField()

    class Meta(DatasetSerializer.Meta):
        fields = (*DatasetSerializer.Meta.fields, "versions")  # type: ignore[assignment]  # one field more

    @extend_schema_field(VersionSerializer(many=True))
    def get_versions(self, dataset: Dataset) -> Any:
        """Return the versions that are not deleted, newest first."""
        return VersionSerializer(selectors.versions_of(dataset), many=True).data


class WorkspaceSerializer(serializers.ModelSerializer[Workspace]):
    """A workspace, with its last measured size."""

    class Meta:
        model = Workspace
        fields = ("name", "description", "size_bytes", "created_at")


class NewSerializer(serializers.Serializer[Any]):
    """A dataset or workspace to create. The service validates the name."""

    name = serializers.CharField(trim_whitespace=False)
    description = serializers.CharField(default="", allow_blank=True)


class NewWorkspaceSerializer(NewSerializer):
    """A workspace to create: empty, with an example, as a copy, or with the files of a git repository."""

    template = serializers.CharField(default="", allow_blank=True, help_text="The name of an example.")
    copy_of = serializers.CharField(default="", allow_blank=True, help_text="The name of a workspace.")
    git_url = serializers.CharField(default="", allow_blank=True, help_text="An https address.")
    git_branch = serializers.CharField(default="", allow_blank=True, help_text="A branch or tag.")
    git_secret = serializers.CharField(
        default="", allow_blank=True, help_text="The name of a secret with an access token, for a private repository."
    )


class WorkspaceImportSerializer(serializers.ModelSerializer[WorkspaceImport]):
    """An import of a git repository. `workspace` is the name of the workspace, once `state` is complete."""

    state = serializers.ChoiceField(choices=WorkspaceImport.States.choices, read_only=True)
    workspace = serializers.CharField(source="workspace.name", read_only=True, default=None, allow_null=True)

    class Meta:
        model = WorkspaceImport
        fields = (
            "id", "name", "description", "git_url", "git_branch", "state", "received_bytes", "workspace", "error",
            "created_at", "ended_at",
        )  # fmt: skip


class EntrySerializer(serializers.Serializer[files.Entry]):
    """One entry of a folder. `size` is in bytes. `version` is the ETag of a file, without quotes."""

    name = serializers.CharField()
    kind = serializers.ChoiceField(choices=[kind.value for kind in Kind])
    size = serializers.IntegerField()
    modified = serializers.DateTimeField()
    version = serializers.CharField()


class ListingSerializer(serializers.Serializer[Any]):
    """One page of a folder's entries by name. `next` is the URL of the page that follows, or null."""

    path = serializers.CharField()
    entries = EntrySerializer(many=True)
    truncated = serializers.BooleanField(help_text="Whether `next` is not null.")
    next = serializers.URLField(allow_null=True)


class ListingQuery(serializers.Serializer[Any]):
    """The page of a listing."""

    limit = serializers.IntegerField(default=DEFAULT_PAGE, min_value=1, max_value=files.LIST_LIMIT)
    after = serializers.CharField(default="", help_text="The cursor in the `next` of the page before.")


class WrittenSerializer(serializers.Serializer[Any]):
    """The path and size of what was written. A folder has the size 0."""

    path = serializers.CharField()
    size = serializers.IntegerField()


def page_of(serializer: type[serializers.BaseSerializer[Any]]) -> serializers.Serializer[Any]:
    """Return the schema of one page of results."""
    return inline_serializer(
        name=serializer.__name__.replace("Serializer", "Page"),
        fields={
            "next": serializers.URLField(allow_null=True),
            "previous": serializers.URLField(allow_null=True),
            "results": serializer(many=True),
        },
    )


class _StorageView(TenantView):
    """Base of the views in this module."""

    capabilities: ClassVar = READ_AND_WRITE

    def page(self, rows: QuerySet[Any], serializer: type[serializers.ModelSerializer[Any]]) -> Response:
        """Return one page of `rows`."""
        paginator = NewestFirst()
        page: Iterable[Model] = paginator.paginate_queryset(rows, self.request, view=self) or ()
        return paginator.get_paginated_response(serializer(page, many=True).data)

    def creation_arguments(self) -> dict[str, Any]:
        """Return name and description from the body, with the organization and the user."""
        form = NewSerializer(data=self.request.data)
        form.is_valid(raise_exception=True)
        return {**form.validated_data, "organization": self.organization, "user": self.membership.user}


# --- Datasets ---------------------------------------------------------------------------------------------------------


class DatasetsView(_StorageView):
    """The organization's datasets."""

    @extend_schema(operation_id="datasets_list", responses=page_of(DatasetSerializer))
    def get(self, request: Request) -> Response:
        """List the datasets, newest first."""
        return self.page(selectors.datasets_for(self.organization), DatasetSerializer)

    @extend_schema(operation_id="datasets_create", request=NewSerializer, responses={201: DatasetSerializer})
    def post(self, request: Request) -> Response:
        """Create a dataset. Publish its first version by sending an archive."""
        return Response(DatasetSerializer(catalog.create_dataset(**self.creation_arguments())).data, status=201)


class DatasetView(_StorageView):
    """One dataset. Shared and public ones can be read too, but only the organization's own can be deleted."""

    @extend_schema(operation_id="datasets_read", responses=DatasetDetailSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return the dataset with its versions."""
        return Response(DatasetDetailSerializer(sharing.usable_dataset_named(self.organization, name)).data)

    @extend_schema(operation_id="datasets_delete", responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Delete the dataset with all its versions. Refused while an open job uses one."""
        dataset = selectors.dataset_named(self.organization, name)
        retention.delete_dataset(dataset=dataset, user=self.membership.user)
        return Response(status=204)


class ArchiveView(_StorageView):
    """The next version of a dataset."""

    parser_classes = (RawBody,)

    @extend_schema(operation_id="datasets_publish", request=BINARY, responses={201: VersionSerializer})
    def put(self, request: Request, name: str) -> Response:
        """Publish the .tar, .tar.gz or .zip in the body as the next version."""
        version = catalog.publish_version(
            dataset=selectors.dataset_named(self.organization, name),
            user=self.membership.user,
            stream=body_of(request, limit_bytes=settings.MAX_UPLOAD_BYTES),
        )
        return Response(VersionSerializer(version).data, status=201)


# --- Workspaces and their files ---------------------------------------------------------------------------------------


class WorkspacesView(_StorageView):
    """The organization's workspaces."""

    @extend_schema(operation_id="workspaces_list", responses=page_of(WorkspaceSerializer))
    def get(self, request: Request) -> Response:
        """List the workspaces, newest first."""
        return self.page(selectors.workspaces_for(self.organization), WorkspaceSerializer)

    @extend_schema(
        operation_id="workspaces_create",
        request=NewWorkspaceSerializer,
        responses={201: WorkspaceSerializer, 202: WorkspaceImportSerializer},
    )
    def post(self, request: Request) -> Response:
        """Create a workspace: empty, with an example, as a copy, or with the files of a git repository.

        A git repository is imported after the response, which is 202 with the import. Its URL is in the header
        Location. The workspace exists once the import's `state` is `complete`.
        """
        form = NewWorkspaceSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        started = start_workspace(organization=self.organization, user=self.membership.user, **form.validated_data)
        if isinstance(started, WorkspaceImport):
            location = reverse("workspace-import", args=[started.pk])
            return Response(WorkspaceImportSerializer(started).data, status=202, headers={"Location": location})
        return Response(WorkspaceSerializer(started).data, status=201)


class WorkspaceImportsView(_StorageView):
    """The organization's imports of git repositories."""

    @extend_schema(operation_id="workspace_imports_list", responses=page_of(WorkspaceImportSerializer))
    def get(self, request: Request) -> Response:
        """List the imports of git repositories as workspaces, newest first."""
        return self.page(workspace_imports.imports_for(self.organization), WorkspaceImportSerializer)


class WorkspaceImportView(_StorageView):
    """One import of a git repository."""

    @extend_schema(operation_id="workspace_imports_read", responses=WorkspaceImportSerializer)
    def get(self, request: Request, pk: int) -> Response:
        """Return the import with its progress, and its error if it failed."""
        return Response(WorkspaceImportSerializer(workspace_imports.import_with_id(self.organization, pk)).data)


class WorkspaceView(_StorageView):
    """One workspace."""

    @extend_schema(operation_id="workspaces_read", responses=WorkspaceSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return the workspace."""
        return Response(WorkspaceSerializer(selectors.workspace_named(self.organization, name)).data)

    @extend_schema(operation_id="workspaces_delete", responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Delete the workspace with all its files. Refused while an open job uses it."""
        workspace = selectors.workspace_named(self.organization, name)
        retention.delete_workspace(workspace=workspace, user=self.membership.user)
        return Response(status=204)


class FilesView(_StorageView):
    """The top folder of a workspace."""

    @extend_schema(operation_id="files_list", parameters=[ListingQuery], responses=ListingSerializer)
    def get(self, request: Request, name: str) -> Response:
        """List the top folder."""
        return _listing(request, selectors.workspace_named(self.organization, name), path="")


class FileView(_StorageView):
    """A file or folder of a workspace."""

    parser_classes = (RawBody,)

    @extend_schema(
        operation_id="files_read",
        parameters=[ListingQuery],
        responses={
            (200, "application/octet-stream"): OpenApiTypes.BINARY,
            (200, "application/json"): ListingSerializer,
        },
    )
    def get(self, request: Request, name: str, path: str) -> HttpResponseBase:
        """Return the file's bytes with its ETag, or a page of a folder's listing as JSON."""
        workspace = selectors.workspace_named(self.organization, name)
        root = selectors.workspace_folder(workspace)
        if files.stat(root=root, path=path).kind is Kind.FOLDER:
            return _listing(request, workspace, path)
        return download(request, files.read(root=root, path=path), name=path.rpartition("/")[2])

    @extend_schema(
        operation_id="files_write",
        request=BINARY,
        parameters=[
            OpenApiParameter("folder", OpenApiTypes.BOOL, description="Create a folder; the body is empty."),
            OpenApiParameter("If-Match", OpenApiTypes.STR, "header", description="Replace only this version."),
            OpenApiParameter("If-None-Match", OpenApiTypes.STR, "header", description="`*`: replace no file."),
        ],
        responses={201: WrittenSerializer, 200: WrittenSerializer},
    )
    def put(self, request: Request, name: str, path: str) -> Response:
        """Create (201) or replace (200) a file with the bytes in the body. Missing folders above it are created.

        With `If-Match`, the file is replaced only if that header has its ETag; otherwise the answer is 412.
        """
        workspace = selectors.workspace_named(self.organization, name)
        if request.query_params.get("folder") in {"1", "true"}:
            created = catalog.make_folder(workspace=workspace, path=path)
            return Response({"path": path, "size": 0}, status=201 if created else 200)
        written = catalog.write_file(
            workspace=workspace,
            path=path,
            stream=body_of(request, limit_bytes=settings.MAX_FILE_BYTES),
            expected_versions=_expected_versions(request),
        )
        response = Response({"path": path, "size": written.size}, status=201 if written.created else 200)
        response["ETag"] = quote_etag(written.version)
        return response

    @extend_schema(
        operation_id="files_delete",
        parameters=[OpenApiParameter("permanent", OpenApiTypes.BOOL, description="Free its space at once.")],
        responses={204: None},
    )
    def delete(self, request: Request, name: str, path: str) -> Response:
        """Delete the file, or the folder with its contents. It stays in the workspace's recycle bin for 7 days."""
        workspace = selectors.workspace_named(self.organization, name)
        if request.query_params.get("permanent") in {"1", "true"}:
            catalog.delete_file(workspace=workspace, path=path)
        else:
            recycle_bin.delete(workspace=workspace, path=path, user=self.membership.user)
        return Response(status=204)


def _expected_versions(request: Request) -> list[str] | None:
    """Return the versions that a write may replace, from If-Match and If-None-Match; None if it may replace any."""
    if "If-Match" in request.headers:
        return [etag.strip('"') for etag in parse_etags(request.headers["If-Match"])]
    return [] if request.headers.get("If-None-Match", "").strip() == "*" else None


def _listing(request: Request, workspace: Workspace, path: str) -> Response:
    """Return the page of a folder's entries that the request asks for."""
    query = ListingQuery(data=request.query_params)
    query.is_valid(raise_exception=True)
    listing = files.list_folder(root=selectors.workspace_folder(workspace), path=path, **query.validated_data)
    next_query = {"limit": query.validated_data["limit"], "after": listing.next}
    data = {
        "path": path.strip("/"),
        "entries": listing.entries,
        "truncated": listing.truncated,
        "next": request.build_absolute_uri(f"?{urlencode(next_query)}") if listing.next else None,
    }
    return Response(ListingSerializer(data).data)


urlpatterns = [
    path("datasets/", DatasetsView.as_view(), name="datasets"),
    path("datasets/<str:name>/", DatasetView.as_view(), name="dataset"),
    path("datasets/<str:name>/archive/", ArchiveView.as_view(), name="dataset-archive"),
    path("workspaces/", WorkspacesView.as_view(), name="workspaces"),
    path("workspace-imports/", WorkspaceImportsView.as_view(), name="workspace-imports"),
    path("workspace-imports/<int:pk>/", WorkspaceImportView.as_view(), name="workspace-import"),
    path("workspaces/<str:name>/", WorkspaceView.as_view(), name="workspace"),
    path("workspaces/<str:name>/files/", FilesView.as_view(), name="workspace-files"),
    path(f"workspaces/<str:name>/files/{FILE_ROUTE}", FileView.as_view(), name="workspace-file"),
]

"""The API of storage: images, datasets, workspaces and their files. Services do the work; bodies are streamed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from django.conf import settings
from django.db.models import Model, QuerySet
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import path
from django.utils.http import content_disposition_header
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, inline_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts.pagination import NewestFirst
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from storage import catalog, files, selectors
from storage.converters import FILE
from storage.models import Dataset, DatasetVersion, Image, Workspace
from storage.paths import Kind
from storage.raw import RawBody, body_of

BINARY = {"application/octet-stream": OpenApiTypes.BINARY}
READ_AND_WRITE: dict[str, Capability] = {
    "GET": Capability.VIEW,
    "POST": Capability.STORE,
    "PUT": Capability.STORE,
    "DELETE": Capability.STORE,
}
CONTROL_CHARACTERS = dict.fromkeys((*range(32), 127), "_")


# --- Shapes -----------------------------------------------------------------------------------------------------------


class ImageSerializer(serializers.ModelSerializer[Image]):
    """An image on offer. `builtin` ones come with the installation; others have a registry `reference`."""

    builtin = serializers.BooleanField(source="is_builtin", read_only=True)
    frameworks = serializers.ListField(child=serializers.CharField(), read_only=True)

    class Meta:
        model = Image
        fields = ("name", "title", "description", "frameworks", "reference", "builtin")


class VersionSerializer(serializers.ModelSerializer[DatasetVersion]):
    """One published, immutable version of a dataset."""

    version = serializers.IntegerField(source="number", read_only=True)

    class Meta:
        model = DatasetVersion
        fields = ("version", "size_bytes", "file_count", "sha256", "published_at")


class DatasetSerializer(serializers.ModelSerializer[Dataset]):
    """A dataset; `latest` is null before a version is published."""

    latest = VersionSerializer(read_only=True, allow_null=True)

    class Meta:
        model = Dataset
        fields = ("name", "description", "created_at", "latest")


class DatasetDetailSerializer(DatasetSerializer):
    """A dataset with all its versions, newest first."""

    versions = VersionSerializer(many=True, read_only=True, source="versions.all")

    class Meta(DatasetSerializer.Meta):
        fields = (*DatasetSerializer.Meta.fields, "versions")  # type: ignore[assignment]  # one field more


class WorkspaceSerializer(serializers.ModelSerializer[Workspace]):
    """A workspace; its size as last measured."""

    class Meta:
        model = Workspace
        fields = ("name", "description", "size_bytes", "created_at")


class NewSerializer(serializers.Serializer[Any]):
    """What to make. The name is checked by the service, which says what is wrong with it."""

    name = serializers.CharField(trim_whitespace=False)
    description = serializers.CharField(default="", allow_blank=True)


class EntrySerializer(serializers.Serializer[files.Entry]):
    """One thing in a folder; `size` in bytes."""

    name = serializers.CharField()
    kind = serializers.ChoiceField(choices=[kind.value for kind in Kind])
    size = serializers.IntegerField()
    modified = serializers.DateTimeField()


class ListingSerializer(serializers.Serializer[Any]):
    """A folder's entries by name; `truncated` when it holds more than are listed."""

    path = serializers.CharField()
    entries = EntrySerializer(many=True)
    truncated = serializers.BooleanField()


class WrittenSerializer(serializers.Serializer[Any]):
    """What was written, and where; a folder has the size 0."""

    path = serializers.CharField()
    size = serializers.IntegerField()


def _page_of(shape: type[serializers.BaseSerializer[Any]]) -> serializers.Serializer[Any]:
    """The documented shape of one page."""
    return inline_serializer(
        name=shape.__name__.replace("Serializer", "Page"),
        fields={
            "next": serializers.URLField(allow_null=True),
            "previous": serializers.URLField(allow_null=True),
            "results": shape(many=True),
        },
    )


class _View(TenantView):
    """What the views here share."""

    capabilities: ClassVar = READ_AND_WRITE

    def page(self, rows: QuerySet[Any], shape: type[serializers.ModelSerializer[Any]]) -> Response:
        """One page of `rows`."""
        pages = NewestFirst()
        found: Iterable[Model] = pages.paginate_queryset(rows, self.request, view=self) or ()
        return pages.get_paginated_response(shape(found, many=True).data)

    def asked_for(self) -> dict[str, Any]:
        """Name and description from the body, and who makes it."""
        shape = NewSerializer(data=self.request.data)
        shape.is_valid(raise_exception=True)
        return {**shape.validated_data, "organization": self.organization, "user": self.membership.user}


# --- Images and datasets ----------------------------------------------------------------------------------------------


class ImagesView(_View):
    """The images on offer."""

    @extend_schema(operation_id="images_list", responses=_page_of(ImageSerializer))
    def get(self, request: Request) -> Response:
        """The built-in images, and the organization's own."""
        return self.page(selectors.images_for(self.organization), ImageSerializer)


class DatasetsView(_View):
    """The organization's datasets."""

    @extend_schema(operation_id="datasets_list", responses=_page_of(DatasetSerializer))
    def get(self, request: Request) -> Response:
        """The datasets, newest first."""
        return self.page(selectors.datasets_for(self.organization), DatasetSerializer)

    @extend_schema(operation_id="datasets_create", request=NewSerializer, responses={201: DatasetSerializer})
    def post(self, request: Request) -> Response:
        """Name a dataset. Publish its first version by sending an archive."""
        return Response(DatasetSerializer(catalog.create_dataset(**self.asked_for())).data, status=201)


class DatasetView(_View):
    """One dataset."""

    @extend_schema(operation_id="datasets_read", responses=DatasetDetailSerializer)
    def get(self, request: Request, name: str) -> Response:
        """The dataset with its versions."""
        return Response(DatasetDetailSerializer(selectors.dataset_named(self.organization, name)).data)

    @extend_schema(operation_id="datasets_delete", responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Delete the dataset with all its versions. Runs that are open go on reading them."""
        dataset = selectors.dataset_named(self.organization, name)
        catalog.delete_dataset(dataset=dataset, user=self.membership.user)
        return Response(status=204)


class ArchiveView(_View):
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


class WorkspacesView(_View):
    """The organization's workspaces."""

    @extend_schema(operation_id="workspaces_list", responses=_page_of(WorkspaceSerializer))
    def get(self, request: Request) -> Response:
        """The workspaces, newest first."""
        return self.page(selectors.workspaces_for(self.organization), WorkspaceSerializer)

    @extend_schema(operation_id="workspaces_create", request=NewSerializer, responses={201: WorkspaceSerializer})
    def post(self, request: Request) -> Response:
        """Make an empty workspace."""
        return Response(WorkspaceSerializer(catalog.create_workspace(**self.asked_for())).data, status=201)


class WorkspaceView(_View):
    """One workspace."""

    @extend_schema(operation_id="workspaces_read", responses=WorkspaceSerializer)
    def get(self, request: Request, name: str) -> Response:
        """The workspace."""
        return Response(WorkspaceSerializer(selectors.workspace_named(self.organization, name)).data)

    @extend_schema(operation_id="workspaces_delete", responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Delete the workspace with all its files. Runs that are open keep them until they end."""
        workspace = selectors.workspace_named(self.organization, name)
        catalog.delete_workspace(workspace=workspace, user=self.membership.user)
        return Response(status=204)


class FilesView(_View):
    """The top folder of a workspace."""

    @extend_schema(operation_id="files_list", responses=ListingSerializer)
    def get(self, request: Request, name: str) -> Response:
        """List the top folder."""
        return _listing(selectors.workspace_named(self.organization, name), "")


class FileView(_View):
    """A file or folder of a workspace."""

    parser_classes = (RawBody,)

    @extend_schema(operation_id="files_read", responses={(200, "application/octet-stream"): OpenApiTypes.BINARY})
    def get(self, request: Request, name: str, path: str) -> HttpResponseBase:
        """The file's bytes; of a folder its listing, as JSON."""
        workspace = selectors.workspace_named(self.organization, name)
        root = selectors.workspace_folder(workspace)
        if files.stat(root=root, path=path).kind is Kind.FOLDER:
            return _listing(workspace, path)
        response = download(files.read(root=root, path=path), name=path.rpartition("/")[2])
        if request.method == "HEAD":
            response.streaming_content = ()
        return response

    @extend_schema(
        operation_id="files_write",
        request=BINARY,
        parameters=[OpenApiParameter("folder", OpenApiTypes.BOOL, description="Make a folder; the body is empty.")],
        responses={201: WrittenSerializer, 200: WrittenSerializer},
    )
    def put(self, request: Request, name: str, path: str) -> Response:
        """Make (201) or replace (200) a file with the bytes in the body; the folders above it are made too."""
        workspace = selectors.workspace_named(self.organization, name)
        if request.query_params.get("folder") in {"1", "true"}:
            created = files.make_folder(root=selectors.workspace_folder(workspace), path=path)
            size = 0
        else:
            body = body_of(request, limit_bytes=settings.MAX_FILE_BYTES)
            written = catalog.write_file(workspace=workspace, path=path, stream=body)
            created, size = written.created, written.size
        return Response({"path": path, "size": size}, status=201 if created else 200)

    @extend_schema(operation_id="files_delete", responses={204: None})
    def delete(self, request: Request, name: str, path: str) -> Response:
        """Delete the file, or the folder with all in it."""
        catalog.delete_file(workspace=selectors.workspace_named(self.organization, name), path=path)
        return Response(status=204)


def download(file: files.OpenFile, *, name: str) -> StreamingHttpResponse:
    """A file of a stranger's as a download that no browser will ever run or show."""
    response = StreamingHttpResponse(file, content_type="application/octet-stream")
    response["Content-Length"] = str(file.size)
    response["Content-Disposition"] = content_disposition_header(
        as_attachment=True, filename=name.translate(CONTROL_CHARACTERS)
    )
    response["X-Content-Type-Options"] = "nosniff"
    response["Cache-Control"] = "private, no-store"
    return response


def _listing(workspace: Workspace, path: str) -> Response:
    found = files.list_folder(root=selectors.workspace_folder(workspace), path=path)
    shown = {"path": path.strip("/"), "entries": found.entries, "truncated": found.truncated}
    return Response(ListingSerializer(shown).data)


urlpatterns = [
    path("images/", ImagesView.as_view(), name="images"),
    path("datasets/", DatasetsView.as_view(), name="datasets"),
    path("datasets/<str:name>/", DatasetView.as_view(), name="dataset"),
    path("datasets/<str:name>/archive/", ArchiveView.as_view(), name="dataset-archive"),
    path("workspaces/", WorkspacesView.as_view(), name="workspaces"),
    path("workspaces/<str:name>/", WorkspaceView.as_view(), name="workspace"),
    path("workspaces/<str:name>/files/", FilesView.as_view(), name="workspace-files"),
    path(f"workspaces/<str:name>/files/{FILE}", FileView.as_view(), name="workspace-file"),
]

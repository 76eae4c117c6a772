"""API of the files of dataset versions, and of imports of datasets."""

from __future__ import annotations

import posixpath
from typing import Any

from django.http.response import HttpResponseBase
from django.urls import path
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.errors import NotFound
from storage import dataset_files, imports, selectors, sharing
from storage.converters import FILE_ROUTE
from storage.downloads import download
from storage.models import DatasetImport, DatasetVersion
from storage.paths import Kind

LISTED_IMPORTS = 20
"""How many imports are listed; a client is interested in the latest."""
VERSION = OpenApiParameter("version", OpenApiTypes.INT, description="Default: the latest.")
"""The query parameter with the number of a version, for the API schema."""


class DatasetEntrySerializer(serializers.Serializer[Any]):
    """A file or folder of a dataset version. `size` is in bytes, 0 for a folder."""

    path = serializers.CharField()
    kind = serializers.ChoiceField(choices=[Kind.FILE.value, Kind.FOLDER.value])
    size = serializers.IntegerField()
    modified_at = serializers.DateTimeField()
    sha256 = serializers.CharField(
        help_text="Empty for a folder, and for files of versions published before hashes were kept."
    )


class DatasetEntriesSerializer(serializers.Serializer[Any]):
    """One page of a folder, by name. `next` is the address of the next page; null at the end."""

    results = DatasetEntrySerializer(many=True)
    next = serializers.URLField(allow_null=True)


class _VersionView(TenantView):
    """Base of the views of a dataset version."""

    capabilities = {"GET": Capability.VIEW}

    def version(self, name: str) -> DatasetVersion:
        """Return the version that the query names, or the latest. Raises NotFound."""
        dataset = sharing.usable_dataset_named(self.organization, name)
        number = self.request.query_params.get("version", "")
        if not number:
            version = selectors.latest_version(dataset)
            if version is None:
                raise NotFound
            return version
        # With as many digits as MAX_NUMBER, a number could exceed it, and no dataset has so many versions. Python
        # refuses to convert thousands of digits.
        if not (number.isascii() and number.isdecimal() and len(number) < len(str(selectors.MAX_NUMBER))):
            raise NotFound
        return selectors.version_numbered(dataset, int(number))


class DatasetFilesView(_VersionView):
    """A folder of a dataset version."""

    @extend_schema(
        operation_id="datasets_files_list",
        responses=DatasetEntriesSerializer,
        parameters=[
            VERSION,
            OpenApiParameter("path", OpenApiTypes.STR, description="Default: the top folder."),
            OpenApiParameter("after", OpenApiTypes.STR, description="The cursor in the address of the next page."),
        ],
    )
    def get(self, request: Request, name: str) -> Response:
        """List a folder with the size and SHA-256 of each file."""
        folder = request.query_params.get("path", "").strip("/")
        after = request.query_params.get("after", "")
        page = dataset_files.list_page(version=self.version(name), path=folder, after=after)
        data = {"results": page.rows, "next": _next_url(request, page.next)}
        return Response(DatasetEntriesSerializer(data).data)


class DatasetFileView(_VersionView):
    """A file of a dataset version."""

    @extend_schema(
        operation_id="datasets_files_read",
        parameters=[VERSION],
        responses={(200, "application/octet-stream"): OpenApiTypes.BINARY},
    )
    def get(self, request: Request, name: str, path: str) -> HttpResponseBase:
        """Return the file's bytes, or the range that is asked for."""
        file = dataset_files.read(version=self.version(name), path=path)
        return download(request, file, name=posixpath.basename(path))


class DatasetImportSerializer(serializers.ModelSerializer[DatasetImport]):
    """An import. It has ended with a `version`, or with an `error`, once `ended_at` is set."""

    version = serializers.IntegerField(source="version.number", default=None, allow_null=True, read_only=True)

    class Meta:
        model = DatasetImport
        fields = ("id", "url", "endpoint", "size_bytes", "received_bytes", "version", "error", "created_at", "ended_at")


class NewDatasetImportSerializer(serializers.Serializer[Any]):
    """An import to start: an https address, or `s3://bucket/key` with its server.

    The administrator decides which hosts and servers are allowed. A key that is no object imports all objects below it.
    Without secrets, the bucket must be public.
    """

    url = serializers.CharField()
    endpoint = serializers.CharField(default="", allow_blank=True, help_text="Of a bucket: https://s3.example.com.")
    access_key_id_secret = serializers.CharField(
        default="", allow_blank=True, help_text="Name of the secret with the access key ID."
    )
    secret_access_key_secret = serializers.CharField(
        default="", allow_blank=True, help_text="Name of the secret with the secret access key."
    )


class DatasetImportListSerializer(serializers.Serializer[Any]):
    """The latest imports, newest first."""

    results = DatasetImportSerializer(many=True)


class DatasetImportsView(TenantView):
    """Imports of a dataset from HTTPS addresses and buckets."""

    capabilities = {"GET": Capability.VIEW, "POST": Capability.STORE}

    @extend_schema(operation_id="datasets_imports_list", responses=DatasetImportListSerializer)
    def get(self, _request: Request, name: str) -> Response:
        """List the latest imports with their progress."""
        rows = selectors.dataset_named(self.organization, name).imports.select_related("version").order_by("-pk")
        return Response({"results": DatasetImportSerializer(rows[:LISTED_IMPORTS], many=True).data})

    @extend_schema(
        operation_id="datasets_imports_create",
        request=NewDatasetImportSerializer,
        responses={201: DatasetImportSerializer},
    )
    def post(self, request: Request, name: str) -> Response:
        """Import the file or archive at an address as the next version."""
        dataset = selectors.dataset_named(self.organization, name)
        form = NewDatasetImportSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        row = imports.start_import(dataset=dataset, user=self.membership.user, **form.validated_data)
        return Response(DatasetImportSerializer(row).data, status=201)


def _next_url(request: Request, after: str | None) -> str | None:
    """Return the URL of the next page, which begins after the cursor `after`; None if there is none."""
    if after is None:
        return None
    query = request.query_params.copy()
    query["after"] = after
    return request.build_absolute_uri(f"{request.path}?{query.urlencode()}")


urlpatterns = [
    path("datasets/<str:name>/files/", DatasetFilesView.as_view(), name="dataset-files"),
    path("datasets/<str:name>/imports/", DatasetImportsView.as_view(), name="dataset-imports"),
    path(f"datasets/<str:name>/files/{FILE_ROUTE}", DatasetFileView.as_view(), name="dataset-file"),
]

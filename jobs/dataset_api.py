"""API that publishes files of workspaces and jobs as datasets."""

from __future__ import annotations

from typing import Any

from django.urls import path
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from jobs import dataset_publishing, selectors
from storage import selectors as storage
from storage.api import VersionSerializer


class SourceSerializer(serializers.Serializer[Any]):
    """The files to publish: those of a workspace or of a job."""

    workspace = serializers.CharField(default="", allow_blank=True)
    job = serializers.IntegerField(default=None, allow_null=True, min_value=1, max_value=storage.MAX_KEY)
    path = serializers.CharField(
        default="",
        allow_blank=True,
        trim_whitespace=False,
        help_text=(
            "A path in the workspace (default: all files), or a job's path, which begins with `outputs/` or "
            "`checkpoints/`."
        ),
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Require exactly one source."""
        if bool(attrs["workspace"]) == bool(attrs["job"]):
            raise serializers.ValidationError({"workspace": dataset_publishing.ONE_SOURCE})
        return attrs


class DatasetVersionsView(TenantView):
    """New versions of a dataset, from files on the platform."""

    capabilities = {"POST": Capability.STORE}

    @extend_schema(operation_id="datasets_publish_copy", request=SourceSerializer, responses={201: VersionSerializer})
    def post(self, request: Request, name: str) -> Response:
        """Publish a copy of files of a workspace or job as the next version."""
        dataset = storage.dataset_named(self.organization, name)
        form = SourceSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        source = form.validated_data
        user = self.membership.user
        if source["job"]:
            job = selectors.job_for(self.organization, source["job"])
            version = dataset_publishing.publish_job_files(dataset=dataset, user=user, job=job, path=source["path"])
        else:
            workspace = storage.workspace_named(self.organization, source["workspace"])
            version = dataset_publishing.publish_workspace_folder(
                dataset=dataset, user=user, workspace=workspace, path=source["path"]
            )
        return Response(VersionSerializer(version).data, status=201)


urlpatterns = [path("datasets/<str:name>/versions/", DatasetVersionsView.as_view(), name="dataset-versions")]

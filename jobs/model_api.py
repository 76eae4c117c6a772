"""API of models: publish files of a job, list, read, download and delete versions."""

from __future__ import annotations

from typing import Any

from django.http.response import HttpResponseBase
from django.urls import path
from django.utils.translation import gettext as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.errors import InvalidInput
from console.core.pagination import NewestFirst
from jobs import model_publishing, selectors
from storage import folder_archives, retention
from storage import selectors as storage
from storage.api import page_of
from storage.downloads import download_archive
from storage.folder_archives import Source
from storage.models import Model, ModelVersion

ARCHIVE_RESPONSE = {(200, "application/gzip"): OpenApiTypes.BINARY}
VERSION_PARAMETER = OpenApiParameter("version", OpenApiTypes.INT, description="Default: the latest.")


class VersionNameSerializer(serializers.Serializer[Any]):
    """A version of a dataset or model."""

    name = serializers.CharField()
    version = serializers.IntegerField()


class MetricSerializer(serializers.Serializer[Any]):
    """The values of one curve of the job."""

    last = serializers.FloatField()
    lowest = serializers.FloatField()
    highest = serializers.FloatField()


class LineageSerializer(serializers.Serializer[Any]):
    """The lineage of a version: the job that made it, as it was when the version was published."""

    job = serializers.IntegerField()
    job_name = serializers.CharField()
    path = serializers.CharField(help_text="The published file or folder of the job.")
    framework = serializers.CharField()
    image = serializers.CharField()
    workspace = serializers.CharField()
    code_path = serializers.CharField()
    arguments = serializers.ListField(child=serializers.CharField())
    script_sha256 = serializers.CharField(allow_blank=True, help_text="SHA-256 of the script as it ran; may be empty.")
    epochs = serializers.IntegerField()
    lr = serializers.CharField()
    batch_size = serializers.IntegerField()
    datasets = VersionNameSerializer(many=True)
    models = VersionNameSerializer(many=True)
    from_checkpoint = serializers.IntegerField(allow_null=True, help_text="The job whose checkpoints it started from.")
    metrics = serializers.DictField(child=MetricSerializer())
    price_minor = serializers.IntegerField(allow_null=True, help_text="Price paid; null if the job had not ended.")
    currency = serializers.CharField()


class ModelVersionSerializer(serializers.ModelSerializer[ModelVersion]):
    """One published, immutable version of a model."""

    version = serializers.IntegerField(source="number", read_only=True)
    lineage = LineageSerializer(read_only=True)

    class Meta:
        model = ModelVersion
        fields = ("version", "size_bytes", "file_count", "sha256", "published_at", "lineage")


class ModelSerializer(serializers.ModelSerializer[Model]):
    """A model with its latest version."""

    latest = ModelVersionSerializer(read_only=True, allow_null=True)

    class Meta:
        model = Model
        fields = ("name", "description", "created_at", "latest")


class ModelDetailSerializer(ModelSerializer):
    """A model with all its versions, newest first."""

    versions = serializers.SerializerMethodField()

    class Meta(ModelSerializer.Meta):
        fields = (*ModelSerializer.Meta.fields, "versions")  # type: ignore[assignment]  # one field more

    @extend_schema_field(ModelVersionSerializer(many=True))
    def get_versions(self, model: Model) -> Any:
        """Return the versions that are not deleted, newest first."""
        return ModelVersionSerializer(storage.model_versions_of(model), many=True).data


class NewModelSerializer(serializers.Serializer[Any]):
    """Files of a job to publish as the next version of a model. The service validates the values."""

    name = serializers.CharField(trim_whitespace=False, help_text="The model; created with its first version.")
    job = serializers.IntegerField(min_value=1, max_value=storage.MAX_KEY)  # the largest primary key
    path = serializers.CharField(
        trim_whitespace=False, help_text="A file or folder of the job, below `outputs` or `checkpoints`."
    )
    description = serializers.CharField(default="", allow_blank=True, help_text="Replaces the model's description.")


class PublishedSerializer(ModelVersionSerializer):
    """A version that was just published."""

    name = serializers.CharField(source="model.name", read_only=True)

    class Meta(ModelVersionSerializer.Meta):
        fields = ("name", *ModelVersionSerializer.Meta.fields)  # type: ignore[assignment]  # one field more


class ModelsView(TenantView):
    """The organization's models."""

    capabilities = {"GET": Capability.VIEW, "POST": Capability.STORE}

    @extend_schema(operation_id="models_list", responses=page_of(ModelSerializer))
    def get(self, request: Request) -> Response:
        """List the models, newest first."""
        paginator = NewestFirst()
        page = paginator.paginate_queryset(storage.models_for(self.organization), request, view=self) or ()
        return paginator.get_paginated_response(ModelSerializer(page, many=True).data)

    @extend_schema(operation_id="models_publish", request=NewModelSerializer, responses={201: PublishedSerializer})
    def post(self, request: Request) -> Response:
        """Publish files of a job as the next version of a model. They are copied, and never change."""
        form = NewModelSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        values = dict(form.validated_data)
        version = model_publishing.publish_model(
            job=selectors.job_for(self.organization, values.pop("job")), user=self.membership.user, **values
        )
        return Response(PublishedSerializer(version).data, status=201)


class ModelView(TenantView):
    """One model."""

    capabilities = {"GET": Capability.VIEW, "DELETE": Capability.STORE}

    @extend_schema(operation_id="models_read", responses=ModelDetailSerializer)
    def get(self, _request: Request, name: str) -> Response:
        """Return the model with its versions and their lineage."""
        return Response(ModelDetailSerializer(storage.model_named(self.organization, name)).data)

    @extend_schema(
        operation_id="models_delete",
        responses={204: None},
        parameters=[OpenApiParameter("version", OpenApiTypes.INT, description="Default: all versions.")],
    )
    def delete(self, request: Request, name: str) -> Response:
        """Delete the model with all its versions, or one version. Refused while an open job uses one."""
        # DELETE of the version's own path, below, does the same as `version`.
        model, number = storage.model_named(self.organization, name), _version_number(request)
        if number is None:
            retention.delete_model(model=model, user=self.membership.user)
        else:
            version = storage.model_version(model, number)
            retention.delete_model_version(version=version, user=self.membership.user)
        return Response(status=204)


class ModelVersionView(TenantView):
    """One version of a model."""

    capabilities = {"DELETE": Capability.STORE}

    @extend_schema(operation_id="models_delete_version", responses={204: None})
    def delete(self, _request: Request, name: str, number: int) -> Response:
        """Delete the version. The newest remaining version becomes the latest; without one, the model is deleted."""
        version = storage.model_version(storage.model_named(self.organization, name), number)
        retention.delete_model_version(version=version, user=self.membership.user)
        return Response(status=204)


class ModelArchiveView(TenantView):
    """The files of a model."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(operation_id="models_download", responses=ARCHIVE_RESPONSE, parameters=[VERSION_PARAMETER])
    def get(self, request: Request, name: str) -> HttpResponseBase:
        """Return the files of a version as a .tar.gz archive."""
        version = storage.model_version(storage.model_named(self.organization, name), _version_number(request))
        name = f"{name}-v{version.number}"
        source = Source(storage.model_folder(version), path="", name=name)
        return download_archive(request, folder_archives.pack([source]), name=f"{name}.tar.gz")


def _version_number(request: Request) -> int | None:
    """Return the query parameter `version`; None if it is missing. Raises InvalidInput, also if it is empty.

    An empty value, as from a shell variable that is not set, must not mean all versions: DELETE would delete them.
    """
    text = request.query_params.get("version")
    if text is None:
        return None
    # `int` raises ValueError for more than 4,300 digits.
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(storage.MAX_NUMBER)):
        raise InvalidInput(fields={"version": _("Enter the number of a version.")})
    return int(text)


urlpatterns = [
    path("models/", ModelsView.as_view(), name="models"),
    path("models/<str:name>/", ModelView.as_view(), name="model"),
    path("models/<str:name>/archive/", ModelArchiveView.as_view(), name="model-archive"),
    path("models/<str:name>/versions/<int:number>/", ModelVersionView.as_view(), name="model-version"),
]

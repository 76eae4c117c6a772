"""API of images (and whether clusters can run them), of the files that runs write, and of storage and its price."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponseBase
from django.urls import path
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field, inline_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param

from billing import storage_charges
from billing.policy import policy
from billing.selectors import wallet
from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core.errors import NotFound
from console.core.pagination import NewestFirst
from jobs import images, job_files, results, selectors
from jobs.api_input import json_object
from jobs.models import Job
from runtime.images.contents import Contents
from storage import folder_archives, registries
from storage import images as image_store
from storage import selectors as storage
from storage.api import page_of
from storage.converters import FILE_ROUTE
from storage.downloads import download, download_archive
from storage.models import Image
from storage.paths import Kind
from storage.usage_api import UsageSerializer, usage_data


class ContentsSerializer(serializers.Serializer[Contents]):
    """Versions of what an image contains."""

    python = serializers.CharField()
    cuda = serializers.CharField(allow_blank=True, help_text="Empty in the CPU flavour.")
    frameworks = serializers.DictField(child=serializers.CharField())
    packages = serializers.DictField(child=serializers.CharField())


class ImageSerializer(serializers.ModelSerializer[Image]):
    """An image on offer. Built-in images (`builtin`) come with the installation; others have a registry `reference`.

    `context` may have `warning`, that of the registry's check in this request, and `problems`, those of all images of a
    list (`images.problems`).
    """

    builtin = serializers.BooleanField(source="is_builtin", read_only=True)
    frameworks = serializers.ListField(child=serializers.CharField(), read_only=True)
    ready = serializers.SerializerMethodField(help_text="Whether a cluster can run it now.")
    not_ready_because = serializers.SerializerMethodField(help_text="Why no cluster can run it; empty if one can.")
    contents = serializers.SerializerMethodField(
        help_text="Versions of Python, CUDA, frameworks and packages. Null if the image is not built on the console's "
        "machine."
    )
    warning = serializers.SerializerMethodField(
        help_text="Why the registry could not confirm the image when it was saved; empty if it did."
    )

    class Meta:
        model = Image
        fields = (
            "name", "title", "description", "frameworks", "reference", "builtin", "ready", "not_ready_because",
            "contents", "warning",
        )  # fmt: skip

    def get_ready(self, image: Image) -> bool:
        """Return whether a cluster can run it now."""
        return not self._problem(image)

    @extend_schema_field(ContentsSerializer(allow_null=True))
    def get_contents(self, image: Image) -> Any:
        """Return the versions; null if they are unknown."""
        contents = images.contents_of(image)
        return ContentsSerializer(contents).data if contents else None

    def get_warning(self, _image: Image) -> str:
        """Return the warning of the registry's check in this request."""
        return str(self.context.get("warning", ""))

    def get_not_ready_because(self, image: Image) -> str:
        """Return why no cluster can run it, and what to do; empty if one can."""
        return self._problem(image)

    def _problem(self, image: Image) -> str:
        problems = self.context.get("problems")
        return images.problem(image) if problems is None else str(problems.get(image.pk, ""))


class ImageChangeSerializer(serializers.Serializer[Any]):
    """The fields of an organization's own image that can change. The service validates the values."""

    title = serializers.CharField()
    reference = serializers.CharField()
    frameworks = serializers.ListField(child=serializers.CharField())
    description = serializers.CharField(default="", allow_blank=True)
    username = serializers.CharField(
        default="",
        allow_blank=True,
        help_text="User name for the registry. It applies to all images from that registry.",
    )
    password = serializers.CharField(default="", allow_blank=True, trim_whitespace=False, write_only=True)


class NewImageSerializer(ImageChangeSerializer):
    """An organization's own image."""

    name = serializers.CharField(trim_whitespace=False)


class ImagesView(TenantView):
    """The images on offer."""

    capabilities = {"GET": Capability.VIEW, "POST": Capability.STORE}

    @extend_schema(operation_id="images_list", responses=page_of(ImageSerializer))
    def get(self, request: Request) -> Response:
        """List the built-in images and the organization's own."""
        paginator = NewestFirst()
        page = paginator.paginate_queryset(storage.images_for(self.organization), request, view=self) or ()
        serializer = ImageSerializer(page, many=True, context={"problems": images.problems(page)})
        return paginator.get_paginated_response(serializer.data)

    @extend_schema(operation_id="images_create", request=NewImageSerializer, responses={201: ImageSerializer})
    def post(self, request: Request) -> Response:
        """Register an image from your own registry."""
        form = NewImageSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        warning = _check_registry(self, form.validated_data)
        with transaction.atomic():
            values = _store_credentials(self, form.validated_data)
            image = image_store.create_image(organization=self.organization, user=self.membership.user, **values)
        return Response(ImageSerializer(image, context={"warning": warning}).data, status=201)


class ImageView(TenantView):
    """One image."""

    capabilities = {"GET": Capability.VIEW, "PATCH": Capability.STORE, "DELETE": Capability.STORE}

    @extend_schema(operation_id="images_read", responses=ImageSerializer)
    def get(self, _request: Request, name: str) -> Response:
        """Return an image, and whether a cluster can run it now."""
        return Response(ImageSerializer(storage.image_named(self.organization, name)).data)

    @extend_schema(operation_id="images_update", request=ImageChangeSerializer(partial=True), responses=ImageSerializer)
    def patch(self, request: Request, name: str) -> Response:
        """Change an image of your own. Fields that are not in the body keep their values."""
        image = self._own_image(name)
        current = {field: getattr(image, field) for field in ("title", "reference", "frameworks", "description")}
        form = ImageChangeSerializer(data={**current, **json_object(request)})
        form.is_valid(raise_exception=True)
        warning = _check_registry(self, form.validated_data)
        with transaction.atomic():
            values = _store_credentials(self, form.validated_data)
            image = image_store.update_image(image=image, user=self.membership.user, **values)
        return Response(ImageSerializer(image, context={"warning": warning}).data)

    @extend_schema(operation_id="images_delete", responses={204: None})
    def delete(self, _request: Request, name: str) -> Response:
        """Delete an image of your own. Jobs that have ended keep its name."""
        image_store.delete_image(image=self._own_image(name), user=self.membership.user)
        return Response(status=204)

    def _own_image(self, name: str) -> Image:
        """Return an image of the organization. Raises NotFound also for built-in ones, which cannot change."""
        image = storage.image_named(self.organization, name)
        if image.is_builtin:
            raise NotFound
        return image


class StorageSerializer(UsageSerializer):
    """Storage usage, and what it costs. Amounts are in minor units of the wallet's currency."""

    currency = serializers.CharField(allow_blank=True, help_text="Empty while the organization has no wallet.")
    price_minor_per_gb_month = serializers.DecimalField(
        max_digits=20, decimal_places=6, allow_null=True, help_text="1 GB is 10^9 bytes. Null: storage is free."
    )
    free_bytes = serializers.IntegerField(help_text="Bytes that cost nothing.")
    unpaid_minor = serializers.IntegerField(help_text="Amount that the wallet owes for storage.")
    stops_writes = serializers.BooleanField(
        help_text="Storage has been unpaid for too long, so nothing more can be stored."
    )


class StorageView(TenantView):
    """The organization's storage."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(operation_id="storage_read", responses=StorageSerializer)
    def get(self, _request: Request) -> Response:
        """Return the used quota and its price, deleted items, uploads in progress and results of runs."""
        account = wallet(self.organization)
        data = usage_data(self.organization) | {
            "currency": account.currency if account else "",
            "price_minor_per_gb_month": storage_charges.storage_price(account.currency) if account else None,
            "free_bytes": policy().free_storage_gb * storage_charges.GB,
            "unpaid_minor": storage_charges.unpaid_minor(account) if account else 0,
            "stops_writes": self.organization.quota.stops_writes,
        }
        return Response(StorageSerializer(data).data)


class ResultsView(TenantView):
    """The files of a job's runs."""

    capabilities = {"DELETE": Capability.STORE}

    @extend_schema(operation_id="jobs_results_delete", responses={204: None})
    def delete(self, _request: Request, pk: int) -> Response:
        """Delete outputs, checkpoints and logs of an ended job now."""
        results.remove(job=selectors.job_for(self.organization, pk), user=self.membership.user)
        return Response(status=204)


class FilesQuerySerializer(serializers.Serializer[Any]):
    """Which part of which folder to list."""

    path = serializers.CharField(
        default="",
        allow_blank=True,
        trim_whitespace=False,
        help_text="A folder, which begins with outputs, checkpoints or logs. Default: these three.",
    )
    limit = serializers.IntegerField(default=100, min_value=1, max_value=1000)
    after = serializers.CharField(default="", help_text="The cursor in `next` of the previous page.")


class ArchiveQuerySerializer(serializers.Serializer[Any]):
    """Which folder to download."""

    path = serializers.CharField(
        default="",
        allow_blank=True,
        trim_whitespace=False,
        help_text="A file or folder. Default: all of the job's.",
    )


class JobEntrySerializer(serializers.Serializer[Any]):
    """A file or folder of a job. `size` is in bytes.

    The three folders at the top, and those of attempts in `logs`, are always listed. `modified_at` is null for those
    that the job has not created yet.
    """

    path = serializers.CharField()
    size = serializers.IntegerField()
    modified_at = serializers.DateTimeField(source="modified", allow_null=True)
    kind = serializers.ChoiceField(choices=[Kind.FILE.value, Kind.FOLDER.value])


class JobFilesView(TenantView):
    """The files of a job: outputs, checkpoints and logs."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(
        operation_id="jobs_files_list",
        parameters=[FilesQuerySerializer],
        responses=inline_serializer(
            name="JobFilesPage",
            fields={"results": JobEntrySerializer(many=True), "next": serializers.URLField(allow_null=True)},
        ),
    )
    def get(self, request: Request, pk: int) -> Response:
        """List a folder by name, folders first. Links and devices are left out."""
        job = selectors.job_without_relations(self.organization, pk)
        query = FilesQuerySerializer(data=request.query_params)
        query.is_valid(raise_exception=True)
        values = query.validated_data
        page = job_files.list_files(job, values["path"], limit=values["limit"], after=values["after"])
        next_url = page.next and replace_query_param(request.build_absolute_uri(), "after", page.next)
        return Response({"results": JobEntrySerializer(page.entries, many=True).data, "next": next_url})


class JobFileView(TenantView):
    """One file of a job."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(
        operation_id="jobs_files_read",
        parameters=[OpenApiParameter("Range", OpenApiTypes.STR, OpenApiParameter.HEADER)],
        responses={
            (200, "application/octet-stream"): OpenApiTypes.BINARY,
            (206, "application/octet-stream"): OpenApiTypes.BINARY,
        },
    )
    def get(self, request: Request, pk: int, path: str) -> HttpResponseBase:
        """Return the file's bytes, or the range of them that the Range header asks for."""
        file = job_files.read(selectors.job_without_relations(self.organization, pk), path)
        return download(request, file, name=path.rpartition("/")[2])


class JobArchiveView(TenantView):
    """A folder of a job as an archive."""

    capabilities = {"GET": Capability.VIEW}

    @extend_schema(
        operation_id="jobs_archive",
        parameters=[ArchiveQuerySerializer],
        responses={(200, "application/gzip"): OpenApiTypes.BINARY},
    )
    def get(self, request: Request, pk: int) -> HttpResponseBase:
        """Return a .tar.gz of a file or folder. Links and devices are left out."""
        job = selectors.job_without_relations(self.organization, pk)
        query = ArchiveQuerySerializer(data=request.query_params)
        query.is_valid(raise_exception=True)
        return archive_of(request, job, query.validated_data["path"])


def archive_of(request: HttpRequest | Request, job: Job, path: str) -> HttpResponseBase:
    """Return a file or folder of a job as a .tar.gz that is built while it is sent. Raises as `job_files.read` does."""
    sources = job_files.archive_sources(job, path)
    folder = path.strip("/").rpartition("/")[2]
    name = f"job-{job.pk}-{folder}" if folder else f"job-{job.pk}"
    return download_archive(request, folder_archives.pack(sources), name=f"{name}.tar.gz")


def _store_credentials(view: TenantView, values: dict[str, Any]) -> dict[str, Any]:
    """Store the registry credentials, if there are any, and return the remaining values of the image."""
    values = dict(values)
    username, password = values.pop("username"), values.pop("password")
    if username:
        host = values["reference"].partition("/")[0]
        registries.save_registry(
            organization=view.organization,
            host=host,
            username=username,
            password=password,
            user=view.membership.user,
        )
    return values


def _check_registry(view: TenantView, values: dict[str, Any]) -> str:
    """Check that the registry has the image. Return a warning if the registry does not answer, else an empty string.

    Raises InvalidInput.
    """
    request = {name: values[name] for name in ("reference", "username", "password")}
    return str(registries.check_image(organization=view.organization, **request).warning)


urlpatterns = [
    path("storage/", StorageView.as_view(), name="storage"),
    path("images/", ImagesView.as_view(), name="images"),
    path("images/<str:name>/", ImageView.as_view(), name="image"),
    path("jobs/<int:pk>/results/", ResultsView.as_view(), name="api_job_results"),
    path("jobs/<int:pk>/files/", JobFilesView.as_view(), name="api_job_files"),
    path(f"jobs/<int:pk>/files/{FILE_ROUTE}", JobFileView.as_view(), name="api_job_file"),
    path("jobs/<int:pk>/archive/", JobArchiveView.as_view(), name="api_job_archive"),
]

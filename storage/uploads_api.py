"""API of resumable uploads: the tus protocol 1.0.0 (https://tus.io/protocols/resumable-upload), and their results.

Direct uploads (`direct_uploads`) are created and sent by routes of their own. One route returns the results of both.
"""

from __future__ import annotations

import re
import uuid
from base64 import b64decode
from typing import Any, ClassVar
from urllib.parse import urlsplit

from django.conf import settings
from django.http import HttpRequest
from django.urls import path, reverse
from django.utils.http import http_date
from django.utils.translation import gettext_lazy as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.exceptions import MethodNotAllowed, UnsupportedMediaType
from rest_framework.request import Request
from rest_framework.response import Response

from console.accounts.permissions import TenantView
from console.accounts.roles import Capability
from console.core import enqueue
from console.core.errors import CustomerError, InvalidInput
from console.core.pagination import NewestFirst
from storage import direct_uploads, tasks, uploads
from storage.api import page_of
from storage.errors import OffsetConflict, StorageError, TooLarge
from storage.models import Upload
from storage.upload_stream import RawBody, body_of

TUS_VERSION = "1.0.0"
EXTENSIONS = "creation,creation-with-upload,checksum,expiration,termination,concatenation"
"""The extensions of tus that this server supports."""
BYTES_TYPE = "application/offset+octet-stream"
"""The media type that tus requires for bytes of an upload."""
BODY = {BYTES_TYPE: OpenApiTypes.BINARY}
"""A request body of bytes, for the API schema."""
PARTIAL, FINAL = "partial", "final;"
"""The values of `Upload-Concat`. After `final;` the client names the URLs of the parts."""
SIZE_END = 2**63
"""Sizes must be smaller: the database column is a signed number of 64 bits."""


class UnsupportedVersion(StorageError):
    """The client speaks another version of tus."""

    code = "unsupported_version"
    message = _("Send the header Tus-Resumable: 1.0.0.")


def _header(name: str, description: str, *, required: bool = False) -> OpenApiParameter:
    return OpenApiParameter(name, OpenApiTypes.STR, OpenApiParameter.HEADER, description=description, required=required)


TUS_HEADER = _header("Tus-Resumable", "1.0.0", required=True)


class ErrorSerializer(serializers.Serializer[Upload]):
    """Why an upload failed."""

    code = serializers.CharField(source="error_code")
    message = serializers.CharField(source="error")


class UploadSerializer(serializers.ModelSerializer[Upload]):
    """A resumable upload. `offset` and `size_bytes` are in bytes; `version` is the published dataset version."""

    id = serializers.UUIDField(source="key", read_only=True)
    offset = serializers.SerializerMethodField()
    version = serializers.IntegerField(source="version.number", read_only=True, default=None, allow_null=True)
    error = serializers.SerializerMethodField()

    class Meta:
        model = Upload
        fields = (
            "id", "purpose", "name", "path", "filename", "state", "offset", "size_bytes", "sha256", "version", "error",
            "created_at", "expires_at",
        )  # fmt: skip

    def get_offset(self, upload: Upload) -> int:
        """Return how many bytes have arrived."""
        return uploads.offset_of(upload)

    @extend_schema(responses=ErrorSerializer)
    def get_error(self, upload: Upload) -> dict[str, str] | None:
        """Return the error of a failed upload, else None."""
        return {"code": upload.error_code, "message": upload.error} if upload.error_code else None


class _TusView(TenantView):
    """Base of the views of tus. It checks and adds the headers that all requests and responses have."""

    parser_classes = (RawBody,)

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Check access, and then the version of tus. GET is not part of tus, and needs no version."""
        super().initial(request, *args, **kwargs)
        # `hasattr`, because a method that the view lacks gets a 405 even if the request's headers are wrong.
        is_tus = request.method in {"HEAD", "POST", "PATCH", "DELETE"} and hasattr(self, request.method.lower())
        if is_tus and request.headers.get("Tus-Resumable") != TUS_VERSION:
            raise UnsupportedVersion

    def finalize_response(self, request: Request, response: Any, *args: Any, **kwargs: Any) -> Response:
        """Add the headers that tus requires in every response."""
        response["Tus-Resumable"] = TUS_VERSION
        response["Cache-Control"] = "no-store"
        if response.status_code == 412:  # UnsupportedVersion; tus requires that it names the supported version
            response["Tus-Version"] = TUS_VERSION
        return super().finalize_response(request, response, *args, **kwargs)

    def options(self, request: HttpRequest, *_args: Any, **_kwargs: Any) -> Response:
        """Return which extensions and sizes the server supports, in headers."""
        headers = {
            "Tus-Version": TUS_VERSION,
            "Tus-Extension": EXTENSIONS,
            "Tus-Max-Size": str(settings.MAX_UPLOAD_BYTES),
            "Tus-Checksum-Algorithm": ",".join(uploads.CHECKSUMS),
        }
        return Response(status=204, headers=headers)

    def receive(self, request: Request, upload: Upload, offset: int) -> int:
        """Append the request's body at `offset`, and finish the upload at its last byte; return the new offset."""
        left_bytes = upload.size_bytes - offset
        if left_bytes < 0:
            raise OffsetConflict
        try:
            stream = body_of(request, limit_bytes=left_bytes, read_timeout_seconds=uploads.QUIET_SECONDS)
        except TooLarge:
            raise TooLarge(_("More bytes arrived than the upload's size.")) from None
        checksum = request.headers.get("Upload-Checksum")
        new_offset = uploads.append(
            upload=upload, offset=offset, stream=stream, checksum=uploads.Checksum.parse(checksum) if checksum else None
        )
        if new_offset == upload.size_bytes:
            uploads.finish(upload)
        return new_offset


class UploadsView(_TusView):
    """The organization's uploads."""

    capabilities: ClassVar = {"GET": Capability.VIEW, "POST": Capability.STORE}

    @extend_schema(operation_id="uploads_list", responses=page_of(UploadSerializer))
    def get(self, request: Request) -> Response:
        """List the uploads in progress and those that ended within the last day, newest first."""
        # `garbage_collection.collect` deletes older ones.
        rows = Upload.objects.filter(organization=self.organization).select_related("version")
        paginator = NewestFirst()
        page = paginator.paginate_queryset(rows, request, view=self) or ()
        return paginator.get_paginated_response(UploadSerializer(page, many=True).data)

    @extend_schema(
        operation_id="uploads_create",
        request=BODY,
        parameters=[
            TUS_HEADER,
            _header("Upload-Length", "Size in bytes. Not for a final upload."),
            _header(
                "Upload-Metadata",
                "purpose (dataset or workspace), name, and for a workspace path: names with values in Base64, "
                "separated by commas. filename is the file's name on the client's machine. unpack, without a value, "
                "unpacks an archive into the folder at path.",
            ),
            _header("Upload-Concat", "partial, or final; with the URLs of the parts."),
        ],
        responses={201: None},
    )
    def post(self, request: Request) -> Response:
        """Create a resumable upload. Its URL is in the header Location. The body may be its first bytes."""
        header = request.headers.get("Upload-Metadata", "")
        values = _parse_metadata(header)
        concat = request.headers.get("Upload-Concat", "")
        new = uploads.NewUpload(
            size_bytes=0 if concat.startswith(FINAL) else _number(request, "Upload-Length"),
            purpose=Upload.Purposes.PART if concat == PARTIAL else values.get("purpose", ""),
            name=values.get("name", ""),
            path=values.get("path", ""),
            filename=values.get("filename", ""),
            is_unpacked="unpack" in values,
            metadata=header,
        )
        user = self.membership.user
        if concat.startswith(FINAL):
            keys = _parse_parts(concat.removeprefix(FINAL))
            upload = uploads.create_final(organization=self.organization, user=user, new=new, part_keys=keys)
            uploads.finish(upload)
        elif concat in {"", PARTIAL}:
            upload = uploads.create(organization=self.organization, user=user, new=new)
            self._receive_first_bytes(request, upload)
        else:
            raise InvalidInput(fields={"Upload-Concat": _("Use partial, or final; with the URLs of the parts.")})
        headers = _state_headers(upload) | {"Location": reverse("api_upload", args=[upload.key])}
        return Response(status=201, headers=headers)

    def _receive_first_bytes(self, request: Request, upload: Upload) -> None:
        """Receive the body of a creation if it has bytes. An upload of 0 bytes is finished at once.

        If the body is refused or breaks, delete the upload: the client does not learn its URL, so nobody continues it.
        """
        try:
            if request.content_type == BYTES_TYPE:
                self.receive(request, upload, offset=0)
            elif not upload.size_bytes:
                uploads.finish(upload)
        except CustomerError:
            # A complete upload stays: it has ended with the error, or `uploads.collect` finishes it later.
            if upload.state == Upload.States.RECEIVING and uploads.offset_of(upload) < upload.size_bytes:
                uploads.terminate(upload)
            raise


class UploadView(_TusView):
    """One upload."""

    capabilities: ClassVar = {
        "GET": Capability.VIEW,
        "POST": Capability.STORE,
        "PATCH": Capability.STORE,
        "DELETE": Capability.STORE,
    }

    @extend_schema(operation_id="uploads_read", responses=UploadSerializer)
    def get(self, request: Request, key: uuid.UUID) -> Response:
        """Return the upload with its state, and its result or error once it has ended."""
        return Response(UploadSerializer(self._upload(key)).data)

    def head(self, request: Request, key: uuid.UUID) -> Response:
        """Return the offset at which the client continues."""
        upload = self._upload(key)
        headers = _state_headers(upload, uploads.settled_offset_of(upload))
        headers["Upload-Length"] = str(upload.size_bytes)
        if upload.metadata:
            headers["Upload-Metadata"] = upload.metadata
        if upload.purpose == Upload.Purposes.PART:
            headers["Upload-Concat"] = PARTIAL
        elif parts := [reverse("api_upload", args=[part.key]) for part in upload.parts.order_by("position")]:
            headers["Upload-Concat"] = FINAL + " ".join(parts)
        if headers["Upload-Offset"] == headers["Upload-Length"] and upload.state in uploads.OPEN_STATES:
            enqueue.send(tasks.finish_upload, upload.pk)  # the process that received the last byte may have died
        return Response(headers=headers)

    @extend_schema(
        operation_id="uploads_append",
        request=BODY,
        parameters=[
            TUS_HEADER,
            _header("Upload-Offset", "The upload's offset, where the body begins.", required=True),
            _header("Upload-Checksum", "sha1 or sha256, a space, and the body's digest in Base64."),
        ],
        responses={204: None},
    )
    def patch(self, request: Request, key: uuid.UUID) -> Response:
        """Append the body at the offset. The last byte publishes the dataset version or stores the file."""
        upload = self._upload(key)
        if request.content_type != BYTES_TYPE:
            raise UnsupportedMediaType(request.content_type)
        self.receive(request, upload, _number(request, "Upload-Offset"))
        return Response(status=204, headers=_state_headers(upload))

    @extend_schema(operation_id="uploads_terminate", parameters=[TUS_HEADER], responses={204: None})
    def delete(self, request: Request, key: uuid.UUID) -> Response:
        """Delete the upload with its bytes. A dataset version or file that it has produced stays."""
        direct_uploads.terminate(self._upload(key))
        return Response(status=204)

    @extend_schema(exclude=True)
    def post(self, request: Request, key: uuid.UUID) -> Response:
        """Handle the request as the method in X-HTTP-Method-Override, for clients that can only send GET and POST."""
        method = request.headers.get("X-HTTP-Method-Override", "")
        handlers = {"PATCH": self.patch, "DELETE": self.delete}
        if method not in handlers:
            raise MethodNotAllowed("POST")
        return handlers[method](request, key)

    def _upload(self, key: uuid.UUID) -> Upload:
        return uploads.upload_with_key(self.organization, key)


class NewDirectUploadSerializer(serializers.Serializer[Any]):
    """A file or archive to send in parts. `path` is in the workspace; `unpack` unpacks an archive into that folder."""

    size_bytes = serializers.IntegerField(min_value=1, max_value=SIZE_END - 1)
    purpose = serializers.ChoiceField(choices=[Upload.Purposes.DATASET.value, Upload.Purposes.WORKSPACE.value])
    name = serializers.CharField(max_length=63, help_text="Of the dataset or workspace.")
    path = serializers.CharField(max_length=4000, default="", allow_blank=True, trim_whitespace=False)
    filename = serializers.CharField(max_length=255, default="", allow_blank=True)
    unpack = serializers.BooleanField(default=False)


class DirectUploadSerializer(serializers.Serializer[Upload]):
    """A direct upload. Every part but the last has `part_size_bytes`; parts are numbered from 1 to `part_count`."""

    id = serializers.UUIDField(source="key")
    # Declared for the API schema: `to_representation` replaces their values.
    part_size_bytes = serializers.IntegerField(source="size_bytes")
    part_count = serializers.IntegerField(source="size_bytes")
    expires_at = serializers.DateTimeField()

    def to_representation(self, instance: Upload) -> dict[str, Any]:
        """Return the data, with the derived numbers."""
        data: dict[str, Any] = super().to_representation(instance)
        size, count = direct_uploads.part_size(instance), direct_uploads.part_count(instance)
        return data | {"part_size_bytes": size, "part_count": count}


class PartNumbersSerializer(serializers.Serializer[Any]):
    """Numbers of parts."""

    numbers = serializers.ListField(child=serializers.IntegerField(), min_length=1, max_length=direct_uploads.MAX_URLS)


class PartUrlSerializer(serializers.Serializer[Any]):
    """Where to PUT a part of exactly `size_bytes`. The URL is valid for 15 minutes."""

    number = serializers.IntegerField()
    url = serializers.CharField()
    size_bytes = serializers.IntegerField()


class PartUrlsSerializer(serializers.Serializer[Any]):
    """The URLs of the parts that were asked for."""

    results = PartUrlSerializer(many=True)


class ReceivedPartsSerializer(DirectUploadSerializer):
    """A direct upload with the numbers of the parts that have arrived."""

    received = serializers.SerializerMethodField()

    def get_received(self, upload: Upload) -> list[int]:
        """Return the numbers of the parts that have arrived."""
        return direct_uploads.received_parts(upload)


class DirectUploadsView(TenantView):
    """Uploads whose parts go directly to the operator's bucket."""

    capabilities: ClassVar = {"POST": Capability.STORE}

    @extend_schema(
        operation_id="uploads_direct_create",
        request=NewDirectUploadSerializer,
        responses={201: DirectUploadSerializer},
    )
    def post(self, request: Request) -> Response:
        """Create an upload whose parts are sent to signed URLs, where the administrator has configured a bucket."""
        form = NewDirectUploadSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        values = dict(form.validated_data)
        new = uploads.NewUpload(is_unpacked=values.pop("unpack"), **values)
        upload = direct_uploads.create(organization=self.organization, user=self.membership.user, new=new)
        return Response(DirectUploadSerializer(upload).data, status=201)


class UploadPartsView(TenantView):
    """The parts of a direct upload."""

    capabilities: ClassVar = {"GET": Capability.VIEW, "POST": Capability.STORE}

    @extend_schema(operation_id="uploads_parts_list", responses=ReceivedPartsSerializer)
    def get(self, _request: Request, key: uuid.UUID) -> Response:
        """Return which parts have arrived, so that the client can send the others."""
        return Response(ReceivedPartsSerializer(uploads.upload_with_key(self.organization, key)).data)

    @extend_schema(operation_id="uploads_parts_sign", request=PartNumbersSerializer, responses=PartUrlsSerializer)
    def post(self, request: Request, key: uuid.UUID) -> Response:
        """Return signed URLs for parts, at most 100 at a time."""
        upload = uploads.upload_with_key(self.organization, key)
        form = PartNumbersSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        urls = direct_uploads.part_urls(upload, form.validated_data["numbers"])
        return Response({"results": [url._asdict() for url in urls]}, headers={"Cache-Control": "private, no-store"})


class UploadCompletionView(TenantView):
    """The end of a direct upload."""

    capabilities: ClassVar = {"POST": Capability.STORE}

    @extend_schema(operation_id="uploads_complete", request=None, responses={202: UploadSerializer})
    def post(self, _request: Request, key: uuid.UUID) -> Response:
        """Tell the server that all parts were sent. It then fetches them; poll the upload's state to see the result."""
        upload = uploads.upload_with_key(self.organization, key)
        direct_uploads.complete(upload)
        return Response(UploadSerializer(upload).data, status=202)


def _state_headers(upload: Upload, offset: int | None = None) -> dict[str, str]:
    """Return the headers with the offset, which is read if `offset` is None, and the expiry of an open upload."""
    headers = {"Upload-Offset": str(uploads.offset_of(upload) if offset is None else offset)}
    if upload.state in uploads.OPEN_STATES:
        headers["Upload-Expires"] = http_date(upload.expires_at.timestamp())
    return headers


def _number(request: Request, name: str) -> int:
    """Return the number of bytes in the header `name`. Raises InvalidInput."""
    value = request.headers.get(name, "")
    if not re.fullmatch("[0-9]{1,19}", value, re.ASCII) or int(value) >= SIZE_END:
        raise InvalidInput(fields={name: _("Send a number of bytes.")})
    return int(value)


def _parse_metadata(header: str) -> dict[str, str]:
    """Parse `Upload-Metadata`: pairs of a name and a value in Base64. Raises InvalidInput."""
    try:
        pairs = [pair.split() for pair in header.split(",") if pair.strip()]
        values = {name: b64decode("".join(value), validate=True).decode() for name, *value in pairs}
        if len(values) == len(pairs) and not any("\0" in value for value in values.values()):
            return values
    except ValueError:
        pass
    raise InvalidInput(fields={"Upload-Metadata": _("Send each name once, with its text in Base64.")})


def _parse_parts(urls: str) -> list[uuid.UUID]:
    """Parse the URLs of parts in `Upload-Concat`. Raises InvalidInput."""
    try:
        return [uuid.UUID(urlsplit(url).path.rstrip("/").rpartition("/")[2]) for url in urls.split()]
    except ValueError:
        raise InvalidInput(fields={"Upload-Concat": _("Name complete parts, each once.")}) from None


urlpatterns = [
    path("uploads/", UploadsView.as_view(), name="api_uploads"),
    path("uploads/direct/", DirectUploadsView.as_view(), name="api_uploads_direct"),
    path("uploads/<uuid:key>/", UploadView.as_view(), name="api_upload"),
    path("uploads/<uuid:key>/parts/", UploadPartsView.as_view(), name="api_upload_parts"),
    path("uploads/<uuid:key>/complete/", UploadCompletionView.as_view(), name="api_upload_complete"),
]

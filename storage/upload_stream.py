"""Give views the body of an upload as a stream, so that no body is held in memory or copied to a temporary file.

A body either has a Content-Length or is chunked. Reading raises UploadBroken if the connection breaks before the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from django.http import HttpRequest
from rest_framework.parsers import BaseParser
from rest_framework.request import Request

from console.serving.exchange import Exchange, exchange_of
from console.serving.refusals import Refused
from storage.errors import TooLarge, TooManyUploads, UploadBroken
from storage.files import Readable


class RawBody(BaseParser):
    """A DRF parser that accepts every media type and leaves the body unread. Views read it with `body_of`."""

    media_type = "*/*"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Mapping[str, Any] | None = None) -> Any:
        """Return `stream` unread."""
        return stream


class _SizedBody:
    """A body with a Content-Length. If fewer bytes arrive, the connection broke."""

    def __init__(self, stream: Readable, length: int) -> None:
        self._stream = stream
        self._remaining = length

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes. Raises UploadBroken if the connection ended too early."""
        if not self._remaining:
            return b""
        try:
            data = self._stream.read(min(size, self._remaining))
        except TimeoutError:  # an OSError too, but the caller may read again
            raise
        except OSError as error:  # such as Django's UnreadablePostError
            raise UploadBroken from error
        if not data:  # the end of the stream, before Content-Length bytes
            raise UploadBroken
        self._remaining -= len(data)
        return data


class _ChunkedBody:
    """A chunked body. The server decodes the chunks and knows the last one, so an empty read is the end of the body."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end. Raises UploadBroken if the connection ended too early."""
        try:
            return self._stream.read(size)
        except TimeoutError:  # as in `_SizedBody`
            raise
        except OSError as error:
            raise UploadBroken from error


def body_of(request: Request, *, limit_bytes: int, read_timeout_seconds: float | None = None) -> Readable:
    """Return the request's unread body; an empty stream if the request has none.

    Reading it raises TimeoutError if nothing arrives within `read_timeout_seconds`; the caller may read again. Raises
    TooLarge if the Content-Length exceeds `limit_bytes`; since a chunked body has none, the caller must also limit
    what it reads. Raises TooManyUploads if the organization has too many uploads in progress.
    """
    django_request: HttpRequest = request._request  # noqa: SLF001  # DRF offers the wrapped request nowhere else
    exchange = exchange_of(django_request)
    # Trainyard's web server passes the body to the view in an exchange (`console.serving.exchange`). Another server,
    # such as Django's test client, makes no exchange; then Django's request is the stream.
    stream: Readable = exchange.body if exchange and exchange.body else django_request
    if exchange and exchange.body:
        exchange.body.read_timeout_seconds = read_timeout_seconds
    length = django_request.META.get("CONTENT_LENGTH") or ""
    if length.isdecimal():
        if int(length) > limit_bytes:
            raise TooLarge
        _count_upload(exchange)
        return _SizedBody(stream, int(length))
    if django_request.META.get("HTTP_TRANSFER_ENCODING"):
        _count_upload(exchange)
        return _ChunkedBody(stream)
    return BytesIO()  # in HTTP/1.1 a request with neither header has no body


def _count_upload(exchange: Exchange | None) -> None:
    """Count the upload under its organization. Raises TooManyUploads at the limit."""
    if exchange and exchange.body:
        try:
            exchange.body.begin()  # counts until the request ends
        except Refused as error:
            raise TooManyUploads from error

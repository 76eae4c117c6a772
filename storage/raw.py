"""Raw request bodies, as a stream. The one rule: no body is ever held in memory, and a body that broke off is an error.

Hides what Django's own stream does not do: bodies sent in chunks, without a length, and telling an end from a broken
connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from django.http import HttpRequest
from rest_framework.parsers import BaseParser
from rest_framework.request import Request

from storage.errors import TooLarge, UploadBroken
from storage.files import Readable


class RawBody(BaseParser):
    """A DRF parser that parses nothing: whoever asks for `request.data` gets the stream, not a copy in memory."""

    media_type = "*/*"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Mapping[str, Any] | None = None) -> Any:
        """The stream itself."""
        return stream


class _Announced:
    """A body of known length."""

    def __init__(self, stream: Readable, length: int) -> None:
        self._stream = stream
        self._left = length

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes. Raises UploadBroken when the connection ended too early."""
        if not self._left:
            return b""
        try:
            data = self._stream.read(min(size, self._left))
        except OSError as error:  # Django's UnreadablePostError among them
            raise UploadBroken from error
        if not data:
            raise UploadBroken
        self._left -= len(data)
        return data


class _Chunked:
    """A body of unknown length, which the server ends."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end. Raises UploadBroken when the connection ended too early."""
        try:
            return self._stream.read(size)
        except OSError as error:
            raise UploadBroken from error


def body_of(request: Request, *, limit_bytes: int) -> Readable:
    """The request's body. Raises TooLarge at once when it announces more than `limit_bytes`, before a byte is read."""
    raw: HttpRequest = request._request  # noqa: SLF001  # DRF offers the wrapped request nowhere else
    length = raw.META.get("CONTENT_LENGTH") or ""
    if length.isdecimal():
        if int(length) > limit_bytes:
            raise TooLarge
        return _Announced(raw, int(length))
    if raw.META.get("wsgi.input_terminated"):  # chunks: Django would take them for an empty body
        return _Chunked(raw.META["wsgi.input"])
    return BytesIO()

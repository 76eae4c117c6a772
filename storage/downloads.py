"""Send files and folders of customers as responses, whole or in part, in constant memory.

Customers' code decides the content, and browsers must not execute it on the console's origin. So files are sent as
attachments with a neutral media type. Only pictures of known types are shown in pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.utils.http import content_disposition_header, quote_etag
from django.utils.translation import gettext as _
from rest_framework.request import Request

from console.core.errors import NotFound
from storage.files import OpenFile
from storage.previews import image_type

_MAGIC_BYTES = 16
"""How many bytes at the start of a picture tell its type: 12 for WebP, fewer for others."""
_CONTROL_CHARACTERS = dict.fromkeys((*range(32), 127), "_")
"""Replacements for characters that a header must not contain, for `str.translate`."""
_RANGE = re.compile(r"bytes[ \t]*=[ \t]*(\d{0,1000})-(\d{0,1000})[ \t]*", re.ASCII | re.IGNORECASE)
"""The header Range with one range of bytes. For several ranges, and for other units, the response is the whole file, as
RFC 9110 allows. Python refuses to convert numbers with more than 4,300 digits; 1,000 are enough."""


class _Section(NamedTuple):
    """A part of a file: the position of its first byte, and its size in bytes."""

    start: int
    size: int


class _Unsatisfiable(Exception):
    """The requested range contains no byte of the file."""


def download(request: HttpRequest | Request, file: OpenFile, *, name: str) -> HttpResponseBase:
    """Return an open file as an attachment, or the range of it that the request asks for (RFC 9110, section 14).

    The response closes the file when it has been sent.
    """
    etag = quote_etag(file.version)
    try:
        requested = _requested_section(request, file, etag)
    except _Unsatisfiable:
        file.close()
        message = _("The file has %(size)d bytes. Request a range within them.") % {"size": file.size}
        error_response = JsonResponse({"code": "range_not_satisfiable", "message": message}, status=416)
        error_response["Content-Range"] = f"bytes */{file.size}"
        return error_response
    section = requested or _Section(0, file.size)
    response = _attachment(request, file.section(*section), name=name, content_type="application/octet-stream")
    response["Content-Length"] = str(section.size)
    response["Accept-Ranges"] = "bytes"
    response["ETag"] = etag
    if requested is not None:
        response.status_code = 206
        response["Content-Range"] = f"bytes {section.start}-{section.start + section.size - 1}/{file.size}"
    return response


def download_archive(
    request: HttpRequest | Request, chunks: Iterable[bytes], *, name: str, content_type: str = "application/gzip"
) -> HttpResponseBase:
    """Return an archive as an attachment. Its chunks are made while they are sent, so its size is not known before."""
    return _attachment(request, chunks, name=name, content_type=content_type)


def show_image(request: HttpRequest | Request, file: OpenFile) -> HttpResponseBase:
    """Return a picture, which a page shows. Raises NotFound if the file is no picture of a known type.

    The response closes the file when it has been sent.
    """
    media_type = image_type(file.stream.read(_MAGIC_BYTES))
    if not media_type:
        file.close()
        raise NotFound(_("This file is not a picture that can be shown."))
    response = _attachment(request, file.section(0, file.size), name="", content_type=media_type)
    response["Content-Length"] = str(file.size)
    response["Content-Disposition"] = "inline"
    return response


def _attachment(
    request: HttpRequest | Request, content: Iterable[bytes], *, name: str, content_type: str
) -> StreamingHttpResponse:
    """Return a streaming response with the headers that keep browsers from executing the content."""
    response = StreamingHttpResponse(content, content_type=content_type)
    if request.method == "HEAD":
        response.streaming_content = ()
    response["Content-Disposition"] = content_disposition_header(
        as_attachment=True, filename=name.translate(_CONTROL_CHARACTERS)
    )
    response["X-Content-Type-Options"] = "nosniff"
    response["Content-Security-Policy"] = "default-src 'none'; sandbox"
    response["Cache-Control"] = "private, no-store"
    return response


def _requested_section(request: HttpRequest | Request, file: OpenFile, etag: str) -> _Section | None:
    """Return the section that the header Range asks for; None for the whole file. Raises _Unsatisfiable."""
    match = _RANGE.fullmatch(request.headers.get("Range", "")) if request.method == "GET" else None
    # If-Range names the version of which the client has a part. If the file has changed, the client needs all of it.
    if match is None or request.headers.get("If-Range", etag) != etag:
        return None
    first, last = match.groups()
    # An invalid range, such as `bytes=-` or `bytes=5-2`, is ignored.
    if not first:  # `bytes=-5` requests the last 5 bytes
        if not last:
            return None
        size = min(int(last), file.size)
        if not size:
            raise _Unsatisfiable
        return _Section(file.size - size, size)
    if last and int(last) < int(first):
        return None
    start = int(first)
    if start >= file.size:
        raise _Unsatisfiable
    end = min(int(last) + 1, file.size) if last else file.size
    return _Section(start, end - start)

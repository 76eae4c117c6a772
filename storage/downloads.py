"""Send files and folders of customers as responses, whole or in part, in constant memory.

Browsers must neither run nor guess the type of what customers' code wrote, so everything is an attachment of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.utils.http import content_disposition_header, quote_etag
from django.utils.translation import gettext as _
from rest_framework.request import Request

from console.core.errors import NotFound
from storage.files import OpenFile
from storage.previews import image_type

_MAGIC_BYTES = 16
"""How many of a picture's first bytes tell its type."""
_CONTROL_CHARACTERS = dict.fromkeys((*range(32), 127), "_")
_RANGE = re.compile(r"bytes[ \t]*=[ \t]*(\d{0,1000})-(\d{0,1000})[ \t]*", re.ASCII | re.IGNORECASE)
"""One range of bytes. Several at once and other units are answered with the whole file, as RFC 9110 allows."""


class _Unsatisfiable(Exception):
    """A range has no byte of the file."""


def download(request: HttpRequest | Request, file: OpenFile, *, name: str) -> HttpResponseBase:
    """Return an open file as an attachment, or the range of it that the request asks for (RFC 9110, section 14).

    Closes the file when it is sent.
    """
    etag = quote_etag(file.version)
    try:
        section = _requested_range(request, file, etag)
    except _Unsatisfiable:
        file.close()
        message = _("The file has %(size)d bytes. Request a range within them.") % {"size": file.size}
        answer = JsonResponse({"code": "range_not_satisfiable", "message": message}, status=416)
        answer["Content-Range"] = f"bytes */{file.size}"
        return answer
    first, size = section or (0, file.size)
    response = _attachment(request, file.section(first, size), name=name, content_type="application/octet-stream")
    response["Content-Length"] = str(size)
    response["Accept-Ranges"] = "bytes"
    response["ETag"] = etag
    if section is not None:
        response.status_code = 206
        response["Content-Range"] = f"bytes {first}-{first + size - 1}/{file.size}"
    return response


def download_archive(
    request: HttpRequest | Request, chunks: Iterable[bytes], *, name: str, content_type: str = "application/gzip"
) -> HttpResponseBase:
    """Return the chunks of an archive, which are made while they are sent, as an attachment."""
    return _attachment(request, chunks, name=name, content_type=content_type)


def show_image(request: HttpRequest | Request, file: OpenFile) -> HttpResponseBase:
    """Return a picture for a page, with the media type of its first bytes. Closes the file when it is sent.

    Raises NotFound for anything else.
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


def _requested_range(request: HttpRequest | Request, file: OpenFile, etag: str) -> tuple[int, int] | None:
    """Return the first byte and the size of the requested range; None for the whole file.

    Raises _Unsatisfiable.
    """
    match = _RANGE.fullmatch(request.headers.get("Range", "")) if request.method == "GET" else None
    # A client that has a part of another version needs the whole file.
    if match is None or request.headers.get("If-Range", etag) != etag:
        return None
    first, last = match.groups()
    if not first:
        if not last:
            return None
        size = min(int(last), file.size)
        if not size:
            raise _Unsatisfiable
        return file.size - size, size
    if last and int(last) < int(first):
        return None
    if int(first) >= file.size:
        raise _Unsatisfiable
    return int(first), (min(int(last), file.size - 1) if last else file.size - 1) - int(first) + 1

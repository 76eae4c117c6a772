"""A client of S3-compatible storage: objects and multipart uploads of one bucket.

All requests are signed in their URL (AWS Signature Version 4, with an unsigned payload). So one function signs both the
console's own requests and the URLs that it gives to clients. URLs are path-style: the bucket's name is in the path.

A server's responses are not trusted. Their size and the time to read them are limited, and redirects are not followed.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import quote, unquote_plus, urlsplit
from xml.etree import ElementTree as ET

from console.core import connections

MAX_PART_COUNT = 10_000
"""How many parts a multipart upload may have, which is S3's limit."""
REQUEST_SECONDS = 300
"""How long the URL of one of the console's own requests is valid. It is used at once, but clocks may differ."""
MAX_RESPONSE_BYTES = 8 * 1024**2
"""The largest XML response. A listing of 1,000 keys of 1,024 bytes needs less, even if all are percent-encoded."""
RESPONSE_SECONDS = 60
"""How long reading an XML response may take in all, since a socket's own timeout begins again with each byte."""


class S3Error(Exception):
    """The server refused a request, or its response was invalid.

    `status` is the HTTP status, which is 200 for an invalid response. `code` is S3's error code, or empty.
    """

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(f"{status} {code}".strip())
        self.status, self.code = status, code


@dataclass(frozen=True)
class Bucket:
    """A bucket, and the credentials to use it. Without credentials, requests are anonymous.

    `endpoint` is an origin, such as `https://s3.example.com`.
    """

    endpoint: str
    name: str
    region: str
    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    allows_private: bool = False
    """Whether the endpoint may have a private address."""


class Object(NamedTuple):
    """An object of a bucket. `size` is in bytes; `etag` has its quotes, as the server sends it."""

    key: str
    size: int
    etag: str


class Part(NamedTuple):
    """A part of a multipart upload that has arrived in the bucket. `size` is in bytes."""

    number: int
    size: int
    etag: str


class Multipart(NamedTuple):
    """An unfinished multipart upload: the key of its object, and its ID."""

    key: str
    multipart_id: str


# --- Signature --------------------------------------------------------------------------------------------------------


def signed_url(
    bucket: Bucket,
    method: str,
    key: str = "",
    query: Mapping[str, str | int] | None = None,
    *,
    seconds: int = REQUEST_SECONDS,
    headers: Mapping[str, str] | None = None,
    now: datetime | None = None,
) -> str:
    """Return a URL that is valid for `seconds`, for requests that send these `headers` with these values.

    The algorithm: https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html
    """
    path = quote(f"/{bucket.name}/{key}" if key else f"/{bucket.name}", safe="/")
    values = {name: str(value) for name, value in (query or {}).items()}
    if not bucket.access_key_id:
        return f"{bucket.endpoint}{path}?{_encode(values)}"
    # The names below are AWS's: "credential scope", "signed headers", "canonical request", "string to sign".
    time_text = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{time_text[:8]}/{bucket.region}/s3/aws4_request"
    signed_headers = {"host": _host_header(bucket.endpoint)} | {
        name.lower(): value.strip() for name, value in (headers or {}).items()
    }
    header_names = ";".join(sorted(signed_headers))
    values |= {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{bucket.access_key_id}/{scope}",
        "X-Amz-Date": time_text,
        "X-Amz-Expires": str(seconds),
        "X-Amz-SignedHeaders": header_names,
    }
    header_lines = "".join(f"{name}:{signed_headers[name]}\n" for name in sorted(signed_headers))
    canonical_request = "\n".join((method, path, _encode(values), header_lines, header_names, "UNSIGNED-PAYLOAD"))
    request_sha256 = hashlib.sha256(canonical_request.encode()).hexdigest()
    string_to_sign = "\n".join(("AWS4-HMAC-SHA256", time_text, scope, request_sha256))
    digest = f"AWS4{bucket.secret_access_key}".encode()
    for part in (*scope.split("/"), string_to_sign):  # each digest is the key of the next; the last is the signature
        digest = hmac.digest(digest, part.encode(), "sha256")
    return f"{bucket.endpoint}{path}?{_encode(values)}&X-Amz-Signature={digest.hex()}"


def _host_header(endpoint: str) -> str:
    """Return the value of the header Host that clients send: the default port is left out."""
    parts = urlsplit(endpoint)
    return parts.netloc.removesuffix(":443" if parts.scheme == "https" else ":80")


def _encode(values: Mapping[str, str]) -> str:
    """Return a query in AWS's canonical form: sorted, and with all characters but the unreserved percent-encoded."""
    pairs = sorted((quote(name, safe=""), quote(value, safe="")) for name, value in values.items())
    return "&".join(f"{name}={value}" for name, value in pairs)


# --- Objects ----------------------------------------------------------------------------------------------------------


def list_objects(bucket: Bucket, prefix: str) -> Iterator[list[Object]]:
    """Yield pages of objects whose keys begin with `prefix`, sorted by key. Raises S3Error, OSError, HTTPException.

    A hostile server can send pages without end, so callers limit their number or time.
    """
    token = ""
    while True:
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        response = _request_xml(bucket, "GET", query=query | ({"continuation-token": token} if token else {}))
        is_encoded = _has_encoded_keys(response)
        yield [
            Object(_key(entry, "Key", is_encoded=is_encoded), _number(entry, "Size"), _text(entry, "ETag"))
            for entry in response.iterfind("{*}Contents")
        ]
        previous_token, token = token, _text(response, "NextContinuationToken")
        if _text(response, "IsTruncated") != "true" or not token:
            return
        _require_progress(previous_token, token)


def find_object(bucket: Bucket, key: str) -> Object | None:
    """Return the object with this key; None if there is none. Raises S3Error, OSError, HTTPException."""
    with _open_response(bucket, "HEAD", key) as response:
        if response.status == http.client.NOT_FOUND:
            return None
        if response.status != http.client.OK:
            raise S3Error(response.status)
        size = _parse_number(response.getheader("Content-Length") or "0")
        return Object(key, size, response.getheader("ETag", ""))


@contextmanager
def connect(bucket: Bucket) -> Iterator[http.client.HTTPConnection]:
    """Yield a connection to the bucket's server, for several requests. Raises ForbiddenAddress, OSError.

    All functions that send a request open one, so they raise ForbiddenAddress too.
    """
    with closing(connections.connection_to(bucket.endpoint, allows_private=bucket.allows_private)) as connection:
        yield connection


@contextmanager
def open_object(
    bucket: Bucket, item: Object, *, offset: int = 0, connection: http.client.HTTPConnection | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Yield a response whose body is the object from `offset` on. Raises S3Error, OSError, HTTPException.

    The S3Error has the status 412 if the object's ETag or size differs from `item`. `connection` can be used again
    when the whole body has been read.
    """
    headers = {"If-Match": item.etag} | ({"Range": f"bytes={offset}-"} if offset else {})
    with _open_response(bucket, "GET", item.key, headers=headers, connection=connection) as response:
        if response.status != (http.client.PARTIAL_CONTENT if offset else http.client.OK):
            raise _error(response)
        if response.length != item.size - offset:
            raise S3Error(http.client.PRECONDITION_FAILED)
        yield response


def delete_object(bucket: Bucket, key: str) -> None:
    """Delete an object. Safe to repeat. Raises S3Error, OSError, HTTPException."""
    _delete(bucket, key)


# --- Multipart uploads ------------------------------------------------------------------------------------------------


def create_multipart(bucket: Bucket, key: str) -> str:
    """Begin a multipart upload and return its ID. Raises S3Error, OSError, HTTPException."""
    response = _request_xml(bucket, "POST", key, query={"uploads": ""})
    if not (multipart_id := _text(response, "UploadId")):
        raise S3Error(http.client.OK)
    return multipart_id


def part_url(bucket: Bucket, key: str, multipart_id: str, number: int, *, size: int, seconds: int) -> str:
    """Return a URL to PUT one part of exactly `size` bytes."""
    query: dict[str, str | int] = {"partNumber": number, "uploadId": multipart_id}
    # The header Content-Length is signed, so nobody can use the URL to fill the bucket.
    return signed_url(bucket, "PUT", key, query, seconds=seconds, headers={"content-length": str(size)})


def list_parts(bucket: Bucket, key: str, multipart_id: str) -> list[Part]:
    """Return the parts that have arrived, sorted by number. Raises S3Error, OSError, HTTPException."""
    parts: list[Part] = []
    while True:
        query: dict[str, str | int] = {"uploadId": multipart_id}
        if parts:
            query["part-number-marker"] = parts[-1].number
        response = _request_xml(bucket, "GET", key, query=query)
        page = [
            Part(_number(entry, "PartNumber"), _number(entry, "Size"), _text(entry, "ETag"))
            for entry in response.iterfind("{*}Part")
        ]
        parts += page
        # A server that sends more parts than S3 allows might never stop.
        if _text(response, "IsTruncated") != "true" or not page or len(parts) > MAX_PART_COUNT:
            return parts


def complete_multipart(bucket: Bucket, key: str, multipart_id: str, parts: Iterable[Part]) -> None:
    """Join the parts to one object. Raises S3Error, OSError, HTTPException."""
    root = ET.Element("CompleteMultipartUpload", xmlns="http://s3.amazonaws.com/doc/2006-03-01/")
    for part in parts:
        element = ET.SubElement(root, "Part")
        ET.SubElement(element, "PartNumber").text = str(part.number)
        ET.SubElement(element, "ETag").text = part.etag
    response = _request_xml(bucket, "POST", key, query={"uploadId": multipart_id}, body=ET.tostring(root))
    if response.tag.rpartition("}")[2] == "Error":  # S3 sends the status 200 before it has joined the parts
        raise S3Error(http.client.OK, _text(response, "Code"))


def abort_multipart(bucket: Bucket, key: str, multipart_id: str) -> None:
    """Delete a multipart upload with its parts. Safe to repeat. Raises S3Error, OSError, HTTPException."""
    _delete(bucket, key, query={"uploadId": multipart_id})


def list_multiparts(bucket: Bucket, prefix: str) -> Iterator[Multipart]:
    """Yield the unfinished multipart uploads whose keys begin with `prefix`. Raises as `list_objects`."""
    marker: dict[str, str] = {}
    while True:
        response = _request_xml(bucket, "GET", query={"uploads": "", "prefix": prefix, "encoding-type": "url"} | marker)
        is_encoded = _has_encoded_keys(response)
        for entry in response.iterfind("{*}Upload"):
            yield Multipart(_key(entry, "Key", is_encoded=is_encoded), _text(entry, "UploadId"))
        previous_marker, marker = (
            marker,
            {
                "key-marker": _key(response, "NextKeyMarker", is_encoded=is_encoded),
                "upload-id-marker": _text(response, "NextUploadIdMarker"),
            },
        )
        if _text(response, "IsTruncated") != "true" or not marker["key-marker"]:
            return
        _require_progress(previous_marker, marker)


# --- Requests ---------------------------------------------------------------------------------------------------------


@contextmanager
def _open_response(
    bucket: Bucket,
    method: str,
    key: str = "",
    *,
    query: Mapping[str, str | int] | None = None,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    connection: http.client.HTTPConnection | None = None,
) -> Iterator[http.client.HTTPResponse]:
    """Send a signed request, and yield the response."""
    with connect(bucket) if connection is None else nullcontext(connection) as open_connection:
        target = signed_url(bucket, method, key, query).removeprefix(bucket.endpoint)
        open_connection.request(method, target, body=body, headers={"User-Agent": "Trainyard", **(headers or {})})
        with open_connection.getresponse() as response:
            yield response


def _request_xml(
    bucket: Bucket, method: str, key: str = "", *, query: Mapping[str, str | int], body: bytes = b""
) -> ET.Element:
    """Send a request, and return the root element of its XML response. Raises S3Error."""
    with _open_response(bucket, method, key, query=query, body=body) as response:
        if response.status != http.client.OK:
            raise _error(response)
        return _parse(response)


def _delete(bucket: Bucket, key: str, *, query: Mapping[str, str | int] | None = None) -> None:
    """Send a DELETE, whose response has no body. A missing object counts as deleted. Raises S3Error."""
    with _open_response(bucket, "DELETE", key, query=query) as response:
        if response.status not in {http.client.OK, http.client.NO_CONTENT, http.client.NOT_FOUND}:
            raise _error(response)


def _error(response: http.client.HTTPResponse) -> S3Error:
    """Return the error that a response reports. Its code is in the body, and empty without a body."""
    # The length is None, hence unknown, if the body is sent in chunks, as by AWS.
    code = _text(_parse(response), "Code") if response.length != 0 else ""
    return S3Error(response.status, code[:100])  # S3's own codes are shorter


def _parse(response: http.client.HTTPResponse) -> ET.Element:
    """Return the root element of an XML response. Raises S3Error if it is too large, too slow or invalid."""
    data = bytearray()
    deadline = time.monotonic() + RESPONSE_SECONDS
    while chunk := response.read1(65536):
        data += chunk
        if len(data) > MAX_RESPONSE_BYTES or time.monotonic() > deadline:
            raise S3Error(response.status)
    try:
        # Decoded here, so that the check below and the parser see the same characters, even if the XML declares another
        # encoding than UTF-8.
        text = data.decode("utf-8-sig")
        if "<!" in text:  # a DOCTYPE, which S3 never sends, could define entities that expand to gigabytes
            raise S3Error(response.status)
        return ET.fromstring(text)  # noqa: S314  # there are no entities, and the size is limited
    except (UnicodeDecodeError, ET.ParseError):
        raise S3Error(response.status) from None


def _text(element: ET.Element, name: str) -> str:
    """Return the text of the child `name` in any XML namespace; empty if there is none."""
    return element.findtext(f"{{*}}{name}") or ""


def _number(element: ET.Element, name: str) -> int:
    """Return the number in the child `name`. Raises S3Error."""
    return _parse_number(_text(element, name))


def _parse_number(text: str) -> int:
    """Return the number in a part of a response. Raises S3Error."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:  # 18 digits fit a database column of 64 bits
        raise S3Error(http.client.OK)
    return int(text)


def _require_progress(previous: object, current: object) -> None:
    """Raise S3Error if a page of a listing leads to itself, as from a server that ignores where a page begins."""
    if previous == current:
        raise S3Error(http.client.OK)


def _has_encoded_keys(response: ET.Element) -> bool:
    """Return whether the keys in a response are percent-encoded, because XML cannot contain all characters."""
    return _text(response, "EncodingType") == "url"


def _key(element: ET.Element, name: str, *, is_encoded: bool) -> str:
    """Return the key in the child `name`."""
    text = _text(element, name)
    return unquote_plus(text) if is_encoded else text

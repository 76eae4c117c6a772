"""Import a dataset version from an S3-compatible bucket: one object, or all objects below a prefix.

Customers choose the server, so only endpoints of S3_IMPORT_ENDPOINTS are allowed, only public addresses unless the
operator allows others, and no redirects are followed. The credentials are secrets of the organization.

An import first stores a list of the objects, and then receives them in the order of the list. Several objects become
one tar file. Because of the list, each attempt would write the same bytes, so an attempt can continue at any byte. An
import fails if an object has changed since it was listed.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import ssl
import tarfile
import time
from collections.abc import Iterable, Iterator
from io import BufferedRandom
from pathlib import Path
from typing import NamedTuple, TextIO
from urllib.parse import parse_qs, urlsplit

from django.conf import settings
from django.utils.translation import gettext as _
from django.views.decorators.debug import sensitive_variables

from console.accounts.models import Organization
from console.core import connections
from console.core.errors import InvalidInput
from storage import s3, secret_store
from storage.errors import TooLarge
from storage.files import CHUNK_BYTES
from storage.import_progress import (
    BUCKET_REFUSED,
    DISK_FULL_ERRNOS,
    MAX_FAILURES,
    NO_OBJECTS,
    NOT_ALLOWED,
    OBJECT_CHANGED,
    UNREACHABLE,
    ImportFailed,
    report,
    require_within_limit,
)
from storage.models import DatasetImport
from storage.quota import Reservation

SCHEME = "s3://"
DEFAULT_REGION = "us-east-1"
"""The region for a signature unless the endpoint names one. Most servers other than AWS expect it."""
MAX_KEY_BYTES = 1024
"""The length of the longest key that S3 allows."""
TAR_NAME = "files.tar"
"""The name of the tar file of the objects below a prefix. Its suffix makes `imports` unpack it."""
TAR_END = bytes(2 * tarfile.BLOCKSIZE)
"""The end of a tar file: two blocks of zeros."""
_ADDRESS = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([^\0]*))?\Z")
"""An address `s3://bucket/key`, in which the key may be missing. Buckets have 3 to 63 characters, as in S3."""

log = logging.getLogger(__name__)


class _ListedObject(NamedTuple):
    """An object to import, as the stored list has it."""

    tar_name: str | None
    """The object's name in the tar file; None if it is the only object, for which there is no tar file."""
    item: s3.Object

    @classmethod
    def parse(cls, line: str) -> _ListedObject:
        """Return the object in a line of the list."""
        tar_name, *values = json.loads(line)
        return cls(tar_name, s3.Object(*values))


class BucketSource(NamedTuple):
    """Where to import from: an endpoint, and the names of the secrets with the credentials (both empty if public)."""

    endpoint: str
    access_key_id_secret: str
    secret_access_key_secret: str


# --- Allowed sources --------------------------------------------------------------------------------------------------


def allowed_endpoints() -> dict[str, str]:
    """Return the region of each endpoint in S3_IMPORT_ENDPOINTS, by the endpoint's origin.

    An entry of this setting is an origin, and may name the region: `https://s3.example.com?region=eu-west-1`.
    """
    regions = {}
    for entry in settings.S3_IMPORT_ENDPOINTS:
        parts = urlsplit(entry)
        (region,) = parse_qs(parts.query).get("region", [DEFAULT_REGION])
        regions[f"{parts.scheme}://{parts.netloc}"] = region
    return regions


def check_source(organization: Organization, url: str, source: BucketSource) -> BucketSource:
    """Check `url` and `source`; return the source to store. Raises InvalidInput.

    If `source` has no endpoint and the operator allows only one, the result has the allowed endpoint.
    """
    allowed = allowed_endpoints()
    match = _ADDRESS.match(url)
    if not allowed:
        raise InvalidInput(fields={"url": _("Imports from buckets are turned off here. Upload the files instead.")})
    if match is None or len((match[2] or "").encode(errors="replace")) > MAX_KEY_BYTES:
        raise InvalidInput(fields={"url": _("Enter an address such as s3://bucket/folder.")})
    if not source.endpoint and len(allowed) == 1:
        source = source._replace(endpoint=next(iter(allowed)))
    if source.endpoint not in allowed:
        raise InvalidInput(fields={"endpoint": _("Choose one of: %(hosts)s.") % {"hosts": ", ".join(allowed)}})
    names = {
        "access_key_id_secret": source.access_key_id_secret,
        "secret_access_key_secret": source.secret_access_key_secret,
    }
    if any(names.values()):
        # If only one of the two secrets is named, the empty name of the other is reported as unknown.
        unknown = secret_store.missing(organization, list(names.values()))
        if errors := {
            field: _("There is no such secret. Create it under Secrets.")
            for field, name in names.items()
            if name in unknown
        }:
            raise InvalidInput(fields=errors)
    return source


@sensitive_variables()
def _bucket_and_key(row: DatasetImport) -> tuple[s3.Bucket, str]:
    """Return the bucket with its credentials, and the key or prefix. Raises ImportFailed, SecretUnreadable."""
    match, region = _ADDRESS.match(row.url), allowed_endpoints().get(row.endpoint)
    if match is None or region is None:  # the operator has removed the endpoint since the import was started
        raise ImportFailed(NOT_ALLOWED)
    access_key_id, secret_access_key = "", ""
    if row.access_key_id_secret:
        names = [row.access_key_id_secret, row.secret_access_key_secret]
        values = secret_store.values_of(row.dataset.organization, names)
        access_key_id, secret_access_key = (values[name].strip() for name in names)
    bucket = s3.Bucket(
        endpoint=row.endpoint,
        name=match[1],
        region=region,
        access_key_id=access_key_id,
        secret_access_key=secret_access_key,
        allows_private=settings.S3_IMPORT_PRIVATE_ADDRESSES,
    )
    return bucket, match[2] or ""


# --- Transfer ---------------------------------------------------------------------------------------------------------


def receive(row: DatasetImport, file: BufferedRandom, listing: Path, reservation: Reservation) -> str:
    """Append to `file` the missing bytes of the object or tar file, and return the name of that object or file.

    `listing` is the path of the list of objects, which the first attempt writes. Raises ImportFailed, TooLarge,
    SecretUnreadable, OSError for a full disk.
    """
    bucket, key = _bucket_and_key(row)
    if not listing.exists():
        file.truncate(0)  # a new list may have other objects than those whose bytes are in the file
    offset, failures = file.seek(0, os.SEEK_END), 0
    reservation.count(size_bytes=offset, entries=1)  # the file, with the bytes that earlier processes received
    while True:
        start = offset
        try:
            if not listing.exists():
                _store_listing(row, bucket, key, listing, reservation)
            with listing.open() as lines, s3.connect(bucket) as connection:
                for chunk in _content(bucket, connection, lines, offset):
                    reservation.count(size_bytes=len(chunk))
                    file.write(chunk)
                    offset += len(chunk)
                    report(row, offset)  # raises ImportFailed if the import takes too long
            file.flush()
            return _name_of(key, listing)
        except s3.S3Error as error:
            _require_temporary(error)
        except connections.ForbiddenAddress:
            raise ImportFailed(NOT_ALLOWED) from None
        except ssl.SSLCertVerificationError:
            raise ImportFailed(UNREACHABLE) from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
                raise
            log.info("The import %s was interrupted: %s", row.pk, type(error).__name__)
        file.flush()
        failures = 0 if offset > start else failures + 1
        if failures >= MAX_FAILURES:
            raise ImportFailed(UNREACHABLE)
        time.sleep(2**failures)  # no event tells that the server is back


def _name_of(key: str, listing: Path) -> str:
    """Return the file name for what was received: the last part of the object's key, or TAR_NAME."""
    with listing.open() as lines:
        first = _ListedObject.parse(next(lines))
    return key.rpartition("/")[2] if first.tar_name is None else TAR_NAME


def _require_temporary(error: s3.S3Error) -> None:
    """Raise ImportFailed if the bucket's error is permanent, so that another attempt would fail too."""
    if error.status == http.client.TOO_MANY_REQUESTS or error.status >= http.client.INTERNAL_SERVER_ERROR:
        return
    if error.code == "NoSuchBucket":
        raise ImportFailed(NO_OBJECTS)
    # 412 and 404: the object has been changed or deleted since it was listed.
    if error.status in {http.client.PRECONDITION_FAILED, http.client.NOT_FOUND}:
        raise ImportFailed(OBJECT_CHANGED)
    log.info("A bucket refused an import: %s", error)
    raise ImportFailed(BUCKET_REFUSED)


def _store_listing(row: DatasetImport, bucket: s3.Bucket, key: str, path: Path, reservation: Reservation) -> None:
    """Write the list of objects to `path`, and store the size of the import. Raises TooLarge, ImportFailed, S3Error."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        with temporary.open("w") as lines:
            size = _write_listing(_objects(row, bucket, key), lines, reservation)
        if size > reservation.left_bytes():
            raise TooLarge
        row.size_bytes = size
        row.save(update_fields=["size_bytes", "updated_at"])
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_listing(objects: Iterable[_ListedObject], lines: TextIO, reservation: Reservation) -> int:
    """Write a line for each object: a JSON list of its name in the tar file, and its key, size and ETag.

    Return the size in bytes of the object or tar file. Raises ImportFailed if there are no objects, TooLarge.
    """
    size, count, tar_name = 0, 0, None
    for tar_name, item in objects:
        line = json.dumps([tar_name, *item]) + "\n"
        reservation.count(size_bytes=len(line))
        lines.write(line)
        header, padding = _tar_frame(tar_name, item.size)
        size += len(header) + item.size + len(padding)
        count += 1
        require_within_limit(size)
        if count > settings.MAX_ARCHIVE_FILES:
            raise TooLarge(_("There are more files than allowed. Import fewer files."))
    if not count:
        raise ImportFailed(NO_OBJECTS)
    return size + (len(TAR_END) if tar_name is not None else 0)


def _objects(row: DatasetImport, bucket: s3.Bucket, key: str) -> Iterator[_ListedObject]:
    """Yield the objects to import: only the object with this key if it exists, else all objects below the key."""
    if key and not key.endswith("/"):
        if item := s3.find_object(bucket, key):
            yield _ListedObject(tar_name=None, item=item)
            return
        key += "/"
    for page in s3.list_objects(bucket, key):
        report(row, 0)  # raises ImportFailed if the import takes too long, or the dataset was deleted
        # Objects whose key ends in a slash are no files: programs create them to show empty folders.
        yield from (_ListedObject(item.key.removeprefix(key), item) for item in page if not item.key.endswith("/"))


def _content(
    bucket: s3.Bucket, connection: http.client.HTTPConnection, lines: Iterator[str], offset: int
) -> Iterator[bytes]:
    """Yield the bytes from `offset` on: of the only object, or of the tar file of all objects in the list."""
    position, tar_name = 0, None  # `position`: where the header of the current object begins
    for line in lines:
        tar_name, item = _ListedObject.parse(line)
        header, padding = _tar_frame(tar_name, item.size)
        end = position + len(header) + item.size + len(padding)
        if end > offset:
            # An earlier attempt may have received the first bytes of this header, object and padding.
            skipped_bytes = max(0, offset - position)
            yield header[skipped_bytes:]
            yield from _bytes_of(bucket, connection, item, max(0, skipped_bytes - len(header)))
            yield padding[max(0, skipped_bytes - len(header) - item.size) :]
        position = end
    if tar_name is not None:
        yield TAR_END[max(0, offset - position) :]


def _bytes_of(
    bucket: s3.Bucket, connection: http.client.HTTPConnection, item: s3.Object, offset: int
) -> Iterator[bytes]:
    """Yield the bytes of an object from `offset` on. Raises S3Error, OSError, HTTPException."""
    if offset >= item.size:
        return
    with s3.open_object(bucket, item, offset=offset, connection=connection) as response:
        # Not `read`, which waits for a whole chunk: with a slow server, `report` would not run for hours.
        while chunk := response.read1(CHUNK_BYTES):
            offset += len(chunk)
            yield chunk
    if offset != item.size:
        raise http.client.IncompleteRead(b"", item.size - offset)


def _tar_frame(tar_name: str | None, size: int) -> tuple[bytes, bytes]:
    """Return the tar header before an object and the padding after it; both are empty without a `tar_name`.

    They depend only on name and size, so that another attempt can continue the tar file.
    """
    if tar_name is None:
        return b"", b""
    info = tarfile.TarInfo(tar_name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"), bytes(-size % tarfile.BLOCKSIZE)

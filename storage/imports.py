"""Import a dataset version from an HTTPS address, or from a bucket (`bucket_import`).

Customers choose the address from which the console fetches, so it must not be that of an internal service. Only https,
the hosts of DATASET_IMPORT_HOSTS, and public IP addresses (`console.core.connections`) are allowed, and each redirect
is checked like the first address. Customers learn only the size and the success of a transfer.

A broken transfer continues where it ended, as long as the server confirms by the file's ETag or date that the file has
not changed. Tasks may be delivered twice or repeated: a file lock lets only one process import at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import logging
import os
import posixpath
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from io import BufferedRandom
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from celery import shared_task
from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone, translation
from django.utils.translation import gettext as _

from console.accounts.models import Organization, User
from console.accounts.services import record_audit_event
from console.core import connections
from console.core.enqueue import send, send_on_commit
from console.core.errors import CustomerError, InvalidInput
from storage import bucket_import, catalog, selectors
from storage.errors import UnsafePath
from storage.files import CHUNK_BYTES
from storage.import_progress import (
    DISK_FULL_ERRNOS,
    FAILED,
    MAX_FAILURES,
    NOT_ALLOWED,
    REFUSED,
    UNREACHABLE,
    ImportFailed,
    report,
    require_within_limit,
)
from storage.models import Dataset, DatasetImport, DatasetVersion
from storage.paths import split_path, translate_os_errors
from storage.quota import Reservation

MAX_OPEN = 3
"""How many imports of one organization may wait or run. Only one runs at a time, so others would wait long."""
MAX_URL_LENGTH = 2000
"""The length of the database column of the address, in characters."""
VALIDATOR_LENGTH = 200
"""The length of the database column of a validator: the ETag or date by which a server confirms that a file has not
changed. A longer one is cut. No server then confirms it, so an interrupted import starts from the beginning."""
MAX_REDIRECTS = 5
"""How many redirects are followed. File hosts need one or two."""
LOCK_FILE, GIT_LOCK_FILE = "slot", "git-slot"
"""The names of the lock files of imports of datasets and of git repositories. Only one import of each kind runs at a
time, so that imports do not occupy all processes that run tasks."""
STALE_AFTER = timedelta(minutes=3)
"""After this long without an update, the task of an open import is sent again, because its process may have died. A
transfer that works has pauses of at most `connections.TIMEOUT_SECONDS` and 16 seconds. An import that waits, or is
being published, has no updates; if its process still works, the new task ends at once, because the lock is held."""
LISTING_SUFFIX = ".list"
"""The suffix of the file that lists a bucket's objects, beside the file with the import's bytes."""
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
"""Files with these suffixes are unpacked. Any other file is published as it is."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """The parts of an https address that may be fetched. `target` is its path and query."""

    host: str
    port: int
    target: str


# --- Services ---------------------------------------------------------------------------------------------------------


def start_import(
    *,
    dataset: Dataset,
    user: User | None,
    url: str,
    endpoint: str = "",
    access_key_id_secret: str = "",
    secret_access_key_secret: str = "",
) -> DatasetImport:
    """Start an import of the file or archive at `url` as the dataset's next version. Raises InvalidInput.

    The last three parameters are for an address `s3://bucket/key`. `endpoint` is the origin of the bucket's server. The
    other two name the secrets with the credentials, and are empty for a public bucket.
    """
    url = url.strip()
    source = bucket_import.BucketSource(endpoint.strip(), access_key_id_secret, secret_access_key_secret)
    if url.startswith(bucket_import.SCHEME):
        source = bucket_import.check_source(dataset.organization, url, source)
    else:
        source = bucket_import.BucketSource("", "", "")  # an https address needs neither endpoint nor secrets
        _check_url(url)
    with transaction.atomic():
        # Concurrent calls wait here, so they cannot exceed MAX_OPEN together.
        Organization.objects.select_for_update(no_key=True).get(pk=dataset.organization_id)
        if open_imports().filter(dataset__organization=dataset.organization_id).count() >= MAX_OPEN:
            message = _("Your organization has %(count)d imports in progress. Wait for one to end.")
            raise InvalidInput(message % {"count": MAX_OPEN})
        row = DatasetImport.objects.create(dataset=dataset, url=url, created_by=user, **source._asdict())
        record_audit_event(
            organization=dataset.organization, actor=user, action="dataset.import_started", target=dataset.name
        )
        send_on_commit(import_dataset, row.pk)
    return row


def _check_url(url: str) -> None:
    """Raise InvalidInput unless `url` is an allowed https address."""
    if not is_offered():
        raise InvalidInput(fields={"url": _("Imports are turned off here. Upload the files instead.")})
    try:
        check_address(url)
    except ValueError:
        raise InvalidInput(fields={"url": _("Enter an address that begins with https://.")}) from None
    except ImportFailed as error:
        raise InvalidInput(fields={"url": _(str(error))}) from None


def is_offered() -> bool:
    """Return whether the operator allows imports over HTTPS from at least one host."""
    return bool(settings.DATASET_IMPORT_HOSTS)


def open_imports() -> QuerySet[DatasetImport]:
    """Return the imports that have not ended."""
    return DatasetImport.objects.filter(ended_at=None)


def stale_imports() -> list[int]:
    """Return the ids of the open imports on which no process seems to work, so that a task can continue them."""
    return list(open_imports().filter(updated_at__lt=timezone.now() - STALE_AFTER).values_list("pk", flat=True))


def shown_imports(dataset: Dataset) -> list[DatasetImport]:
    """Return up to 20 imports for the dataset's page, newest first: open, or failed in the last day."""
    yesterday = timezone.now() - timedelta(days=1)
    # An ended import without a version has failed, with an error, or its version was removed later.
    is_shown = Q(ended_at=None) | (Q(ended_at__gt=yesterday) & ~Q(error=""))
    return list(dataset.imports.filter(is_shown, version=None).order_by("-pk")[:20])


@shared_task
def import_dataset(pk: int) -> None:
    """Run an import, or continue it; then send the task of the import that has waited longest."""
    row = DatasetImport.objects.select_related("dataset__organization", "created_by").filter(pk=pk).first()
    if row is None or not run_import(row):
        return
    next_id = open_imports().order_by("updated_at").values_list("pk", flat=True).first()
    if next_id:
        send(import_dataset, next_id)


def run_import(row: DatasetImport) -> bool:
    """Run an import, or continue it, unless it has ended. Return False if another process is importing."""
    with import_lock(LOCK_FILE) as is_locked:
        if not is_locked:
            return False
        row.refresh_from_db()
        row.started_at = timezone.now()
        if row.ended_at is None:
            with _open(_path_of(row)) as file:
                _import_and_store_result(row, file)
            _path_of(row).unlink(missing_ok=True)
            _listing_of(row).unlink(missing_ok=True)
    return True


def _import_and_store_result(row: DatasetImport, file: BufferedRandom) -> None:
    """Run the import with its file, and store its version or error."""
    language = row.created_by.language if row.created_by else ""
    try:
        # A sentence that contains a value is translated when it is raised: into the language of the user who started
        # the import. All others are stored in English, and translated for the reader.
        with translation.override(language or settings.LANGUAGE_CODE):
            # `row.version` is set if an earlier process died after it had published the version.
            version = row.version or _import(row, file)
    except CustomerError as error:
        _end(row, error=str(error.message))
    except ImportFailed as error:
        _end(row, error=str(error))
    except Exception:
        log.exception("The import %s failed", row.pk)
        _end(row, error=FAILED)
    else:
        _end(row, version=version)


def folder() -> Path:
    """Return the folder of the files of open imports."""
    path = selectors.root() / "imports"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def needed_file_names() -> set[str]:
    """Return the names of the files in `folder()` that garbage collection must keep."""
    names = [_name_of(pk) for pk in open_imports().values_list("pk", flat=True)]
    return {LOCK_FILE, GIT_LOCK_FILE, *names, *(name + LISTING_SUFFIX for name in names)}


# --- Transfer ---------------------------------------------------------------------------------------------------------


def check_address(url: str) -> Address:
    """Return the parts of an https address. Raises ValueError for any other text, ImportFailed for a forbidden host."""
    if len(url) > MAX_URL_LENGTH:
        raise ValueError(url)
    parts = urlsplit(url)
    port = parts.port or 443
    if parts.scheme != "https" or not parts.hostname or parts.username is not None or parts.password is not None:
        raise ValueError(url)
    if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        raise ValueError(url)
    host = parts.hostname.rstrip(".").lower()
    if not _is_allowed(host, port):
        raise ImportFailed(NOT_ALLOWED)
    return Address(host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def _is_allowed(host: str, port: int) -> bool:
    """Return whether DATASET_IMPORT_HOSTS has the host: as `name`, `name:port`, or below a `*.domain`."""
    for entry in settings.DATASET_IMPORT_HOSTS:
        name, _separator, allowed_port = entry.lower().partition(":")
        if int(allowed_port or 443) != port:
            continue
        if host == name or (name.startswith("*.") and host.endswith(name[1:])):
            return True
    return False


@contextmanager
def _open_response(row: DatasetImport, offset: int) -> Iterator[http.client.HTTPResponse]:
    """Request the file from `offset` on, and yield the response. Raises ImportFailed, OSError, HTTPException."""
    url = row.url
    for _redirect in range(MAX_REDIRECTS + 1):
        try:
            address = check_address(url)
        except ValueError:
            raise ImportFailed(NOT_ALLOWED) from None
        try:
            connection = connections.connection_to(f"https://{address.host}:{address.port}")
        except connections.ForbiddenAddress:
            raise ImportFailed(NOT_ALLOWED) from None
        try:
            headers = {"Accept-Encoding": "identity", "User-Agent": "Trainyard"}
            if offset:
                headers |= {"Range": f"bytes={offset}-", "If-Range": row.validator}
            connection.request("GET", address.target, headers=headers)
            response = connection.getresponse()
            if response.status in {301, 302, 303, 307, 308} and (location := response.getheader("Location")):
                url = urljoin(url, location)
                continue
            yield response
            return
        finally:
            connection.close()
    raise ImportFailed(REFUSED)


def _import(row: DatasetImport, file: BufferedRandom) -> DatasetVersion:
    """Receive what `file` lacks, and publish it. Raises ImportFailed, CustomerError, OSError."""
    with (
        Reservation(row.dataset.organization, label=row.dataset.name, key=row.allocation_key) as reservation,
        translate_os_errors(),
    ):
        if row.endpoint:
            name = bucket_import.receive(row, file, _listing_of(row), reservation)
        else:
            name = posixpath.basename(unquote(urlsplit(row.url).path))
            # Bytes of an earlier process are kept only if the server can confirm that the file has not changed.
            offset = file.seek(0, os.SEEK_END) if row.validator else 0
            reservation.count(size_bytes=offset, entries=1)
            if not offset or offset != row.size_bytes:  # else an earlier process received all, and died after that
                _transfer(row, file, reservation, offset)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _publish(row, _file_name(name), file, digest, reservation)


def _transfer(row: DatasetImport, file: BufferedRandom, reservation: Reservation, offset: int) -> None:
    """Receive the bytes from `offset` on, in several attempts if the transfer breaks.

    The caller has reserved quota for the bytes before. Raises ImportFailed after MAX_FAILURES, TooLarge, OSError for a
    full disk.
    """
    failures, reserved_bytes = 0, offset
    while True:
        start = offset
        try:
            with _open_response(row, offset) as response:
                offset = _check_response(row, response, offset)
                file.seek(offset)
                file.truncate()
                start = offset
                announced_bytes = response.length
                # Not `read`, which waits for a whole chunk: with a slow server, `report` would not run for hours.
                while chunk := response.read1(CHUNK_BYTES):
                    offset += len(chunk)
                    # Up to `reserved_bytes`, an earlier attempt has reserved quota already.
                    if offset > reserved_bytes:
                        require_within_limit(offset)
                        reservation.count(size_bytes=offset - reserved_bytes)
                        reserved_bytes = offset
                    file.write(chunk)
                    report(row, offset)
                # If the connection ends early, `read1` raises an error only for a chunked body, which has no length.
                if announced_bytes is None or offset - start == announced_bytes:
                    file.flush()
                    return
        except ssl.SSLCertVerificationError:
            raise ImportFailed(UNREACHABLE) from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
                raise
            log.info("The import %s was interrupted: %s", row.pk, type(error).__name__)
        file.flush()
        # Without a validator the next attempt begins again, so the bytes of this attempt are no progress.
        failures = 0 if offset > start and row.validator else failures + 1
        if failures >= MAX_FAILURES:
            raise ImportFailed(UNREACHABLE)
        if not row.validator:
            offset = 0  # begin again, because the file may have changed
        time.sleep(2**failures)  # no event tells that the server is back


def _check_response(row: DatasetImport, response: http.client.HTTPResponse, offset: int) -> int:
    """Check status and headers of a response, and store the file's size and validator.

    Return the offset of the first byte in its body: `offset`, or 0 if the server sends the file from its start. Raises
    ImportFailed, TooLarge, HTTPException for an error that may be temporary.
    """
    if response.status == http.client.PARTIAL_CONTENT and offset:
        size = row.size_bytes or 0
        is_rest = response.getheader("Content-Range", "") == f"bytes {offset}-{size - 1}/{size}"
        if not is_rest or response.length != size - offset:
            raise ImportFailed(REFUSED)
        return offset
    if response.status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and offset:
        row.validator = ""  # the file has become shorter, so the next attempt begins again
        raise http.client.HTTPException
    if response.status == http.client.TOO_MANY_REQUESTS or response.status >= http.client.INTERNAL_SERVER_ERROR:
        raise http.client.HTTPException  # `_transfer` tries again
    # A body with neither a length nor chunks ends with the connection, so a broken transfer would look complete.
    if response.status != http.client.OK or (response.length is None and not response.chunked):
        raise ImportFailed(REFUSED)
    require_within_limit(response.length or 0)
    etag = response.getheader("ETag", "")
    row.size_bytes = response.length
    # A weak ETag (`W/"..."`) does not promise the same bytes. Without a size, `Content-Range` could not be checked.
    validator = etag if etag.startswith('"') else response.getheader("Last-Modified", "")
    row.validator = validator[:VALIDATOR_LENGTH] if row.size_bytes else ""
    row.save(update_fields=["validator", "size_bytes", "updated_at"])
    return 0


# --- Result -----------------------------------------------------------------------------------------------------------


def _publish(
    row: DatasetImport, name: str, file: BufferedRandom, sha256: str, reservation: Reservation
) -> DatasetVersion:
    """Publish what an archive contains, or the file itself if its name has none of ARCHIVE_SUFFIXES."""

    def store_version(version: DatasetVersion) -> None:
        DatasetImport.objects.filter(pk=row.pk).update(version=version)

    if not name.lower().endswith(ARCHIVE_SUFFIXES):
        return catalog.publish_file(
            dataset=row.dataset,
            user=row.created_by,
            file=file,
            name=name,
            sha256=sha256,
            reservation=reservation,
            on_published=store_version,
        )
    return catalog.publish_archive(
        dataset=row.dataset,
        user=row.created_by,
        archive=file,
        sha256=sha256,
        reservation=reservation,
        on_published=store_version,
    )


def _file_name(name: str) -> str:
    """Return the last component of the path `name`, or `data` if that is no valid file name."""
    try:
        return (split_path(name) or ("data",))[-1]
    except UnsafePath:
        return "data"


def _end(row: DatasetImport, *, version: DatasetVersion | None = None, error: str = "") -> None:
    """Store that an import has ended, with its version or error."""
    row.ended_at, row.error = timezone.now(), error[:500]  # the length of the column
    if version is not None:
        row.version = version
    row.save(update_fields=["ended_at", "error", "version", "updated_at"])


def _name_of(pk: int) -> str:
    return f"import-{pk}"


def _path_of(row: DatasetImport) -> Path:
    """Return the path of the file with the import's bytes."""
    return folder() / _name_of(row.pk)


def _listing_of(row: DatasetImport) -> Path:
    """Return the path of the file that lists the bucket's objects."""
    return folder() / (_name_of(row.pk) + LISTING_SUFFIX)


@contextmanager
def import_lock(file_name: str) -> Iterator[bool]:
    """Hold the lock of LOCK_FILE or GIT_LOCK_FILE; yield False if another process holds it."""
    with _open(folder() / file_name) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_locked = False
        else:
            is_locked = True
        yield is_locked


def _open(path: Path) -> BufferedRandom:
    """Open a file for reading and writing; create it if it is missing."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")

"""Import a dataset version from an HTTPS address, or from a bucket (`bucket_import`).

The server fetches an address that a customer chooses, so it must not reach internal services: only https, only hosts of
`DATASET_IMPORT_HOSTS`, and only public IP addresses (`connections`). Each redirect is checked like the first address.
Customers see only the size and the success of a transfer.

A broken transfer continues where it ended, as long as the server confirms by its ETag or date that the file is the
same. The task may be repeated and run twice: a file lock lets one process import at a time, and others wait.
"""

from __future__ import annotations

import errno
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
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from console.accounts.models import Organization, User
from console.accounts.services import record
from console.core import connections
from console.core.enqueue import send, send_on_commit
from console.core.errors import CustomerError, InvalidInput
from storage import bucket_import, catalog, selectors
from storage.errors import UnsafePath
from storage.files import CHUNK_BYTES
from storage.import_progress import (
    FAILED,
    MAX_DELAY_SECONDS,
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
"""Imports of one organization that wait or are carried out."""
MAX_URL_LENGTH = 2000
"""Characters of an address: the length of its column."""
MAX_REDIRECTS = 5
SLOT, GIT_SLOT = "slot", "git-slot"
"""Names of lock files. One import of each kind is carried out at a time, so a worker keeps processes for others."""
STALE_AFTER = timedelta(minutes=3)
"""An open import without an update for this long has lost its process; longer than `connections.TIMEOUT_SECONDS`."""
LISTING = ".list"
"""Ends the name of the list of a bucket's objects, beside the file of an import."""
ARCHIVE_NAMES = (".tar", ".tar.gz", ".tgz", ".zip")
_DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """A checked address. `target` is its path and query."""

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

    For `s3://bucket/key`, `endpoint` is the bucket's server, and the others name secrets; they may be empty.
    """
    url = url.strip()
    source = bucket_import.Source(endpoint.strip(), access_key_id_secret, secret_access_key_secret)
    if url.startswith(bucket_import.SCHEME):
        source = bucket_import.check_source(dataset.organization, url, source)
    else:
        source = bucket_import.Source("", "", "")
        _check_url(url)
    with transaction.atomic():
        Organization.objects.select_for_update().get(pk=dataset.organization_id)
        if open_imports().filter(dataset__organization=dataset.organization_id).count() >= MAX_OPEN:
            raise InvalidInput(_("Your organization has 3 imports in progress. Wait for one to end."))
        row = DatasetImport.objects.create(dataset=dataset, url=url, created_by=user, **source._asdict())
        record(organization=dataset.organization, actor=user, action="dataset.import_started", target=dataset.name)
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
    """Return whether the operator allows imports over HTTPS from any host."""
    return bool(settings.DATASET_IMPORT_HOSTS)


def open_imports() -> QuerySet[DatasetImport]:
    """Return the imports that have not ended."""
    return DatasetImport.objects.filter(ended_at=None)


def stale_imports() -> list[int]:
    """Return the primary keys of the open imports that no process works on."""
    return list(open_imports().filter(updated_at__lt=timezone.now() - STALE_AFTER).values_list("pk", flat=True))


def shown_imports(dataset: Dataset) -> list[DatasetImport]:
    """Return the open imports and the failed ones of the last day, newest first."""
    recent = timezone.now() - timedelta(days=1)
    rows = dataset.imports.filter(version=None).order_by("-pk")
    return [row for row in rows[:20] if row.ended_at is None or row.ended_at > recent]


@shared_task
def import_dataset(pk: int) -> None:
    """Carry out an import, or continue it."""
    row = DatasetImport.objects.select_related("dataset__organization", "created_by").filter(pk=pk).first()
    if row and run(row) and (waiting := open_imports().order_by("updated_at").values_list("pk", flat=True).first()):
        send(import_dataset, waiting)


def run(row: DatasetImport) -> bool:
    """Carry out an import, or continue it, unless it has ended. Return False if another import is being carried out."""
    with slot(SLOT) as is_free:
        if not is_free:
            return False
        row.refresh_from_db()
        if row.ended_at is None:
            with _opened(_path_of(row)) as file:
                _carry_out(row, file)
            _path_of(row).unlink(missing_ok=True)
            _listing_of(row).unlink(missing_ok=True)
    return True


def _carry_out(row: DatasetImport, file: BufferedRandom) -> None:
    """Run the import and store its result."""
    try:
        version = row.version or _import(row, file)  # `version` is set if a process died after it published
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
    """Return the folder of unfinished transfers."""
    path = selectors.root() / "imports"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def open_names() -> set[str]:
    """Return the file names of the open imports."""
    names = [_name_of(pk) for pk in open_imports().values_list("pk", flat=True)]
    return {SLOT, GIT_SLOT, *names, *(name + LISTING for name in names)}


# --- Transfer ---------------------------------------------------------------------------------------------------------


def check_address(url: str) -> Address:
    """Return the parts of an allowed address. Raises ValueError if it is none, ImportFailed if it is not allowed."""
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
    """Return whether the operator allows a host: as `name`, `name:port`, or `*.domain` for all names below it."""
    for entry in settings.DATASET_IMPORT_HOSTS:
        name, _separator, allowed_port = entry.lower().partition(":")
        if int(allowed_port or 443) != port:
            continue
        if host == name or (name.startswith("*.") and host.endswith(name[1:])):
            return True
    return False


@contextmanager
def _response(row: DatasetImport, offset: int) -> Iterator[http.client.HTTPResponse]:
    """Open the file from `offset` on; follow redirects. Raises ImportFailed, OSError, HTTPException."""
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
    with Reservation(row.dataset.organization, label=row.dataset.name) as reservation, translate_os_errors():
        if row.endpoint:
            name = bucket_import.receive(row, file, _listing_of(row), reservation)
        else:
            name = posixpath.basename(unquote(urlsplit(row.url).path))
            offset = file.seek(0, os.SEEK_END) if row.validator else 0
            reservation.count(size_bytes=offset, entries=1)
            _transfer(row, file, reservation, offset)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _publish(row, _file_name(name), file, digest, reservation)


def _transfer(row: DatasetImport, file: BufferedRandom, reservation: Reservation, offset: int) -> None:
    """Receive the rest of the file, in several attempts. The first `offset` bytes are received and counted."""
    failures, counted = 0, offset
    while True:
        before = offset
        try:
            with _response(row, offset) as response:
                offset = _check_response(row, response, offset)
                file.seek(offset)
                file.truncate()
                before = offset
                remaining = response.length
                # `read` would wait for a whole chunk, which a slow server could delay for hours.
                while chunk := response.read1(CHUNK_BYTES):
                    offset += len(chunk)
                    if offset > counted:
                        require_within_limit(offset)
                        reservation.count(size_bytes=offset - counted)
                        counted = offset
                    file.write(chunk)
                    report(row, offset)
                # http.client ends a read early without an error if the connection ends before Content-Length.
                if remaining is None or offset - before == remaining:
                    file.flush()
                    return
        except ssl.SSLCertVerificationError:
            raise ImportFailed(UNREACHABLE) from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS:
                raise
            log.info("The import %s was interrupted: %s", row.pk, type(error).__name__)
        file.flush()
        failures = 0 if offset > before else failures + 1
        if failures >= MAX_FAILURES:
            raise ImportFailed(UNREACHABLE)
        if not row.validator:
            offset = 0  # without a validator, the rest may belong to a changed file
        time.sleep(min(2**failures, MAX_DELAY_SECONDS))  # no event signals that the server is back


def _check_response(row: DatasetImport, response: http.client.HTTPResponse, offset: int) -> int:
    """Check the head of a response, and return the offset of its first byte. Raises ImportFailed, TooLarge."""
    if response.status == http.client.PARTIAL_CONTENT and offset:
        size = row.size_bytes or 0
        is_rest = response.getheader("Content-Range", "") == f"bytes {offset}-{size - 1}/{size}"
        if not is_rest or response.length != size - offset:
            raise ImportFailed(REFUSED)
        return offset
    if response.status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and offset:
        row.validator = ""  # the file became shorter: start again
        raise http.client.HTTPException
    if response.status >= http.client.INTERNAL_SERVER_ERROR:
        raise http.client.HTTPException
    # Without a length, a transfer that was cut off looks complete.
    if response.status != http.client.OK or (response.length is None and not response.chunked):
        raise ImportFailed(REFUSED)
    require_within_limit(response.length or 0)
    etag = response.getheader("ETag", "")
    row.size_bytes = response.length
    # A weak ETag does not promise the same bytes. Without a size, the rest of a file cannot be checked.
    validator = etag if etag.startswith('"') else response.getheader("Last-Modified", "")
    row.validator = validator[:200] if row.size_bytes else ""
    row.save(update_fields=["validator", "size_bytes", "updated_at"])
    return 0


# --- Result -----------------------------------------------------------------------------------------------------------


def _publish(
    row: DatasetImport, name: str, file: BufferedRandom, sha256: str, reservation: Reservation
) -> DatasetVersion:
    """Publish the content of an archive, recognized by its name, or else the file itself."""

    def store_version(version: DatasetVersion) -> None:
        DatasetImport.objects.filter(pk=row.pk).update(version=version)

    if not name.lower().endswith(ARCHIVE_NAMES):
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
    """Return the last component of a name, or `data` if it is no valid file name."""
    try:
        return (split_path(name) or ("data",))[-1]
    except UnsafePath:
        return "data"


def _end(row: DatasetImport, *, version: DatasetVersion | None = None, error: str = "") -> None:
    row.ended_at, row.error = timezone.now(), error[:500]
    if version is not None:
        row.version = version
    row.save(update_fields=["ended_at", "error", "version", "updated_at"])


def _name_of(pk: int) -> str:
    return f"import-{pk}"


def _path_of(row: DatasetImport) -> Path:
    return folder() / _name_of(row.pk)


def _listing_of(row: DatasetImport) -> Path:
    return folder() / (_name_of(row.pk) + LISTING)


@contextmanager
def slot(name: str) -> Iterator[bool]:
    """Hold the lock of the one import of its kind that is carried out. Yield False if another process has it."""
    with _opened(folder() / name) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        else:
            is_free = True
        yield is_free


def _opened(path: Path) -> BufferedRandom:
    """Open a file for reading and writing; create it if it is missing."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")

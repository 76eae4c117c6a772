"""Resumable uploads: create, append, join, finish, terminate, expire.

An upload's bytes are written once, to a file of its own, and its offset is the length of that file. So the offset is
true after a crash of any process. A crash of the machine can only make the file shorter, because file systems write
data before the length that covers it; the file is forced to the disk before it is used.

Any process may serve any request. A request that appends holds the upload's advisory lock until it has written all
that arrived, and a client that asks for the offset waits for that: what the server received is not sent again. A lost
connection blocks nobody. When another request waits, the one that receives nothing more ends. Each chunk is written
under a lock of the file, where the file ends. So bytes never mix, even if a database session was lost with its locks.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import uuid
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import BinaryIO

from django.conf import settings
from django.db import OperationalError, connection, transaction
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from psycopg.errors import LockNotAvailable

from console.accounts.models import Organization, User
from console.core.errors import CustomerError, InvalidInput, NotAllowed, NotFound, Text
from storage import catalog, files, quota, selectors
from storage.errors import (
    ChecksumMismatch,
    OffsetConflict,
    StorageFull,
    TooLarge,
    TooManyUploads,
    UploadBroken,
    UploadEnded,
)
from storage.files import CHUNK_BYTES, Metered, Readable
from storage.models import Allocation, Upload
from storage.paths import split_path, translate_os_errors
from storage.quota import Reservation
from storage.trees import ENTRY_BYTES

KEPT_AFTER_LAST_BYTES = timedelta(days=3)
"""How long an unfinished upload waits to be continued: a weekend. Its reserved quota is released then."""
KEPT_AFTER_END = timedelta(days=1)
"""How long the result of an upload can be read."""
MAX_OPEN = 1000
"""Unfinished uploads of an organization; clients send a few at a time."""
CHECKSUMS = {"sha1": hashlib.sha1, "sha256": hashlib.sha256}
"""The algorithms of checksums of single requests. SHA-1 is required by the protocol, and detects line errors."""
SETTLE_SECONDS = 8.0
"""How long a request waits for an earlier one that still receives or writes bytes; clients wait at least 10 s."""
QUIET_SECONDS = 0.5
"""A request that received nothing for this long ends if another one waits: its client lost the connection."""
APPEND_LOCK = 7_416
"""First key of the advisory lock for appending; the second is made of the upload's primary key. As FINISH_LOCK."""
MAX_KEPT_DIGESTS = 256
"""Hash states of unfinished uploads that a process keeps in memory. A missing state costs reading the file again."""
FINISH_LOCK = 7_415
"""First key of the advisory lock for finishing; the second is a hash of the upload's key. Arbitrary, but the same in
every version, so that the old and the new version exclude each other during an upgrade."""
FETCH_SLOT = "fetch-slot"
"""Name of the lock file of the process that fetches direct uploads (`direct_uploads`)."""
OPEN_STATES = (Upload.States.RECEIVING, Upload.States.FINISHING)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NewUpload:
    """The values of a new upload, as the client sent them."""

    size_bytes: int
    purpose: str = ""
    name: str = ""
    path: str = ""
    filename: str = ""
    is_unpacked: bool = False
    metadata: str = ""


@dataclass(frozen=True)
class Checksum:
    """The checksum that a client sent with the bytes of one request."""

    algorithm: str
    digest: bytes

    @classmethod
    def parse(cls, header: str) -> Checksum:
        """Parse an `Upload-Checksum` header: an algorithm and a digest in Base64. Raises InvalidInput."""
        algorithm, _space, encoded = header.strip().partition(" ")
        if algorithm not in CHECKSUMS:
            raise InvalidInput(fields={"Upload-Checksum": _("Use sha1 or sha256.")})
        try:
            return cls(algorithm, b64decode(encoded, validate=True))
        except ValueError:
            raise InvalidInput(fields={"Upload-Checksum": _("Send the digest in Base64.")}) from None


# --- Create and read --------------------------------------------------------------------------------------------------


def create(*, organization: Organization, user: User | None, new: NewUpload) -> Upload:
    """Create an upload and reserve quota for its size. Raises InvalidInput, NotFound, TooLarge, TooManyUploads."""
    _validate(organization, new)
    with transaction.atomic():
        left = quota.lock_room(organization)
        if Upload.objects.filter(organization=organization, state__in=OPEN_STATES).count() >= MAX_OPEN:
            raise TooManyUploads
        if new.size_bytes + ENTRY_BYTES > left.size_bytes or not left.entry_count:
            raise TooLarge
        upload = _insert(organization, user, new)
    _file(upload).touch(mode=0o600)
    return upload


def create_final(
    *, organization: Organization, user: User | None, new: NewUpload, part_keys: Sequence[uuid.UUID]
) -> Upload:
    """Join complete parts into a final upload; `new.size_bytes` is ignored. Safe to repeat: it continues the same join.

    The parts cannot be used again. Raises InvalidInput, NotFound, TooLarge.
    """
    parts_invalid = InvalidInput(fields={"Upload-Concat": _("Name complete parts, each once.")})
    rows = Upload.objects.filter(organization=organization, purpose=Upload.Purposes.PART, key__in=part_keys)
    with transaction.atomic():
        quota.lock(organization)
        by_key = {part.key: part for part in rows.select_for_update()}
        parts = [by_key[key] for key in part_keys if key in by_key]
        if not parts or len(parts) != len(part_keys) or len(by_key) != len(part_keys):
            raise parts_invalid
        final = parts[0].final
        if any(part.final_id != parts[0].final_id or offset_of(part) != part.size_bytes for part in parts):
            raise parts_invalid
        if final is not None:
            if [part.position for part in parts] != list(range(final.parts.count())):
                raise parts_invalid
            return final
        new = replace(new, size_bytes=sum(part.size_bytes for part in parts))
        _validate(organization, new)
        final = _insert(organization, user, new)
        for position, part in enumerate(parts):
            rows.filter(pk=part.pk).update(final=final, position=position, state=Upload.States.COMPLETE)
        Allocation.objects.filter(key__in=[part.allocation_key for part in parts]).delete()
    return final


def upload_with_key(organization: Organization, key: uuid.UUID) -> Upload:
    """Return an upload. Raises NotFound."""
    upload = Upload.objects.filter(organization=organization, key=key).select_related("organization").first()
    if upload is None:
        raise NotFound
    return upload


def offset_of(upload: Upload) -> int:
    """Return how many bytes have arrived."""
    if upload.state == Upload.States.COMPLETE:
        return upload.size_bytes
    try:
        return _file(upload).stat().st_size
    except FileNotFoundError:
        # While it is finished, the file may already be in its place.
        return upload.size_bytes if upload.state == Upload.States.FINISHING else 0


_waiting = BoundedSemaphore(max(1, settings.WEB_THREADS // 2))
"""The requests for an offset that may wait in this process. They wait on the threads of pages."""


def settled_offset_of(upload: Upload) -> int:
    """Return how many bytes have arrived, once an earlier request has written them; wait at most SETTLE_SECONDS.

    A client that lost its connection asks at once for the offset, while what it sent before is still being written.
    If it continued too early, it would send those bytes again. Few requests may wait at once, to leave threads for
    pages; the others get the current offset. Raises UploadEnded if the upload failed, or if its
    file is missing, as after the restore of a backup.
    """
    if upload.state == Upload.States.RECEIVING and not _file(upload).exists() and not upload.parts.exists():
        raise UploadEnded
    if offset_of(upload) < upload.size_bytes and _waiting.acquire(blocking=False):
        try:
            with _append_lock(upload):
                pass
        finally:
            _waiting.release()
    offset = offset_of(upload)
    # The earlier request may have finished the upload. Its file is only moved after its state has changed.
    _refresh(upload)
    return offset if upload.state == Upload.States.RECEIVING else offset_of(upload)


def _refresh(upload: Upload) -> None:
    """Read the state again. Raises NotFound if the upload was terminated, UploadEnded if it failed."""
    try:
        upload.refresh_from_db(fields=["state", "error"])
    except Upload.DoesNotExist:
        raise NotFound from None
    if upload.state == Upload.States.FAILED:
        raise UploadEnded(upload.error)


# --- Append -----------------------------------------------------------------------------------------------------------


def append(*, upload: Upload, offset: int, stream: Readable, checksum: Checksum | None = None) -> int:
    """Append the bytes in `stream` at `offset`, and return the new offset. Raises OffsetConflict, StorageFull.

    What arrived before a connection broke is kept; then it raises UploadBroken. The bytes of a request with a checksum
    are kept only if all of them arrived and match: else it raises UploadBroken or ChecksumMismatch. Raises TooLarge at
    a byte after the upload's size, and UploadEnded if the upload was terminated.
    """
    if upload.parts.exists():
        raise NotAllowed(_("A final upload takes no bytes. Send them to its parts."))
    if upload.multipart_id:
        raise NotAllowed(_("A direct upload takes no bytes here. Send them to the URLs of its parts."))
    with _append_lock(upload) as is_ours:
        _refresh(upload)
        if not is_ours or offset != offset_of(upload):
            raise OffsetConflict
        if upload.state != Upload.States.RECEIVING:
            return offset
        stream = _Body(upload, stream)
        try:
            if checksum is None:
                return append_unchecked(upload, offset, stream)
            with _verified(upload, stream, checksum, upload.size_bytes - offset) as verified:
                return append_unchecked(upload, offset, verified)
        except UploadBroken:
            raise UploadBroken(_("The upload was interrupted. Continue it at its offset.")) from None
        finally:
            expires_at = timezone.now() + KEPT_AFTER_LAST_BYTES
            Upload.objects.filter(pk=upload.pk, state__in=OPEN_STATES).update(expires_at=expires_at)


class _Body:
    """The body of a request that appends. It ends early if it brings nothing while another request waits."""

    def __init__(self, upload: Upload, stream: Readable) -> None:
        self._upload, self._stream = upload, stream

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end. Raises UploadBroken."""
        while True:
            try:
                return self._stream.read(size)
            except TimeoutError:
                if _is_awaited(self._upload):
                    raise UploadBroken from None


def _append_keys(upload: Upload) -> list[int]:
    return [APPEND_LOCK, upload.pk % 2**31]  # PostgreSQL's keys are signed numbers of 32 bits


@contextmanager
def _append_lock(upload: Upload) -> Iterator[bool]:
    """Yield whether the caller got the lock within SETTLE_SECONDS. PostgreSQL releases the lock of a process that dies.

    It belongs to the session, because a transaction should not be open while a client sends.
    """
    keys = _append_keys(upload)
    is_ours = True
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{SETTLE_SECONDS * 1000:.0f}"])
            cursor.execute("SELECT pg_advisory_lock(%s, %s)", keys)
    except OperationalError as error:
        if not isinstance(error.__cause__, LockNotAvailable):
            raise
        is_ours = False
    try:
        yield is_ours
    finally:
        if is_ours:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s, %s)", keys)


def _is_awaited(upload: Upload) -> bool:
    """Return whether another request waits for the lock for appending."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objsubid = 2"
            " AND classid = %s AND objid = %s"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))",
            _append_keys(upload),
        )
        return bool(cursor.fetchone()[0])


def append_unchecked(upload: Upload, offset: int, stream: Readable) -> int:
    """Append the bytes in `stream` at `offset`, without looking at the upload's state. Raises as `append`."""
    with (
        translate_os_errors(),
        _opened(upload) as handle,
        _digest_of(upload, offset) as digest,
        ThreadPoolExecutor(1, thread_name_prefix="hash") as hasher,
    ):
        hashed: Future[None] | None = None
        # A read of one byte at the end shows whether more arrives than was announced.
        while chunk := stream.read(min(CHUNK_BYTES, upload.size_bytes - offset) or 1):
            if offset == upload.size_bytes:
                raise TooLarge(_("More bytes arrived than the upload's size."))
            if hashed:
                hashed.result()
            _write(handle, chunk, offset)
            offset += len(chunk)
            if digest:
                # Hashing overlaps with writing, because both run without Python's lock.
                hashed = hasher.submit(digest.update, chunk)
    return offset


def _write(handle: int, chunk: bytes, offset: int) -> None:
    """Write a chunk at the end of the file. Raises OffsetConflict if the file does not end at `offset`."""
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        status = os.fstat(handle)
        if not status.st_nlink:  # the upload was terminated
            raise UploadEnded
        if status.st_size != offset:
            raise OffsetConflict
        rest = memoryview(chunk)
        while rest:
            rest = rest[os.pwrite(handle, rest, offset + len(chunk) - len(rest)) :]
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def _verified(upload: Upload, stream: Readable, checksum: Checksum, limit_bytes: int) -> Iterator[BinaryIO]:
    """Yield the bytes in `stream` as a temporary file, once they match. Raises ChecksumMismatch, TooLarge."""
    digest = CHECKSUMS[checksum.algorithm]()
    with (
        Reservation(upload.organization, label=str(upload)) as reservation,
        catalog.scratch_folder() as folder,
        translate_os_errors(),
        (folder / "bytes").open("xb+") as file,
    ):
        metered = Metered(stream, reservation)
        files.copy(stream=metered, target=file, limit_bytes=limit_bytes, digest=digest)
        if digest.digest() != checksum.digest:
            raise ChecksumMismatch
        file.seek(0)
        yield file


# --- Hash -------------------------------------------------------------------------------------------------------------


class _Digest:
    """The SHA-256 of the first `size` bytes of an upload."""

    def __init__(self) -> None:
        self.size = 0
        self.sha256 = hashlib.sha256()

    def update(self, data: bytes) -> None:
        """Add more bytes."""
        self.sha256.update(data)
        self.size += len(data)


_digests: OrderedDict[int, _Digest] = OrderedDict()
"""The digests of unfinished uploads by primary key, the least recently used first. A hash state cannot be stored."""
_digests_lock = Lock()


@contextmanager
def _digest_of(upload: Upload, offset: int) -> Iterator[_Digest | None]:
    """Yield the digest of the first `offset` bytes if this process has it.

    A process without it hashes nothing. The process that finishes the upload hashes the rest, each byte at most once.
    """
    digest = _take_digest(upload)
    try:
        yield digest if digest.size == offset and upload.purpose != Upload.Purposes.PART else None
    finally:
        with _digests_lock:
            _digests[upload.pk] = digest
            if len(_digests) > MAX_KEPT_DIGESTS:
                _digests.popitem(last=False)


def _take_digest(upload: Upload) -> _Digest:
    with _digests_lock:
        return _digests.pop(upload.pk, None) or _Digest()


def _hash(upload: Upload, file: BinaryIO) -> str:
    """Return the SHA-256 of the complete file; read only what this process has not hashed yet."""
    digest = _take_digest(upload)
    file.seek(digest.size)
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.sha256.hexdigest()


# --- Finish -----------------------------------------------------------------------------------------------------------


def finish(upload: Upload) -> None:
    """Use a complete upload as its purpose says; do nothing if bytes are missing. Safe to repeat and to run twice.

    A dataset version is published from the upload's file, and a workspace file is the upload's file, moved. An error
    that the customer can act on ends the upload and is raised. It can be read for KEPT_AFTER_END.
    """
    with _finish_lock(upload) as is_ours:
        upload.refresh_from_db(fields=["state"])
        if not is_ours or upload.state not in OPEN_STATES or upload.purpose == Upload.Purposes.PART:
            return
        _join_parts(upload)
        if offset_of(upload) != upload.size_bytes:
            return
        try:
            _use(upload)
        except StorageFull:
            raise  # not the customer's fault: it is tried again
        except CustomerError as error:
            fail(upload, error)
            raise
        finally:
            with suppress(Upload.DoesNotExist):  # terminated meanwhile
                upload.refresh_from_db()
                if upload.state not in OPEN_STATES:
                    _file(upload).unlink(missing_ok=True)


@contextmanager
def _finish_lock(upload: Upload) -> Iterator[bool]:
    """Yield whether the caller got the upload's lock. PostgreSQL releases the lock of a process that dies."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s, hashtext(%s))", [FINISH_LOCK, upload.key.hex])
        is_ours = bool(cursor.fetchone()[0])
    try:
        yield is_ours
    finally:
        if is_ours:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s, hashtext(%s))", [FINISH_LOCK, upload.key.hex])


def _use(upload: Upload) -> None:
    try:
        file = _file(upload).open("rb")
    except FileNotFoundError:
        # An interrupted call moved the file into the workspace.
        catalog.measure_workspace(workspace=selectors.workspace_named(upload.organization, upload.name))
        with transaction.atomic():
            _end(upload, state=Upload.States.COMPLETE)
        return
    with file:
        sha256 = _hash(upload, file)
        os.fsync(file.fileno())
        rows = Upload.objects.filter(pk=upload.pk, state__in=OPEN_STATES)
        if not rows.update(state=Upload.States.FINISHING, sha256=sha256):
            raise NotFound  # terminated
        file.seek(0)
        if upload.purpose == Upload.Purposes.DATASET:
            _publish(upload, file, sha256)
        else:
            _store(upload, file)


def _publish(upload: Upload, file: BinaryIO, sha256: str) -> None:
    dataset = selectors.dataset_named(upload.organization, upload.name)
    with Reservation(upload.organization, label=dataset.name) as reservation:
        catalog.publish_archive(
            dataset=dataset,
            user=upload.created_by,
            archive=file,
            sha256=sha256,
            reservation=reservation,
            on_published=lambda version: _end(upload, state=Upload.States.COMPLETE, version=version),
        )


def _store(upload: Upload, file: BinaryIO) -> None:
    workspace = selectors.workspace_named(upload.organization, upload.name)

    def on_stored() -> None:
        _end(upload, state=Upload.States.COMPLETE)

    if upload.is_unpacked:
        catalog.unpack_into_workspace(workspace=workspace, path=upload.path, archive=file, on_unpacked=on_stored)
    else:
        catalog.place_file(workspace=workspace, path=upload.path, source=_file(upload), on_placed=on_stored)


def fail(upload: Upload, error: CustomerError) -> None:
    """End an upload with an error, unless it was terminated."""
    with suppress(NotFound), transaction.atomic():
        _end(upload, state=Upload.States.FAILED, error_code=error.code, error=str(error.message))


def _end(upload: Upload, **values: object) -> None:
    """Write the result and release the quota, in the caller's transaction. Raises NotFound if it was terminated."""
    rows = Upload.objects.filter(pk=upload.pk, state__in=OPEN_STATES)
    if not rows.update(**values, expires_at=timezone.now() + KEPT_AFTER_END):
        raise NotFound
    Allocation.objects.filter(key=upload.allocation_key).delete()


def _join_parts(upload: Upload) -> None:
    """Move the bytes of a final upload's parts into its file. The file's length says how far an earlier call came."""
    parts = list(Upload.objects.filter(final=upload).order_by("position"))
    if not parts or offset_of(upload) == upload.size_bytes:
        return
    if not _file(upload).exists():
        _file(parts[0]).rename(_file(upload))  # not copied
    end = 0
    with translate_os_errors(), _opened(upload) as handle:
        for part in parts:
            end += part.size_bytes
            _append_file(_file(part), handle, end)
    for part in parts:
        _file(part).unlink(missing_ok=True)


def _append_file(source: Path, target: int, end: int) -> None:
    """Append the rest of `source` to the open file `target`, which ends at `end` then. The kernel copies the bytes."""
    missing = end - os.fstat(target).st_size
    if missing <= 0:
        return
    with source.open("rb") as file:
        offset = os.fstat(file.fileno()).st_size - missing
        os.lseek(target, 0, os.SEEK_END)
        while sent := os.sendfile(target, file.fileno(), offset, CHUNK_BYTES):
            offset += sent


# --- End --------------------------------------------------------------------------------------------------------------


def terminate(upload: Upload) -> None:
    """Delete an upload with its bytes and release its quota. What it stored stays. Raises UploadEnded for a used part.

    If it is just being finished, that fails at its end.
    """
    if upload.final_id:
        raise UploadEnded
    with transaction.atomic():
        quota.lock(upload.organization)
        parts = list(Upload.objects.filter(final=upload))
        for row in (*parts, upload):
            Upload.objects.filter(pk=row.pk).delete()
            Allocation.objects.filter(key=row.allocation_key).delete()
    for row in (*parts, upload):
        _file(row).unlink(missing_ok=True)
        _take_digest(row)


def collect() -> None:
    """Finish complete uploads whose process died, and remove those that expired. Safe to repeat."""
    for upload in Upload.objects.filter(state__in=OPEN_STATES).select_related("organization").iterator():
        if upload.expires_at < timezone.now():
            terminate(upload)
            continue
        try:
            finish(upload)
        except (CustomerError, OSError):
            log.exception("Upload %s can't be finished", upload.pk)
    Upload.objects.filter(expires_at__lt=timezone.now(), final=None).exclude(state__in=OPEN_STATES).delete()


def folder() -> Path:
    """Return the folder of the files of unfinished uploads."""
    path = selectors.root() / "uploads"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def open_names() -> set[str]:
    """Return the names of the files that unfinished uploads need."""
    needed = Upload.objects.filter(state__in=OPEN_STATES) | Upload.objects.filter(final__state__in=OPEN_STATES)
    return {FETCH_SLOT, *(key.hex for key in needed.values_list("key", flat=True))}


# --- Helpers ----------------------------------------------------------------------------------------------------------


def _validate(organization: Organization, new: NewUpload) -> None:
    """Raise InvalidInput, NotFound or TooLarge if the upload could not be used once it is complete."""
    limit = settings.MAX_UPLOAD_BYTES
    errors: dict[str, Text] = {}
    if new.purpose == Upload.Purposes.DATASET:
        selectors.dataset_named(organization, new.name)
    elif new.purpose == Upload.Purposes.WORKSPACE:
        selectors.workspace_named(organization, new.name)
        if not split_path(new.path) and not new.is_unpacked:
            errors["path"] = _("Enter the path of the file in the workspace.")
        if not new.is_unpacked:
            limit = settings.MAX_FILE_BYTES
    elif new.purpose != Upload.Purposes.PART:
        errors["purpose"] = _("Use dataset or workspace.")
    if errors:
        raise InvalidInput(fields=errors)
    if new.size_bytes > limit:
        raise TooLarge


def _insert(organization: Organization, user: User | None, new: NewUpload) -> Upload:
    """Write the rows of an upload and of its reservation."""
    upload = Upload.objects.create(
        organization=organization,
        created_by=user,
        purpose=new.purpose,
        name=new.name,
        path=new.path,
        filename=new.filename[:255],
        is_unpacked=new.is_unpacked,
        metadata=new.metadata,
        size_bytes=new.size_bytes,
        expires_at=timezone.now() + KEPT_AFTER_LAST_BYTES,
    )
    Allocation.objects.create(
        organization=organization,
        kind=Allocation.Kinds.UPLOAD,
        key=upload.allocation_key,
        label=str(upload)[:200],
        size_bytes=upload.size_bytes,
        entry_count=1,
    )
    return upload


def _file(upload: Upload) -> Path:
    return folder() / upload.key.hex


@contextmanager
def _opened(upload: Upload) -> Iterator[int]:
    """Open the upload's file for writing. Raises FileNotFoundError if the upload ended."""
    handle = os.open(_file(upload), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)

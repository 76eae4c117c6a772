"""Resumable uploads (https://tus.io): create, append, join, finish, terminate, expire.

Each upload has a file, to which its bytes are written once. The upload's offset, where the client continues, is the
length of this file. So the offset is correct after a crash of any process. A crash of the machine can only make the
file shorter, because file systems write data before the length that covers it. The file is forced to the disk (fsync)
before it is published or stored.

Any process may serve any request. A request that appends bytes holds an advisory lock of PostgreSQL until it has
written all that arrived. A request for the offset waits for this lock, so that the client does not send these bytes
again. If a client has lost its connection, its earlier request receives nothing more, and ends as soon as another
request waits for the lock. Each chunk is also written at the end of the file under a lock of the file. So bytes never
mix, even if a database session was lost with its advisory lock.
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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import BinaryIO

from django.conf import settings
from django.db import OperationalError, connection, transaction
from django.utils import timezone, translation
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
from storage.files import CHUNK_BYTES, CountedStream, Readable
from storage.models import NAME_VALIDATOR, Allocation, Upload
from storage.paths import split_path, translate_os_errors
from storage.quota import Reservation
from storage.trees import ENTRY_BYTES

KEPT_AFTER_LAST_BYTES = timedelta(days=3)
"""How long an unfinished upload can be continued after its last bytes arrived: over a weekend. Then it is deleted, and
its reserved quota is released."""
KEPT_AFTER_END = timedelta(days=1)
"""How long the result of an upload can be read."""
MAX_OPEN = 1000
"""How many unfinished uploads an organization may have. Clients send few at a time, so of 1,000 most are abandoned."""
CHECKSUMS = {"sha1": hashlib.sha1, "sha256": hashlib.sha256}
"""The algorithms by which a client may protect a single request against transmission errors. tus requires SHA-1."""
SETTLE_SECONDS = 8.0
"""How long a request waits for the lock while an earlier request receives or writes bytes. Less than 10 s, because
clients wait at least so long for a response."""
QUIET_SECONDS = 0.5
"""A request that receives nothing for this long ends if another request for the same upload waits for the lock. The
client has then lost the connection of the first request, and uses a new one."""
APPEND_LOCK = 7_416
"""The first key of the advisory lock for appending; the second is made of the upload's primary key. The number is
arbitrary, but must not change: during an upgrade, processes of the old and the new version must exclude each other."""
MAX_KEPT_DIGESTS = 256
"""How many hash states of unfinished uploads a process keeps in memory. If the state of an upload is dropped, its file
is read again when the upload is finished."""
FINISH_LOCK = 7_415
"""The first key of the advisory lock for finishing; the second is a hash of the upload's key. Arbitrary, but must not
change, like APPEND_LOCK. `jobs.locks.COPIES` has the same number; the second keys tell the two locks apart."""
FLUSH_BYTES = 64 * 1024**2
"""Each time this many bytes have arrived, they are forced to the disk while more arrive. So the client does not wait
for all of them at the end. At most twice as many are not yet on the disk."""
FETCH_LOCK_FILE = "fetch-slot"
"""The name of the lock file for fetching direct uploads, whose bytes clients send to a bucket (`direct_uploads`). It is
defined here, because `needed_file_names` must contain it."""
OPEN_STATES = (Upload.States.RECEIVING, Upload.States.FINISHING)
"""The states of uploads that have neither a result nor an error yet."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NewUpload:
    """The values of a new upload, as the client sent them, named as the columns of `Upload`."""

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
        remaining = quota.lock_remaining(organization)  # concurrent calls wait here, so MAX_OPEN holds for all together
        if Upload.objects.filter(organization=organization, state__in=OPEN_STATES).count() >= MAX_OPEN:
            raise TooManyUploads
        # The upload's file is one entry, which counts ENTRY_BYTES besides its content.
        if new.size_bytes + ENTRY_BYTES > remaining.size_bytes or not remaining.entry_count:
            raise TooLarge
        upload = _insert(organization, user, new)
    _file(upload).touch(mode=0o600)
    return upload


def create_final(
    *, organization: Organization, user: User | None, new: NewUpload, part_keys: Sequence[uuid.UUID]
) -> Upload:
    """Create a final upload, which joins complete parts; `new.size_bytes` is ignored.

    The parts cannot be used again. A call with the same parts returns the same final upload. Raises InvalidInput,
    NotFound, TooLarge.
    """
    parts_invalid = InvalidInput(fields={"Upload-Concat": _("Name complete parts, each once.")})
    rows = Upload.objects.filter(organization=organization, purpose=Upload.Purposes.PART, key__in=part_keys)
    with transaction.atomic():
        quota.lock(organization)
        by_key = {part.key: part for part in rows.select_for_update()}
        parts = [by_key[key] for key in part_keys if key in by_key]
        # The client named no part, an unknown key, or a key twice.
        if not parts or len(parts) != len(part_keys) or len(by_key) != len(part_keys):
            raise parts_invalid
        final = parts[0].final
        # All parts must be complete, and either all unused or all in the same final upload.
        if any(part.final_id != parts[0].final_id or offset_of(part) != part.size_bytes for part in parts):
            raise parts_invalid
        if final is not None:
            # A repeated call must name all parts of the final upload, in the same order.
            if [part.position for part in parts] != list(range(final.parts.count())):
                raise parts_invalid
            return final
        new = replace(new, size_bytes=sum(part.size_bytes for part in parts))
        _validate(organization, new)
        final = _insert(organization, user, new)
        for position, part in enumerate(parts):
            rows.filter(pk=part.pk).update(final=final, position=position, state=Upload.States.COMPLETE)
        # The final upload's own allocation, which `_insert` made, replaces the parts' allocations.
        Allocation.objects.filter(key__in=[part.allocation_key for part in parts]).delete()
    return final


def upload_with_key(organization: Organization, key: uuid.UUID) -> Upload:
    """Return the organization's upload with this key. Raises NotFound."""
    upload = Upload.objects.filter(organization=organization, key=key).select_related("organization").first()
    if upload is None:
        raise NotFound
    return upload


def offset_of(upload: Upload) -> int:
    """Return how many bytes of an upload have been written."""
    if upload.state == Upload.States.COMPLETE:
        return upload.size_bytes
    try:
        return _file(upload).stat().st_size
    except FileNotFoundError:
        # While an upload is being finished, its file may already have been moved to the workspace. Before that, only a
        # final upload has no file: its parts are not joined yet.
        return upload.size_bytes if upload.state == Upload.States.FINISHING else 0


_offset_waiters = BoundedSemaphore(max(1, settings.WEB_THREADS // 2))
"""Limits how many requests for an offset wait in this process. Each blocks a thread; half of the threads stay free for
pages."""


def settled_offset_of(upload: Upload) -> int:
    """Return the offset after an earlier request has written its bytes; wait for this at most SETTLE_SECONDS.

    A client that lost its connection asks for the offset at once, while the bytes that it sent before are still being
    written. With the current offset, it would send those bytes again. `_offset_waiters` limits how many requests
    wait at once; the others get the current offset. Raises UploadEnded if the upload failed, or if its file is missing,
    as after the restore of a backup.
    """
    if upload.state == Upload.States.RECEIVING and not _file(upload).exists() and not upload.parts.exists():
        raise UploadEnded
    if offset_of(upload) < upload.size_bytes and _offset_waiters.acquire(blocking=False):
        try:
            with _append_lock(upload):
                pass
        finally:
            _offset_waiters.release()
    offset = offset_of(upload)
    # The earlier request may have finished the upload. `finish` writes the new state before it moves the file. So the
    # state is read after the offset: if the state is still RECEIVING, the file was there when its length was read.
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
    """Append the bytes in `stream`, and return the new offset. `offset` must be the current one.

    If the connection breaks, the bytes that arrived are kept, and UploadBroken is raised. With a checksum, bytes
    are kept only if all have arrived and match it; else UploadBroken or ChecksumMismatch is raised.

    Raises OffsetConflict, StorageFull, TooLarge if there are more bytes than the upload's size, UploadEnded if the
    upload was terminated, and NotAllowed for a final or direct upload.
    """
    if upload.parts.exists():
        raise NotAllowed(_("A final upload takes no bytes. Send them to its parts."))
    if upload.multipart_id:
        raise NotAllowed(_("A direct upload takes no bytes here. Send them to the URLs of its parts."))
    with _append_lock(upload) as is_locked:
        _refresh(upload)
        if not is_locked or offset != offset_of(upload):
            raise OffsetConflict
        if upload.state != Upload.States.RECEIVING:  # an earlier request brought the last byte
            return offset
        stream = _InterruptibleBody(upload, stream)
        try:
            if checksum is None:
                return append_locked(upload, offset, stream)
            with _verified_copy(upload, stream, checksum, upload.size_bytes - offset) as verified_copy:
                return append_locked(upload, offset, verified_copy)
        except UploadBroken:
            raise UploadBroken(_("The upload was interrupted. Continue it at its offset.")) from None
        finally:
            expires_at = timezone.now() + KEPT_AFTER_LAST_BYTES
            Upload.objects.filter(pk=upload.pk, state__in=OPEN_STATES).update(expires_at=expires_at)


class _InterruptibleBody:
    """The body of a request that appends. It breaks if nothing arrives while another request waits for the lock.

    The stream's `read` raises TimeoutError after QUIET_SECONDS without a byte (`upload_stream.body_of`).
    """

    def __init__(self, upload: Upload, stream: Readable) -> None:
        self._upload, self._stream = upload, stream

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end. Raises UploadBroken."""
        while True:
            try:
                return self._stream.read(size)
            except TimeoutError:
                if _has_lock_waiter(self._upload):
                    raise UploadBroken from None


def _append_lock_keys(upload: Upload) -> list[int]:
    return [APPEND_LOCK, upload.pk % 2**31]  # PostgreSQL's keys are signed numbers of 32 bits


@contextmanager
def _append_lock(upload: Upload) -> Iterator[bool]:
    """Hold the upload's lock for appending; yield False if it is not free within SETTLE_SECONDS.

    The lock belongs to the database session and not to a transaction, because no transaction should be open while a
    client sends. PostgreSQL releases the lock of a process that dies.
    """
    keys = _append_lock_keys(upload)
    is_locked = True
    try:
        # The lock's timeout is set for this transaction only. The lock outlasts it.
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{SETTLE_SECONDS * 1000:.0f}"])
            cursor.execute("SELECT pg_advisory_lock(%s, %s)", keys)
    except OperationalError as error:
        if not isinstance(error.__cause__, LockNotAvailable):
            raise
        is_locked = False
    try:
        yield is_locked
    finally:
        if is_locked:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s, %s)", keys)


def _has_lock_waiter(upload: Upload) -> bool:
    """Return whether another request waits for the upload's lock for appending."""
    with connection.cursor() as cursor:
        # In pg_locks, objsubid 2 marks an advisory lock with two keys, which are in classid and objid.
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objsubid = 2"
            " AND classid = %s AND objid = %s"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))",
            _append_lock_keys(upload),
        )
        return bool(cursor.fetchone()[0])


def append_locked(upload: Upload, offset: int, stream: Readable) -> int:
    """Append the bytes in `stream` at `offset`. Raises as `append`.

    The caller holds a lock under which no other process appends to this upload, and has checked the upload's state.
    """
    with (
        translate_os_errors(),
        _open_for_writing(upload) as file_fd,
        _digest_of(upload, offset) as digest,
        ThreadPoolExecutor(2, thread_name_prefix="upload") as threads,  # one hashes, one flushes; exit waits for both
    ):
        hashing: Future[None] | None = None
        flushing: Future[None] | None = None
        next_flush_at = offset + FLUSH_BYTES
        # When all bytes have arrived, `or 1` tries to read one more, which shows whether the client sends too many.
        while chunk := stream.read(min(CHUNK_BYTES, upload.size_bytes - offset) or 1):
            if offset == upload.size_bytes:
                raise TooLarge(_("More bytes arrived than the upload's size."))
            if hashing:
                hashing.result()  # chunks must be hashed in order, and at most two be in memory
            _write(file_fd, chunk, offset)
            offset += len(chunk)
            if digest:
                # In a thread, so that hashing and the next write overlap: neither holds Python's global lock.
                hashing = threads.submit(digest.update, chunk)
            if offset >= next_flush_at:
                if flushing:
                    flushing.result()  # raises if the disk has failed
                flushing, next_flush_at = threads.submit(os.fdatasync, file_fd), offset + FLUSH_BYTES
        if flushing:
            flushing.result()
    return offset


def _write(file_fd: int, chunk: bytes, offset: int) -> None:
    """Write a chunk at the end of the file. Raises OffsetConflict if the file does not end at `offset`, UploadEnded."""
    fcntl.flock(file_fd, fcntl.LOCK_EX)
    try:
        status = os.fstat(file_fd)
        if not status.st_nlink:  # the file was removed, because the upload was terminated
            raise UploadEnded
        if status.st_size != offset:
            raise OffsetConflict
        written_bytes = 0
        while written_bytes < len(chunk):  # one call may write only a part
            written_bytes += os.pwrite(file_fd, memoryview(chunk)[written_bytes:], offset + written_bytes)
    finally:
        fcntl.flock(file_fd, fcntl.LOCK_UN)


@contextmanager
def _verified_copy(upload: Upload, stream: Readable, checksum: Checksum, limit_bytes: int) -> Iterator[BinaryIO]:
    """Copy `stream` to a temporary file, and yield the file if it matches the checksum.

    Raises ChecksumMismatch, and TooLarge if the quota has no room for the temporary file.
    """
    digest = CHECKSUMS[checksum.algorithm]()
    with (
        Reservation(upload.organization, label=str(upload)) as reservation,
        catalog.temporary_folder() as folder,
        translate_os_errors(),
        (folder / "bytes").open("xb+") as file,
    ):
        counted = CountedStream(stream, reservation)
        files.copy(stream=counted, target=file, limit_bytes=limit_bytes, digest=digest)
        if digest.digest() != checksum.digest:
            raise ChecksumMismatch
        file.seek(0)
        yield file


# --- Hash -------------------------------------------------------------------------------------------------------------


class _Digest:
    """The hash state (SHA-256) of an upload's first bytes; `size` is how many."""

    def __init__(self) -> None:
        self.size = 0
        self.sha256 = hashlib.sha256()

    def update(self, data: bytes) -> None:
        """Add more bytes."""
        self.sha256.update(data)
        self.size += len(data)


_digests: OrderedDict[int, _Digest] = OrderedDict()
"""Hash states of unfinished uploads by primary key, the least recently used first. They are in memory, because hashlib
offers no way to store one."""
_digests_lock = Lock()


@contextmanager
def _digest_of(upload: Upload, offset: int) -> Iterator[_Digest | None]:
    """Yield the hash state of the first `offset` bytes; None if this process does not have it.

    Without the state, new bytes are not hashed now; the process that finishes the upload reads them again (`_hash`).
    Parts are not hashed, because only the joined file has a hash.
    """
    digest = _pop_digest(upload)
    try:
        yield digest if digest.size == offset and upload.purpose != Upload.Purposes.PART else None
    finally:
        with _digests_lock:
            _digests[upload.pk] = digest
            if len(_digests) > MAX_KEPT_DIGESTS:
                _digests.popitem(last=False)


def _pop_digest(upload: Upload) -> _Digest:
    """Remove and return the upload's hash state, or a new one, so that no two threads use the same."""
    with _digests_lock:
        return _digests.pop(upload.pk, None) or _Digest()


def _hash(upload: Upload, file: BinaryIO) -> str:
    """Return the SHA-256 of the complete file. Read only the bytes that this process has not hashed yet."""
    digest = _pop_digest(upload)
    file.seek(digest.size)
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.sha256.hexdigest()


# --- Finish -----------------------------------------------------------------------------------------------------------


def finish(upload: Upload) -> None:
    """Publish or store a complete upload, as its purpose says. Do nothing if bytes are missing. Safe to repeat.

    A dataset version is published from the upload's file; a workspace file is the upload's file, moved. An error that
    the customer can act on is raised, and is also stored as the upload's result, which can be read for KEPT_AFTER_END.
    Raises NotFound if the upload was terminated.
    """
    with _finish_lock(upload) as is_locked:
        try:
            upload.refresh_from_db(fields=["state"])
        except Upload.DoesNotExist:
            raise NotFound from None
        if not is_locked or upload.state not in OPEN_STATES or upload.purpose == Upload.Purposes.PART:
            return
        _join_parts(upload)
        if offset_of(upload) != upload.size_bytes:
            return
        try:
            _publish_or_store(upload)
        except StorageFull:
            raise  # not the customer's fault: the upload stays open, and `collect` tries again
        except CustomerError as error:
            fail(upload, error)
            raise
        finally:
            with suppress(Upload.DoesNotExist):  # it was terminated meanwhile
                upload.refresh_from_db()
                if upload.state not in OPEN_STATES:  # published, stored or refused, so the file is no longer needed
                    _file(upload).unlink(missing_ok=True)


@contextmanager
def _finish_lock(upload: Upload) -> Iterator[bool]:
    """Hold the upload's lock for finishing; yield False at once if another process holds it.

    PostgreSQL releases the lock of a process that dies.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s, hashtext(%s))", [FINISH_LOCK, upload.key.hex])
        is_locked = bool(cursor.fetchone()[0])
    try:
        yield is_locked
    finally:
        if is_locked:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s, hashtext(%s))", [FINISH_LOCK, upload.key.hex])


def _publish_or_store(upload: Upload) -> None:
    """Use the upload's file as its purpose says, and end the upload.

    Raises NotFound if the upload was terminated, UploadEnded if its file is lost.
    """
    try:
        file = _file(upload).open("rb")
    except FileNotFoundError:
        # An archive is never moved, and no file is moved before FINISHING. So the file is lost, as after the restore of
        # a backup.
        if upload.purpose == Upload.Purposes.DATASET or upload.is_unpacked or upload.state == Upload.States.RECEIVING:
            raise UploadEnded from None
        # An earlier call moved the file into the workspace, and was interrupted before it counted the file there.
        catalog.measure_workspace(workspace=selectors.workspace_named(upload.organization, upload.name))
        with transaction.atomic():
            _end(upload, state=Upload.States.COMPLETE)
        return
    with file:
        sha256 = _hash(upload, file)
        os.fsync(file.fileno())
        rows = Upload.objects.filter(pk=upload.pk, state__in=OPEN_STATES)
        if not rows.update(state=Upload.States.FINISHING, sha256=sha256):
            raise NotFound  # the upload was terminated
        file.seek(0)
        if upload.purpose == Upload.Purposes.DATASET:
            _publish(upload, file, sha256)
        else:
            _store(upload, file)


def _publish(upload: Upload, file: BinaryIO, sha256: str) -> None:
    """Publish the archive `file` as the next version of the upload's dataset, and end the upload."""
    dataset = selectors.dataset_named(upload.organization, upload.name)
    with Reservation(upload.organization, label=dataset.name, key=upload.finishing_key) as reservation:
        catalog.publish_archive(
            dataset=dataset,
            user=upload.created_by,
            archive=file,
            sha256=sha256,
            reservation=reservation,
            on_published=lambda version: _end(upload, state=Upload.States.COMPLETE, version=version),
        )


def _store(upload: Upload, file: BinaryIO) -> None:
    """Move the upload's file into its workspace, or unpack it there, and end the upload."""
    workspace = selectors.workspace_named(upload.organization, upload.name)

    def on_stored() -> None:
        _end(upload, state=Upload.States.COMPLETE)

    if upload.is_unpacked:
        catalog.unpack_into_workspace(
            workspace=workspace, path=upload.path, archive=file, on_unpacked=on_stored,
            allocation_key=upload.finishing_key,
        )  # fmt: skip
    else:
        catalog.place_file(
            workspace=workspace, path=upload.path, source=_file(upload), on_placed=on_stored,
            allocation_key=upload.finishing_key,
        )  # fmt: skip


def fail(upload: Upload, error: CustomerError) -> None:
    """End an upload with an error, unless it was terminated."""
    with suppress(NotFound), transaction.atomic():
        _end(upload, state=Upload.States.FAILED, error_code=error.code, error=str(error.message))


def _end(upload: Upload, **values: object) -> None:
    """Write an upload's result and release its quota, in the caller's transaction. Raises NotFound if it has ended."""
    rows = Upload.objects.filter(pk=upload.pk, state__in=OPEN_STATES)
    if not rows.update(**values, expires_at=timezone.now() + KEPT_AFTER_END):
        raise NotFound
    Allocation.objects.filter(key__in=(upload.allocation_key, upload.finishing_key)).delete()


def _join_parts(upload: Upload) -> None:
    """Move the bytes of a final upload's parts into its file. Continue where an interrupted call ended."""
    parts = list(Upload.objects.filter(final=upload).order_by("position"))
    # `exists`, because an upload of 0 bytes needs a file too, and a missing file has the offset 0.
    is_joined = _file(upload).exists() and offset_of(upload) == upload.size_bytes
    # In the state FINISHING the file was complete before, and may already be in the workspace.
    if not parts or is_joined or upload.state == Upload.States.FINISHING:
        return
    end = 0
    with translate_os_errors():
        if not _file(upload).exists():
            _file(parts[0]).rename(_file(upload))  # faster than a copy; `_append_file` then adds nothing of this part
        with _open_for_writing(upload) as file_fd:
            for part in parts:
                end += part.size_bytes
                _append_file(_file(part), file_fd, end)
    for part in parts:
        _file(part).unlink(missing_ok=True)


def _append_file(source: Path, target_fd: int, end: int) -> None:
    """Append `source` to the open file `target_fd`, without the bytes that an earlier call has appended.

    `end` is the position in the target at which `source` must end.
    """
    missing_bytes = end - os.fstat(target_fd).st_size
    if missing_bytes <= 0:
        return
    with source.open("rb") as file:
        offset = os.fstat(file.fileno()).st_size - missing_bytes
        os.lseek(target_fd, 0, os.SEEK_END)
        while sent_bytes := os.sendfile(target_fd, file.fileno(), offset, CHUNK_BYTES):  # the kernel copies the bytes
            offset += sent_bytes


# --- End --------------------------------------------------------------------------------------------------------------


def language_of(upload: Upload) -> AbstractContextManager[None]:
    """Return a block in which errors are in the language of the upload's user, for workers, which serve no request."""
    language = upload.created_by.language if upload.created_by else ""
    return translation.override(language or settings.LANGUAGE_CODE)


def terminate(upload: Upload) -> None:
    """Delete an upload with its bytes, and release its quota. A version or file that it has produced stays.

    If another process is finishing the upload, its `finish` raises NotFound. Raises UploadEnded for a part that a final
    upload uses.
    """
    with transaction.atomic():
        quota.lock(upload.organization)  # `create_final` locks it too, and may just have used the part
        if Upload.objects.filter(pk=upload.pk, final__isnull=False).exists():
            raise UploadEnded
        parts = list(Upload.objects.filter(final=upload))
        for row in (*parts, upload):
            Upload.objects.filter(pk=row.pk).delete()
            Allocation.objects.filter(key__in=(row.allocation_key, row.finishing_key)).delete()
    for row in (*parts, upload):
        _file(row).unlink(missing_ok=True)
        _pop_digest(row)


def collect() -> None:
    """Finish complete uploads whose process died, and delete expired ones (garbage collection). Safe to repeat."""
    rows = Upload.objects.filter(state__in=OPEN_STATES).select_related("organization", "created_by")
    for upload in rows.iterator():
        try:
            if upload.expires_at < timezone.now():
                terminate(upload)
            else:
                with language_of(upload):
                    finish(upload)
        except (CustomerError, OSError):
            log.exception("Upload %s can't be finished or deleted", upload.pk)
    # A part stays as long as its final upload, whose deletion sets `final` to None.
    Upload.objects.filter(expires_at__lt=timezone.now(), final=None).exclude(state__in=OPEN_STATES).delete()


def folder() -> Path:
    """Return the folder of the files of unfinished uploads."""
    path = selectors.root() / "uploads"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def needed_file_names() -> set[str]:
    """Return the names of the files in `folder()` that garbage collection must keep."""
    needed = Upload.objects.filter(state__in=OPEN_STATES) | Upload.objects.filter(final__state__in=OPEN_STATES)
    return {FETCH_LOCK_FILE, *(key.hex for key in needed.values_list("key", flat=True))}


# --- Helpers ----------------------------------------------------------------------------------------------------------


def _validate(organization: Organization, new: NewUpload) -> None:
    """Raise InvalidInput, NotFound or TooLarge if the upload could not be finished when it is complete."""
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
    elif len(new.name) > 63:  # the length of the column; nothing is looked up by the name of a part
        errors["name"] = NAME_VALIDATOR.message
    if errors:
        raise InvalidInput(fields=errors)
    if new.size_bytes > limit:
        raise TooLarge


def _insert(organization: Organization, user: User | None, new: NewUpload) -> Upload:
    """Write the rows of an upload and of the allocation that reserves its quota."""
    upload = Upload.objects.create(
        organization=organization,
        created_by=user,
        purpose=new.purpose,
        name=new.name,
        path=new.path,
        filename=new.filename[:255],  # the length of the column
        is_unpacked=new.is_unpacked,
        metadata=new.metadata,
        size_bytes=new.size_bytes,
        expires_at=timezone.now() + KEPT_AFTER_LAST_BYTES,
    )
    Allocation.objects.create(
        organization=organization,
        kind=Allocation.Kinds.UPLOAD,
        key=upload.allocation_key,
        label=str(upload)[: quota.LABEL_LENGTH],
        size_bytes=upload.size_bytes,
        entry_count=1,
    )
    return upload


def _file(upload: Upload) -> Path:
    """Return the path of the file to which the upload's bytes are written."""
    return folder() / upload.key.hex


@contextmanager
def _open_for_writing(upload: Upload) -> Iterator[int]:
    """Open the upload's file, and yield its descriptor. Raises FileNotFoundError if the upload has ended."""
    file_fd = os.open(_file(upload), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield file_fd
    finally:
        os.close(file_fd)

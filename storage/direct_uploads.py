"""Direct uploads: a client sends the parts of a large upload to the operator's bucket, and the server fetches them.

The server creates the multipart upload, signs a URL for each part, checks and joins the parts, and then fetches the
object as if its bytes had arrived by tus: the same rows, quota, hash and result (`uploads`). Clients get signed URLs
for parts and nothing else. They never name an object: its key is made of the upload's own random key.

The bucket, below its prefix, belongs to this installation alone. `collect` removes what no open upload needs.
"""

from __future__ import annotations

import fcntl
import http.client
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from celery import shared_task
from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from console.accounts.models import Organization, User
from console.core import connections
from console.core.enqueue import send
from console.core.errors import CustomerError, InvalidInput
from storage import s3, uploads
from storage.errors import BucketUnavailable, UploadEnded
from storage.models import Upload

PART_BYTES = 16 * 1024**2
"""Size of a part, unless an upload would have too many parts. A lost connection costs little; S3's minimum is 5 MiB."""
MAX_URLS = 100
"""URLs of one answer."""
URL_SECONDS = 900
"""How long the URL of a part can be used to begin sending it. A client asks for a few at a time."""
PAGE_FROM_BYTES = 64 * 1024**2
"""Size from which the pages upload directly. Smaller uploads need fewer requests by tus."""
FOLDER = "trainyard-uploads"
"""First folder of all keys, so that `collect` removes nothing else from a bucket that has other uses too."""
FAILURES = (s3.S3Error, connections.ForbiddenAddress, OSError, http.client.HTTPException)
"""Exceptions that a request to the bucket can raise."""

log = logging.getLogger(__name__)


class PartUrl(NamedTuple):
    """The signed URL of a part, and how many bytes must be sent there."""

    number: int
    url: str
    size_bytes: int


# --- Settings ---------------------------------------------------------------------------------------------------------


def is_offered() -> bool:
    """Return whether the operator has configured a bucket."""
    return bool(settings.UPLOAD_BUCKET)


def page_from_bytes() -> int | None:
    """Return the size from which the pages upload directly, None if they never do."""
    return PAGE_FROM_BYTES if is_offered() else None


def _bucket() -> s3.Bucket:
    return s3.Bucket(
        endpoint=settings.UPLOAD_BUCKET_ENDPOINT,
        name=settings.UPLOAD_BUCKET.partition("/")[0],
        region=settings.UPLOAD_BUCKET_REGION,
        access_key_id=settings.UPLOAD_BUCKET_ACCESS_KEY_ID,
        secret_access_key=settings.UPLOAD_BUCKET_SECRET_ACCESS_KEY,
        allows_private=True,  # the operator named it
    )


def _prefix() -> str:
    """Return the common beginning of the keys of this installation's objects. No other object has it."""
    prefix = settings.UPLOAD_BUCKET.partition("/")[2].strip("/")
    return f"{prefix}/{FOLDER}/" if prefix else f"{FOLDER}/"


def _object_key(upload: Upload) -> str:
    return f"{_prefix()}{upload.organization_id}/{upload.key.hex}"


# --- Upload -----------------------------------------------------------------------------------------------------------


def create(*, organization: Organization, user: User | None, new: uploads.NewUpload) -> Upload:
    """Create a direct upload and reserve quota for its size. Raises BucketUnavailable and as `uploads.create`."""
    if not is_offered():
        raise InvalidInput(_("Direct uploads are turned off here. Use tus instead."))
    if new.size_bytes < 1:
        raise InvalidInput(fields={"size_bytes": _("Enter at least 1 byte.")})
    upload = uploads.create(organization=organization, user=user, new=new)
    try:
        upload.multipart_id = s3.create_multipart(_bucket(), _object_key(upload))
    except FAILURES as error:
        uploads.terminate(upload)
        raise _unavailable(error) from error
    _update(upload, multipart_id=upload.multipart_id)
    return upload


def part_size(upload: Upload) -> int:
    """Return the size of each part but the last, in bytes."""
    return max(PART_BYTES, -(-upload.size_bytes // s3.MAX_PART_COUNT))


def part_count(upload: Upload) -> int:
    """Return the number of parts."""
    return -(-upload.size_bytes // part_size(upload))


def part_urls(upload: Upload, numbers: Collection[int]) -> list[PartUrl]:
    """Return URLs for parts, numbered from 1. Raises InvalidInput, UploadEnded."""
    _require_receiving(upload)
    if len(numbers) > MAX_URLS or any(not 1 <= number <= part_count(upload) for number in numbers):
        sentence = _("Name at most %(most)d parts, each between 1 and %(last)d.")
        raise InvalidInput(fields={"numbers": sentence % {"most": MAX_URLS, "last": part_count(upload)}})
    _update(upload)
    bucket, key = _bucket(), _object_key(upload)
    return [
        PartUrl(
            number,
            s3.part_url(bucket, key, upload.multipart_id, number, size=size, seconds=URL_SECONDS),
            size,
        )
        for number in numbers
        for size in [_size_of_part(upload, number)]
    ]


def received_parts(upload: Upload) -> list[int]:
    """Return the numbers of the parts that are in the bucket. Raises UploadEnded, BucketUnavailable."""
    _require_receiving(upload)
    try:
        return [part.number for part in _complete_parts(upload)]
    except FAILURES as error:
        raise _unavailable(error) from error


def complete(upload: Upload) -> None:
    """Join the parts, and let a worker fetch and use the bytes. Safe to repeat.

    Raises InvalidInput if parts are missing, UploadEnded, BucketUnavailable.
    """
    if upload.is_in_bucket:
        return
    _require_receiving(upload)
    bucket, key = _bucket(), _object_key(upload)
    try:
        if not _is_joined(upload):
            parts = {part.number: part for part in _complete_parts(upload)}
            if missing := [number for number in range(1, part_count(upload) + 1) if number not in parts]:
                sentence = _("%(count)d parts are missing, the first of them is number %(number)d.")
                values = {"count": len(missing), "number": missing[0]}
                raise InvalidInput(fields={"parts": sentence % values})
            s3.complete_multipart(bucket, key, upload.multipart_id, [parts[number] for number in sorted(parts)])
    except FAILURES as error:
        raise _unavailable(error) from error
    _update(upload, is_in_bucket=True)
    send(fetch_uploads)


def terminate(upload: Upload) -> None:
    """Delete an upload with its bytes, also those in the bucket. Raises as `uploads.terminate`."""
    uploads.terminate(upload)
    if upload.multipart_id:
        try:
            s3.abort_multipart(_bucket(), _object_key(upload), upload.multipart_id)
            s3.delete_object(_bucket(), _object_key(upload))
        except FAILURES:
            log.exception("The parts of upload %s could not be removed; garbage collection will", upload.pk)


def _size_of_part(upload: Upload, number: int) -> int:
    return min(part_size(upload), upload.size_bytes - (number - 1) * part_size(upload))


def _complete_parts(upload: Upload) -> list[s3.Part]:
    """Return the parts in the bucket that have the right size."""
    parts = s3.list_parts(_bucket(), _object_key(upload), upload.multipart_id)
    last = part_count(upload)
    return [part for part in parts if 1 <= part.number <= last and part.size == _size_of_part(upload, part.number)]


def _is_joined(upload: Upload) -> bool:
    """Return whether an interrupted call has joined the parts."""
    item = s3.find_object(_bucket(), _object_key(upload))
    return item is not None and item.size == upload.size_bytes


def _require_receiving(upload: Upload) -> None:
    if not upload.multipart_id:
        raise InvalidInput(_("This is no direct upload. Continue it by tus."))
    if upload.is_in_bucket or upload.state != Upload.States.RECEIVING:
        raise UploadEnded


def _update(upload: Upload, **values: object) -> None:
    """Change an open upload and postpone its expiry, since it is in use. Raises UploadEnded."""
    expires_at = timezone.now() + uploads.KEPT_AFTER_LAST_BYTES
    rows = Upload.objects.filter(pk=upload.pk, state__in=uploads.OPEN_STATES)
    if not rows.update(**values, expires_at=expires_at):
        raise UploadEnded
    upload.refresh_from_db()


def _unavailable(error: Exception) -> BucketUnavailable:
    log.error("The bucket for direct uploads refused a request or was not reached: %r", error)
    return BucketUnavailable()


# --- Fetch ------------------------------------------------------------------------------------------------------------


def waiting() -> QuerySet[Upload]:
    """Return the uploads whose bytes are in the bucket and have not been used, oldest first."""
    rows = Upload.objects.filter(is_in_bucket=True, state__in=uploads.OPEN_STATES)
    return rows.select_related("organization", "created_by").order_by("pk")


@shared_task
def fetch_uploads() -> None:
    """Fetch what waits in the bucket, one upload after the other, unless another process does."""
    with _slot() as is_free:
        tried: set[int] = set()
        while is_free and (upload := waiting().exclude(pk__in=tried).first()):
            tried.add(upload.pk)
            try:
                fetch(upload)
            except CustomerError as error:  # stored with the upload, unless it is tried again
                log.info("Upload %s was not used: %s", upload.pk, error.code)
            except FAILURES:
                log.exception("Upload %s can't be fetched from the bucket now", upload.pk)


def fetch(upload: Upload) -> None:
    """Fetch an upload's bytes from the bucket, from where an earlier call ended, and use them. Safe to repeat."""
    bucket, key = _bucket(), _object_key(upload)
    offset = uploads.offset_of(upload)
    if offset < upload.size_bytes:
        item = s3.find_object(bucket, key)
        if item is None or item.size != upload.size_bytes:
            uploads.fail(upload, UploadEnded())
            return
        with s3.open_object(bucket, item, offset=offset) as response:
            offset = uploads.append_unchecked(upload, offset, response)
        if offset < upload.size_bytes:
            raise http.client.IncompleteRead(b"", upload.size_bytes - offset)
    try:
        uploads.finish(upload)
    finally:
        if not waiting().filter(pk=upload.pk).exists():
            s3.delete_object(bucket, key)


@contextmanager
def _slot() -> Iterator[bool]:
    """Hold the lock of the one process that fetches. Yield False if another process has it."""
    with (uploads.folder() / uploads.FETCH_SLOT).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


# --- Clean up ---------------------------------------------------------------------------------------------------------


def collect() -> None:
    """Remove objects and parts that no open upload needs: of expired uploads, or left by a crash. Safe to repeat."""
    if not is_offered():
        return
    bucket, prefix = _bucket(), _prefix()
    try:
        multiparts = list(s3.list_multiparts(bucket, prefix))
        keys = [item.key for page in s3.list_objects(bucket, prefix) for item in page]
        # Read after the listing: an upload's row is written before its first part, so no new upload is missed.
        rows = Upload.objects.filter(state__in=uploads.OPEN_STATES).only("organization_id", "key")
        needed = {_object_key(upload) for upload in rows}
        for key, multipart_id in multiparts:
            if key not in needed:
                s3.abort_multipart(bucket, key, multipart_id)
        for key in keys:
            if key not in needed:
                s3.delete_object(bucket, key)
    except FAILURES:
        log.exception("The bucket for direct uploads can't be cleaned up now")

"""Direct uploads: a client sends the parts of a large upload to the operator's S3 bucket, and a worker fetches them.

The console creates a multipart upload in the bucket, signs a URL for each part, checks the parts, and lets the bucket
join them. Then a worker fetches the joined object. From there on the upload is like one by tus, the protocol for
resumable uploads, with the same rows, quota and results (`uploads`). A client can only use the signed URLs of its
parts. It cannot choose the object's key, which contains the upload's random key.

Only this installation may write into its folder in the bucket (FOLDER), because `collect` removes every object of the
folder that no unfinished upload needs.
"""

from __future__ import annotations

import fcntl
import http.client
import logging
import math
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
"""The size of a part, unless an upload would have too many parts. S3's minimum is 5 MiB. When a connection is lost, at
most one part must be sent again."""
MAX_URLS = 100
"""How many URLs one request can ask for. Signing takes CPU time, and clients need a few at a time."""
URL_SECONDS = 900
"""How long a signed URL is valid: time enough to begin to send a few parts over a slow connection."""
MIN_BYTES_IN_PAGES = 64 * 1024**2
"""The smallest file for which the console's pages use a direct upload. For smaller files tus needs fewer requests."""
FOLDER = "trainyard-uploads"
"""The folder of all objects, below the prefix in UPLOAD_BUCKET. `collect` looks only into this folder, so it removes
nothing else from a bucket with other contents."""
BUCKET_ERRORS = (s3.S3Error, connections.ForbiddenAddress, OSError, http.client.HTTPException)
"""The exceptions that a request to the bucket can raise."""

log = logging.getLogger(__name__)


class PartUrl(NamedTuple):
    """The signed URL of a part, and how many bytes the client must send there."""

    number: int
    url: str
    size_bytes: int


# --- Settings ---------------------------------------------------------------------------------------------------------


def is_offered() -> bool:
    """Return whether the operator has configured a bucket."""
    return bool(settings.UPLOAD_BUCKET)


def min_bytes_in_pages() -> int | None:
    """Return the size of the smallest file for which the pages use a direct upload; None if they never do."""
    return MIN_BYTES_IN_PAGES if is_offered() else None


def _bucket() -> s3.Bucket:
    """Return the operator's bucket. Call it only if `is_offered`."""
    return s3.Bucket(
        endpoint=settings.UPLOAD_BUCKET_ENDPOINT,
        name=settings.UPLOAD_BUCKET.partition("/")[0],
        region=settings.UPLOAD_BUCKET_REGION,
        access_key_id=settings.UPLOAD_BUCKET_ACCESS_KEY_ID,
        secret_access_key=settings.UPLOAD_BUCKET_SECRET_ACCESS_KEY,
        allows_private=True,  # the operator has chosen this server, not a customer
    )


def _prefix() -> str:
    """Return the prefix of the keys of all objects: the prefix in UPLOAD_BUCKET (`bucket/prefix`), and FOLDER."""
    prefix = settings.UPLOAD_BUCKET.partition("/")[2].strip("/")
    return f"{prefix}/{FOLDER}/" if prefix else f"{FOLDER}/"


def _object_key(upload: Upload) -> str:
    return f"{_prefix()}{upload.organization_id}/{upload.key.hex}"


# --- Upload -----------------------------------------------------------------------------------------------------------


def create(*, organization: Organization, user: User | None, new: uploads.NewUpload) -> Upload:
    """Create a direct upload and reserve quota for its size.

    Raises BucketUnavailable and the errors of `uploads.create`.
    """
    if not is_offered():
        raise InvalidInput(_("Direct uploads are turned off here. Use tus instead."))
    if new.size_bytes < 1:  # S3 joins at least one part
        raise InvalidInput(fields={"size_bytes": _("Enter at least 1 byte.")})
    upload = uploads.create(organization=organization, user=user, new=new)
    try:
        upload.multipart_id = s3.create_multipart(_bucket(), _object_key(upload))
    except BUCKET_ERRORS as error:
        uploads.terminate(upload)
        raise _unavailable(error) from error
    _update(upload, multipart_id=upload.multipart_id)
    return upload


def part_size(upload: Upload) -> int:
    """Return the size of each part but the last, in bytes."""
    return max(PART_BYTES, math.ceil(upload.size_bytes / s3.MAX_PART_COUNT))


def part_count(upload: Upload) -> int:
    """Return the number of parts."""
    return math.ceil(upload.size_bytes / part_size(upload))


def part_urls(upload: Upload, numbers: Collection[int]) -> list[PartUrl]:
    """Return signed URLs for the parts with these numbers, which begin at 1. Raises InvalidInput, UploadEnded."""
    _require_receiving(upload)
    if len(numbers) > MAX_URLS or any(not 1 <= number <= part_count(upload) for number in numbers):
        sentence = _("Name at most %(most)d parts, each between 1 and %(last)d.")
        raise InvalidInput(fields={"numbers": sentence % {"most": MAX_URLS, "last": part_count(upload)}})
    _update(upload)  # no values: this only postpones the expiry
    bucket, key = _bucket(), _object_key(upload)
    urls = []
    for number in numbers:
        size = _size_of_part(upload, number)
        url = s3.part_url(bucket, key, upload.multipart_id, number, size=size, seconds=URL_SECONDS)
        urls.append(PartUrl(number, url, size))
    return urls


def received_parts(upload: Upload) -> list[int]:
    """Return the numbers of the parts that are in the bucket. Raises UploadEnded, BucketUnavailable."""
    _require_receiving(upload)
    try:
        return [part.number for part in _complete_parts(upload)]
    except BUCKET_ERRORS as error:
        raise _unavailable(error) from error


def complete(upload: Upload) -> None:
    """Join the parts in the bucket, and have a worker fetch and finish the upload. Safe to repeat.

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
    except BUCKET_ERRORS as error:
        raise _unavailable(error) from error
    _update(upload, is_in_bucket=True)
    send(fetch_uploads)


def terminate(upload: Upload) -> None:
    """Delete an upload with its bytes, also those in the bucket. Raises as `uploads.terminate`."""
    uploads.terminate(upload)
    if upload.multipart_id:
        try:
            # Only the parts exist, or only the object if they were joined. Neither call fails if there is nothing.
            s3.abort_multipart(_bucket(), _object_key(upload), upload.multipart_id)
            s3.delete_object(_bucket(), _object_key(upload))
        except BUCKET_ERRORS:
            log.exception("The parts of upload %s could not be removed; garbage collection will", upload.pk)


def _size_of_part(upload: Upload, number: int) -> int:
    """Return the size of a part in bytes; the last one may be smaller."""
    return min(part_size(upload), upload.size_bytes - (number - 1) * part_size(upload))


def _complete_parts(upload: Upload) -> list[s3.Part]:
    """Return the parts in the bucket that have the right size."""
    parts = s3.list_parts(_bucket(), _object_key(upload), upload.multipart_id)
    last = part_count(upload)
    return [part for part in parts if 1 <= part.number <= last and part.size == _size_of_part(upload, part.number)]


def _is_joined(upload: Upload) -> bool:
    """Return whether the parts were joined already, by a call that was interrupted afterwards."""
    item = s3.find_object(_bucket(), _object_key(upload))
    return item is not None and item.size == upload.size_bytes


def _require_receiving(upload: Upload) -> None:
    """Raise InvalidInput for an upload that is not direct, UploadEnded for one that takes no more parts."""
    if not upload.multipart_id:
        raise InvalidInput(_("This is no direct upload. Continue it by tus."))
    if upload.is_in_bucket or upload.state != Upload.States.RECEIVING:
        raise UploadEnded


def _update(upload: Upload, **values: object) -> None:
    """Change an unfinished upload, and postpone its expiry because it is in use. Raises UploadEnded."""
    expires_at = timezone.now() + uploads.KEPT_AFTER_LAST_BYTES
    rows = Upload.objects.filter(pk=upload.pk, state__in=uploads.OPEN_STATES)
    if not rows.update(**values, expires_at=expires_at):
        raise UploadEnded
    upload.refresh_from_db()


def _unavailable(error: Exception) -> BucketUnavailable:
    """Log an error of the bucket for the operator, and return the error for the customer."""
    log.error("The bucket for direct uploads refused a request or was not reached: %r", error)
    return BucketUnavailable()


# --- Fetch ------------------------------------------------------------------------------------------------------------


def uploads_to_fetch() -> QuerySet[Upload]:
    """Return the unfinished uploads whose bytes are all in the bucket, oldest first."""
    rows = Upload.objects.filter(is_in_bucket=True, state__in=uploads.OPEN_STATES)
    return rows.select_related("organization", "created_by").order_by("pk")


@shared_task
def fetch_uploads() -> None:
    """Try once to fetch each of `uploads_to_fetch`, one after the other, unless another process is fetching."""
    with _fetch_lock() as is_locked:
        tried_ids: set[int] = set()
        while is_locked and (upload := uploads_to_fetch().exclude(pk__in=tried_ids).first()):
            tried_ids.add(upload.pk)
            try:
                with uploads.language_of(upload):
                    fetch(upload)
            except CustomerError as error:
                # `uploads.finish` has stored the error with the upload, or left the upload open for a later task.
                log.info("Upload %s was not used: %s", upload.pk, error.code)
            except BUCKET_ERRORS:
                log.exception("Upload %s can't be fetched from the bucket now", upload.pk)


def fetch(upload: Upload) -> None:
    """Fetch an upload's bytes from the bucket, and finish it. Safe to repeat: continue where an earlier call ended.

    Call it under `_fetch_lock`.
    """
    bucket, key = _bucket(), _object_key(upload)
    offset = uploads.offset_of(upload)
    if offset < upload.size_bytes:
        item = s3.find_object(bucket, key)
        if item is None or item.size != upload.size_bytes:  # deleted or replaced since `complete`, not by this console
            uploads.fail(upload, UploadEnded())
            return
        with s3.open_object(bucket, item, offset=offset) as response:
            offset = uploads.append_locked(upload, offset, response)  # `_fetch_lock` is the lock that it requires
        if offset < upload.size_bytes:
            raise http.client.IncompleteRead(b"", upload.size_bytes - offset)
    try:
        uploads.finish(upload)
    finally:
        # An upload that `finish` left open, for example because storage is full, keeps its object. If a crash of the
        # machine shortens the local file before the next try, the missing bytes are fetched again.
        if not uploads_to_fetch().filter(pk=upload.pk).exists():
            s3.delete_object(bucket, key)


@contextmanager
def _fetch_lock() -> Iterator[bool]:
    """Hold the lock of the process that fetches; yield False if another process holds it."""
    with (uploads.folder() / uploads.FETCH_LOCK_FILE).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


# --- Clean up ---------------------------------------------------------------------------------------------------------


def collect() -> None:
    """Remove objects and parts that no unfinished upload needs (garbage collection). Safe to repeat."""
    if not is_offered():
        return
    bucket, prefix = _bucket(), _prefix()
    try:
        multiparts = list(s3.list_multiparts(bucket, prefix))
        keys = [item.key for page in s3.list_objects(bucket, prefix) for item in page]
        # Read the rows after listing the bucket: each object's row was written before the object.
        rows = Upload.objects.filter(state__in=uploads.OPEN_STATES).only("organization_id", "key")
        needed = {_object_key(upload) for upload in rows}
        for multipart in multiparts:
            if multipart.key not in needed:
                s3.abort_multipart(bucket, multipart.key, multipart.multipart_id)
        for key in keys:
            if key not in needed:
                s3.delete_object(bucket, key)
    except BUCKET_ERRORS:
        log.exception("The bucket for direct uploads can't be cleaned up now")

"""Limits, progress and error messages of imports from HTTPS addresses and from buckets."""

from __future__ import annotations

import errno
from datetime import timedelta

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext_noop

from storage.errors import TooLarge
from storage.models import Dataset, DatasetImport

MAX_FAILURES = 5
"""After this many attempts in a row without a new byte, an import fails. Over HTTPS without a validator
(`DatasetImport.validator`) each attempt begins at the first byte, so every interrupted attempt counts. The pauses are
2, 4, 8 and 16 seconds."""
MAX_DURATION = timedelta(hours=6)
"""How long a process may work on an import, which others wait for: only one runs at a time."""
REPORT_SECONDS = 2.0
"""The shortest time between two updates of the progress, which people watch in a page."""
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that mean that the console's disk is full. Unlike after a network error, another attempt would fail too."""

# The errors of imports. They are stored in English, and translated for the reader.
NOT_ALLOWED = gettext_noop("The address leads to a host that is not allowed. Ask the administrator to allow it.")
UNREACHABLE = gettext_noop("The server could not be reached, or ended the transfer too often. Try again later.")
REFUSED = gettext_noop("The server did not send the file. Check the address, and that it needs no log-in.")
TOO_SLOW = gettext_noop("The transfer took too long. Split the file into smaller ones.")
FAILED = gettext_noop("The import failed. Try again, and contact the administrator if it fails again.")
BUCKET_REFUSED = gettext_noop("The bucket refused access. Check the credentials, and that they may list and read it.")
NO_OBJECTS = gettext_noop("There are no objects at this address. Check the bucket's name, the key, and the endpoint.")
OBJECT_CHANGED = gettext_noop(
    "An object changed or was deleted during the import. Try again when nothing writes to it."
)


class ImportFailed(Exception):
    """An import cannot succeed. Its message is one of the sentences above, untranslated."""


def require_within_limit(size: int) -> None:
    """Raise TooLarge if `size`, in bytes, is more than an import may have."""
    if size > settings.MAX_UPLOAD_BYTES:
        raise TooLarge


def report(row: DatasetImport, received_bytes: int) -> None:
    """Store the progress, at most every REPORT_SECONDS.

    Raises ImportFailed if the import takes too long, or if its dataset was deleted.
    """
    now = timezone.now()
    if (now - row.updated_at).total_seconds() < REPORT_SECONDS:
        return
    if now - row.started_at > MAX_DURATION:
        raise ImportFailed(TOO_SLOW)
    if not Dataset.objects.filter(pk=row.dataset_id, deleted_at=None).exists():
        raise ImportFailed(FAILED)
    row.received_bytes = received_bytes
    row.save(update_fields=["received_bytes", "updated_at"])

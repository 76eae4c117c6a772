"""Limits, progress and error messages of imports from HTTPS addresses and from buckets."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext_noop

from storage.errors import TooLarge
from storage.models import Dataset, DatasetImport

MAX_FAILURES = 5
"""Attempts in a row without a new byte after which the import fails."""
MAX_DELAY_SECONDS = 30
"""The longest pause between two attempts."""
MAX_DURATION = timedelta(hours=6)
"""How long an import may take in all."""
REPORT_SECONDS = 2.0
"""Minimum interval between updates of the progress."""

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
    """An import cannot succeed. The message is one of the sentences above, untranslated."""


def require_within_limit(size: int) -> None:
    """Raise TooLarge if an import may not have `size` bytes."""
    if size > settings.MAX_UPLOAD_BYTES:
        raise TooLarge


def report(row: DatasetImport, received: int) -> None:
    """Store the progress. Raises ImportFailed for an import that takes too long or whose dataset was deleted."""
    now = timezone.now()
    if (now - row.updated_at).total_seconds() < REPORT_SECONDS:
        return
    if now - row.created_at > MAX_DURATION:
        raise ImportFailed(TOO_SLOW)
    if not Dataset.objects.filter(pk=row.dataset_id, deleted_at=None).exists():
        raise ImportFailed(FAILED)
    row.received_bytes = received
    row.save(update_fields=["received_bytes", "updated_at"])

"""Reserve quota for bytes before they are written.

A reservation is a row that is created with the quota locked. So uploads that fit alone but not together are refused,
and a reservation that a crash left counts until garbage collection removes it.
"""

from __future__ import annotations

import logging
import secrets
from datetime import datetime
from types import TracebackType

from django.db import DatabaseError, transaction
from django.utils.translation import gettext_lazy as _

from console.accounts.models import Organization, Quota
from storage import selectors
from storage.errors import TooLarge, TooMany
from storage.models import Allocation
from storage.trees import ENTRY_BYTES, Usage

MAX_STEP_BYTES = 64 * 1024**2
"""A reservation doubles each time, by at most this. So a large upload needs few queries, and a small one holds little
quota that it does not use."""
MAX_STEP_ENTRIES = 1000
"""Largest number of entries that a reservation holds in advance, for the same reasons."""

log = logging.getLogger(__name__)


def lock(organization: Organization) -> int:
    """Lock the organization's quota until the transaction ends; return how many bytes it has left."""
    return lock_room(organization).size_bytes


def lock_room(organization: Organization) -> Usage:
    """Lock the organization's quota as `lock`; return how many bytes and entries it has left."""
    return selectors.room_left(Quota.objects.select_for_update().get(organization=organization))


def require_room_for(organization: Organization, kind: str) -> None:
    """Raise TooMany if the organization may have no more objects of a kind: `datasets`, `models` or `workspaces`.

    Call it with the quota locked, in the transaction that creates the object.
    """
    most: int = getattr(Quota.objects.get(organization=organization), f"max_{kind}")
    if selectors.counts(organization)[kind] >= most:
        raise TooMany(_TOO_MANY[kind] % {"most": most})


_TOO_MANY = {
    "datasets": _("Your organization may have at most %(most)d datasets. Delete one first."),
    "models": _("Your organization may have at most %(most)d models. Delete one first."),
    "workspaces": _("Your organization may have at most %(most)d workspaces. Delete one first."),
}


def count_results(
    *, organization: Organization, key: str, label: str, usage: Usage, kept_until: datetime | None
) -> None:
    """Set what a run's results count against the quota, under their key. An empty usage removes the row."""
    if not usage.entry_count:
        Allocation.objects.filter(key=key).delete()
        return
    Allocation.objects.update_or_create(
        key=key,
        defaults={
            "organization": organization,
            "kind": Allocation.Kinds.RUN,
            "label": label[:200],
            "size_bytes": usage.size_bytes,
            "entry_count": usage.entry_count,
            "kept_until": kept_until,
        },
    )


class Reservation:
    """Quota that an unfinished write holds; a context manager that releases it at the end.

    The first `spare_bytes` do not count.
    """

    def __init__(self, organization: Organization, *, label: str, spare_bytes: int = 0) -> None:
        self.key = secrets.token_hex(16)
        self._organization = organization
        self._label = label[:200]
        self._spare_bytes = spare_bytes
        self._counted = 0
        self._reserved = 0
        """Bytes, with ENTRY_BYTES for each entry."""
        self._counted_entries = 0
        self._reserved_entries = 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except DatabaseError:
            if error is None:
                raise
            log.exception("Reservation %s could not be released; garbage collection will.", self.key)

    def count(self, *, size_bytes: int = 0, entries: int = 0) -> None:
        """Reserve quota for what is about to be written. Raises TooLarge; then it must not be written."""
        self._counted += size_bytes + entries * ENTRY_BYTES
        self._counted_entries += entries
        missing = self._counted - self._spare_bytes - self._reserved
        if missing > 0 or self._counted_entries > self._reserved_entries:
            self._grow(max(0, missing))

    def left_bytes(self) -> int:
        """Return how many more bytes could be reserved now."""
        return selectors.quota_left(self._organization) + self._reserved + self._spare_bytes - self._counted

    def release(self) -> None:
        """Release everything. Call it in the transaction that counts the bytes elsewhere, so none count twice.

        `__exit__` calls it again, because a transaction that is rolled back restores the reservation.
        """
        if self._reserved:
            Allocation.objects.filter(key=self.key).delete()

    def _grow(self, missing: int) -> None:
        with transaction.atomic():
            left = lock_room(self._organization)
            if missing > left.size_bytes:
                raise TooLarge
            if self._counted_entries - self._reserved_entries > left.entry_count:
                raise TooLarge(_("Your organization has as many files as its quota allows. Delete some first."))
            step = max(missing, min(self._reserved, MAX_STEP_BYTES)) if missing else 0
            reserved = self._reserved + (step if step <= left.size_bytes else missing)
            # Entries to hold in advance: no more than the reserved bytes pay for, since each entry counts ENTRY_BYTES.
            advance_entries = min(reserved // ENTRY_BYTES, self._counted_entries + MAX_STEP_ENTRIES)
            entries = min(max(self._counted_entries, advance_entries), self._reserved_entries + left.entry_count)
            Allocation.objects.update_or_create(
                key=self.key,
                defaults={
                    "organization": self._organization,
                    "kind": Allocation.Kinds.UPLOAD,
                    "label": self._label,
                    "size_bytes": max(0, reserved - entries * ENTRY_BYTES),
                    "entry_count": entries,
                },
            )
        self._reserved, self._reserved_entries = reserved, entries

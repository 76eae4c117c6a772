"""Reserve quota for bytes and entries before they are written.

A reservation is an Allocation row, which is written while the quota's row is locked. So if there is room for only one
of two uploads, only one gets a reservation. A reservation that a crash left behind counts until the write is repeated,
or until garbage collection removes it.
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
"""A reservation that is too small doubles, but grows by at most this, unless more is missing. So a large upload needs
few queries, and a small upload reserves little quota that it does not use."""
MAX_STEP_ENTRIES = 1000
"""The most entries that a reservation holds in advance, for the same reasons."""
LABEL_LENGTH = 200
"""The length of an allocation's label in the database; longer ones are cut."""
_TOO_MANY = {
    "datasets": _("Your organization may have at most %(most)d datasets. Delete one first."),
    "models": _("Your organization may have at most %(most)d models. Delete one first."),
    "workspaces": _("Your organization may have at most %(most)d workspaces. Delete one first."),
}
"""The message of TooMany, by the kind of object."""

log = logging.getLogger(__name__)


def lock(organization: Organization) -> Quota:
    """Lock the organization's quota until the transaction ends, and return it."""
    return Quota.objects.select_for_update().get(organization=organization)


def lock_remaining(organization: Organization) -> Usage:
    """Lock the organization's quota as `lock`; return how many bytes and entries are left of it."""
    return selectors.remaining_quota(lock(organization))


def require_room_for(organization: Organization, kind: str) -> None:
    """Raise TooMany if the organization may not create another object of a kind: `datasets`, `models` or `workspaces`.

    Call it in the transaction that creates the object, after `lock`, so that concurrent calls wait.
    """
    max_count: int = getattr(Quota.objects.get(organization=organization), f"max_{kind}")
    if selectors.counts(organization)[kind] >= max_count:
        raise TooMany(_TOO_MANY[kind] % {"most": max_count})


def count_results(
    *, organization: Organization, key: str, label: str, usage: Usage, kept_until: datetime | None
) -> None:
    """Store in the Allocation `key` how much of the quota a run's results use. Remove it if they use nothing.

    `kept_until` is when the results are deleted; None before the run's job has ended.
    """
    if not usage.entry_count:
        Allocation.objects.filter(key=key).delete()
        return
    Allocation.objects.update_or_create(
        key=key,
        defaults={
            "organization": organization,
            "kind": Allocation.Kinds.RUN,
            "label": label[:LABEL_LENGTH],
            "size_bytes": usage.size_bytes,
            "entry_count": usage.entry_count,
            "kept_until": kept_until,
        },
    )


class Reservation:
    """Quota that an unfinished write holds: a context manager, and the SpaceCounter that counts what is written.

    It releases the quota at the end of the block. The first `spare_bytes` need no quota, because they replace bytes
    that count already. `label` is the name of its Allocation in lists.

    `key` names a write that is repeated after a crash, and that only one process does at a time. The repetition
    releases what the process that died had reserved.
    """

    def __init__(self, organization: Organization, *, label: str, spare_bytes: int = 0, key: str = "") -> None:
        self.key = key or secrets.token_hex(16)
        self._is_repeatable = bool(key)
        self._organization = organization
        self._label = label[:LABEL_LENGTH]
        self._spare_bytes = spare_bytes
        self._counted_bytes = 0
        """What `count` has counted, with ENTRY_BYTES for each entry."""
        self._reserved_bytes = 0
        """What the Allocation holds, also with ENTRY_BYTES for each entry."""
        self._counted_entries = 0
        self._reserved_entries = 0

    def __enter__(self) -> Reservation:
        if self._is_repeatable:
            Allocation.objects.filter(key=self.key).delete()
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
        """Reserve quota for what is about to be written. Raises TooLarge if there is none; then do not write."""
        self._counted_bytes += size_bytes + entries * ENTRY_BYTES
        self._counted_entries += entries
        missing_bytes = self._counted_bytes - self._spare_bytes - self._reserved_bytes
        if missing_bytes > 0 or self._counted_entries > self._reserved_entries:
            self._grow(max(0, missing_bytes))

    def left_bytes(self) -> int:
        """Return how many more bytes `count` would accept now."""
        return selectors.quota_left(self._organization) + self._reserved_bytes + self._spare_bytes - self._counted_bytes

    def release(self) -> None:
        """Release the quota. Call it in the transaction that counts the bytes elsewhere, so that none count twice.

        `__exit__` calls it again, because the reservation is back if that transaction was rolled back.
        """
        if self._reserved_entries or self._reserved_bytes:
            Allocation.objects.filter(key=self.key).delete()

    def _grow(self, missing_bytes: int) -> None:
        """Enlarge the reservation by at least `missing_bytes`, and to at least the counted entries. Raises TooLarge."""
        with transaction.atomic():
            remaining = lock_remaining(self._organization)
            if missing_bytes > remaining.size_bytes:
                raise TooLarge
            if self._counted_entries - self._reserved_entries > remaining.entry_count:
                raise TooLarge(_("Your organization has as many files as its quota allows. Delete some first."))
            # Double the reservation, as MAX_STEP_BYTES explains. Near the end of the quota, take only what is missing.
            step = max(missing_bytes, min(self._reserved_bytes, MAX_STEP_BYTES)) if missing_bytes else 0
            reserved_bytes = self._reserved_bytes + (step if step <= remaining.size_bytes else missing_bytes)
            # Entries are held in advance only as far as the reserved bytes suffice: each entry counts ENTRY_BYTES.
            advance_entries = min(reserved_bytes // ENTRY_BYTES, self._counted_entries + MAX_STEP_ENTRIES)
            entries = min(max(self._counted_entries, advance_entries), self._reserved_entries + remaining.entry_count)
            Allocation.objects.update_or_create(
                key=self.key,
                defaults={
                    "organization": self._organization,
                    "kind": Allocation.Kinds.UPLOAD,
                    "label": self._label,
                    # Not below 0: with spare bytes, `reserved_bytes` may be less than what the entries count.
                    "size_bytes": max(0, reserved_bytes - entries * ENTRY_BYTES),
                    "entry_count": entries,
                },
            )
        self._reserved_bytes, self._reserved_entries = reserved_bytes, entries

"""The sandbox's storage: records in memory, and a journal on disk from which a restart restores them.

The changes of each request are one line of the journal, written before the response. A line that a crash truncated is
ignored: its request was never answered, so the client repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

StripeObject = dict[str, Any]
"""A resource of Stripe's API, such as a charge, with fields of our own whose names begin with an underscore. The store
also keeps records that are not resources: idempotency keys (kind `key`) and waiting webhooks (kind `delivery`)."""


class Store:
    """Records by kind and id, in creation order. Not thread-safe: the caller holds a lock.

    `path` is the journal. Without it, everything is lost when the process ends.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._objects: dict[str, dict[str, StripeObject]] = {}
        self._changed: dict[tuple[str, str], None] = {}  # an ordered set of (kind, id)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._load_and_compact(path)

    def get(self, kind: str, object_id: str) -> StripeObject | None:
        """Return the stored object itself, not a copy, or None. Call `put` after changing it, for the journal."""
        return self._objects.get(kind, {}).get(object_id)

    def put(self, kind: str, object_id: str, fields: StripeObject) -> StripeObject:
        """Store a new or changed object."""
        self._objects.setdefault(kind, {})[object_id] = fields
        self._changed[kind, object_id] = None
        return fields

    def remove(self, kind: str, object_id: str) -> None:
        """Delete an object if it exists."""
        if self._objects.get(kind, {}).pop(object_id, None) is not None:
            self._changed[kind, object_id] = None

    def all(self, kind: str, *, newest_first: bool = False) -> Iterator[StripeObject]:
        """Iterate over a copy of the objects of a kind, so the caller may add and remove. Oldest first by default."""
        objects = self._objects.get(kind, {})
        return iter([objects[key] for key in (reversed(objects) if newest_first else objects)])

    def count(self, kind: str) -> int:
        """Return the number of objects of a kind."""
        return len(self._objects.get(kind, {}))

    def newest(self, kind: str, count: int) -> list[StripeObject]:
        """Return the newest objects of a kind, newest first."""
        objects = self._objects.get(kind, {})
        return [objects[key] for key in islice(reversed(objects), count)]

    def commit(self) -> None:
        """Append the changes since the last commit to the journal as one line.

        The line is a list of [kind, id, fields]. The fields of a removed record are null.
        """
        if self._changed and self._path is not None:
            changes = [[kind, key, self.get(kind, key)] for kind, key in self._changed]
            with self._path.open("a") as journal:
                journal.write(json.dumps(changes) + "\n")
        self._changed.clear()

    def _load_and_compact(self, path: Path) -> None:
        """Load the journal, then replace it by one line with the current records, so that it does not grow forever."""
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                changes = json.loads(line)
            except ValueError:
                continue  # truncated by a crash
            for kind, key, fields in changes:
                if fields is None:
                    self._objects.get(kind, {}).pop(key, None)
                else:
                    self._objects.setdefault(kind, {})[key] = fields
        snapshot = [[kind, key, fields] for kind, objects in self._objects.items() for key, fields in objects.items()]
        new_path = path.with_suffix(".new")
        new_path.touch(mode=0o600)
        new_path.write_text(json.dumps(snapshot) + "\n" if snapshot else "")
        new_path.rename(path)

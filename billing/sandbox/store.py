"""The sandbox's storage: objects in memory, and a journal on disk that a restart reads.

Each request's changes are one line of the journal, written before the answer. A line truncated by a crash is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

Object = dict[str, Any]


class Store:
    """Objects by kind and id, in creation order. Not thread-safe: the owner holds a lock."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._objects: dict[str, dict[str, Object]] = {}
        self._changed: dict[tuple[str, str], None] = {}  # an ordered set of (kind, id)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._read(path)

    def get(self, kind: str, object_id: str) -> Object | None:
        """Return the stored object itself. After changing it, call `put`."""
        return self._objects.get(kind, {}).get(object_id)

    def put(self, kind: str, object_id: str, fields: Object) -> Object:
        """Store a new or changed object."""
        self._objects.setdefault(kind, {})[object_id] = fields
        self._changed[kind, object_id] = None
        return fields

    def remove(self, kind: str, object_id: str) -> None:
        """Delete an object if it exists."""
        if self._objects.get(kind, {}).pop(object_id, None) is not None:
            self._changed[kind, object_id] = None

    def all(self, kind: str, *, newest_first: bool = False) -> Iterator[Object]:
        """Return all objects of a kind."""
        objects = self._objects.get(kind, {})
        return iter([objects[key] for key in (reversed(objects) if newest_first else objects)])

    def count(self, kind: str) -> int:
        """Return the number of objects of a kind."""
        return len(self._objects.get(kind, {}))

    def newest(self, kind: str, count: int) -> list[Object]:
        """Return the newest objects of a kind, newest first."""
        objects = self._objects.get(kind, {})
        return [objects[key] for key in islice(reversed(objects), count)]

    def commit(self) -> None:
        """Write the changes since the last commit as one journal line."""
        if self._changed and self._path is not None:
            changes = [[kind, key, self.get(kind, key)] for kind, key in self._changed]
            with self._path.open("a") as journal:
                journal.write(json.dumps(changes) + "\n")
        self._changed.clear()

    def _read(self, path: Path) -> None:
        """Load the journal and rewrite it without outdated lines."""
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                changes = json.loads(line)
            except ValueError:
                continue  # truncated by a crash before the request was answered
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

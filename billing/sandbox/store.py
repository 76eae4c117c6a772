"""Where the sandbox keeps its objects: in memory, and in a journal that a restart reads again.

The one rule: what one request changed is one line of the journal, written before the request is answered; a line that
was cut off by a crash never happened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

Object = dict[str, Any]


class Store:
    """Objects by kind and id, in the order of making. Not thread-safe: its owner holds a lock."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._objects: dict[str, dict[str, Object]] = {}
        self._changed: dict[tuple[str, str], None] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._read(path)

    def get(self, kind: str, object_id: str) -> Object | None:
        """The object itself: change it, then `put` it."""
        return self._objects.get(kind, {}).get(object_id)

    def put(self, kind: str, object_id: str, thing: Object) -> Object:
        """Keep an object, new or changed."""
        self._objects.setdefault(kind, {})[object_id] = thing
        self._changed[kind, object_id] = None
        return thing

    def remove(self, kind: str, object_id: str) -> None:
        """Forget an object, if there is one."""
        if self._objects.get(kind, {}).pop(object_id, None) is not None:
            self._changed[kind, object_id] = None

    def all(self, kind: str, *, newest_first: bool = False) -> Iterator[Object]:
        """Every object of a kind."""
        things = self._objects.get(kind, {})
        return iter([things[key] for key in (reversed(things) if newest_first else things)])

    def count(self, kind: str) -> int:
        """How many there are of a kind."""
        return len(self._objects.get(kind, {}))

    def newest(self, kind: str, count: int) -> list[Object]:
        """The last ones made of a kind, newest first."""
        things = self._objects.get(kind, {})
        return [things[key] for key in islice(reversed(things), count)]

    def commit(self) -> None:
        """Write what changed since the last commit as one line."""
        if self._changed and self._path is not None:
            changes = [[kind, key, self.get(kind, key)] for kind, key in self._changed]
            with self._path.open("a") as journal:
                journal.write(json.dumps(changes) + "\n")
        self._changed.clear()

    def _read(self, path: Path) -> None:
        """Take the journal in, and write it anew without what is outdated."""
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                changes = json.loads(line)
            except ValueError:
                continue  # cut off by a crash: nobody was told that it happened
            for kind, key, thing in changes:
                if thing is None:
                    self._objects.get(kind, {}).pop(key, None)
                else:
                    self._objects.setdefault(kind, {})[key] = thing
        whole = [[kind, key, thing] for kind, things in self._objects.items() for key, thing in things.items()]
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_text(json.dumps(whole) + "\n" if whole else "")
        fresh.rename(path)

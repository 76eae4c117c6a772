"""Find files and folders of a workspace by name, within bounds of time and entries."""

from __future__ import annotations

import enum
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from storage import files
from storage.errors import StorageError
from storage.paths import lstat_or_none, open_folder, split_path

MAX_MATCHES = 200
"""Matches that one search returns. For others, people enter a longer text."""
MAX_ENTRIES = 100_000
"""Entries that one search reads. The limit also bounds the memory for folders still to be searched."""
MAX_SECONDS = 5.0
"""How long one search may take: people wait for it, and it occupies a worker."""
MAX_DEPTH = 64
"""Folders nested deeper are not searched, as no archive may unpack deeper ones."""


class StopReason(enum.StrEnum):
    """Why a search ended before it had seen every entry."""

    MATCHES = "matches"
    ENTRIES = "entries"
    SECONDS = "seconds"
    DEPTH = "depth"


@dataclass(frozen=True)
class Match:
    """An entry that was found, with its path below the root."""

    path: str
    entry: files.Entry


@dataclass(frozen=True)
class SearchResult:
    """The matches of a search, nearest folders first. `stopped` is None if there are no more."""

    matches: tuple[Match, ...]
    stopped: StopReason | None


def find(
    *, root: Path, text: str, path: str = "", max_entries: int = MAX_ENTRIES, max_seconds: float = MAX_SECONDS
) -> SearchResult:
    """Find entries below `path` whose names contain `text`, in any case. Raises FileMissing, UnsafePath, WrongKind."""
    base = split_path(path)
    with open_folder(root=root, parts=base):  # raises if there is no such folder
        pass
    search = _Search(root, text.casefold(), max_entries, time.monotonic() + max_seconds)
    matches = tuple(search.run(base))
    return SearchResult(matches, search.stopped)


class _Search:
    def __init__(self, root: Path, text: str, max_entries: int, deadline: float) -> None:
        self.stopped: StopReason | None = None
        self._root = root
        self._text = text
        self._entries_left = max_entries
        self._deadline = deadline

    def run(self, base: tuple[str, ...]) -> Iterator[Match]:
        """Yield the matches, folder by folder; set `stopped` if the search ends early."""
        pending, matches_left = deque([base]), MAX_MATCHES
        while pending:
            for match in self._search_folder(pending.popleft(), pending, len(base)):
                if not matches_left:
                    self.stopped = StopReason.MATCHES
                    return
                yield match
                matches_left -= 1
            if self.stopped in {StopReason.ENTRIES, StopReason.SECONDS}:
                return

    def _search_folder(
        self, parts: tuple[str, ...], pending: deque[tuple[str, ...]], base_depth: int
    ) -> Iterator[Match]:
        """Yield one folder's matches and add its subfolders to `pending`."""
        try:
            with open_folder(root=self._root, parts=parts) as folder, os.scandir(folder) as scanned:
                for each in scanned:
                    if time.monotonic() > self._deadline:
                        self.stopped = StopReason.SECONDS
                        return
                    if not self._entries_left:
                        self.stopped = StopReason.ENTRIES
                        return
                    self._entries_left -= 1
                    if each.is_dir(follow_symlinks=False):
                        if len(parts) - base_depth < MAX_DEPTH:
                            pending.append((*parts, each.name))
                        else:
                            self.stopped = StopReason.DEPTH
                    if self._text in each.name.casefold() and (status := lstat_or_none(folder, each.name)):
                        entry = files.entry_of(each.name, status)
                        yield Match("/".join((*map(files.display_name, parts), entry.name)), entry)
        except (StorageError, OSError):
            return  # removed, replaced or made unreadable since its parent was read

"""Find files and folders of a workspace by name, within limits of time and of entries read."""

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
"""How many matches one search returns. With more, people enter a longer text."""
MAX_ENTRIES = 100_000
"""How many entries one search reads. This also limits the memory for the list of folders still to be searched."""
MAX_SECONDS = 5.0
"""How long one search may take. People wait for it, and it holds a thread that serves pages."""
MAX_DEPTH = 64
"""Folders nested deeper are not searched. Archives may not have deeper folders either."""


class StopReason(enum.StrEnum):
    """Which limit kept a search from reading all entries."""

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
    """The matches of a search, those in higher folders first. `stopped` is None if the search read all entries."""

    matches: tuple[Match, ...]
    stopped: StopReason | None


def find(
    *, root: Path, text: str, path: str = "", max_entries: int = MAX_ENTRIES, max_seconds: float = MAX_SECONDS
) -> SearchResult:
    """Find entries below `path` whose names contain `text`; upper and lower case are the same.

    Raises FileMissing, UnsafePath, WrongKind.
    """
    base = split_path(path)
    with open_folder(root=root, parts=base):  # raises if there is no such folder; `_search_folder` ignores errors
        pass
    search = _Search(root, text.casefold(), max_entries, time.monotonic() + max_seconds)
    matches = tuple(search.run(base))
    return SearchResult(matches, search.stopped)


class _Search:
    """One search, breadth first. `deadline` is on the monotonic clock."""

    def __init__(self, root: Path, text: str, max_entries: int, deadline: float) -> None:
        self.stopped: StopReason | None = None
        self._root = root
        self._text = text
        self._entries_left = max_entries
        self._deadline = deadline

    def run(self, base: tuple[str, ...]) -> Iterator[Match]:
        """Yield the matches, folder by folder; set `stopped` if a limit leaves entries out."""
        pending, matches_left = deque([base]), MAX_MATCHES
        while pending:
            for match in self._search_folder(pending.popleft(), pending, len(base)):
                if not matches_left:
                    self.stopped = StopReason.MATCHES
                    return
                yield match
                matches_left -= 1
            if self.stopped in {StopReason.ENTRIES, StopReason.SECONDS}:  # DEPTH leaves out only the deepest folders
                return

    def _search_folder(
        self, parts: tuple[str, ...], pending: deque[tuple[str, ...]], base_depth: int
    ) -> Iterator[Match]:
        """Yield one folder's matches and add its subfolders to `pending`."""
        try:
            with open_folder(root=self._root, parts=parts) as folder_fd, os.scandir(folder_fd) as scanned:
                for scanned_entry in scanned:
                    if time.monotonic() > self._deadline:
                        self.stopped = StopReason.SECONDS
                        return
                    if not self._entries_left:
                        self.stopped = StopReason.ENTRIES
                        return
                    self._entries_left -= 1
                    name = scanned_entry.name
                    if scanned_entry.is_dir(follow_symlinks=False):
                        if len(parts) - base_depth < MAX_DEPTH:
                            pending.append((*parts, name))
                        else:
                            self.stopped = StopReason.DEPTH
                    if self._text in name.casefold() and (status := lstat_or_none(folder_fd, name)):
                        entry = files.entry_of(name, status)
                        yield Match("/".join((*map(files.display_name, parts), entry.name)), entry)
        except (StorageError, OSError):
            return  # the folder was removed or replaced since its parent was read, or cannot be read

"""How much a run has written, and how much the disk under it still takes.

The one rule: folders that hostile code writes to are walked by descriptors, never following a link, in small steps, so
that no tree of files, however large, keeps a supervisor from its clock. Standard library only.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

DEEPEST = 200
"""Folders nested deeper than this cannot be measured; a run that makes them is over its limit."""
RESERVE_BYTES = 256 << 20
"""Below this much free space the disk counts as full."""
_ENTRY_BYTES = 512
_STEP_ENTRIES = 128
_BLOCK = 512


class _Entries(Protocol):
    """What os.scandir gives."""

    def __next__(self) -> os.DirEntry[str]: ...

    def __iter__(self) -> Iterator[os.DirEntry[str]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Measured:
    """What lies in a few folders: bytes on disk, the newest change of a regular file (Unix seconds; 0: no file)."""

    bytes: int
    newest: float
    too_deep: bool = False


class Survey:
    """One walk over some folders, in steps. `result` is there once `step` has returned True."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._bytes = 0
        self._newest = 0.0
        self._too_deep = False
        self._walk = self._over(folders)
        self.result: Measured | None = None

    def step(self, seconds: float) -> bool:
        """Go on for about so long; True when the walk is done."""
        give_up_at = time.monotonic() + seconds
        for _pause in self._walk:
            if time.monotonic() >= give_up_at:
                return False
        if self.result is None:
            self.result = Measured(self._bytes, self._newest, self._too_deep)
        return True

    def close(self) -> None:
        """Let go of what the walk holds open."""
        self._walk.close()

    def _over(self, folders: Sequence[Path]) -> Generator[None, None, None]:
        count = 0
        for folder in folders:
            for state in _entries(folder):
                if state is None:
                    self._too_deep = True
                    continue
                self._bytes += state.st_blocks * _BLOCK + _ENTRY_BYTES
                if stat.S_ISREG(state.st_mode):
                    self._newest = max(self._newest, state.st_mtime)
                count += 1
                if count % _STEP_ENTRIES == 0:
                    yield


def measure(folders: Sequence[Path], seconds: float) -> Measured | None:
    """All of it at once; None where that takes too long."""
    survey = Survey(folders)
    survey.step(seconds)
    survey.close()
    return survey.result


def free_bytes(folder: Path) -> int | None:
    """What the disk under the folder still takes from us; None where it does not say."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize


def _entries(folder: Path) -> Iterator[os.stat_result | None]:
    """Everything below the folder; None stands for what is too deep."""
    open_folders: list[tuple[int, _Entries]] = []
    try:
        _descend(open_folders, str(folder), None)
        while open_folders:
            descriptor, entries = open_folders[-1]
            entry = next(entries, None)
            if entry is None:
                entries.close()
                os.close(open_folders.pop()[0])
                continue
            try:
                state = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            yield state
            if stat.S_ISDIR(state.st_mode):
                if len(open_folders) >= DEEPEST:
                    yield None
                else:
                    _descend(open_folders, entry.name, descriptor)
    finally:
        for descriptor, entries in open_folders:
            entries.close()
            os.close(descriptor)


def _descend(open_folders: list[tuple[int, _Entries]], name: str, parent: int | None) -> None:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError:
        return
    try:
        open_folders.append((descriptor, os.scandir(descriptor)))
    except OSError:
        os.close(descriptor)

"""How much a run has written, and how much the disk under it still takes.

The one rule: folders that hostile code writes to are walked by descriptors, never following a link, in small steps, so
that no tree of files, however large, keeps a supervisor from its clock.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any, Callable, Dict, Generator, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .record import Record, Verdict

DEEPEST = 200
"""Folders nested deeper than this cannot be measured; a run that makes them is over its limit."""
RESERVE_BYTES = 256 << 20
"""Below this much free space the disk counts as full."""
_ENTRY_BYTES = 512
_STEP_ENTRIES = 128
_STEP_SECONDS = 0.005
_SURVEY_SECONDS = 2.0
_SURVEY_SHARE = 50
"""A walk over the run's files is followed by a pause this many times as long as it worked."""
_BLOCK = 512
_LAST_SECONDS = 10.0
_MARGIN = 0.9
"""A run that has come so near to what it may write has filled the disk itself, if it is full."""


class Measured(NamedTuple):
    """What lies in a few folders: bytes on disk, the newest change of a regular file (Unix seconds; 0: no file)."""

    bytes: int
    newest: float
    too_deep: bool = False


class _Walk:
    """A look at what lies on a disk, in steps. `result` is there once `step` has returned True."""

    def __init__(self, walk: Generator[None, None, None]) -> None:
        self._bytes = 0
        self._newest = 0.0
        self._too_deep = False
        self._walk = walk
        self.result: Optional[Measured] = None

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


class Survey(_Walk):
    """One walk over some folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        super().__init__(self._over(folders))

    def _over(self, folders: Sequence[Path]) -> Generator[None, None, None]:
        count = 0
        for folder in folders:
            each = entry_bytes(folder)
            for state in _entries(folder):
                if state is None:
                    self._too_deep = True
                    continue
                self._bytes += state.st_blocks * _BLOCK + each
                if stat.S_ISREG(state.st_mode):
                    self._newest = max(self._newest, state.st_mtime)
                count += 1
                if count % _STEP_ENTRIES == 0:
                    yield


class Gauge:
    """What the run has added to its folders, measured again and again; node 0 does that for all.

    Folders go by `run`, `checkpoints` and perhaps `workspace`; `run` was empty at the run's begin. `room_bytes` is what
    the disk had room for then: a run that takes all of that is over its limit as well. `held` gives the descriptors, in
    /proc, of files that may have no name any more. `again` False: nothing is measured but the begin and the end.
    """

    def __init__(
        self,
        limit_bytes: int,
        folders: Mapping[str, str],
        *,
        room_bytes: int = 0,
        held: Optional[Callable[[], Iterator[str]]] = None,
        again: bool = True,
    ) -> None:
        self._limit = min(limit_bytes, room_bytes) if room_bytes > 0 else limit_bytes
        self._held = held
        self._again = again
        self._folders = {name: Path(folder) for name, folder in folders.items()}
        self._surveys: Dict[str, _Walk] = {}
        self._before: Dict[str, int] = {"run": 0}
        self._added: Dict[str, int] = {}
        self._worked = 0.0
        self._next_at = 0.0

    @property
    def surveying(self) -> bool:
        """Whether `look` is in the middle of measuring."""
        return bool(self._surveys)

    def look(self, now: float, record: Record) -> Optional[Verdict]:
        """Go on measuring, for a moment; what is wrong, if anything. The newest checkpoint goes to the record."""
        if not self._surveys:
            if now < self._next_at:
                return None
            if self._before_is_known and not self._again:
                return None
            self._worked = 0.0
            self._surveys = {name: Survey([folder]) for name, folder in self._folders.items()}
            if self._held is not None:
                self._surveys["unlinked"] = Unlinked(self._held(), list(self._folders.values()))
        begun = time.monotonic()
        done = True
        for survey in self._surveys.values():
            done &= survey.step(_STEP_SECONDS)
        self._worked += time.monotonic() - begun
        if not done:
            return None
        verdict = self._take_in(record)
        self._surveys = {}
        self._next_at = now + max(_SURVEY_SECONDS, self._worked * _SURVEY_SHARE)
        return verdict

    @property
    def _before_is_known(self) -> bool:
        return set(self._folders) <= set(self._before)

    def has_filled_the_disk(self) -> bool:
        """Of a run that has ended, on a disk that is full: whether it took all that it may. In doubt it did."""
        if not self._before_is_known:
            return True
        added = 0
        for name, folder in self._folders.items():
            result = measure([folder], _LAST_SECONDS)
            if result is None or result.too_deep:
                return True
            added += result.bytes - self._before[name]
        return added >= self._limit * _MARGIN

    def finish(self, record: Record) -> None:
        """A last word about the checkpoints: the next attempt begins with them."""
        for survey in self._surveys.values():
            survey.close()
        last = measure([self._folders["checkpoints"]], 1.0)
        if last is not None:
            record.checkpoint(last.newest)

    def _take_in(self, record: Record) -> Optional[Verdict]:
        too_deep = False
        for name, survey in self._surveys.items():
            result = survey.result
            if result is None:
                continue
            before = self._before.setdefault(name, 0 if name == "unlinked" else result.bytes)
            self._added[name] = result.bytes - before
            too_deep |= result.too_deep
            if name == "checkpoints":
                record.checkpoint(result.newest)
        added = max(0, sum(self._added.values()))
        if added <= self._limit and not too_deep:
            return None
        limit = self._limit >> 20
        if too_deep:
            sentence = "There are folders nested deeper than {}, which cannot be measured.".format(DEEPEST)
        else:
            sentence = "The run wrote {} MiB to its folders, more than the {} MiB it may.".format(added >> 20, limit)
        return Verdict("disk_full", "disk_full", sentence, data={"used_mib": added >> 20, "limit_mib": limit})


class Unlinked(_Walk):
    """What open files take that have no name any more: no walk over folders finds those."""

    def __init__(self, paths: Iterator[str], folders: Sequence[Path]) -> None:
        super().__init__(self._over(paths))
        self._devices = {state.st_dev for state in map(_state, map(str, folders)) if state is not None}
        self._seen: Set[Tuple[int, int]] = set()

    def _over(self, paths: Iterator[str]) -> Generator[None, None, None]:
        for count, path in enumerate(paths, 1):
            state = _state(path)
            if state is not None and not state.st_nlink and stat.S_ISREG(state.st_mode):
                file = (state.st_dev, state.st_ino)
                if state.st_dev in self._devices and file not in self._seen:
                    self._seen.add(file)
                    self._bytes += state.st_blocks * _BLOCK
            if count % _STEP_ENTRIES == 0:
                yield


def _state(path: str) -> Optional[os.stat_result]:
    try:
        return os.stat(path)
    except OSError:
        return None


def entry_bytes(folder: Path) -> int:
    """What a name costs: where a disk has only so many, its part of the disk, so that nobody takes all of them."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return _ENTRY_BYTES
    return max(_ENTRY_BYTES, state.f_blocks * state.f_frsize // state.f_files) if state.f_files else _ENTRY_BYTES


def measure(folders: Sequence[Path], seconds: float) -> Optional[Measured]:
    """All of it at once; None where that takes too long."""
    survey = Survey(folders)
    survey.step(seconds)
    survey.close()
    return survey.result


def free_bytes(folder: Path) -> Optional[int]:
    """What the disk under the folder still takes from us; None where it does not say."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize


def _entries(folder: Path) -> Iterator[Optional[os.stat_result]]:
    """Everything below the folder; None stands for what is too deep."""
    open_folders: List[Tuple[int, Any]] = []
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


def _descend(open_folders: List[Tuple[int, Any]], name: str, parent: Optional[int]) -> None:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError:
        return
    try:
        open_folders.append((descriptor, os.scandir(descriptor)))
    except OSError:
        os.close(descriptor)

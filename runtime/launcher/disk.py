"""Measure how much a run has written, and how much space its disk has.

Hostile code may write to these folders. A measurement therefore opens each folder relative to its parent's descriptor
and follows no links. The code runs as the same user and may have removed the read permission of its own folders. A
measurement restores it, because files below them use disk too. Measuring proceeds in small steps, so that even a huge
tree of files does not delay a supervisor's timers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from pathlib import Path
from typing import Any, Callable, Dict, Generator, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .record import Record, Verdict

MAX_DEPTH = 100
"""Maximum depth of folders. Measuring keeps two descriptors open per level, in up to four folders at once. A process
may usually open 1,024. A run with deeper folders is ended as if it had exceeded its limit."""
RESERVE_BYTES = 256 << 20
"""A disk with less free space than this counts as full. The reserve leaves room for records and logs of other runs."""
_MIN_ENTRY_BYTES = 4096
"""How much each entry counts at least, in addition to its data, since its inode uses disk too. The storage quota counts
the same."""
_ENTRIES_PER_STEP = 128
"""Entries that are read between two checks of the clock. They take far less than `_STEP_SECONDS`."""
_STEP_SECONDS = 0.005
"""How long one step of a measurement may take. The supervisor does nothing else meanwhile."""
_FIRST_STEP_SECONDS = 0.05
"""How long one step may take until the initial sizes of all folders are known. It is longer, because what the run
writes to a folder meanwhile may become part of its initial size. Each folder's measurement takes such a step, and the
supervisor's timers are late by the sum."""
_MIN_PAUSE_SECONDS = 2.0
"""Minimum pause between two measurements. Only a run that writes more than 128 MiB per second fills `RESERVE_BYTES` in
this time."""
_PAUSE_FACTOR = 50
"""Minimum pause after a measurement, in multiples of its duration: measuring uses 2 % of a core at most."""
_URGENT_PAUSE_FACTOR = 5
"""The minimum pause, in the same unit, while a measurement is urgent: a disk has lost more space than the run may still
add, and perhaps the run has used that space. A step then takes `_FIRST_STEP_SECONDS`. So folders with many files are
measured within seconds, with at most a fifth of a core."""
_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""
_INITIAL_SECONDS = 10.0
"""How long measuring one folder may take before the run, whose start waits for it. Most take milliseconds; on a slow
network file system this is enough for tens of thousands of files. All four folders must be measured before the
launchers of the other nodes give up. If a folder takes longer and the disk is full at the end, the run counts as having
filled it."""
_FINAL_SECONDS = 10.0
"""How long measuring one folder may take after the run. If it takes longer, the run counts as having filled the disk.
"""
_FILLED_SHARE = 0.9
"""If the disk is full, a run that used at least this share of its limit counts as having filled it. The share is below
1, because others write to the same disk."""
_DELETED_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
"""The errors of an entry that is no more where it was listed."""
_DELETED_FILES = "unlinked"
"""The name of the measurement of deleted files in `DiskLimit`, whose other measurements have the folders' names."""


class FolderUsage(NamedTuple):
    """The contents of some folders. `newest_mtime` is the latest modification of a file (Unix seconds; 0: no file).

    `bytes` are on disk. `is_incomplete`: some of this user's folders are deeper than `MAX_DEPTH` or cannot be read, so
    the other values are too small.
    """

    bytes: int
    newest_mtime: float
    is_incomplete: bool = False


class _Measurement:
    """A measurement in steps. Once `step` has returned True, `usage` is set, or `error` if the disk cannot be read.

    `steps` is a generator that adds to the sums and yields wherever it may pause.
    """

    def __init__(self, steps: Generator[None, None, None]) -> None:
        self._bytes = 0
        self._newest_mtime = 0.0
        self._is_incomplete = False
        self._steps = steps
        self.usage: Optional[FolderUsage] = None
        self.error: Optional[OSError] = None

    def step(self, seconds: float) -> bool:
        """Continue for about `seconds`; return whether the measurement is complete."""
        pause_at = time.monotonic() + seconds
        try:
            for _pause in self._steps:
                if time.monotonic() >= pause_at:
                    return False
        except OSError as error:  # no fault of the run: such as EIO of the disk, or EMFILE of this process
            self.error = error
        if self.usage is None and self.error is None:
            self.usage = FolderUsage(self._bytes, self._newest_mtime, self._is_incomplete)
        return True

    def close(self) -> None:
        """Close the descriptors that the measurement has open."""
        self._steps.close()


class FolderMeasurement(_Measurement):
    """The size of everything below some folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        super().__init__(self._measure_in_steps(folders))

    def _measure_in_steps(self, folders: Sequence[Path]) -> Generator[None, None, None]:
        """Add up everything below the folders; yield wherever the measurement may pause."""
        count = 0
        for folder in folders:
            bytes_per_entry = entry_bytes(folder)
            for status in _walk_entries(folder):
                if status is None:
                    self._is_incomplete = True
                    continue
                self._bytes += status.st_blocks * _BLOCK_BYTES + bytes_per_entry
                if stat.S_ISREG(status.st_mode):
                    self._newest_mtime = max(self._newest_mtime, status.st_mtime)
                count += 1
                if count % _ENTRIES_PER_STEP == 0:
                    yield


class DiskLimit:
    """The limit of what the run may add to its folders. Node 0 measures repeatedly, for all nodes.

    `folders` are named `run` (empty at the start), `checkpoints`, `outputs`, and `workspace` if the run may write to
    it. `available_bytes` is the disk's free space before the run, less RESERVE_BYTES; 0 or less: unknown, or the disk
    is full. The limit is `limit_bytes`, or a positive `available_bytes` that is smaller. A full disk does not lower it:
    others filled that disk, and the run must not pay for it. `open_files` yields the run's open files as paths like
    /proc/<pid>/fd/<number>; some may have been deleted. Without `repeats`, as on all nodes but node 0, the folders are
    measured only before and after the run. `by_quota`: the limit is the rest of the organization's storage quota. The
    first `platform_bytes` of `run` do not count: they are for the platform's own files, if it writes such files there.

    Call `measure_folders` before customer code can write, since it sets the sizes to which the run adds.
    """

    def __init__(
        self,
        limit_bytes: int,
        folders: Mapping[str, str],
        *,
        available_bytes: int = 0,
        open_files: Optional[Callable[[], Iterator[str]]] = None,
        repeats: bool = True,
        by_quota: bool = False,
        platform_bytes: int = 0,
    ) -> None:
        self._limit_bytes = min(limit_bytes, available_bytes) if available_bytes > 0 else limit_bytes
        self._open_files = open_files
        self._repeats = repeats
        self._by_quota = by_quota
        self._folders = {name: Path(folder) for name, folder in folders.items()}
        # By the folder's name; empty between two measurements.
        self._measurements: Dict[str, _Measurement] = {}
        # Each folder's size at its first measurement. `run` is empty then, and only the platform's files do not count.
        self._initial_bytes: Dict[str, int] = {"run": platform_bytes}
        self._has_exact_initial_sizes = False  # whether all first measurements were complete before the run
        self._added_bytes: Dict[str, int] = {}  # each folder's growth from its first measurement to its last one
        self._measuring_seconds = 0.0  # how long the current measurement has taken so far
        self._next_measurement_at = 0.0  # monotonic
        # The pauses after the last measurement: the usual one, and the shorter one while `_is_urgent`.
        self._pause_seconds = 0.0
        self._urgent_pause_seconds = 0.0
        # By folder: the free bytes of its disk when the current measurement began, and when the last complete one did.
        self._free_at_current_start: Dict[str, Optional[int]] = {}
        self._free_at_last_start: Dict[str, Optional[int]] = {}

    @property
    def is_measuring(self) -> bool:
        """Whether a measurement is under way."""
        return bool(self._measurements)

    def measure_folders(self) -> None:
        """Measure the folders, before customer code can write to them. Takes about `_INITIAL_SECONDS` each at most."""
        started_at = time.monotonic()
        for name, folder in self._folders.items():
            if name not in self._initial_bytes:
                measurement = FolderMeasurement([folder])
                if measurement.step(_INITIAL_SECONDS) and measurement.usage is not None:
                    self._initial_bytes[name] = measurement.usage.bytes
                elif self._repeats:
                    self._measurements[name] = measurement  # `check` goes on with it
                else:
                    measurement.close()
        self._has_exact_initial_sizes = set(self._folders) <= set(self._initial_bytes)
        self._free_at_current_start = self._measure_free_bytes()
        if self._has_exact_initial_sizes:
            # This was a complete measurement, so `_is_urgent` can compare with it.
            self._pause_seconds = (time.monotonic() - started_at) * _PAUSE_FACTOR
            self._free_at_last_start = self._free_at_current_start

    def check(self, now: float, record: Record) -> Optional[Verdict]:
        """Measure for one step at the monotonic time `now`; return a verdict if the run is over its limit, else None.

        This call also records the time of the newest checkpoint.
        """
        # Without `repeats`, only `has_filled_the_disk` needs measurements, and it takes the last one itself.
        if not self._repeats:
            return None
        is_urgent = self._is_urgent()
        if not self._measurements:
            # The next measurement was planned after the usual pause; while it is urgent, the shorter pause is enough.
            early_seconds = self._pause_seconds - self._urgent_pause_seconds if is_urgent else 0.0
            if now < self._next_measurement_at - early_seconds:
                return None
            self._measuring_seconds = 0.0
            self._free_at_current_start = self._measure_free_bytes()
            self._measurements = {name: FolderMeasurement([folder]) for name, folder in self._folders.items()}
            if self._open_files is not None:
                self._measurements[_DELETED_FILES] = DeletedFileMeasurement(
                    self._open_files(), list(self._folders.values())
                )
        # Longer steps until all initial sizes are known (`_FIRST_STEP_SECONDS`).
        is_first = not set(self._folders) <= set(self._initial_bytes)
        step_started_at = time.monotonic()
        is_complete = True
        for measurement in self._measurements.values():
            is_complete &= measurement.step(_FIRST_STEP_SECONDS if is_first or is_urgent else _STEP_SECONDS)
        self._measuring_seconds += time.monotonic() - step_started_at
        if not is_complete:
            return None
        verdict = self._evaluate(record)
        has_failed = any(measurement.error is not None for measurement in self._measurements.values())
        self._measurements = {}
        self._free_at_last_start = self._free_at_current_start
        self._pause_seconds = max(_MIN_PAUSE_SECONDS, self._measuring_seconds * _PAUSE_FACTOR)
        self._urgent_pause_seconds = max(_MIN_PAUSE_SECONDS, self._measuring_seconds * _URGENT_PAUSE_FACTOR)
        # The first measurement finds initial sizes, so the next begins at once: it finds what the run has added. A
        # failed measurement is always followed by a pause.
        if not is_first or has_failed:
            self._next_measurement_at = now + self._pause_seconds
        return verdict

    def _is_urgent(self) -> bool:
        """Whether a disk has lost more space than the run may still add, since the last measurement began."""
        # Small folders are measured often anyway, and on shared storage each look at the disk is a request.
        if not self._free_at_last_start or self._pause_seconds <= _MIN_PAUSE_SECONDS:
            return False
        room_bytes = self._limit_bytes - max(0, sum(self._added_bytes.values()))
        free_now = self._measure_free_bytes()
        losses = ((before, free_now[name]) for name, before in self._free_at_last_start.items())
        return any(before is not None and now is not None and before - now > room_bytes for before, now in losses)

    def _measure_free_bytes(self) -> Dict[str, Optional[int]]:
        """Return the free bytes of each folder's disk; None where they are not known."""
        return {name: free_bytes(folder) for name, folder in self._folders.items()}

    def has_filled_the_disk(self) -> bool:
        """Whether the run itself filled the disk: it wrote about as much as its limit.

        True in case of doubt, since False makes the run free.

        Call this after the run's end, if the disk is full.
        """
        if not self._has_exact_initial_sizes:
            return True
        added_bytes = 0
        for name, folder in self._folders.items():
            try:
                usage = measure([folder], _FINAL_SECONDS)
            except OSError:
                return True
            if usage is None or usage.is_incomplete:
                return True
            added_bytes += self._bytes_added_to(name, usage.bytes)
        return added_bytes >= self._limit_bytes * _FILLED_SHARE

    def finish(self, record: Record) -> None:
        """Record the newest checkpoint's time: the console shows how much of an attempt's work came after it."""
        for measurement in self._measurements.values():
            measurement.close()
        # A second is enough for most folders. If not, the record keeps the time of the last complete measurement.
        with contextlib.suppress(OSError):
            usage = measure([self._folders["checkpoints"]], 1.0)
            if usage is not None:
                record.note_checkpoint(usage.newest_mtime)

    def _bytes_added_to(self, name: str, folder_bytes: int) -> int:
        """Return what the run has added to a folder that has `folder_bytes` now; negative if it deleted older files."""
        added_bytes = folder_bytes - self._initial_bytes[name]
        # Negative while the platform's files are smaller than `platform_bytes`; that must not raise the limit.
        return max(0, added_bytes) if name == "run" else added_bytes

    def _evaluate(self, record: Record) -> Optional[Verdict]:
        """Return a verdict if the run is over its limit by the measurement that has just been completed, else None."""
        is_incomplete = False
        for name, measurement in self._measurements.items():
            usage = measurement.usage
            if usage is None:
                continue
            # If a folder was not measured completely before the run, its first measurement ends now. Its initial size
            # then includes what the run wrote meanwhile to the part that was measured last. Deleted files that are
            # still open have no initial size, because only the run has opened them.
            self._initial_bytes.setdefault(name, 0 if name == _DELETED_FILES else usage.bytes)
            self._added_bytes[name] = self._bytes_added_to(name, usage.bytes)
            is_incomplete |= usage.is_incomplete
            if name == "checkpoints":
                record.note_checkpoint(usage.newest_mtime)
        added_bytes = max(0, sum(self._added_bytes.values()))  # negative if the run deleted older files
        if added_bytes <= self._limit_bytes and not is_incomplete:
            return None
        used_mib, limit_mib = added_bytes >> 20, self._limit_bytes >> 20
        if is_incomplete:
            message = "There are unreadable folders, or some nested deeper than {}, which cannot be measured.".format(
                MAX_DEPTH
            )
        else:
            message = "The run wrote {} MiB to its folders, more than the {} MiB it may.".format(used_mib, limit_mib)
        data = {"used_mib": used_mib, "limit_mib": limit_mib, **({"by_quota": True} if self._by_quota else {})}
        return Verdict(kind="disk_full", code="disk_full", message=message, data=data)


class DeletedFileMeasurement(_Measurement):
    """The size of deleted files that are still open, which are in no folder any more.

    `paths` are open files, as for `DiskLimit`. Only files on the disks of `folders` count.
    """

    def __init__(self, paths: Iterator[str], folders: Sequence[Path]) -> None:
        super().__init__(self._measure_in_steps(paths))
        self._devices = {status.st_dev for status in map(_stat_if_possible, map(str, folders)) if status is not None}
        # Device and inode of each file: several descriptors of one file count once.
        self._counted_files: Set[Tuple[int, int]] = set()

    def _measure_in_steps(self, paths: Iterator[str]) -> Generator[None, None, None]:
        for count, path in enumerate(paths, 1):
            status = _stat_if_possible(path)
            if status is not None and not status.st_nlink and stat.S_ISREG(status.st_mode):
                inode = (status.st_dev, status.st_ino)
                if status.st_dev in self._devices and inode not in self._counted_files:
                    self._counted_files.add(inode)
                    self._bytes += status.st_blocks * _BLOCK_BYTES
            if count % _ENTRIES_PER_STEP == 0:
                yield


def _stat_if_possible(path: str) -> Optional[os.stat_result]:
    try:
        return os.stat(path)
    except OSError:
        return None


def entry_bytes(folder: Path) -> int:
    """Return how many bytes each entry of this folder counts in addition to its data.

    A file system with a fixed number of inodes is full once all inodes are used. Each entry therefore counts as one
    inode's share of the disk, if that is more than `_MIN_ENTRY_BYTES`.
    """
    try:
        status = os.statvfs(folder)
    except OSError:
        return _MIN_ENTRY_BYTES
    if not status.f_files:  # the number of inodes is not fixed
        return _MIN_ENTRY_BYTES
    return max(_MIN_ENTRY_BYTES, status.f_blocks * status.f_frsize // status.f_files)


def measure(folders: Sequence[Path], seconds: float) -> Optional[FolderUsage]:
    """Measure some folders in one step; None if that takes longer than `seconds`. Raises OSError."""
    measurement = FolderMeasurement(folders)
    measurement.step(seconds)
    measurement.close()
    if measurement.error is not None:
        raise measurement.error
    return measurement.usage


def free_bytes(folder: Path) -> Optional[int]:
    """Return the free space of the disk under the folder; None where it is not known."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize  # without the blocks that are reserved for root


def _walk_entries(folder: Path) -> Iterator[Optional[os.stat_result]]:
    """Yield the status of everything below the folder; None stands for a folder whose contents cannot be measured.

    Such a folder is too deep, or it is this user's own and a process has removed its read permission again. Entries
    that are deleted meanwhile and unreadable folders of other users are left out. Raises OSError if the disk cannot be
    read.
    """
    # The path from `folder` to the current folder: each one's descriptor, and the entries that are left in it.
    open_folders: List[Tuple[int, Any]] = []
    try:
        if not _open_folder(open_folders, str(folder), parent_fd=None):
            yield None
        while open_folders:
            descriptor, entries = open_folders[-1]
            try:
                entry = next(entries, None)
            except OSError as error:
                _require_deleted(error)
                entry = None
            if entry is None:
                entries.close()
                os.close(open_folders.pop()[0])
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except PermissionError:  # in the same way for all entries of this folder
                if os.fstat(descriptor).st_uid == os.geteuid():
                    yield None
                entries.close()
                os.close(open_folders.pop()[0])
                continue
            except OSError as error:
                _require_deleted(error)
                continue
            yield status
            if stat.S_ISDIR(status.st_mode) and (
                len(open_folders) >= MAX_DEPTH or not _open_folder(open_folders, entry.name, descriptor)
            ):
                yield None
    finally:
        for descriptor, entries in open_folders:
            entries.close()
            os.close(descriptor)


def _open_folder(open_folders: List[Tuple[int, Any]], name: str, parent_fd: Optional[int]) -> bool:
    """Open the folder `name` and append it to `open_folders`; return False if this user's own folder cannot be read.

    `name` is relative to the folder `parent_fd`, or a path if that is None. Does nothing if the folder was deleted or
    replaced by a link, or is an unreadable folder of another user. Raises OSError.
    """
    try:
        _grant_read_access(name, parent_fd)
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    except PermissionError:
        return not _is_own(name, parent_fd)
    except OSError as error:
        _require_deleted(error)
        return True
    try:
        open_folders.append((descriptor, os.scandir(descriptor)))
    except OSError as error:
        os.close(descriptor)
        _require_deleted(error)
    return True


def _require_deleted(error: OSError) -> None:
    """Raise the error unless it says that an entry was deleted, or replaced by a link or a file."""
    if error.errno not in _DELETED_ERRORS:
        raise error


def _grant_read_access(name: str, parent_fd: Optional[int]) -> None:
    """Let this user list a folder of its own and stat the entries. Raises OSError."""
    status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o500 == 0o500:
        return
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        # By its descriptor, since the code may have put another folder or a link in its place.
        os.chmod("/proc/self/fd/{}".format(descriptor), stat.S_IMODE(status.st_mode) | 0o500)
    finally:
        os.close(descriptor)


def _is_own(name: str, parent_fd: Optional[int]) -> bool:
    """Return whether this user owns the file; True if that cannot be found out."""
    try:
        return os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_uid == os.geteuid()
    except FileNotFoundError:
        return False
    except OSError:
        return True

"""Measure file trees, make them read-only, force them to the disk, and remove them.

Customers' code can nest folders to any depth, take permissions away, and write at the same time. As in `paths`, every
folder is opened relative to an open one, so that code cannot lead the console out of the tree.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import stat as modes
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from runtime import trash
from storage.errors import FileMissing
from storage.paths import OPEN_FOLDER, SWAPPED_ERRNOS, open_folder

ENTRY_BYTES = 4096
"""How many bytes of the quota each file, link and folder uses besides its content. Each needs an inode, of which a disk
has a limited number. 4,096 bytes is the usual block size."""
PREALLOCATED_BYTES = 1024**2
"""A file whose blocks have this many more bytes than its length was preallocated (`fallocate`). Then its blocks count
against the quota. A smaller difference comes from rounding to blocks."""
_READABLE = 0o500
"""The permissions by which a folder's owner can list it and look at its entries."""
_LIBC = ctypes.CDLL(None, use_errno=True)
"""The C library, for `syncfs`."""


@dataclass(frozen=True)
class Usage:
    """Disk usage: bytes of content, and the number of entries (files, links and folders)."""

    size_bytes: int = 0
    entry_count: int = 0

    @property
    def counted_bytes(self) -> int:
        """Return how many bytes of a quota this uses."""
        return self.size_bytes + self.entry_count * ENTRY_BYTES

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.size_bytes + other.size_bytes, self.entry_count + other.entry_count)


class _Level(NamedTuple):
    """A folder on the way from the root of a measurement to the open folder."""

    identity: tuple[int, int]
    """The folder's device and inode (`_identity`)."""
    unvisited: list[str]
    """The names of its subfolders that are still to be measured."""


@dataclass(frozen=True)
class Measurement:
    """A tree's usage.

    If a folder was moved during the measurement, or cannot be read, a part is missing, and `is_complete` is False.
    """

    usage: Usage
    is_complete: bool = True

    def __add__(self, other: Measurement) -> Measurement:
        return Measurement(self.usage + other.usage, self.is_complete and other.is_complete)

    def at_least(self, known: Usage) -> Usage:
        """Return the usage; if it is incomplete, at least the values of `known`, the usage measured before."""
        if self.is_complete:
            return self.usage
        size_bytes = max(self.usage.size_bytes, known.size_bytes)
        return Usage(size_bytes, max(self.usage.entry_count, known.entry_count))


def measure(*, root: Path) -> Measurement:
    """Return the usage of `root` and everything below it. Holes in sparse files do not count. Raises FileMissing.

    Only one folder is open at a time, and the way back up is `..`. So even the deepest tree exhausts neither file
    descriptors nor the stack. If a folder is moved meanwhile, its `..` leads to another folder; the measurement then
    stops and is incomplete.

    Customers' code may take away the permissions of its folders. If the console owns such a folder, a measurement makes
    it readable again, because what is below uses the disk too. Otherwise the measurement is incomplete.
    """
    with suppress(OSError):  # `open_folder` raises the error
        trash.grant_owner_access(str(root), None, _READABLE)
    with open_folder(root=root, parts=()) as top_fd:
        folder_fd = os.dup(top_fd)  # a copy, because `_enter` closes the folder that it leaves
        try:
            total, subfolders = _measure_entries(folder_fd)
            total += Measurement(Usage(entry_count=1))  # `root` itself
            levels = [_Level(_identity(folder_fd), subfolders)]
            while levels:
                if levels[-1].unvisited:
                    name = levels[-1].unvisited.pop()
                    with suppress(OSError):  # `_enter` raises the error
                        trash.grant_owner_access(name, folder_fd, _READABLE)
                    try:
                        folder_fd = _enter(folder_fd, name)
                    except OSError as error:
                        # If the folder was removed or replaced since it was listed, nothing is missing.
                        if error.errno not in SWAPPED_ERRNOS:
                            total = replace(total, is_complete=False)
                        continue
                    measurement, subfolders = _measure_entries(folder_fd)
                    total += measurement
                    levels.append(_Level(_identity(folder_fd), subfolders))
                    continue
                levels.pop()
                if levels:
                    # If `..` cannot be opened, `folder_fd` stays the child, and the check below ends the measurement.
                    with suppress(OSError):
                        folder_fd = _enter(folder_fd, "..")
                    if _identity(folder_fd) != levels[-1].identity:
                        return replace(total, is_complete=False)
        finally:
            os.close(folder_fd)
        return total


def make_read_only(*, folder: Path) -> None:
    """Make a tree readable for all users and writable for none. Only the console may have access to it until then."""
    for _path, _folders, names, folder_fd in os.fwalk(folder):
        for name in names:
            mode = os.lstat(name, dir_fd=folder_fd).st_mode
            if modes.S_ISREG(mode):
                os.chmod(name, 0o555 if mode & 0o100 else 0o444, dir_fd=folder_fd)  # executable files stay executable
        os.fchmod(folder_fd, 0o555)


def flush_disk(*, folder: Path) -> None:
    """Force all that was written to the file system of `folder` to its disk. Raises StorageFull, OSError.

    Call it before the row of new files is committed, so that a power loss cannot leave a row without bytes. For many
    small files it is far faster than an fsync of each. Python offers only `os.sync`, which waits for all other disks.
    """
    with open_folder(root=folder, parts=()) as folder_fd:
        if _LIBC.syncfs(folder_fd):
            # `open_folder` raises StorageFull in place of this error if the disk or its quota is full.
            raise OSError(ctypes.get_errno(), "syncfs")


def remove_tree(*, folder: Path, scratch: Path) -> None:
    """Remove a folder of the storage root, as `remove_folder` does. Do nothing if it is missing."""
    with suppress(FileMissing), open_folder(root=folder.parent, parts=()) as parent_fd:
        remove_folder(parent_fd=parent_fd, name=folder.name, scratch=scratch)


def size_of(status: os.stat_result) -> int:
    """Return how many bytes of a file count: its blocks if it is sparse or preallocated, else its length.

    An entry that is no regular file has 0 bytes.
    """
    if not modes.S_ISREG(status.st_mode):
        return 0
    blocks = status.st_blocks * 512  # st_blocks is in units of 512 bytes on every file system
    return blocks if blocks > status.st_size + PREALLOCATED_BYTES else min(status.st_size, blocks)


def remove_folder(*, parent_fd: int, name: str, scratch: Path) -> Usage:
    """Remove the folder `name` in an open folder; return its usage.

    The folder is renamed into `scratch` first, so it disappears at once. If a process still writes to it, parts cannot
    be removed, and stay in `scratch` until garbage collection.
    """
    scratch_path = scratch / secrets.token_hex(16)
    trash.grant_owner_access(name, parent_fd)  # a folder can be renamed only if it is writable
    os.rename(name, scratch_path, src_dir_fd=parent_fd)
    usage = measure(root=scratch_path).usage
    trash.remove_tree(scratch_path)
    return usage


def _enter(folder_fd: int, name: str) -> int:
    """Open the folder `name` in the open folder `folder_fd`, close `folder_fd`, and return the new descriptor.

    If `name` cannot be opened, raise OSError, and leave `folder_fd` open.
    """
    child_fd = os.open(name, OPEN_FOLDER, dir_fd=folder_fd)
    os.close(folder_fd)
    return child_fd


def _identity(folder_fd: int) -> tuple[int, int]:
    """Return device and inode of an open folder. They do not change when it is renamed."""
    status = os.fstat(folder_fd)
    return status.st_dev, status.st_ino


def _measure_entries(folder_fd: int) -> tuple[Measurement, list[str]]:
    """Return the usage of an open folder's entries, and the names of its subfolders."""
    size, count, subfolders, is_complete = 0, 0, [], True
    try:
        with os.scandir(folder_fd) as entries:
            for entry in entries:
                count += 1
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # it was removed meanwhile
                    continue
                except OSError:
                    is_complete = False
                    continue
                size += size_of(status)
                if modes.S_ISDIR(status.st_mode):
                    subfolders.append(entry.name)
    except OSError:
        is_complete = False
    return Measurement(Usage(size, count), is_complete), subfolders

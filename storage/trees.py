"""Whole trees of files: what they take, making them unchangeable, removing them.

Hides depth without end, removed permissions and processes that go on writing. The one rule: as in `paths`, every
folder is entered through an open descriptor, so that nothing outside the tree is ever touched.
"""

from __future__ import annotations

import itertools
import os
import secrets
import stat as modes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from storage.errors import FileMissing
from storage.paths import OPEN_FOLDER, open_folder

REMOVE_PASSES = 3
"""Few, since a writer that is faster than the removal leaves more to do each time; the sweep comes again."""


def measure(*, root: Path) -> int:
    """The bytes that files below `root` take, holes not counted, however deep: what nobody measures is beyond quotas.

    One folder is open at a time. Where folders are moved meanwhile, so that the way back is another, what is left of
    the tree is left out: the sweep comes again.
    """
    with open_folder(root=root, parts=()) as top:
        folder, total = os.dup(top), 0
        # Of each folder on the way down: which one it is, and those in it that are still to be entered.
        way: list[tuple[tuple[int, int], list[str]]] = []
        try:
            size, below = _measure(folder)
            total += size
            way.append((_identity(folder), below))
            while way:
                _folder, below = way[-1]
                if below:
                    entered = _enter(folder, below.pop())
                    if entered is None:  # gone, replaced or closed meanwhile
                        continue
                    folder = entered
                    size, below = _measure(folder)
                    total += size
                    way.append((_identity(folder), below))
                    continue
                way.pop()
                if way:
                    above = _enter(folder, "..")
                    if above is None:
                        break
                    folder = above
                    if _identity(folder) != way[-1][0]:
                        break
        finally:
            os.close(folder)
        return total


def make_read_only(*, folder: Path) -> None:
    """Take the right to write from everybody, and give all others. For a tree that nobody else changes meanwhile."""
    for _path, _folders, names, handle in os.fwalk(folder):
        for name in names:
            mode = os.lstat(name, dir_fd=handle).st_mode
            if modes.S_ISREG(mode):
                os.chmod(name, 0o555 if mode & 0o100 else 0o444, dir_fd=handle)
        os.fchmod(handle, 0o555)


def remove_tree(*, folder: Path, scratch: Path) -> int:
    """Remove one of our own folders, read-only or not, however deep; how many bytes that freed. Safe to repeat."""
    with suppress(FileMissing), open_folder(root=folder.parent, parts=()) as parent:
        return remove_folder(parent=parent, name=folder.name, scratch=scratch)
    return 0


def size_of(status: os.stat_result) -> int:
    """What a file takes of the disk: its blocks where it has holes."""
    return min(status.st_size, status.st_blocks * 512) if modes.S_ISREG(status.st_mode) else 0


def remove_folder(*, parent: int, name: str, scratch: Path) -> int:
    """Move the folder `name` to `scratch` and empty it there, one level at a time.

    Every folder found inside is itself moved up to the top, so neither depth nor length of paths ever matters, and two
    descriptors are enough. What a running process still puts in stays in `scratch`, for the sweep.
    """
    trash = scratch / secrets.token_hex(16)
    trash.mkdir(mode=0o700)
    freed, numbers = 0, itertools.count()
    try:
        with open_folder(root=trash, parts=()) as top:
            pending = [_move_up(parent, name, top, numbers)]
            while pending:
                current = pending.pop()
                folder = os.open(current, OPEN_FOLDER, dir_fd=top)
                try:
                    freed += _empty(folder, top, numbers, pending)
                finally:
                    os.close(folder)
                with suppress(OSError):
                    os.rmdir(current, dir_fd=top)
    finally:
        with suppress(OSError):
            trash.rmdir()
    return freed


def _empty(folder: int, top: int, numbers: Iterator[int], pending: list[str]) -> int:
    """Unlink the files of `folder` and move its folders to `top`; again while new ones appear, but not for ever."""
    freed = 0
    for _pass in range(REMOVE_PASSES):
        names = os.listdir(folder)
        if not names:
            break
        for name in names:
            with suppress(FileNotFoundError):
                status = os.lstat(name, dir_fd=folder)
                if modes.S_ISDIR(status.st_mode):
                    pending.append(_move_up(folder, name, top, numbers))
                else:
                    os.unlink(name, dir_fd=folder)
                    freed += size_of(status)
    return freed


def _move_up(parent: int, name: str, top: int, numbers: Iterator[int]) -> str:
    """Rename a folder into `top` under a new name. Its own permissions are widened first: moving one needs them."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        Path(f"/proc/self/fd/{handle}").chmod(0o700)
    finally:
        os.close(handle)
    fresh = str(next(numbers))
    os.rename(name, fresh, src_dir_fd=parent, dst_dir_fd=top)
    return fresh


def _enter(folder: int, name: str) -> int | None:
    """Open a folder of this one, in its place; None where that cannot be, and this one stays open."""
    try:
        entered = os.open(name, OPEN_FOLDER, dir_fd=folder)
    except OSError:
        return None
    os.close(folder)
    return entered


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino


def _measure(folder: int) -> tuple[int, list[str]]:
    """What the files of one folder take, and the names of its folders."""
    total, below = 0, []
    with suppress(OSError), os.scandir(folder) as scan:
        for entry in scan:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                total += size_of(status)
                if modes.S_ISDIR(status.st_mode):
                    below.append(entry.name)
    return total, below

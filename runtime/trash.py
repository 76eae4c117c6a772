"""Remove trees that hostile code has written, of any depth, width and permissions.

`Trash.move_in` moves a folder out of the way by one rename. `Trash.empty` removes it, which may take long, so callers
release their locks first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import uuid
from pathlib import Path

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_PASSES = 3
"""How often one folder is listed at most: some file systems skip entries of a listing while others are removed."""


class Trash:
    """A folder for trees to be removed. It must be on their disk, and is created when first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def move_in(self, folder: Path) -> None:
        """Move a folder into the trash; nothing happens if there is none."""
        self._folder.mkdir(exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(self._folder / uuid.uuid4().hex)

    def empty(self) -> None:
        """Remove what is in the trash. A tree that another process removes, or that cannot be removed, stays."""
        try:
            folders = list(self._folder.iterdir())
        except OSError:
            return
        for folder in folders:
            remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder that hostile code has written, without following links.

    No process of the run may live any more. Every nested folder is first moved to the top, so neither the depth nor the
    length of paths matters. Parts that cannot be removed stay. Does nothing while another process removes the folder.
    """
    try:
        top_fd = _open(str(folder), None)
    except OSError:
        return
    try:
        if not _try_lock(top_fd):
            return
        pending = _empty(top_fd, top_fd)
        while pending:
            name = pending.pop()
            with contextlib.suppress(OSError):
                folder_fd = _open(name, top_fd)
                try:
                    pending += _empty(folder_fd, top_fd)
                finally:
                    os.close(folder_fd)
                os.rmdir(name, dir_fd=top_fd)
        _empty(top_fd, top_fd)  # files and links that replaced a folder meanwhile
        folder.rmdir()
    except OSError:
        return  # a part cannot be removed
    finally:
        os.close(top_fd)


def _try_lock(top_fd: int) -> bool:
    """Lock the tree; return False if another process removes it.

    The lock only saves work, since two removers do no harm. So a file system without locks counts as locked.
    """
    try:
        fcntl.flock(top_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _empty(folder: int, top_fd: int) -> list[str]:
    """Unlink the files of a folder and move its folders to `top_fd`; return the names that they have there."""
    moved: list[str] = []
    for _pass in range(_MAX_PASSES):
        moved_before = len(moved)
        unlinked = 0
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.name, dir_fd=folder)
                        unlinked += 1
                    elif folder != top_fd:
                        moved.append(_move_up(entry.name, folder, top_fd))
                    elif entry.name not in moved:
                        moved.append(entry.name)
                except OSError:  # the entry stays, and so do the folders above it
                    continue
        if not unlinked and len(moved) == moved_before:
            break
    return moved


def _move_up(name: str, folder: int, top_fd: int) -> str:
    new_name = uuid.uuid4().hex
    grant_owner_access(name, folder)
    os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=top_fd)
    return new_name


def _open(name: str, folder: int | None) -> int:
    """Give a folder's owner all permissions on it, and open it. Raises OSError."""
    grant_owner_access(name, folder)
    return os.open(name, _OPEN_FOLDER, dir_fd=folder)


def grant_owner_access(name: str, folder: int | None) -> None:
    """Give a folder's owner all permissions on it; renaming it needs them. Does nothing for anything but a folder."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o700 == 0o700:
        return
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)  # noqa: PTH101 - of the open folder, even if its name was replaced
    finally:
        os.close(descriptor)

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
"""Flags for opening a folder that hostile code may replace by a link."""
_MAX_PASSES = 3
"""How often one folder is listed at most. Some file systems leave entries out of a listing while other entries are
removed, so a second listing may find more."""


class Trash:
    """A folder for trees that are to be removed, on the disk of these trees. It is created when first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def move_in(self, folder: Path) -> None:
        """Move a folder into the trash; do nothing if the folder does not exist."""
        with contextlib.suppress(FileNotFoundError):  # also where the trash's own parent does not exist yet
            self._folder.mkdir(exist_ok=True, mode=0o700)
            folder.rename(self._folder / uuid.uuid4().hex)

    def empty(self) -> None:
        """Remove everything in the trash, except trees that another process is removing or that cannot be removed."""
        try:
            folders = list(self._folder.iterdir())
        except OSError:  # nothing was moved in yet
            return
        for folder in folders:
            remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder that hostile code has written, without following links.

    Call this only after all processes of the run have ended. Every nested folder is first moved to the top, so neither
    the depth nor the length of paths matters. Parts that cannot be removed stay. Does nothing while another process
    removes the folder.
    """
    try:
        top_fd = _open(str(folder), None)
    except OSError:  # it does not exist, or cannot be opened
        return
    try:
        if not _try_lock(top_fd):
            return
        pending_names = _empty(top_fd, top_fd)
        while pending_names:
            name = pending_names.pop()
            with contextlib.suppress(OSError):  # the rest of this folder stays, and so does the tree
                folder_fd = _open(name, top_fd)
                try:
                    pending_names += _empty(folder_fd, top_fd)
                finally:
                    os.close(folder_fd)
                os.rmdir(name, dir_fd=top_fd)
        _empty(top_fd, top_fd)  # files and links that have replaced a folder meanwhile
        folder.rmdir()
    except OSError:
        return  # a part cannot be removed
    finally:
        os.close(top_fd)


def _try_lock(top_fd: int) -> bool:
    """Lock the tree; return False if another process is removing it.

    The lock only saves work, since two processes that remove one tree do no harm. So on a file system without locks
    this returns True.
    """
    try:
        fcntl.flock(top_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _empty(folder_fd: int, top_fd: int) -> list[str]:
    """Unlink the files of a folder and move its folders to the top folder; return their names in the top folder.

    The folders of the top folder itself keep their places.
    """
    subfolders: list[str] = []
    for _pass in range(_MAX_PASSES):
        subfolders_before = len(subfolders)
        unlinked = 0
        with os.scandir(folder_fd) as entries:
            for entry in entries:
                try:
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.name, dir_fd=folder_fd)
                        unlinked += 1
                    elif folder_fd != top_fd:
                        subfolders.append(_move_to_top(entry.name, folder_fd, top_fd))
                    elif entry.name not in subfolders:
                        subfolders.append(entry.name)
                except OSError:  # the entry stays, and so do the folders above it
                    continue
        if not unlinked and len(subfolders) == subfolders_before:
            break
    return subfolders


def _move_to_top(name: str, folder_fd: int, top_fd: int) -> str:
    """Move a folder to the top folder under a new name; return the name. Raises OSError."""
    new_name = uuid.uuid4().hex
    grant_owner_access(name, folder_fd)
    os.rename(name, new_name, src_dir_fd=folder_fd, dst_dir_fd=top_fd)
    return new_name


def _open(name: str, parent_fd: int | None) -> int:
    """Give a folder's owner all permissions on it, and open it. Raises OSError."""
    grant_owner_access(name, parent_fd)
    return os.open(name, _OPEN_FOLDER, dir_fd=parent_fd)


def grant_owner_access(name: str, parent_fd: int | None, needed: int = 0o700) -> None:
    """Give a folder's owner the `needed` permissions on it; a rename needs all. Does nothing for other kinds of files.

    `name` is relative to the folder `parent_fd`, or a path if that is None. Raises OSError.
    """
    status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & needed == needed:
        return
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        # By its descriptor, since hostile code may have put another folder or a link in its place.
        os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IMODE(status.st_mode) | needed)  # noqa: PTH101
    finally:
        os.close(descriptor)

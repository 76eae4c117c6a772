"""Removing what hostile code has written: trees of any depth, width and permissions, one at a time.

Hides links, folders nested deeper than any path is long, and two that remove the same. The one rule: what a run leaves
behind keeps nobody waiting and makes nobody fail: it is out of the way by one rename, and removed when nothing waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import uuid
from pathlib import Path

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PASSES = 3
"""Over one folder: some file systems pass over an entry while others are removed."""


class Trash:
    """A folder on the same disk as what is thrown into it, made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, folder: Path) -> None:
        """Put a folder out of the way, at once; nothing where there is none."""
        self._folder.mkdir(exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(self._folder / uuid.uuid4().hex)

    def empty(self) -> None:
        """Remove all that is in it, but for what somebody else is removing. What cannot be removed stays."""
        try:
            left = list(self._folder.iterdir())
        except OSError:
            return
        for folder in left:
            remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder that hostile code has written: links are not followed, folders without permissions are opened.

    Nothing of the run may live any more: then what is looked at stays what it is. Every folder inside is first moved up
    to the top, so that neither their depth nor the length of a path matters. What cannot be removed stays; so does all
    of it where somebody else is at it.
    """
    try:
        top = _open(str(folder), None)
    except OSError:
        return
    try:
        if not _is_ours(top):
            return
        waiting = _empty(top, top)
        while waiting:
            name = waiting.pop()
            with contextlib.suppress(OSError):
                inner = _open(name, top)
                try:
                    waiting += _empty(inner, top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
        folder.rmdir()
    except OSError:
        return  # something of it cannot be removed
    finally:
        os.close(top)


def _is_ours(top: int) -> bool:
    """Whether nobody else removes it. A file system that locks no folders lets two at it, which does no harm."""
    try:
        fcntl.flock(top, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _empty(folder: int, top: int) -> list[str]:
    """Unlink what is no folder; the names under which the folders are in `top` now."""
    moved: list[str] = []
    for _pass in range(_PASSES):
        before = len(moved)
        unlinked = 0
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.name, dir_fd=folder)
                        unlinked += 1
                    elif folder != top:
                        moved.append(_move_up(entry.name, folder, top))
                    elif entry.name not in moved:
                        moved.append(entry.name)
                except OSError:  # it stays, and with it all that it lies in
                    continue
        if not unlinked and len(moved) == before:
            break
    return moved


def _move_up(name: str, folder: int, top: int) -> str:
    fresh = uuid.uuid4().hex
    _open_up(name, folder)
    os.rename(name, fresh, src_dir_fd=folder, dst_dir_fd=top)
    return fresh


def _open(name: str, folder: int | None) -> int:
    """A folder as its owner may have it, whatever the code has made of its permissions. Raises OSError."""
    _open_up(name, folder)
    return os.open(name, _OPEN_FOLDER, dir_fd=folder)


def _open_up(name: str, folder: int | None) -> None:
    state = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISDIR(state.st_mode) or state.st_mode & 0o700 == 0o700:
        return
    pinned = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{pinned}", 0o700)  # noqa: PTH101 - of what is pinned, and of nothing else
    finally:
        os.close(pinned)

"""Paths in folders that hostile code may change at any moment: how one is walked.

Hides links, removed permissions, names no file system takes, and all of these appearing between a check and its use.
The one rule: a path is walked one component at a time from an open folder to the next, never following a link, and
what was opened is what is used; no name is ever resolved twice.
"""

from __future__ import annotations

import enum
import errno
import os
import stat as modes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from django.utils.translation import gettext_lazy as _

from console.accounts.errors import CustomerError
from storage.errors import FileMissing, StorageFull, Unreadable, UnsafePath, WrongKind

NAME_LIMIT = 255
PATH_LIMIT = 4000
"""Bytes; Linux takes 255 and 4096, the latter with the place where a run sees the folder."""
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER_MODE = 0o755


class Kind(enum.StrEnum):
    """What lies at a path. OTHER: a pipe, socket or device."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


_FILE_IN_THE_WAY = _("There is a file where this path needs a folder.")
_MEANINGS: dict[int, type[CustomerError]] = {
    errno.ENOENT: FileMissing,
    errno.ELOOP: UnsafePath,
    errno.EINVAL: UnsafePath,
    errno.ENAMETOOLONG: UnsafePath,
    errno.EACCES: Unreadable,
    errno.EPERM: Unreadable,
    errno.ENOTDIR: WrongKind,
    errno.EISDIR: WrongKind,
    errno.EEXIST: WrongKind,
    errno.ENOTEMPTY: WrongKind,
    errno.ENXIO: WrongKind,
    errno.ENOSPC: StorageFull,
    errno.EDQUOT: StorageFull,
}


def split(path: str) -> tuple[str, ...]:
    """The components of a relative path, without `.` and doubled slashes. Raises UnsafePath."""
    try:
        length = len(path.encode())
        longest = max(len(part.encode()) for part in path.split("/"))
    except UnicodeEncodeError:
        raise UnsafePath from None
    if path.startswith("/") or "\0" in path:
        raise UnsafePath
    if length > PATH_LIMIT or longest > NAME_LIMIT:
        raise UnsafePath(_("This path is too long. Use shorter names, or fewer folders."))
    parts = tuple(part for part in path.split("/") if part not in {"", "."})
    if ".." in parts:
        raise UnsafePath
    return parts


@contextmanager
def open_folder(*, root: Path, parts: Sequence[str], create: bool = False) -> Iterator[int]:
    """A descriptor of the folder at `parts` below `root`. Raises FileMissing, UnsafePath, WrongKind, Unreadable."""
    with explained():
        folder = os.open(root, OPEN_FOLDER)
        try:
            for part in parts:
                below = step(folder, part, create=create)
                os.close(folder)
                folder = below
            yield folder
        finally:
            os.close(folder)


@contextmanager
def explained() -> Iterator[None]:
    """Turns what the kernel refuses into what a customer can act on."""
    try:
        yield
    except OSError as error:
        meaning = _MEANINGS.get(error.errno or 0)
        if meaning is None:
            raise
        raise meaning() from error


def step(folder: int, name: str, *, create: bool) -> int:
    """Open the folder `name` in `folder`, making it if asked."""
    try:
        return os.open(name, OPEN_FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    except NotADirectoryError:
        status = status_of(folder, name)
        if status and modes.S_ISLNK(status.st_mode):
            raise UnsafePath from None
        raise WrongKind(_FILE_IN_THE_WAY) from None
    with suppress(FileExistsError):  # made by somebody else meanwhile; or a link, which the next line refuses
        os.mkdir(name, FOLDER_MODE, dir_fd=folder)
    return os.open(name, OPEN_FOLDER, dir_fd=folder)


def status_of(folder: int, name: str) -> os.stat_result | None:
    """What `name` is, itself and not what a link leads to; None where there is nothing."""
    try:
        return os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return None


def kind_of(mode: int) -> Kind:
    """The kind that a file's mode says."""
    if modes.S_ISREG(mode):
        return Kind.FILE
    if modes.S_ISDIR(mode):
        return Kind.FOLDER
    return Kind.LINK if modes.S_ISLNK(mode) else Kind.OTHER

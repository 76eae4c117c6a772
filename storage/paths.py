"""Walk paths in folders that customers' code may change at any moment.

A path is opened one component at a time, from an open folder to the next, without following links. No name is resolved
twice, so replacing a component between a check and its use has no effect.
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

from console.core.errors import CustomerError
from storage.errors import FileMissing, StorageFull, Unreadable, UnsafePath, WrongKind

NAME_LIMIT = 255
"""Bytes in one component: the limit of Linux file systems."""
PATH_LIMIT = 4000
"""Bytes in a path: Linux' limit of 4,096, less the path at which a run mounts the workspace."""
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER_MODE = 0o755
SWAPPED_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO})
"""Errors of a system call on a name that was removed or replaced since it was read."""


class Kind(enum.StrEnum):
    """The type of an entry. OTHER: a pipe, socket or device."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


_FILE_IN_THE_WAY = _("This path needs a folder where a file exists. Choose another path.")
_ERRORS_BY_ERRNO: dict[int, type[CustomerError]] = {
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


def split_path(path: str) -> tuple[str, ...]:
    """Split a relative path into components, without `.` and empty ones. Raises UnsafePath."""
    try:
        length = len(path.encode())
        longest = max(len(part.encode()) for part in path.split("/"))
    except UnicodeEncodeError:
        raise UnsafePath from None
    if path.startswith("/") or "\0" in path:
        raise UnsafePath
    if length > PATH_LIMIT or longest > NAME_LIMIT:
        raise UnsafePath(_("The path is too long. Use shorter names or fewer folders."))
    parts = tuple(part for part in path.split("/") if part not in {"", "."})
    if ".." in parts:
        raise UnsafePath
    return parts


@contextmanager
def open_folder(*, root: Path, parts: Sequence[str], create: bool = False) -> Iterator[int]:
    """Open the folder at `parts` below `root`. Raises FileMissing, UnsafePath, WrongKind, Unreadable."""
    with translate_os_errors():
        folder = os.open(root, OPEN_FOLDER)
        try:
            for part in parts:
                child = open_subfolder(folder, part, create=create)
                os.close(folder)
                folder = child
            yield folder
        finally:
            os.close(folder)


@contextmanager
def translate_os_errors() -> Iterator[None]:
    """Translate an OSError that a customer can act on to an error of `storage.errors`."""
    try:
        yield
    except OSError as error:
        error_class = _ERRORS_BY_ERRNO.get(error.errno or 0)
        if error_class is None:
            raise
        raise error_class() from error


def open_subfolder(folder: int, name: str, *, create: bool) -> int:
    """Open the folder `name` in `folder`; `create` it if it is missing."""
    try:
        return os.open(name, OPEN_FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    except NotADirectoryError:
        status = lstat_or_none(folder, name)
        if status and modes.S_ISLNK(status.st_mode):
            raise UnsafePath from None
        raise WrongKind(_FILE_IN_THE_WAY) from None
    with suppress(FileExistsError):  # another process created it, or a link, which the next line refuses
        os.mkdir(name, FOLDER_MODE, dir_fd=folder)
    return os.open(name, OPEN_FOLDER, dir_fd=folder)


def lstat_or_none(folder: int, name: str) -> os.stat_result | None:
    """Return the status of `name` in `folder`, without following a link; None if it does not exist."""
    try:
        return os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return None


def kind_of(mode: int) -> Kind:
    """Return the kind of an entry with this mode."""
    if modes.S_ISREG(mode):
        return Kind.FILE
    if modes.S_ISDIR(mode):
        return Kind.FOLDER
    return Kind.LINK if modes.S_ISLNK(mode) else Kind.OTHER

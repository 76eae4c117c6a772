"""Open paths in folders that customers' code may change at any moment.

A path is opened one component after the other, each relative to the open folder before it, without following links. No
name is resolved twice. Therefore code that replaces a component by a link cannot lead the console out of the folder.
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
"""The length of one component in bytes, as Linux file systems limit it."""
PATH_LIMIT = 4000
"""The length of a path in bytes. Linux allows 4,096; the rest is for the folder where a run mounts the workspace."""
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a folder, but not a link to one."""
FOLDER_MODE = 0o755
"""The mode of a new folder."""
SWAPPED_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO})
"""Errors of a system call on an entry that was removed or replaced by another kind since its folder was listed."""


class Kind(enum.StrEnum):
    """The kind of an entry. OTHER stands for pipes, sockets and devices."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


_FILE_IN_THE_WAY = _("This path needs a folder where a file exists. Choose another path.")
_ERRORS_BY_ERRNO: dict[int, type[CustomerError]] = {
    errno.ENOENT: FileMissing,
    errno.ELOOP: UnsafePath,
    errno.EINVAL: UnsafePath,  # such as for a folder that is moved into itself
    errno.ENAMETOOLONG: UnsafePath,
    errno.EACCES: Unreadable,
    errno.EPERM: Unreadable,
    errno.ENOTDIR: WrongKind,
    errno.EISDIR: WrongKind,
    errno.EEXIST: WrongKind,
    errno.ENOTEMPTY: WrongKind,
    errno.ENXIO: WrongKind,  # such as for a socket, which cannot be opened
    errno.ENOSPC: StorageFull,
    errno.EDQUOT: StorageFull,
}
"""The error for the customer, by the error of a system call on a path that the customer named."""


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
    """Open the folder at `parts` below `root`, and yield its descriptor.

    With `create`, missing folders on the way are created. An OSError in the block is translated too.
    Raises FileMissing, UnsafePath, WrongKind, Unreadable.
    """
    with translate_os_errors():
        folder_fd = os.open(root, OPEN_FOLDER)
        try:
            for part in parts:
                child_fd = open_subfolder(folder_fd, part, create=create)
                os.close(folder_fd)
                folder_fd = child_fd
            yield folder_fd
        finally:
            os.close(folder_fd)


@contextmanager
def translate_os_errors() -> Iterator[None]:
    """Raise an error of `storage.errors` in place of an OSError of the block, if its number is in _ERRORS_BY_ERRNO."""
    try:
        yield
    except OSError as error:
        error_class = _ERRORS_BY_ERRNO.get(error.errno or 0)
        if error_class is None:
            raise
        raise error_class() from error


def open_subfolder(folder_fd: int, name: str, *, create: bool) -> int:
    """Return the descriptor of the folder `name` in an open folder; `create` it if it is missing.

    Raises UnsafePath for a link, WrongKind for a file, OSError.
    """
    try:
        return os.open(name, OPEN_FOLDER, dir_fd=folder_fd)
    except FileNotFoundError:
        if not create:
            raise
    except NotADirectoryError:  # Linux raises this for a link too, because of O_DIRECTORY
        status = lstat_or_none(folder_fd, name)
        if status and modes.S_ISLNK(status.st_mode):
            raise UnsafePath from None
        raise WrongKind(_FILE_IN_THE_WAY) from None
    with suppress(FileExistsError):  # another process has just created a folder, or a link, which `os.open` refuses
        os.mkdir(name, FOLDER_MODE, dir_fd=folder_fd)
    return os.open(name, OPEN_FOLDER, dir_fd=folder_fd)


def lstat_or_none(folder_fd: int, name: str) -> os.stat_result | None:
    """Return the status of `name` in an open folder, without following a link; None if it does not exist."""
    try:
        return os.lstat(name, dir_fd=folder_fd)
    except FileNotFoundError:
        return None


def kind_of(mode: int) -> Kind:
    """Return the kind of an entry with this `st_mode`."""
    if modes.S_ISREG(mode):
        return Kind.FILE
    if modes.S_ISDIR(mode):
        return Kind.FOLDER
    return Kind.LINK if modes.S_ISLNK(mode) else Kind.OTHER

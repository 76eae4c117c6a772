"""The files of a workspace: list, read, write, move, delete.

Hides what customers' code leaves there: links, pipes, devices, names that are no text, files that change while they are
read. The one rule: a write is whole or not at all, and every path goes through `paths`.
"""

from __future__ import annotations

import heapq
import os
import secrets
import stat as modes
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Protocol

from django.utils.translation import gettext_lazy as _

from storage.errors import FileMissing, NameTaken, NotText, StorageError, TooLarge, UnsafePath, WrongKind
from storage.paths import Kind, explained, kind_of, open_folder, split, status_of, step
from storage.trees import remove_folder, size_of

CHUNK_BYTES = 1024**2
TEXT_LIMIT = 1024**2
LIST_LIMIT = 10_000
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MAKE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_MODE = 0o644


class Readable(Protocol):
    """Anything with the `read` of a binary file."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""
        ...


class Digest(Protocol):
    """A hash of `hashlib`."""

    def update(self, data: bytes, /) -> None:
        """Take in more bytes."""
        ...


@dataclass(frozen=True)
class Entry:
    """One thing in a folder. `size` in bytes, 0 for what is no file. A name that is no UTF-8 is shown with U+FFFD."""

    name: str
    kind: Kind
    size: int
    modified: datetime


@dataclass(frozen=True)
class Listing:
    """A folder's entries by name; `truncated` when there are more than were asked for."""

    entries: tuple[Entry, ...]
    truncated: bool = False


@dataclass(frozen=True)
class Written:
    """What a write did: whether the file is new, its size, and the size of what it replaced."""

    created: bool
    size: int
    replaced_bytes: int = 0


@dataclass(frozen=True)
class OpenFile:
    """A regular file, open for reading, as its pieces. Whoever asked for it closes it."""

    stream: BinaryIO
    size: int
    modified: datetime

    def __iter__(self) -> Iterator[bytes]:
        """Its bytes up to `size`, even when a run appends to it meanwhile."""
        left = self.size
        while left and (chunk := self.stream.read(min(left, CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk

    def close(self) -> None:
        """Close it. Safe to repeat."""
        self.stream.close()


def stat(*, root: Path, path: str) -> Entry:
    """What lies at `path`. Raises FileMissing, UnsafePath (also when a component before the last is a link)."""
    parts = split(path)
    if not parts:
        with open_folder(root=root, parts=()) as folder:
            return _entry("", os.fstat(folder))
    with open_folder(root=root, parts=parts[:-1]) as folder:
        return _entry(parts[-1], os.lstat(parts[-1], dir_fd=folder))


def list_folder(*, root: Path, path: str = "", limit: int = LIST_LIMIT) -> Listing:
    """The first `limit` entries by name. Raises FileMissing, UnsafePath, WrongKind."""
    with open_folder(root=root, parts=split(path)) as folder, os.scandir(folder) as scan:
        names = heapq.nsmallest(limit + 1, (entry.name for entry in scan))
        entries = [_entry(name, status) for name in names[:limit] if (status := status_of(folder, name))]
    return Listing(tuple(entries), truncated=len(names) > limit)


def read(*, root: Path, path: str) -> OpenFile:
    """Open a regular file. Raises FileMissing, UnsafePath, WrongKind, Unreadable."""
    parts = split(path)
    if not parts:
        raise WrongKind(_FOLDER_HERE)
    with open_folder(root=root, parts=parts[:-1]) as folder:
        # Asked before it is opened, since opening a device can do things; and again after, since it may have changed.
        _require_file(os.lstat(parts[-1], dir_fd=folder))
        handle = os.open(parts[-1], OPEN_FILE, dir_fd=folder)
    try:
        status = os.fstat(handle)
        _require_file(status)
    except StorageError:
        os.close(handle)
        raise
    return OpenFile(os.fdopen(handle, "rb"), status.st_size, _moment(status.st_mtime))


def read_text(*, root: Path, path: str, limit_bytes: int = TEXT_LIMIT) -> str:
    """A text file as it is, line ends included. Raises NotText, also when it is larger than `limit_bytes`."""
    with read(root=root, path=path).stream as stream:
        data = stream.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise NotText(_("This file is too large to be edited here. Download it instead."))
    if b"\0" in data:
        raise NotText
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise NotText from None


def write(*, root: Path, path: str, stream: Readable, scratch: Path, limit_bytes: int) -> Written:
    """Make or replace a file, and the folders above it: whole or not at all.

    The bytes go to `scratch`, a folder of ours on the same disk, and come here by one rename. A link at `path` is
    replaced, not followed. Raises TooLarge past `limit_bytes`, UnsafePath, WrongKind, StorageFull.
    """
    parts = split(path)
    if not parts:
        raise WrongKind(_FOLDER_HERE)
    with suppress(FileMissing):  # before the bytes are taken: whether they could be put there at all
        _require_no_folder(stat(root=root, path=path).kind)
    temporary = scratch / secrets.token_hex(16)
    try:
        with explained(), os.fdopen(os.open(temporary, MAKE_FILE, 0o600), "wb") as file:
            size = copy(stream=stream, target=file, limit_bytes=limit_bytes)
            file.flush()
            os.fsync(file.fileno())
        with open_folder(root=root, parts=parts[:-1], create=True) as folder:
            before = status_of(folder, parts[-1])
            was_file = bool(before and modes.S_ISREG(before.st_mode))
            temporary.chmod(before.st_mode & 0o777 if before and was_file else FILE_MODE)
            os.rename(temporary, parts[-1], dst_dir_fd=folder)
            os.fsync(folder)
    finally:
        temporary.unlink(missing_ok=True)
    return Written(before is None, size, before.st_size if before and was_file else 0)


def copy(*, stream: Readable, target: BinaryIO, limit_bytes: int, digest: Digest | None = None) -> int:
    """Copy all of `stream`, a piece at a time; how many bytes it was. Raises TooLarge before writing past the limit."""
    size = 0
    while chunk := stream.read(CHUNK_BYTES):
        size += len(chunk)
        if size > limit_bytes:
            raise TooLarge
        if digest is not None:
            digest.update(chunk)
        target.write(chunk)
    return size


def make_folder(*, root: Path, path: str) -> bool:
    """Make a folder and those above it; whether it is new. Raises UnsafePath, WrongKind where a file is in the way."""
    parts = split(path)
    if not parts:
        return False
    with open_folder(root=root, parts=parts[:-1], create=True) as folder:
        created = status_of(folder, parts[-1]) is None
        os.close(step(folder, parts[-1], create=True))
    return created


def move(*, root: Path, source: str, target: str) -> None:
    """Rename a file or folder, making the folders above its new place. Raises NameTaken, FileMissing, UnsafePath."""
    old, new = split(source), split(target)
    if not old or not new or new[: len(old)] == old:
        raise UnsafePath(_("A folder can't be moved into itself. Choose another place."))
    with open_folder(root=root, parts=old[:-1]) as old_folder:
        os.lstat(old[-1], dir_fd=old_folder)
        with open_folder(root=root, parts=new[:-1], create=True) as new_folder:
            if status_of(new_folder, new[-1]) is not None:
                raise NameTaken(_("Something of this name is there already. Choose another name, or delete it first."))
            os.rename(old[-1], new[-1], src_dir_fd=old_folder, dst_dir_fd=new_folder)


def delete(*, root: Path, path: str, scratch: Path) -> int:
    """Remove a file, a link, or a folder with all in it; how many bytes that freed. Raises FileMissing, UnsafePath.

    A folder disappears at once, by a rename into `scratch`, and is emptied there.
    """
    parts = split(path)
    if not parts:
        raise WrongKind(_("This is the whole workspace. Delete the workspace itself instead."))
    with open_folder(root=root, parts=parts[:-1]) as folder:
        status = os.lstat(parts[-1], dir_fd=folder)
        if not modes.S_ISDIR(status.st_mode):
            os.unlink(parts[-1], dir_fd=folder)
            return size_of(status)
        return remove_folder(parent=folder, name=parts[-1], scratch=scratch)


_FOLDER_HERE = _("There is a folder at this path, not a file.")


def _entry(name: str, status: os.stat_result) -> Entry:
    shown = name.encode(errors="surrogateescape").decode(errors="replace")
    kind = kind_of(status.st_mode)
    return Entry(shown, kind, status.st_size if kind is Kind.FILE else 0, _moment(status.st_mtime))


def _moment(seconds: float) -> datetime:
    """A file's time; its owner may have set it to a year that no calendar has."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC)


def _require_file(status: os.stat_result) -> None:
    kind = kind_of(status.st_mode)
    if kind is Kind.LINK:
        raise UnsafePath
    _require_no_folder(kind)
    if kind is not Kind.FILE:
        raise WrongKind(_("This is a pipe, a socket or a device, not a file."))


def _require_no_folder(kind: Kind) -> None:
    if kind is Kind.FOLDER:
        raise WrongKind(_FOLDER_HERE)

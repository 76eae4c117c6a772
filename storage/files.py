"""Files of a workspace: list, read, write, move, delete.

Customers' code can put anything into a workspace: links, pipes, devices, names that are not UTF-8, files that change
while they are read. Therefore every path is opened by `storage.paths`. A write replaces the whole file or nothing.

In this package, `root` is the folder of a workspace or version, and `path` is relative to it. The descriptor of an open
folder is named `folder_fd`.
"""

from __future__ import annotations

import base64
import heapq
import os
import secrets
import stat as modes
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Protocol

from django.utils.translation import gettext_lazy as _

from console.core.errors import InvalidInput
from runtime import trash
from storage.errors import FileChanged, FileMissing, NameTaken, NotText, StorageError, TooLarge, UnsafePath, WrongKind
from storage.paths import (
    OPEN_FOLDER,
    Kind,
    kind_of,
    lstat_or_none,
    open_folder,
    open_subfolder,
    split_path,
    translate_os_errors,
)
from storage.trees import Usage, remove_folder, size_of

CHUNK_BYTES = 1024**2
"""How much of a file is read into memory at once."""
TEXT_LIMIT = 1024**2
"""The size in bytes of the largest file that can be edited in the browser, whose editor is slow with larger ones."""
LIST_LIMIT = 10_000
"""How many entries one listing returns at most. A page with this many still renders in a second."""
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags to open a file for reading. Without O_NONBLOCK, opening a pipe would wait for a writer."""
CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to create a file. With O_EXCL, an existing file is never overwritten."""
FILE_MODE = 0o644
"""The mode of a new file. A file that is replaced keeps its mode."""
_NAME_TAKEN = _("A file or folder with this name already exists. Choose another name or delete it first.")
_WHOLE_WORKSPACE = _("This is the whole workspace. Delete the workspace itself instead.")
_FOLDER_HERE = _("There is a folder at this path, not a file.")


class Readable(Protocol):
    """An object with the `read` method of a binary file."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end."""
        ...


class SpaceCounter(Protocol):
    """Counts bytes and entries against a limit before they are written. `quota.Reservation` implements it."""

    def count(self, *, size_bytes: int = 0, entries: int = 0) -> None:
        """Count what is about to be written. Raises TooLarge if it exceeds the limit."""
        ...


class CountedStream:
    """A stream whose bytes are counted by a SpaceCounter as they are read."""

    def __init__(self, stream: Readable, counter: SpaceCounter) -> None:
        self._stream = stream
        self._counter = counter

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes. Raises TooLarge."""
        data = self._stream.read(size)
        self._counter.count(size_bytes=len(data))
        return data


class Digest(Protocol):
    """A hash of `hashlib`."""

    def update(self, data: bytes, /) -> None:
        """Add more bytes."""
        ...


@dataclass(frozen=True)
class Entry:
    """One entry of a folder. `size` is in bytes, and 0 unless the entry is a file.

    `name` has U+FFFD in place of invalid UTF-8. `version` changes with each write, because it contains the number of
    the inode, its modification time and its size.
    """

    name: str
    kind: Kind
    size: int
    modified: datetime
    version: str


@dataclass(frozen=True)
class Listing:
    """One page of a folder's entries. `next` is the cursor (`after`) for the next page; None on the last page."""

    entries: tuple[Entry, ...]
    next: str | None = None

    @property
    def truncated(self) -> bool:
        """Return whether the folder has more entries than this page."""
        return self.next is not None


@dataclass(frozen=True)
class TextFile:
    """The text of a file, and the version of the file from which it was read."""

    text: str
    version: str


@dataclass(frozen=True)
class WriteResult:
    """The result of a write. `size` and `version` are those of the new file. `created` is False if it replaced another.

    `replaced_bytes` is the size of the replaced file; 0 if there was none.
    """

    created: bool
    size: int
    replaced_bytes: int
    version: str


@dataclass(frozen=True)
class OpenFile:
    """A regular file that is open for reading. Iterate over it for its bytes. The caller closes it."""

    stream: BinaryIO
    size: int
    modified: datetime
    version: str

    def __iter__(self) -> Iterator[bytes]:
        """Yield its bytes in chunks, at most `size` in all, even if a run appends: `size` is the Content-Length."""
        remaining = self.size
        while remaining and (chunk := self.stream.read(min(remaining, CHUNK_BYTES))):
            remaining -= len(chunk)
            yield chunk

    def section(self, start: int, size: int) -> OpenFile:
        """Return the `size` bytes from `start` on as an open file. Both read from the same stream, so use only one."""
        self.stream.seek(start)
        return replace(self, size=size)

    def close(self) -> None:
        """Close it. Safe to repeat."""
        self.stream.close()


def stat(*, root: Path, path: str) -> Entry:
    """Return the entry at `path`, which may be a link itself. A link among the folders above raises UnsafePath.

    The entry of the root, whose path is empty, has an empty name. Raises FileMissing, UnsafePath, WrongKind.
    """
    parts = split_path(path)
    if not parts:
        with open_folder(root=root, parts=()) as folder_fd:
            return entry_of("", os.fstat(folder_fd))
    with open_folder(root=root, parts=parts[:-1]) as folder_fd:
        return entry_of(parts[-1], os.lstat(parts[-1], dir_fd=folder_fd))


def list_folder(
    *,
    root: Path,
    path: str = "",
    limit: int = LIST_LIMIT,
    after: str = "",
    folders_first: bool = False,
    is_listed: Callable[[os.DirEntry[str]], bool] | None = None,
) -> Listing:
    """Return one page of a folder: at most `limit` entries, sorted by name, from the cursor `after` on.

    A cursor names an entry, not a position. So if entries are created or deleted between two pages, no other entry is
    missed or repeated. Entries for which `is_listed` returns False are left out. Raises FileMissing, UnsafePath,
    WrongKind, InvalidInput.
    """
    start = _parse_cursor(after) if after else ""
    with open_folder(root=root, parts=split_path(path)) as folder_fd, os.scandir(folder_fd) as all_entries:
        listed_entries = all_entries if is_listed is None else filter(is_listed, all_entries)
        keys = (_sort_key(entry, folders_first) for entry in listed_entries)
        # `nsmallest` keeps only this many keys in memory. One more than `limit` shows that there is another page.
        page_keys = heapq.nsmallest(limit + 1, (key for key in keys if key > start) if start else keys)
        names = [key[1:] for key in page_keys[:limit]]
        entries = [entry_of(name, status) for name in names if (status := lstat_or_none(folder_fd, name))]
    return Listing(tuple(entries), _cursor(page_keys[limit - 1]) if len(page_keys) > limit else None)


def _sort_key(entry: os.DirEntry[str], folders_first: bool) -> str:
    """Return a text that sorts an entry into a listing: a digit, then its name.

    If folders come first, their digit is 0 and that of other entries is 1. Else it is 0 for all. A folder may have
    100,000 entries, and Python compares texts faster than tuples.
    """
    try:
        # Some file systems do not store the kind of an entry in the folder. Then `is_dir` calls stat, which may fail.
        return f"1{entry.name}" if folders_first and not entry.is_dir(follow_symlinks=False) else f"0{entry.name}"
    except OSError:
        return f"1{entry.name}"


def _cursor(key: str) -> str:
    """Return the cursor after the entry with this sort key. The name is in Base64, because it may be invalid UTF-8."""
    return key[0] + base64.urlsafe_b64encode(os.fsencode(key[1:])).decode()


def _parse_cursor(cursor: str) -> str:
    """Return the sort key in a cursor. Raises InvalidInput."""
    try:
        digit = ("0", "1").index(cursor[0])
        return f"{digit}{os.fsdecode(base64.b64decode(cursor[1:], altchars=b'-_', validate=True))}"
    except ValueError:  # `binascii.Error` is a subclass
        raise InvalidInput(fields={"after": _("This is not a cursor. Use the one of the page before.")}) from None


def read(*, root: Path, path: str) -> OpenFile:
    """Open a regular file. Raises FileMissing, UnsafePath, WrongKind, Unreadable."""
    parts = split_path(path)
    if not parts:
        raise WrongKind(_FOLDER_HERE)
    with open_folder(root=root, parts=parts[:-1]) as folder_fd:
        return read_entry(folder_fd=folder_fd, name=parts[-1])


def read_entry(*, folder_fd: int, name: str) -> OpenFile:
    """Open a regular file in an open folder. Raises as `read`, if called in the block of `open_folder`.

    That block translates the OSErrors that are raised here.
    """
    # Check before opening, because opening a device can have side effects. Check again after opening, because a run may
    # have replaced the file in between.
    _require_file(os.lstat(name, dir_fd=folder_fd))
    file_fd = os.open(name, OPEN_FILE, dir_fd=folder_fd)
    try:
        status = os.fstat(file_fd)
        _require_file(status)
    except StorageError:
        os.close(file_fd)
        raise
    return OpenFile(os.fdopen(file_fd, "rb"), status.st_size, _to_datetime(status.st_mtime), _version(status))


def read_text(*, root: Path, path: str, limit_bytes: int = TEXT_LIMIT) -> str:
    """Return the text of a UTF-8 file with its line ends. Raises NotText, also for more than `limit_bytes`."""
    return read_versioned_text(root=root, path=path, limit_bytes=limit_bytes).text


def read_versioned_text(*, root: Path, path: str, limit_bytes: int = TEXT_LIMIT) -> TextFile:
    """Return a text file as `read_text`, with its version."""
    file = read(root=root, path=path)
    with file.stream as stream:
        data = stream.read(limit_bytes + 1)  # one byte more shows that the file is too large
    if len(data) > limit_bytes:
        raise NotText(_("This file is too large to edit here. Download it instead."))
    if b"\0" in data:
        raise NotText
    try:
        return TextFile(data.decode(), file.version)
    except UnicodeDecodeError:
        raise NotText from None


def write(
    *,
    root: Path,
    path: str,
    stream: Readable,
    scratch: Path,
    limit_bytes: int,
    expected_versions: Collection[str] | None = None,
    lock: AbstractContextManager[object] | None = None,
) -> WriteResult:
    """Create or replace a file, and create the folders above it.

    The bytes are written to a temporary file in `scratch`, which is then renamed to `path`. `scratch` must be on the
    same disk, and only the console may write to it. A link at `path` is replaced, not followed. A file that is replaced
    keeps its mode.

    `expected_versions` has the versions of the file that may be replaced; `*` means any. If it is empty, there must be
    no file. If it is None, nothing is compared. `lock` is held from the comparison to the rename. Raises FileChanged
    for another version, TooLarge above `limit_bytes`, UnsafePath, WrongKind, StorageFull.
    """
    parts = split_path(path)
    if not parts:
        raise WrongKind(_FOLDER_HERE)
    # Fail before the body is received if there is a folder or another version. `place` checks this again.
    try:
        status = stat(root=root, path=path)
        _require_not_folder(status.kind)
        _require_expected_version(expected_versions, status.version)
    except FileMissing:
        _require_expected_version(expected_versions, version=None)
    temporary = scratch / secrets.token_hex(16)
    try:
        with translate_os_errors(), os.fdopen(os.open(temporary, CREATE_FILE, 0o600), "wb") as file:
            copy(stream=stream, target=file, limit_bytes=limit_bytes)
            file.flush()
            os.fsync(file.fileno())
        return place(root=root, path=path, source=temporary, expected_versions=expected_versions, lock=lock)
    finally:
        temporary.unlink(missing_ok=True)


def place(
    *,
    root: Path,
    path: str,
    source: Path,
    expected_versions: Collection[str] | None = None,
    lock: AbstractContextManager[object] | None = None,
) -> WriteResult:
    """Rename the complete file `source` to `path`, and create the folders above it. Raises as `write`.

    `source` must be on the same disk, and only the console may write to it. `write` explains the other parameters.
    """
    parts = split_path(path)
    if not parts:
        raise WrongKind(_FOLDER_HERE)
    with open_folder(root=root, parts=parts[:-1], create=True) as folder_fd, lock or nullcontext():
        replaced = lstat_or_none(folder_fd, parts[-1])
        _require_expected_version(expected_versions, _version(replaced) if replaced else None)
        was_file = bool(replaced and modes.S_ISREG(replaced.st_mode))
        # 0o777, because the bits setuid, setgid and sticky are not kept.
        source.chmod(replaced.st_mode & 0o777 if replaced and was_file else FILE_MODE)
        size = source.stat().st_size
        os.rename(source, parts[-1], dst_dir_fd=folder_fd)
        version = _version(os.lstat(parts[-1], dir_fd=folder_fd))
        os.fsync(folder_fd)  # so that the rename survives a crash of the machine
    return WriteResult(
        created=replaced is None,
        size=size,
        replaced_bytes=replaced.st_size if replaced and was_file else 0,
        version=version,
    )


def merge(*, root: Path, path: str, source: Path) -> Usage:
    """Move everything in the folder `source` into the folder `path`; return the usage of the replaced entries.

    Files and links with the same names are replaced, folders with the same names are merged, and missing folders are
    created. `source` must be on the same disk, and only the console may write to it. Raises UnsafePath, or WrongKind if
    a folder is where a file should be or vice versa; this is checked before anything is moved.
    """
    top = split_path(path)
    for parts, names, _source_fd in _walk(source):
        # A folder that does not exist yet has nothing that could be in the way.
        with suppress(FileMissing), open_folder(root=root, parts=(*top, *parts)) as folder_fd:
            for name in names:
                if status := lstat_or_none(folder_fd, name):
                    _require_not_folder(kind_of(status.st_mode))
    replaced = Usage()
    for parts, names, source_fd in _walk(source):
        with open_folder(root=root, parts=(*top, *parts), create=True) as folder_fd:
            for name in names:
                if status := lstat_or_none(folder_fd, name):
                    replaced += Usage(size_of(status), 1)
                os.rename(name, name, src_dir_fd=source_fd, dst_dir_fd=folder_fd)
    return replaced


def _walk(folder: Path) -> Iterator[tuple[tuple[str, ...], list[str], int]]:
    """Yield for `folder` and each folder below: its path, the names of its files and links, and its descriptor."""
    for parent, subfolders, names, folder_fd in os.fwalk(folder):
        # `fwalk` lists links to folders among the folders, but does not enter them.
        links = [name for name in subfolders if modes.S_ISLNK(os.lstat(name, dir_fd=folder_fd).st_mode)]
        yield Path(parent).relative_to(folder).parts, [*names, *links], folder_fd


def copy(*, stream: Readable, target: BinaryIO, limit_bytes: int, digest: Digest | None = None) -> int:
    """Copy all of `stream` to `target`, hash it with `digest`, and return its size. Raises TooLarge above the limit."""
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
    """Create a folder and those above it; return whether it is new. Raises UnsafePath, WrongKind for a file."""
    parts = split_path(path)
    if not parts:
        return False
    with open_folder(root=root, parts=parts[:-1], create=True) as folder_fd:
        created = lstat_or_none(folder_fd, parts[-1]) is None
        os.close(open_subfolder(folder_fd, parts[-1], create=True))
    return created


def move(*, root: Path, source: str, target: str) -> None:
    """Rename a file or folder, and create the folders above its new path. Raises NameTaken, FileMissing, UnsafePath."""
    old, new = split_path(source), split_path(target)
    if not old or not new or new[: len(old)] == old:
        raise UnsafePath(_("A folder can't be moved into itself. Choose another place."))
    with open_folder(root=root, parts=old[:-1]) as old_folder_fd:
        # Raises if the source is missing, before folders are created for it. A folder can be renamed only if it is
        # writable.
        trash.grant_owner_access(old[-1], old_folder_fd)
        with open_folder(root=root, parts=new[:-1], create=True) as new_folder_fd:
            if lstat_or_none(new_folder_fd, new[-1]) is not None:
                raise NameTaken(_NAME_TAKEN)
            # A file that a run creates after this check is replaced: Python does not offer RENAME_NOREPLACE.
            os.rename(old[-1], new[-1], src_dir_fd=old_folder_fd, dst_dir_fd=new_folder_fd)


def move_out(*, root: Path, path: str, target: Path) -> None:
    """Rename a file or folder of the workspace to `target`, a free path on the same disk.

    Raises FileMissing, UnsafePath, WrongKind.
    """
    parts = split_path(path)
    if not parts:
        raise WrongKind(_WHOLE_WORKSPACE)
    with open_folder(root=root, parts=parts[:-1]) as folder_fd:
        trash.grant_owner_access(parts[-1], folder_fd)  # a folder can be renamed only if it is writable
        os.rename(parts[-1], target, src_dir_fd=folder_fd)


def move_in(*, source: Path, root: Path, path: str) -> None:
    """Rename `source`, on the same disk, to a free path in the workspace; create the folders above it.

    Raises NameTaken, UnsafePath, WrongKind.
    """
    parts = split_path(path)
    if not parts:
        raise WrongKind(_FOLDER_HERE)
    with open_folder(root=root, parts=parts[:-1], create=True) as folder_fd:
        if lstat_or_none(folder_fd, parts[-1]) is not None:
            raise NameTaken(_NAME_TAKEN)
        os.rename(source, parts[-1], dst_dir_fd=folder_fd)


def missing_entries(*, root: Path, path: str) -> int:
    """Return how many components of the path do not exist yet: the new entries for which callers reserve quota.

    If another process creates or removes folders meanwhile, the number is wrong, until the workspace is measured again.
    Raises UnsafePath, WrongKind.
    """
    parts = split_path(path)
    with translate_os_errors():
        folder_fd = os.open(root, OPEN_FOLDER)
        try:
            for number, part in enumerate(parts):
                if lstat_or_none(folder_fd, part) is None:
                    return len(parts) - number
                if number < len(parts) - 1:  # the last component may be a file
                    child_fd = open_subfolder(folder_fd, part, create=False)
                    os.close(folder_fd)
                    folder_fd = child_fd
        finally:
            os.close(folder_fd)
    return 0


def delete(*, root: Path, path: str, scratch: Path) -> Usage:
    """Remove a file, a link, or a folder with its contents; return the freed usage. Raises FileMissing, UnsafePath.

    A folder disappears at once, because it is renamed into `scratch` and removed there.
    """
    parts = split_path(path)
    if not parts:
        raise WrongKind(_WHOLE_WORKSPACE)
    with open_folder(root=root, parts=parts[:-1]) as folder_fd:
        status = os.lstat(parts[-1], dir_fd=folder_fd)
        if not modes.S_ISDIR(status.st_mode):
            os.unlink(parts[-1], dir_fd=folder_fd)
            return Usage(size_of(status), 1)
        return remove_folder(parent_fd=folder_fd, name=parts[-1], scratch=scratch)


def display_name(name: str) -> str:
    """Return a file's name as text that can be shown, with U+FFFD in place of invalid UTF-8.

    The module `os` returns invalid UTF-8 as lone surrogates, which can be encoded neither in JSON nor in a page.
    """
    return name.encode(errors="surrogateescape").decode(errors="replace")


def entry_of(name: str, status: os.stat_result) -> Entry:
    """Return the entry of a file with this name and status."""
    kind = kind_of(status.st_mode)
    size = status.st_size if kind is Kind.FILE else 0
    return Entry(display_name(name), kind, size, _to_datetime(status.st_mtime), _version(status))


def _version(status: os.stat_result) -> str:
    """Return the version of a file, as `Entry` explains it."""
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _require_expected_version(expected_versions: Collection[str] | None, version: str | None) -> None:
    """Raise FileChanged unless `write` may replace a file of this version; None means that there is no file."""
    if expected_versions is None:
        return
    if version is None:
        if expected_versions:
            raise FileChanged
    elif version not in expected_versions and "*" not in expected_versions:
        raise FileChanged


def _to_datetime(seconds: float) -> datetime:
    """Convert a file's Unix time. Customers' code can set times that datetime cannot represent; they become 1970."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC)


def _require_file(status: os.stat_result) -> None:
    """Raise UnsafePath for a link, WrongKind for anything else that is not a regular file."""
    kind = kind_of(status.st_mode)
    if kind is Kind.LINK:
        raise UnsafePath
    _require_not_folder(kind)
    if kind is not Kind.FILE:
        raise WrongKind(_("This is a pipe, socket or device, not a file."))


def _require_not_folder(kind: Kind) -> None:
    if kind is Kind.FOLDER:
        raise WrongKind(_FOLDER_HERE)

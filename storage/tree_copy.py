"""Copy files and folders that customers' code has written, and may still write to.

Paths are opened by `paths`, which follows no links. Only regular files are read, because reading a pipe would wait for
a writer, and reading a device can have side effects.
"""

from __future__ import annotations

import hashlib
import os
import stat as modes
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from django.utils.translation import gettext_lazy as _

from storage.archives import DEPTH_LIMIT
from storage.errors import FileMissing, SourceChanged, TooLarge, UnsafePath, WrongKind
from storage.files import CHUNK_BYTES, CREATE_FILE, FILE_MODE, OPEN_FILE, SpaceCounter
from storage.manifests import FileDigest
from storage.paths import FOLDER_MODE, SWAPPED_ERRNOS, open_folder, split_path, translate_os_errors
from storage.trees import Usage

Parts = tuple[str, ...]
"""The components of a path below the source's root, or below the folder that is copied."""


@dataclass(frozen=True)
class CopyResult:
    """The totals of a copy. `usage` includes the target folder; `skipped_count` is the number of entries left out."""

    usage: Usage
    file_count: int
    skipped_count: int
    sha256: str
    """The SHA-256 of the list of all files, see `listing_sha256`."""


def copy_tree(
    *, root: Path, path: str, target: Path, counter: SpaceCounter, max_entries: int, keep_links: bool = False
) -> CopyResult:
    """Copy the file at `path`, or the contents of the folder there, into the empty folder `target`.

    Only the console may have access to `target`. `counter` counts each entry and each chunk before it is written.
    Names, modification times, and whether a file is executable are kept. Pipes, sockets and devices are left out, and
    also links, unless `keep_links` is True. Links are then copied unchecked, so the console must never follow them.

    Raises FileMissing, UnsafePath, WrongKind, Unreadable, TooLarge, StorageFull, and SourceChanged if a process changes
    the source meanwhile. The caller must then remove `target`.
    """
    parts = split_path(path)
    copier = _Copier(root, target, counter, max_entries, keep_links=keep_links)
    counter.count(entries=1)  # `target` itself
    with translate_os_errors():
        if not parts or copier.is_folder(parts):
            copier.copy_folders(parts)
        else:
            copier.copy_file(parts)
    return copier.result()


def listing_sha256(digests: Iterable[FileDigest]) -> str:
    """Return the SHA-256 of a list of files, which is in the format of the program sha256sum and sorted by path.

    Customers can compute it: they run sha256sum for all files, and then for its output.
    """
    listing = hashlib.sha256()
    for path, sha256 in sorted(digests):
        escaped = path.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
        mark = b"\\" if escaped != path else b""  # sha256sum writes a backslash before a line with an escaped path
        listing.update(mark + sha256 + b"  " + escaped + b"\n")
    return listing.hexdigest()


class _Copier:
    """Copies one tree."""

    def __init__(self, root: Path, target: Path, counter: SpaceCounter, max_entries: int, *, keep_links: bool) -> None:
        self._root = root
        self._target = target
        self._counter = counter
        self._max_entries = max_entries
        self._keep_links = keep_links
        self._entries = 1  # the target folder itself
        self._size = 0
        self._skipped = 0
        self._digests: list[FileDigest] = []
        """The paths and hashes of the copied files."""

    def is_folder(self, parts: Parts) -> bool:
        """Return True for a folder, False for a file. Raises UnsafePath for a link, WrongKind for anything else."""
        with open_folder(root=self._root, parts=parts[:-1]) as folder_fd:
            mode = os.lstat(parts[-1], dir_fd=folder_fd).st_mode
        if modes.S_ISLNK(mode):
            raise UnsafePath
        if not modes.S_ISDIR(mode) and not modes.S_ISREG(mode):
            raise WrongKind(_("This is a pipe, socket or device, not a file."))
        return modes.S_ISDIR(mode)

    def copy_file(self, parts: Parts) -> None:
        """Copy one file to the top of the target."""
        with (
            open_folder(root=self._root, parts=parts[:-1]) as source_fd,
            open_folder(root=self._target, parts=()) as target_fd,
        ):
            self._count()
            self._copy_regular_file(source_fd, target_fd, parts[-1:])

    def copy_folders(self, base: Parts) -> None:
        """Copy the folder `base` with everything below it."""
        pending: list[Parts] = [()]
        while pending:
            relative = pending.pop()
            try:
                with (
                    open_folder(root=self._root, parts=(*base, *relative)) as source_fd,
                    open_folder(root=self._target, parts=relative) as target_fd,
                ):
                    pending += self._copy_folder(source_fd, target_fd, relative)
            except (FileMissing, UnsafePath, WrongKind) as error:
                if relative:  # a subfolder, which existed when its parent was listed
                    raise SourceChanged from error
                raise

    def result(self) -> CopyResult:
        """Return the totals."""
        usage = Usage(self._size, self._entries)
        return CopyResult(usage, len(self._digests), self._skipped, listing_sha256(self._digests))

    def _copy_folder(self, source_fd: int, target_fd: int, relative: Parts) -> list[Parts]:
        """Copy the entries of one open folder to another; create its subfolders and return their paths."""
        subfolders: list[Parts] = []
        with os.scandir(source_fd) as entries:
            for entry in entries:
                parts = (*relative, entry.name)
                try:
                    mode = os.lstat(entry.name, dir_fd=source_fd).st_mode
                    if modes.S_ISDIR(mode):
                        self._count(depth=len(parts))
                        os.mkdir(entry.name, FOLDER_MODE, dir_fd=target_fd)
                        subfolders.append(parts)
                    elif modes.S_ISREG(mode):
                        self._count()
                        self._copy_regular_file(source_fd, target_fd, parts)
                    elif modes.S_ISLNK(mode) and self._keep_links:
                        self._count()
                        os.symlink(os.readlink(entry.name, dir_fd=source_fd), entry.name, dir_fd=target_fd)
                    else:
                        self._skipped += 1
                except OSError as error:
                    if error.errno in SWAPPED_ERRNOS:  # the entry was removed or replaced since it was listed
                        raise SourceChanged from error
                    raise
        return subfolders

    def _copy_regular_file(self, source_fd: int, target_fd: int, parts: Parts) -> None:
        """Copy the regular file `parts[-1]` of one open folder to another."""
        name = parts[-1]
        # By now a link or pipe may be here: OPEN_FILE follows no link, and does not wait for a pipe's writer.
        file_fd = os.open(name, OPEN_FILE, dir_fd=source_fd)
        with os.fdopen(file_fd, "rb") as stream:
            before = os.fstat(file_fd)
            if not modes.S_ISREG(before.st_mode):  # it was replaced since it was listed
                raise SourceChanged
            digest = hashlib.sha256()
            mode = FILE_MODE | (0o111 if before.st_mode & 0o100 else 0)
            with os.fdopen(os.open(name, CREATE_FILE, mode, dir_fd=target_fd), "wb") as copy:
                remaining = before.st_size  # else a file that grows as fast as it is read would never end
                while remaining and (chunk := stream.read(min(remaining, CHUNK_BYTES))):
                    remaining -= len(chunk)
                    self._counter.count(size_bytes=len(chunk))
                    digest.update(chunk)
                    copy.write(chunk)
                copy.flush()
                with suppress(OverflowError):  # customers' code can set times that cannot be stored here
                    os.utime(copy.fileno(), ns=(before.st_mtime_ns, before.st_mtime_ns))
            after = os.fstat(file_fd)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise SourceChanged
        self._size += before.st_size
        self._digests.append(FileDigest(os.fsencode("/".join(parts)), digest.hexdigest().encode()))

    def _count(self, *, depth: int = 0) -> None:
        """Count an entry that is about to be created. Raises TooLarge."""
        self._entries += 1
        if self._entries > self._max_entries:
            raise TooLarge(
                _("This folder has more than %(most)d files. Choose a smaller one.") % {"most": self._max_entries}
            )
        if depth > DEPTH_LIMIT:
            raise TooLarge(
                _("This folder nests folders more than %(most)d levels deep. Use fewer levels.") % {"most": DEPTH_LIMIT}
            )
        self._counter.count(entries=1)

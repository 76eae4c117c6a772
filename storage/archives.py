"""Unpack archives from untrusted users into a folder to which only the console has access.

Several entries of an archive can attack together. For example, links that each seem to stay in the folder can together
lead out of it. A name can occur twice, or a file can be used as a folder too. All this is refused. An archive can also
have too many bytes, entries, links or folders. The limits here apply to what is written, and not to the sizes that the
archive declares.
"""

from __future__ import annotations

import os
import stat as modes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from django.utils.translation import gettext_lazy as _

from storage.archive_readers import (
    MALFORMED_ERRORS,
    ArchiveEntry,
    ArchiveFormat,
    ArchiveLimits,
    detect_format,
    read_entries,
)
from storage.errors import BadArchive, FileMissing, TooLarge, UnsafePath, WrongKind
from storage.files import CREATE_FILE, FILE_MODE, CountedStream, SpaceCounter, copy
from storage.paths import OPEN_FOLDER, PATH_LIMIT, lstat_or_none, open_folder, open_subfolder, translate_os_errors

DEPTH_LIMIT = 64
"""How deep folders may be nested; in real datasets it is far less. It also limits the work of `_stays_inside`, which
copies the path at every step."""
LINK_FOLLOW_LIMIT = 40
"""How many links Linux follows to resolve one path (MAXSYMLINKS), before it fails with ELOOP."""
LINK_COUNT_LIMIT = 50_000
"""How many symbolic links an archive may have. All are held in memory, because they are created at the end."""
LINK_STEP_LIMIT = 2_000_000
"""How many path components the check of all links of an archive may visit, which takes a few seconds. Without a limit,
each of 50,000 links could make it visit 80,000 components (40 targets with 2,000 components that stay in place,
`./././...`)."""


@dataclass(frozen=True)
class FolderTotals:
    """What a new folder contains in all. Files include links; entries include folders, also the new folder itself."""

    size_bytes: int
    file_count: int
    entry_count: int


def unpack_archive(
    *,
    stream: BinaryIO,
    target: Path,
    limits: ArchiveLimits,
    counter: SpaceCounter | None = None,
    archive_format: ArchiveFormat | None = None,
) -> FolderTotals:
    """Unpack `stream`, a seekable file, into `target`, an empty folder.

    Keep names, content, whether a file is executable, and links that stay inside the folder. Drop owners, times and
    setuid bits. `counter` counts each entry and each chunk of content before it is written. Raises BadArchive,
    TooLarge, UnsafePath, StorageFull; the caller must then remove `target`.
    """
    archive_format = archive_format or detect_format(stream=stream)
    with _translate_malformed(), translate_os_errors(), _Writer(target, limits, counter) as writer:
        for entry in read_entries(stream=stream, archive_format=archive_format, limits=limits):
            writer.add(entry)
        writer.create_links()
        return FolderTotals(writer.size, writer.files, writer.entries + 1)  # one more for the target folder


@contextmanager
def _translate_malformed() -> Iterator[None]:
    """Raise BadArchive in place of the errors that a malformed archive causes."""
    # FileMissing is raised for a hard link into a missing folder, WrongKind for a file that is used as a folder.
    try:
        yield
    except (*MALFORMED_ERRORS, FileMissing, WrongKind) as error:
        raise BadArchive from error


class _Writer:
    """Writes entries into the target folder, within the limits."""

    def __init__(self, folder: Path, limits: ArchiveLimits, counter: SpaceCounter | None) -> None:
        self.size = 0
        """The bytes of content that were written."""
        self.files = 0
        self.entries = 0
        """Files, links and folders that were created, without the target folder."""
        self._entries_read = 0
        """How many entries were read. Those for existing folders create nothing, but take time, so they are limited."""
        self._counter = counter
        self._folder = folder
        self._limits = limits
        self._links: dict[tuple[str, ...], str] = {}
        """The target of each symbolic link, as the archive has it, by the link's path."""
        self._steps_left = LINK_STEP_LIMIT
        # The folder of the last entry stays open, because the next entry is usually in the same folder.
        self._open_parts: tuple[str, ...] = ()
        self._open_fd = os.open(folder, OPEN_FOLDER)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self._open_fd)

    def add(self, entry: ArchiveEntry) -> None:
        """Write one entry. A symbolic link is only stored until `create_links`, so that no path leads through one."""
        self._entries_read += 1
        self._require_within_limit(self._entries_read)
        if entry.is_folder:
            self._enter(entry.parts)  # counts the folders that it creates
            return
        self._count()
        # An entry without parts is the target folder itself. A symbolic link is created at the end, so the file
        # system would not refuse a second entry with its name.
        if not entry.parts or entry.parts in self._links:
            raise _duplicate_error(entry.parts)
        self.files += 1
        if entry.link is not None:
            self._store_link(entry.parts, entry.link)
        elif entry.hardlink_to is not None:
            self._add_hard_link(entry.parts, entry.hardlink_to)
        else:
            self._write(entry)

    def create_links(self) -> None:
        """Create the symbolic links. Raises UnsafePath if one leads outside, directly or through other links."""
        for parts, link in self._links.items():
            if not self._stays_inside(parts):
                raise UnsafePath(_unsafe_link_message(parts))
            try:
                os.symlink(link, parts[-1], dir_fd=self._enter(parts[:-1]))
            except FileExistsError:  # a folder with this name was created after `add`
                raise _duplicate_error(parts) from None

    def _write(self, entry: ArchiveEntry) -> None:
        """Write a regular file."""
        parent_fd = self._enter(entry.parts[:-1])
        mode = FILE_MODE | 0o111 if entry.is_executable else FILE_MODE
        try:
            file_fd = os.open(entry.parts[-1], CREATE_FILE, mode, dir_fd=parent_fd)
        except FileExistsError:
            raise _duplicate_error(entry.parts) from None
        with os.fdopen(file_fd, "wb") as file:
            if entry.content is not None:
                content = CountedStream(entry.content, self._counter) if self._counter else entry.content
                self.size += copy(stream=content, target=file, limit_bytes=self._limits.max_bytes - self.size)

    def _store_link(self, parts: tuple[str, ...], link: str) -> None:
        """Store the target of a symbolic link for `create_links`. Raises BadArchive, TooLarge."""
        if not link or len(link) > PATH_LIMIT:
            raise BadArchive
        if len(self._links) == LINK_COUNT_LIMIT:
            raise TooLarge(_("The archive has too many links. Add the files instead of links."))
        self._links[parts] = link

    def _add_hard_link(self, parts: tuple[str, ...], hardlink_to: tuple[str, ...]) -> None:
        """Create a hard link to a regular file that an earlier entry has written."""
        # Not `_enter`, because it would create a missing folder.
        with open_folder(root=self._folder, parts=hardlink_to[:-1]) as source_fd:
            status = lstat_or_none(source_fd, hardlink_to[-1]) if hardlink_to else None
            if status is None or not modes.S_ISREG(status.st_mode):
                raise BadArchive
            parent_fd = self._enter(parts[:-1])
            try:
                os.link(hardlink_to[-1], parts[-1], src_dir_fd=source_fd, dst_dir_fd=parent_fd, follow_symlinks=False)
            except FileExistsError:
                raise _duplicate_error(parts) from None

    def _enter(self, parts: tuple[str, ...]) -> int:
        """Return the descriptor of a folder inside the target, open until the next call. Create missing folders."""
        if parts == self._open_parts:
            return self._open_fd
        if len(parts) > DEPTH_LIMIT:
            raise BadArchive(_("The archive nests folders more than 64 levels deep. Use fewer levels."))
        folder_fd = os.open(self._folder, OPEN_FOLDER)
        for part in parts:
            try:
                child_fd = self._open_subfolder(folder_fd, part)
            finally:
                os.close(folder_fd)
            folder_fd = child_fd
        os.close(self._open_fd)
        self._open_parts, self._open_fd = parts, folder_fd
        return folder_fd

    def _open_subfolder(self, folder_fd: int, part: str) -> int:
        """Open a subfolder. If it is missing, count it against the limits and create it."""
        with suppress(FileNotFoundError):
            return open_subfolder(folder_fd, part, create=False)
        self._count()
        return open_subfolder(folder_fd, part, create=True)

    def _count(self) -> None:
        """Count an entry that is about to be created. Raises TooLarge."""
        self.entries += 1
        self._require_within_limit(self.entries)
        if self._counter:
            self._counter.count(entries=1)

    def _require_within_limit(self, entries: int) -> None:
        if entries > self._limits.max_entries:
            raise TooLarge(_("The archive has more files than allowed. Upload fewer files."))

    def _stays_inside(self, parts: tuple[str, ...]) -> bool:
        """Return whether the link at `parts` stays inside the target when Linux resolves it.

        On the way it may lead through other links of the archive. A link that exceeds a limit counts as leading out.
        """
        # `position` is the folder reached so far. `remaining` has the components to resolve, the next one at the end.
        position, remaining = list(parts[:-1]), self._links[parts].split("/")[::-1]
        followed_links = 1
        inside = not self._links[parts].startswith("/")
        while remaining and inside:
            part = remaining.pop()
            if part == "..":
                inside = bool(position)  # in the target folder itself, `..` leads out
                position = position[:-1]
            elif part not in {"", "."}:
                link = self._links.get((*position, part))
                if link is None:  # a file, a folder, or a missing entry
                    position.append(part)
                else:
                    inside = not link.startswith("/")
                    remaining.extend(link.split("/")[::-1])
                    followed_links += 1
            self._steps_left -= 1
            within_limits = (
                self._steps_left > 0 and followed_links <= LINK_FOLLOW_LIMIT and len(position) <= DEPTH_LIMIT
            )
            inside = inside and within_limits
        return inside


def _duplicate_error(parts: Sequence[str]) -> BadArchive:
    return BadArchive(_("The archive contains %(name)s twice. Remove one.") % {"name": "/".join(parts) or "."})


def _unsafe_link_message(parts: Sequence[str]) -> str:
    return _("The link %(name)s in this archive points outside it or leads through too many links. Remove it.") % {
        "name": "/".join(parts)
    }

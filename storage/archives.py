"""Unpack archives from untrusted users into a folder that only the console can see yet.

An archive can attack by several entries together: links that lead outside only in combination, one name twice, a file
used as a folder. It can also have too many bytes, entries, links or folders. The limits here count what is written,
and trust no size that the archive declares.
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

from storage.archive_readers import MALFORMED_ERRORS, Entry, Format, Limits, detect_format, read_entries
from storage.errors import BadArchive, FileMissing, TooLarge, UnsafePath, WrongKind
from storage.files import CREATE_FILE, FILE_MODE, Meter, MeteredStream, copy
from storage.paths import OPEN_FOLDER, PATH_LIMIT, lstat_or_none, open_folder, open_subfolder, translate_os_errors

DEPTH_LIMIT = 64
"""How deep folders may nest; real datasets are far flatter. This also bounds the work of `_stays_inside`, which copies
the path at every step."""
LINK_FOLLOW_LIMIT = 40
"""How many links Linux follows to resolve one path (MAXSYMLINKS); more fail with ELOOP."""
LINK_COUNT_LIMIT = 50_000
"""Symbolic links in one archive. They are held in memory until the end, because they are created last."""
LINK_STEP_LIMIT = 2_000_000
"""Path components that the check of all links together may visit: a few seconds of work.

One link can visit 80,000 components (40 targets of 2,000 each, `a/a/…`), and an archive can have 50,000 links."""


@dataclass(frozen=True)
class Unpacked:
    """Totals of an unpacked archive: bytes of content, files (with links) and entries (with the target folder)."""

    size_bytes: int
    file_count: int
    entry_count: int


def unpack_archive(
    *, stream: BinaryIO, target: Path, limits: Limits, meter: Meter | None = None, kind: Format | None = None
) -> Unpacked:
    """Unpack `stream`, a seekable file, into `target`, an empty folder. Overwrites nothing.

    Keeps content, names, relative links that stay inside, and whether a file is executable. Drops owner, times and
    setuid. `meter` counts each entry and each chunk of content before it is written. Raises BadArchive, TooLarge,
    UnsafePath, StorageFull. After an error the caller removes `target`.
    """
    kind = kind or detect_format(stream=stream)
    with _translate_malformed(), translate_os_errors(), _Writer(target, limits, meter) as writer:
        for entry in read_entries(stream=stream, kind=kind, limits=limits):
            writer.add(entry)
        writer.create_links()
        return Unpacked(writer.size, writer.files, writer.entries + 1)  # 1: the target folder


@contextmanager
def _translate_malformed() -> Iterator[None]:
    """Raise BadArchive in place of the errors that a malformed archive causes."""
    try:
        yield
    except (
        *MALFORMED_ERRORS,
        FileMissing,
        WrongKind,
    ) as error:  # FileMissing: a hard link into a missing folder; WrongKind: a file used as a folder
        raise BadArchive from error


class _Writer:
    """Writes entries into the target folder, within the limits."""

    def __init__(self, folder: Path, limits: Limits, meter: Meter | None) -> None:
        self.size = 0
        self.files = 0
        self.entries = 0
        """Files, links and folders that were created, without the target folder."""
        self._entries_read = 0
        """Entries read so far. An entry for an existing folder creates nothing but takes time, so it counts."""
        self._meter = meter
        self._folder = folder
        self._limits = limits
        self._links: dict[tuple[str, ...], str] = {}
        """Target of each symbolic link, as the archive gives it, by the link's path."""
        self._steps_left = LINK_STEP_LIMIT
        # The folder of the last entry stays open, because the next entry is usually in it too.
        self._open_parts: tuple[str, ...] = ()
        self._open_handle = os.open(folder, OPEN_FOLDER)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self._open_handle)

    def add(self, entry: Entry) -> None:
        """Write one entry. Symbolic links are only remembered: until `create_links`, no path can lead through one."""
        self._entries_read += 1
        self._require_within_limit(self._entries_read)
        if entry.is_folder:
            self._enter(entry.parts)  # counts the folders that it creates
            return
        self._count()
        # An entry without parts is `.`, the target folder. Links are created last, so the disk lacks their names.
        if not entry.parts or entry.parts in self._links:
            raise _duplicate_error(entry.parts)
        self.files += 1
        if entry.link is not None:
            self._remember_link(entry.parts, entry.link)
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
            except FileExistsError:  # a folder took the name after `add`
                raise _duplicate_error(parts) from None

    def _write(self, entry: Entry) -> None:
        parent = self._enter(entry.parts[:-1])
        mode = FILE_MODE | 0o111 if entry.is_executable else FILE_MODE
        try:
            handle = os.open(entry.parts[-1], CREATE_FILE, mode, dir_fd=parent)
        except FileExistsError:
            raise _duplicate_error(entry.parts) from None
        with os.fdopen(handle, "wb") as file:
            if entry.content is not None:
                content = MeteredStream(entry.content, self._meter) if self._meter else entry.content
                self.size += copy(stream=content, target=file, limit_bytes=self._limits.max_bytes - self.size)

    def _remember_link(self, parts: tuple[str, ...], link: str) -> None:
        if not link or len(link) > PATH_LIMIT:
            raise BadArchive
        if len(self._links) == LINK_COUNT_LIMIT:
            raise TooLarge(_("The archive has too many links. Add the files instead of links."))
        self._links[parts] = link

    def _add_hard_link(self, parts: tuple[str, ...], hardlink_to: tuple[str, ...]) -> None:
        """Create a hard link to a regular file of the archive that is already written."""
        # Not `_enter`, which would create a missing folder.
        with open_folder(root=self._folder, parts=hardlink_to[:-1]) as source:
            status = lstat_or_none(source, hardlink_to[-1]) if hardlink_to else None
            if status is None or not modes.S_ISREG(status.st_mode):
                raise BadArchive
            parent = self._enter(parts[:-1])
            try:
                os.link(hardlink_to[-1], parts[-1], src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            except FileExistsError:
                raise _duplicate_error(parts) from None

    def _enter(self, parts: tuple[str, ...]) -> int:
        """Return the handle of a folder inside the target; create missing folders. Valid until the next call."""
        if parts == self._open_parts:
            return self._open_handle
        if len(parts) > DEPTH_LIMIT:
            raise BadArchive(_("The archive nests folders more than 64 levels deep. Use fewer levels."))
        handle = os.open(self._folder, OPEN_FOLDER)
        for part in parts:
            try:
                child = self._open_subfolder(handle, part)
            finally:
                os.close(handle)
            handle = child
        os.close(self._open_handle)
        self._open_parts, self._open_handle = parts, handle
        return handle

    def _open_subfolder(self, handle: int, part: str) -> int:
        """Open a subfolder. If it is missing, count it against the limits and create it."""
        with suppress(FileNotFoundError):
            return open_subfolder(handle, part, create=False)
        self._count()
        return open_subfolder(handle, part, create=True)

    def _count(self) -> None:
        """Count an entry that is about to be created. Raises TooLarge."""
        self.entries += 1
        self._require_within_limit(self.entries)
        if self._meter:
            self._meter.count(entries=1)

    def _require_within_limit(self, entries: int) -> None:
        if entries > self._limits.max_entries:
            raise TooLarge(_("The archive has more files than allowed. Upload fewer files."))

    def _stays_inside(self, parts: tuple[str, ...]) -> bool:
        """Return whether resolving a link stays inside the target. Follows the archive's other links, as Linux does.

        A link that exceeds a limit counts as outside, because it is not known where it leads.
        """
        # `position` is the folder reached so far. `remaining` is a stack: its last component is resolved next.
        position, remaining = list(parts[:-1]), self._links[parts].split("/")[::-1]
        followed = 1
        inside = not self._links[parts].startswith("/")
        while remaining and inside:
            part = remaining.pop()
            if part == "..":
                inside = bool(position)  # already at the target folder: `..` leaves it
                position = position[:-1]
            elif part not in {"", "."}:
                link = self._links.get((*position, part))
                if link is None:  # a file, a folder, or missing: it leads nowhere else
                    position.append(part)
                else:
                    inside = not link.startswith("/")
                    remaining.extend(link.split("/")[::-1])
                    followed += 1
            self._steps_left -= 1  # one budget for all links of the archive
            inside = inside and self._steps_left > 0 and followed <= LINK_FOLLOW_LIMIT and len(position) <= DEPTH_LIMIT
        return inside


def _duplicate_error(parts: Sequence[str]) -> BadArchive:
    return BadArchive(_("The archive contains %(name)s twice. Remove one.") % {"name": "/".join(parts) or "."})


def _unsafe_link_message(parts: Sequence[str]) -> str:
    return _("The link %(name)s in this archive points outside it or to a missing file. Remove it.") % {
        "name": "/".join(parts)
    }

"""Archives from strangers, unpacked into a folder of ours that nobody else can see yet.

Hides how entries may conspire: links that lead out by way of each other, names that come twice, files used as folders,
bombs of bytes, entries, links and folders. The one rule: what counts against a limit is what was really written, never
what the archive declares.
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

from storage.errors import BadArchive, FileMissing, TooLarge, UnsafePath, WrongKind
from storage.files import FILE_MODE, MAKE_FILE, copy
from storage.formats import BROKEN, Entry, Format, Limits, entries, sniff
from storage.paths import OPEN_FOLDER, PATH_LIMIT, explained, open_folder, status_of, step

DEPTH_LIMIT = 64
LINK_LIMIT = 40
"""How many links Linux follows on the way to one file."""
LINKS_LIMIT = 50_000
STEPS_LIMIT = 2_000_000
"""Links are kept in memory until the end and then followed, so both are limited."""


@dataclass(frozen=True)
class Unpacked:
    """What was written: bytes of content and number of files, links included."""

    size_bytes: int
    file_count: int


def unpack_archive(*, stream: BinaryIO, target: Path, limits: Limits, kind: Format | None = None) -> Unpacked:
    """Unpack `stream`, a seekable file of ours, into `target`, an empty folder of ours. Overwrites nothing.

    Keeps content, names, relative links that stay inside, and whether a file is executable; nothing else (no owner,
    time, setuid). Raises BadArchive, TooLarge, UnsafePath, StorageFull; what was written until then stays, for the
    caller to remove.
    """
    kind = kind or sniff(stream=stream)
    with _readable(), explained(), _Target(target, limits) as writer:
        for entry in entries(stream=stream, kind=kind, limits=limits):
            writer.add(entry)
        writer.link_all()
        return Unpacked(writer.size, writer.files)


@contextmanager
def _readable() -> Iterator[None]:
    """Turns what the standard library raises on a malformed archive into BadArchive."""
    try:
        yield
    except (*BROKEN, FileMissing, WrongKind) as error:  # the last two: a link to nothing, a file used as a folder
        raise BadArchive from error


class _Target:
    """The folder being filled: counts, refuses, writes."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.size = 0
        self.files = 0
        self._folder = folder
        self._limits = limits
        self._entries = 0
        self._links: dict[tuple[str, ...], str] = {}
        self._steps_left = STEPS_LIMIT
        self._open_parts: tuple[str, ...] = ()
        self._open_handle = os.open(folder, OPEN_FOLDER)

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self._open_handle)

    def add(self, entry: Entry) -> None:
        """Write one entry, but keep its link for the end: no link is there while names are walked."""
        self._count()
        if entry.folder:
            self._enter(entry.parts)
            return
        if not entry.parts or entry.parts in self._links:
            raise _twice(entry.parts)
        self.files += 1
        if entry.link is not None:
            self._keep_link(entry.parts, entry.link)
        elif entry.same_as is not None:
            self._add_name(entry.parts, entry.same_as)
        else:
            self._write(entry)

    def link_all(self) -> None:
        """Make the links, once it is known that none of them leads out, not even by way of others."""
        for parts, link in self._links.items():
            if not self._stays_inside(parts):
                raise UnsafePath(_leads_out(parts))
            try:
                os.symlink(link, parts[-1], dir_fd=self._enter(parts[:-1]))
            except FileExistsError:
                raise _twice(parts) from None

    def _write(self, entry: Entry) -> None:
        parent = self._enter(entry.parts[:-1])
        mode = FILE_MODE | 0o111 if entry.executable else FILE_MODE
        try:
            handle = os.open(entry.parts[-1], MAKE_FILE, mode, dir_fd=parent)
        except FileExistsError:
            raise _twice(entry.parts) from None
        with os.fdopen(handle, "wb") as file:
            if entry.content is not None:
                self.size += copy(stream=entry.content, target=file, limit_bytes=self._limits.max_bytes - self.size)

    def _keep_link(self, parts: tuple[str, ...], link: str) -> None:
        if not link or len(link) > PATH_LIMIT:
            raise BadArchive
        if len(self._links) == LINKS_LIMIT:
            raise TooLarge(_("This archive holds too many links. Send the files themselves."))
        self._links[parts] = link

    def _add_name(self, parts: tuple[str, ...], same_as: tuple[str, ...]) -> None:
        """A hard link: to a file that is there already, and is a file."""
        with open_folder(root=self._folder, parts=same_as[:-1]) as source:
            status = status_of(source, same_as[-1]) if same_as else None
            if status is None or not modes.S_ISREG(status.st_mode):
                raise BadArchive
            parent = self._enter(parts[:-1])
            try:
                os.link(same_as[-1], parts[-1], src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            except FileExistsError:
                raise _twice(parts) from None

    def _enter(self, parts: tuple[str, ...]) -> int:
        """A descriptor of a folder inside, made where it is missing; the last one stays open for the next entry."""
        if parts == self._open_parts:
            return self._open_handle
        if len(parts) > DEPTH_LIMIT:
            raise BadArchive(_("This archive nests folders too deeply: more than 64 levels."))
        handle = os.open(self._folder, OPEN_FOLDER)
        for part in parts:
            try:
                below = self._step(handle, part)
            finally:
                os.close(handle)
            handle = below
        os.close(self._open_handle)
        self._open_parts, self._open_handle = parts, handle
        return handle

    def _step(self, handle: int, part: str) -> int:
        with suppress(FileNotFoundError):
            return step(handle, part, create=False)
        self._count()
        return step(handle, part, create=True)

    def _count(self) -> None:
        self._entries += 1
        if self._entries > self._limits.max_entries:
            raise TooLarge(_("This archive holds more files than are allowed."))

    def _stays_inside(self, parts: tuple[str, ...]) -> bool:
        """Whether following this link as Linux would, by way of the archive's other links, never leaves the top."""
        place, todo = list(parts[:-1]), self._links[parts].split("/")[::-1]
        followed = 1
        inside = not self._links[parts].startswith("/")
        while todo and inside:
            part = todo.pop()
            if part == "..":
                inside = bool(place)
                place = place[:-1]
            elif part not in {"", "."}:
                link = self._links.get((*place, part))
                if link is None:
                    place.append(part)
                else:
                    inside = not link.startswith("/")
                    todo.extend(link.split("/")[::-1])
                    followed += 1
            self._steps_left -= 1
            inside = inside and self._steps_left > 0 and followed <= LINK_LIMIT and len(place) <= DEPTH_LIMIT
        return inside


def _twice(parts: Sequence[str]) -> BadArchive:
    return BadArchive(_("This archive holds %(name)s twice.") % {"name": "/".join(parts) or "."})


def _leads_out(parts: Sequence[str]) -> str:
    return _("The link %(name)s in this archive leads out of it, or nowhere. Leave it out.") % {"name": "/".join(parts)}

"""Archives from strangers, unpacked: .tar, .tar.gz, .zip into a folder of ours that nobody else can see yet.

Hides the formats and every trick known in them: names and links that lead out, devices, duplicates, bombs of bytes, of
entries, of headers, of folders. The one rule: before anything is written an entry is nothing but a checked path, a kind
and a stream of bytes; and what counts is what was really written, never what the archive declares.
"""

from __future__ import annotations

import enum
import gzip
import os
import stat as modes
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from django.utils.translation import gettext_lazy as _

from storage.errors import BadArchive, TooLarge, UnsafePath
from storage.files import FILE_MODE, MAKE_FILE, Readable, copy
from storage.paths import open_folder, split

DEPTH_LIMIT = 64
LINK_LIMIT = 40
"""How many links Linux follows on the way to one file."""
HEADER_LIMIT = 1024**2
"""Bytes in one read of a tar's headers: its long names and extended headers are read whole."""
HEADERS_PER_ENTRY = 4096
"""Bytes that one entry of a tar may take besides its content, on the average."""
ZIP_DIRECTORY_LIMIT = 32 * 1024**2
"""The directory of a zip is read into memory, at about 10 bytes for each of its own; this is some 400,000 files."""
ZIP_END_BYTES = 22
ZIP_COMMENT_LIMIT = 65535
ZIP64_LOCATOR_BYTES = 20
TAR_BLOCK = 512
BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    struct.error,
    EOFError,
    RuntimeError,  # also RecursionError and NotImplementedError
    ValueError,
    LookupError,
    ArithmeticError,
)
"""What the standard library raises on malformed archives, by its documentation and by fuzzing."""


class Format(enum.StrEnum):
    """The formats taken, known by their first bytes and never by a name."""

    TAR = "tar"
    TAR_GZ = "tar.gz"
    ZIP = "zip"


@dataclass(frozen=True)
class Limits:
    """The most an archive may become: bytes of content, and entries (files, links and folders)."""

    max_bytes: int
    max_entries: int


@dataclass(frozen=True)
class Unpacked:
    """What was written: bytes of content and number of files, links included."""

    size_bytes: int
    file_count: int


@dataclass(frozen=True)
class _Entry:
    """One entry, checked. `link` is a link's target as given; `same_as` names a file that this is another name of."""

    parts: tuple[str, ...]
    folder: bool = False
    executable: bool = False
    content: IO[bytes] | None = None
    link: str | None = None
    same_as: tuple[str, ...] | None = None


def sniff(*, stream: BinaryIO) -> Format:
    """The format of an archive by its first bytes; leaves `stream` at its start. Raises BadArchive."""
    stream.seek(0)
    start = stream.read(TAR_BLOCK)
    stream.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return Format.TAR_GZ
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return Format.ZIP
    try:
        tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except BROKEN:
        raise BadArchive from None
    return Format.TAR


def unpack_archive(*, stream: BinaryIO, target: Path, limits: Limits, kind: Format | None = None) -> Unpacked:
    """Unpack `stream`, a seekable file of ours, into `target`, an empty folder of ours. Overwrites nothing.

    Keeps content, names, relative links that stay inside, and whether a file is executable; nothing else (no owner,
    time, setuid). Raises BadArchive, TooLarge, UnsafePath, StorageFull; what was written until then stays, for the
    caller to remove.
    """
    kind = kind or sniff(stream=stream)
    entries = _zip_entries(stream, limits) if kind is Format.ZIP else _tar_entries(stream, kind, limits)
    with _readable(), explained(), _Target(target, limits) as writer:
        for entry in entries:
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
        self._steps = STEPS_LIMIT
        self._open_parts: tuple[str, ...] = ()
        self._open_handle = os.open(folder, OPEN_FOLDER)

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self._open_handle)

    def add(self, entry: _Entry) -> None:
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
            self._require_inside(parts)
            try:
                os.symlink(link, parts[-1], dir_fd=self._enter(parts[:-1]))
            except FileExistsError:
                raise _twice(parts) from None

    def _write(self, entry: _Entry) -> None:
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

    def _require_inside(self, parts: tuple[str, ...]) -> None:
        """Follow a link as Linux would, by the links that this archive holds; refuse it once it is outside."""
        place: list[str] = list(parts[:-1])
        todo = [self._links[parts]]
        follow = LINK_LIMIT
        while todo:
            part, slash, rest = todo.pop().partition("/")
            if slash:
                todo.append(rest)
            self._steps -= 1
            outside = (slash and not part and not follow) or (part == ".." and not place)
            if outside or not self._steps or len(place) > DEPTH_LIMIT:
                raise UnsafePath(_leads_out(parts))


def _twice(parts: Sequence[str]) -> BadArchive:
    return BadArchive(_("This archive holds %(name)s twice.") % {"name": "/".join(parts) or "."})


def _leads_out(parts: Sequence[str]) -> str:
    return _("The link %(name)s in this archive leads out of it. Leave it out.") % {"name": "/".join(parts)}


def _checked(name: str) -> tuple[str, ...]:
    """The components of an entry's name. Raises UnsafePath."""
    try:
        return split(name)
    except UnsafePath:
        shown = name.encode(errors="replace").decode(errors="replace")[:200]
        raise UnsafePath(
            _("The name %(name)s in this archive leads out of it, or is no name.") % {"name": shown}
        ) from None


# --- tar ----------------------------------------------------------------------------------------------------------------


class _Tape:
    """A tar's bytes, read forward only: counts what was decompressed, and refuses reads that would fill the memory."""

    def __init__(self, stream: Readable, limit: int) -> None:
        self.ended = False
        self._stream = stream
        self._limit = limit
        self._position = 0

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, fewer at the end. Raises BadArchive, TooLarge."""
        if not 0 <= size <= HEADER_LIMIT:
            raise BadArchive
        pieces, left = [], size
        while left and (piece := self._stream.read(left)):
            pieces.append(piece)
            left -= len(piece)
        data = b"".join(pieces)
        self._position += len(data)
        if self._position > self._limit:
            raise TooLarge
        self.ended = len(data) == TAR_BLOCK and not any(data)
        return data

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def seek(self, position: int) -> None:
        """Skip forward."""
        if position < self._position:
            raise BadArchive
        while (left := position - self._position) and self.read(min(left, HEADER_LIMIT)):
            pass


def _tar_entries(stream: BinaryIO, kind: Format, limits: Limits) -> Iterator[_Entry]:
    raw: Readable = gzip.GzipFile(fileobj=stream) if kind is Format.TAR_GZ else stream
    tape = _Tape(raw, limits.max_bytes + limits.max_entries * HEADERS_PER_ENTRY + HEADER_LIMIT)
    archive = tarfile.TarFile(fileobj=tape, mode="r", errorlevel=2)  # type: ignore[arg-type]  # reads, seeks, tells
    declared = 0
    while member := archive.next():
        archive.members.clear()  # it would keep every header in memory
        declared += member.size
        if member.size < 0 or declared > limits.max_bytes:
            raise TooLarge
        yield _tar_entry(archive, member)
    if not tape.ended:
        raise BadArchive(_("This archive is cut off: its end is missing. Send it again."))


def _tar_entry(archive: tarfile.TarFile, member: tarfile.TarInfo) -> _Entry:
    parts = _checked(member.name)
    if member.isdir():
        return _Entry(parts, folder=True)
    if member.issym():
        return _Entry(parts, link=member.linkname or ".")
    if member.islnk():
        return _Entry(parts, same_as=_checked(member.linkname))
    if not member.isreg() or member.issparse():
        raise BadArchive(
            _("This archive holds %(name)s, which is no plain file, folder or link.") % {"name": "/".join(parts)}
        )
    return _Entry(parts, executable=bool(member.mode & 0o100), content=archive.extractfile(member))


# --- zip ----------------------------------------------------------------------------------------------------------------


def _zip_entries(stream: BinaryIO, limits: Limits) -> Iterator[_Entry]:
    if _zip_directory_bytes(stream) > ZIP_DIRECTORY_LIMIT:
        raise TooLarge(_("This .zip holds too many files for its kind. Send a .tar.gz instead."))
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > limits.max_bytes:
            raise TooLarge
        for member in members:
            yield from _zip_entry(archive, member)


def _zip_directory_bytes(stream: BinaryIO) -> int:
    """How long a zip says its directory is, asked before `zipfile` reads all of it."""
    size = stream.seek(0, os.SEEK_END)
    tail_at = max(0, size - ZIP_END_BYTES - ZIP_COMMENT_LIMIT - ZIP64_LOCATOR_BYTES)
    stream.seek(tail_at)
    tail = stream.read()
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or len(tail) < end + ZIP_END_BYTES:
        raise BadArchive
    length: int = struct.unpack_from("<L", tail, end + 12)[0]
    locator = end - ZIP64_LOCATOR_BYTES
    if locator >= 0 and tail[locator : locator + 4] == b"PK\x06\x07":
        stream.seek(min(struct.unpack_from("<Q", tail, locator + 8)[0], size))
        record = stream.read(56)
        if len(record) == 56:
            length = max(length if length != 0xFFFFFFFF else 0, struct.unpack_from("<Q", record, 40)[0])
    stream.seek(0)
    return length


def _zip_entry(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[_Entry]:
    parts = _checked(member.filename)
    mode = member.external_attr >> 16
    if member.is_dir():
        yield _Entry(parts, folder=True)
        return
    if member.flag_bits & 0x1:
        raise BadArchive(_("This .zip is protected by a password. Send one without."))
    if member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise BadArchive(_("This .zip is compressed in a way that isn't read here. Use the usual one, or a .tar.gz."))
    with archive.open(member) as content:
        if modes.S_ISLNK(mode):
            target = content.read(HEADER_LIMIT).decode()
            yield _Entry(parts, link=target or ".")
        elif modes.S_IFMT(mode) in {0, modes.S_IFREG}:
            yield _Entry(parts, executable=bool(mode & 0o100), content=content)
        else:
            raise BadArchive(
                _("This archive holds %(name)s, which is no plain file, folder or link.") % {"name": "/".join(parts)}
            )

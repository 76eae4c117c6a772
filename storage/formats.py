"""Archive formats read from strangers: .tar, .tar.gz and .zip as a stream of checked entries.

Hides what malformed and hostile archives do to the standard library's readers: memory filled by headers or directories,
seeks without end, exceptions of every kind. The one rule: an entry that leaves here is nothing but a checked path, a
kind and a stream of bytes, and reading it costs no more memory than any other.
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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from django.utils.translation import gettext_lazy as _

from storage.errors import BadArchive, TooLarge, UnsafePath
from storage.files import Readable
from storage.paths import split

HEADER_LIMIT = 1024**2
"""Bytes in one read of a tar's headers: its long names and extended headers are read whole."""
HEADERS_PER_ENTRY = 4096
"""Bytes that one entry of a tar may take besides its content, on the average."""
ZIP_DIRECTORY_LIMIT = 32 * 1024**2
"""The directory of a zip is read into memory, at about 10 bytes for each of its own; this is some 400,000 files."""
ZIP_END_BYTES = 22
ZIP_COMMENT_LIMIT = 65535
ZIP64_LOCATOR_BYTES = 20
ZIP64_END_BYTES = 56
PADDING_LIMIT = 16 * 1024**2
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
class Entry:
    """One entry, checked. `link` is a link's target as given; `same_as` names a file that this is another name of."""

    parts: tuple[str, ...]
    folder: bool = False
    executable: bool = False
    content: Readable | None = None
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


def entries(*, stream: BinaryIO, kind: Format, limits: Limits) -> Iterator[Entry]:
    """The archive's entries in its own order; each one's content must be read before the next is asked for.

    Raises BadArchive, TooLarge, UnsafePath, and what is in BROKEN.
    """
    return _zip_entries(stream, limits) if kind is Format.ZIP else _tar_entries(stream, kind, limits)


def checked(name: str) -> tuple[str, ...]:
    """The components of an entry's name. Raises UnsafePath."""
    try:
        return split(name)
    except UnsafePath:
        shown = name.encode(errors="replace").decode(errors="replace")[:200]
        sentence = _("The name %(name)s in this archive leads out of it, or is too long, or is not in UTF-8.")
        raise UnsafePath(sentence % {"name": shown}) from None


# --- tar --------------------------------------------------------------------------------------------------------------


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

    def finish(self) -> None:
        """Read the padding after the end, by which gzip checks its sum over all."""
        end = self._position + PADDING_LIMIT
        while self.read(HEADER_LIMIT):
            if self._position > end:
                raise BadArchive

    def seek(self, position: int) -> None:
        """Skip forward."""
        if position < self._position:
            raise BadArchive
        while (left := position - self._position) and self.read(min(left, HEADER_LIMIT)):
            pass


def _tar_entries(stream: BinaryIO, kind: Format, limits: Limits) -> Iterator[Entry]:
    raw: Readable = gzip.GzipFile(fileobj=stream, mode="rb") if kind is Format.TAR_GZ else stream
    tape = _Tape(raw, limits.max_bytes + limits.max_entries * HEADERS_PER_ENTRY + HEADER_LIMIT)
    archive = tarfile.TarFile(fileobj=tape, mode="r", errorlevel=2)  # type: ignore[arg-type]  # reads, seeks, tells
    declared = 0
    while member := archive.next():
        archive.members = []  # type: ignore[attr-defined]  # it would keep every header in memory
        declared += member.size
        if member.size < 0 or declared > limits.max_bytes:
            raise TooLarge
        yield _tar_entry(archive, member)
    if not tape.ended:
        raise BadArchive(_("This archive is cut off: its end is missing. Send it again."))
    tape.finish()


def _tar_entry(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Entry:
    parts = checked(member.name)
    if member.isdir():
        return Entry(parts, folder=True)
    if member.issym():
        return Entry(parts, link=member.linkname)
    if member.islnk():
        return Entry(parts, same_as=checked(member.linkname))
    if not member.isreg() or member.issparse():
        raise BadArchive(
            _("This archive holds %(name)s, which is no plain file, folder or link.") % {"name": "/".join(parts)}
        )
    return Entry(parts, executable=bool(member.mode & 0o100), content=archive.extractfile(member))


# --- zip --------------------------------------------------------------------------------------------------------------


def _zip_entries(stream: BinaryIO, limits: Limits) -> Iterator[Entry]:
    if _zip_directory_bytes(stream) > ZIP_DIRECTORY_LIMIT:
        raise TooLarge(_("This .zip holds too many files for its kind. Send a .tar.gz instead."))
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > limits.max_bytes:
            raise TooLarge
        for member in members:
            yield from _zip_entry(archive, member)


def _zip_directory_bytes(stream: BinaryIO) -> int:
    """How long a zip says its directory is, asked before `zipfile` reads all of it: the larger one, if it says two."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - ZIP_END_BYTES - ZIP_COMMENT_LIMIT - ZIP64_LOCATOR_BYTES - ZIP64_END_BYTES))
    tail = stream.read()
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or len(tail) < end + ZIP_END_BYTES:
        raise BadArchive
    (length,) = struct.unpack_from("<L", tail, end + 12)
    wide = end - ZIP64_LOCATOR_BYTES - ZIP64_END_BYTES
    if wide >= 0 and tail[wide : wide + 4] == b"PK\x06\x06":
        (wide_length,) = struct.unpack_from("<Q", tail, wide + 40)
        length = max(wide_length, 0 if length == 0xFFFFFFFF else length)
    return int(length)


def _zip_entry(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[Entry]:
    parts = checked(member.filename)
    mode = member.external_attr >> 16
    if member.is_dir():
        yield Entry(parts, folder=True)
        return
    if member.flag_bits & 0x1:
        raise BadArchive(_("This .zip is protected by a password. Send one without."))
    if member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise BadArchive(_("This .zip is compressed in a way that isn't read here. Use the usual one, or a .tar.gz."))
    with archive.open(member) as content:
        if modes.S_ISLNK(mode):
            target = content.read(HEADER_LIMIT).decode()
            yield Entry(parts, link=target)
        elif modes.S_IFMT(mode) in {0, modes.S_IFREG}:
            yield Entry(parts, executable=bool(mode & 0o100), content=content)
        else:
            raise BadArchive(
                _("This archive holds %(name)s, which is no plain file, folder or link.") % {"name": "/".join(parts)}
            )

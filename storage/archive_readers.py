"""Read .tar, .tar.gz and .zip archives from untrusted users as a sequence of checked entries.

A crafted archive can make the readers of Python's standard library fill the memory with headers, seek without end, or
raise almost any exception. Therefore this module limits every read. An entry has only a checked path, a kind and a
stream of bytes.
"""

from __future__ import annotations

import enum
import gzip
import stat as modes
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from django.utils.translation import gettext_lazy as _

from runtime.json_values import storable
from storage.errors import BadArchive, TooLarge, UnsafePath
from storage.files import Readable
from storage.paths import split_path

READ_LIMIT = 1024**2
"""How many bytes one read may return. `tarfile` reads a whole name or extended header into memory; real ones have at
most a few KiB."""
HEADER_BYTES_PER_ENTRY = 4096
"""How many bytes of headers and padding a tar entry may have on average. An entry with a usual name needs at most 2.5
KiB: a header, a second header with the long name, and padding."""
ZIP_DIRECTORY_LIMIT = 32 * 1024**2
"""The largest central directory of a zip, in bytes: about 400,000 files. `zipfile` needs ten times as much memory."""
PADDING_LIMIT = 16 * 1024**2
"""How many bytes may follow the end of a tar. Programs pad to their record size, 10 KiB by default; users can choose
more."""
TAR_BLOCK = 512
"""The size of a tar header in bytes. Content is padded to a multiple of it."""
MALFORMED_ERRORS = (
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
"""The exceptions that the standard library raises for malformed archives. Some are documented; fuzzing found others."""


class ArchiveFormat(enum.StrEnum):
    """The supported formats. `detect_format` recognizes them by their first bytes, not by file names."""

    TAR = "tar"
    TAR_GZ = "tar.gz"
    ZIP = "zip"


@dataclass(frozen=True)
class ArchiveLimits:
    """How many bytes of content, and how many entries (files, links and folders), an archive may have unpacked."""

    max_bytes: int
    max_entries: int


@dataclass(frozen=True)
class ArchiveEntry:
    """One entry. `parts` is its checked path. `content` is None for folders and links.

    `link` is the target of a symbolic link as the archive has it, unchecked. `hardlink_to` is the checked path to which
    a hard link leads; an earlier entry should be a file with this path.
    """

    parts: tuple[str, ...]
    is_folder: bool = False
    is_executable: bool = False
    content: Readable | None = None
    link: str | None = None
    hardlink_to: tuple[str, ...] | None = None


def detect_format(*, stream: BinaryIO) -> ArchiveFormat:
    """Return an archive's format by its first bytes, and set `stream` to its start. Raises BadArchive."""
    stream.seek(0)
    start = stream.read(TAR_BLOCK)
    stream.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return ArchiveFormat.TAR_GZ
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):  # a zip begins with an entry, an empty zip with its end
        return ArchiveFormat.ZIP
    try:
        tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except MALFORMED_ERRORS:
        raise BadArchive from None
    return ArchiveFormat.TAR


def read_entries(*, stream: BinaryIO, archive_format: ArchiveFormat, limits: ArchiveLimits) -> Iterator[ArchiveEntry]:
    """Yield the archive's entries in order. The caller must read the content of each before it requests the next.

    Raises BadArchive, TooLarge, UnsafePath, and any of MALFORMED_ERRORS.
    """
    if archive_format is ArchiveFormat.ZIP:
        return _zip_entries(stream, limits)
    return _tar_entries(stream, limits, is_compressed=archive_format is ArchiveFormat.TAR_GZ)


def split_entry_name(name: str) -> tuple[str, ...]:
    """Split an entry's name into its components. Raises UnsafePath."""
    try:
        return split_path(name)
    except UnsafePath:
        display_name = storable(name)[:200]  # an import or upload stores the message
        sentence = _("The name %(name)s in this archive points outside it, is too long or is not UTF-8. Rename it.")
        raise UnsafePath(sentence % {"name": display_name}) from None


# --- tar --------------------------------------------------------------------------------------------------------------


class _ForwardReader:
    """The file object that `tarfile` reads. It only moves forward. It limits each read, and the sum of all reads."""

    def __init__(self, stream: Readable, limit: int) -> None:
        self.is_at_end_block = False
        """Whether the last read was a block of zeros, which ends a tar. In a truncated tar it is missing."""
        self._stream = stream
        self._limit = limit
        self._position = 0

    def read(self, size: int) -> bytes:
        """Return exactly `size` bytes, or fewer at the end.

        Raises BadArchive if `size` is over READ_LIMIT, and TooLarge if the sum of all reads is over the limit.
        """
        if not 0 <= size <= READ_LIMIT:
            raise BadArchive
        chunks, remaining = [], size
        while remaining and (chunk := self._stream.read(remaining)):
            chunks.append(chunk)
            remaining -= len(chunk)
        data = b"".join(chunks)
        self._position += len(data)
        if self._position > self._limit:
            raise TooLarge
        self.is_at_end_block = len(data) == TAR_BLOCK and not any(data)
        return data

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._position

    def finish(self) -> None:
        """Read the padding after the end, so that gzip reads its checksum and verifies it. Raises BadArchive."""
        end = self._position + PADDING_LIMIT
        while self.read(READ_LIMIT):
            if self._position > end:
                raise BadArchive

    def seek(self, position: int) -> None:
        """Skip forward. Raises BadArchive for a seek backwards, which reading entries in order never needs."""
        if position < self._position:
            raise BadArchive
        while (remaining := position - self._position) and self.read(min(remaining, READ_LIMIT)):
            pass


def _tar_entries(stream: BinaryIO, limits: ArchiveLimits, *, is_compressed: bool) -> Iterator[ArchiveEntry]:
    """Yield the entries of a tar. Their content must be read in order, because the reader only moves forward."""
    content: Readable = gzip.GzipFile(fileobj=stream, mode="rb") if is_compressed else stream
    # READ_LIMIT more, so that an archive with few entries may have long names too.
    reader = _ForwardReader(content, limits.max_bytes + limits.max_entries * HEADER_BYTES_PER_ENTRY + READ_LIMIT)
    archive = tarfile.TarFile(fileobj=reader, mode="r", errorlevel=2)  # type: ignore[arg-type]  # reads, seeks, tells
    declared_bytes = 0
    while member := archive.next():
        archive.members = []  # type: ignore[attr-defined]  # tarfile would keep all headers in memory
        # The declared sizes serve to refuse an archive early. `storage.archives` limits the real ones when it writes,
        # and the number of entries. A header can declare a negative size.
        declared_bytes += member.size
        if member.size < 0 or declared_bytes > limits.max_bytes:
            raise TooLarge
        yield _tar_entry(archive, member)
    if not reader.is_at_end_block:  # tarfile accepts a truncated archive
        raise BadArchive(_("The archive is incomplete. Upload it again."))
    reader.finish()


def _tar_entry(archive: tarfile.TarFile, member: tarfile.TarInfo) -> ArchiveEntry:
    """Return the entry of a tar's member. Raises UnsafePath, BadArchive for devices, pipes and sparse files."""
    parts = split_entry_name(member.name)
    if member.isdir():
        return ArchiveEntry(parts, is_folder=True)
    if member.issym():
        return ArchiveEntry(parts, link=member.linkname)
    if member.islnk():
        return ArchiveEntry(parts, hardlink_to=split_entry_name(member.linkname))
    if not member.isreg() or member.issparse():
        raise BadArchive(
            _("%(name)s in this archive is not a regular file, folder or link. Remove it.") % {"name": "/".join(parts)}
        )
    return ArchiveEntry(parts, is_executable=bool(member.mode & 0o100), content=archive.extractfile(member))


# --- zip --------------------------------------------------------------------------------------------------------------


class _ZipReader:
    """The file object that `zipfile` reads. It refuses a read that is longer than any real central directory.

    `zipfile` reads the central directory as a whole, and a crafted zip can declare any length for it.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes. Raises TooLarge above ZIP_DIRECTORY_LIMIT."""
        if size > ZIP_DIRECTORY_LIMIT:
            raise TooLarge(_("This .zip has too many files for the format. Upload a .tar.gz instead."))
        return self._stream.read(size)


def _zip_entries(stream: BinaryIO, limits: ArchiveLimits) -> Iterator[ArchiveEntry]:
    """Yield the entries of a zip, in the order of its central directory."""
    with zipfile.ZipFile(_ZipReader(stream)) as archive:
        members = archive.infolist()
        # Only to refuse an archive early, as in `_tar_entries`.
        if sum(member.file_size for member in members) > limits.max_bytes:
            raise TooLarge
        for member in members:
            yield from _zip_entry(archive, member)


def _zip_entry(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[ArchiveEntry]:
    """Yield the entry of a zip's member. A generator, so that the content is closed when the caller has read it."""
    parts = split_entry_name(member.filename)
    mode = member.external_attr >> 16  # the Unix mode; 0 if the archive has none
    if member.is_dir():
        yield ArchiveEntry(parts, is_folder=True)
        return
    if member.flag_bits & 0x1:  # the flag of an encrypted file
        raise BadArchive(_("This .zip is password-protected. Upload one without a password."))
    if member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise BadArchive(_("This .zip uses an unsupported compression method. Use Deflate or upload a .tar.gz."))
    with archive.open(member) as content:
        if modes.S_ISLNK(mode):
            target = content.read(READ_LIMIT).decode()  # a zip stores a link's target as its content
            yield ArchiveEntry(parts, link=target)
        elif modes.S_IFMT(mode) in {0, modes.S_IFREG}:
            yield ArchiveEntry(parts, is_executable=bool(mode & 0o100), content=content)
        else:
            raise BadArchive(
                _("%(name)s in this archive is not a regular file, folder or link. Remove it.")
                % {"name": "/".join(parts)}
            )

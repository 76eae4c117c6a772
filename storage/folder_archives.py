"""Pack folders that customers' code may change at any moment into a .tar.gz file, while it is sent.

Files are read in chunks, and folders entry by entry, so the memory does not depend on their number and size. Links,
pipes, sockets and devices are left out. If anything else is left out, the last file in the archive lists it.
"""

from __future__ import annotations

import errno
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from storage import files
from storage.errors import FileMissing, Unreadable, UnsafePath, WrongKind
from storage.paths import PATH_LIMIT, Kind, kind_of, open_folder, split_path

LEFT_OUT_NAME = "left-out.txt"
"""The name of the file in the archive that lists what was left out: a line for each path, with the reason."""
MAX_DEPTH = 64
"""Folders nested deeper are left out, because each level holds a descriptor open."""
MAX_LISTED = 1000
"""How many of the entries that were left out are listed, because the list is in memory. All are counted."""
MAX_HOLES_BYTES = 1024**3
"""A sparse file with more bytes in holes is left out. Holes need no quota, so a customer could make huge ones, and
packing them costs CPU time."""
_COMPRESSION_LEVEL = 1
"""The fastest level. Logs and tables become a fifth of their size, and higher levels save little more."""
_SAMPLE_BYTES = 16 * 1024
"""How much of a chunk is compressed as a sample, to decide whether the chunk is compressed or stored. Chunks have up to
1 MiB, so the sample costs little."""
_MAX_COMPRESSED_SHARE = 0.8
"""A chunk is stored as it is if compression leaves more than this share of the sample. Weights of models hardly
shrink, and storing them is ten times as fast."""
_GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
"""RFC 1952: compressed by deflate, without a name and a time, by an unknown operating system."""
_ZERO_BLOCK = bytes(tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Source:
    """A file or folder at `path` below `root`, whose name in the archive is `name`.

    Of a folder, direct entries for which `is_packed` returns False are left out, and not listed in LEFT_OUT_NAME.
    """

    root: Path
    path: str
    name: str
    is_packed: Callable[[os.DirEntry[str]], bool] = lambda _entry: True


@dataclass
class _LeftOut:
    """The entries that were left out."""

    count: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, reason: str) -> None:
        """Count an entry, and list it if the list is not full."""
        self.count += 1
        if len(self.lines) < MAX_LISTED:
            self.lines.append(f"{name}: {reason}\n")


def pack(sources: Sequence[Source]) -> Iterator[bytes]:
    """Yield the bytes of a .tar.gz file with the sources. A source that does not exist is left out."""
    compressor = _Gzip()
    yield _GZIP_HEADER
    for block in _tar(sources):
        if data := compressor.add(block):
            yield data
    yield compressor.end()


class _Gzip:
    """A gzip stream (RFC 1952). Blocks that compression hardly shrinks are in it uncompressed."""

    def __init__(self) -> None:
        self._level = _COMPRESSION_LEVEL
        self._deflate = zlib.compressobj(self._level, wbits=-zlib.MAX_WBITS)
        self._crc32 = self._size = 0

    def add(self, block: bytes) -> bytes:
        """Add a block; return the next bytes of the stream, which may be none."""
        self._crc32 = zlib.crc32(block, self._crc32)
        self._size += len(block)
        level, flushed = _COMPRESSION_LEVEL, b""
        if len(block) > _SAMPLE_BYTES:
            sample = zlib.compress(block[:_SAMPLE_BYTES], _COMPRESSION_LEVEL)
            level = 0 if len(sample) > _MAX_COMPRESSED_SHARE * _SAMPLE_BYTES else _COMPRESSION_LEVEL
        if level != self._level:
            # After a full flush the stream is at a byte boundary, and later data does not refer to data before. So a
            # new compressor with another level can continue.
            flushed = self._deflate.flush(zlib.Z_FULL_FLUSH)
            self._level, self._deflate = level, zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
        return flushed + self._deflate.compress(block)

    def end(self) -> bytes:
        """Return the end of the stream."""
        return self._deflate.flush() + struct.pack("<LL", self._crc32, self._size & 0xFFFFFFFF)


def _tar(sources: Sequence[Source]) -> Iterator[bytes]:
    """Yield the bytes of a POSIX tar file with the sources."""
    left_out = _LeftOut()
    for source in sources:
        yield from _entry(source, split_path(source.path), source.name, left_out)
    if left_out.count:
        text = os.fsencode("".join(left_out.lines))
        if left_out.count > len(left_out.lines):
            text += f"and {left_out.count - len(left_out.lines)} more\n".encode()
        info = tarfile.TarInfo(LEFT_OUT_NAME)
        info.size = len(text)
        yield _header(info)
        yield text + bytes(_padding(len(text)))
    yield _ZERO_BLOCK * 2  # the end of the archive


def _entry(source: Source, parts: tuple[str, ...], name: str, left_out: _LeftOut) -> Iterator[bytes]:
    """Yield the tar members of the file at `parts` below the source's root, or of the folder there and its contents."""
    try:
        with open_folder(root=source.root, parts=parts[:-1]) as parent_fd:
            mode = (os.lstat(parts[-1], dir_fd=parent_fd) if parts else os.fstat(parent_fd)).st_mode
            file = files.read_entry(folder_fd=parent_fd, name=parts[-1]) if kind_of(mode) is Kind.FILE else None
        if file is not None:
            yield from _file(file, name, left_out)
        elif kind_of(mode) is Kind.FOLDER:
            yield from _folder(source, parts, name, left_out)
    except (FileMissing, WrongKind, UnsafePath):
        pass  # it does not exist, or was removed or replaced meanwhile
    except Unreadable:
        left_out.add(name, "its permissions do not allow reading it")


def _folder(source: Source, parts: tuple[str, ...], name: str, left_out: _LeftOut) -> Iterator[bytes]:
    """Yield the tar members of a folder and of all that is in it."""
    if len(os.fsencode(name)) > PATH_LIMIT or len(parts) > MAX_DEPTH:
        left_out.add(name, "nested too deep")
        return
    with open_folder(root=source.root, parts=parts) as folder_fd:
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, int(max(0, os.fstat(folder_fd).st_mtime))
        scanned = os.scandir(folder_fd)  # with a descriptor of its own, so it outlasts this block
    with scanned:
        yield _header(info)
        is_top = parts == split_path(source.path)
        for entry in scanned:
            if not is_top or source.is_packed(entry):
                yield from _entry(source, (*parts, entry.name), f"{name}/{entry.name}", left_out)


def _file(file: files.OpenFile, name: str, left_out: _LeftOut) -> Iterator[bytes]:
    """Yield the tar member of a file, and close the file.

    The member has the size in its header, even if the file shrinks or grows meanwhile.
    """
    with closing(file):
        if _has_large_holes(file):
            left_out.add(name, "has large holes; download it by itself")
            return
        info = tarfile.TarInfo(name)
        info.size, info.mtime = file.size, int(max(0, file.modified.timestamp()))
        yield _header(info)
        missing_bytes = file.size
        for chunk in file:
            missing_bytes -= len(chunk)
            yield chunk
        if missing_bytes:
            left_out.add(name, f"became shorter while it was read; its last {missing_bytes} bytes are zeros here")
        zeros_left = missing_bytes + _padding(file.size)
        while zeros_left > 0:
            yield bytes(min(zeros_left, files.CHUNK_BYTES))
            zeros_left -= files.CHUNK_BYTES


def _has_large_holes(file: files.OpenFile) -> bool:
    """Return whether the file has holes, and occupies over MAX_HOLES_BYTES less on the disk than its size."""
    file_fd = file.stream.fileno()
    if file.size - os.fstat(file_fd).st_blocks * 512 <= MAX_HOLES_BYTES:
        return False
    # On a file system that compresses, a file without holes may occupy less too.
    try:
        first_hole = os.lseek(file_fd, 0, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:  # the file was emptied after it was opened, so it has no holes
            return False
        raise
    os.lseek(file_fd, 0, os.SEEK_SET)
    return first_hole < file.size


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")  # names that are not UTF-8 keep their bytes


def _padding(size: int) -> int:
    """Return how many zeros must follow content of this size in a tar file."""
    return -size % tarfile.BLOCKSIZE

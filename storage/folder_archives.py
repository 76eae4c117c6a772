"""Pack folders that customers' code may change at any moment into a .tar.gz, while it is sent.

Memory does not depend on the number or size of the files: they are read in chunks, and folders entry by entry. Links,
pipes, sockets and devices are left out. If anything else is left out, the archive ends with a list of it.
"""

from __future__ import annotations

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
"""The last member of an archive that lacks something: one line for each path with the reason."""
MAX_DEPTH = 64
"""Folders nested deeper are left out. Each level holds a descriptor open."""
MAX_LISTED = 1000
"""How many of the entries left out are listed; all are counted."""
MAX_HOLES_BYTES = 1024**3
"""A file with larger holes is left out. Holes cost a customer no quota, and reading and packing them costs us time."""
_COMPRESSION_LEVEL = 1
"""The fastest level. Logs and tables become a fifth of their size, and higher levels save little more."""
_SAMPLE_BYTES = 16 * 1024
"""How much of a chunk is compressed to decide whether the chunk is compressed or stored."""
_MAX_COMPRESSED_SHARE = 0.8
"""A chunk whose sample shrinks to more than this share is stored. Models hardly compress, and storing is ten times as
fast."""
# RFC 1952: deflate, no name, no time, unknown system.
_GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
_ZERO_BLOCK = bytes(tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Source:
    """A file or folder to pack as `name`. A folder's direct entries are left out if `is_packed` is false for them."""

    root: Path
    path: str
    name: str
    is_packed: Callable[[os.DirEntry[str]], bool] = lambda _entry: True


@dataclass
class _LeftOut:
    count: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, reason: str) -> None:
        self.count += 1
        if len(self.lines) < MAX_LISTED:
            self.lines.append(f"{name}: {reason}\n")


def pack(sources: Sequence[Source]) -> Iterator[bytes]:
    """Yield a .tar.gz of the sources. A source that does not exist is left out."""
    compressor = _Gzip()
    yield _GZIP_HEADER
    for block in _tar(sources):
        if packed := compressor.add(block):
            yield packed
    yield compressor.end()


class _Gzip:
    """A gzip stream (RFC 1952) in which blocks that hardly compress are stored."""

    def __init__(self) -> None:
        self._level = _COMPRESSION_LEVEL
        self._deflate = zlib.compressobj(self._level, wbits=-zlib.MAX_WBITS)
        self._crc = self._size = 0

    def add(self, block: bytes) -> bytes:
        """Return the next part of the stream."""
        self._crc, self._size = zlib.crc32(block, self._crc), self._size + len(block)
        level, finished = _COMPRESSION_LEVEL, b""
        if len(block) > _SAMPLE_BYTES:
            sample = zlib.compress(block[:_SAMPLE_BYTES], _COMPRESSION_LEVEL)
            level = 0 if len(sample) > _MAX_COMPRESSED_SHARE * _SAMPLE_BYTES else _COMPRESSION_LEVEL
        if level != self._level:
            # A full flush ends on a byte, and later data refers to nothing before it: another compressor can continue.
            finished = self._deflate.flush(zlib.Z_FULL_FLUSH)
            self._level, self._deflate = level, zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
        return finished + self._deflate.compress(block)

    def end(self) -> bytes:
        """Return the end of the stream."""
        return self._deflate.flush() + struct.pack("<LL", self._crc, self._size & 0xFFFFFFFF)


def _tar(sources: Sequence[Source]) -> Iterator[bytes]:
    """Yield a POSIX tar file."""
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
    """Yield the file or folder at `parts` below the source's root, a folder with all that is in it."""
    try:
        with open_folder(root=source.root, parts=parts[:-1]) as parent:
            mode = (os.lstat(parts[-1], dir_fd=parent) if parts else os.fstat(parent)).st_mode
            file = files.read_entry(folder=parent, name=parts[-1]) if kind_of(mode) is Kind.FILE else None
        if file is not None:
            yield from _file(file, name, left_out)
        elif kind_of(mode) is Kind.FOLDER:
            yield from _folder(source, parts, name, left_out)
    except (FileMissing, WrongKind, UnsafePath):
        pass  # removed or replaced meanwhile
    except Unreadable:
        left_out.add(name, "its permissions do not allow reading it")


def _folder(source: Source, parts: tuple[str, ...], name: str, left_out: _LeftOut) -> Iterator[bytes]:
    """Yield a folder with all that is in it."""
    if len(os.fsencode(name)) > PATH_LIMIT or len(parts) > MAX_DEPTH:
        left_out.add(name, "nested too deep")
        return
    with open_folder(root=source.root, parts=parts) as folder:
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, int(max(0, os.fstat(folder).st_mtime))
        scanned = os.scandir(folder)
    with scanned:
        yield _header(info)
        is_top = parts == split_path(source.path)
        for each in scanned:
            if not is_top or source.is_packed(each):
                yield from _entry(source, (*parts, each.name), f"{name}/{each.name}", left_out)


def _file(file: files.OpenFile, name: str, left_out: _LeftOut) -> Iterator[bytes]:
    """Yield a file and close it. It gets the size that its header says, also if it shrinks or grows meanwhile."""
    with closing(file):
        if _has_large_holes(file):
            left_out.add(name, "has large holes; download it by itself")
            return
        info = tarfile.TarInfo(name)
        info.size, info.mtime = file.size, int(max(0, file.modified.timestamp()))
        yield _header(info)
        missing = file.size
        for chunk in file:
            missing -= len(chunk)
            yield chunk
        if missing:
            left_out.add(name, f"became shorter while it was read; its last {missing} bytes are zeros here")
        missing += _padding(file.size)
        while missing > 0:
            yield bytes(min(missing, files.CHUNK_BYTES))
            missing -= files.CHUNK_BYTES


def _has_large_holes(file: files.OpenFile) -> bool:
    descriptor = file.stream.fileno()
    if file.size - os.fstat(descriptor).st_blocks * 512 <= MAX_HOLES_BYTES:
        return False
    # A file system that compresses also has fewer blocks than bytes, but no hole.
    first_hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return first_hole < file.size


def _header(info: tarfile.TarInfo) -> bytes:
    # Names that are not UTF-8 keep their bytes.
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE

"""The list of a dataset version's files with their SHA-256, kept beside the version's folder.

The format is that of `sha256sum --zero`. The order lets a file be found without reading the list: within each folder
its files come first, then its subfolders, each by name. Links are not listed.
"""

from __future__ import annotations

import enum
import hashlib
import mmap
import os
import stat as modes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from storage.files import CHUNK_BYTES, OPEN_FILE

SUFFIX = ".sha256"
HASH_LENGTH = 64
"""Hexadecimal digits of a SHA-256."""
SEPARATOR = b"  "
_PATH_START = HASH_LENGTH + len(SEPARATOR)
"""Position of the path in a record."""


class Change(enum.StrEnum):
    """How a file differs from the manifest."""

    MISSING = "missing"
    ADDED = "added"
    CHANGED = "changed"


class Difference(NamedTuple):
    """A file that differs from the manifest."""

    path: str
    change: Change


class _Record(NamedTuple):
    digest: bytes
    path: bytes


def path_of(version_folder: Path) -> Path:
    """Return the path of a version's manifest. Versions of release 0.2.0 have none."""
    return version_folder.with_name(version_folder.name + SUFFIX)


def write(
    *, folder: Path, target: BinaryIO, on_file: Callable[[int, bytes, str], None] = lambda _folder, _name, _sha256: None
) -> None:
    """Hash all files below `folder` and write their list. No other process may change the folder meanwhile.

    `on_file` gets the open folder of each file, its name there, and its hash.
    """
    for base, folders, names, handle in os.fwalk(os.fsencode(folder)):
        folders.sort()
        relative = os.path.relpath(base, os.fsencode(folder))
        prefix = b"" if relative == b"." else relative + b"/"
        for name in sorted(names):
            if not modes.S_ISREG(os.lstat(name, dir_fd=handle).st_mode):
                continue
            with os.fdopen(os.open(name, OPEN_FILE, dir_fd=handle), "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            on_file(handle, name, digest)
            target.write(digest.encode() + SEPARATOR + prefix + name + b"\0")


@contextmanager
def opened(version_folder: Path) -> Iterator[Manifest]:
    """Open a version's manifest. It is empty if there is none."""
    with suppress(FileNotFoundError), path_of(version_folder).open("rb") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                yield Manifest(data)
                return
    yield Manifest(b"")


def differences(*, old: Path, new: Path) -> Iterator[Difference]:
    """Compare two manifests in constant memory, file by file in their order."""
    with old.open("rb") as old_file, new.open("rb") as new_file:
        before, after = _records(old_file), _records(new_file)
        left, right = next(before, None), next(after, None)
        while left or right:
            if right is None or (left and _key(left.path) < _key(right.path)):
                yield Difference(os.fsdecode(cast("_Record", left).path), Change.MISSING)
                left = next(before, None)
            elif left is None or _key(right.path) < _key(left.path):
                yield Difference(os.fsdecode(right.path), Change.ADDED)
                right = next(after, None)
            else:
                if left.digest != right.digest:
                    yield Difference(os.fsdecode(left.path), Change.CHANGED)
                left, right = next(before, None), next(after, None)


def digests(manifest: Path) -> Iterator[tuple[bytes, str]]:
    """Yield the path and the SHA-256 of each file of a manifest."""
    with manifest.open("rb") as file:
        yield from ((record.path, record.digest.decode()) for record in _records(file))


def _records(file: BinaryIO) -> Iterator[_Record]:
    """Yield the records of a manifest. It may be damaged."""
    incomplete = b""
    while chunk := file.read(CHUNK_BYTES):
        *records, incomplete = (incomplete + chunk).split(b"\0")
        yield from (_Record(record[:HASH_LENGTH], record[_PATH_START:]) for record in records)
    if incomplete:
        yield _Record(incomplete[:HASH_LENGTH], incomplete[_PATH_START:])


class Manifest:
    """An open manifest."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data

    def sha256(self, path: str) -> str:
        """Return the hash of the file at `path`, by binary search; empty if it is not listed."""
        wanted = os.fsencode(path)
        low, high = 0, len(self._data)  # both are starts of records; the record is between them
        while low < high:
            middle = self._data.rfind(b"\0", low, (low + high) // 2) + 1 or low
            end = self._data.find(b"\0", middle)
            record = self._data[middle + _PATH_START : end]
            if record == wanted:
                return self._data[middle : middle + HASH_LENGTH].decode()
            if _key(record) < _key(wanted):
                low = end + 1
            else:
                high = middle
        return ""


def _key(path: bytes) -> list[tuple[bool, bytes]]:
    """Return a value that sorts paths in the manifest's order."""
    parts = path.split(b"/")
    return [(index < len(parts) - 1, part) for index, part in enumerate(parts)]

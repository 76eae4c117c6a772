"""A manifest: the list of a dataset version's files with their SHA-256, in a file beside the version's folder.

The format is that of `sha256sum --zero`. In each folder the files come first, sorted by name, and then the subfolders,
sorted by name. Because of this order, a file can be found by binary search. Links are not listed.
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
from typing import BinaryIO, NamedTuple

from storage.files import CHUNK_BYTES, OPEN_FILE

SUFFIX = ".sha256"
"""The suffix of a manifest's name, after the name of the version's folder."""
HASH_LENGTH = 64
"""How many hexadecimal digits a SHA-256 has."""
SEPARATOR = b"  "
"""What `sha256sum` writes between hash and path."""
_PATH_START = HASH_LENGTH + len(SEPARATOR)
"""The position of the path in a line. Lines end with a NUL character."""


class Change(enum.StrEnum):
    """How a file differs from the manifest."""

    MISSING = "missing"
    ADDED = "added"
    CHANGED = "changed"


class Difference(NamedTuple):
    """A file that differs from the manifest."""

    path: str
    change: Change


class FileDigest(NamedTuple):
    """The path of a file and its SHA-256 in hexadecimal, as a line of a manifest has them."""

    path: bytes
    sha256: bytes


def path_of(version_folder: Path) -> Path:
    """Return the path of a version's manifest. Versions that release 0.2.0 published have none."""
    return version_folder.with_name(version_folder.name + SUFFIX)


def write(
    *,
    folder: Path,
    target: BinaryIO,
    on_file: Callable[[int, bytes, str], None] = lambda _folder_fd, _name, _sha256: None,
) -> None:
    """Hash all files below `folder`, and write the manifest to `target`. No other process may change the folder.

    `on_file` is called for each file with the descriptor of its folder, its name there, and its SHA-256.
    """
    for base, folders, names, folder_fd in os.fwalk(os.fsencode(folder)):
        folders.sort()  # in place, because `fwalk` enters them in this order
        relative = os.path.relpath(base, os.fsencode(folder))
        prefix = b"" if relative == b"." else relative + b"/"
        for name in sorted(names):
            if not modes.S_ISREG(os.lstat(name, dir_fd=folder_fd).st_mode):
                continue
            with os.fdopen(os.open(name, OPEN_FILE, dir_fd=folder_fd), "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            on_file(folder_fd, name, digest)
            target.write(digest.encode() + SEPARATOR + prefix + name + b"\0")


@contextmanager
def open_manifest(version_folder: Path) -> Iterator[Manifest]:
    """Open a version's manifest; without one, yield an empty Manifest."""
    with suppress(FileNotFoundError), path_of(version_folder).open("rb") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                yield Manifest(data)
                return
    yield Manifest(b"")


def differences(*, old: Path, new: Path) -> Iterator[Difference]:
    """Yield the differences of two manifests, in the order of manifests. Read both in parallel, in constant memory."""
    with old.open("rb") as old_file, new.open("rb") as new_file:
        old_lines, new_lines = _read_lines(old_file), _read_lines(new_file)
        old_line, new_line = next(old_lines, None), next(new_lines, None)
        while old_line or new_line:
            if old_line and (new_line is None or _sort_key(old_line.path) < _sort_key(new_line.path)):
                yield Difference(os.fsdecode(old_line.path), Change.MISSING)
                old_line = next(old_lines, None)
            elif new_line and (old_line is None or _sort_key(new_line.path) < _sort_key(old_line.path)):
                yield Difference(os.fsdecode(new_line.path), Change.ADDED)
                new_line = next(new_lines, None)
            elif old_line and new_line:  # the same path in both
                if old_line.sha256 != new_line.sha256:
                    yield Difference(os.fsdecode(old_line.path), Change.CHANGED)
                old_line, new_line = next(old_lines, None), next(new_lines, None)


def read_digests(manifest: Path) -> Iterator[FileDigest]:
    """Yield the path and the SHA-256 of each file of a manifest."""
    with manifest.open("rb") as file:
        yield from _read_lines(file)


def _read_lines(file: BinaryIO) -> Iterator[FileDigest]:
    """Yield the lines of a manifest. In a damaged manifest, the last line may be incomplete."""
    incomplete = b""
    while chunk := file.read(CHUNK_BYTES):
        *lines, incomplete = (incomplete + chunk).split(b"\0")
        yield from map(_parse_line, lines)
    if incomplete:
        yield _parse_line(incomplete)


def _parse_line(line: bytes) -> FileDigest:
    return FileDigest(path=line[_PATH_START:], sha256=line[:HASH_LENGTH])


class Manifest:
    """A manifest in memory or mapped into it."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data

    def sha256(self, path: str) -> str:
        """Return the hash of the file at `path`, by binary search; empty if it is not listed."""
        searched_path = os.fsencode(path)
        low, high = 0, len(self._data)  # the searched line begins at `low` or later, and before `high`
        while low < high:
            # The line that contains the middle begins after the last NUL before the middle. Without such a NUL, `rfind`
            # returns -1, and the line begins at `low`.
            middle = self._data.rfind(b"\0", low, (low + high) // 2) + 1 or low
            end = self._data.find(b"\0", middle)
            if end < 0:  # the last line of a damaged manifest, which was cut
                end = len(self._data)
            middle_path = self._data[middle + _PATH_START : end]
            if middle_path == searched_path:
                return self._data[middle : middle + HASH_LENGTH].decode()
            if _sort_key(middle_path) < _sort_key(searched_path):
                low = end + 1
            else:
                high = middle
        return ""


def _sort_key(path: bytes) -> list[tuple[bool, bytes]]:
    """Return a sort key for the order of manifests: in each folder, files (False) before subfolders (True)."""
    parts = path.split(b"/")
    return [(index < len(parts) - 1, part) for index, part in enumerate(parts)]

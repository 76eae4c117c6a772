"""Find the files of a folder on this machine to send: regular files only, no links."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import InvalidChoice
from .ignore import DEFAULTS, FILE_NAME, Ignore


@dataclass(frozen=True)
class LocalFile:
    """A file below a folder. `path` is relative, with slashes. Size in bytes, modification time in nanoseconds."""

    path: str
    file: Path
    size: int
    modified_ns: int

    def sha256(self) -> str:
        """Return the SHA-256 of the bytes, in hexadecimal."""
        with self.file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()


@dataclass(frozen=True)
class Scan:
    """The files of a folder by path, and the paths that cannot be sent: links, devices, names that are not UTF-8."""

    files: tuple[LocalFile, ...]
    skipped: tuple[str, ...]
    ignore: Ignore

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self.files)


def scan(folder: Path, *, defaults: Sequence[str] = DEFAULTS) -> Scan:
    """Return the files below `folder` without those that `defaults` and .trainyardignore leave out.

    Raises InvalidChoice.
    """
    if not folder.is_dir():
        raise InvalidChoice(f"{folder} is not a folder.")
    try:
        rules = (folder / FILE_NAME).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        rules = []
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidChoice(f"{folder / FILE_NAME} cannot be read: {error}") from None
    ignore = Ignore([*defaults, *rules])
    files, skipped = list[LocalFile](), list[str]()
    for each in _walk(folder, "", ignore, skipped):
        files.append(each)
    return Scan(tuple(sorted(files, key=lambda each: each.path)), tuple(sorted(skipped)), ignore)


def _walk(folder: Path, prefix: str, ignore: Ignore, skipped: list[str]) -> Iterator[LocalFile]:
    """Yield the files below a folder whose path is `prefix`, and add paths that cannot be sent to `skipped`."""
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise InvalidChoice(f"{folder} cannot be read: {error.strerror}. Name it in {FILE_NAME}.") from None
    for entry in entries:
        path = f"{prefix}{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if ignore.matches(path, is_folder=is_folder):
            continue
        if not _is_sendable(entry.name) or not (is_folder or entry.is_file(follow_symlinks=False)):
            skipped.append(path)
        elif is_folder:
            yield from _walk(Path(entry.path), f"{path}/", ignore, skipped)
        else:
            status = entry.stat(follow_symlinks=False)
            yield LocalFile(path, Path(entry.path), status.st_size, status.st_mtime_ns)


def _is_sendable(name: str) -> bool:
    """Return whether a name is valid UTF-8, as paths of the API must be."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True

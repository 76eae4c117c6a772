"""Find the files of a folder on this machine that are sent to a console: regular files only, no links."""

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
    """A file below a folder. `path` is its path from the folder, with slashes; `file` its path on this machine.

    The size is in bytes, the modification time in nanoseconds of Unix time.
    """

    path: str
    file: Path
    size: int
    modified_ns: int

    def sha256(self) -> str:
        """Return the SHA-256 of the bytes, in hexadecimal."""
        with self.file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True)
class Scan:
    """The files of a folder, sorted by path.

    `skipped` are the paths that cannot be sent: links, devices, and names that are not UTF-8. `ignore` are the rules
    by which other files were left out.
    """

    files: tuple[LocalFile, ...]
    skipped: tuple[str, ...]
    ignore: Ignore

    @property
    def size(self) -> int:
        """Return the size of all files in bytes."""
        return sum(file.size for file in self.files)


def scan(folder: Path, *, defaults: Sequence[str] = DEFAULTS) -> Scan:
    """Return the files below `folder`, except those that `defaults` and the folder's .trainyardignore leave out.

    `defaults` are rules in the form of .gitignore. Raises InvalidChoice.
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
    skipped = list[str]()
    files = sorted(_walk(folder, "", ignore, skipped), key=lambda file: file.path)
    return Scan(tuple(files), tuple(sorted(skipped)), ignore)


def _walk(folder: Path, prefix: str, ignore: Ignore, skipped: list[str]) -> Iterator[LocalFile]:
    """Yield the files below `folder`, and add the paths that cannot be sent to `skipped`.

    `prefix` is the path of `folder` from the scanned folder: empty, or with a slash at its end.
    """
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise InvalidChoice(
            f"{folder} cannot be read: {error.strerror}. Name it in {FILE_NAME} to leave it out."
        ) from None
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
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # deleted since the folder was read
                continue
            except OSError as error:
                raise InvalidChoice(
                    f"{entry.path} cannot be read: {error.strerror}. Name it in {FILE_NAME} to leave it out."
                ) from None
            yield LocalFile(path, Path(entry.path), status.st_size, status.st_mtime_ns)


def _is_sendable(name: str) -> bool:
    """Return whether a name is valid UTF-8, as paths of the API must be.

    Python shows each byte that is not UTF-8 as a surrogate, which cannot be encoded.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True

"""Read the files of a dataset version: list them with their hashes, open one, show the README."""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass
from datetime import datetime

from storage import files, manifests, previews, selectors
from storage.errors import StorageError
from storage.models import DatasetVersion
from storage.paths import Kind

PAGE_SIZE = 1000
"""How many entries of a folder one page lists. Browsers are slow with longer tables."""
README_NAMES = ("README.md", "README.txt", "README", "readme.md", "readme.txt")
"""The file names of a README. The first that exists is shown."""


@dataclass(frozen=True)
class Row:
    """A file or folder. `path` is relative to the version's folder. `size` is in bytes, and 0 for a folder.

    `sha256` is empty for a folder, and for all files if the version has no manifest.
    """

    path: str
    kind: Kind
    size: int
    modified_at: datetime
    sha256: str

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return posixpath.basename(self.path)


@dataclass(frozen=True)
class Page:
    """One page of a folder's entries. `next` is the cursor (`after`) for the next page; None on the last page."""

    rows: tuple[Row, ...]
    next: str | None


def list_page(*, version: DatasetVersion, path: str, after: str = "") -> Page:
    """Return a page of a folder, its subfolders first. Raises FileMissing, UnsafePath, WrongKind, InvalidInput."""
    folder = selectors.version_folder(version)
    page = files.list_folder(
        root=folder, path=path, limit=PAGE_SIZE, after=after, folders_first=True, is_listed=_is_listed
    )
    with manifests.open_manifest(folder) as manifest:
        rows = []
        for entry in page.entries:
            entry_path = posixpath.join(path, entry.name)
            digest = manifest.sha256(entry_path) if entry.kind is Kind.FILE else ""
            rows.append(Row(entry_path, entry.kind, entry.size, entry.modified, digest))
    return Page(tuple(rows), page.next)


def _is_listed(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is listed. Links are not, because they lead to files of the version that are listed."""
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)


def read(*, version: DatasetVersion, path: str) -> files.OpenFile:
    """Open a file; the caller closes it. Raises FileMissing, UnsafePath, WrongKind."""
    return files.read(root=selectors.version_folder(version), path=path)


def sha256(*, version: DatasetVersion, path: str) -> str:
    """Return the SHA-256 of a file; empty if the version has no manifest."""
    with manifests.open_manifest(selectors.version_folder(version)) as manifest:
        return manifest.sha256(path)


def readme(*, version: DatasetVersion, folder: str = "") -> str:
    """Return the text of a folder's README, at most `previews.TEXT_BYTES` of it; empty if there is none."""
    for name in README_NAMES:
        path = posixpath.join(folder, name)
        try:
            file = read(version=version, path=path)
        except StorageError:
            continue
        with file.stream:
            return previews.preview(file, name=name).text or ""
    return ""

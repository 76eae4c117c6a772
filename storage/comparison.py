"""Compare files that a customer has elsewhere with those of a workspace, by their SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from storage import files
from storage.errors import FileMissing, Unreadable, UnsafePath, WrongKind
from storage.paths import split_path

MAX_FILES = 1000
"""Files of one comparison: a client with more asks several times."""
MAX_HASHED_BYTES = 2 * 1024**3
"""Bytes that one comparison reads, a second or two. Files beyond it count as different, so the client sends them."""


@dataclass(frozen=True)
class ClientFile:
    """A file as the client has it: path below the workspace's folder, size in bytes, SHA-256 in hexadecimal."""

    path: str
    size: int
    sha256: str


def differing(*, root: Path, client_files: Sequence[ClientFile]) -> list[str]:
    """Return the paths whose file is missing below `root` or has other bytes. Raises UnsafePath."""
    bytes_left, different = MAX_HASHED_BYTES, []
    for each in client_files:
        split_path(each.path)  # raises UnsafePath
        try:
            file = files.read(root=root, path=each.path)
        except (FileMissing, Unreadable, UnsafePath, WrongKind):  # UnsafePath: a link
            different.append(each.path)
            continue
        with closing(file):
            if file.size != each.size or each.size > bytes_left:
                different.append(each.path)
                continue
            bytes_left -= each.size
            digest = hashlib.sha256()
            for chunk in file:
                digest.update(chunk)
        if digest.hexdigest() != each.sha256:
            different.append(each.path)
    return different

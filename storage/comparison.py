"""Compare a client's files with those of a workspace, by their SHA-256, so that the client sends only what differs."""

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
"""How many files one request may compare. A client with more sends several requests."""
MAX_HASHED_BYTES = 2 * 1024**3
"""How many bytes one request hashes, which takes a second or two. Further files count as different, so that the client
sends them."""


@dataclass(frozen=True)
class ClientFile:
    """A file of the client: its path below the workspace's folder, size in bytes, and SHA-256 in hexadecimal."""

    path: str
    size: int
    sha256: str


def differing(*, root: Path, client_files: Sequence[ClientFile]) -> list[str]:
    """Return the paths of the files that are missing below `root` or differ there. Raises UnsafePath."""
    bytes_left, paths = MAX_HASHED_BYTES, []
    for client_file in client_files:
        split_path(client_file.path)  # raises UnsafePath for a path that leads out of the workspace
        try:
            file = files.read(root=root, path=client_file.path)
        except (FileMissing, Unreadable, UnsafePath, WrongKind):  # here UnsafePath means that there is a link
            paths.append(client_file.path)
            continue
        with closing(file):
            if file.size != client_file.size or client_file.size > bytes_left:
                paths.append(client_file.path)
                continue
            bytes_left -= client_file.size
            digest = hashlib.sha256()
            for chunk in file:
                digest.update(chunk)
        if digest.hexdigest() != client_file.sha256:
            paths.append(client_file.path)
    return paths

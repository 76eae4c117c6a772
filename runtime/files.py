"""Write files atomically, lock them across processes, and list folders of shared storage. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from pathlib import Path
from types import TracebackType


class FileLock:
    """An exclusive lock across processes: `with FileLock(path):`. The kernel releases it when its holder dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def write_json(path: Path, data: object) -> None:
    """Replace a file by a rename, so that readers see the old or the new content and nothing in between."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(json.dumps(data))
    temporary.replace(path)


def refresh_listing(folder: Path) -> None:
    """List a folder, which makes an NFS client ask its server for files that were missing before."""
    with contextlib.suppress(OSError):  # the caller gets the error when it opens a file
        list(folder.iterdir())

"""Store a file only once if several dataset versions of an organization contain it.

Each published file gets a second name, its blob, in a folder of the organization. This name is the file's SHA-256, and
an `x` if the file is executable. A file that is published later with the same content becomes a hard link to the blob.
Nobody writes to a blob: the console never changes published files, and runs see them through read-only mounts.
Organizations share no blobs, because an organization could then find out what another one stores.

A file counts against the quota in each version, so deleting one version does not change the usage of another.

A blob with only one link belongs to no version any more, and garbage collection removes it. Blobs only save space: if
one is missing, the next publication stores the file again. After a restore all are missing, because backups leave out
hidden folders.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat as modes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FOLDER = ".blobs"
"""The folder of all blobs in the storage root. Each organization has a subfolder."""
_CANNOT_LINK_ERRNOS = frozenset({errno.EMLINK, errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EACCES})
"""Errors of `link` if the file system has no hard links, or allows no more links to the file. The file stays as it is.
"""


def folder_of(root: Path, organization_id: int) -> Path:
    """Return the folder of an organization's blobs."""
    return root / FOLDER / str(organization_id)


def deduplicate(*, blobs: Path, folder_fd: int, name: bytes, sha256: str) -> None:
    """Replace the regular file `name` in the open folder by a link to the blob with its content.

    If there is no such blob, or only a damaged one, the file becomes the blob. The folder must be on the disk of the
    blobs, and no other process may change the folder. The link replaces the file by a rename, so that a crash cannot
    lose the file.
    """
    status = os.lstat(name, dir_fd=folder_fd)
    if not status.st_size:  # empty files need no space, and there may be more of them than the links that one can have
        return
    blob = blobs / sha256[:2] / (sha256 + ("x" if status.st_mode & 0o100 else ""))
    with suppress(FileNotFoundError):
        existing = blob.lstat()
        if (existing.st_dev, existing.st_ino) == (status.st_dev, status.st_ino):
            return  # the file is this blob already
        if _is_intact(blob, sha256):
            temporary = secrets.token_hex(16).encode()
            try:
                os.link(blob, temporary, dst_dir_fd=folder_fd, follow_symlinks=False)
            except OSError as error:
                if error.errno in _CANNOT_LINK_ERRNOS:
                    return
                raise
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            return
        blob.unlink()
    blob.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.link(name, blob, src_dir_fd=folder_fd, follow_symlinks=False)
    except OSError as error:
        # EEXIST means that another publication made the same blob just before. Then the file is stored twice.
        if error.errno not in _CANNOT_LINK_ERRNOS | {errno.EEXIST}:
            raise


def _is_intact(blob: Path, sha256: str) -> bool:
    """Return whether a blob has its content. A blob that the disk has damaged must not replace an intact file."""
    try:
        with blob.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


def unused(root: Path) -> Iterator[Path]:
    """Yield the paths of the blobs that no version contains.

    A new version may link to a yielded blob just before the caller removes the blob. The version then keeps the file,
    because only the blob's name is removed.
    """
    top = root / FOLDER
    if not top.exists():
        return
    for base, _folders, names in os.walk(top):
        for name in names:
            path = Path(base, name)
            with suppress(FileNotFoundError):
                status = path.lstat()
                if modes.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    yield path

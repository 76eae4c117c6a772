"""Store a file that several dataset versions of one organization share once.

Each published file has a second name, by its SHA-256, in the organization's folder of blobs. A file of the same content
and executability that is published later becomes a hard link to it. Organizations share no blobs, so none can find out
what another one stores. Shared files are never written to: the console never changes published files, and runs see them
through read-only mounts. A file counts against the quota in each version, so that deleting one version does not
change what another one counts.

A blob with one link left is in no version; garbage collection removes it. Nothing depends on a blob: if one is missing,
the next publication stores the file again. That also holds after a restore, because backups leave hidden folders out.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat as modes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FOLDER = ".blobs"
"""The folder of all blobs in the storage root, one subfolder per organization."""
_UNLINKABLE = frozenset({errno.EMLINK, errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EACCES})
"""Errors of a file system that cannot link the file, or has too many links to it. The file then stays as it is."""


def folder_of(root: Path, organization_pk: int) -> Path:
    """Return the folder of an organization's blobs."""
    return root / FOLDER / str(organization_pk)


def deduplicate(*, blobs: Path, folder: int, name: bytes, sha256: str) -> None:
    """Replace the regular file `name` of the open folder by a link to the blob of its content, or make it the blob.

    The folder is on the disk of the blobs, and no other process changes it. A rename replaces the file, so a crash
    never loses it.
    """
    status = os.lstat(name, dir_fd=folder)
    if not status.st_size:  # nothing to save, and there may be many
        return
    blob = blobs / sha256[:2] / (sha256 + ("x" if status.st_mode & 0o100 else ""))
    with suppress(FileNotFoundError):
        existing = blob.lstat()
        if (existing.st_dev, existing.st_ino) == (status.st_dev, status.st_ino) or existing.st_size != status.st_size:
            return  # it is the blob already, or the blob is damaged
        temporary = secrets.token_hex(16).encode()
        try:
            os.link(blob, temporary, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno in _UNLINKABLE:
                return
            raise
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        return
    blob.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.link(name, blob, src_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        # EEXIST: another publication was first. Then the file is stored twice until both versions are gone.
        if error.errno not in _UNLINKABLE | {errno.EEXIST}:
            raise


def unused(root: Path) -> Iterator[Path]:
    """Yield the blobs that no version has. If a version links one meanwhile, removing the blob does it no harm."""
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

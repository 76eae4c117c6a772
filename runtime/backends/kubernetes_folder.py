"""The folders of a cluster's runs, where the console shares their storage.

The one rule: whatever a pod could write is hostile: it is opened step by step, no link is followed, and nothing but a
regular file is read.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

from runtime.backends.trash import Trash, remove_tree
from runtime.errors import BackendUnavailable

KEY = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
_PARTS = ("", "run", "run/tensorboard", "logs", "nodes", "checkpoints")
_SAFE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ASKED_ANEW = 16
"""Files of a folder that the storage is asked about each time; of others a network's cache may answer."""


class Folders:
    """The folders of all runs of one cluster. `uid` is the user that pods run as."""

    def __init__(self, root: Path, uid: int) -> None:
        self.root = root
        self._uid = uid

    def make(self, name: str, checkpoint_key: str) -> None:
        """The folders of one run, as pods need them; what is there stays. Raises BackendUnavailable."""
        try:
            for part in (".checkpoints", ".trash"):
                (self.root / part).mkdir(parents=True, exist_ok=True, mode=0o711)
            for part in _PARTS:
                self._give(self.root / name / part)
            if checkpoint_key:
                self._give(self.root / ".checkpoints" / checkpoint_key)
        except OSError as error:
            raise BackendUnavailable(f"The folders of the run could not be made: {error}.") from error

    def read(self, name: str, folder: str, file: str, offset: int, limit: int) -> tuple[bytes, bool]:
        """Up to `limit` bytes from an offset, and whether that was all; nothing where there is no such file."""
        descriptor = self._open(name, folder, file)
        if descriptor is None:
            return b"", True
        with os.fdopen(descriptor, "rb") as opened:
            opened.seek(max(0, offset))
            return opened.read(limit), not opened.read(1)

    def write(self, name: str, folder: str, file: str, data: bytes) -> None:
        """Put a file there that pods may read, whole; what hostile code has made impossible is left undone."""
        descriptor = self._enter(name, folder)
        if descriptor is None:
            return
        temporary = f".{file}.{secrets.token_hex(8)}"
        try:
            written = os.open(temporary, _NEW, 0o644, dir_fd=descriptor)
            with os.fdopen(written, "wb") as opened:
                os.fchmod(written, 0o644)
                opened.write(data)
            os.replace(temporary, file, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=descriptor)
        finally:
            os.close(descriptor)

    def files(self, name: str, folder: str) -> list[str]:
        """What lies in a run's folder, by name."""
        descriptor = self._enter(name, folder)
        if descriptor is None:
            return []
        try:
            return os.listdir(descriptor)  # noqa: PTH208 - of an open folder, which no link has led to
        finally:
            os.close(descriptor)

    def stamp(self, name: str) -> tuple[int, ...]:
        """What changes when the run has written: times and sizes of its logs, records and metrics."""
        found: list[int] = []
        for folder in ("logs", "nodes", "run"):
            descriptor = self._enter(name, folder)
            if descriptor is None:
                continue
            try:
                names = ["metrics.jsonl"] if folder == "run" else sorted(os.listdir(descriptor))  # noqa: PTH208 - as above
                for place, file in enumerate(names[:1000]):
                    with contextlib.suppress(OSError):
                        seen = _fresh(file, descriptor) if place < _ASKED_ANEW else _cached(file, descriptor)
                        found += [hash(file), seen.st_size, seen.st_mtime_ns if folder != "nodes" else 0]
            finally:
                os.close(descriptor)
        return tuple(found)

    def remove(self, name: str) -> None:
        """A run's folder, whole; nothing where there is none."""
        trash = Trash(self.root / ".trash")
        trash.take(self.root / name)
        trash.empty()

    def remove_checkpoints(self, key: str) -> None:
        """What attempts share under a key."""
        folder = self.root / ".checkpoints" / key
        if KEY.match(key) and folder.is_dir():
            remove_tree(folder)

    def _give(self, folder: Path) -> None:
        """A folder that pods may write to."""
        folder.mkdir(exist_ok=True, mode=0o700)
        if os.geteuid() == 0:
            os.chown(folder, self._uid, self._uid, follow_symlinks=False)
        elif os.geteuid() != self._uid:
            # Nobody but pods of this very run, which have it mounted, comes here: the way above is closed.
            folder.chmod(0o777)

    def _enter(self, name: str, folder: str) -> int | None:
        descriptor = -1
        try:
            descriptor = os.open(self.root / name, _SAFE | os.O_DIRECTORY)
            return os.open(folder, _SAFE | os.O_DIRECTORY, dir_fd=descriptor)
        except OSError:
            return None
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _open(self, name: str, folder: str, file: str) -> int | None:
        inside = self._enter(name, folder)
        if inside is None:
            return None
        try:
            descriptor = os.open(file, _SAFE, dir_fd=inside)
        except OSError:
            return None
        finally:
            os.close(inside)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        return None


def _cached(file: str, folder: int) -> os.stat_result:
    """What is known of a file: on a network's storage this may be seconds old, a minute for one that was silent."""
    return os.stat(file, dir_fd=folder, follow_symlinks=False)


def _fresh(file: str, folder: int) -> os.stat_result:
    """What its storage says of a file now: a network's has to ask when a file is opened."""
    try:
        descriptor = os.open(file, _SAFE, dir_fd=folder)
    except OSError:
        return _cached(file, folder)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)

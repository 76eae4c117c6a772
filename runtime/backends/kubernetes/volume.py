"""The run folders of one cluster, on storage that the console and the Pods share.

Pods run customer code, which can write anything there. So every path is opened component by component without following
links, and only regular files are read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from runtime.backends.admission import CHECKPOINT_KEY
from runtime.backends.log_chunks import RawChunk, Times, read_raw_chunk, read_times
from runtime.errors import BackendUnavailable
from runtime.trash import Trash, remove_tree

_SHARED_FOLDERS = (".checkpoints", ".outputs")
"""Folders that have one folder for each checkpoint key, with the files that a job's attempts share."""
_SUBFOLDERS = ("", "run", "run/tensorboard", "logs", "nodes", "checkpoints", "outputs")
"""The folders of a run, relative to its own folder (""). A folder comes before those inside it."""
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK: opening a named pipe must not wait for a writer."""
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""O_EXCL: creating a file fails if customer code has put a file or a link in its place."""
_MAX_UNCACHED_FILES = 16
"""Files per folder for which `fingerprint` asks the storage server each time. Each such file costs one round trip
per second. 16 are enough for the logs of a usual machine's ranks."""


class RunFolders:
    """The folders of all runs, in `root`. `uid` is the user that Pods run as."""

    def __init__(self, root: Path, uid: int) -> None:
        self.root = root
        self._uid = uid

    def create(self, name: str, shared_key: str) -> None:
        """Create the folders that a run's Pods mount, unless they exist. Raises BackendUnavailable."""
        try:
            # 0711: kubelets may pass through these folders to mount those inside, but no other user can list them.
            for folder in (*_SHARED_FOLDERS, ".trash"):
                (self.root / folder).mkdir(parents=True, exist_ok=True, mode=0o711)
            for subfolder in _SUBFOLDERS:
                self._create_for_pods(self.root / name / subfolder)
            if shared_key:
                for folder in _SHARED_FOLDERS:
                    self._create_for_pods(self.root / folder / shared_key)
        except OSError as error:
            raise BackendUnavailable(f"The run's folders could not be created: {error}.") from error

    def read(self, name: str, folder: str, file: str, offset: int, limit: int) -> RawChunk:
        """Return up to `limit` bytes of a run's file from `offset`; a missing file counts as empty.

        A negative `offset` counts from the end.
        """
        file_fd = self._open_file(name, folder, file)
        if file_fd is None:
            return RawChunk(b"", at_end=True, offset=max(0, offset), size=0)
        with os.fdopen(file_fd, "rb") as stream:
            return read_raw_chunk(stream, offset, limit)

    def log_times(self, name: str, rank: int, raw_chunk: RawChunk) -> Times:
        """Return the times of a chunk of a rank's log; empty if they are not known."""
        file_fd = self._open_file(name, "logs", f"rank-{rank}.times")
        if file_fd is None:
            return []
        try:
            return read_times(file_fd, raw_chunk)
        finally:
            os.close(file_fd)

    def write(self, name: str, folder: str, file: str, data: bytes) -> None:
        """Replace a file that Pods may read, by a rename.

        A failure is ignored, since customer code can change the folder so that every write to it fails.
        """
        folder_fd = self._open_folder(name, folder)
        if folder_fd is None:
            return
        temporary = f".{file}.{secrets.token_hex(8)}"
        try:
            file_fd = os.open(temporary, _CREATE_FLAGS, 0o644, dir_fd=folder_fd)
            with os.fdopen(file_fd, "wb") as stream:
                os.fchmod(file_fd, 0o644)  # the umask may have removed permissions
                stream.write(data)
            os.replace(temporary, file, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)

    def fingerprint(self, name: str, nodes: int, ranks: int) -> tuple[int, ...]:
        """Return a value that changes when the run writes logs, records or metrics. It consists of sizes and times.

        Looks at the platform's own files only: customer code can create any number of others.
        """
        files_by_folder = {
            "logs": [f"rank-{rank}.log" for rank in range(ranks)],
            "nodes": [f"{node}.{suffix}" for node in range(nodes) for suffix in ("json", "samples.jsonl")],
            "run": ["metrics.jsonl"],
        }
        values: list[int] = []
        for folder, files in files_by_folder.items():
            # An NFS client asks the server about a folder at each open, and so notices new files.
            folder_fd = self._open_folder(name, folder)
            if folder_fd is None:
                continue
            try:
                for index, file in enumerate(files):
                    # A record is rewritten regularly even without a change, so its time is ignored.
                    values += _file_fingerprint(
                        file, folder_fd, is_cached=index >= _MAX_UNCACHED_FILES, has_time=folder != "nodes"
                    )
            finally:
                os.close(folder_fd)
        return tuple(values)

    def remove(self, name: str) -> None:
        """Remove a run's folder, if it exists."""
        trash = Trash(self.root / ".trash")
        trash.move_in(self.root / name)
        trash.empty()

    def fill_checkpoints(self, checkpoint_key: str, copy: Callable[[Path], None]) -> None:
        """Replace the checkpoints under this key by those that `copy` writes, and let Pods change them."""
        for parent in _SHARED_FOLDERS:
            (self.root / parent).mkdir(parents=True, exist_ok=True, mode=0o711)
        folder = self.root / ".checkpoints" / checkpoint_key
        remove_tree(folder)
        self._create_for_pods(folder)
        try:
            copy(folder)
            for _path, folders, files, folder_fd in os.fwalk(folder):
                for name in (*folders, *files):
                    self._grant_to_pods(name, folder_fd)
        except BaseException:
            remove_tree(folder)
            raise

    def remove_shared(self, checkpoint_key: str) -> None:
        """Remove the checkpoints and outputs that attempts share under this key."""
        for parent in _SHARED_FOLDERS:
            folder = self.root / parent / checkpoint_key
            if CHECKPOINT_KEY.match(checkpoint_key) and folder.is_dir():
                remove_tree(folder)

    def _create_for_pods(self, folder: Path) -> None:
        """Create a folder that Pods may write to, unless it exists."""
        folder.mkdir(exist_ok=True, mode=0o700)
        if os.geteuid() == 0:
            os.chown(folder, self._uid, self._uid, follow_symlinks=False)
        elif os.geteuid() != self._uid:
            # Only root can give the folder to the Pods' user. So everybody who can enter the folders above may write to
            # it, and `check` reports that the console has the wrong user. Pods of other runs do not mount the folder.
            folder.chmod(0o777)

    def _grant_to_pods(self, name: str, folder_fd: int) -> None:
        """Let Pods change a file or folder that the console has created, as `_create_for_pods` does."""
        mode = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode
        if os.geteuid() == 0:
            os.chown(name, self._uid, self._uid, dir_fd=folder_fd, follow_symlinks=False)
        elif os.geteuid() != self._uid and not stat.S_ISLNK(mode):
            os.chmod(name, stat.S_IMODE(mode) | (0o777 if stat.S_ISDIR(mode) else 0o666), dir_fd=folder_fd)

    def _open_folder(self, name: str, folder: str) -> int | None:
        """Return a descriptor of one of a run's folders; None if it does not exist or is a link."""
        run_fd = -1
        try:
            run_fd = os.open(self.root / name, _READ_FLAGS | os.O_DIRECTORY)
            return os.open(folder, _READ_FLAGS | os.O_DIRECTORY, dir_fd=run_fd)
        except OSError:
            return None
        finally:
            if run_fd >= 0:
                os.close(run_fd)

    def _open_file(self, name: str, folder: str, file: str) -> int | None:
        """Return a descriptor of a regular file; None for anything else."""
        folder_fd = self._open_folder(name, folder)
        if folder_fd is None:
            return None
        try:
            file_fd = os.open(file, _READ_FLAGS, dir_fd=folder_fd)
        except OSError:
            return None
        finally:
            os.close(folder_fd)
        if stat.S_ISREG(os.fstat(file_fd).st_mode):
            return file_fd
        os.close(file_fd)
        return None


def _file_fingerprint(file: str, folder_fd: int, *, is_cached: bool, has_time: bool) -> tuple[int, int]:
    """Return a file's size, and its modification time if `has_time`; -1 stands for a file that does not exist.

    `is_cached`: the answer may come from the cache of an NFS client.
    """
    try:
        status = (_stat if is_cached else _stat_uncached)(file, folder_fd)
    except OSError:
        return -1, 0
    return status.st_size, status.st_mtime_ns if has_time else 0


def _stat(file: str, folder_fd: int) -> os.stat_result:
    """Return a file's attributes. An NFS client may answer from its cache, which is up to a minute old."""
    return os.stat(file, dir_fd=folder_fd, follow_symlinks=False)


def _stat_uncached(file: str, folder_fd: int) -> os.stat_result:
    """Return a file's attributes as the storage server has them, since an NFS client asks the server at each open."""
    try:
        file_fd = os.open(file, _READ_FLAGS, dir_fd=folder_fd)
    except OSError:
        return _stat(file, folder_fd)
    try:
        return os.fstat(file_fd)
    finally:
        os.close(file_fd)

"""Pack folders into tar files, and unpack them.

Customers' code may write into the folders while they are packed. It can neither stop a backup nor lead it out of the
folder, because folders are opened by descriptor, and links are stored but never followed. A file that changes while
it is read is read again. Entries that cannot be packed are left out. The manifest lists them, and also the files that
changed during each read.

The `tar` program is not used, because it does not read changed files again, and packs trees that are too deep to be
restored. But it can unpack these files: they are POSIX tar (pax) with GNU's sparse format.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from storage.paths import SWAPPED_ERRNOS

MAX_DEPTH = 128
"""Folders nested deeper are left out, because the walk is recursive and holds an open descriptor for each level."""
MAX_PATH_BYTES = 3800
"""The length of the longest path below the root. Linux allows 4,095 bytes; the paths of the root and of the folder in
which a restore unpacks need the rest."""
MAX_READS = 3
"""How often a file is read if it changes each time, and how often an entry is tried if it is replaced each time."""
CHUNK_BYTES = 1024**2
"""How much is written to the tar file at once. tarfile's default, 10 KiB, would need many more system calls."""
MAX_LISTED = 1000
"""How many of the entries that were left out the manifest lists, so that it stays short; all are counted."""
PACKED_HIDDEN_NAMES = frozenset({".outputs"})
"""The hidden entries of a root that are packed: the outputs of jobs. Other hidden entries are temporary, or hold the
progress of runs, which is not needed after a restore."""


class BrokenTree(Exception):
    """A tar file has an entry that `pack` never writes."""


@dataclass
class PackResult:
    """The contents of a tar file. `bytes` is the size of the tar file.

    `missing` counts all entries that the tar file lacks or has in a mixed state; `left_out` lists the first of them.
    """

    files: int = 0
    folders: int = 0
    sha256: str = ""
    bytes: int = 0
    missing: int = 0
    left_out: list[str] = field(default_factory=list)
    """The first MAX_LISTED entries that the tar file lacks or has in a mixed state, each as `path: reason`. Stored
    manifests have this name, so it cannot change."""

    def report(self, path: str, reason: str) -> None:
        """Count an entry that was left out, or whose copy may mix old and new data, and list it with the reason."""
        self.missing += 1
        if len(self.left_out) < MAX_LISTED:
            self.left_out.append(f"{path}: {reason}")


def pack(root: Path, target: Path) -> PackResult:
    """Pack `root` into the new file `target`. A missing root is packed as an empty one.

    Hidden entries directly in `root` are left out, except PACKED_HIDDEN_NAMES.
    """
    result = PackResult()
    with target.open("xb") as file:
        hashing_file = _HashingFile(file)
        with tarfile.open(mode="w|", fileobj=hashing_file, format=tarfile.PAX_FORMAT, bufsize=CHUNK_BYTES) as tar:  # type: ignore[call-overload]  # `w|` calls only write()
            _Packer(tar, result).add_tree(root)
        file.flush()
        os.fsync(file.fileno())
    result.sha256, result.bytes = hashing_file.hexdigest(), hashing_file.written
    return result


def unpack(archive: Path, target: Path) -> int:
    """Unpack a tar file into the empty folder `target`; return the number of files.

    Raises BrokenTree, tarfile.TarError (for example if the tar file is cut) and OSError.
    Names are checked, because somebody may have modified the backup. Folders get their metadata last: a read-only
    folder could not be filled, and filling a folder changes its modification time.
    """
    links: set[str] = set()
    folders: list[tuple[Path, tarfile.TarInfo]] = []
    files: set[str] = set()
    with tarfile.open(archive, "r:", errors="surrogateescape") as tar:
        for member in tar:
            path = target / _safe_name(member.name, links)
            if member.isdir():
                if path.is_symlink():  # mkdir and chmod would follow it
                    raise BrokenTree(f"{archive.name} has a link and a folder of the same name: {member.name}")
                path.mkdir(mode=0o700, exist_ok=True)
                folders.append((path, member))
                continue
            if path.is_symlink() or path.exists():
                path.unlink()  # an earlier copy of a file that changed while it was read
            if member.issym():
                path.symlink_to(member.linkname)
                links.add(member.name)
            elif member.isreg():
                tar.makefile(member, str(path))
                links.discard(member.name)
            else:
                raise BrokenTree(f"{archive.name} has an entry that is no file, folder or link: {member.name}")
            files.add(member.name)
            _apply_metadata(path, member)
    for path, member in reversed(folders):
        _apply_metadata(path, member)
    return len(files)


def _safe_name(name: str, links: set[str]) -> str:
    """Return `name` if it stays in the folder. Raises BrokenTree if it leads out, also through one of `links`."""
    parts = name.split("/")
    parents = {"/".join(parts[:end]) for end in range(1, len(parts))}
    if name.startswith("/") or {"", ".", ".."} & set(parts) or parents & links:
        raise BrokenTree(f"A name in the archive leads out of its folder: {name}")
    return name


def _apply_metadata(path: Path, member: tarfile.TarInfo) -> None:
    """Set owner, mode and modification time. The owner is set first, because chown clears setuid bits."""
    if os.geteuid() == 0:  # only root may change owners
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        path.chmod(stat.S_IMODE(member.mode))
    os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)


class _Packer:
    """Adds one tree to a tar file.

    In its methods, `path` is an entry's path relative to the root, `name` its last part, and `parent_fd` the open
    folder that contains it. `depth` is 1 directly below the root.
    """

    def __init__(self, tar: tarfile.TarFile, result: PackResult) -> None:
        self._tar, self._result = tar, result
        self._changed: list[str] = []  # paths of files that changed while they were read

    def add_tree(self, root: Path) -> None:
        """Add the tree. Then add the files again that changed while they were read, up to MAX_READS times."""
        try:
            root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return
        try:
            for name in _list_names(root_fd):
                if not name.startswith(".") or name in PACKED_HIDDEN_NAMES:
                    self._add_entry(root_fd, name, name, 1)
            for read_number in range(2, MAX_READS + 1):  # each file was read once above
                changed_paths, self._changed = self._changed, []
                for path in changed_paths:
                    self._add_changed_file(root_fd, path, is_last=read_number == MAX_READS)
        finally:
            os.close(root_fd)

    def _add_entry(self, parent_fd: int, name: str, path: str, depth: int) -> None:
        """Add an entry, and what is below it. If a job replaces it meanwhile, try again, up to MAX_READS times."""
        for _attempt in range(MAX_READS):
            try:
                self._try_to_add(parent_fd, name, path, depth)
            except FileNotFoundError:
                return  # deleted since the folder was listed
            except PermissionError:
                self._result.report(path, "may not be read")
                return
            except OSError as error:
                if error.errno not in SWAPPED_ERRNOS:
                    raise
                # A job replaced the entry between two system calls: try again.
            else:
                return
        self._result.report(path, "was replaced during each attempt to read it")

    def _try_to_add(self, parent_fd: int, name: str, path: str, depth: int) -> None:
        """Add an entry, and what is below it. Raises OSError if it is deleted or replaced meanwhile."""
        status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            self._add_folder(parent_fd, name, path, depth, status)
        elif stat.S_ISLNK(status.st_mode):
            self._add_member(_info(path, status, tarfile.SYMTYPE, os.readlink(name, dir_fd=parent_fd)))
        elif stat.S_ISREG(status.st_mode):
            if not self._add_file(parent_fd, name, path):
                self._changed.append(path)
        elif not stat.S_ISSOCK(status.st_mode):  # sockets have no content, and a new run makes its own: not reported
            self._result.report(path, "no file, folder or link")  # such as a pipe

    def _add_folder(self, parent_fd: int, name: str, path: str, depth: int, status: os.stat_result) -> None:
        """Add a folder and what is below it, or leave it out if it is nested too deep."""
        if depth > MAX_DEPTH or len(os.fsencode(path)) > MAX_PATH_BYTES:
            self._result.report(path, "nested too deep")
            return
        folder_fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent_fd)
        try:
            self._tar.addfile(_info(path, status, tarfile.DIRTYPE))
            self._result.folders += 1
            for entry in _list_names(folder_fd):
                self._add_entry(folder_fd, entry, f"{path}/{entry}", depth + 1)
        finally:
            os.close(folder_fd)

    def _add_changed_file(self, root_fd: int, path: str, *, is_last: bool) -> None:
        """Read a changed file again, and add it once more; `unpack` keeps the later copy. Follows no links."""
        folder_fd = os.dup(root_fd)
        try:
            *folders, name = path.split("/")
            for part in folders:
                inner_fd = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder_fd)
                os.close(folder_fd)
                folder_fd = inner_fd
            if self._add_file(folder_fd, name, path, is_copy=True):
                return
        except OSError as error:
            if error.errno not in SWAPPED_ERRNOS and not isinstance(error, PermissionError):
                raise
            # Deleted or replaced, or its mode was changed: the first copy stays.
            self._result.report(path, "changed while it was read, and could not be read again")
            return
        finally:
            os.close(folder_fd)
        if is_last:
            self._result.report(path, "changed during each read; the copy may mix old and new data")
        else:
            self._changed.append(path)

    def _add_file(self, parent_fd: int, name: str, path: str, *, is_copy: bool = False) -> bool:
        """Add a file; return False if it changed while it was read. `is_copy`: an earlier copy was counted already."""
        # Without O_NONBLOCK, opening a pipe that replaced the file would wait for a writer.
        file_fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent_fd)
        before = os.fstat(file_fd)
        if not stat.S_ISREG(before.st_mode):
            os.close(file_fd)
            # The file was replaced after `_try_to_add` had looked at it. EINVAL makes `_add_entry` try again.
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        with os.fdopen(file_fd, "rb", buffering=0) as file:
            # A file that occupies fewer bytes than its size is sparse; stat counts blocks of 512 bytes. Without holes,
            # `segments` is None.
            segments = list(_segments(file_fd, before)) if before.st_blocks * 512 < before.st_size else None
            info = _info(path, before)
            reader = _SegmentReader(file, segments if segments is not None else [(0, before.st_size)])
            if segments is None:
                info.size = before.st_size
                self._add_member(info, _ChainedReader(reader), is_counted=not is_copy)
            else:
                self._add_member(*_sparse_member(info, before.st_size, segments, reader), is_counted=not is_copy)
            after = os.fstat(file_fd)
        is_same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        return is_same and not reader.was_short

    def _add_member(self, info: tarfile.TarInfo, content: Any = None, *, is_counted: bool = True) -> None:
        """Write a member, unless its path is too long. `content` is a reader; None for a link."""
        if len(os.fsencode(info.name)) > MAX_PATH_BYTES:
            self._result.report(info.name, "nested too deep")
            return
        self._tar.addfile(info, content)
        self._result.files += is_counted


def _list_names(folder_fd: int) -> list[str]:
    """Return the names in an open folder, sorted, so that equal trees make equal tar files."""
    with os.scandir(folder_fd) as entries:
        return sorted(entry.name for entry in entries)


def _info(path: str, status: os.stat_result, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    """Return the tar header of an entry, without the size. `link` is the target of a symbolic link."""
    info = tarfile.TarInfo(path)
    info.type, info.linkname, info.mode = kind, link, stat.S_IMODE(status.st_mode)
    info.mtime, info.uid, info.gid = status.st_mtime, status.st_uid, status.st_gid
    return info


def _segments(file_fd: int, status: os.stat_result) -> Iterator[tuple[int, int]]:
    """Yield the offset and length of each segment of a sparse file that has data."""
    position = 0
    while position < status.st_size:
        try:
            start = os.lseek(file_fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        position = min(os.lseek(file_fd, start, os.SEEK_HOLE), status.st_size)
        yield start, position - start


def _sparse_member(
    info: tarfile.TarInfo, size: int, segments: list[tuple[int, int]], reader: _SegmentReader
) -> tuple[tarfile.TarInfo, _ChainedReader]:
    """Return a sparse file's tar member, and a reader of its content, in GNU's sparse format 1.0.

    In this format a map comes before the data: the number of segments, then offset and length of each segment, one
    number per line. Zeros fill the last tar block of the map.
    """
    entries = [*segments, (size, 0)]  # the empty last segment gives the file's size
    numbers = [len(entries), *(number for entry in entries for number in entry)]
    segment_map = "".join(f"{number}\n" for number in numbers).encode()
    segment_map += b"\0" * (-len(segment_map) % tarfile.BLOCKSIZE)
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": info.name,
        "GNU.sparse.realsize": str(size),
    }
    info.size = len(segment_map) + sum(length for _, length in segments)
    return info, _ChainedReader(BytesIO(segment_map), reader)


class _SegmentReader:
    """Reads segments (offset, length) of a file.

    If the file has become shorter meanwhile, it reads zeros instead and sets `was_short`, because the tar header has
    already declared the length.
    """

    def __init__(self, file: IO[bytes], segments: list[tuple[int, int]]) -> None:
        self._file, self._segments = file, segments
        self._position = 0
        self.was_short = False

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes of the current segment; none at the end of the last."""
        while self._segments and self._position == self._segments[0][1]:
            self._segments.pop(0)
            self._position = 0
        if not self._segments:
            return b""
        offset, length = self._segments[0]
        count = min(size, length - self._position)
        data = os.pread(self._file.fileno(), count, offset + self._position)
        if not data:
            self.was_short = True
            data = bytes(count)
        self._position += len(data)
        return data


class _ChainedReader:
    """Reads several readers one after the other. Reads return all bytes asked for, because tarfile stops at fewer."""

    def __init__(self, *readers: Any) -> None:
        self._readers = list(readers)

    def read(self, size: int) -> bytes:
        """Return exactly `size` bytes, or fewer at the end."""
        data = b""
        while self._readers and len(data) < size:
            part = self._readers[0].read(size - len(data))
            if not part:
                self._readers.pop(0)
            data += part
        return data


class _HashingFile:
    """A file for writing that computes the SHA-256 of its contents."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.written = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        """Write and hash `data`."""
        self._digest.update(data)
        self.written += len(data)
        return self._file.write(data)

    def hexdigest(self) -> str:
        """Return the SHA-256 of what was written, in hexadecimal."""
        return self._digest.hexdigest()

"""Folders into tar files and back. Hides holes, files that change while they are read, and trees made to break this.

The one rule: nothing a customer puts into a workspace stops a backup or leads it out of the folder. Every folder is
entered by descriptor, links are kept and never followed, what cannot be kept is named. The tar files are plain POSIX
ones (pax, holes as GNU tar writes them), so `tar` reads them without us.
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

DEEPEST = 128
"""Folders nested deeper are left out, as they are when space is measured."""
LONGEST_PATH = 3800
"""Bytes. The kernel takes 4095, and the restored tree lies a little deeper for a while."""
PASSES = 3
"""How often a file that changes while it is read is read in all."""
CHUNK = 1 << 20
NAMED = 1000
"""How many of the files left out are listed by name; all are counted."""


class BrokenTree(Exception):
    """A tar file holds what `pack` never writes."""


@dataclass
class Packed:
    """What went into a tar file."""

    files: int = 0
    folders: int = 0
    sha256: str = ""
    bytes: int = 0
    missing: int = 0
    left_out: list[str] = field(default_factory=list)
    """`path: why`, the first NAMED of them."""

    def leave_out(self, path: str, why: str) -> None:
        """Note what is not in it."""
        self.missing += 1
        if len(self.left_out) < NAMED:
            self.left_out.append(f"{path}: {why}")


def pack(root: Path, target: Path) -> Packed:
    """Write all below `root`, but for hidden entries at its top, to the new file `target`. A missing root is empty."""
    packed = Packed()
    with target.open("xb") as file:
        hashing = _Hashing(file)
        with tarfile.open(mode="w|", fileobj=hashing, format=tarfile.PAX_FORMAT, bufsize=CHUNK) as tar:  # type: ignore[call-overload]  # write() is all it needs
            _Packing(tar, packed).all(root)
        file.flush()
        os.fsync(file.fileno())
    packed.sha256, packed.bytes = hashing.hexdigest(), hashing.written
    return packed


def unpack(archive: Path, into: Path) -> int:
    """Bring a tar file's tree back below the empty folder `into`; how many files. Raises BrokenTree, OSError."""
    links: set[str] = set()
    folders: list[tuple[Path, tarfile.TarInfo]] = []
    files: set[str] = set()
    with tarfile.open(archive, "r:", errors="surrogateescape") as tar:
        for member in tar:
            path = into / _safe_name(member.name, links)
            if member.isdir():
                path.mkdir(mode=0o700, exist_ok=True)
                folders.append((path, member))
                continue
            if path.is_symlink() or path.exists():
                path.unlink()  # it changed while it was read, and was read again
            if member.issym():
                path.symlink_to(member.linkname)
                links.add(member.name)
            elif member.isreg():
                tar.makefile(member, str(path))
                links.discard(member.name)
            else:
                raise BrokenTree(f"{archive.name} holds something that is no file: {member.name}")
            files.add(member.name)
            _dress(path, member)
    for path, member in reversed(folders):
        _dress(path, member)
    return len(files)


def _safe_name(name: str, links: set[str]) -> str:
    parts = name.split("/")
    through = {"/".join(parts[:end]) for end in range(1, len(parts))}
    if name.startswith("/") or {"", ".", ".."} & set(parts) or through & links:
        raise BrokenTree(f"A name in the archive leads out of its folder: {name}")
    return name


def _dress(path: Path, member: tarfile.TarInfo) -> None:
    """Owner, mode and time, in this order: the one before can change the one after."""
    if os.geteuid() == 0:
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        path.chmod(stat.S_IMODE(member.mode))
    os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)


class _Packing:
    """One walk through a tree."""

    def __init__(self, tar: tarfile.TarFile, packed: Packed) -> None:
        self._tar, self._packed = tar, packed
        self._again: list[str] = []

    def all(self, root: Path) -> None:
        """The tree, then what changed meanwhile."""
        try:
            top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return
        try:
            for name in _names(top):
                if not name.startswith("."):
                    self._entry(top, name, name, 1)
            for attempt in range(2, PASSES + 1):
                changed, self._again = self._again, []
                for path in changed:
                    self._once_more(top, path, last=attempt == PASSES)
        finally:
            os.close(top)

    def _entry(self, parent: int, name: str, path: str, depth: int) -> None:
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                self._folder(parent, name, path, depth, status)
            elif stat.S_ISLNK(status.st_mode):
                self._add(_info(path, status, tarfile.SYMTYPE, os.readlink(name, dir_fd=parent)))
            elif stat.S_ISREG(status.st_mode):
                if not self._file(parent, name, path):
                    self._again.append(path)
            else:
                self._packed.leave_out(path, "no file, folder or link")
                return
        except FileNotFoundError:
            return  # deleted since the folder was listed
        except PermissionError:
            self._packed.leave_out(path, "may not be read")

    def _folder(self, parent: int, name: str, path: str, depth: int, status: os.stat_result) -> None:
        if depth > DEEPEST or len(os.fsencode(path)) > LONGEST_PATH:
            self._packed.leave_out(path, "nested too deep")
            return
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            self._tar.addfile(_info(path, status, tarfile.DIRTYPE))
            self._packed.folders += 1
            for inner in _names(folder):
                self._entry(folder, inner, f"{path}/{inner}", depth + 1)
        finally:
            os.close(folder)

    def _once_more(self, top: int, path: str, *, last: bool) -> None:
        """Read a file anew, by its path from the top, link by link; the later copy in the archive counts."""
        handle = os.dup(top)
        try:
            *folders, name = path.split("/")
            for part in folders:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
                os.close(handle)
                handle = inner
            if self._file(handle, name, path, again=True):
                return
        except OSError:
            return  # it is gone, or another thing by now: the copy from before stays
        finally:
            os.close(handle)
        if last:
            self._packed.leave_out(path, "never held still; the copy may mix old and new")
        else:
            self._again.append(path)

    def _file(self, parent: int, name: str, path: str, *, again: bool = False) -> bool:
        """Add a file's bytes. False: it changed meanwhile."""
        try:
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise FileNotFoundError(path) from error  # it became a link a moment ago
        with os.fdopen(handle, "rb", buffering=0) as file:
            before = os.fstat(handle)
            if not stat.S_ISREG(before.st_mode):
                raise FileNotFoundError(path)
            pieces = list(_pieces(handle, before)) if before.st_blocks * 512 < before.st_size else None
            info = _info(path, before)
            reader = _Exactly(file, pieces if pieces is not None else [(0, before.st_size)])
            if pieces is None:
                info.size = before.st_size
                self._add(info, _Whole(reader), counted=not again)
            else:
                self._add(*_with_holes(info, before.st_size, pieces, reader), counted=not again)
            after = os.fstat(handle)
        same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        return same and not reader.was_short

    def _add(self, info: tarfile.TarInfo, content: Any = None, *, counted: bool = True) -> None:
        if len(os.fsencode(info.name)) > LONGEST_PATH:
            self._packed.leave_out(info.name, "nested too deep")
            return
        self._tar.addfile(info, content)
        self._packed.files += counted


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


def _info(path: str, status: os.stat_result, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type, info.linkname, info.mode = kind, link, stat.S_IMODE(status.st_mode)
    info.mtime, info.uid, info.gid = status.st_mtime, status.st_uid, status.st_gid
    return info


def _pieces(handle: int, status: os.stat_result) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is not a hole."""
    position = 0
    while position < status.st_size:
        try:
            begin = os.lseek(handle, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        position = min(os.lseek(handle, begin, os.SEEK_HOLE), status.st_size)
        yield begin, position - begin


def _with_holes(
    info: tarfile.TarInfo, size: int, pieces: list[tuple[int, int]], reader: _Exactly
) -> tuple[tarfile.TarInfo, _Whole]:
    """GNU's sparse format 1.0: the map stands before the data."""
    listed = [*pieces, (size, 0)]
    numbers = [len(listed), *(number for piece in listed for number in piece)]
    table = "".join(f"{number}\n" for number in numbers).encode()
    table += b"\0" * (-len(table) % tarfile.BLOCKSIZE)
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": info.name,
        "GNU.sparse.realsize": str(size),
    }
    info.size = len(table) + sum(length for _, length in pieces)
    return info, _Whole(BytesIO(table), reader)


class _Exactly:
    """A file's pieces, as many bytes as were promised: zeros where it got shorter meanwhile."""

    def __init__(self, file: IO[bytes], pieces: list[tuple[int, int]]) -> None:
        self._file, self._pieces = file, pieces
        self._done = 0
        self.was_short = False

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, of one piece after another."""
        while self._pieces and self._done == self._pieces[0][1]:
            self._pieces.pop(0)
            self._done = 0
        if not self._pieces:
            return b""
        offset, length = self._pieces[0]
        wanted = min(size, length - self._done)
        data = os.pread(self._file.fileno(), wanted, offset + self._done)
        if not data:
            self.was_short = True
            data = bytes(wanted)
        self._done += len(data)
        return data


class _Whole:
    """One reader after another, in full blocks: tarfile takes a short answer for the end."""

    def __init__(self, *readers: Any) -> None:
        self._readers = list(readers)

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes until all are read."""
        data = b""
        while self._readers and len(data) < size:
            part = self._readers[0].read(size - len(data))
            if not part:
                self._readers.pop(0)
            data += part
        return data


class _Hashing:
    """A file for writing that knows what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.written = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        """Write, and count."""
        self._digest.update(data)
        self.written += len(data)
        return self._file.write(data)

    def hexdigest(self) -> str:
        """SHA-256 of all that was written."""
        return self._digest.hexdigest()

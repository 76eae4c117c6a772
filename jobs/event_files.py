"""Read scalars (the points of curves) from a run's event files for TensorBoard, from where the last read ended.

An event file is a sequence of records. A record is a little-endian length, the length's checksum, a protobuf message
and the message's checksum (TensorFlow's TFRecord format). The customer's code writes the files. So an impossible length
ends the reading of a file, and links are never followed. Checksums are not compared, because a damaged record changes
only the curves of its own run.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from storage.errors import StorageError
from storage.paths import open_folder

HEADER = struct.Struct("<QI")
"""The beginning of a record: the length of the message, and the checksum of the length."""
FOOTER_BYTES = 4
"""The end of a record: the checksum of the message."""
MAX_RECORD_BYTES = 1024 * 1024
"""Larger messages hold images or graphs, not scalars, and are skipped."""
# These limits are far above any real log folder. They ensure that the reading of one run delays others little.
MAX_FILES = 64
"""Event files that are read."""
MAX_FOLDERS = 256
"""Folders that are visited."""
MAX_ENTRIES = 10_000
"""Entries of folders that are visited."""
MAX_DEPTH = 8
"""Levels of folders that are visited."""
DT_FLOAT, DT_DOUBLE = 1, 2
"""TensorFlow's codes of data types (`DataType`)."""


@dataclass(frozen=True)
class Scalar:
    """One point of a curve. Event files call the curve's name its tag. `folder` is relative to the log folder.

    `wall_time` is in Unix seconds.
    """

    folder: str
    tag: str
    step: int
    value: float
    wall_time: float


def read_scalars(root: Path, top: Sequence[str], cursor: dict[str, int], limit: int) -> Iterator[Scalar]:
    """Yield new scalars from about `limit` bytes of the event files in a log folder, and advance `cursor`.

    The log folder is at the path `top` (its components) below `root`. The run's code cannot replace `root` by a link.

    The cursor has the offset of the next record for each file. Its keys are hashes of the files' paths, because paths
    may be of any length and contain characters that PostgreSQL cannot store.
    """
    for name, file in _event_files(root, top):
        if limit <= 0:
            return
        key = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        if key not in cursor and len(cursor) >= MAX_FILES:
            continue  # the cursor is stored with the attempt and must stay small
        start = offset = cursor.get(key, 0)
        size = os.fstat(file.fileno()).st_size
        while offset < start + limit:
            file.seek(offset)
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                break
            length, _checksum = HEADER.unpack(header)
            next_offset = offset + HEADER.size + length + FOOTER_BYTES
            if next_offset > size:  # not written completely yet, or an impossible length
                break
            if length <= MAX_RECORD_BYTES:
                yield from _scalars(file.read(length), folder=name.rpartition("/")[0])
            offset = next_offset
        limit -= min(limit, offset - start)
        if offset:  # a file without a complete record needs no entry
            cursor[key] = offset


def _event_files(root: Path, top: Sequence[str]) -> Iterator[tuple[str, BinaryIO]]:
    """Yield each event file's path, relative to the log folder, and the open file, which is closed before the next.

    Each folder and file is opened relative to its parent's descriptor. So no link is followed, even if it replaces a
    folder meanwhile. Only the first MAX_ENTRIES entries of folders are visited.
    """
    file_count = 0
    for folder_count, (path, descriptor, names) in enumerate(_folders(root, top), 1):
        for name in names:
            if file_count >= MAX_FILES:
                return
            if file := open_regular(name, folder=descriptor):
                with file:
                    file_count += 1
                    yield str(Path(path, name)), file
        if folder_count >= MAX_FOLDERS:
            return


def _folders(root: Path, top: Sequence[str]) -> Iterator[tuple[str, int, list[str]]]:
    """Yield folders from the top down, each as its relative path, descriptor and names of event files."""
    entries_left = MAX_ENTRIES
    pending: list[tuple[str, ...]] = [()]
    while pending and entries_left > 0:
        parts = pending.pop()
        with (
            # The folder is missing, is no folder, or was deleted meanwhile.
            contextlib.suppress(OSError, StorageError),
            open_folder(root=root, parts=(*top, *parts)) as descriptor,
        ):
            names: list[str] = []
            folders: list[str] = []
            with os.scandir(descriptor) as entries:
                for entry in itertools.islice(entries, entries_left):
                    entries_left -= 1
                    if "tfevents" in entry.name:
                        names.append(entry.name)
                    elif len(parts) < MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
            # Reversed, because the last pending folder is visited first.
            pending += [(*parts, name) for name in sorted(folders, reverse=True)]
            yield "/".join(parts), descriptor, sorted(names)[:MAX_FILES]


def open_regular(name: str, *, folder: int) -> BinaryIO | None:
    """Open a regular file by its name in an open folder; None if it is missing, a link or a pipe.

    There is no version for paths, because the run's code can replace each folder of a path by a link to a folder of
    another run. `storage.paths.open_folder` opens the folder.
    """
    # With O_NONBLOCK, because opening a pipe would otherwise wait for a process that writes to it.
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


def _scalars(record: bytes, folder: str) -> Iterator[Scalar]:
    """Yield the scalars of a record; nothing if it is damaged."""
    try:
        event = Event.FromString(record)
    except DecodeError:
        return
    for value in event.summary.value:
        number: float | None = None
        if value.HasField("simple_value"):
            number = value.simple_value
        elif value.HasField("tensor") and not value.tensor.tensor_shape.dim:
            number = _tensor_scalar(value.tensor.dtype, value.tensor.tensor_content, value.tensor.float_val)
        if number is not None:
            yield Scalar(folder, value.tag, event.step, float(number), event.wall_time)


def _tensor_scalar(dtype: int, content: bytes, floats: list[float]) -> float | None:
    """Return the value of a tensor without dimensions; None if it is no floating-point number.

    TensorFlow 2 writes scalars as such tensors, with the value either in `floats` or as raw bytes in `content`.
    """
    if floats:
        return floats[0]
    layout = {DT_FLOAT: "<f", DT_DOUBLE: "<d"}.get(dtype)
    if layout is None or len(content) != struct.calcsize(layout):
        return None
    return float(struct.unpack(layout, content)[0])

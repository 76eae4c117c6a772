"""Scalars out of TensorBoard event files, from where the last look ended.

Hides the record framing (a little-endian length, its checksum, the message, its checksum) and the two ways a scalar is
written. The files are a customer's: a length that is no length ends the reading of its file, and no link is followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

HEADER = struct.Struct("<QI")
FOOTER_BYTES = 4
LONGEST_RECORD = 1024 * 1024
"""Larger records hold images or graphs, no scalars: they are passed over."""
MOST_FILES = 64
MOST_FOLDERS = 256
MOST_ENTRIES = 10_000
DEEPEST = 8
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DT_FLOAT, DT_DOUBLE = 1, 2


@dataclass(frozen=True)
class Scalar:
    """One point of one tag. `wall_time` in Unix seconds."""

    tag: str
    step: int
    value: float
    wall_time: float


def read_scalars(folder: Path, cursor: dict[str, int], limit: int) -> Iterator[Scalar]:
    """New scalars of the event files under `folder`, from about `limit` bytes in all; `cursor` is moved on.

    Its keys are made from the files' names, which may be anything.
    """
    for name, file in _event_files(folder):
        if limit <= 0:
            return
        key = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        if key not in cursor and len(cursor) >= MOST_FILES:
            continue
        begun = offset = cursor.get(key, 0)
        size = os.fstat(file.fileno()).st_size
        while offset < begun + limit:
            file.seek(offset)
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                break
            length, _checksum = HEADER.unpack(header)
            following = offset + HEADER.size + length + FOOTER_BYTES
            if following > size:
                break
            if length <= LONGEST_RECORD:
                yield from _scalars(file.read(length))
            offset = following
        limit -= min(limit, offset - begun)
        if offset:
            cursor[key] = offset


def _event_files(folder: Path) -> Iterator[tuple[str, BinaryIO]]:
    """The first event files below, by name and open: each folder and file is opened from the one above it.

    So no link is followed, not even one that takes a folder's place while it is looked at. Of everything that is there,
    event files or not, the first MOST_ENTRIES are looked at: more would keep others waiting, at every look.
    """
    found = 0
    for visited, (place, descriptor, names) in enumerate(_folders(folder), 1):
        for name in names:
            if found >= MOST_FILES:
                return
            if file := open_regular(name, folder=descriptor):
                with file:
                    found += 1
                    yield str(Path(place, name)), file
        if visited >= MOST_FOLDERS:
            return


def _folders(top: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Folders from the top down: the place of each, open, and the names of its event files."""
    left = MOST_ENTRIES
    waiting: list[tuple[str, ...]] = [()]
    while waiting and left > 0:
        parts = waiting.pop()
        with contextlib.suppress(OSError), _opened(top, parts) as descriptor:  # not there, no folder, or gone meanwhile
            names: list[str] = []
            folders: list[str] = []
            with os.scandir(descriptor) as entries:
                for entry in itertools.islice(entries, left):
                    left -= 1
                    if "tfevents" in entry.name:
                        names.append(entry.name)
                    elif len(parts) < DEEPEST and entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
            waiting += [(*parts, name) for name in sorted(folders, reverse=True)]
            yield "/".join(parts), descriptor, sorted(names)[:MOST_FILES]


@contextlib.contextmanager
def _opened(top: Path, parts: Iterable[str]) -> Iterator[int]:
    descriptor = os.open(top, _FOLDER)
    try:
        for part in parts:
            below = os.open(part, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(name: str | Path, *, folder: int | None = None) -> BinaryIO | None:
    """A regular file, by its name in an open folder or by its path; None for a link, a pipe, or anything else."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


def _scalars(record: bytes) -> Iterator[Scalar]:
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
            yield Scalar(value.tag, event.step, float(number), event.wall_time)


def _tensor_scalar(dtype: int, content: bytes, floats: list[float]) -> float | None:
    """TensorFlow 2 writes a scalar as a tensor without dimensions: by value, or as its raw bytes."""
    if floats:
        return floats[0]
    layout = {DT_FLOAT: "<f", DT_DOUBLE: "<d"}.get(dtype)
    if layout is None or len(content) != struct.calcsize(layout):
        return None
    return float(struct.unpack(layout, content)[0])

"""Scalars out of TensorBoard event files, from where the last look ended.

Hides the record framing (a little-endian length, its checksum, the message, its checksum) and the two ways a scalar is
written. The files are a customer's: a length that is no length ends the reading of its file, and no link is followed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

HEADER = struct.Struct("<QI")
FOOTER_BYTES = 4
LONGEST_RECORD = 1024 * 1024
"""Larger records hold images or graphs, no scalars: they are passed over."""
MOST_FILES = 64
DT_FLOAT, DT_DOUBLE = 1, 2


@dataclass(frozen=True)
class Scalar:
    """One point of one tag. `wall_time` in Unix seconds."""

    tag: str
    step: int
    value: float
    wall_time: float


def read_scalars(folder: Path, cursor: dict[str, int], limit: int) -> Iterator[Scalar]:
    """New scalars of every event file under `folder`, at most about `limit` bytes of each; `cursor` is moved on."""
    for path in _event_files(folder):
        name = str(path.relative_to(folder))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        with os.fdopen(descriptor, "rb") as file:
            offset = cursor.get(name, 0)
            end = offset + limit
            size = os.fstat(descriptor).st_size
            while offset < end:
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
            if offset:
                cursor[name] = offset


def _event_files(folder: Path) -> list[Path]:
    """The first event files below, without following links."""
    found: list[Path] = []
    for root, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        found += [Path(root, name) for name in sorted(names) if "tfevents" in name]
        if len(found) >= MOST_FILES:
            break
    return found[:MOST_FILES]


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

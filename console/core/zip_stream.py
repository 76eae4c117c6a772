"""A ZIP archive that is made while it is sent, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from django.utils import timezone

CHUNK_BYTES = 64 * 1024
"""Size from which bytes are handed on."""


class _Buffer:
    """What `ZipFile` wrote and nobody took yet. It cannot seek, so sizes follow each file."""

    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, data: bytes) -> int:
        self.written += data
        return len(data)

    def flush(self) -> None:
        pass

    def take(self) -> bytes:
        data = bytes(self.written)
        self.written.clear()
        return data


def zip_stream(files: Iterable[tuple[str, Iterable[str]]]) -> Iterator[bytes]:
    """Yield the archive of `files`: names, each with its text in parts. Texts are UTF-8."""
    buffer = _Buffer()
    now = timezone.now()
    made_at = (now.year, now.month, now.day, now.hour, now.minute, now.second)
    with ZipFile(buffer, "w") as archive:  # type: ignore[call-overload]  # a stream that cannot seek is documented
        for name, parts in files:
            entry = ZipInfo(name, made_at)
            entry.compress_type = ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as file:
                for part in parts:
                    file.write(part.encode("utf-8", "replace"))
                    if len(buffer.written) >= CHUNK_BYTES:
                        yield buffer.take()
    yield buffer.take()

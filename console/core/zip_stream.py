"""Write a ZIP archive while it is sent, so that it needs neither a temporary file nor much memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from django.utils import timezone

CHUNK_BYTES = 64 * 1024
"""How many bytes are collected before they are yielded, because sending many small chunks would cost CPU time."""


class _Buffer:
    """The file object that ZipFile writes to.

    It has no `seek`. Therefore ZipFile cannot return to a file's header, and writes the file's size after its data.
    """

    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, data: bytes) -> int:
        """Add bytes to the buffer; return how many."""
        self.written += data
        return len(data)

    def flush(self) -> None:
        """Do nothing: ZipFile requires the method."""

    def drain(self) -> bytes:
        """Return what was written since the last call."""
        data = bytes(self.written)
        self.written.clear()
        return data


def zip_stream(files: Iterable[tuple[str, Iterable[str]]]) -> Iterator[bytes]:
    """Yield the bytes of an archive of text files. Each of `files` is a path and the file's text in parts."""
    buffer = _Buffer()
    now = timezone.now()
    date_time = (now.year, now.month, now.day, now.hour, now.minute, now.second)
    with ZipFile(buffer, "w") as archive:  # type: ignore[call-overload]  # a stream that cannot seek is documented
        for name, parts in files:
            entry = ZipInfo(name, date_time)
            entry.compress_type = ZIP_DEFLATED
            # The size of the text is not known yet; only the ZIP64 format allows more than 4 GiB.
            with archive.open(entry, "w", force_zip64=True) as file:
                for part in parts:
                    file.write(part.encode("utf-8", "replace"))
                    if len(buffer.written) >= CHUNK_BYTES:
                        yield buffer.drain()
    yield buffer.drain()

"""Resumable uploads by the tus protocol: after an interruption they continue with the bytes that the console lacks."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from .client import Client
from .errors import ApiError, CliError, InvalidChoice, Unreachable
from .folders import LocalFile, Scan
from .ignore import Ignore
from .schemas import Upload

BLOCK_BYTES = 1024**2
REQUEST_BYTES = 64 * 1024**2
"""Maximum bytes of one request, because proxies limit its size and its time."""
TRIES = 8
"""Maximum tries in a row without progress. The pauses between them add up to about a minute."""
MAX_PAUSE_SECONDS = 15.0
POLL_SECONDS = 1.0
"""Pause between two requests for the state of a complete upload while the console publishes it."""
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
ENDED = frozenset({"complete", "failed"})
"""States of an upload after which nothing happens any more."""
RETRIED_STATUSES = frozenset({409, 460, 429, 502, 503, 504})
"""Statuses after which sending continues at the console's offset: 409 (another offset), 460 (damaged in transit), and
those of a busy console."""


class Content(Protocol):
    """Bytes that can be read from any offset, the same each time."""

    @property
    def size(self) -> int:
        """Number of bytes."""

    @property
    def fingerprint(self) -> str:
        """A text that changes when the bytes change."""

    def read(self, offset: int) -> Iterator[bytes]:
        """Yield the bytes from `offset` on. Raises CliError if they have changed meanwhile."""


class FileContent:
    """The bytes of a file."""

    def __init__(self, file: Path) -> None:
        status = file.stat()
        self._file = file
        self.size = status.st_size
        self.fingerprint = f"{file.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"

    def read(self, offset: int) -> Iterator[bytes]:
        """Yield the bytes from `offset` on."""
        yield from _read_exactly(self._file, offset, self.size)


class TarContent:
    """The files of a folder as a tar archive that is made while it is sent, so that it needs no disk space.

    Names, sizes, times and contents determine its bytes. So it is the same each time, and can be sent from any offset.
    """

    def __init__(self, scan: Scan) -> None:
        if not scan.files:
            raise InvalidChoice("There is no file to send.")
        self._parts = [(_header(each), each) for each in scan.files]
        self.size = sum(len(header) + _padded(each.size) for header, each in self._parts) + 2 * tarfile.BLOCKSIZE
        digest = hashlib.sha256()
        for header, each in self._parts:
            digest.update(header + str(each.modified_ns).encode())
        self.fingerprint = digest.hexdigest()

    def read(self, offset: int) -> Iterator[bytes]:
        """Yield the bytes from `offset` on."""
        begin = 0  # of the header of a file, in the archive
        for header, each in self._parts:
            data_begin, end = begin + len(header), begin + len(header) + _padded(each.size)
            if offset < data_begin:
                yield header[max(0, offset - begin) :]
            if offset < end:
                start = max(0, offset - data_begin)
                if start < each.size:
                    yield from _read_exactly(each.file, start, each.size)
                yield b"\0" * (_padded(each.size) - max(start, each.size))
            begin = end
        yield b"\0" * (self.size - max(begin, offset))  # two empty blocks end an archive


def _header(file: LocalFile) -> bytes:
    info = tarfile.TarInfo(file.path)
    info.size, info.mtime, info.mode = file.size, file.modified_ns // 10**9, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def _padded(size: int) -> int:
    """Return a size rounded up to whole blocks of tar."""
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _read_exactly(file: Path, offset: int, size: int) -> Iterator[bytes]:
    """Yield the bytes from `offset` to `size`. Raises CliError if the size of the file has changed."""
    with file.open("rb") as opened:
        if os.fstat(opened.fileno()).st_size != size:
            raise CliError(f"{file} changed while it was sent. Send it again.")
        opened.seek(offset)
        while offset < size:
            block = opened.read(min(BLOCK_BYTES, size - offset))
            if not block:
                raise CliError(f"{file} changed while it was sent. Send it again.")
            offset += len(block)
            yield block


class Uploads:
    """Sends content. Stores the keys of incomplete uploads in the file `state`, so that a later call continues them."""

    def __init__(self, client: Client, state: Path, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._state = state
        self._pause = pause

    def send(
        self, content: Content, metadata: Mapping[str, str], *, on_sent: Callable[[int], None] = lambda _size: None
    ) -> Upload:
        """Send `content` and wait until the console has stored or published it. Raises CliError.

        `on_sent` gets the number of bytes sent, first of those that the console already had. After an interruption it
        also gets a negative number for lost bytes.
        """
        # The name of the upload in the file `state`: the same content for the same purpose continues it.
        name = hashlib.sha256(
            json.dumps([self._client.url, content.fingerprint, sorted(metadata.items())]).encode()
        ).hexdigest()
        key, offset = self._open(name, content.size, metadata)
        reported = tries = 0

        def report(position: int) -> None:
            nonlocal reported
            on_sent(position - reported)
            reported = position

        report(offset)
        while offset < content.size:
            try:
                new_offset = self._append(key, content, offset, report)
            except (Unreachable, ApiError) as error:
                if isinstance(error, ApiError) and error.status not in RETRIED_STATUSES:
                    raise
                tries += 1
                if tries == TRIES:
                    raise
                self._pause(min(2.0 ** (tries - 1), MAX_PAUSE_SECONDS))
                new_offset = self._client.upload_offset(key)
            if new_offset > offset:
                tries = 0
            offset = new_offset
            report(offset)
        upload = self._wait_until_ended(key)
        self._remove_key(name)
        if upload.error:
            raise CliError(str(upload.error.get("message") or "The console could not use the upload."))
        return upload

    def _append(self, key: str, content: Content, offset: int, report: Callable[[int], None]) -> int:
        """Send the next part of the content, and call `report` with each position. Return the console's new offset."""
        size = min(REQUEST_BYTES, content.size - offset)

        def body() -> Iterator[bytes]:
            left = size
            for block in content.read(offset):
                part = block[:left]
                if part:
                    yield part
                    left -= len(part)
                    report(offset + size - left)
                if not left:
                    return

        return self._client.append_upload(key, offset=offset, content=body(), size=size)

    def _wait_until_ended(self, key: str) -> Upload:
        while True:
            upload = self._client.upload(key)
            if upload.state in ENDED:
                return upload
            self._pause(POLL_SECONDS)

    def _open(self, name: str, size: int, metadata: Mapping[str, str]) -> tuple[str, int]:
        """Return the key and offset of an upload to continue, or of a new one."""
        if key := self._stored_keys().get(name):
            try:
                return key, self._client.upload_offset(key)
            except ApiError as error:
                if error.status not in {404, 410}:  # deleted, expired or failed: begin again
                    raise
        key = self._client.create_upload(size_bytes=size, metadata=metadata)
        self._store_keys(self._stored_keys() | {name: key})
        return key, 0

    def _remove_key(self, name: str) -> None:
        self._store_keys({each: key for each, key in self._stored_keys().items() if each != name})

    def _stored_keys(self) -> dict[str, str]:
        # Without a readable file, uploads begin again.
        with suppress(OSError, ValueError, AttributeError):
            content = json.loads(self._state.read_text(encoding="utf-8"))
            return {str(name): str(key) for name, key in content.items()}
        return {}

    def _store_keys(self, keys: Mapping[str, str]) -> None:
        self._state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._state.with_name(f".{self._state.name}.{os.getpid()}")
        new.write_text(json.dumps(dict(keys)), encoding="utf-8")
        new.replace(self._state)


def content_of(path: Path, scan_folder: Callable[[Path], Scan]) -> Content:
    """Return the content to send for a path: an archive unchanged, others as a tar archive. Raises InvalidChoice."""
    if path.is_dir():
        return TarContent(scan_folder(path))
    if not path.is_file():
        raise InvalidChoice(f"{path} does not exist, or is not a file or folder.")
    if path.name.lower().endswith(ARCHIVES):
        return FileContent(path)
    status = path.stat()
    file = LocalFile(path.name, path, status.st_size, status.st_mtime_ns)
    return TarContent(Scan((file,), (), Ignore(())))

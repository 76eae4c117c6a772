"""Resumable uploads by the tus protocol.

After an interruption, an upload continues with the bytes that the console lacks, also in a later run of the program.
"""

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
"""Bytes that are read from a file at once: few enough to show progress, enough to be fast."""
REQUEST_BYTES = 64 * 1024**2
"""Largest number of bytes in one request. Proxies limit the size and time of a request; 64 MiB is below the limit of
100 MB that is common at hosted proxies."""
TRIES = 8
"""Maximum tries in a row without progress. The pauses between them add up to about a minute, which a restart of the
console may take."""
MAX_PAUSE_SECONDS = 15.0
"""Longest pause between two tries, so that the upload continues soon after the console is back."""
POLL_SECONDS = 1.0
"""Pause between two requests for the state of an upload whose bytes are all sent, while the console publishes it."""
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
"""Endings of the names of files that the console unpacks. Such files are sent unchanged."""
FINAL_STATES = frozenset({"complete", "failed"})
"""States of an upload that never change again."""
RETRIED_STATUSES = frozenset({409, 460, 429, 502, 503, 504})
"""Statuses after which sending continues at the console's offset. In the tus protocol, 409 means that the console has
another offset, and 460 that the bytes were damaged on the way. The others come from a busy console or proxy."""


class Content(Protocol):
    """Bytes to send. They can be read from any offset, and are the same each time."""

    @property
    def size(self) -> int:
        """Number of bytes."""

    @property
    def fingerprint(self) -> str:
        """The files' paths, sizes and times, or a hash of them. It identifies the content of an interrupted upload."""

    def read(self, offset: int) -> Iterator[bytes]:
        """Yield the bytes from `offset` on. Raises CliError if a file has changed meanwhile."""


class FileContent:
    """The bytes of a file."""

    def __init__(self, file: Path) -> None:
        status = file.stat()
        self._file = file
        self._modified_ns = status.st_mtime_ns
        self.size = status.st_size
        self.fingerprint = f"{file.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"

    def read(self, offset: int) -> Iterator[bytes]:
        """Yield the bytes from `offset` on."""
        yield from _read_exactly(self._file, offset, self.size, self._modified_ns)


class TarContent:
    """The files of a folder as a tar archive, which is made while it is sent and so needs no disk space.

    Its bytes depend only on the names, sizes, times and contents of the files. The archive is therefore the same each
    time, and can be sent from any offset.
    """

    def __init__(self, scan: Scan) -> None:
        if not scan.files:
            raise InvalidChoice("There is no file to send.")
        self._members = [(_tar_header(file), file) for file in scan.files]
        self.size = sum(len(header) + _pad_size(file.size) for header, file in self._members) + 2 * tarfile.BLOCKSIZE
        digest = hashlib.sha256()
        for header, file in self._members:
            digest.update(header + str(file.modified_ns).encode())
        self.fingerprint = digest.hexdigest()

    def read(self, offset: int) -> Iterator[bytes]:
        """Yield the bytes from `offset` on."""
        header_begin = 0  # a position in the archive, like `data_begin` and `member_end`
        for header, file in self._members:
            data_begin = header_begin + len(header)
            member_end = data_begin + _pad_size(file.size)
            if offset < data_begin:
                yield header[max(0, offset - header_begin) :]
            if offset < member_end:
                file_offset = max(0, offset - data_begin)
                if file_offset < file.size:
                    yield from _read_exactly(file.file, file_offset, file.size, file.modified_ns)
                yield b"\0" * (_pad_size(file.size) - max(file_offset, file.size))
            header_begin = member_end
        yield b"\0" * (self.size - max(header_begin, offset))  # two empty blocks end an archive


def _tar_header(file: LocalFile) -> bytes:
    """Return the tar header of a file, without what differs between machines, such as its owner."""
    info = tarfile.TarInfo(file.path)
    info.size, info.mtime, info.mode = file.size, file.modified_ns // 10**9, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def _pad_size(size: int) -> int:
    """Return a size rounded up to whole blocks of tar."""
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _read_exactly(file: Path, offset: int, size: int, modified_ns: int) -> Iterator[bytes]:
    """Yield the bytes from `offset` to `size`. Raises CliError if the size or the time of the file has changed."""
    with file.open("rb") as stream:
        status = os.fstat(stream.fileno())
        # The time too: a large file is read in several requests, which must not mix its old and new bytes.
        if (status.st_size, status.st_mtime_ns) != (size, modified_ns):
            raise CliError(f"{file} changed while it was sent. Send it again.")
        stream.seek(offset)
        while offset < size:
            block = stream.read(min(BLOCK_BYTES, size - offset))
            if not block:
                raise CliError(f"{file} changed while it was sent. Send it again.")
            offset += len(block)
            yield block


class Uploads:
    """Sends content. It stores the ids of incomplete uploads in `state_file`, so that a later call continues them.

    The file is a JSON object: the ids by a hash of console, content and metadata.
    """

    def __init__(self, client: Client, state_file: Path, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._state_file = state_file
        self._pause = pause

    def send(
        self, content: Content, metadata: Mapping[str, str], *, on_sent: Callable[[int], None] = lambda _size: None
    ) -> Upload:
        """Send `content`, wait until the console has stored or published it, and return the upload. Raises CliError.

        `metadata` tells the console what the content is for. `on_sent` gets numbers of bytes: first those that the
        console already has, then those of each sent block. After an interruption it gets a negative number: the lost
        bytes.
        """
        # The same content for the same purpose continues an incomplete upload.
        identity = json.dumps([self._client.url, content.fingerprint, sorted(metadata.items())])
        state_key = hashlib.sha256(identity.encode()).hexdigest()
        upload_id, offset = self._find_or_create(state_key, content.size, metadata)
        reported_position = tries = 0

        def report(position: int) -> None:
            nonlocal reported_position
            on_sent(position - reported_position)
            reported_position = position

        report(offset)
        is_offset_known = True  # False after an interruption: the console may have received a part of the request
        while offset < content.size:
            try:
                if is_offset_known:
                    new_offset = self._send_part(upload_id, content, offset, report)
                else:
                    new_offset = self._client.upload_offset(upload_id)
            except (Unreachable, ApiError) as error:
                if isinstance(error, ApiError) and error.status not in RETRIED_STATUSES:
                    raise
                tries += 1
                if tries == TRIES:
                    raise
                self._pause(min(2.0 ** (tries - 1), MAX_PAUSE_SECONDS))
                is_offset_known = False
                continue
            is_offset_known = True
            if new_offset > offset:
                tries = 0
            offset = new_offset
            report(offset)
        upload = self._wait_until_final(upload_id)
        self._remove_id(state_key)
        if upload.error:
            raise CliError(str(upload.error.get("message") or "The console could not use the upload."))
        return upload

    def _send_part(self, upload_id: str, content: Content, offset: int, report: Callable[[int], None]) -> int:
        """Send the next part of the content, and return the console's new offset.

        Calls `report` with the position in the content after each block.
        """
        size = min(REQUEST_BYTES, content.size - offset)

        def body() -> Iterator[bytes]:
            unsent_bytes = size
            for block in content.read(offset):
                part = block[:unsent_bytes]
                if part:
                    yield part
                    unsent_bytes -= len(part)
                    report(offset + size - unsent_bytes)
                if not unsent_bytes:
                    return

        return self._client.append_upload(upload_id, offset=offset, content=body(), size=size)

    def _wait_until_final(self, upload_id: str) -> Upload:
        """Wait until the console has published the upload or refused it, and return it."""
        while True:
            upload = self._client.upload(upload_id)
            if upload.state in FINAL_STATES:
                return upload
            self._pause(POLL_SECONDS)

    def _find_or_create(self, state_key: str, size: int, metadata: Mapping[str, str]) -> tuple[str, int]:
        """Return the id and offset of an upload to continue, or of a new one."""
        if upload_id := self._stored_ids().get(state_key):
            try:
                return upload_id, self._client.upload_offset(upload_id)
            except ApiError as error:
                if error.status not in {404, 410}:
                    raise
                # The upload was deleted, has expired or failed, so a new one begins.
        upload_id = self._client.create_upload(size_bytes=size, metadata=metadata)
        self._store_ids(self._stored_ids() | {state_key: upload_id})
        return upload_id, 0

    def _remove_id(self, state_key: str) -> None:
        """Forget the id of an upload that has ended."""
        self._store_ids({key: upload_id for key, upload_id in self._stored_ids().items() if key != state_key})

    def _stored_ids(self) -> dict[str, str]:
        """Return the ids of incomplete uploads by state key."""
        # If the file cannot be read, the worst is that uploads start from the beginning.
        with suppress(OSError, ValueError, AttributeError):
            content = json.loads(self._state_file.read_text(encoding="utf-8"))
            return {str(state_key): str(upload_id) for state_key, upload_id in content.items()}
        return {}

    def _store_ids(self, ids: Mapping[str, str]) -> None:
        """Replace the file of ids atomically, so that an interruption never leaves half a file."""
        self._state_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new_file = self._state_file.with_name(f".{self._state_file.name}.{os.getpid()}")
        new_file.write_text(json.dumps(dict(ids)), encoding="utf-8")
        new_file.replace(self._state_file)


def content_of(path: Path, scan_folder: Callable[[Path], Scan]) -> Content:
    """Return the content to send for a path. An archive is sent unchanged, a folder or other file in a tar archive.

    `scan_folder` finds the files of a folder. Raises InvalidChoice.
    """
    if path.is_dir():
        return TarContent(scan_folder(path))
    if not path.is_file():
        raise InvalidChoice(f"{path} does not exist, or is not a file or folder.")
    if path.name.lower().endswith(ARCHIVES):
        return FileContent(path)
    status = path.stat()
    file = LocalFile(path.name, path, status.st_size, status.st_mtime_ns)
    return TarContent(Scan(files=(file,), skipped=(), ignore=Ignore(())))

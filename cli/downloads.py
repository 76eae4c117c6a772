"""Download files of a job to a folder on this machine.

The names of the files come from the console, and a name such as `../.bashrc` must not be written outside of the folder.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import httpx

from .client import Client
from .errors import CliError, Unreachable, UnsafePath
from .schemas import JobEntry

MAX_DEPTH = 64
"""Folders nested deeper are refused: far deeper than real results, and a console could name folders without end."""
TRIES = 6
"""Maximum tries in a row that receive no byte. The pauses between them add up to three quarters of a minute, which a
restart of the console may take."""
MAX_PAUSE_SECONDS = 15.0
"""Longest pause between two tries, so that the download continues soon after the console is back."""
TIME_RESOLUTION_SECONDS = 2.0
"""Times of a file that differ by less count as equal: FAT, the coarsest file system, stores them in steps of 2 s."""
MAX_TIME_SECONDS = 2.0**32
"""Unix times from here on (the year 2106) are not set on files, because some file systems store 32 bits."""
FORBIDDEN = frozenset("\\:\0")
"""Characters that no name may have: separators of folders, drives and streams on Windows, and NUL on every system."""


def safe_parts(path: str) -> tuple[str, ...]:
    """Split a path from the console into its parts. Raises UnsafePath if it could leave the target folder."""
    parts = tuple(path.split("/"))
    for name in parts:
        is_plain = name not in {"", ".", ".."} and not FORBIDDEN & set(name) and name.isprintable()
        if not is_plain or name.rstrip(". ") != name:  # Windows removes dots and spaces at the end
            raise UnsafePath(f"The console named a file {path!r}, which is not a safe path. It was not written.")
    if len(parts) > MAX_DEPTH:
        raise UnsafePath(f"The console named a file with more than {MAX_DEPTH} folders. It was not written.")
    return parts


def target_of(folder: Path, path: str) -> Path:
    """Return the path below `folder` to which a path from the console is written, and create its folders.

    Raises UnsafePath, also if the file or a folder above it is a link.
    """
    *parents, name = safe_parts(path)
    folder.mkdir(parents=True, exist_ok=True)
    for parent in parents:
        folder = folder / parent
        try:
            folder.mkdir()
        except FileExistsError:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise UnsafePath(f"{folder} is not a folder. {path!r} was not written.") from None
    target = folder / name
    if os.path.lexists(target) and not stat.S_ISREG(target.lstat().st_mode):
        raise UnsafePath(f"{target} is not a file. {path!r} was not written.")
    return target


def job_files(client: Client, job_id: int, path: str) -> Iterator[JobEntry]:
    """Yield the files of a job at and below `path`, all files if it is empty. Raises UnsafePath."""
    if path:
        # Only the listing of the folder above tells whether `path` is a file.
        parent, _slash, _name = path.rpartition("/")
        for entry in client.job_files(job_id, parent):
            if entry.path == path and entry.kind == "file":
                yield entry
                return
    pending_folders = [path]
    while pending_folders:
        folder = pending_folders.pop()
        for entry in client.job_files(job_id, folder):
            safe_parts(entry.path)
            parent, _slash, _name = entry.path.rpartition("/")
            if parent != folder:
                raise UnsafePath(f"The console listed {entry.path!r} in the folder {folder!r}.")
            if entry.kind == "folder":
                pending_folders.append(entry.path)
            elif entry.kind == "file":
                yield entry


def is_same(target: Path, entry: JobEntry) -> bool:
    """Return whether the existing file `target` has the size and time of a job's file: it was downloaded before."""
    status, modified = target.stat(), _modified_seconds(entry)
    return (
        status.st_size == entry.size
        and modified is not None
        and abs(status.st_mtime - modified) < TIME_RESOLUTION_SECONDS
    )


def set_modified_time(target: Path, entry: JobEntry) -> None:
    """Give a downloaded file the time of the job's file, so that `is_same` recognizes it."""
    if (modified := _modified_seconds(entry)) is not None:
        os.utime(target, (modified, modified))


def _modified_seconds(entry: JobEntry) -> float | None:
    """Return the file's time in Unix seconds; None if it is missing or out of range."""
    try:
        modified = datetime.fromisoformat(entry.modified_at or "").timestamp()
    except (ValueError, OverflowError):
        return None
    return modified if 0 <= modified < MAX_TIME_SECONDS else None


def download_file(
    client: Client,
    job_id: int,
    entry: JobEntry,
    target: Path,
    *,
    on_received: Callable[[int], None] = lambda _size: None,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Download a file of a job, then replace `target` by it. Returns its size in bytes. Raises CliError.

    `on_received` gets the number of bytes of each block. After an interruption the download continues. If the file
    has changed, it begins again, and `on_received` gets the negative number of discarded bytes.
    """
    received, etag, tries = 0, "", 0
    with _replace_when_complete(target) as file:
        while True:
            try:
                with client.job_file(job_id, entry.path, offset=received, etag=etag) as response:
                    if received and response.status_code != httpx.codes.PARTIAL_CONTENT:
                        # The console sends the whole file again, because it has changed.
                        on_received(-received)
                        received = 0
                        file.seek(0)
                        file.truncate()
                    etag = response.headers.get("ETag", "")
                    for block in response.iter_bytes():
                        received += len(block)
                        tries = 0
                        # Checked before each write, since a faulty console could send bytes without end.
                        _require_size(target, is_expected=received <= entry.size)
                        file.write(block)
                        on_received(len(block))
                break
            except Unreachable:
                tries += 1
                if tries == TRIES:
                    raise
                pause(min(2.0**tries, MAX_PAUSE_SECONDS))
        _require_size(target, is_expected=received == entry.size)
    return received


def save(response: httpx.Response, target: Path, *, on_received: Callable[[int], None] = lambda _size: None) -> int:
    """Write the body of a response to a new file, then replace `target` by it. Returns its size in bytes.

    `on_received` gets the number of bytes of each block.
    """
    received = 0
    with _replace_when_complete(target) as file:
        for block in response.iter_bytes():
            file.write(block)
            received += len(block)
            on_received(len(block))
    return received


@contextmanager
def _replace_when_complete(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which replaces `target` when the block ends without an error."""
    new_path = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        # The flags make sure that no existing file is overwritten, and no link is followed. As for every new file, the
        # user's umask takes permissions away from 0o666.
        new_fd = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
        with os.fdopen(new_fd, "wb") as file:
            yield file
        new_path.replace(target)
    finally:
        new_path.unlink(missing_ok=True)


def _require_size(target: Path, *, is_expected: bool) -> None:
    """Raise CliError unless the size of the received bytes is as expected."""
    if not is_expected:
        raise CliError(f"{target.name} has another size than was announced. It may still be written: try again later.")

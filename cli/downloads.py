"""Download files of a job to a folder on this machine. Names come from the console and are not trusted."""

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
"""Folders nested deeper are refused, because a console could name them without end."""
TRIES = 6
"""Maximum tries in a row that receive no byte. The pauses between them add up to three quarters of a minute."""
MAX_PAUSE_SECONDS = 15.0
TIME_RESOLUTION_SECONDS = 2.0
"""Resolution of times on FAT, the coarsest file system."""
MAX_TIME_SECONDS = 2.0**32
"""Later times do not fit into all file systems."""
FORBIDDEN = frozenset("\\:\0")
"""Windows' separators of folders, drives and streams, and the byte that no name may have."""


def safe_parts(path: str) -> tuple[str, ...]:
    """Return the parts of a path from the console. Raises UnsafePath if it could leave the target folder."""
    parts = tuple(path.split("/"))
    for name in parts:
        is_plain = name not in {"", ".", ".."} and not FORBIDDEN & set(name) and name.isprintable()
        if not is_plain or name.rstrip(". ") != name:  # Windows removes dots and spaces at the end
            raise UnsafePath(f"The console named a file {path!r}, which is no safe path. It was not written.")
    if len(parts) > MAX_DEPTH:
        raise UnsafePath(f"The console named a file with more than {MAX_DEPTH} folders. It was not written.")
    return parts


def target_of(folder: Path, path: str) -> Path:
    """Return the path below `folder` to which a path from the console is written, and create its folders.

    Raises UnsafePath, also if the file or a folder above it is a link.
    """
    *parents, name = safe_parts(path)
    folder.mkdir(parents=True, exist_ok=True)
    for each in parents:
        folder = folder / each
        try:
            folder.mkdir()
        except FileExistsError:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise UnsafePath(f"{folder} is not a folder. {path!r} was not written.") from None
    target = folder / name
    if os.path.lexists(target) and not stat.S_ISREG(target.lstat().st_mode):
        raise UnsafePath(f"{target} is not a file. {path!r} was not written.")
    return target


def job_files(client: Client, job: int, path: str) -> Iterator[JobEntry]:
    """Yield the files at and below `path` (empty: all). Raises UnsafePath."""
    if path:
        parent, _slash, _name = path.rpartition("/")
        for entry in client.job_files(job, parent):
            if entry.path == path and entry.kind == "file":
                yield entry
                return
    pending = [path]  # `path` is a folder
    while pending:
        folder = pending.pop()
        for entry in client.job_files(job, folder):
            safe_parts(entry.path)
            is_below = entry.path.startswith(f"{folder}/") if folder else True
            if not is_below or entry.path.count("/") != (folder.count("/") + 1 if folder else 0):
                raise UnsafePath(f"The console listed {entry.path!r} in the folder {folder!r}.")
            if entry.kind == "folder":
                pending.append(entry.path)
            elif entry.kind == "file":
                yield entry


def is_same(target: Path, entry: JobEntry) -> bool:
    """Return whether a file on this machine has the size and time of a job's file, as after an earlier download."""
    status, modified = target.stat(), _timestamp(entry)
    return (
        status.st_size == entry.size
        and modified is not None
        and abs(status.st_mtime - modified) < TIME_RESOLUTION_SECONDS
    )


def set_modified_time(target: Path, entry: JobEntry) -> None:
    """Give a downloaded file the time of the job's file, so that `is_same` recognizes it."""
    if (modified := _timestamp(entry)) is not None:
        os.utime(target, (modified, modified))


def _timestamp(entry: JobEntry) -> float | None:
    """Return the file's time in Unix seconds; None if it is missing or out of range."""
    try:
        modified = datetime.fromisoformat(entry.modified_at or "").timestamp()
    except (ValueError, OverflowError):
        return None
    return modified if 0 <= modified < MAX_TIME_SECONDS else None


def download_file(
    client: Client,
    job: int,
    entry: JobEntry,
    target: Path,
    *,
    on_received: Callable[[int], None] = lambda _size: None,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Download a file of a job, then replace `target` by it; return its size in bytes. Raises CliError.

    After an interruption the download continues, or begins again if the file has changed: `on_received` then gets the
    negative number of discarded bytes.
    """
    received, etag, tries = 0, "", 0
    with _replacing(target) as file:
        while True:
            try:
                with client.job_file(job, entry.path, offset=received, etag=etag) as response:
                    if received and response.status_code != httpx.codes.PARTIAL_CONTENT:
                        on_received(-received)
                        received = file.seek(0)
                        file.truncate()
                    etag = response.headers.get("ETag", "")
                    for block in response.iter_bytes():
                        received, tries = received + len(block), 0
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
    """Write a complete answer to a new file, then replace `target` by it; return its size in bytes."""
    received = 0
    with _replacing(target) as file:
        for block in response.iter_bytes():
            file.write(block)
            received += len(block)
            on_received(len(block))
    return received


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `target` if no error is raised."""
    new = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
        with os.fdopen(handle, "wb") as file:
            yield file
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def _require_size(target: Path, *, is_expected: bool) -> None:
    if not is_expected:
        raise CliError(f"{target.name} has another size than was announced. It may still be written: try again later.")

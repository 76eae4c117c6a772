"""The times at which the bytes of a rank's log were written: pairs of an offset and a time, in a file beside the log.

The time of a pair holds for the bytes from its offset to the next pair's. A pair is written before the bytes, so
a reader that reads the log first finds the times of all bytes. A run without this file, or with a damaged one, has no
times. `runtime.backends.log_chunks.read_times` reads the file.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from pathlib import Path

from .record import open_file

PAIR = struct.Struct("<QQ")
"""An offset in the log in bytes, and a time in milliseconds since 1970 (UTC)."""
_MIN_INTERVAL_SECONDS = 0.1
"""Minimum interval between two pairs: fine enough to read, and 160 bytes per second at most."""
_INTERVAL_SHARE = 2**-16
"""Minimum interval as a share of the time for which this process has written the log. It exceeds
`_MIN_INTERVAL_SECONDS` after 1.8 hours, and bounds the file: 4 MiB after a day of steady output, 7 MiB after a month,
with times that are 40 s off at most. A restarted pod begins with the short interval again."""


class LogTimes:
    """The times of the log at `log_path`, in a file of the same name with the suffix `.times`.

    The file is created with the first output. If writing fails, only times are missing: the log does not need them.
    """

    def __init__(self, log_path: Path) -> None:
        self._path = log_path.with_suffix(".times")
        self._file = -1
        self._size_bytes = 0
        self._created_at = time.monotonic()
        self._next_at = 0.0  # the earliest time of the next pair (monotonic)

    def note(self, log_fd: int) -> None:
        """Note the time of the bytes that are about to be appended to the log."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + max(_MIN_INTERVAL_SECONDS, (now - self._created_at) * _INTERVAL_SHARE)
        with contextlib.suppress(OSError):
            if self._file < 0:
                self._file = open_file(self._path, os.O_CREAT)
                # A restarted pod continues the files that its predecessor wrote.
                self._size_bytes = os.fstat(self._file).st_size // PAIR.size * PAIR.size
            # The offset is the log's present end. A count of the written bytes could be wrong: in a pod, customer code
            # can truncate or extend the log.
            pair = PAIR.pack(os.lseek(log_fd, 0, os.SEEK_END), int(time.time() * 1000))
            # On a full disk only a part of the pair may be written, which the next pair overwrites.
            if os.pwrite(self._file, pair, self._size_bytes) == PAIR.size:
                self._size_bytes += PAIR.size

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)

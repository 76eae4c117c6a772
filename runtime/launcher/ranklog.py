"""One rank's output, from its pipe to a file of limited size.

Beyond the limit the pipe is still read, because a rank blocks while its pipe is full. A rank that prints without end
uses no more disk than the limit, and little CPU time of this process. No work is done per line, the kernel discards
output beyond the limit, and a pipe that fills slowly is read less often.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import termios
import time
from pathlib import Path
from typing import Callable, List, Optional

from .log_times import LogTimes
from .masking import MaskedStream
from .record import open_file

_SET_PIPE_SIZE = 1031
"""`fcntl.F_SETPIPE_SZ`, which Python 3.8 lacks."""
_PIPE_BYTES = 1 << 20
"""The size of a rank's pipe: the most that Linux allows every user by default."""
_READ_BYTES = 1 << 18
"""Maximum bytes that one call reads. One rank that prints much must not delay the others."""
_PAUSE_SECONDS = 0.005
"""How long reading a slowly filling pipe pauses, so that each call reads more. People do not notice such a delay."""
_TAIL_BYTES = 4096
"""How many bytes of the end of the output are kept in memory for `last_lines`: about 40 lines."""
_LAST_LINES = 20
"""Maximum number of lines that a failure shows: enough for most tracebacks."""
_MARKERS = re.compile(r"(\[rank\d+\]:)? +[~^]+$")
"""The marker lines that Python 3.11 prints below lines of a traceback; PyTorch prefixes them with the rank."""


class RankLog:
    """A pipe and the file that its data goes to. The end of the output is kept in memory, also beyond the limit.

    `on_data` is called with the file's data, even if the file cannot be written. `mask` replaces the values of secrets
    in the data. Bytes at the end that may begin such a value are held back until the next output. The times of the data
    go to a file beside the log (`LogTimes`). `problem` is a sentence about a failed write, or "".
    """

    def __init__(
        self,
        path: Path,
        pipe_fd: int,
        limit_bytes: int,
        on_data: Optional[Callable[[bytes], None]] = None,
        mask: Optional[MaskedStream] = None,
    ) -> None:
        self.pipe_fd = pipe_fd
        self._mask = mask
        self.is_open = True
        self.problem = ""
        self._remaining_bytes = limit_bytes
        self._limit_bytes = limit_bytes
        self._is_full = False  # the limit is reached
        self._tail = b""
        self._on_data = on_data
        self._file = -1
        self._times = LogTimes(path)
        self._dev_null = -1  # the descriptor of /dev/null, once output is discarded
        self._pumped_at = 0.0  # when `pump` was last called (monotonic)
        self.paused_until: Optional[float] = None
        try:
            self._file = open_file(path, os.O_CREAT | os.O_APPEND)
        except OSError as error:
            self._note_error(error)
        os.set_blocking(pipe_fd, False)
        # The pipe keeps its default size where the user's limit of pipe memory is reached.
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe_fd, _SET_PIPE_SIZE, _PIPE_BYTES)

    def fileno(self) -> int:
        """The pipe's descriptor, for a selector."""
        return self.pipe_fd

    def pump(self) -> bool:
        """Move the pipe's present contents to the file; return whether the file changed.

        Sets `is_open` to False at the pipe's end. Sets `paused_until` (monotonic) if little data came soon after the
        last call: the caller need not read the pipe before then.
        """
        now = time.monotonic()
        pipe_bytes = self._bytes_waiting()
        fills_slowly = now - self._pumped_at < _PAUSE_SECONDS and pipe_bytes < _PIPE_BYTES // 2
        self._pumped_at = now
        self.paused_until = now + _PAUSE_SECONDS if fills_slowly else None
        # Beyond the limit only the end of the output is needed, for `last_lines`.
        if self._is_full and pipe_bytes > _TAIL_BYTES:
            self._discard(pipe_bytes - _TAIL_BYTES)
        try:
            data = os.read(self.pipe_fd, _READ_BYTES)
        except BlockingIOError:
            return False
        self.is_open = bool(data)
        if self._mask is not None:
            data = self._mask.feed(data) if data else self._mask.finish()
        if not data:
            return False
        self._tail = data[-_TAIL_BYTES:] if len(data) >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]
        return self._store(data)

    def _bytes_waiting(self) -> int:
        """Return the number of bytes in the pipe."""
        return int(struct.unpack("i", fcntl.ioctl(self.pipe_fd, termios.FIONREAD, bytes(4)))[0])

    def _discard(self, byte_count: int) -> None:
        """Discard `byte_count` bytes in the kernel.

        This must not block if the pipe has fewer bytes by now: the run's code can read from it too (`/proc/self/fd/1`).
        """
        if not hasattr(os, "splice"):
            return  # before Python 3.10: `pump` reads the bytes and drops them
        if self._dev_null < 0:
            self._dev_null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            while byte_count > 0:
                discarded = os.splice(self.pipe_fd, self._dev_null, byte_count, flags=os.SPLICE_F_NONBLOCK)
                if not discarded:
                    return
                byte_count -= discarded

    def note(self, text: str) -> None:
        """Add a line of the platform's own, even beyond the limit."""
        start = "" if not self._tail or self._tail.endswith(b"\n") else "\n"
        self._append(f"{start}[trainyard] {text}\n".encode())

    def last_lines(self) -> List[str]:
        """Return the last lines of the output as text, without the marker lines of tracebacks."""
        lines = self._tail.decode("utf-8", "replace").splitlines()
        return [line for line in lines if not _MARKERS.match(line)][-_LAST_LINES:]

    def close(self) -> None:
        """Close the pipe and the files."""
        self._times.close()
        for descriptor in (self.pipe_fd, self._file, self._dev_null):
            if descriptor >= 0:
                os.close(descriptor)

    def _store(self, data: bytes) -> bool:
        """Append data up to the limit; return whether the file changed."""
        if self._is_full:
            return False
        self._append(data[: self._remaining_bytes])
        self._remaining_bytes -= len(data)
        if self._remaining_bytes < 0:
            self._is_full = True
            self._append(
                f"\n[trainyard] This rank's log has reached its limit of {self._limit_bytes} bytes. "
                "The run goes on; further output is not kept.\n".encode()
            )
        return True

    def _append(self, data: bytes) -> None:
        """Write data to the file without checking the limit, and pass it to `on_data`."""
        if self._on_data is not None:
            self._on_data(data)
        if data and self._file >= 0:
            self._times.note(self._file)
        try:
            while data and self._file >= 0:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._note_error(error)

    def _note_error(self, error: OSError) -> None:
        self.problem = "The log could not be written: {}.".format(error.strerror or error)

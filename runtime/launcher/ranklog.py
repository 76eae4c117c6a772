"""One rank's output: from its pipe into its file, capped. The one rule: the pipe is always drained.

A rank that prints without end costs no more disk than its limit, and hardly any time: nothing is done for each line,
the kernel throws away what is over the limit, and a pipe that is read more often than it fills is left alone for a
moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import time
from pathlib import Path
from typing import Callable, List, Optional

from .record import open_file

_SET_PIPE_SIZE = 1031
"""`fcntl.F_SETPIPE_SZ`, which Python 3.8 does not name."""
_PIPE = 1 << 20
_PIECE = 1 << 18
_REST_SECONDS = 0.005
_TAIL = 4096
_LAST_LINES = 20


class RankLog:
    """The reading end of a pipe and the file it goes to; the end of what was printed is kept, cap or not.

    `echo` is given what the file is, whether or not the file takes it.
    """

    def __init__(
        self, path: Path, reading: int, limit_bytes: int, echo: Optional[Callable[[bytes], None]] = None
    ) -> None:
        self.reading = reading
        self.open = True
        self.problem = ""
        self._room = limit_bytes
        self._limit = limit_bytes
        self._capped = False
        self._tail = b""
        self._echo = echo
        self._file = -1
        self._nowhere = -1
        self._pumped_at = 0.0
        self.rest_until: Optional[float] = None
        try:
            self._file = open_file(path, os.O_CREAT | os.O_APPEND)
        except OSError as error:
            self._refused(error)
        os.set_blocking(reading, False)
        # Where the user's share of pipes is used up, it stays as small as it was made.
        with contextlib.suppress(OSError):
            fcntl.fcntl(reading, _SET_PIPE_SIZE, _PIPE)

    def fileno(self) -> int:
        """The pipe, for a selector."""
        return self.reading

    def pump(self) -> bool:
        """Move what the pipe holds now. True when the file changed; `open` turns False at the pipe's end.

        Sets `rest_until` (monotonic) where little came soon after the last time: until then nobody need look.
        """
        now = time.monotonic()
        waiting = self._waiting()
        quick = now - self._pumped_at < _REST_SECONDS and waiting < _PIPE // 2
        self._pumped_at = now
        self.rest_until = now + _REST_SECONDS if quick else None
        if self._capped and waiting > _TAIL:
            self._throw_away(waiting - _TAIL)
        try:
            data = os.read(self.reading, _PIECE)
        except BlockingIOError:
            return False
        if not data:
            self.open = False
            return False
        self._tail = data[-_TAIL:] if len(data) >= _TAIL else (self._tail + data)[-_TAIL:]
        return self._store(data)

    def _waiting(self) -> int:
        """How many bytes the pipe holds."""
        return int(struct.unpack("i", fcntl.ioctl(self.reading, termios.FIONREAD, bytes(4)))[0])

    def _throw_away(self, count: int) -> None:
        """Without seeing it. A kernel or a Python that does not do that leaves it to be read.

        The code can read from this pipe too (`/proc/self/fd/1`), and so there may be less in it by now than there was:
        what is not there is not waited for.
        """
        if not hasattr(os, "splice"):
            return
        if self._nowhere < 0:
            self._nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            while count > 0:
                thrown = os.splice(self.reading, self._nowhere, count, flags=os.SPLICE_F_NONBLOCK)
                if not thrown:
                    return
                count -= thrown

    def note(self, text: str) -> None:
        """Add a line of the platform's own, over the cap if need be."""
        start = "" if not self._tail or self._tail.endswith(b"\n") else "\n"
        self._append(f"{start}[trainyard] {text}\n".encode())

    def last_lines(self) -> List[str]:
        """The last lines of the output, as text."""
        return self._tail.decode("utf-8", "replace").splitlines()[-_LAST_LINES:]

    def close(self) -> None:
        """Let go of pipe and file."""
        for descriptor in (self.reading, self._file, self._nowhere):
            if descriptor >= 0:
                os.close(descriptor)

    def _store(self, data: bytes) -> bool:
        if self._capped:
            return False
        self._append(data[: self._room])
        self._room -= len(data)
        if self._room < 0:
            self._capped = True
            self._append(
                f"\n[trainyard] This rank's log has reached its limit of {self._limit} bytes. "
                "The run goes on; further output is not kept.\n".encode()
            )
        return True

    def _append(self, data: bytes) -> None:
        if self._echo is not None:
            self._echo(data)
        try:
            while data and self._file >= 0:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._refused(error)

    def _refused(self, error: OSError) -> None:
        self.problem = "The log could not be written: {}.".format(error.strerror or error)

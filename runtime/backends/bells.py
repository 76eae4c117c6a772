"""Hearing which files of a flat folder of ours were written, by inotify.

The one rule: whoever waits here sleeps until the kernel wakes it; nobody looks again and again. What happens while
nobody has a `Bells` open is not heard.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from pathlib import Path

_IN_CLOSE_WRITE, _IN_MOVED_TO, _IN_DELETE = 0x8, 0x80, 0x200
_IN_OVERFLOW = 0x4000
_HEAD = struct.Struct("iIII")
_MOST = 1 << 16
_SETTLE_MILLISECONDS = 5
_SETTLED_SECONDS = 0.05
_LIBC = ctypes.CDLL(None, use_errno=True)


class Bells:
    """Open from its making to `close`. Raises OSError where the kernel has no more to give (see inotify(7))."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = _checked(_LIBC.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        wanted = _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_DELETE
        try:
            _checked(_LIBC.inotify_add_watch(self._descriptor, os.fsencode(folder), wanted))
        except OSError:
            self.close()
            raise

    def hear(self, seconds: float) -> set[str]:
        """Names of files that were written, moved in or deleted; nothing where none was within so many seconds.

        What follows at once is taken together: the nodes of a run tell of one event, each by itself.
        """
        names: set[str] = set()
        if not self._poll.poll(seconds * 1000):
            return names
        give_up_at = time.monotonic() + _SETTLED_SECONDS
        while True:
            names |= self._read()
            if time.monotonic() >= give_up_at or not self._poll.poll(_SETTLE_MILLISECONDS):
                return names

    def _read(self) -> set[str]:
        try:
            data = os.read(self._descriptor, _MOST)
        except BlockingIOError:
            return set()
        names: set[str] = set()
        at = 0
        while at < len(data):
            _watch, mask, _cookie, length = _HEAD.unpack_from(data, at)
            at += _HEAD.size + length
            if mask & _IN_OVERFLOW:
                # Some were lost: it may have been any.
                names.update(path.name for path in self._folder.iterdir())
            elif length:
                names.add(os.fsdecode(data[at - length : at].rstrip(b"\0")))
        return names

    def close(self) -> None:
        """Hear no more."""
        os.close(self._descriptor)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"no notice of changes: {os.strerror(number)}")
    return result

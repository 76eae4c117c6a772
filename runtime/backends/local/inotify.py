"""Wait for changes of the files in one folder, without its subfolders, by inotify(7)."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from pathlib import Path

# From <sys/inotify.h>.
_IN_CLOSE_WRITE, _IN_MOVED_TO, _IN_DELETE = 0x8, 0x80, 0x200
_IN_OVERFLOW = 0x4000
_EVENT_HEADER = struct.Struct("iIII")
"""struct inotify_event: watch, mask, cookie, and the length of the name that follows."""
_READ_BYTES = 1 << 16
"""Bytes of events that are read at a time: some thousand events."""
_SETTLE_MILLISECONDS = 5
"""How long to wait for a further change. All nodes of a run report an event such as its end within milliseconds."""
_MAX_SETTLE_SECONDS = 0.05
"""How long `wait` collects changes at most. Without it, changes that never pause would never be returned."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """Watches a folder until `close`. Creating one raises OSError if the kernel's limit of watches is reached."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = _raise_on_error(_LIBC.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        events = _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_DELETE
        try:
            _raise_on_error(_LIBC.inotify_add_watch(self._descriptor, os.fsencode(folder), events))
        except OSError:
            self.close()
            raise

    def wait(self, seconds: float) -> set[str]:
        """Wait up to `seconds` for a change; return the names of files that were written, moved in or deleted.

        Changes in quick succession are returned together, since all nodes of a run report the same event.
        """
        names: set[str] = set()
        if not self._poll.poll(seconds * 1000):
            return names
        give_up_at = time.monotonic() + _MAX_SETTLE_SECONDS
        while True:
            names |= self._read()
            if time.monotonic() >= give_up_at or not self._poll.poll(_SETTLE_MILLISECONDS):
                return names

    def _read(self) -> set[str]:
        """Return the names of files in the events that have arrived."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return set()
        names: set[str] = set()
        offset = 0
        while offset < len(data):
            _watch, mask, _cookie, length = _EVENT_HEADER.unpack_from(data, offset)
            offset += _EVENT_HEADER.size + length
            if mask & _IN_OVERFLOW:
                # The kernel dropped events, so any file may have changed.
                names.update(path.name for path in self._folder.iterdir())
            elif length:
                names.add(os.fsdecode(data[offset - length : offset].rstrip(b"\0")))
        return names

    def close(self) -> None:
        """Stop watching."""
        os.close(self._descriptor)


def _raise_on_error(result: int) -> int:
    """Return the result of a system call. Raises OSError if it failed."""
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"the folder cannot be watched: {os.strerror(error_number)}")
    return result

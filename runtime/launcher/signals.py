"""Signals as events, each with what a pod's first process must know of it: whether it came from outside.

The customer's code shares the user of this process, and may send it what it likes. What the kubelet sends comes from
another pid namespace: the kernel names no sender (pid 0) and says that it was an ordinary `kill` (SI_USER), which no
process inside can have it say of itself. The one rule: what comes from inside asks for nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from typing import List, NamedTuple

_TAKEN = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SET_BYTES = 128
_RECORD = struct.Struct("IiiI112x")
_MOST = 32
_SI_USER = 0


class Signal(NamedTuple):
    """One signal; `outside`: from another pid namespace, or this process is not the first of one."""

    number: int
    outside: bool


class Signals:
    """From its making on, the usual signals do nothing but make `fileno` readable. Raises OSError."""

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = ctypes.create_string_buffer(_SET_BYTES)
        libc.sigemptyset(numbers)
        for number in _TAKEN:
            libc.sigaddset(numbers, int(number))
        self._descriptor = int(libc.signalfd(-1, numbers, os.O_CLOEXEC | os.O_NONBLOCK))
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "no descriptor for signals")
        self._first = os.getpid() == 1

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._descriptor

    def read(self) -> List[Signal]:
        """What has come."""
        try:
            data = os.read(self._descriptor, _RECORD.size * _MOST)
        except BlockingIOError:
            return []
        return [
            Signal(number, not self._first or (code == _SI_USER and not sender))
            for number, _errno, code, sender in _RECORD.iter_unpack(data)
        ]


def release() -> None:
    """In a process that was forked: signals as they are anywhere."""
    signal.pthread_sigmask(signal.SIG_SETMASK, set())

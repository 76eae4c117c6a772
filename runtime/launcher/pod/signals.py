"""Receive the signals of a pod's first process as events, and find out which of them come from outside the pod.

Customer code has the same user and may send any signal, so requests to stop that come from inside are ignored. The
kubelet sends its signals from another pid namespace. The kernel then reports pid 0 as the sender, and SI_USER (an
ordinary `kill`) as the code. No process inside can forge both.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from typing import List, NamedTuple

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The signals that ask for the run's end."""
# The signals that this process handles as events: the one for ended children, and those that would end this process.
_HANDLED_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGSET_BYTES = 128
"""The size of the C library's signal set."""
_SIGNALFD_INFO = struct.Struct("IiiI112x")
"""`struct signalfd_siginfo`: signal, errno, code, pid of the sender; 128 bytes."""
_MAX_SIGNALS_READ = 32
"""Maximum number of signals that one call reads. At most one of each handled number is pending, so one call reads them
all."""
_SI_USER = 0


class Signal(NamedTuple):
    """One signal. `is_from_outside`: its sender is in another pid namespace.

    If this process is not the first of its namespace, as in a pod with `shareProcessNamespace`, the sender of a request
    to stop may be in the same namespace. Then every signal counts as from outside.
    """

    number: int
    is_from_outside: bool


class Signals:
    """Blocks the signals in `_HANDLED_SIGNALS` and makes `fileno` readable for each instead. Raises OSError."""

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        libc = ctypes.CDLL(None, use_errno=True)
        signal_set = ctypes.create_string_buffer(_SIGSET_BYTES)
        libc.sigemptyset(signal_set)
        for number in _HANDLED_SIGNALS:
            libc.sigaddset(signal_set, int(number))
        # -1: create a new descriptor.
        self._descriptor = int(libc.signalfd(-1, signal_set, os.O_CLOEXEC | os.O_NONBLOCK))
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "no descriptor for signals")
        self._is_first_process = os.getpid() == 1

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._descriptor

    def read(self) -> List[Signal]:
        """Return the signals that have arrived. The kernel merges pending signals of one number."""
        try:
            data = os.read(self._descriptor, _SIGNALFD_INFO.size * _MAX_SIGNALS_READ)
        except BlockingIOError:
            return []
        return [
            Signal(number, not self._is_first_process or (code == _SI_USER and not sender_pid))
            for number, _errno, code, sender_pid in _SIGNALFD_INFO.iter_unpack(data)
        ]


def unblock_signals() -> None:
    """Unblock all signals. Call this in a forked process, which inherits the blocked signals."""
    signal.pthread_sigmask(signal.SIG_SETMASK, set())

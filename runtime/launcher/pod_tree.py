"""All processes of a pod but the first, as one thing: the launcher, the ranks, what they fork and leave behind.

The one rule: the first process is the parent of all that lost theirs, and outlives them all. It ends whatever is left
before it says its last word, so that nobody can gainsay it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from typing import List, Mapping, Optional, Sequence

from .processes import Exit, reap, send_signal, spawn
from .signals import release

_PR_SET_CHILD_SUBREAPER = 36
_OPEN_FILES = 65536
_END_SECONDS = 10.0
_PAUSE_SECONDS = 0.01


class PodTree:
    """`exit` says how the launcher ended, None before; `first`: this process is the first of its pid namespace."""

    ends = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.first = os.getpid() == 1
        self.exit: Optional[Exit] = None
        self._launcher = 0
        if not self.first:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @property
    def launched(self) -> bool:
        """Whether there is a launcher, or was one."""
        return bool(self._launcher)

    def start(self, order_on: int, environment: Mapping[str, str], *, output: int, inherit: Sequence[int]) -> None:
        """Start the launcher; it finds its order at the other end of the socket `order_on`."""
        archive = os.path.abspath(sys.argv[0])
        arguments = [sys.executable, "-I", "-S", archive, "--socket", str(order_on)]
        inherited = [order_on, *inherit]
        self._launcher = spawn(arguments, environment, output=output, inherit=inherited, prepare=_prepare)

    def reap(self) -> List[Exit]:
        """Everybody who has ended since, orphans too."""
        return reap()

    def reaped(self, gone: Exit) -> None:
        """A child of this process has ended: perhaps the launcher."""
        if gone.pid == self._launcher:
            self.exit = gone

    def kill(self) -> None:
        """End everything but this process, now."""
        if self.first:
            send_signal(-1, signal.SIGKILL)
            return
        for pid in _descendants(os.getpid()):
            send_signal(pid, signal.SIGKILL)

    def end_all(self) -> None:
        """End everything, and wait until it is gone."""
        give_up_at = time.monotonic() + _END_SECONDS
        while time.monotonic() < give_up_at:
            self.kill()
            for gone in reap():
                self.reaped(gone)
            if not _children(os.getpid()):
                return
            time.sleep(_PAUSE_SECONDS)  # orphans become ours, and are to be killed, without an event


def _prepare() -> None:
    """In the new process, before the launcher is there."""
    release()
    for number, wanted in ((resource.RLIMIT_NOFILE, _OPEN_FILES), (resource.RLIMIT_CORE, 0)):
        _soft, hard = resource.getrlimit(number)
        resource.setrlimit(number, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _descendants(pid: int) -> List[int]:
    found = _children(pid)
    for known in found:
        found.extend(_children(known))
    return found


def _children(pid: int) -> List[int]:
    found: List[int] = []
    try:
        for thread in os.listdir("/proc/{}/task".format(pid)):
            with open("/proc/{}/task/{}/children".format(pid, thread)) as file:
                found.extend(map(int, file.read().split()))
    except OSError:
        return found
    return found

"""All processes of a pod except the first: the launcher, the ranks, and what they start and leave behind.

The first process adopts orphans and outlives all others. It ends all other processes before it writes the last record,
so that none of them can change the record afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from typing import List, Mapping, Optional, Sequence

from .. import seccomp
from ..processes import Exit, reap, send_signal, spawn
from .signals import unblock_signals

_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2): this process adopts the orphans among its descendants
_MAX_OPEN_FILES = 65536
"""Limit of open files of each process (RLIMIT_NOFILE), as in a sandbox: data loaders need thousands."""
_KILL_SECONDS = 10.0
"""How long to wait for the end of killed processes. They end within milliseconds, unless stalled storage blocks one."""
_KILL_INTERVAL_SECONDS = 0.01
"""Pause between two tries to end all processes, which end within milliseconds."""


class PodTree:
    """The pod's processes.

    `exit`: how the launcher ended; None while it runs. `is_first_process`: whether this process is the first of its pid
    namespace; False in a pod with `shareProcessNamespace`.
    """

    def __init__(self) -> None:
        self.is_first_process = os.getpid() == 1
        self.exit: Optional[Exit] = None
        self._launcher_pid = 0
        if not self.is_first_process:  # the first process of a namespace adopts orphans anyway
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    @property
    def has_launcher(self) -> bool:
        """Whether a launcher was started."""
        return bool(self._launcher_pid)

    def start(
        self, launch_plan_fd: int, environment: Mapping[str, str], *, output_fd: int, inherit_fds: Sequence[int]
    ) -> None:
        """Start the launcher; it reads its launch plan from the socket `launch_plan_fd`."""
        archive = os.path.abspath(sys.argv[0])
        arguments = [sys.executable, "-I", "-S", archive, "--socket", str(launch_plan_fd)]
        inherited = [launch_plan_fd, *inherit_fds]
        self._launcher_pid = spawn(
            arguments, environment, output_fd=output_fd, inherit_fds=inherited, prepare=self._prepare
        )

    def _prepare(self) -> None:
        """Set signals, limits and the system call filter, in the new process, before the launcher is executed."""
        unblock_signals()
        # No core dumps, since they would fill the storage. Where the kernel pipes them to a program, only a limit of 1
        # turns them off; see core(5).
        for limit_kind, limit in ((resource.RLIMIT_NOFILE, _MAX_OPEN_FILES), (resource.RLIMIT_CORE, 1)):
            _soft, hard = resource.getrlimit(limit_kind)
            resource.setrlimit(limit_kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        # The filter protects the pod's first process, and this one, which becomes the launcher.
        system_call_filter = seccomp.pod_filter((os.getppid(), os.getpid()))
        if system_call_filter is not None:
            # The filter is optional: if code kills the launcher without it, the run is not free either (`limits`).
            with contextlib.suppress(OSError):
                seccomp.install_filter(system_call_filter)

    def note_exit(self, process_exit: Exit) -> None:
        """Note that a child of this process has ended; it may be the launcher."""
        if process_exit.pid == self._launcher_pid:
            self.exit = process_exit

    def kill(self) -> None:
        """Kill every process except this one."""
        if self.is_first_process:  # -1 stands for every process of the namespace, and never reaches its first one
            send_signal(-1, signal.SIGKILL)
            return
        for pid in _descendants(os.getpid()):
            send_signal(pid, signal.SIGKILL)

    def end_all(self) -> None:
        """Kill every process and wait until none is left."""
        give_up_at = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < give_up_at:
            self.kill()
            for process_exit in reap():
                self.note_exit(process_exit)
            if not _children(os.getpid()):
                return
            time.sleep(_KILL_INTERVAL_SECONDS)  # there is no event for an orphan that this process adopts


def _descendants(pid: int) -> List[int]:
    descendants = _children(pid)
    for descendant in descendants:  # grows while it is read, until no descendant has children
        descendants.extend(_children(descendant))
    return descendants


def _children(pid: int) -> List[int]:
    """Return the pids of a process's children, which /proc lists by thread; incomplete if the process is ending."""
    pids: List[int] = []
    try:
        for thread in os.listdir("/proc/{}/task".format(pid)):
            with open("/proc/{}/task/{}/children".format(pid, thread)) as file:
                pids.extend(map(int, file.read().split()))
    except OSError:
        return pids
    return pids

"""Processes of this machine, identified by pid and start time, since the kernel reuses pids.

Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
from pathlib import Path

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of a call that say nothing about the process: this process or the machine has reached a limit."""


def start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None if it has ended. A zombie has ended.

    Like all functions here, raises OSError if this process or the machine has no descriptors or no memory left.
    """
    fields = _stat_fields(pid)
    # State and start time are fields 3 and 22 of proc(5), so 0 and 19 here.
    return None if fields is None or fields[0] in b"ZX" else int(fields[19])


def parent(pid: int) -> int | None:
    """Return the pid of the process's parent; None where there is no such process."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[1])


def all_pids() -> list[int]:
    """Return the pids of all processes of this machine, zombies included."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def lock_holders(folder: Path) -> list[int]:
    """Return the pids of the other processes that hold an exclusive flock(2) on a file of this folder.

    Reads /proc only, so an error of the folder's storage does not matter. Processes of other users are left out.
    """
    prefix, found = f"{folder}/", []
    for pid in all_pids():
        if pid == os.getpid():
            continue
        try:
            links = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError as error:  # it has ended, or is another user's
            if error.errno in _OUT_OF_RESOURCES:
                raise
            continue
        if any(_holds_lock(link, prefix) for link in links):
            found.append(pid)
    return found


def _holds_lock(link: Path, prefix: str) -> bool:
    """Return whether a descriptor's file has a path that begins with `prefix`, and the descriptor locks it exclusively.

    `link` is the descriptor's link in /proc/<pid>/fd.
    """
    try:
        if not str(link.readlink()).startswith(prefix):
            return False
        lines = (link.parents[1] / "fdinfo" / link.name).read_text().splitlines()
    except OSError as error:  # it was closed meanwhile
        if error.errno in _OUT_OF_RESOURCES:
            raise
        return False
    # "lock: 1: FLOCK ADVISORY WRITE 123 fe:00:456 0 EOF", proc_pid_fdinfo(5). A shared lock has READ.
    return any({"FLOCK", "WRITE"} <= set(line.split()) for line in lines if line.startswith("lock:"))


def with_descendants(roots: list[int]) -> list[int]:
    """Return these processes, followed by their children, their children's children, and so on."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        parent_pid = parent(pid)
        if parent_pid is not None:
            children.setdefault(parent_pid, []).append(pid)
    found = list(dict.fromkeys(roots))
    for pid in found:  # grows in the loop
        found += [child for child in children.get(pid, []) if child not in found]
    return found


def _stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/<pid>/stat from the third, the state, on; None where there is no such process."""
    try:
        # The second field, the name in parentheses, is the process's choice: any bytes, spaces and parentheses too.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            raise
        return None


def _open(pid: int) -> int | None:
    """Return a descriptor of the process (pidfd); None where there is no such process."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            raise
        return None


def is_alive(pid: int, start_ticks: int | None) -> bool:
    """Whether the process of this pid still runs. `start_ticks` is its `start_time`; False for None."""
    return start_ticks is not None and start_time(pid) == start_ticks


def send(pid: int, start_ticks: int | None, number: signal.Signals) -> bool:
    """Send a signal to a process, identified as in `is_alive`; return False if it has ended."""
    # The descriptor keeps referring to one process. The start time is checked after opening it, so the signal cannot
    # reach a later process with the same pid.
    descriptor = _open(pid)
    if descriptor is None:
        return False
    try:
        if not is_alive(pid, start_ticks):
            return False
        with contextlib.suppress(ProcessLookupError):  # it has ended since the check
            signal.pidfd_send_signal(descriptor, number)
        return True
    finally:
        os.close(descriptor)


def wait_for_end(pid: int, start_ticks: int | None, seconds: float) -> bool:
    """Wait until a process, identified as in `is_alive`, has ended, for at most `seconds`; return whether it has."""
    descriptor = _open(pid)
    if descriptor is None:
        return True
    try:
        if not is_alive(pid, start_ticks):
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))
    finally:
        os.close(descriptor)

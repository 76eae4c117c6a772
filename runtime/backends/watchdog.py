"""What a sandbox may use and what it uses, seen from outside.

The one rule: cheap while all is well, exact before anybody is blamed, and quick where processes multiply.
Resident sizes are summed at every look; only when that sum, which counts shared pages once per process, passes the
limit are the proportional sizes read, which cost the kernel a walk over every mapping. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_OPEN_FILES = 65536
_FOREMOST = -20
_QUEUED_SIGNALS = 4096
"""And timers: they are the user's, so the console's too."""
_MEMORY_FOLDERS = ("tmp", "dev/shm")


class Usage(NamedTuple):
    """What the sandbox uses now.

    `heaviest` is the pid *inside* the sandbox of the launcher's child that, with all that descends from it, uses the
    most memory; None when there is none, or when nobody needed to know.
    """

    processes: int
    memory_bytes: int
    heaviest: int | None


def kernel_limits(*, processes: int, file_bytes: int) -> dict[str, int]:
    """What every process of a node gets, by the names that the module `resource` has.

    The number of processes is watched besides: root is exempt from its limit, so here it only has to stop a flood.
    """
    return {
        "RLIMIT_NOFILE": _OPEN_FILES,
        # Where the machine hands dumps to a program, which then runs outside of every limit, only 1 means none at all.
        "RLIMIT_CORE": 1,
        "RLIMIT_NPROC": 2 * processes,
        "RLIMIT_SIGPENDING": _QUEUED_SIGNALS,
        "RLIMIT_FSIZE": file_bytes,
    }


def limit_itself(limits: dict[str, int]) -> None:
    """Set these limits on this process, which what it starts inherits; never above what it has."""
    for name, wanted in limits.items():
        number = getattr(resource, name)
        _soft, hard = resource.getrlimit(number)
        value = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(number, (value, value))


def keep_awake() -> None:
    """Let no flood of processes keep this one from ending it, where limits do not hold (for root).

    Children are scheduled as anybody.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def favour(launcher: int) -> None:
    """Let no crowd of processes in its node keep the launcher from its word, where we may (root).

    It stays within what the node has of CPU time, or whoever makes it work would take that of others. What it starts
    begins as anybody.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(launcher, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, launcher, _FOREMOST)


class Turn(NamedTuple):
    """Whether a process wants a core at this moment; for how long in all it had one, and for how long it waited."""

    wanting: bool
    ran_seconds: float
    waited_seconds: float


def turn(pid: int) -> Turn | None:
    """How a process fares among those that want the same cores; None where the kernel does not say."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        ran, waited = map(int, Path(f"/proc/{pid}/schedstat").read_text().split()[:2])
    except (OSError, ValueError, IndexError):
        return None
    return Turn(state == "R", ran / 1e9, waited / 1e9)


def look(init: int, *, enough_bytes: int | None, enough_processes: int) -> Usage:
    """Measure the sandbox whose first process has this pid on the host; its memory only where `enough_bytes` is given.

    Past `enough_processes` nothing else is measured: there is no time to lose on a flood of them.
    """
    branches: dict[int, list[int]] = {}
    everyone = [init]
    for child in _children(init):
        branches[child] = _descendants(child, enough_processes)
        everyone += branches[child]
        if len(everyone) > enough_processes:
            return Usage(len(everyone), 0, None)
    if enough_bytes is None:
        return Usage(len(everyone), 0, None)
    files = _memory_files(init)
    memory = sum(map(_resident, everyone)) + files
    heaviest = None
    if memory > enough_bytes:
        sizes = {child: [_proportional(pid) for pid in branch] for child, branch in branches.items()}
        total = sum(size for branch in sizes.values() for size, _shared in branch)
        shared = sum(part for branch in sizes.values() for _size, part in branch)
        # Files in memory that a process maps are in its own figure already.
        memory = max(total, total - shared + files)
        if sizes:
            heaviest = _inner_pid(max(sizes, key=lambda child: sum(size for size, _shared in sizes[child])))
    return Usage(len(everyone), memory, heaviest)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found.extend(map(int, (thread / "children").read_text().split()))
    except OSError:
        return found
    return found


def _descendants(pid: int, enough: int) -> list[int]:
    """The process and what descends from it; a little more than `enough` at most."""
    found = [pid]
    for known in found:
        if len(found) > enough:
            break
        found.extend(_children(known))
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> tuple[int, int]:
    """Proportional size, and the part of it that is shared memory."""
    total = shared = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = int(line.split()[1]) * 1024
            elif line.startswith("Pss_Shmem:"):
                shared = int(line.split()[1]) * 1024
    except OSError:
        return _resident(pid), 0
    return total, shared


def _memory_files(init: int) -> int:
    used = 0
    for folder in _MEMORY_FOLDERS:
        try:
            state = os.statvfs(f"/proc/{init}/root/{folder}")
        except OSError:
            continue
        used += (state.f_blocks - state.f_bfree) * state.f_frsize
    return used


def _inner_pid(pid: int) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except OSError:
        return None
    return None

"""Limit the resources of a sandbox, and measure its usage from outside.

Memory is measured in two steps. The sum of the resident sizes of all processes is cheap, and never too small, since a
shared page counts once per process. Only if this sum exceeds the limit, proportional set sizes are read, for which the
kernel walks over every mapping. Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_OPEN_FILES = 65536
"""Descriptors that each process may have open. Data loaders need thousands. This is many times as much, and still
stops a leak."""
_HIGHEST_PRIORITY_NICE = -20
"""The nice value with the highest priority."""
_MAX_QUEUED_SIGNALS = 4096
"""Signals and timers that may be queued: far more than code needs. The kernel counts them per user. The console runs as
the same user, so code must not use up the user's limit."""
_MEMORY_FOLDERS = ("tmp", "dev/shm")
"""The sandbox's tmpfs folders, relative to its root."""


class Usage(NamedTuple):
    """The current usage of a sandbox.

    `heaviest_pid` is the child of the launcher that uses the most memory, its descendants included. It is the pid
    inside the sandbox, and None unless the memory limit was exceeded.
    """

    processes: int
    memory_bytes: int
    heaviest_pid: int | None


def kernel_limits(*, processes: int, file_bytes: int) -> dict[str, int]:
    """Return the limits of every process of a node, by their names in the module `resource`.

    `processes` is the node's limit of processes, which `Limits` or a control group enforces. RLIMIT_NPROC cannot,
    since it does not hold for root. It is set to twice `processes`, to stop a flood. `file_bytes` limits the size of
    each file.
    """
    return {
        "RLIMIT_NOFILE": _MAX_OPEN_FILES,
        # 1 turns core dumps off even where the kernel pipes them to a program, which ignores a limit of 0; see core(5).
        # That program would run outside all limits.
        "RLIMIT_CORE": 1,
        "RLIMIT_NPROC": 2 * processes,
        "RLIMIT_SIGPENDING": _MAX_QUEUED_SIGNALS,
        "RLIMIT_FSIZE": file_bytes,
    }


def apply_limits(limits: dict[str, int]) -> None:
    """Set these limits on this process and its later children, but none above this process's hard limit.

    Leaves RLIMIT_NPROC out: call `limit_processes` on the sandbox's first process. If this process had the limit when
    the sandbox's user namespace is created, the kernel would count all processes of the user, also those of other runs.
    """
    for name, limit in limits.items():
        if name != "RLIMIT_NPROC":
            _set_limit(0, getattr(resource, name), limit)


def limit_processes(pid: int, limits: dict[str, int]) -> None:
    """Set RLIMIT_NPROC of `limits` on a process in a new sandbox. Does nothing if the process has ended.

    From Linux 5.14 on, only the sandbox's processes count towards the limit; on older kernels, all of the user's do.
    """
    with contextlib.suppress(ProcessLookupError):
        _set_limit(pid, resource.RLIMIT_NPROC, limits["RLIMIT_NPROC"])


def _set_limit(pid: int, kind: int, limit: int) -> None:
    """Set a limit of a process (0: this one), but not above its hard limit."""
    _soft, hard = resource.prlimit(pid, kind)
    effective_limit = limit if hard == resource.RLIM_INFINITY else min(hard, limit)
    resource.prlimit(pid, kind, (effective_limit, effective_limit))


def raise_own_priority() -> None:
    """Give this process real-time priority, so that no flood of processes delays the end of a node.

    Does nothing unless root runs it. Its children get normal scheduling (SCHED_RESET_ON_FORK).
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def raise_launcher_priority(launcher_pid: int) -> None:
    """Give the launcher a higher priority than the code beside it. Does nothing unless root runs this.

    The node's CPU limit still holds, so code that keeps its launcher busy takes no time from other runs. The launcher's
    children get normal priority (SCHED_RESET_ON_FORK).
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(launcher_pid, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, launcher_pid, _HIGHEST_PRIORITY_NICE)


class CpuSchedule(NamedTuple):
    """How long a process has run, and how long it has waited for a core, since its start.

    `is_runnable`: it runs or waits for a core now.
    """

    is_runnable: bool
    ran_seconds: float
    waited_seconds: float


def cpu_schedule(pid: int) -> CpuSchedule | None:
    """Return a process's CPU scheduling statistics; None where the kernel has none."""
    try:
        # Bytes, since the customer's code chooses the name of its processes.
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        ran, waited = map(int, Path(f"/proc/{pid}/schedstat").read_text().split()[:2])
    except (OSError, ValueError, IndexError):
        return None
    return CpuSchedule(state == b"R", ran / 1e9, waited / 1e9)


def measure(init_pid: int, *, max_bytes: int | None, max_processes: int) -> Usage:
    """Measure the sandbox whose first process has the pid `init_pid` on the host.

    Memory is measured only if `max_bytes` is given, and exactly only if it may exceed `max_bytes`. If there are more
    than `max_processes`, nothing else is measured, so that a flood of processes is detected quickly.
    """
    # The pids of each child of the launcher and its descendants, by the child's pid.
    families: dict[int, list[int]] = {}
    sandbox_pids = [init_pid]
    for child in _children(init_pid):
        families[child] = _descendants(child, max_processes)
        sandbox_pids += families[child]
        if len(sandbox_pids) > max_processes:
            return Usage(len(sandbox_pids), 0, None)
    if max_bytes is None:
        return Usage(len(sandbox_pids), 0, None)
    tmpfs_bytes = _tmpfs_bytes(init_pid)
    memory_bytes = sum(map(_resident_bytes, sandbox_pids)) + tmpfs_bytes
    heaviest_pid = None
    if memory_bytes > max_bytes:
        family_bytes: dict[int, int] = {}
        shared_bytes = 0
        for child, family in families.items():
            sizes = [_proportional_size(pid) for pid in family]
            family_bytes[child] = sum(size.total_bytes for size in sizes)
            shared_bytes += sum(size.shared_bytes for size in sizes)
        total_bytes = sum(family_bytes.values())
        # A tmpfs file that processes have mapped is in `shared_bytes` and in `tmpfs_bytes`, and must count once.
        memory_bytes = max(total_bytes, total_bytes - shared_bytes + tmpfs_bytes)
        if family_bytes:
            heaviest_pid = _pid_in_sandbox(max(family_bytes, key=lambda child: family_bytes[child]))
    return Usage(len(sandbox_pids), memory_bytes, heaviest_pid)


def _children(pid: int) -> list[int]:
    """Return the pids of a process's children. The kernel lists them for each thread that has forked some."""
    pids: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            pids.extend(map(int, (thread / "children").read_text().split()))
    except OSError:
        return pids
    return pids


def _descendants(pid: int, max_processes: int) -> list[int]:
    """Return the pids of a process and its descendants; stop once they are more than `max_processes`."""
    pids = [pid]
    for parent in pids:  # the loop also visits the pids that it appends
        if len(pids) > max_processes:
            break
        pids.extend(_children(parent))
    return pids


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


class ProportionalSize(NamedTuple):
    """A process's proportional set size, and the part of it that is shared memory."""

    total_bytes: int
    shared_bytes: int


def _proportional_size(pid: int) -> ProportionalSize:
    """Return a process's proportional set size; its resident size where the kernel does not give it."""
    total = shared = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = int(line.split()[1]) * 1024
            elif line.startswith("Pss_Shmem:"):
                shared = int(line.split()[1]) * 1024
    except OSError:
        return ProportionalSize(_resident_bytes(pid), 0)
    return ProportionalSize(total, shared)


def _tmpfs_bytes(init_pid: int) -> int:
    """Return the bytes that the files in the sandbox's /tmp and /dev/shm occupy."""
    used_bytes = 0
    for folder in _MEMORY_FOLDERS:
        try:
            filesystem = os.statvfs(f"/proc/{init_pid}/root/{folder}")
        except OSError:
            continue
        used_bytes += (filesystem.f_blocks - filesystem.f_bfree) * filesystem.f_frsize
    return used_bytes


def _pid_in_sandbox(pid: int) -> int | None:
    """Return the pid that a process of the host has inside its sandbox, the innermost PID namespace.

    None if the process has ended.
    """
    try:
        # Bytes, since the customer's code chooses the name of its processes.
        for line in Path(f"/proc/{pid}/status").read_bytes().split(b"\n"):
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    except OSError:
        return None
    return None

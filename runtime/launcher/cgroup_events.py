"""Counters of this container's control group: OOM kills, refused processes, memory and CPU time.

Supports v1 and v2. A counter that cannot be read is 0. With v1, a group without a limit may be the whole machine's.
Memory and CPU time are then None, since the values would include other containers.
"""

from __future__ import annotations

import os
from typing import Optional, Sequence

ROOT = "/sys/fs/cgroup"
"""The folder in which a container sees its control group; with v1, it has a folder for each controller. In tests, the
parameters `root` replace it."""
# Files below ROOT: first the name in v2, then the name in v1.
_OOM_FILES = ("memory.events", "memory/memory.oom_control")
_REFUSAL_FILES = ("pids.events", "pids/pids.events")
_PROCESS_LIMIT_FILES = ("pids.max", "pids/pids.max")
# For v2, then for v1: the file with the memory in use, the file with statistics, and their field with the size of the
# caches that the kernel can drop.
_MEMORY_FILES = (
    ("memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
_UNLIMITED_BYTES = 1 << 60
"""For a group without a limit, v1 reports the largest number of whole pages, which is more than this."""


class EventCounter:
    """The last value of a counter of the kernel. `increased_at` is when it last increased (monotonic; None: never)."""

    def __init__(self, value: int = 0) -> None:
        self._value = value
        self.increased_at: Optional[float] = None

    def update(self, value: int, now: float) -> None:
        """Set the counter's current value, as read at `now`."""
        if value > self._value:
            self._value = value
            self.increased_at = now


def oom_kills(root: str = ROOT) -> int:
    """Return how many processes of this container were killed because its memory was used up."""
    return _read_field(root, _OOM_FILES, "oom_kill")


def process_refusals(root: str = ROOT) -> int:
    """Return how often this container was refused a process or thread."""
    return _read_field(root, _REFUSAL_FILES, "max")


def process_limit(root: str = ROOT) -> Optional[int]:
    """Return the limit of processes and threads; None if the container does not see it.

    The kubelet may set it on the pod's group, which is above the container's.
    """
    limits = [_read_number(root, name) for name in _PROCESS_LIMIT_FILES]
    return next((limit for limit in limits if limit is not None), None)


def memory_bytes(root: str = ROOT) -> Optional[int]:
    """Return the memory in use, without file caches that the kernel can drop; None without a group of its own."""
    if (_read_number(root, "memory/memory.limit_in_bytes") or 0) >= _UNLIMITED_BYTES:
        return None
    for usage_file, statistics_file, cache_field in _MEMORY_FILES:
        usage_bytes = _read_number(root, usage_file)
        if usage_bytes is not None:
            return max(0, usage_bytes - _read_field(root, [statistics_file], cache_field))
    return None


def cpu_seconds(root: str = ROOT) -> Optional[float]:
    """Return the CPU seconds that all processes have used so far; None without a group of its own."""
    if os.path.exists(os.path.join(root, "cpu.max")):  # v2, in which the machine's own group has no such file
        return _read_field(root, ["cpu.stat"], "usage_usec") / 1e6
    nanoseconds = _read_number(root, "cpuacct/cpuacct.usage")
    is_limited = (_read_number(root, "cpu/cpu.cfs_quota_us") or 0) > 0
    return nanoseconds / 1e9 if nanoseconds is not None and is_limited else None


def _read_number(root: str, name: str) -> Optional[int]:
    """Read a file with one number; None if there is no such file or no number in it."""
    try:
        with open(os.path.join(root, name)) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _read_field(root: str, names: Sequence[str], field: str) -> int:
    """Return a field of the first of these files that has it; 0 if none has."""
    for name in names:
        try:
            with open(os.path.join(root, name)) as file:
                for line in file:
                    key, _, value = line.partition(" ")
                    if key == field:
                        return int(value)
        except (OSError, ValueError):
            continue
    return 0

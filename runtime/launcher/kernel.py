"""What the kernel did to this very container because of its limits: kills for want of memory, refused processes.

Hides the two generations of control groups. The one rule: what cannot be read counts as nothing done.
"""

from __future__ import annotations

import os
from typing import Optional, Sequence

ROOT = "/sys/fs/cgroup"
"""Where a container finds its own control group; with the old generation, one folder for each controller below it."""
_OOM = ("memory.events", "memory/memory.oom_control")
_REFUSED = ("pids.events", "pids/pids.events")
_PROCESSES = ("pids.max", "pids/pids.max")


class Counter:
    """A number that the kernel counts up, and when it last rose (monotonic; None: it has not)."""

    def __init__(self, value: int = 0) -> None:
        self._value = value
        self.at: Optional[float] = None

    def count(self, value: int, now: float) -> None:
        """The number as it is now."""
        if value > self._value:
            self._value = value
            self.at = now


def oom_kills(root: str = ROOT) -> int:
    """How many processes of this container were killed because its memory was used up."""
    return _read(root, _OOM, "oom_kill")


def refusals(root: str = ROOT) -> int:
    """How often this container was refused another process or thread."""
    return _read(root, _REFUSED, "max")


def process_limit(root: str = ROOT) -> Optional[int]:
    """How many processes and threads this container may have; None where it is not told, as where its pod is held."""
    for name in _PROCESSES:
        try:
            with open(os.path.join(root, name)) as file:
                return int(file.read())
        except (OSError, ValueError):
            continue
    return None


def _read(root: str, names: Sequence[str], word: str) -> int:
    for name in names:
        try:
            with open(os.path.join(root, name)) as file:
                for line in file:
                    key, _, value = line.partition(" ")
                    if key == word:
                        return int(value)
        except (OSError, ValueError):
            continue
    return 0

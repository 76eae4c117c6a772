"""What this machine has. The one rule: measured once (its disk always), set by settings, never guessed upwards."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from runtime.launcher import disk

_QUERY_SECONDS = 10
_LEAST_ROOM_MIB = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """One GPU: its device number, its name for CUDA_VISIBLE_DEVICES, and its model."""

    index: int
    uuid: str
    model: str


def cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_mib() -> int:
    """The machine's memory."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) // 1024
    raise RuntimeError("/proc/meminfo has no MemTotal")


class Disk:
    """The disk under the runs, each of which may write `limit_mib`, or what it finds there, if that is less.

    Since who writes more is ended and pays, none begins where there is little. What is kept here is only what was said.
    """

    def __init__(self, folder: Path, limit_mib: int) -> None:
        self._folder = folder
        self._least = (min(limit_mib, _LEAST_ROOM_MIB) << 20) + disk.RESERVE_BYTES
        self._was_full = False

    def is_full(self) -> bool:
        """Whether no run may begin; the log has it once."""
        free = disk.free_bytes(self._folder)
        if free is None or free >= self._least:
            self._was_full = False
        elif not self._was_full:
            logger.warning("No run begins in %s: %d MiB are free on its disk.", self._folder, free >> 20)
            self._was_full = True
        return self._was_full


def gpus() -> tuple[Gpu, ...]:
    """The machine's NVIDIA GPUs, none where there is no working driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=index,uuid,name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_QUERY_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.split(", ", 2) for line in answer.stdout.splitlines() if line.strip()]
    return tuple(Gpu(int(index), uuid, model) for index, uuid, model in rows)

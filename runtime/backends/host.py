"""The CPUs, memory, GPUs and disk of this machine."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from runtime.launcher import disk

_NVIDIA_SMI_SECONDS = 30
"""How long nvidia-smi may take. Its full report needs a few seconds on a machine with eight GPUs."""
_MIN_FREE_MIB = 1024
"""Free space that a run needs to start, in addition to the disk's reserve: enough for logs and a small model. If
the backend's disk limit is lower, free space of that size is enough."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """One GPU: its index in nvidia-smi's list, its UUID (which CUDA_VISIBLE_DEVICES accepts), and its model.

    `device_number` is the number of its device file, /dev/nvidia<number>. It may differ from the index.
    """

    index: int
    uuid: str
    model: str
    device_number: int


def cpus() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_mib() -> int:
    """Return the machine's memory in MiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) // 1024
    raise RuntimeError("/proc/meminfo has no MemTotal")


class Disk:
    """The disk that holds the runs' folders. `limit_mib` is the disk limit of a run whose spec sets none.

    A customer pays for a run that fills the disk. So no run may start on a disk that other runs have almost filled.
    """

    def __init__(self, folder: Path, limit_mib: int) -> None:
        self._folder = folder
        # When only the reserve is free, the disk counts as full, and the runs that write to it are ended.
        self._min_free_bytes = (min(limit_mib, _MIN_FREE_MIB) << 20) + disk.RESERVE_BYTES
        self._was_full = False

    def is_full(self) -> bool:
        """Return whether too little is free to start a run. Logs a warning when that becomes true."""
        free = disk.free_bytes(self._folder)
        # Unknown free space (None) is no reason to refuse runs.
        if free is None or free >= self._min_free_bytes:
            self._was_full = False
        elif not self._was_full:
            logger.warning("No run starts in %s: only %d MiB are free on its disk.", self._folder, free >> 20)
            self._was_full = True
        return self._was_full


def gpus() -> tuple[Gpu, ...]:
    """Return the machine's NVIDIA GPUs; none without a working driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        table = _run(tool, "--query-gpu=index,uuid,name", "--format=csv,noheader")
        device_numbers = _device_numbers(_run(tool, "-q"))
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.split(", ", 2) for line in table.splitlines() if line.strip()]
    return tuple(
        # The driver of Windows Subsystem for Linux reports no device number.
        Gpu(int(index), uuid, model, device_numbers.get(uuid, int(index)))
        for index, uuid, model in rows
    )


def _run(*command: str) -> str:
    """Return the output of nvidia-smi. Raises OSError, subprocess.SubprocessError."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True
    ).stdout  # fmt: skip


def _device_numbers(report: str) -> dict[str, int]:
    """Return the device number of each GPU by UUID, from the report of `nvidia-smi -q`. The table has none."""
    numbers, uuid = {}, ""
    for name, _, value in (line.partition(":") for line in report.splitlines()):
        if name.strip() == "GPU UUID":
            uuid = value.strip()
        elif name.strip() == "Minor Number" and value.strip().isdigit():
            numbers[uuid] = int(value)
    return numbers

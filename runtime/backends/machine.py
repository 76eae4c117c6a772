"""What this machine has. The one rule: measured once, overridable by settings, never guessed upwards."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_QUERY_SECONDS = 10


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

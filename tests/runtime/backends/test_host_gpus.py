"""The GPUs of a machine, as a stand-in for nvidia-smi reports them."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.backends import host
from runtime.backends.slurm import node

NVIDIA_SMI = """#!/bin/sh
if [ "$1" = -q ]; then
  cat <<'REPORT'
GPU 00000000:17:00.0
    GPU UUID                                  : GPU-a
    Minor Number                              : 1
GPU 00000000:65:00.0
    GPU UUID                                  : GPU-b
    Minor Number                              : 0
GPU 00000000:CA:00.0
    GPU UUID                                  : GPU-c
    Minor Number                              : N/A
REPORT
else
  printf '0, GPU-a, NVIDIA H100\\n1, GPU-b, NVIDIA H100\\n2, GPU-c, NVIDIA H100\\n'
fi
"""


@pytest.fixture(autouse=True)
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in on the PATH. Its first two GPUs have other device numbers than indices."""
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_a_gpu_has_the_number_of_its_device_file_which_may_differ_from_its_index() -> None:
    assert [(gpu.index, gpu.uuid, gpu.device_number) for gpu in host.gpus()] == [
        (0, "GPU-a", 1),
        (1, "GPU-b", 0),
        (2, "GPU-c", 2),  # WSL's driver reports no device number, so the index is used
    ]


@pytest.mark.parametrize("visible", ["0", "GPU-a"])
def test_a_slurm_task_gets_the_device_file_of_its_own_gpu(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert node._own_gpus(1) == {"GPU-a": 1}
    with pytest.raises(node.GpusMissing, match=f"1 of its 2 GPUs.*{visible}"):
        node._own_gpus(2)

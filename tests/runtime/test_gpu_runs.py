"""Runs on this machine's NVIDIA GPUs; skipped without one. They need the image pytorch in its CUDA flavour."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from jobs.diagnosis import diagnose, evidence_of
from runtime.backends import host
from runtime.errors import NoCapacity
from runtime.launcher.telemetry.gpus import Gpus
from runtime.specs import Outcome, Resources
from tests.runtime.backends import hostile
from tests.runtime.backends.contract import WAIT
from tests.runtime.images_of_ours import EXAMPLES, use_image

GPUS = host.gpus()
ALL = Resources(cpus=4, memory_mib=16384, gpus=len(GPUS))
"""A node with every GPU. A process that uses CUDA needs some gigabytes of memory besides the GPU's."""
RUN_SECONDS = 240
"""How long a run may take: the first use of CUDA on a machine takes half a minute."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.cores(4),
    pytest.mark.skipif(not GPUS, reason="This machine has no NVIDIA GPU"),
]


@pytest.fixture
def gpu_harness(harness):
    """A harness whose runs use the image pytorch and all GPUs, with one process for each."""
    use_image(harness, "pytorch")
    harness.patience = harness.deadline_seconds = RUN_SECONDS
    harness.resources = ALL
    return harness


def usage(harness):
    """Return the GPUs' values in each sample of a run of one node."""
    lines = harness.backend.samples("job-1-1", 0, limit=1 << 24).text.splitlines()
    return [gpu for line in lines for gpu in json.loads(line)["gpus"] or []]


def cause(harness, failure):
    """Return the name of the cause that the job page would show for this failure of rank 0."""
    return diagnose(evidence_of("code_failed", dataclasses.asdict(failure), harness.log())).cause


def test_the_driver_reports_each_gpu_with_its_device_file_and_its_usage():
    assert all(Path(f"/dev/nvidia{gpu.device_number}").exists() for gpu in GPUS)
    gpus = Gpus([gpu.uuid for gpu in GPUS])
    values = [gpus.read_gpu(index, handle) for index, handle in gpus.open_handles().items()]
    assert [each.gpu for each in values] == list(range(len(GPUS)))
    for each in values:
        assert each.utilization is not None
        assert 0 <= each.utilization <= 100
        assert 0 <= each.memory < each.memory_total
        assert each.memory_total > 1 << 30
        assert each.power is None or 1 < each.power < 2000
        assert 0 < each.temperature < 120


@pytest.mark.parametrize("how", ["cold", "warm"])
def test_each_rank_has_a_gpu_and_meets_the_others_over_nccl(gpu_harness, how):
    if how == "warm":
        hostile.warm(gpu_harness)
    script = """
    import os, torch, torch.distributed as dist
    dist.init_process_group(os.environ["BACKEND"])
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    total = torch.full((1 << 20,), 1.0 + dist.get_rank(), device=gpu)
    dist.all_reduce(total)
    print(dist.get_backend(), int(total[-1]), torch.cuda.device_count(), torch.cuda.get_device_name(gpu), sep=", ")
    print("forked:", "forkserver" in open("/proc/self/cmdline").read())
    dist.destroy_process_group()
    """
    gpu_harness.complete(script, workers_per_node=len(GPUS))
    for rank, gpu in enumerate(GPUS):
        lines = gpu_harness.log(rank).splitlines()
        assert f"nccl, {len(GPUS) * (len(GPUS) + 1) // 2}, {len(GPUS)}, {gpu.model}" in lines
        assert f"forked: {how == 'warm'}" in lines


def test_a_run_without_gpus_cannot_use_one(gpu_harness):
    script = """
    import os
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    import glob, torch
    print(torch.cuda.is_available(), glob.glob("/dev/nvidia*"))
    torch.zeros(1, device="cuda")
    """
    failure = gpu_harness.run_to_failure(Outcome.CODE_FAILED, script, resources=Resources(cpus=4, memory_mib=16384))
    assert gpu_harness.log().startswith("False []\n")
    assert cause(gpu_harness, failure) == "no_gpu"


def test_a_gpu_has_one_run_at_a_time(gpu_harness):
    backend = gpu_harness.backend
    gpu_harness.submit(WAIT)
    second = gpu_harness.spec("print('ran')", name="job-2-1")
    with pytest.raises(NoCapacity):
        backend.submit(second)
    assert [machine.free.gpus for machine in backend.capacity().machines] == [0]
    backend.delete("job-1-1")
    assert [machine.free.gpus for machine in backend.capacity().machines] == [len(GPUS)]
    gpu_harness.complete("print('ran')", name="job-2-1")


def test_the_nodes_samples_show_the_load_and_memory_of_its_gpus(gpu_harness, record_property):
    script = """
    import torch
    held = torch.ones(1 << 30, device="cuda")  # 4 GiB
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    while True:
        for _ in range(50): a = (a @ a).clamp(-1, 1)
        torch.cuda.synchronize()
    """
    gpu_harness.submit(script, workers_per_node=1, hang_seconds=5)
    # It prints nothing for three times the seconds after which a run without progress counts as hung.
    gpu_harness.wait("job-1-1", lambda _status: sum(gpu["utilization"] > 50 for gpu in usage(gpu_harness)) >= 8)
    busiest = max(usage(gpu_harness), key=lambda gpu: (gpu["utilization"], gpu["memory"]))
    record_property("busiest sample", busiest)
    assert busiest["memory"] > 4 << 30
    gpu_harness.backend.stop("job-1-1", 1)
    gpu_harness.wait_for_outcome(Outcome.STOPPED)


def test_a_rank_that_waits_for_its_gpu_for_ever_is_hung(gpu_harness, record_property):
    script = """
    import torch
    print("begun", flush=True)
    while True:
        torch.cuda._sleep(1 << 40)  # some minutes
        torch.cuda.synchronize()
    """
    gpu_harness.run_to_failure(Outcome.HUNG, script, workers_per_node=1, hang_seconds=5)
    record_property("last sample", usage(gpu_harness)[-1:])
    assert 'train.py", line 6' in gpu_harness.backend.stacks("job-1-1")[0]


def test_memory_that_the_gpu_does_not_have_is_named(gpu_harness):
    script = "import torch; torch.empty(1 << 42, dtype=torch.uint8, device='cuda')"
    failure = gpu_harness.run_to_failure(Outcome.CODE_FAILED, script, workers_per_node=1)
    assert cause(gpu_harness, failure) == "gpu_out_of_memory"


def test_ddp_on_a_gpu_is_timed_step_by_step_and_an_example_learns(gpu_harness, digits, record_property):
    for script in EXAMPLES.glob("*.py"):
        shutil.copy(script, gpu_harness.workspace)
    shutil.unpack_archive(digits, gpu_harness.dataset, filter="data")
    gpu_harness.complete("", script="mnist_ddp.py", workers_per_node=len(GPUS), lr="0.02", epochs=40, batch_size=32)
    accuracy = float(re.search(r"result: test accuracy ([\d.]+)", gpu_harness.log())[1])
    assert accuracy > 0.9
    lines = gpu_harness.backend.samples("job-1-1", 0, limit=1 << 24).text.splitlines()
    ranks = [rank for line in lines for rank in json.loads(line)["ranks"]]
    record_property("last sample", ranks[-1:])
    assert sum(rank["steps"] for rank in ranks) > 40
    assert all(rank["comm_seconds"] is None or rank["comm_seconds"] <= rank["step_seconds"] for rank in ranks)

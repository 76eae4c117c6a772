"""Obstacles of third-party scripts: rows of the table in docs/compatibility.md."""

import re

import pytest

from runtime.specs import Outcome
from tests.runtime.images_of_ours import use_image

pytestmark = pytest.mark.late("its runs are real processes, with time limits of seconds")

SUM_OF_RANKS = """
import os
import subprocess
import sys
import torch
import torch.distributed as dist

def main(rank, size):
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    print(f"rank {rank} of {size}: {total.item()}", flush=True)
    dist.destroy_process_group()
"""
STARTS_RANKS = {
    "spawn": """
def worker(rank):
    address = "tcp://127.0.0.1:" + os.environ["MASTER_PORT"]
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    main(rank, 2)

if __name__ == "__main__":
    torch.multiprocessing.spawn(worker, nprocs=2)
""",
    "torchrun": """
if len(sys.argv) > 1:
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
else:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, __file__, "rank"], check=True)
""",
}
HOME = """
import pathlib
note = pathlib.Path.home() / ".cache" / "note"
print(note.exists())
note.parent.mkdir(exist_ok=True)
note.write_text("here")
"""


def test_no_shell_expands_arguments(harness):
    harness.run("import sys\nprint(sys.argv[1:])", arguments=("--data-dir", "$DATASETS_PATH/digits"))
    assert harness.log() == "['--data-dir', '$DATASETS_PATH/digits']\n"


def test_each_run_has_a_home_of_its_own(harness):
    for name in ("job-1-1", "job-2-1"):
        harness.complete(HOME, name=name)
        assert harness.log(name=name) == "False\n"


@pytest.mark.torch
def test_nccl_needs_gpus(stage, node):
    use_image(stage, "pytorch")
    source = "import torch.distributed as dist\ndist.init_process_group('nccl')\n"
    stage.run_to_failure(Outcome.CODE_FAILED, source, resources=node)
    assert "NCCL" in stage.log()


@pytest.mark.slow
@pytest.mark.cores(2)
@pytest.mark.torch
@pytest.mark.parametrize("way", STARTS_RANKS)
def test_one_process_may_start_its_own_ranks(stage, node, way):
    use_image(stage, "pytorch")
    stage.complete(SUM_OF_RANKS + STARTS_RANKS[way], resources=node, deadline_seconds=240)
    # Both write to one log: their lines may run into each other.
    assert sorted(re.findall(r"rank \d of 2: \d", stage.log())) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]

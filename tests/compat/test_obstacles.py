"""Obstacles of third-party scripts: rows of the table in docs/compatibility.md."""

import re

import pytest

from tests.runtime.images_of_ours import use_image

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")

STARTS_RANKS = """
import os
import subprocess
import sys
import torch
import torch.distributed as dist

def main(way, rank, size):
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    print(f"{way}: rank {rank} of {size}: {total.item()}", flush=True)
    dist.destroy_process_group()

def worker(rank):
    address = "tcp://127.0.0.1:" + os.environ["MASTER_PORT"]
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    main("spawn", rank, 2)

if len(sys.argv) > 1:
    dist.init_process_group("gloo")
    main("torchrun", dist.get_rank(), dist.get_world_size())
elif __name__ == "__main__":
    torch.multiprocessing.spawn(worker, nprocs=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, __file__, "rank"], check=True)
"""
"""Starts two ranks by `spawn`. Then torchrun starts two, which run this script with an argument. The sum is 1 + 2."""
WRITES_HOME = """
import pathlib, sys
note = pathlib.Path.home() / ".cache" / "note"
print(note.exists(), sys.argv[1:])
note.parent.mkdir(exist_ok=True)
note.write_text("here")
"""
"""Prints whether an earlier run's file is in its home, and its arguments. Then it writes that file."""


def test_each_run_has_a_home_of_its_own_and_no_shell_expands_its_arguments(harness):
    # Without `expands_arguments`, the launcher does not expand them either.
    for name in ("job-1-1", "job-2-1"):
        harness.complete(WRITES_HOME, name=name, arguments=("--data-dir", "$DATASETS_PATH/digits"))
        assert harness.log(name=name) == "False ['--data-dir', '$DATASETS_PATH/digits']\n"


@pytest.mark.slow
@pytest.mark.cores(2)
@pytest.mark.torch
def test_one_process_may_start_its_own_ranks(stage, node):
    use_image(stage, "pytorch")
    stage.complete(STARTS_RANKS, resources=node, deadline_seconds=240)
    # Ranks write to one log: their lines may run into each other.
    found = re.findall(r"(\w+): rank (\d) of 2: 3", stage.log())
    assert sorted(found) == [("spawn", "0"), ("spawn", "1"), ("torchrun", "0"), ("torchrun", "1")]

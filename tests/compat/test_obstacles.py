"""What scripts run into: each row of the table in docs/compatibility.md, as it goes."""

from __future__ import annotations

import re

import pytest

from runtime.specs import Outcome, Resources
from tests.compat.conftest import Stage
from tests.runtime.conftest import Yard

SUM_OF_RANKS = """
import os
import torch
import torch.distributed as dist

def main(rank, size):
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    print(f"rank {rank} of {size}: {total.item()}", flush=True)
    dist.destroy_process_group()
"""
STARTS_RANKS = {
    "spawn": SUM_OF_RANKS
    + """
def worker(rank):
    address = "tcp://127.0.0.1:" + os.environ["MASTER_PORT"]
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    main(rank, 2)

if __name__ == "__main__":
    torch.multiprocessing.spawn(worker, nprocs=2)
""",
    "torchrun": SUM_OF_RANKS
    + """
import subprocess, sys

if len(sys.argv) > 1:
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
else:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, __file__, "rank"], check=True)
""",
}


def test_arguments_are_words_and_no_shell_reads_them(yard: Yard) -> None:
    yard.run("import sys\nprint(sys.argv[1:])", arguments=("--data-dir", "$DATASETS_PATH/digits"))
    assert yard.log() == "['--data-dir', '$DATASETS_PATH/digits']\n"


def test_the_home_is_a_runs_own(yard: Yard) -> None:
    script = """
    import pathlib
    note = pathlib.Path.home() / ".cache" / "note"
    print(note.exists())
    note.parent.mkdir(exist_ok=True)
    note.write_text("here")
    """
    for name in ("job-1-1", "job-2-1"):
        assert yard.run(script, name=name).outcome is Outcome.COMPLETED, yard.all_logs(name)
        assert yard.log(name=name) == "False\n"


@pytest.mark.torch
def test_nccl_is_not_there_without_gpus(stage: Stage, node: Resources) -> None:
    status = stage.end("pytorch", "import torch.distributed as dist\ndist.init_process_group('nccl')\n", resources=node)
    assert status.outcome is Outcome.CODE_FAILED
    assert "NCCL" in stage.log()


@pytest.mark.torch
@pytest.mark.parametrize("how", STARTS_RANKS)
def test_one_process_may_start_ranks_of_its_own(stage: Stage, node: Resources, how: str) -> None:
    status = stage.end("pytorch", STARTS_RANKS[how], resources=node)
    assert status.outcome is Outcome.COMPLETED, stage.log()
    # Both write to the one log: their lines may run into each other.
    assert sorted(re.findall(r"rank \d of 2: \d", stage.log())) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]

"""Three real hangs, end to end. Recorded runs are replayed in `test_hang_traces.py`."""

import pytest

from runtime.specs import FailureCode, Outcome, Resources
from tests.runtime.backends import hostile
from tests.runtime.images_of_ours import use_image

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")

HANG_SECONDS = 6
"""How long the runs here may show no progress."""
STUCK = """
    import os, signal, subprocess, sys, threading, time
    lock = threading.Lock()
    def update_weights():
        with lock:
            with lock:
                pass
    for _ in range(3):
        time.sleep(1)
        print("last", time.time(), flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("goodbye", flush=True)))
    rank = int(os.environ["RANK"])
    if rank == 0: subprocess.run(["sleep", "1000"])
    if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
    update_weights()
"""
"""Rank 0 waits for a program, rank 1 is stopped, ranks 2 and 3 are deadlocked."""
SPIN = """
    import os, sys, time
    from pathlib import Path
    # A stand-in for torch: functions that wait are known by the names of their files.
    folder = Path(os.environ["RUN_DIR"], os.environ["RANK"], "torch", "distributed")
    folder.mkdir(parents=True)
    for package in (folder.parent, folder): (package / "__init__.py").touch()
    (folder / "distributed_c10d.py").write_text("def all_reduce():\\n    while True: pass\\n")
    sys.path.insert(0, str(folder.parent.parent))
    from torch.distributed.distributed_c10d import all_reduce
    print("working", flush=True)
    all_reduce()
"""
"""Every rank computes for ever in a function that waits for the other ranks."""
SKIP = """
    import time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(50):
        if step == 30 and dist.get_rank() == 2: time.sleep(1000)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
"""
"""Rank 2 stays away from the collective of step 30."""


def hang(harness, source, **changes):
    """Run a script that hangs on two nodes, and return its failure."""
    settings = {"nodes": 2, "hang_seconds": HANG_SECONDS, "deadline_seconds": 100, **changes}
    failure = harness.run_to_failure(Outcome.HUNG, source, **settings)
    assert failure.code is FailureCode.HUNG
    assert failure.message.startswith("No sign of progress for ")
    assert failure.data["seconds"] >= HANG_SECONDS
    return failure


def seconds_without_progress(harness):
    """Seconds from the last sign of progress, to which a hang is billed, to the end."""
    status = harness.backend.describe("job-1-1")
    assert status.started_at <= status.progress_at
    return status.finished_at - status.progress_at


def test_a_hang_is_dated_to_its_last_output_and_shows_what_every_rank_does(harness):
    failure = hang(harness, STUCK, workers_per_node=2)
    last = max(float(line.split()[1]) for rank in range(4) for line in harness.log(rank).splitlines() if "last" in line)
    assert abs(failure.data["progress_at"] - last) < 3
    assert abs((harness.backend.describe("job-1-1").progress_at or 0) - last) < 3
    assert seconds_without_progress(harness) >= HANG_SECONDS - 1
    assert "goodbye" in harness.log(0), "output after the verdict is no progress"
    stacks = harness.backend.stacks("job-1-1")
    assert sorted(stacks) == [0, 1, 2, 3]
    assert "Other processes of this rank:" in stacks[0]
    assert "(sleep), sleeping" in stacks[0]
    assert "No stack could be taken: the process is stopped (SIGSTOP)" in stacks[1]
    for text in (stacks[2], stacks[3]):
        assert '"/workspace/train.py", line 6 in update_weights' in text
        assert "Threads, as the kernel sees them:" in text
        assert "rank.py" not in text, "the platform's own frames are left out"


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_at_full_speed_hang(harness):
    failure = hang(harness, SPIN)
    assert "Every rank waits for the others." in failure.message
    assert "in all_reduce" in harness.backend.stacks("job-1-1")[1]
    assert seconds_without_progress(harness) < HANG_SECONDS, "the CPU time of a hang is billed"


@pytest.mark.slow
@pytest.mark.cores(2)
@pytest.mark.torch
def test_a_rank_that_skips_a_collective_is_named(harness):
    use_image(harness, "pytorch")
    hostile.warm(harness)  # so that one process imports torch, not four
    failure = hang(
        harness, SKIP, workers_per_node=2, resources=Resources(cpus=2, memory_mib=4096), deadline_seconds=120
    )
    stacks = harness.backend.stacks("job-1-1")
    assert sorted(stacks) == [0, 1, 2, 3]
    # While autograd runs, DistributedDataParallel waits for the gradients of all ranks. Rank 2 never gets there.
    assert ["in _engine_run_backward" in stacks[rank] for rank in range(4)] == [True, True, False, True]
    assert (failure.rank, failure.node) == (2, 1)
    assert "Ranks 0, 1, 3 wait for the others; rank 2 does not: it is in train.py" in failure.message

"""Runs that hang are found, shown where they stand and ended; runs that are only slow are left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from runtime.specs import FailureCode, Framework, Outcome, Resources, RunPhase, RunStatus
from tests.runtime.images_of_ours import use_image

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

HANG_SECONDS = 6


def hung(yard: Yard, source: str, **changes: object) -> RunStatus:
    """Run a script that hangs; the status once it was found. Nothing else ends it in time."""
    status = yard.run(source, **{"hang_seconds": HANG_SECONDS, "deadline_seconds": 60, **changes})
    assert status.outcome is Outcome.HUNG, f"{status}\n{yard.all_logs('job-1-1')}"
    assert status.failure is not None
    assert status.failure.code is FailureCode.HUNG
    assert status.failure.message.startswith("No sign of progress for ")
    assert [node.phase for node in status.nodes] == [RunPhase.ENDED] * len(status.nodes)
    return status


def stood_still(status: RunStatus) -> float:
    """Seconds between the last sign of progress and the end."""
    assert status.progress_at is not None
    assert status.finished_at is not None
    return status.finished_at - status.progress_at


LOCKED = """
    import threading
    print("working", flush=True)
    lock = threading.Lock()
    def update_weights():
        with lock:
            with lock:
                pass
    update_weights()
"""


def test_a_deadlock_is_found_and_shown_on_every_rank(yard: Yard) -> None:
    status = hung(yard, LOCKED, nodes=2, workers_per_node=2)
    stacks = yard.backend.stacks("job-1-1")
    assert sorted(stacks) == [0, 1, 2, 3]
    for text in stacks.values():
        assert '"/workspace/train.py", line 7 in update_weights' in text
        assert "Threads, as the kernel sees them:" in text
        assert "rank.py" not in text, "what is ours is left out"
    assert stood_still(status) >= HANG_SECONDS - 1
    assert status.started_at is not None
    assert status.progress_at is not None
    assert status.progress_at >= status.started_at


def test_progress_is_dated_to_the_last_sign(yard: Yard) -> None:
    script = """
        import os, signal, time
        for _ in range(3):
            time.sleep(1)
            print("last", time.time(), flush=True)
        while True: signal.pause()
    """
    status = hung(yard, script, nodes=2)
    last = max(float(line.split()[1]) for rank in (0, 1) for line in yard.log(rank).splitlines())
    assert status.progress_at is not None
    assert abs(status.progress_at - last) < 3
    assert status.failure is not None
    assert abs(status.failure.data["progress_at"] - last) < 3
    assert status.failure.data["seconds"] >= HANG_SECONDS


def test_what_a_rank_says_when_it_is_ended_is_no_progress(yard: Yard) -> None:
    script = """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("goodbye", flush=True)))
        print("working", flush=True)
        while True: signal.pause()
    """
    status = hung(yard, script, nodes=2)
    assert "goodbye" in yard.log(1)
    assert stood_still(status) >= HANG_SECONDS - 1


def test_a_background_thread_that_ticks_on_is_no_progress(yard: Yard) -> None:
    # What Horovod's thread does: it wakes up all the time and finds nothing to do.
    script = """
        import signal, threading, time
        def spin():
            while True:
                until = time.thread_time() + 0.00003
                while time.thread_time() < until: pass
                time.sleep(0.001)
        threading.Thread(target=spin, daemon=True).start()
        print("working", flush=True)
        while True: signal.pause()
    """
    hung(yard, script, nodes=2)
    assert "in spin" in yard.backend.stacks("job-1-1")[1], "every thread is shown"


def test_a_stopped_rank_is_told_from_those_that_wait_for_it(yard: Yard) -> None:
    script = """
        import os, pathlib, signal
        (pathlib.Path(os.environ["RUN_DIR"]) / os.environ["RANK"]).touch()
        print("working", flush=True)
        if os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGSTOP)
        while True: signal.pause()
    """
    hung(yard, script, nodes=2)
    stacks = yard.backend.stacks("job-1-1")
    assert "train.py" in stacks[0]
    assert "stopped by a signal" in stacks[1]
    assert "No stack could be taken: the process is stopped (SIGSTOP)" in stacks[1]


@pytest.mark.parametrize(
    ("trick", "why"),
    [
        ("os.execv('/bin/sleep', ['sleep', '1000'])", "no longer runs the interpreter"),
        ("os.closerange(3, 256)", "has closed the pipe"),
        ("signal.signal(50, signal.SIG_IGN)", "No stack could be taken"),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, {50})", "does not let the signal through"),
    ],
)
def test_code_that_hides_where_it_stands_is_ended_all_the_same(yard: Yard, trick: str, why: str) -> None:
    script = f"""
        import os, signal
        print("working", flush=True)
        {trick}
        while True: signal.pause()
    """
    hung(yard, script)
    assert why in yard.backend.stacks("job-1-1")[0]


def test_other_processes_of_a_rank_are_shown(yard: Yard) -> None:
    script = """
        import subprocess
        print("working", flush=True)
        subprocess.run(["sleep", "1000"])
    """
    hung(yard, script)
    text = yard.backend.stacks("job-1-1")[0]
    assert "Other processes of this rank:" in text
    assert "(sleep), sleeping" in text


def test_a_run_that_is_not_watched_is_left_alone(yard: Yard) -> None:
    status = yard.run(LOCKED, hang_seconds=0, deadline_seconds=14, grace_seconds=1)
    assert status.outcome is Outcome.TIME_LIMIT
    assert yard.backend.stacks("job-1-1") == {}


# What waits for a GPU or a peer may compute all the while. Stands in for torch, whose files it is named like.
SPINNING = """
    import os, sys, time
    from pathlib import Path
    folder = Path(os.environ["RUN_DIR"], os.environ["RANK"], "torch", "distributed")
    folder.mkdir(parents=True)
    for package in (folder.parent, folder): (package / "__init__.py").touch()
    (folder / "distributed_c10d.py").write_text(
        "def all_reduce(until):\\n    import time\\n    while time.monotonic() < until: pass\\n"
    )
    sys.path.insert(0, str(folder.parent.parent))
    from torch.distributed.distributed_c10d import all_reduce
    print("working", flush=True)
    def train(until):
        if os.environ["RANK"] in WAITING: all_reduce(until)
        else:
            while time.monotonic() < until: pass
    train(time.monotonic() + SECONDS)
"""


def test_ranks_that_wait_for_each_other_at_full_speed_hang(yard: Yard) -> None:
    status = hung(yard, SPINNING.replace("WAITING", "'01'").replace("SECONDS", "1000"), nodes=2, deadline_seconds=100)
    assert status.failure is not None
    assert "Every rank waits for the others." in status.failure.message
    assert "in all_reduce" in yard.backend.stacks("job-1-1")[1]
    assert stood_still(status) < HANG_SECONDS, "cores in use are paid for, whatever the code calls what they do"
    assert status.failure.data["seconds"] >= HANG_SECONDS


def test_ranks_that_wait_for_one_that_computes_are_left_alone(yard: Yard) -> None:
    script = SPINNING.replace("WAITING", "'0'").replace("SECONDS", str(3 * HANG_SECONDS))
    status = yard.run(script, nodes=2, hang_seconds=HANG_SECONDS, deadline_seconds=100)
    assert status.outcome is Outcome.COMPLETED


# Slow, but healthy


def test_a_rank_that_has_finished_is_not_waited_for(yard: Yard) -> None:
    script = """
        import os, signal
        print("working", flush=True)
        if os.environ["RANK"] == "1": raise SystemExit
        while True: signal.pause()
    """
    hung(yard, script, nodes=2)
    assert sorted(yard.backend.stacks("job-1-1")) == [0]


# Real collectives


SKIPS = {
    "pytorch": """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(50):
            if step == 30 and dist.get_rank() == 2:
                print("skipping", flush=True)
                dist.barrier()
            dist.all_reduce(torch.ones(1000))
        print("never", flush=True)
        """,
    "ddp": """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(50):
            if step == 30 and dist.get_rank() == 2:
                print("skipping", flush=True)
                time.sleep(1000)
            optimizer.zero_grad()
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
        """,
    "horovod": """
        import time, torch
        import horovod.torch as hvd
        hvd.init()
        for step in range(50):
            if step == 30 and hvd.rank() == 2:
                print("skipping", flush=True)
                time.sleep(1000)
            hvd.allreduce(torch.ones(1000), name="gradient")
        """,
    "tensorflow": """
        import json, os, time
        import tensorflow as tf
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope(): weight = tf.Variable(1.0)
        def add(): return tf.distribute.get_replica_context().all_reduce("sum", weight * 1.0)
        step = tf.function(lambda: strategy.run(add))
        for number in range(50):
            if number == 30 and json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 2:
                print("skipping", flush=True)
                time.sleep(1000)
            step()
        """,
}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("what", "image", "call"),
    [
        ("pytorch", "pytorch", "in all_reduce"),
        ("ddp", "pytorch", "in _engine_run_backward"),
        ("horovod", "horovod", "in synchronize"),
        ("tensorflow", "tensorflow", "in quick_execute"),
    ],
)
def test_a_rank_that_skips_a_collective_is_named(yard: Yard, what: str, image: str, call: str) -> None:
    use_image(yard, image)
    status = hung(
        yard,
        SKIPS[what],
        framework=Framework(image),
        nodes=2,
        workers_per_node=2,
        resources=Resources(cpus=2, memory_mib=4096),
        deadline_seconds=120,
    )
    assert status.failure is not None
    stacks = yard.backend.stacks("job-1-1")
    assert sorted(stacks) == [0, 1, 2, 3]
    assert [call in stacks[rank] for rank in (0, 1, 3)] == [True] * 3
    if what == "pytorch":
        assert "in barrier" in stacks[2]
        assert "Every rank waits for the others." in status.failure.message
    else:
        assert (status.failure.rank, status.failure.node) == (2, 1)
        assert "Ranks 0, 1, 3 wait for the others; rank 2 does not: it is in train.py" in status.failure.message


@pytest.mark.torch
def test_a_run_in_which_everybody_waits_need_not_wait_for_the_longest_time(yard: Yard) -> None:
    use_image(yard, "pytorch")
    big = Resources(cpus=2, memory_mib=4096)
    source = SKIPS["pytorch"].replace('print("skipping"', 'time.sleep(2); print("skipping"')
    status = hung(yard, source, nodes=2, workers_per_node=2, resources=big, hang_seconds=120, deadline_seconds=110)
    assert status.failure is not None
    assert status.failure.data["seconds"] < 120

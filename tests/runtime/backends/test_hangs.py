"""Runs that hang are found, shown where they stand and ended; runs that are only slow are left alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.specs import FailureCode, Framework, Outcome, Resources, RunPhase, RunStatus
from tests.runtime.images_of_ours import use_image

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

HANG_SECONDS = 6
SLOW_SECONDS = 10
"""Longer than a run may seem to stand still: whoever finds no sign of life in such a phase raises a false alarm."""


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

HEALTHY = {
    "import": """
        import time
        until = time.monotonic() + SLOW
        while time.monotonic() < until: sum(range(1000))
        """,
    "evaluation": """
        # The first rank computes; the others wait for its word in a call without any end.
        import os, socket, time
        if os.environ["RANK"] == "0":
            server = socket.create_server(("127.0.0.1", 0))
            with open(os.environ["RUN_DIR"] + "/port.tmp", "w") as file: file.write(str(server.getsockname()[1]))
            os.rename(os.environ["RUN_DIR"] + "/port.tmp", os.environ["RUN_DIR"] + "/port")
            others = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
            until = time.monotonic() + SLOW
            while time.monotonic() < until: sum(range(1000))
            for other in others: other.send(b"!")
        else:
            while not os.path.exists(os.environ["RUN_DIR"] + "/port"): time.sleep(0.01)
            port = int(open(os.environ["RUN_DIR"] + "/port").read())
            assert socket.create_connection(("127.0.0.1", port)).recv(1) == b"!"
        """,
    "checkpoint": """
        import os, time
        piece, until = os.urandom(1 << 18), time.monotonic() + SLOW
        with open(os.path.join(os.environ["CHECKPOINT_DIR"], os.environ["RANK"]), "wb") as file:
            while time.monotonic() < until:
                file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                time.sleep(0.3)
        """,
    "loaders": """
        # Data comes from worker processes, each of which computes now and then.
        import multiprocessing, time
        def load(queue):
            for _ in range(SLOW * 2):
                until = time.process_time() + 0.1
                while time.process_time() < until: sum(range(1000))
                time.sleep(0.4)
            queue.put("batch")
        queue = multiprocessing.Queue()
        workers = [multiprocessing.Process(target=load, args=(queue,)) for _ in range(2)]
        for worker in workers: worker.start()
        assert [queue.get() for _ in workers] == ["batch"] * 2
        for worker in workers: worker.join()
        """,
    "output": """
        import time
        until = time.monotonic() + SLOW
        while time.monotonic() < until:
            print(".", end="", flush=True)
            time.sleep(2)
        """,
    "metrics": """
        import os, time
        until = time.monotonic() + SLOW
        while time.monotonic() < until:
            with open(os.environ["METRICS_FILE"], "a") as file: file.write('{"step": 1, "loss": 1.0}\\n')
            time.sleep(2)
        """,
    "bursts": """
        import time
        for _ in range(3):
            until = time.process_time() + 0.5
            while time.process_time() < until: sum(range(1000))
            time.sleep(3)
        """,
}


@pytest.mark.parametrize("what", HEALTHY)
def test_what_is_slow_but_healthy_is_left_alone(yard: Yard, what: str) -> None:
    script = HEALTHY[what].replace("SLOW", str(SLOW_SECONDS))
    status = yard.run(script, nodes=2, hang_seconds=HANG_SECONDS, deadline_seconds=120)
    assert status.outcome is Outcome.COMPLETED, f"{status}\n{yard.all_logs('job-1-1')}"
    assert yard.backend.stacks("job-1-1") == {}
    assert status.progress_at is not None
    assert status.finished_at is not None
    assert status.finished_at - status.progress_at < HANG_SECONDS


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


@pytest.mark.torch
@pytest.mark.parametrize("image", ["pytorch", "horovod"])
def test_an_evaluation_on_one_rank_is_left_alone(yard: Yard, image: str) -> None:
    script = """
        import os, time, torch
        if os.environ.get("HOROVOD_RANK"):
            import horovod.torch as hvd
            hvd.init()
            wait = lambda: hvd.allreduce(torch.ones(1))
        else:
            import torch.distributed as dist
            dist.init_process_group("gloo")
            wait = dist.barrier
        print("working", flush=True)
        wait()
        if os.environ["RANK"] == "0":
            torch.set_num_threads(1)
            until = time.monotonic() + SLOW
            with torch.no_grad():
                while time.monotonic() < until: torch.randn(256, 256) @ torch.randn(256, 256)
        wait()
    """
    use_image(yard, image)
    status = yard.run(
        script.replace("SLOW", str(2 * SLOW_SECONDS)),
        framework=Framework(image),
        nodes=2,
        workers_per_node=2,
        resources=Resources(cpus=2, memory_mib=4096),
        hang_seconds=HANG_SECONDS,
        deadline_seconds=120,
    )
    assert status.outcome is Outcome.COMPLETED, f"{status}\n{yard.all_logs('job-1-1')}"
    assert yard.backend.stacks("job-1-1") == {}


# Samples


def test_samples_tell_what_a_node_used(yard: Yard) -> None:
    script = """
        import os, time
        kept = bytearray(64 << 20)
        for at in range(0, len(kept), 4096): kept[at] = 1
        until = time.monotonic() + 6
        while time.monotonic() < until: sum(range(1000))
    """
    yard.run(script, nodes=2, workers_per_node=1, deadline_seconds=60)
    for node in (0, 1):
        samples = [json.loads(line) for line in yard.backend.samples("job-1-1", node).text.splitlines()]
        assert len(samples) >= 2
        sample = samples[0]
        assert 0.1 < sample["cpu"] < 2.5
        assert 64 << 20 < sample["memory"] < 512 << 20
        assert [rank["rank"] for rank in sample["ranks"]] == [node]
        assert sample["ranks"][0]["memory"] > 64 << 20
        assert sample["ranks"][0]["cpu"] == pytest.approx(sample["cpu"], abs=0.2)
        assert sample["gpus"] == []
        assert abs(sample["at"] - time.time()) < 600


def test_looking_costs_the_run_nothing_to_speak_of(yard: Yard) -> None:
    """The launcher's own CPU time, read from outside while a run idles along; the figure is in docs/performance.md."""
    script = """
        import os, subprocess, time
        children = [subprocess.Popen(["sleep", "1000"]) for _ in range(8)]
        print("ready", flush=True)
        until = time.monotonic() + 14
        while time.monotonic() < until: sum(range(1000))
        for child in children: child.kill()
    """
    yard.backend.submit(yard.spec(script, workers_per_node=2, deadline_seconds=60))
    yard.wait_for_text("ready")
    launcher = _launcher(yard.records()[0]["pid"])
    begun, used = time.monotonic(), _cpu_seconds(launcher)
    yard.wait("job-1-1", lambda _status: time.monotonic() - begun > 10)
    share = (_cpu_seconds(launcher) - used) / (time.monotonic() - begun)
    assert share < 0.01, "an amount of work, not a speed: CPU time of a process that nobody else's load adds to"
    assert yard.wait_for_end().outcome is Outcome.COMPLETED


def _launcher(supervisor: int) -> int:
    for _generation in range(2):
        supervisor = int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])
    return supervisor


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""Runs that are only slow, or end one rank after another, are left alone; and what it costs to look."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.specs import Framework, Outcome, Resources
from tests.runtime.images_of_ours import use_image

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

HANG_SECONDS = 6
SLOW_SECONDS = 10
"""Longer than a run may seem to stand still: whoever finds no sign of life in such a phase raises a false alarm."""

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

"""Time to start a run, and runs per minute: the platform compared with torchrun, horovodrun and Ray Jobs.

make bench NAME=launch (QUICK=1 for fewer rounds)

The first part measures from the request to the end of rank 0's first all-reduce, whose result is checked. For the
console, the request is the order. It measures cold and warm starts on 1, 2 and 4 nodes. In a warm start, ranks are
forked from an interpreter that has imported the framework. The second part counts the trivial runs that end in a
minute. They are ordered through the whole console (quote, hold, sandbox, receipt), and compared with Ray Jobs.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.baselines import FIRST_ALL_REDUCE_FILE, PlainLaunches, RayJobs
from bench.console_runs import ConsoleRuns
from bench.environment import ROOT, images_root
from bench.local import LocalRuns
from bench.rounds import Variant, is_quick, measure, print_result, print_table, ratio, summaries, summary
from runtime.images.venvs import is_ready
from runtime.specs import Framework

TORCH_ALL_REDUCE = f"""\
import os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group(os.environ.get("BACKEND", "gloo"))
total = torch.ones(1)
dist.all_reduce(total)
ended_at = time.time()
assert total.item() == dist.get_world_size() > 1
if dist.get_rank() == 0:
    pathlib.Path(os.environ["RUN_DIR"], "{FIRST_ALL_REDUCE_FILE}").write_text(repr(ended_at))
dist.destroy_process_group()
"""
HOROVOD_ALL_REDUCE = f"""\
import os, pathlib, time
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
ended_at = time.time()
assert total.item() == hvd.size() > 1
if hvd.rank() == 0:
    pathlib.Path(os.environ["RUN_DIR"], "{FIRST_ALL_REDUCE_FILE}").write_text(repr(ended_at))
hvd.shutdown()
"""
TRIVIAL = "print(1)\n"
"""The script of a trivial run."""
CLIENTS = 8
"""Clients that order at once where throughput is measured; it is also measured with one client."""
GOALS = {"cold_vs_torchrun": 0.55, "warm_vs_torchrun": 0.1, "runs_per_minute_vs_ray": 5.0}
"""Goals of ratios. A time should be at most this share of the baseline's time, and throughput at least this multiple of
the baseline's throughput."""


class Launches:
    """The ways to launch a script. Each returns the seconds to the end of the first all-reduce."""

    def __init__(self, folder: Path, images: Path) -> None:
        self._cold = LocalRuns(folder / "cold", images)
        # The warm pool must outlast the other variants of a round, which run between two warm starts.
        self._warm = LocalRuns(folder / "warm", images, warm_seconds=600)
        for local in (self._cold, self._warm):
            (local.workspace / "reduce_pytorch.py").write_text(TORCH_ALL_REDUCE)
            (local.workspace / "reduce_horovod.py").write_text(HOROVOD_ALL_REDUCE)
        self._baselines = PlainLaunches(folder, images)

    def variants(self, console: ConsoleRuns, *, horovod: bool) -> list[Variant]:
        """Return every way to launch; those with Horovod only if its image is built."""
        variants = [Variant("console_1x2", lambda: console.first_all_reduce("reduce.py", 1, 2))]
        for nodes, workers in ((1, 2), (2, 1), (4, 1)):
            shape = f"{nodes}x{workers}"
            variants += [
                Variant(f"cold_{shape}", functools.partial(self._platform, self._cold, nodes, workers)),
                Variant(f"warm_{shape}", functools.partial(self._platform, self._warm, nodes, workers)),
                Variant(f"torchrun_{shape}", functools.partial(self._torchrun, nodes, workers)),
            ]
        if horovod:
            variants += [
                Variant("horovod_cold_1x2", lambda: self._platform(self._cold, 1, 2, Framework.HOROVOD)),
                Variant("horovod_warm_1x2", lambda: self._platform(self._warm, 1, 2, Framework.HOROVOD)),
                Variant("horovodrun_1x2", self._horovodrun),
            ]
        return variants

    def _platform(self, local: LocalRuns, nodes: int, workers: int, framework: Framework = Framework.PYTORCH) -> float:
        started_at = time.time()
        run_dir = local.run(f"reduce_{framework.value}.py", nodes, workers, framework)
        ended_at = float((run_dir / FIRST_ALL_REDUCE_FILE).read_text())
        local.delete_last()
        return ended_at - started_at

    def _torchrun(self, nodes: int, workers: int) -> float:
        started_at = time.time()
        return self._baselines.torchrun(self._cold.workspace / "reduce_pytorch.py", nodes, workers) - started_at

    def _horovodrun(self) -> float:
        started_at = time.time()
        return self._baselines.horovodrun(self._cold.workspace / "reduce_horovod.py", 2) - started_at


def runs_per_minute(run_all: Callable[[int, int], float], runs: int, clients: int) -> float:
    """Return how many trivial runs end in a minute. `run_all(runs, clients)` returns the seconds that they take."""
    return 60 * runs / run_all(runs, clients)


def main() -> None:
    """Measure, then print the tables and the JSON object."""
    images = images_root()
    rounds, runs = (3, 32) if is_quick() else (12, 96)
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as name:
        folder = Path(name)
        ray = RayJobs(ROOT / "var" / "bench")
        with ConsoleRuns(folder, images) as console:
            console.write("reduce.py", TORCH_ALL_REDUCE)
            console.write("trivial.py", TRIVIAL)
            launches = Launches(folder, images).variants(console, horovod=is_ready(images, "horovod"))
            seconds = measure(launches, rounds, "s")
            platforms = {"console": functools.partial(console.trivial_runs, "trivial.py"), "ray": ray.trivial_runs}
            per_minute = measure(
                [
                    Variant(f"{name}_{clients}_at_once", functools.partial(runs_per_minute, run_all, runs, clients))
                    for clients in (1, CLIENTS)
                    for name, run_all in platforms.items()
                ],
                1 if is_quick() else 3,
                "runs/min",
            )
    launch_seconds, throughput = summaries(seconds), summaries(per_minute)
    # The console's runs start warm too, so the difference is what the console adds.
    overhead = [console - warm for console, warm in zip(seconds["console_1x2"], seconds["warm_1x2"], strict=True)]
    print_table("launch to first all-reduce, s", launch_seconds)
    print_table("trivial runs a minute", throughput)
    ratios = {
        "cold_vs_torchrun": ratio(launch_seconds, "cold_1x2", "torchrun_1x2"),
        "cold_vs_torchrun_2_nodes": ratio(launch_seconds, "cold_2x1", "torchrun_2x1"),
        "cold_vs_torchrun_4_nodes": ratio(launch_seconds, "cold_4x1", "torchrun_4x1"),
        "warm_vs_torchrun": ratio(launch_seconds, "warm_1x2", "torchrun_1x2"),
        "runs_per_minute_vs_ray": ratio(throughput, f"console_{CLIENTS}_at_once", f"ray_{CLIENTS}_at_once"),
        "runs_per_minute_vs_ray_1_client": ratio(throughput, "console_1_at_once", "ray_1_at_once"),
    }
    if "horovodrun_1x2" in launch_seconds:
        ratios["cold_vs_horovodrun"] = ratio(launch_seconds, "horovod_cold_1x2", "horovodrun_1x2")
        ratios["warm_vs_horovodrun"] = ratio(launch_seconds, "horovod_warm_1x2", "horovodrun_1x2")
    for name, goal in GOALS.items():
        print(f"{name}: {ratios[name]} (goal: {'at least' if goal > 1 else 'at most'} {goal})")
    print_result("launch", {**launch_seconds, **throughput, "console_overhead_s": summary(overhead)}, ratios)


if __name__ == "__main__":
    main()

"""How soon a run starts, and how many start: ours beside torchrun, horovodrun and Ray Jobs.

make bench NAME=launch (QUICK=1 for fewer rounds)

The first part is the time from asking for the launch (for the console: sending the order) to rank 0's own note of the
moment its first all-reduce was done, whose result is checked: cold, and warm (ranks forked from an interpreter that has
imported the framework), on 1, 2 and 4 nodes. The second is the number of trivial runs that end in a minute, ordered
through the whole console (quote, hold, sandbox, receipt) beside Ray Jobs.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from bench.baselines import Bare, RayJobs
from bench.local import Local
from bench.rounds import Variant, conclude, is_quick, measure, ratio, summary, table
from bench.through_console import ThroughConsole
from runtime.backends.images import is_ready
from runtime.specs import Framework

HOUSE = Path(__file__).resolve().parent.parent
FIRST_ALL_REDUCE = """\
import os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group(os.environ.get("BACKEND", "gloo"))
total = torch.ones(1)
dist.all_reduce(total)
done = time.time()
assert total.item() == dist.get_world_size() > 1
if dist.get_rank() == 0:
    pathlib.Path(os.environ["RUN_DIR"], "first-all-reduce").write_text(repr(done))
dist.destroy_process_group()
"""
HOROVOD_ALL_REDUCE = """\
import os, pathlib, time
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
done = time.time()
assert total.item() == hvd.size() > 1
if hvd.rank() == 0:
    pathlib.Path(os.environ["RUN_DIR"], "first-all-reduce").write_text(repr(done))
hvd.shutdown()
"""
TRIVIAL = "print(1)\n"
NOTE = "first-all-reduce"
CLIENTS = 8
"""As many order at once, of both, where throughput is measured; beside it, one after another."""
GOALS = {"cold_vs_torchrun": 0.55, "warm_vs_torchrun": 0.1, "runs_per_minute_vs_ray": 10.0}


class Launches:
    """Every way to launch, each measured from the call to the first all-reduce."""

    def __init__(self, folder: Path, images_root: Path) -> None:
        self._folder = folder
        self._cold = Local(folder / "cold", images_root)
        self._warm = Local(folder / "warm", images_root, warm_seconds=600)
        for local in (self._cold, self._warm):
            (local.workspace / "reduce_pytorch.py").write_text(FIRST_ALL_REDUCE)
            (local.workspace / "reduce_horovod.py").write_text(HOROVOD_ALL_REDUCE)
        self._bare = Bare(folder, images_root)

    def variants(self, console: ThroughConsole, *, horovod: bool) -> list[Variant]:
        """The headlines on one node of two processes; then more nodes; then Horovod, where its image is built."""
        wanted = [Variant("console_1x2", lambda: console.first_all_reduce(1, 2))]
        for nodes, workers in ((1, 2), (2, 1), (4, 1)):
            shape = f"{nodes}x{workers}"
            wanted += [
                Variant(f"cold_{shape}", lambda n=nodes, w=workers: self._ours(self._cold, n, w)),  # type: ignore[misc] # mypy can't infer a lambda's defaults
                Variant(f"warm_{shape}", lambda n=nodes, w=workers: self._ours(self._warm, n, w)),  # type: ignore[misc] # as above
                Variant(f"torchrun_{shape}", lambda n=nodes, w=workers: self._torchrun(n, w)),  # type: ignore[misc] # as above
            ]
        if horovod:
            wanted += [
                Variant("horovod_cold_1x2", lambda: self._ours(self._cold, 1, 2, Framework.HOROVOD)),
                Variant("horovod_warm_1x2", lambda: self._ours(self._warm, 1, 2, Framework.HOROVOD)),
                Variant("horovodrun_1x2", self._horovodrun),
            ]
        return wanted

    def _ours(self, local: Local, nodes: int, workers: int, framework: Framework = Framework.PYTORCH) -> float:
        begun = time.time()
        done = float((local.run(f"reduce_{framework.value}.py", nodes, workers, framework) / NOTE).read_text())
        local.forget()
        return done - begun

    def _torchrun(self, nodes: int, workers: int) -> float:
        begun = time.time()
        return self._bare.torchrun(self._cold.workspace / "reduce_pytorch.py", nodes, workers) - begun

    def _horovodrun(self) -> float:
        begun = time.time()
        return self._bare.horovodrun(self._cold.workspace / "reduce_horovod.py", 2) - begun


def main() -> None:
    """Measure, print the tables, and the JSON object last."""
    images_root = Path(os.environ.get("TRAINYARD_IMAGES_ROOT", HOUSE / "var" / "images")).resolve()
    rounds, runs = (3, 32) if is_quick() else (12, 96)
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as name:
        folder = Path(name)
        ray = RayJobs(HOUSE / "var" / "bench")
        with ThroughConsole(folder, images_root) as console:
            console.write("reduce.py", FIRST_ALL_REDUCE)
            console.write("trivial.py", TRIVIAL)
            launches = Launches(folder, images_root).variants(console, horovod=is_ready(images_root, "horovod"))
            seconds = measure(launches, rounds, "s")
            per_minute = measure(
                [
                    Variant(f"{who}_{clients}_at_once", lambda c=clients, go=go: 60 * runs / go(runs, c))  # type: ignore[misc] # mypy can't infer a lambda's defaults
                    for clients in (1, CLIENTS)
                    for who, go in (("console", console.trivial_runs), ("ray", ray.seconds))
                ],
                1 if is_quick() else 3,
                "runs/min",
            )
    launched = {name: summary(figures) for name, figures in seconds.items()}
    ended = {name: summary(figures) for name, figures in per_minute.items()}
    overhead = [ours - bare for ours, bare in zip(seconds["console_1x2"], seconds["warm_1x2"], strict=True)]
    table("launch to first all-reduce, s", launched)
    table("trivial runs a minute", ended)
    ratios = {
        "cold_vs_torchrun": ratio(launched, "cold_1x2", "torchrun_1x2"),
        "cold_vs_torchrun_2_nodes": ratio(launched, "cold_2x1", "torchrun_2x1"),
        "cold_vs_torchrun_4_nodes": ratio(launched, "cold_4x1", "torchrun_4x1"),
        "warm_vs_torchrun": ratio(launched, "warm_1x2", "torchrun_1x2"),
        "runs_per_minute_vs_ray": ratio(ended, f"console_{CLIENTS}_at_once", f"ray_{CLIENTS}_at_once"),
        "runs_per_minute_vs_ray_1_client": ratio(ended, "console_1_at_once", "ray_1_at_once"),
    }
    if "horovodrun_1x2" in launched:
        ratios["cold_vs_horovodrun"] = ratio(launched, "horovod_cold_1x2", "horovodrun_1x2")
        ratios["warm_vs_horovodrun"] = ratio(launched, "horovod_warm_1x2", "horovodrun_1x2")
    for name, goal in GOALS.items():
        print(f"{name}: {ratios[name]} (goal: {'at least' if goal > 1 else 'at most'} {goal})")
    conclude("launch", {**launched, **ended, "console_overhead_s": summary(overhead)}, ratios)


if __name__ == "__main__":
    main()

"""How soon a run starts: from launch to the first finished all-reduce on 2 processes, ours beside torchrun.

make bench NAME=launch (QUICK=1 for fewer rounds)

Every variant runs once in each round, in random order, so that they share whatever else the machine does. Each
measures the same thing: the time between asking for the launch (for the console: sending the order) and rank 0's own
note of the moment its all-reduce was done, whose result is checked. The last line is one JSON object. Another variant
is one more `Variant` in `variants`.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOUSE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HOUSE))

from bench.through_console import ThroughConsole  # noqa: E402 - as below
from runtime.backends.base import Backend, create  # noqa: E402 - the house must be importable first
from runtime.specs import Framework, Image, Mount, Outcome, Resources, RunPhase, RunSpec  # noqa: E402

SCRIPT = """\
import os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group(os.environ.get("BACKEND", "gloo"))
total = torch.ones(1)
dist.all_reduce(total)
done = time.time()
assert total.item() == dist.get_world_size() == 2
if dist.get_rank() == 0:
    pathlib.Path(os.environ["RUN_DIR"], "first-all-reduce").write_text(repr(done))
dist.destroy_process_group()
"""
IMAGE = "pytorch"
SECONDS = 120
COLD_GOAL = 0.6
OVERHEAD_GOAL = 0.25


@dataclass(frozen=True)
class Variant:
    """One way to launch: `measure` runs it once and returns the seconds to the first all-reduce."""

    name: str
    measure: Callable[[], float]


class Local:
    """Ours: the local backend, with its launcher and its sandbox."""

    def __init__(self, folder: Path, images_root: Path) -> None:
        self._folder = folder
        self._backend: Backend = create("local", root=folder / "runs", images_root=images_root, cpus=8)
        self._number = 0

    def measure(self, nodes: int, workers: int) -> float:
        """Submit, wait for the end, and read what rank 0 noted."""
        self._number += 1
        workspace = Mount(str(self._folder / "workspace"), "/workspace", read_only=False)
        spec = RunSpec(
            name=f"bench-{self._number}",
            framework=Framework.PYTORCH,
            image=Image(builtin=IMAGE),
            nodes=nodes,
            workers_per_node=workers,
            resources=Resources(cpus=2 / nodes, memory_mib=2048),
            script="reduce.py",
            deadline_seconds=SECONDS,
            mounts=(workspace,),
        )
        begun = time.time()
        self._backend.submit(spec)
        status = self._backend.describe(spec.name)
        for _names in self._backend.changes(stop_after=SECONDS):
            status = self._backend.describe(spec.name)
            if status.phase is RunPhase.ENDED:
                break
        if status.outcome is not Outcome.COMPLETED:
            raise SystemExit(f"our run did not complete: {status}")
        done = float((self._backend.run_folder(spec.name) / "run" / "first-all-reduce").read_text())
        self._backend.delete(spec.name)
        return done - begun


def torchrun(folder: Path, images_root: Path) -> float:
    """The baseline: torchrun of the same environment, bare, with one node of two processes."""
    note = folder / "first-all-reduce"
    note.unlink(missing_ok=True)
    environment = {"PATH": "/usr/bin:/bin", "RUN_DIR": str(folder), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    command = [images_root / IMAGE / "bin" / "torchrun", "--standalone", "--nproc-per-node", "2"]
    begun = time.time()
    subprocess.run(
        [*command, folder / "workspace" / "reduce.py"],
        env=environment,
        check=True,
        capture_output=True,
        timeout=SECONDS,
    )
    return float(note.read_text()) - begun


def variants(folder: Path, images_root: Path, console: ThroughConsole) -> list[Variant]:
    """What is measured. The first is the headline, the second its baseline, the third what a customer sees."""
    local = Local(folder, images_root)
    return [
        Variant("ours_1x2", lambda: local.measure(1, 2)),
        Variant("torchrun_1x2", lambda: torchrun(folder, images_root)),
        Variant("console_1x2", lambda: console.measure(1, 2)),
        Variant("ours_2x1", lambda: local.measure(2, 1)),
    ]


def main() -> None:
    """Measure, print the table, and the JSON object last."""
    images_root = Path(os.environ.get("TRAINYARD_IMAGES_ROOT", HOUSE / "var" / "images"))
    rounds = 4 if os.environ.get("QUICK") else 12
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as name:
        folder = Path(name)
        (folder / "workspace").mkdir()
        (folder / "workspace" / "reduce.py").write_text(SCRIPT)
        with ThroughConsole(folder, images_root, SCRIPT) as console:
            times = measure(variants(folder, images_root, console), rounds)
    figures: dict[str, Any] = {name: summary(seconds) for name, seconds in times.items()}
    overhead = [console - ours for console, ours in zip(times["console_1x2"], times["ours_1x2"], strict=True)]
    print(f"{'launch to first all-reduce':28}{'median s':>10}{'min':>8}{'max':>8}   ({rounds} rounds)")
    for name, figure in figures.items():
        print(f"{name:28}{figure['median']:10.2f}{figure['min']:8.2f}{figure['max']:8.2f}")
    ratio = figures["ours_1x2"]["median"] / figures["torchrun_1x2"]["median"]
    figures["console_overhead_s"] = summary(overhead)
    print(f"the console adds {figures['console_overhead_s']['median']:.2f} s (goal: at most {OVERHEAD_GOAL})")
    print(f"ours takes {ratio:.2f} of torchrun's time (goal: at most {COLD_GOAL})")
    machine = {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    print(
        json.dumps(
            {"bench": "launch", "machine": machine, "figures": figures, "ratios": {"cold_vs_torchrun": round(ratio, 3)}}
        )
    )


def measure(wanted: list[Variant], rounds: int) -> dict[str, list[float]]:
    """Every variant once in each round, in random order; a first round, which fills the page cache, does not count."""
    times: dict[str, list[float]] = {variant.name: [] for variant in wanted}
    for number in range(rounds + 1):
        for variant in random.sample(wanted, len(wanted)):
            seconds = variant.measure()
            if number:
                times[variant.name].append(seconds)
                print(f"round {number:2} {variant.name:20} {seconds:6.2f} s", flush=True)
    return times


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, minimum and maximum, to the millisecond."""
    return {
        "median": round(statistics.median(seconds), 3),
        "min": round(min(seconds), 3),
        "max": round(max(seconds), 3),
    }


if __name__ == "__main__":
    main()

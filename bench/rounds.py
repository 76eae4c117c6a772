"""How the benchmarks measure: every variant once in each round, in random order, and medians at the end.

The one rule: what is compared ran in the same rounds, so that the variants share whatever else the machine does. The
last line printed is one JSON object: `{"bench", "machine", "figures", "ratios"}`.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Figure = dict[str, float]


@dataclass(frozen=True)
class Variant:
    """One way to do the thing that is measured: `measure` does it once and returns the figure."""

    name: str
    measure: Callable[[], float]


def is_quick() -> bool:
    """Whether a smaller run of the same kind was asked for (QUICK=1)."""
    return bool(os.environ.get("QUICK"))


def measure(wanted: Sequence[Variant], rounds: int, unit: str) -> dict[str, list[float]]:
    """Every variant once in each round, in random order; a first round, which fills caches, does not count."""
    figures: dict[str, list[float]] = {variant.name: [] for variant in wanted}
    for number in range(rounds + 1):
        for variant in random.sample(wanted, len(wanted)):
            figure = variant.measure()
            if number:
                figures[variant.name].append(figure)
                print(f"round {number:2} {variant.name:28} {figure:10.3f} {unit}", flush=True)
    return figures


def summary(figures: Sequence[float]) -> Figure:
    """Median, minimum and maximum, to a thousandth."""
    return {
        "median": round(statistics.median(figures), 3),
        "min": round(min(figures), 3),
        "max": round(max(figures), 3),
    }


def ratio(figures: Mapping[str, Figure], ours: str, baseline: str) -> float:
    """The median of one variant over that of another."""
    return round(figures[ours]["median"] / figures[baseline]["median"], 3)


def table(title: str, figures: Mapping[str, Figure]) -> None:
    """Print medians, minima and maxima."""
    print(f"{title:36}{'median':>12}{'min':>12}{'max':>12}")
    for name, figure in figures.items():
        print(f"{name:36}{figure['median']:12.3f}{figure['min']:12.3f}{figure['max']:12.3f}")


def conclude(bench: str, figures: Mapping[str, Figure], ratios: Mapping[str, float]) -> None:
    """Print the JSON object, last."""
    machine = {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    print(json.dumps({"bench": bench, "machine": machine, "figures": figures, "ratios": ratios}))

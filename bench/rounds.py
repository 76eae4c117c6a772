"""Measure variants in rounds: every variant once in each round, in random order, and medians at the end.

Variants that are compared run in the same rounds, so that other load on the machine affects all of them. The last line
printed is one JSON object: `{"bench", "machine", "figures", "ratios"}`.
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
"""The median, minimum and maximum of one measured quantity. Some benchmarks add other values, such as `p95`."""


@dataclass(frozen=True)
class Variant:
    """One of the variants that are compared. `measure` measures it once and returns the value."""

    name: str
    measure: Callable[[], float]


def is_quick() -> bool:
    """Return whether to run a smaller version of the benchmark (QUICK=1)."""
    return bool(os.environ.get("QUICK"))


def measure(variants: Sequence[Variant], rounds: int, unit: str) -> dict[str, list[float]]:
    """Return the values of each variant, by its name. A first round, which fills caches, does not count."""
    values: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(rounds + 1):
        for variant in random.sample(variants, len(variants)):
            value = variant.measure()
            if number:
                values[variant.name].append(value)
                print(f"round {number:2} {variant.name:28} {value:10.3f} {unit}", flush=True)
    return values


def summary(values: Sequence[float]) -> Figure:
    """Return median, minimum and maximum, to a thousandth."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def summaries(values: Mapping[str, Sequence[float]]) -> dict[str, Figure]:
    """Return the summary of each name's values."""
    return {name: summary(numbers) for name, numbers in values.items()}


def ratio(figures: Mapping[str, Figure], numerator: str, denominator: str) -> float:
    """Return the median of one variant divided by that of another."""
    return round(figures[numerator]["median"] / figures[denominator]["median"], 3)


def print_table(title: str, figures: Mapping[str, Figure]) -> None:
    """Print medians, minima and maxima."""
    print(f"{title:36}{'median':>12}{'min':>12}{'max':>12}")
    for name, figure in figures.items():
        print(f"{name:36}{figure['median']:12.3f}{figure['min']:12.3f}{figure['max']:12.3f}")


def print_result(bench: str, figures: Mapping[str, object], ratios: Mapping[str, float]) -> None:
    """Print the JSON object, which must be the last line."""
    machine = {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    print(json.dumps({"bench": bench, "machine": machine, "figures": figures, "ratios": ratios}))

"""Time to suggest a trial after 1,000 past trials, compared with an Optuna study that stays in memory.

make bench NAME=sweeps (QUICK=1 for fewer rounds)

The console rebuilds the study from the trials for each suggestion, because any process may make the next suggestion.
The study has one goal, the metric; the costs of trials do not count. The baseline keeps an Optuna study with the same
trials in memory, and only its `ask` is measured. The space has four parameters: a learning rate on a logarithmic scale,
a width, an optimizer to choose, and a momentum that applies to only one of the optimizers.
"""

from __future__ import annotations

import random
import time
from typing import Any

from bench import rounds
from bench.environment import temporary_installation

PAST_TRIALS = 1000
ROUNDS = 3 if rounds.is_quick() else 10
GOAL_MS = 200.0
"""Longest time of a suggestion: it is made for each trial, while other sweeps wait for the worker."""
SPACE = {
    "LR": {"type": "float", "low": 1e-4, "high": 1e-1, "log": True},
    "--hidden": {"type": "int", "low": 16, "high": 512},
    "--optimizer": {"type": "categorical", "choices": ["sgd", "adam"]},
    "--momentum": {"type": "float", "low": 0.0, "high": 0.99, "when": {"parameter": "--optimizer", "in": ["sgd"]}},
}
"""The search space, in the form in which customers give it."""


def main() -> None:
    """Measure, then print the table and the JSON object."""
    with temporary_installation():
        samples = measure()
    figures = rounds.summaries(samples)
    rounds.print_table(f"{PAST_TRIALS} past trials, ms", figures)
    for name, figure in figures.items():
        if not name.endswith("_optuna"):
            print(f"{name}: median {figure['median']:.0f} ms (goal: below {GOAL_MS:.0f})")
    rounds.print_result(
        "sweeps",
        figures,
        {
            f"{method}_vs_optuna": round(figures[method]["median"] / figures[f"{method}_optuna"]["median"], 3)
            for method in ("tpe", "cmaes")
        },
    )


def measure() -> dict[str, list[float]]:
    """Return the milliseconds of each suggestion, by method. The console and Optuna make suggestions in turn."""
    from jobs.sweeps import space, suggestions  # noqa: PLC0415 - Django must be set up first

    parameters = space.parse(SPACE)
    samples: dict[str, list[float]] = {}
    for method in (suggestions.Method.TPE, suggestions.Method.CMAES):
        past = past_trials(parameters, method)
        study = suggestions.study_of(
            space=parameters, goal="maximize", method=method, seed=1, trials=past, minimizes_cost=False
        )
        for _round in range(ROUNDS):
            started_at = time.perf_counter()
            suggestions.suggest(space=parameters, goal="maximize", method=method, seed=1, trials=past)
            samples.setdefault(method.value, []).append((time.perf_counter() - started_at) * 1000)
            started_at = time.perf_counter()
            suggestions.parameters_of(study.ask(), parameters)
            samples.setdefault(f"{method.value}_optuna", []).append((time.perf_counter() - started_at) * 1000)
    return samples


def past_trials(parameters: Any, method: Any) -> list[Any]:
    """Return ended trials of a sweep with this method, each with the state of the sampler after it."""
    from jobs.sweeps import suggestions  # noqa: PLC0415 - Django must be set up first

    chance = random.Random(1)  # noqa: S311 - values of a metric, not secrets
    study = suggestions.study_of(
        space=parameters, goal="maximize", method=method, seed=1, trials=[], minimizes_cost=False
    )
    past = []
    for _number in range(PAST_TRIALS):
        trial = study.ask()
        suggestion = suggestions.parameters_of(trial, parameters)
        value = chance.random()
        study.tell(trial, value)
        state = study.trials[trial.number].system_attrs
        past.append(suggestions.PastTrial(suggestion, value, is_ended=True, state=state))
    return past


if __name__ == "__main__":
    main()

"""Suggest the parameters of a sweep's next trial, and decide which open trials to stop, with Optuna.

Each call rebuilds Optuna's study from the rows of the trials. The same rows and trial number give the same suggestion,
so a crash before the next trial's row is written changes nothing.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, CmaEsSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from jobs.sweeps.space import Parameter, Value, Values

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Method(StrEnum):
    """The method by which a sweep chooses parameters. GRID is `jobs.sweeps.space.grid`; the others are Optuna's."""

    GRID = "grid"
    RANDOM = "random"
    TPE = "tpe"
    CMAES = "cmaes"


class Pruner(StrEnum):
    """How unpromising trials are stopped early: a trial's n-th value of the metric is compared with those of others."""

    NONE = "none"
    MEDIAN = "median"
    """Stop a trial that is worse than the median of the others."""
    ASHA = "asha"
    """Asynchronous successive halving: after 1, 3, 9 … values, only the best third continues."""


MEDIAN_TRIALS = 4
"""Trials that must have ended before the median pruner stops others: the median of fewer says little."""
MIN_RANKED_TRIALS = 5
"""Completed trials that the importance of parameters needs. With fewer, the ranking would be chance."""
RELATIVE_ROUNDING = 1e-11
"""More than the relative error of a grid's values, which are rounded to twelve digits (`Parameter.grid`)."""
REDUCTION_FACTOR = 3
"""At each step, successive halving lets one of this many trials continue. Its authors recommend 3 or 4."""
MAX_OPTUNA_STEPS = 10**7
"""Optuna gets the step of a range of floats only if the range's largest number is at most this many steps. Optuna
checks to 10^-8 of a step that a value is a multiple of the step. Floats have only 16 digits, so it would refuse some of
its own suggestions in finer steps. Then it gets a continuous range, and `_round_to_step` rounds its suggestions."""


@dataclass(frozen=True)
class PastTrial:
    """An earlier trial. `value` is the trial's result; None while it is open, or if it ended without a result.

    `cost` may be in any unit. Only a search that minimizes the cost needs it. `state` is what sampler and pruner
    stored with the trial.
    """

    parameters: Mapping[str, Value]
    value: float | None = None
    cost: float = 0
    is_ended: bool = False
    state: Mapping[str, Any] = field(default_factory=dict)
    metric_values: Sequence[float] = ()
    """All values of the metric so far, in order. Only pruners need them."""


@dataclass(frozen=True)
class Suggestion:
    """The parameters of the next trial, and the sampler's `state` to store with it, from which CMA-ES continues."""

    parameters: Values
    state: dict[str, Any]


def suggest(
    *,
    space: Sequence[Parameter],
    goal: Literal["minimize", "maximize"],
    method: Method,
    seed: int,
    trials: Sequence[PastTrial],
    minimizes_cost: bool = False,
) -> Suggestion:
    """Return the suggestion for the next trial. `trials` are all earlier trials of the search, in their order.

    `seed` is the same for all trials of a sweep.
    `minimizes_cost`: search for the best value at each cost, not only for the best value. The API and the pages call
    this a search against cost.
    """
    study = study_of(space=space, goal=goal, method=method, seed=seed, trials=trials, minimizes_cost=minimizes_cost)
    trial = study.ask()
    parameters = parameters_of(trial, space)
    # Read from the study's copy of the trial, because Optuna deprecates `system_attrs` of `trial` itself.
    return Suggestion(parameters, dict(study.get_trials(deepcopy=False)[trial.number].system_attrs))


def study_of(
    *,
    space: Sequence[Parameter],
    goal: Literal["minimize", "maximize"],
    method: Method,
    seed: int,
    trials: Sequence[PastTrial],
    minimizes_cost: bool,
) -> optuna.Study:
    """Return Optuna's study with the earlier trials. The arguments are those of `suggest`."""
    directions = [goal, "minimize"] if minimizes_cost else [goal]
    study = optuna.create_study(directions=directions, sampler=_sampler(method, seed, len(trials)))
    study.add_trials([_frozen_trial(space, past, minimizes_cost=minimizes_cost) for past in trials])
    return study


def parameters_of(trial: optuna.Trial, space: Sequence[Parameter]) -> Values:
    """Let Optuna choose the value of each parameter that applies to a new trial."""
    parameters: Values = {}
    for parameter in space:
        if parameter.applies(parameters):
            parameters[parameter.name] = _suggest_value(trial, parameter)
    return parameters


@dataclass(frozen=True)
class PruningDecision:
    """Whether to stop a trial early, and the pruner's `state` to store with it."""

    is_pruned: bool
    state: dict[str, Any]


def judge(
    *,
    space: Sequence[Parameter],
    goal: Literal["minimize", "maximize"],
    pruner: Pruner,
    trials: Sequence[PastTrial],
    number: int,
) -> PruningDecision:
    """Return whether to stop the open trial `number`, by a pruner other than NONE.

    `trials` are all trials of the sweep, in order of number.
    """
    optuna_pruner = (
        optuna.pruners.MedianPruner(n_startup_trials=MEDIAN_TRIALS)
        if pruner is Pruner.MEDIAN
        else optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION_FACTOR)
    )
    study = optuna.create_study(direction=goal, pruner=optuna_pruner)
    study.add_trials([_frozen_trial(space, past, has_steps=False) for past in trials])
    is_pruned = optuna_pruner.prune(study, study.get_trials(deepcopy=False)[number])
    # Read from the study again, where successive halving has stored how far the trial came.
    return PruningDecision(is_pruned, dict(study.get_trials(deepcopy=False)[number].system_attrs))


def importance(
    *, space: Sequence[Parameter], goal: Literal["minimize", "maximize"], trials: Sequence[PastTrial]
) -> dict[str, float]:
    """Return the importance of each parameter for a good value, the most important first.

    The numbers sum to 1. Empty for fewer than MIN_RANKED_TRIALS completed trials. Parameters that some completed trial
    does not have, because of a condition, are left out. Source: PED-ANOVA, https://arxiv.org/abs/2304.10255.
    """
    completed = [past for past in trials if past.is_ended and past.value is not None]
    if len(completed) < MIN_RANKED_TRIALS:
        return {}
    study = optuna.create_study(direction=goal)
    study.add_trials([_frozen_trial(space, past, has_steps=False) for past in completed])
    names = [parameter.name for parameter in space if all(parameter.name in past.parameters for past in completed)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator, params=names))


def _sampler(method: Method, seed: int, number: int) -> BaseSampler:
    """Return the sampler of trial `number`.

    Each trial has its own seed, because the sampler of a rebuilt study draws the same first numbers every time.
    """
    # Four bytes, because NumPy's seeds have 32 bits.
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=4).digest()
    trial_seed = int.from_bytes(digest, "big")
    if method is Method.TPE:
        # `constant_liar` gives different parameters to trials that run at the same time.
        return TPESampler(seed=trial_seed, constant_liar=True)
    if method is Method.CMAES:
        # It chooses categorical and conditional parameters at random. Optuna would warn of that in each call.
        return CmaEsSampler(seed=trial_seed, warn_independent_sampling=False)
    if method is Method.RANDOM:
        return RandomSampler(seed=trial_seed)
    raise ValueError("A grid has no sampler.")


def _suggest_value(trial: optuna.Trial, parameter: Parameter) -> Value:
    """Let Optuna choose the value of one parameter."""
    name = parameter.name
    if parameter.kind == "categorical":
        return trial.suggest_categorical(name, list(parameter.choices))  # type: ignore[return-value]
    if parameter.kind == "int":
        return trial.suggest_int(
            name, int(parameter.low), int(parameter.high), step=int(parameter.step or 1), log=parameter.log
        )
    optuna_step = _optuna_step(parameter)
    value = trial.suggest_float(name, parameter.low, parameter.high, step=optuna_step, log=parameter.log)
    if parameter.step is None or optuna_step is not None:
        return value
    return _round_to_step(value, parameter.low, parameter.high, parameter.step)


def _optuna_step(parameter: Parameter) -> float | None:
    """Return the step of a range of floats for Optuna; None if the range is continuous, or the step too fine."""
    largest = max(abs(parameter.low), abs(parameter.high))
    return parameter.step if parameter.step and largest / parameter.step <= MAX_OPTUNA_STEPS else None


def _round_to_step(value: float, low: float, high: float, step: float) -> float:
    """Return the value that is nearest to `value` in the range from `low` to `high`, in steps from `low`."""
    steps = (value - low) / step
    # Steps that are finer than floats have no effect, and their number may be infinite.
    return value if steps > 2**53 else min(low + round(steps) * step, high)


def _frozen_trial(
    space: Sequence[Parameter], past: PastTrial, *, minimizes_cost: bool = False, has_steps: bool = True
) -> optuna.trial.FrozenTrial:
    """Return an earlier trial as Optuna's study stores it. `has_steps` is as for `_distribution`.

    A trial that was pruned is complete, with its last value as the result: Optuna's CMA-ES sampler and median pruner
    ignore trials in the state PRUNED.
    """
    end_state = TrialState.FAIL if past.value is None else TrialState.COMPLETE
    objectives = None
    if past.is_ended and past.value is not None:
        objectives = [past.value, past.cost] if minimizes_cost else [past.value]
    return optuna.trial.create_trial(
        state=end_state if past.is_ended else TrialState.RUNNING,
        values=objectives,
        params=dict(past.parameters),
        distributions={
            each.name: _distribution(each, has_steps=has_steps) for each in space if each.name in past.parameters
        },
        intermediate_values=dict(enumerate(past.metric_values, start=1)),
        system_attrs=dict(past.state),
    )


def _distribution(parameter: Parameter, *, has_steps: bool) -> BaseDistribution:
    """Return a parameter as Optuna stores it.

    Only samplers need the steps of a range of floats. Without `has_steps` the range is continuous and a little wider:
    rounding may have moved a grid's value off its step or out of the range, and Optuna would refuse such a value.
    """
    if parameter.kind == "categorical":
        return CategoricalDistribution(list(parameter.choices))
    if parameter.kind == "int":
        low, step = int(parameter.low), int(parameter.step or 1)
        high = low + (int(parameter.high) - low) // step * step  # Optuna warns if the last value is no step
        return IntDistribution(low, high, log=parameter.log, step=step)
    if parameter.step and not has_steps:
        margin = RELATIVE_ROUNDING * max(abs(parameter.low), abs(parameter.high))
        return FloatDistribution(parameter.low - margin, parameter.high + margin)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log, step=_optuna_step(parameter))

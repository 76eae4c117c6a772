"""The search space of a sweep and the suggestions for its trials."""

from __future__ import annotations

import json
import math
from statistics import median

import pytest

from jobs.sweeps.space import MAX_GRID_TRIALS, InvalidSpace, grid, parse
from jobs.sweeps.suggestions import Method, PastTrial, Pruner, importance, judge, suggest

SPACE = {
    "LR": {"type": "float", "low": 1e-4, "high": 1e-1, "log": True},
    "BATCH_SIZE": {"type": "int", "low": 16, "high": 128, "step": 16},
    "--optimizer": {"type": "categorical", "choices": ["sgd", "adam"]},
    "--momentum": {
        "type": "float", "low": 0.0, "high": 0.9, "step": 0.1, "when": {"parameter": "--optimizer", "in": ["sgd"]},
    },
}  # fmt: skip
BOWL = {name: {"type": "float", "low": -5, "high": 5} for name in ("x", "y")}


def bowl(parameters: dict[str, float]) -> float:
    """Return a loss that is 0 at (1, -2)."""
    return (parameters["x"] - 1) ** 2 + (parameters["y"] + 2) ** 2


def search(method: Method, seed: int, trials: int) -> list[PastTrial]:
    """Run a sweep of `bowl`, storing each trial's state as JSON, as the database does."""
    past: list[PastTrial] = []
    for _number in range(trials):
        found = suggest(space=parse(BOWL), goal="minimize", method=method, seed=seed, trials=past)
        state = json.loads(json.dumps(found.state))
        past.append(PastTrial(found.parameters, bowl(found.parameters), is_ended=True, state=state))  # type: ignore[arg-type]
    return past


NUMBER = {"type": "int", "low": 1, "high": 2}
INVALID = [
    [],
    {},
    {f"P{index}": NUMBER for index in range(33)},
    {"x": {"type": "text"}},
    {"x": {"type": ["int"]}},
    {"x": {**NUMBER, "chance": 3}},
    {"x": {"type": "int", "low": 1.5, "high": 2}},
    {"x": {"type": "int", "low": True, "high": 2}},
    {"x": {"type": "int", "low": 1, "high": 10**400}},
    {"x": {"type": "float", "low": math.nan, "high": 1}},
    {"x": {"type": "float", "low": 2, "high": 1}},
    {"x": {"type": "float", "low": 0, "high": 1, "log": True}},
    {"x": {"type": "float", "low": 1, "high": 2, "log": True, "step": 0.5}},
    {"x": {"type": "float", "low": 1, "high": 2, "step": 0}},
    {"x": {"type": "categorical", "choices": []}},
    {"x": {"type": "categorical", "choices": [1, "1"]}},
    {"x": {"type": "categorical", "choices": [[1]]}},
    {"x": {"type": "categorical", "choices": [True]}},
    {"x": {**NUMBER, "when": {"parameter": "y", "in": [1]}}},
    {**SPACE, "x": {**NUMBER, "when": {"parameter": "LR", "in": [1]}}},
    {**SPACE, "x": {**NUMBER, "when": {"parameter": "--optimizer", "in": ["z"]}}},
]


def test_invalid_spaces_name_the_parameter():
    for given in INVALID:
        with pytest.raises(InvalidSpace) as refused:
            parse(given)
        assert refused.value.parameter == ("x" if "x" in given else ""), given


def test_a_grid_has_each_combination_once_and_only_parameters_that_apply():
    space = parse({name: SPACE[name] for name in ("BATCH_SIZE", "--optimizer", "--momentum")})
    trials = grid(space)
    # 8 batch sizes, each with 10 momenta of SGD and with Adam, which has none.
    assert len(trials) == 8 * (10 + 1) == len({json.dumps(values) for values in trials})
    assert trials[3] == {"BATCH_SIZE": 16, "--optimizer": "sgd", "--momentum": 0.3}
    assert all(("--momentum" in values) == (values["--optimizer"] == "sgd") for values in trials)
    huge = {name: {"type": "int", "low": 1, "high": MAX_GRID_TRIALS} for name in ("x", "y")}
    # A range without steps, too many combinations, and too many values.
    for given in (SPACE, huge, {"x": {"type": "int", "low": 0, "high": 2**53}}):
        with pytest.raises(InvalidSpace):
            grid(parse(given))


@pytest.mark.parametrize(
    ("kind", "low", "high", "step", "count"),
    [
        ("float", 1 / 3, 3, 1 / 3, 9),  # the values are rounded off the steps
        ("float", 0, 1, 0.25000000005, 5),  # four steps exceed the range by 2e-10
        ("int", 0, 1_999_999_999, 250_000_000, 8),
    ],
)
def test_a_grid_stays_in_its_range_also_if_its_steps_do_not_fit(kind, low, high, step, count):
    space = parse({"x": {"type": kind, "low": low, "high": high, "step": step}})
    past = [PastTrial(values, values["x"], is_ended=True, metric_values=[values["x"]]) for values in grid(space)]
    assert len(past) == count
    assert importance(space=space, goal="minimize", trials=past) == {"x": 1.0}
    trials = [*past, PastTrial(past[0].parameters, metric_values=[1e10])]
    assert judge(space=space, goal="minimize", pruner=Pruner.MEDIAN, trials=trials, number=len(past)).is_pruned


@pytest.mark.parametrize(
    ("low", "high", "step"), [(-1, 3, 1e-9), (0, 10**10, 0.3), (1000, 1001, 1e-6), (0, 2**53, 1), (0, 1, 5e-324)]
)
def test_steps_may_be_finer_than_optuna_can_check(low, high, step):
    space = parse({"x": {"type": "float", "low": low, "high": high, "step": step}})
    past: list[PastTrial] = []
    for _number in range(12):  # TPE chooses at random at first
        x = suggest(space=space, goal="minimize", method=Method.TPE, seed=3, trials=past).parameters["x"]
        past.append(PastTrial({"x": x}, x, is_ended=True))
        assert low <= x <= high
        assert step < 1e-9 or (x - low) / step == pytest.approx(round((x - low) / step), rel=1e-12, abs=1e-6)
    with pytest.raises(InvalidSpace):
        grid(space)


@pytest.mark.parametrize("method", [Method.TPE, Method.CMAES])
def test_suggestions_are_within_the_space_repeatable_and_different(method):
    """The same rows give the same suggestion; running and failed trials are accepted."""
    space = parse(SPACE)
    past: list[PastTrial] = []
    for number in range(15):
        first, again = (
            suggest(space=space, goal="maximize", method=method, seed=7, trials=past) for _repeat in range(2)
        )
        assert first == again
        values = first.parameters
        assert 1e-4 <= values["LR"] <= 1e-1
        assert values["BATCH_SIZE"] in range(16, 129, 16)
        assert ("--momentum" in values) == (values["--optimizer"] == "sgd")
        state = json.loads(json.dumps(first.state))
        # In turn, a trial with a value, one that failed, and one that runs.
        past.append(
            PastTrial(values, float(number) if number % 3 == 0 else None, is_ended=number % 3 != 2, state=state)
        )
    assert len({json.dumps(dict(trial.parameters)) for trial in past}) == len(past)


def test_a_search_rebuilt_from_rows_beats_chance():
    """The samplers learn although the study is rebuilt for each trial."""

    def best(chosen: Method) -> float:
        return median(min(trial.value for trial in search(chosen, seed, 30)) for seed in range(3))  # type: ignore[type-var]

    assert max(best(Method.TPE), best(Method.CMAES)) < best(Method.RANDOM)

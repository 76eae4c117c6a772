"""The search space of a sweep: its parameters, their ranges and conditions, and the grid. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from django.utils.translation import gettext as _

Value = str | int | float
Values = dict[str, Value]
"""The values of a trial by the names of its parameters."""

MAX_PARAMETERS = 32
"""Parameters of a search space."""
MAX_CHOICES = 100
"""Values of a categorical parameter."""
MAX_CHOICE_LENGTH = 1000
"""Characters of a choice. These three limits are far above real searches. They bound the validation's time."""
MAX_GRID_TRIALS = 1000
"""Combinations of a grid, and trials of a search. With as many trials, a suggestion takes less than 200 ms."""
MAX_INTEGER = 2**53
"""Largest number in a space: browsers would round larger whole numbers in JSON."""
FIELDS = {
    "categorical": {"type", "choices", "when"},
    "int": {"type", "low", "high", "step", "log", "when"},
    "float": {"type", "low", "high", "step", "log", "when"},
}
"""The fields that a parameter's definition may have, by its `type`."""


class InvalidSpace(ValueError):
    """A search space is invalid. `parameter` is empty if no single parameter is at fault."""

    def __init__(self, parameter: str, sentence: str) -> None:
        """Store the parameter's name and the sentence."""
        super().__init__(sentence)
        self.parameter = parameter


@dataclass(frozen=True)
class Condition:
    """The condition of a parameter: an earlier categorical parameter, named `parameter`, has one of `values`."""

    parameter: str
    values: tuple[Value, ...]

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Whether the condition holds for the values of the earlier parameters."""
        return self.parameter in values and values[self.parameter] in self.values


@dataclass(frozen=True)
class Parameter:
    """One parameter of a search space: `choices` if it is categorical, else the range from `low` to `high`, inclusive.

    `step` None means that the range is continuous. `log`: values are searched on a logarithmic scale.
    """

    name: str
    kind: Literal["categorical", "int", "float"]
    choices: tuple[Value, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False
    when: Condition | None = None

    def applies(self, values: Mapping[str, Value]) -> bool:
        """Whether a trial has this parameter, given the values of the earlier parameters."""
        return self.when is None or self.when.holds(values)

    def grid(self) -> tuple[Value, ...]:
        """Return the values of the grid. Raises InvalidSpace for a continuous range."""
        if self.kind == "categorical":
            return self.choices
        if self.step is None:
            raise InvalidSpace(self.name, _("A grid needs choices or a step for each parameter."))
        # 1e-9 is added, because a quotient of floats may be a little too small: 0.3 / 0.1 is below 3.
        steps = (self.high - self.low) / self.step + (0 if self.kind == "int" else 1e-9)
        if steps >= MAX_GRID_TRIALS:  # compared as a float, which may be infinite
            raise InvalidSpace(self.name, _("A grid has at most %(limit)d trials.") % {"limit": MAX_GRID_TRIALS})
        # The last value may exceed the range by that little.
        values = [min(self.low + index * self.step, self.high) for index in range(math.floor(steps) + 1)]
        # Rounded to twelve digits, because binary fractions are inexact: 0.1 + 2 * 0.1 should be 0.3.
        return tuple(round(value) if self.kind == "int" else float(f"{value:.12g}") for value in values)


def parse(data: Any) -> tuple[Parameter, ...]:
    """Return the parameters of the API's `space`. Raises InvalidSpace.

    Names are not checked here: the purchase checks which variables and arguments a customer may set.
    """
    if not isinstance(data, Mapping) or not data:
        raise InvalidSpace("", _("The search space must be an object with at least one parameter."))
    if len(data) > MAX_PARAMETERS:
        raise InvalidSpace("", _("A search space has at most %(limit)d parameters.") % {"limit": MAX_PARAMETERS})
    earlier: dict[str, Parameter] = {}
    for name, definition in data.items():
        earlier[name] = _parse_parameter(name, definition, earlier)
    return tuple(earlier.values())


def grid(space: Sequence[Parameter]) -> list[Values]:
    """Return the parameters of all trials of the grid. The last parameter varies fastest. Raises InvalidSpace."""
    for parameter in space:
        parameter.grid()  # raises InvalidSpace for a continuous range, even if the parameter's condition never holds
    trials: list[Values] = []
    for values in _combinations(space, {}):
        if len(trials) == MAX_GRID_TRIALS:
            raise InvalidSpace("", _("A grid has at most %(limit)d trials.") % {"limit": MAX_GRID_TRIALS})
        trials.append(values)
    return trials


def _combinations(space: Sequence[Parameter], values: Values) -> Iterator[Values]:
    """Yield all combinations of the parameters in `space`, each together with `values`, those of earlier parameters."""
    if not space:
        yield values
        return
    first, *rest = space
    if not first.applies(values):
        yield from _combinations(rest, values)
        return
    for value in first.grid():
        yield from _combinations(rest, {**values, first.name: value})


def _parse_parameter(name: str, definition: Any, earlier: Mapping[str, Parameter]) -> Parameter:
    """Return one parameter. Its condition may refer to the `earlier` parameters, which are given by name."""
    kind = definition.get("type") if isinstance(definition, Mapping) else None
    if not isinstance(kind, str) or kind not in FIELDS:
        raise InvalidSpace(name, _("`type` must be categorical, int or float."))
    if unknown := sorted(map(str, set(definition) - FIELDS[kind])):
        raise InvalidSpace(name, _("Unknown fields: %(names)s.") % {"names": ", ".join(unknown)})
    when = _condition(name, definition["when"], earlier) if definition.get("when") is not None else None
    if kind == "categorical":
        return Parameter(name, "categorical", choices=_choices(name, definition.get("choices"), "choices"), when=when)
    low, high = (_number(name, definition.get(end), kind, end) for end in ("low", "high"))
    log = definition.get("log", False)
    step = None if definition.get("step") is None else _number(name, definition["step"], kind, "step")
    if not isinstance(log, bool):
        raise InvalidSpace(name, _("`log` must be true or false."))
    if low >= high:
        raise InvalidSpace(name, _("`low` must be below `high`."))
    if log and low <= 0:
        raise InvalidSpace(name, _("`low` must be above 0 on a log scale."))
    if log and step is not None:
        raise InvalidSpace(name, _("Choose either `step` or `log`."))
    if step is not None and not 0 < step <= high - low:
        raise InvalidSpace(name, _("`step` must be above 0 and at most the range."))
    if kind == "int":  # by default in steps of 1; a log scale has no step
        return Parameter(name, "int", low=low, high=high, step=step or (None if log else 1), log=log, when=when)
    return Parameter(name, "float", low=low, high=high, step=step, log=log, when=when)


def _condition(name: str, when: Any, earlier: Mapping[str, Parameter]) -> Condition:
    """Return the condition of the parameter `name`. `earlier` are the parameters to which it may refer."""
    if not isinstance(when, Mapping) or set(when) != {"parameter", "in"}:
        raise InvalidSpace(name, _("`when` must have `parameter` and `in`."))
    condition_parameter = earlier.get(when["parameter"]) if isinstance(when["parameter"], str) else None
    if condition_parameter is None or condition_parameter.kind != "categorical":
        raise InvalidSpace(name, _("`when` must name an earlier categorical parameter."))
    values = _choices(name, when["in"], "in")
    if not set(values) <= set(condition_parameter.choices):
        raise InvalidSpace(name, _("`in` must list choices of %(name)s.") % {"name": condition_parameter.name})
    return Condition(condition_parameter.name, values)


def _choices(name: str, choices: Any, field: str) -> tuple[Value, ...]:
    """Validate a list of values in a field of the parameter `name`, and return it."""
    if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidSpace(
            name, _("`%(field)s` must list 1 to %(limit)d values.") % {"field": field, "limit": MAX_CHOICES}
        )
    for value in choices:
        if isinstance(value, str):
            if len(value) > MAX_CHOICE_LENGTH:
                raise InvalidSpace(name, _("A value has at most %(limit)d characters.") % {"limit": MAX_CHOICE_LENGTH})
        else:
            _number(name, value, "float", field)
    # No two choices may be equal as text, which is what scripts get ("1" and 1), or as numbers (1 and 1.0).
    if len({str(value) for value in choices}) < len(choices) or len(set(choices)) < len(choices):
        raise InvalidSpace(name, _("`%(field)s` lists a value twice.") % {"field": field})
    return tuple(choices)


def _number(name: str, value: Any, kind: str, field: str) -> float:
    """Validate a number in a field of the parameter `name`, and return it."""
    # A bool is an int in Python, and JSON may hold NaN or integers too large for a float.
    is_number = isinstance(value, int if kind == "int" else int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_INTEGER <= value <= MAX_INTEGER:
        if kind == "int":
            sentence = _("`%(field)s` must be a whole number between -2^53 and 2^53.")
        else:
            sentence = _("`%(field)s` must be a number between -2^53 and 2^53.")
        raise InvalidSpace(name, sentence % {"field": field})
    return value  # type: ignore[no-any-return]

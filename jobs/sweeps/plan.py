"""The plan of a sweep: search space, objective, method and number of trials.

A quote stores the plan as the object `sweep` in its purchase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.serializers import ValidationError

from jobs.fields import EnumField, FormSerializer, WholeNumberField, is_storable_text
from jobs.purchase import MAX_CEILING_MINOR, QuoteRequestSerializer
from jobs.sweeps import space as spaces
from jobs.sweeps.space import InvalidSpace, Parameter, Value, Values
from jobs.sweeps.suggestions import Method, Pruner
from runtime.launcher.variables import escape

MAX_TRIALS = spaces.MAX_GRID_TRIALS
"""Maximum trials of a sweep. After that many trials, a suggestion still takes less than 200 ms."""
MAX_CONCURRENCY = 100
"""Maximum trials at once. Each is a job in the queue, and counts for the organization's limit of open jobs."""
MAX_METRIC_LENGTH = 100
"""Characters of the name of a metric: the length of its column. Also limits the names of parameters."""
PURCHASE_FIELDS = {"LR": "lr", "EPOCHS": "epochs", "BATCH_SIZE": "batch_size"}
"""The field of the purchase that each of these parameters sets. Other parameters set an argument, if their name
begins with a hyphen (`--hidden`), or an environment variable (`DEPTH`)."""
PRICED_PARAMETERS = frozenset({"EPOCHS", "BATCH_SIZE"})
"""Parameters that change the estimated time of a trial, and so its price."""


class Goal(StrEnum):
    """Which values of the metric are better."""

    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"


@dataclass(frozen=True)
class Plan:
    """A valid sweep, without the purchase of its trials: at most `trials` in all, and `concurrency` at once."""

    space: tuple[Parameter, ...]
    metric: str
    goal: Literal["maximize", "minimize"]
    minimizes_cost: bool
    """Whether the sweep searches for the best value at each cost, not only for the best value. The API and the pages
    call this a search against cost."""
    method: Method
    trials: int
    concurrency: int
    pruner: Pruner
    tried: int = 0
    """Number of trials in the earlier sweeps of this search, which this sweep extends."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that a quote stores as its object `sweep`.

        The space is stored as a list of pairs, because PostgreSQL does not keep the order of an object's keys. The
        order matters: the condition of a parameter may refer only to earlier ones.
        """
        return cls(
            space=spaces.parse(dict(data["space"])),
            metric=data["objective"]["metric"],
            goal=data["objective"]["goal"],
            minimizes_cost=data["objective"].get("against_cost", False),
            method=Method(data["method"]),
            trials=data["trials"],
            concurrency=data["concurrency"],
            pruner=Pruner(data["pruner"]),
            tried=data.get("tried", 0),
        )

    def grid(self) -> list[Values]:
        """Return the parameters of this sweep's trials in order if the method is a grid; else an empty list."""
        return spaces.grid(self.space)[self.tried :][: self.trials] if self.method is Method.GRID else []

    def is_better(self, value: float, other: float) -> bool:
        """Return whether a value of the metric is better than another."""
        return value > other if self.goal == "maximize" else value < other


def apply_parameters(purchase: Mapping[str, Any], values: Mapping[str, Value]) -> dict[str, Any]:
    """Return a purchase (the API's fields) with the parameters of a trial.

    Arguments are appended, because argument parsers use the last value of an argument that occurs twice. Dollar signs
    in them are escaped, so that they are not expanded as variables.
    """
    # The learning rate is text in a purchase.
    fields = {
        PURCHASE_FIELDS[name]: str(value) if name == "LR" else value
        for name, value in values.items()
        if name in PURCHASE_FIELDS
    }
    arguments = list(purchase.get("arguments") or [])
    environment = dict(purchase.get("environment") or {})
    for name, value in values.items():
        if name.startswith("--"):
            arguments.append(escape(f"{name}={value}"))
        elif name.startswith("-"):
            arguments += [escape(name), escape(str(value))]
        elif name not in PURCHASE_FIELDS:
            environment[name] = str(value)
    return {**purchase, **fields, "arguments": arguments, "environment": environment}


def extreme_values(space: tuple[Parameter, ...]) -> list[Values]:
    """Return parameters that bound a trial's price: all combinations of the extreme values of PRICED_PARAMETERS.

    These are the ends of a range, or all choices of a categorical parameter, because their order says nothing about the
    price. Other parameters hardly change the price, so they have their first value. Conditions are ignored, so each
    combination has all parameters: the caller validates their names by a purchase with each combination.
    """
    combinations: list[Values] = [{}]
    for parameter in space:
        extremes = parameter.choices if parameter.kind == "categorical" else (parameter.low, parameter.high)
        if parameter.name not in PRICED_PARAMETERS:
            extremes = extremes[:1]
        combinations = [{**values, parameter.name: extreme} for values in combinations for extreme in extremes]
    return combinations


class ObjectiveSerializer(serializers.Serializer[Any]):
    """The objective of a sweep: which metric of the runs it improves. The last value that a run reports counts."""

    metric = serializers.CharField(
        max_length=MAX_METRIC_LENGTH, help_text="Its name on the job's page, such as test_accuracy."
    )
    goal = serializers.ChoiceField(choices=[goal.value for goal in Goal])
    against_cost = serializers.BooleanField(
        default=False,
        help_text="Search the best value at each cost, not only the best value. Needs random or tpe, and no pruner.",
    )

    def validate_metric(self, name: str) -> str:
        """Check that the database can store the name."""
        if not is_storable_text(name):
            raise ValidationError(_("The name of the metric contains invalid characters."))
        return name


class SpaceField(serializers.JSONField):
    """A search space. It stays JSON after it was validated."""

    def to_internal_value(self, data: Any) -> Any:
        """Check the space and return it. Raises ValidationError."""
        try:
            spaces.parse(data)
        except InvalidSpace as error:
            raise ValidationError(space_sentence(error)) from error
        for name in data:
            if not is_storable_text(name) or len(name) > MAX_METRIC_LENGTH:
                raise ValidationError(_("The name of a parameter contains invalid characters or is too long."))
            texts = [value for value in data[name].get("choices", ()) if isinstance(value, str)]
            # Characters below the space are control characters.
            if any(not is_storable_text(text) or any(character < " " for character in text) for text in texts):
                raise ValidationError(_("A choice of %(name)s contains invalid characters.") % {"name": name})
            # Epochs and batch sizes are whole numbers.
            if name in PURCHASE_FIELDS and name != "LR" and data[name]["type"] == "float":
                raise ValidationError(_("%(name)s must be of the type int or categorical.") % {"name": name})
        return data


def space_sentence(error: InvalidSpace) -> str:
    """Return the error's sentence, after the name of the parameter that is at fault."""
    return f"{error.parameter[:MAX_METRIC_LENGTH]}: {error}" if error.parameter else str(error)


class _TrialsSerializer(FormSerializer):
    """How many trials to buy."""

    trials = WholeNumberField(
        most=MAX_TRIALS,
        default=None,
        help_text="Maximum number of trials. A grid has no more than its combinations. May be left out with "
        "`ceiling_minor`: trials then start as long as the ceiling allows.",
    )

    def validate_trials(self, trials: int | None) -> int:
        """Return the number of trials. It may be left out if a ceiling limits the sweep."""
        if trials is None and not self.initial_data.get("ceiling_minor"):
            raise ValidationError(_("Enter the number of trials, or a ceiling."))
        return trials or MAX_TRIALS


class ExtensionSerializer(_TrialsSerializer):
    """More trials of a search. All its sweeps together have at most 1000."""

    ceiling_minor = WholeNumberField(
        most=MAX_CEILING_MINOR, default=None, help_text="The new trials together cost at most this."
    )


class PlanSerializer(_TrialsSerializer):
    """The fields of a sweep, in addition to those of a purchase."""

    space = SpaceField(
        help_text="Parameters by name: `LR`, `EPOCHS`, `BATCH_SIZE`, an argument such as `--hidden`, or an environment "
        'variable. Each is `{"type": "float" or "int", "low", "high", "step", "log"}` or `{"type": "categorical", '
        '"choices"}`, and may have `"when": {"parameter", "in"}`: it then applies only with these choices of another '
        "parameter before it."
    )
    objective = ObjectiveSerializer()
    method = EnumField(Method, default=Method.TPE)
    concurrency = WholeNumberField(most=MAX_CONCURRENCY, default=1, help_text="Maximum number of trials at once.")
    pruner = EnumField(
        Pruner, default=Pruner.NONE, help_text="Stops unpromising trials early, by the metric's values so far."
    )

    def validate_method(self, method: Method) -> Method:
        """Check that a grid has choices or steps for each parameter, and that the method can search against cost."""
        if method is Method.GRID and "space" in self.valid_values:
            try:
                spaces.grid(spaces.parse(self.valid_values["space"]))
            except InvalidSpace as error:
                raise ValidationError(space_sentence(error)) from error
        if self._minimizes_cost() and method not in {Method.RANDOM, Method.TPE}:
            raise ValidationError(_("A search against cost needs the method random or tpe."))
        return method

    def validate_pruner(self, pruner: Pruner) -> Pruner:
        """Refuse a pruner in a search against cost, because pruners compare only the metric."""
        if pruner is not Pruner.NONE and self._minimizes_cost():
            raise ValidationError(_("A search against cost stops no trial early. Choose none."))
        return pruner

    def _minimizes_cost(self) -> bool:
        return bool(self.valid_values.get("objective", {}).get("against_cost"))


class SweepQuoteRequestSerializer(PlanSerializer, QuoteRequestSerializer):
    """A sweep to price: the purchase of its trials, and the search."""


def parse_plan(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of a request as a quote stores it (see `Plan.from_json`). Raises InvalidInput."""
    values = PlanSerializer(data=data).values()
    values |= {"objective": dict(values["objective"]), "space": list(values["space"].items())}
    # A grid may have fewer combinations than `trials`. Other methods have an empty grid.
    values["trials"] = len(Plan.from_json(values).grid()) or values["trials"]
    return values

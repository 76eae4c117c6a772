"""Environment variables and secrets of an order, and references to variables in its arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.serializers import ValidationError

from jobs.fields import FormField, is_storable_text
from runtime import environment
from runtime.launcher import variables
from runtime.launcher.topology import scale_lr
from runtime.specs import LrScaling

MAX_EXPANDED_BYTES = 100_000
"""Bytes of all arguments after their variables were replaced. One argument may use almost all of this total, so the
total stays below the 131,071 bytes that Linux accepts for a single argument."""
MAX_QUOTED_LENGTH = 100
"""Characters of a customer's text that an error message repeats: enough to recognize it."""
MAX_CONTRACT_LENGTH = 256
"""Bytes that are assumed for the value of a variable of the environment contract. The value is not known before
the run. Real ones, such as paths and addresses, are shorter. `LONGER_CONTRACT_LENGTHS` has the exceptions."""
LONGER_CONTRACT_LENGTHS = {"DATASETS": 6400, "MODELS": 6400}
"""These variables are lists of up to 100 names. 64 characters are assumed for each: a name has at most 63, and the
comma after it is one more."""


class EnvironmentField(FormField, serializers.DictField):
    """Variables by name (API), or lines `NAME=value` (forms)."""

    child = serializers.CharField()

    def to_internal_value(self, data: Any) -> dict[str, str]:
        """Return the variables. Raises ValidationError."""
        entries = _parse_lines(data) if isinstance(data, str) else data
        if not isinstance(entries, Mapping):
            raise ValidationError(_("The environment must be an object of names and values."))
        if len(entries) > environment.MAX_VARIABLES:
            raise ValidationError(
                _("Set at most %(most)d environment variables.") % {"most": environment.MAX_VARIABLES}
            )
        values = {}
        for name, value in entries.items():
            check_name(name)
            # A bool is an int in Python, but `str` gives "True" where JSON has "true".
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValidationError(_("The value of %(name)s must be a string.") % {"name": name})
            values[name] = str(value)
            if not is_storable_text(values[name]) or any(
                character < " " and character != "\t" for character in values[name]
            ):
                sentence = _("The value of %(name)s must be one line of text. Use a secret for several lines.")
                raise ValidationError(sentence % {"name": name})
        if environment.size_of(values) > environment.MAX_BYTES:
            sentence = _("The environment variables must have at most %(most)d bytes in total.")
            raise ValidationError(sentence % {"most": environment.MAX_BYTES})
        return values


class SecretsField(FormField, serializers.ListField):
    """Names of secrets: a list (API), or separated by commas (forms)."""

    child = serializers.CharField()

    def to_internal_value(self, data: Any) -> list[str]:
        """Return the names. Raises ValidationError."""
        names = [name.strip() for name in data.split(",") if name.strip()] if isinstance(data, str) else data
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValidationError(_("The secrets must be a list of names."))
        if len(set(names)) != len(names):
            raise ValidationError(_("Choose each secret only once."))
        if len(names) > environment.MAX_SECRETS:
            raise ValidationError(_("Choose at most %(most)d secrets.") % {"most": environment.MAX_SECRETS})
        return names


def check_name(name: Any) -> None:
    """Check the name of a variable. Raises ValidationError."""
    if not isinstance(name, str) or not environment.is_name(name):
        sentence = _("“%(name)s” is not a variable name. Use letters, digits and underscores.")
        raise ValidationError(sentence % {"name": str(name)[:MAX_QUOTED_LENGTH]})
    if environment.is_reserved(name):
        raise ValidationError(_("The platform sets %(name)s itself. Choose another name.") % {"name": name})


def check_references(arguments: Collection[str], *, own: Mapping[str, str], secrets: Collection[str]) -> None:
    """Check the variables that the arguments refer to. Raises ValidationError.

    `own` are the order's variables, `secrets` the names of its secrets.
    """
    length = 0
    for argument in arguments:
        length += len(argument.encode())
        try:
            names = variables.references(argument)
        except ValueError:
            raise ValidationError(_("Write ${NAME} with a variable's name, or $$ for a dollar sign.")) from None
        for name in names:
            if name in secrets:
                sentence = _("Arguments can't contain the secret %(name)s. Read the variable in your script.")
                raise ValidationError(sentence % {"name": name})
            if name not in environment.CONTRACT and name not in own:
                sentence = _("The variable %(name)s in the arguments is unknown. Write $$ for a dollar sign.")
                raise ValidationError(sentence % {"name": name[:MAX_QUOTED_LENGTH]})
            length += len(own.get(name, "").encode()) or LONGER_CONTRACT_LENGTHS.get(name, MAX_CONTRACT_LENGTH)
    if length > MAX_EXPANDED_BYTES:
        raise ValidationError(_("The arguments are too long with the values of their variables."))


@dataclass(frozen=True)
class CodeSettings:
    """The training settings of a purchase, as the customer's code receives them if all nodes run."""

    lr: str
    """The variable LR, scaled if the purchase says so."""
    lr_base: str
    """The variable LR_BASE: the learning rate as ordered."""
    is_scaled: bool
    warmup_epochs: int
    batch_size: int
    world_size: int

    @property
    def global_batch_size(self) -> int:
        """Return the batch size of all processes together."""
        return self.batch_size * self.world_size


def code_settings(purchase: Mapping[str, Any]) -> CodeSettings | None:
    """Return the settings that the code receives, from a quote's purchase; None for an image check and a notebook."""
    if "lr" not in purchase:
        return None
    world_size = int(purchase["nodes"]) * int(purchase["workers_per_node"])
    lr, is_scaled = str(purchase["lr"]), purchase.get("lr_scaling") == LrScaling.LINEAR
    return CodeSettings(
        lr=scale_lr(lr, world_size) if is_scaled else lr,
        lr_base=lr,
        is_scaled=is_scaled,
        warmup_epochs=int(purchase.get("warmup_epochs") or 0),
        batch_size=int(purchase["batch_size"]),
        world_size=world_size,
    )


def lines_of(values: Mapping[str, str]) -> str:
    """Return variables as lines for a form, sorted by name, because PostgreSQL does not keep the order of JSON keys."""
    return "\n".join(f"{name}={value}" for name, value in sorted(values.items()))


def _parse_lines(text: str) -> dict[str, str]:
    """Return the variables of lines `NAME=value`. Raises ValidationError."""
    values: dict[str, str] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        name, separator, value = line.partition("=")
        if not line.strip():
            continue
        if not separator:
            raise ValidationError(_("Line %(number)d needs the form NAME=value.") % {"number": number})
        if name.strip() in values:
            raise ValidationError(_("The variable %(name)s is set twice.") % {"name": name.strip()[:MAX_QUOTED_LENGTH]})
        values[name.strip()] = value
    return values

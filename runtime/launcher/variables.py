"""References to environment variables in arguments, and which variables of an order need a cold start. Pure."""

from __future__ import annotations

import re
from typing import Iterable, List, Mapping

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
# After a dollar sign: another dollar sign, a name, a name in braces, or a brace that begins no reference.
_REFERENCE = re.compile(r"\$(?:(\$)|(" + _NAME + r")|\{(" + _NAME + r")\}|(\{))")
READ_AT_IMPORT = (
    "OMP", "MKL", "KMP", "GOMP", "OPENBLAS", "NUMEXPR", "NPY", "TORCH", "PYTORCH", "ATEN", "TF", "KERAS", "XLA",
    "ONEDNN", "DNNL", "GRPC", "PROTOCOL", "LD", "GLIBC", "MALLOC", "LC", "LANG", "LANGUAGE", "TZ",
)  # fmt: skip
"""First words (up to "_") of the names of variables that the C library or a framework reads while it is loaded."""


def references(argument: str) -> List[str]:
    """Return the names that an argument refers to, as `$NAME` or `${NAME}`. `$$` is a dollar sign.

    A dollar sign before other characters is kept. Raises ValueError for braces without a name or an end.
    """
    names = []
    for dollar, name, name_in_braces, brace in _REFERENCE.findall(argument):
        if brace:
            raise ValueError("braces without a name or an end")
        if not dollar:
            names.append(name or name_in_braces)
    return names


def expand(argument: str, environment: Mapping[str, str]) -> str:
    """Return the argument with its references replaced. A name that is not in `environment` stays as it is."""

    def value(match: "re.Match[str]") -> str:
        return "$" if match.group(1) else environment.get(match.group(2) or match.group(3) or "", match.group())

    return _REFERENCE.sub(value, argument)


def escape(argument: str) -> str:
    """Return the argument in a form that `expand` turns back into it."""
    return argument.replace("$", "$$")


def need_cold_start(names: Iterable[str]) -> bool:
    """Whether any of these variables is read before a script runs. A forked rank would get such a variable too late."""
    return any(name.startswith("PYTHON") or name.split("_")[0] in READ_AT_IMPORT for name in names)

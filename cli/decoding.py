"""Turn JSON into frozen dataclasses.

Fields that the dataclass does not have are ignored, so that this program works with later versions of the console.
"""

from __future__ import annotations

import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import UnexpectedAnswer

T = TypeVar("T")


def decode(kind: type[T], data: Any, where: str = "answer") -> T:
    """Return `data` as an instance of `kind`.

    Raises UnexpectedAnswer if it does not fit. `where` names `data` in the message, in which a field has a path such as
    `answer.results.0.name`.
    """
    return _decode_value(kind, data, where)  # type: ignore[no-any-return]  # `_decode_value` returns an instance of `kind`


def _decode_value(kind: Any, data: Any, where: str) -> Any:
    """Return `data` as an instance of `kind`, one of the types that fields of `schemas` have. Raises as `decode`."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or (data is None and types.NoneType in inner):
        result = data
    elif origin in {Union, types.UnionType}:
        (kind,) = (member for member in inner if member is not types.NoneType)  # unions are of one type and None only
        result = _decode_value(kind, data, where)
    elif origin is tuple:
        _require(isinstance(data, list), where, "a list")
        result = tuple(_decode_value(inner[0], item, f"{where}.{index}") for index, item in enumerate(data))
    elif origin is dict:
        _require(isinstance(data, dict), where, "an object")
        result = {name: _decode_value(inner[1], value, f"{where}.{name}") for name, value in data.items()}
    elif is_dataclass(kind):
        result = _decode_dataclass(kind, data, where)
    else:
        result = float(data) if kind is float and type(data) is int else data
        _require(type(result) is kind, where, kind.__name__)  # not isinstance: True is an int
    return result


def _decode_dataclass(kind: Any, data: Any, where: str) -> Any:
    """Return an object of JSON as an instance of a dataclass. A missing field must have a default."""
    _require(isinstance(data, dict), where, "an object")
    values = {}
    for field in fields(kind):
        if field.name in data:
            values[field.name] = _decode_value(
                _field_types(kind)[field.name], data[field.name], f"{where}.{field.name}"
            )
        else:
            _require(field.default is not MISSING, f"{where}.{field.name}", "present")
    return kind(**values)


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields. Cached, because `get_type_hints` evaluates the annotations anew."""
    return get_type_hints(kind)


def _require(is_met: bool, where: str, expected: str) -> None:
    """Raise UnexpectedAnswer, which says that `where` is not `expected`, unless the condition is met."""
    if not is_met:
        raise UnexpectedAnswer(
            f"The console's answer is not as expected: {where} is not {expected}. "
            "Its version and that of this program may not match."
        )

"""`typing.NamedTuple` without `typing`, whose import takes a seventh of the launcher's start.

The one rule: what is on the way from the launcher's start to its ranks' takes it from here, behind `TYPE_CHECKING`.
"""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Tuple

_OWN = ("__annotations__", "__module__", "__qualname__")


class _Fields(type):
    def __new__(cls, name: str, bases: Tuple[type, ...], body: Dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, body)
        fields = list(body.pop("__annotations__", ()))
        defaults = [body.pop(field) for field in fields if field in body]
        make: Any = namedtuple
        made = make(name, fields, defaults=defaults, module=body["__module__"])
        for key, value in body.items():
            if key not in _OWN:
                setattr(made, key, value)
        return made


class NamedTuple(metaclass=_Fields):
    """As in `typing`: fields are annotations, those with a value come last; methods are allowed."""

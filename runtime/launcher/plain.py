"""Named tuples and JSON without `typing`, `collections` and `json`, whose import takes longer than all of the start.

Those import half the library (regular expressions, enumerations); the C modules below them do the work. The one rule:
what is here behaves as its public namesake does, and an interpreter that has no such C module gets the namesake itself.
What is on the way from the launcher's start to its ranks' takes it from here and from `bare`, and imports the rest
where it is needed. PURE.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Tuple, Union

__all__ = ["NamedTuple", "dumps", "loads"]

_OWN = ("__annotations__", "__module__", "__qualname__")


# typing.NamedTuple


class _Row(tuple):  # type: ignore[type-arg] # of any
    __slots__ = ()
    _fields: Tuple[str, ...] = ()
    _field_defaults: Dict[str, Any] = {}

    def __new__(cls, *values: Any, **named: Any) -> Any:
        rest = cls._fields[len(values) :]
        told = {**cls._field_defaults, **named}
        known = len(values) <= len(cls._fields) and named.keys() <= set(rest)
        if not known or not all(field in told for field in rest):
            raise TypeError(cls.__name__ + " has the fields " + ", ".join(cls._fields))
        return tuple.__new__(cls, (*values, *[told[field] for field in rest]))

    def __getnewargs__(self) -> Tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        values = ", ".join("{}={!r}".format(*pair) for pair in self._asdict().items())
        return "{}({})".format(type(self).__name__, values)

    def _asdict(self) -> Dict[str, Any]:
        return {field: self[place] for place, field in enumerate(self._fields)}

    def _replace(self, **named: Any) -> Any:
        return type(self)(**{**self._asdict(), **named})


def _getter(place: int) -> property:
    return property(lambda row: tuple.__getitem__(row, place))


class _Fields(type):
    def __new__(cls, name: str, bases: Tuple[type, ...], body: Dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, body)
        fields = tuple(body.pop("__annotations__", ()))
        made: Dict[str, Any] = {"__slots__": (), "_fields": fields, "__module__": body["__module__"]}
        made["_field_defaults"] = {field: body.pop(field) for field in fields if field in body}
        made.update({field: _getter(place) for place, field in enumerate(fields)})
        made.update({key: value for key, value in body.items() if key not in _OWN})
        return type(name, (_Row,), made)


class NamedTuple(metaclass=_Fields):
    """As in `typing`: fields are annotations, those with a value come last; methods are allowed."""


# json


def _not_json(value: Any) -> Any:
    raise TypeError(type(value).__name__ + " can't be told")


class _Reading:
    """How the C scanner is to read, as `json.loads` has it."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def _dumps(data: Any) -> str:
    """As `json.dumps`."""
    return "".join(_encode(data, 0))


def _loads(data: Union[str, bytes]) -> Any:
    """As `json.loads`, of UTF-8. Raises ValueError."""
    text = (data if isinstance(data, str) else data.decode()).strip(" \t\n\r")
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        raise ValueError("no JSON") from None
    except (RecursionError, SystemError):  # the latter where the scanner finds no room for its own complaint
        raise ValueError("nested too deep") from None
    if end != len(text):
        raise ValueError("more than JSON")
    return value


if TYPE_CHECKING:
    from json import dumps, loads

    _encode: Any = None
    _scan: Any = None
else:
    try:
        import _json

        _encode = _json.make_encoder(
            None, _not_json, _json.encode_basestring_ascii, None, ": ", ", ", False, False, True
        )
        _scan = _json.make_scanner(_Reading)
        dumps, loads = _dumps, _loads
    except (ImportError, AttributeError, TypeError):
        from json import dumps, loads

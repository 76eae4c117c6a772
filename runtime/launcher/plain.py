"""What the launcher's start needs of the standard library, without the modules whose import takes longer than it all.

`socket`, `signal`, `json`, `selectors`, `ctypes` and `typing` import half the library (enumerations, regular
expressions); the C modules below them do the work. The one rule: what is here behaves as its public namesake does, and
an interpreter that has no such C module gets the namesake itself. What is on the way from the launcher's start to its
ranks' takes it from here, and imports the rest where it is needed.
"""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from selectors import DefaultSelector as Selector
    from socket import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET, socket
    from typing import Any, Dict, List, Optional, Tuple, Union
else:
    try:
        import _signal as signal
        from _socket import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET, socket
    except ImportError:
        import signal
        from socket import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET, socket

__all__ = [
    "CMSG_SPACE",
    "EVENT_READ",
    "SCM_RIGHTS",
    "SOL_SOCKET",
    "NamedTuple",
    "Selector",
    "dumps",
    "hide",
    "loads",
    "signal",
    "socket",
]

EVENT_READ = 1
"""As in `selectors`."""
_PR_SET_DUMPABLE = 4
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


# selectors.DefaultSelector


class _Key:
    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data


class _Selector:
    """For reading alone."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._keys: Dict[int, _Key] = {}

    def register(self, file: Any, _events: int, data: Any = None) -> None:
        """Wait for this one too. Raises KeyError where it is waited for already."""
        descriptor = _descriptor(file)
        if descriptor in self._keys:
            raise KeyError(descriptor)
        self._poll.register(descriptor, select.POLLIN)
        self._keys[descriptor] = _Key(data)

    def unregister(self, file: Any) -> None:
        """Wait for it no more; to be called before it is closed. Raises KeyError."""
        descriptor = _descriptor(file)
        del self._keys[descriptor]
        self._poll.unregister(descriptor)

    def select(self, timeout: Optional[float] = None) -> List[Tuple[_Key, int]]:
        """The ones that can be read, after `timeout` seconds at the latest; those that broke among them."""
        milliseconds = None if timeout is None else -int(-max(0.0, timeout) * 1000 // 1)
        ready = self._poll.poll(milliseconds)
        return [(self._keys[descriptor], EVENT_READ) for descriptor, _state in ready]


def _descriptor(file: Any) -> int:
    return file if isinstance(file, int) else int(file.fileno())


if not TYPE_CHECKING:
    Selector = _Selector


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


# ctypes


def hide() -> None:
    """Make this process non-dumpable: others of the same user may not open its descriptors, memory or environment."""
    try:
        import _ctypes  # noqa: PLC0415 - as is the other below: where this one is not to be had

        library: Any = _ctypes
        library.call_function(library.dlsym(library.dlopen(None, 0), "prctl"), (_PR_SET_DUMPABLE, 0, 0, 0, 0))
    except (ImportError, AttributeError, OSError, TypeError):
        import ctypes  # noqa: PLC0415

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)

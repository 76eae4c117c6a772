"""What is being worked on: the request, the person, the job. Every log line and every span says so.

Hides how that travels: in a context variable within a process, in a header of the message from a request to a task. The
one rule: only names and numbers of rows, never what a customer wrote.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Value = str | int

FIELDS = ("request_id", "user", "organization", "task", "job", "run", "cluster")
"""What can be bound, in the order shown."""
CARRIED = ("request_id", "user", "organization")
"""What goes along to the tasks that a request sends."""
SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{7,63}")
"""What a proxy may call a request. Anything else could break a log apart, or fill it."""

_bound: ContextVar[dict[str, Value] | None] = ContextVar("bound", default=None)


def request_id(offered: str) -> str:
    """The id a proxy offered, if it is sane; else one that is made here."""
    return offered if SANE_ID.fullmatch(offered) else secrets.token_hex(8)


def fields() -> dict[str, Value]:
    """What is bound now, in the order of `FIELDS`."""
    bound = _bound.get()
    return {name: bound[name] for name in FIELDS if name in bound} if bound else {}


@contextmanager
def bound(**values: Value | None) -> Iterator[dict[str, Value]]:
    """Within the block, log lines and spans carry these fields beside those bound before; None binds nothing.

    Gives the fields as they are kept: whoever holds them past the block sees what `add` put there.
    """
    merged = dict(_bound.get() or {})
    merged.update((name, value) for name, value in values.items() if value is not None)
    token = _bound.set(merged)
    try:
        yield merged
    finally:
        _bound.reset(token)


def add(**values: Value) -> None:
    """Put fields to the innermost block, as they come to be known; outside of any block nothing happens."""
    inner = _bound.get()
    if inner is not None:
        inner.update(values)


def about(describe: Callable[..., Mapping[str, Value]]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Bind what `describe` makes of a function's arguments for as long as the function runs."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> T:
            with bound(**describe(*args, **kwargs)):
                return function(*args, **kwargs)

        return within

    return decorate


def carried() -> dict[str, Value]:
    """What a message to a task carries."""
    return {name: value for name, value in fields().items() if name in CARRIED}


def received(headers: Any) -> dict[str, Value]:
    """What a message carried: of a header that anybody could have written to the broker, what is sane."""
    if not isinstance(headers, Mapping):
        return {}
    return {
        name: value
        for name in CARRIED
        if isinstance(value := headers.get(name), int) or (isinstance(value, str) and SANE_ID.fullmatch(value))
    }

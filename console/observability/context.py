"""Context fields, which log lines and spans show: the request, user, organization, task, job, run and cluster.

Within a process they are in a context variable. From a request to the tasks that it sends, they travel in a message
header. Their values are row ids, generated names and the client's address, never a text that a customer wrote.
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

FIELDS = ("request_id", "client", "user", "organization", "task", "job", "run", "cluster")
"""All fields, in the order in which a log line shows them."""
TASK_FIELDS = ("request_id", "user", "organization")
"""The fields that a task inherits from the request that sent it."""
VALID_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{7,63}")
"""The request ids that are accepted from clients and proxies. Line breaks could forge log lines, and long ids fill the
log."""

_bound: ContextVar[dict[str, Value] | None] = ContextVar("bound", default=None)
"""The fields of the innermost block of `bound`, with those of the blocks around it; None outside of every block."""


def request_id(proposed: str) -> str:
    """Return the value of a request's X-Request-Id header if it is valid, else a new random id."""
    return proposed if VALID_ID.fullmatch(proposed) else secrets.token_hex(8)


def fields() -> dict[str, Value]:
    """Return the current fields, in the order of `FIELDS`."""
    current = _bound.get()
    return {name: current[name] for name in FIELDS if name in current} if current else {}


@contextmanager
def bound(**values: Value | None) -> Iterator[dict[str, Value]]:
    """Add fields for the duration of the block; values of None are left out.

    Yield the mapping of all current fields, to which `add` adds. The caller can read the mapping after the block, and
    then finds the added fields too.
    """
    merged = dict(_bound.get() or {})
    merged.update((name, value) for name, value in values.items() if value is not None)
    token = _bound.set(merged)
    try:
        yield merged
    finally:
        _bound.reset(token)


def add(**values: Value) -> None:
    """Add fields until the end of the innermost block of `bound`. Does nothing outside of such a block."""
    innermost = _bound.get()
    if innermost is not None:
        innermost.update(values)


def with_fields(describe: Callable[..., Mapping[str, Value]]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to run with the fields that `describe` returns for its arguments."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            with bound(**describe(*args, **kwargs)):
                return function(*args, **kwargs)

        return wrapper

    return decorate


def task_fields() -> dict[str, Value]:
    """Return the current fields that a task inherits, for its message."""
    return {name: value for name, value in fields().items() if name in TASK_FIELDS}


def fields_from_header(header: Any) -> dict[str, Value]:
    """Return the fields in a message's header. Invalid values are left out: other programs may use the broker too."""
    if not isinstance(header, Mapping):
        return {}
    received = {name: header.get(name) for name in TASK_FIELDS}
    return {
        name: value
        for name, value in received.items()
        if isinstance(value, int) or (isinstance(value, str) and VALID_ID.fullmatch(value))
    }

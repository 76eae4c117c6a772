"""Context fields of log lines and spans: the request, user, organization, task, job, run and cluster.

They are kept in a context variable within a process, and in a message header from a request to a task. They hold row
ids, generated names and the client's address, never text that a customer wrote.
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
"""Every field, in the order of a log line."""
TASK_FIELDS = ("request_id", "user", "organization")
"""The fields that a task inherits from the request that sent it."""
VALID_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{7,63}")
"""Request ids that are accepted from a proxy. Others could forge log lines, or fill the log."""

_bound: ContextVar[dict[str, Value] | None] = ContextVar("bound", default=None)


def request_id(proposed: str) -> str:
    """Return the id that a proxy proposed if it is valid, else a new one."""
    return proposed if VALID_ID.fullmatch(proposed) else secrets.token_hex(8)


def fields() -> dict[str, Value]:
    """Return the current fields, in the order of `FIELDS`."""
    bound = _bound.get()
    return {name: bound[name] for name in FIELDS if name in bound} if bound else {}


@contextmanager
def bound(**values: Value | None) -> Iterator[dict[str, Value]]:
    """Add fields for the block; values of None are left out.

    Yields the fields as a mapping. It also gets the fields that `add` adds later, and remains valid after the block.
    """
    merged = dict(_bound.get() or {})
    merged.update((name, value) for name, value in values.items() if value is not None)
    token = _bound.set(merged)
    try:
        yield merged
    finally:
        _bound.reset(token)


def add(**values: Value) -> None:
    """Add fields to the innermost block of `bound`; outside of a block nothing happens."""
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
    """Return the fields that a message to a task carries."""
    return {name: value for name, value in fields().items() if name in TASK_FIELDS}


def fields_from_header(header: Any) -> dict[str, Value]:
    """Return the valid fields of a message header, which anyone with access to the broker could have written."""
    if not isinstance(header, Mapping):
        return {}
    return {
        name: value
        for name in TASK_FIELDS
        if isinstance(value := header.get(name), int) or (isinstance(value, str) and VALID_ID.fullmatch(value))
    }

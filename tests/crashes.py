"""A process that is killed in the middle of a call: before its nth statement to the database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connection


class Crash(BaseException):
    """The process was killed. No `except Exception` catches it."""


def crash_at(statement: int, call: Callable[[], Any]) -> bool:
    """Call, and crash before statement number `statement`. Return whether it crashed; commits before that stay.

    A call with fewer statements completes.
    """
    left = statement

    def count(execute: Any, sql: Any, parameters: Any, many: Any, context: Any) -> Any:
        nonlocal left
        left -= 1
        if left <= 0:
            raise Crash
        return execute(sql, parameters, many, context)

    try:
        with connection.execute_wrapper(count):
            call()
    except Crash:
        connection.close()  # which rolls its open transaction back
        return True
    return False

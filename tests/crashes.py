"""Death at any step: a call that is cut off before its nth statement to the database, as `kill -9` would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connection


class Crash(BaseException):
    """The process is dead. No `except Exception` sees it."""


def crash_at(step: int, call: Callable[[], Any]) -> bool:
    """Make the call, and die before its statement number `step`. Whether it died; what was committed by then stays."""
    left = step

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
        connection.close()  # its open transaction is gone with it
        return True
    return False

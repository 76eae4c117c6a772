"""Several calls at once, on real threads with a database connection each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from django.db import connection


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Return what each call returned, or the exception it raised. All begin at the same moment."""
    barrier = Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait()
        try:
            return call()
        except Exception as error:
            return error
        finally:
            connection.close()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def raised(outcomes: list[Any]) -> list[Exception]:
    """Return the outcomes that are exceptions."""
    return [outcome for outcome in outcomes if isinstance(outcome, Exception)]

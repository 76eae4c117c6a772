"""Migrate the database at start, one process at a time.

An advisory lock in a session of its own serializes the processes. PostgreSQL releases it however its holder ends, and
the next process continues there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections

LOCK_ID = 0x7261696C
"""The number of the advisory lock; no other lock of the console uses it."""

_held = threading.local()


@contextmanager
def schema_lock() -> Iterator[None]:
    """Hold the lock of the database's schema for the block. Reentrant.

    The session is not Django's connection, which a long migration may close and open again. A pooler in transaction
    mode would hand the session's lock to somebody else: changes of the schema go to PostgreSQL directly.
    """
    if getattr(_held, "by_this_thread", False):
        yield
        return
    session = connections["default"].copy()
    try:
        with session.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", [LOCK_ID])
            _held.by_this_thread = True
            yield
    finally:
        _held.by_this_thread = False
        session.close()

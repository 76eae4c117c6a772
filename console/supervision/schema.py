"""Migrate the database at start, one process at a time.

An advisory lock serializes the processes. It is held by a separate database session. However its holder ends,
PostgreSQL releases the lock, and the next process continues the migrations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections

LOCK_ID = 0x7261696C
"""The number of the advisory lock; no other lock of the console uses it."""

_lock_state = threading.local()


@contextmanager
def schema_lock() -> Iterator[None]:
    """Hold the lock of the database's schema for the block. Reentrant.

    The session is not Django's connection, which a long migration may close and open again. DATABASE_URL must not lead
    through a pooler in transaction mode, which would give the session with its lock to another client.
    """
    if getattr(_lock_state, "is_held", False):
        yield
        return
    session = connections["default"].copy()
    try:
        with session.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", [LOCK_ID])
            _lock_state.is_held = True
            yield
    finally:
        _lock_state.is_held = False
        session.close()

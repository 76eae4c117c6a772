"""A lock of the database's schema, so that of several processes that start at once only one migrates at a time.

It is an advisory lock of PostgreSQL. If its holder dies, PostgreSQL releases the lock, and the next process continues
the migrations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections

LOCK_ID = 0x7261696C
"""The number of the advisory lock, arbitrary but different from the console's other locks. All versions must use the
same, so that an old and a new version exclude each other during an upgrade."""

_lock_state = threading.local()
"""The attribute `is_held` tells whether this thread holds the lock."""


@contextmanager
def schema_lock() -> Iterator[None]:
    """Hold the lock of the database's schema for the block. A thread that holds it may enter again.

    A separate database session holds the lock, because a migration may close and reopen Django's connection.
    DATABASE_URL must not lead through a pooler in transaction mode: it would give the session to another client.
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

"""The database's schema, brought up to date by whoever starts first. Hides how several who start at once take turns.

The one rule: one at a time. A lock of PostgreSQL's own is held meanwhile, on a session of its own: it falls with
whoever held it, however that ended, and the next one goes on where that one was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connections

TURN = 0x7261696C
"""The advisory lock's number; any, as long as nothing else of ours takes it."""

_mine = threading.local()


@contextmanager
def taking_turns() -> Iterator[None]:
    """Wait until nobody else of this database changes its schema, and keep others waiting meanwhile. Nests.

    The session is not Django's connection, which a long migration may close and open again. A pooler in transaction
    mode would hand the session's lock to somebody else: changes of the schema go to PostgreSQL directly.
    """
    if getattr(_mine, "turn", False):
        yield
        return
    turn = connections["default"].copy()
    try:
        with turn.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", [TURN])
            _mine.turn = True
            yield
    finally:
        _mine.turn = False
        turn.close()

"""PostgreSQL as Django speaks to it, with a cheaper look at whether a connection still stands.

Django asks with a statement before the first one of every request, task and look of a stream. A server that ended a
connection has closed its end of it, which shows without asking. The one rule: what was not asked for a while, or has
failed, is asked; only a network that drops connections without a word needs that.
"""

from __future__ import annotations

import select
import time
from typing import Any

from django.db.backends.postgresql import base
from psycopg import Connection
from psycopg.pq import TransactionStatus

ASK_SECONDS = 10.0


class DatabaseWrapper(base.DatabaseWrapper):
    """A connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen_at = -ASK_SECONDS

    def is_usable(self) -> bool:
        """Whether it stands. What is here to be read may be the server's last word."""
        now = time.monotonic()
        was_seen = now - self._seen_at < ASK_SECONDS and not self.errors_occurred
        if was_seen and self.connection is not None and _is_at_rest(self.connection):
            self._seen_at = now
            return True
        usable = bool(super().is_usable())
        self._seen_at = now if usable else -ASK_SECONDS
        return usable


def _is_at_rest(connection: Connection[Any]) -> bool:
    """Whether it is in no transaction, which may have failed, and the server has said nothing."""
    if connection.info.transaction_status != TransactionStatus.IDLE:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR)
    return not poll.poll(0)

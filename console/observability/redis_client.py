"""Redis for heartbeats and counters, with short time-outs: monitoring must not wait for the services it monitors.

The console works without the heartbeats and counters.
"""

from __future__ import annotations

from functools import cache

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

ANSWER_SECONDS = 1.0
"""How long a call waits for Redis, which answers within milliseconds unless it is down."""


@cache
def client() -> redis.Redis:
    """Return the client of this process. Its calls are not retried."""
    return redis.Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=ANSWER_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


def key(name: str) -> str:
    """Return the full key, with a prefix that separates this console from others on the same Redis."""
    return f"{settings.CACHES['default'].get('KEY_PREFIX', '')}trainyard:{name}"

"""The Redis client of heartbeats and counters.

Its timeouts are short, because requests and tasks can do without heartbeats and counters.
"""

from __future__ import annotations

from functools import cache

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

ANSWER_SECONDS = 1.0
"""How long a call waits for Redis. Redis answers within milliseconds unless it is down."""


@cache
def client() -> redis.Redis:
    """Return the client of this process. It does not retry failed calls."""
    return redis.Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=ANSWER_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


def key(name: str) -> str:
    """Return the full key of `name`. A KEY_PREFIX separates consoles that share one Redis; tests set it."""
    return f"{settings.CACHES['default'].get('KEY_PREFIX', '')}trainyard:{name}"

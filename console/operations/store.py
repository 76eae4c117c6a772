"""Where operations keep what is of the moment: a few keys in Redis. The one rule: the console works without them.

Calls end soon, answered or not: whoever watches must not wait for what is being watched.
"""

from __future__ import annotations

from functools import cache

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

ANSWER_SECONDS = 1.0


@cache
def client() -> redis.Redis:
    """Redis, with little patience."""
    return redis.Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=ANSWER_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


def key(name: str) -> str:
    """A key of ours, apart from those of another console (or test) on the same Redis."""
    return f"{settings.CACHES['default'].get('KEY_PREFIX', '')}trainyard:{name}"

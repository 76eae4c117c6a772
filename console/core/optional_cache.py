"""A cache in Redis that callers can do without: while Redis does not answer, nothing is found and nothing is stored.

Limits of guesses and of requests use Django's `cache` instead, whose calls raise RedisError. Without Redis nothing
counts attempts, so such a request must fail: `console.api.server_error` answers it with 503.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import redis
from django.core.cache import cache

T = TypeVar("T")


def get(key: str) -> Any:
    """Return the cached value; None if there is none."""
    try:
        return cache.get(key)
    except redis.RedisError:
        return None


def put(key: str, value: object, seconds: float) -> None:
    """Cache a value for so many seconds."""
    with suppress(redis.RedisError):
        cache.set(key, value, seconds)


def delete(key: str) -> None:
    """Remove a value from the cache, if it is there."""
    with suppress(redis.RedisError):
        cache.delete(key)


def get_or_compute(key: str, compute: Callable[[], T], seconds: float) -> T:
    """Return the cached value. If there is none, compute it and cache it for so many seconds.

    None is not cached, because it cannot be told from a missing value.
    """
    value: T | None = get(key)
    if value is None:
        value = compute()
        put(key, value, seconds)
    return value

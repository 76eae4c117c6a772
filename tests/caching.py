"""The cache of one test process."""

from __future__ import annotations

import redis
from django.conf import settings
from django.core.cache import cache


def clear_cache() -> None:
    """Delete this process's keys. `cache.clear()` would empty the server, which other test processes use too."""
    with redis.Redis.from_url(settings.CACHES["default"]["LOCATION"]) as client:
        if keys := list(client.scan_iter(cache.make_key("*"))):
            client.delete(*keys)

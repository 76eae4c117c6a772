"""Redis for a test, with keys that no other test uses."""

import uuid

import pytest

from console.observability import heartbeats, redis_client
from console.observability.counters import buffer


@pytest.fixture
def redis_keys(embedded, settings):
    """Heartbeats and counters under a prefix that no other test has."""
    buffer.flush()  # what other tests counted goes under their prefix
    settings.CACHES = {"default": {**settings.CACHES["default"], "KEY_PREFIX": uuid.uuid4().hex}}
    redis_client.client.cache_clear()
    heartbeats._next_at.clear()  # so that the next heartbeat is due at once
    yield redis_client.client()
    for key in redis_client.client().scan_iter(f"{redis_client.key('')}*"):
        redis_client.client().delete(key)
    heartbeats._next_at.clear()

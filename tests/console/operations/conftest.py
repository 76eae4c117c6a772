"""Redis of one's own, as far as keys go: what processes say and count begins with nothing."""

from __future__ import annotations

import uuid

import pytest

from console.operations import signs, store
from console.operations.tally import tally


@pytest.fixture
def shared(embedded, settings):
    """The keys of operations, under a prefix that nothing else has."""
    tally.flush()  # what other tests left goes to where they counted
    settings.CACHES = {"default": {**settings.CACHES["default"], "KEY_PREFIX": uuid.uuid4().hex}}
    store.client.cache_clear()
    signs._not_before.clear()
    yield store.client()
    for key in store.client().scan_iter(f"{store.key('')}*"):
        store.client().delete(key)
    signs._not_before.clear()


@pytest.fixture
def away(settings):
    """No Redis."""
    settings.REDIS_URL = "unix:///nowhere/redis.sock?db=0"
    store.client.cache_clear()
    yield
    store.client.cache_clear()

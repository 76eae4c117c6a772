"""Changes of jobs are published in Redis after their commit."""

import os

import pytest
import redis
from django.conf import settings
from django.db import transaction

from jobs import pubsub

pytestmark = pytest.mark.usefixtures("database_without_rows")  # commits are real, and these tests write no rows
UNUSED_JOB = 10**9 + os.getpid()
"""Test processes share one Redis; no other process has a job of this number."""


@pytest.fixture
def next_message(embedded):
    """Return a function that waits for the next message about UNUSED_JOB; it returns None if there is none.

    `embedded` starts Redis.
    """
    client = redis.Redis.from_url(settings.REDIS_URL)
    listener = client.pubsub()
    listener.subscribe(pubsub.channel(UNUSED_JOB))
    assert listener.get_message(timeout=5)["type"] == "subscribe"
    yield lambda seconds=5: listener.get_message(timeout=seconds)
    listener.close()
    client.close()


def test_a_change_is_published_after_its_commit_and_not_after_a_rollback(next_message):
    with transaction.atomic():
        pubsub.publish_state(UNUSED_JOB)
        transaction.set_rollback(True)
    with transaction.atomic():
        pubsub.publish_state(UNUSED_JOB)
        assert next_message(0.05) is None
    assert next_message()["data"] == b"changed"
    assert next_message(0.05) is None


def test_publishing_while_redis_is_away_is_logged_and_raises_nothing(monkeypatch, caplog, tmp_path):
    with redis.Redis(unix_socket_path=str(tmp_path / "none")) as away:
        monkeypatch.setattr(pubsub, "_client", lambda: away)
        pubsub.publish_state(UNUSED_JOB)
    assert "Redis does not answer" in caplog.text

import os

import pytest
import redis
from django.conf import settings
from django.db import transaction

from jobs import bell

NOBODYS = 10**9 + os.getpid()
"""Test processes share one Redis: a number that no other one's job has."""


@pytest.fixture
def heard(embedded):
    client = redis.Redis.from_url(settings.REDIS_URL)
    listener = client.pubsub()
    listener.subscribe(bell.channel(NOBODYS))
    assert listener.get_message(timeout=5)["type"] == "subscribe"
    yield lambda seconds=5: listener.get_message(timeout=seconds)
    listener.close()
    client.close()


@pytest.mark.django_db(transaction=True)
def test_it_rings_when_the_change_is_committed(heard):
    with transaction.atomic():
        bell.publish_state(NOBODYS)
        assert heard(0.05) is None
    assert heard()["data"] == b"changed"


@pytest.mark.django_db(transaction=True)
def test_what_was_rolled_back_rings_nobody(heard):
    with transaction.atomic():
        bell.publish_state(NOBODYS)
        transaction.set_rollback(True)
    assert heard(0.1) is None


@pytest.mark.django_db(transaction=True)
def test_redis_being_away_is_no_fault_of_the_change(monkeypatch, caplog, tmp_path):
    with redis.Redis(unix_socket_path=str(tmp_path / "nobody")) as away:
        monkeypatch.setattr(bell, "_client", lambda: away)
        bell.publish_state(NOBODYS)
    assert "Redis is away" in caplog.text


def test_a_queues_bell_is_heard_once_however_often_it_rang(embedded):
    assert not bell.ring_queue("here")
    with bell.QueueListener("here") as queue:
        assert not bell.ring_queue("there")
        assert not queue.wait(0.05)
        assert all(bell.ring_queue("here") for _ in range(3))
        assert queue.wait(5)
        assert not queue.wait(0.05)
    assert not bell.ring_queue("here")


def test_nobody_hears_a_queues_bell_while_redis_is_away(monkeypatch, tmp_path):
    with redis.Redis(unix_socket_path=str(tmp_path / "nobody")) as away:
        monkeypatch.setattr(bell, "_client", lambda: away)
        assert bell.ring_queue("here") is False

"""Rings when a job changed, for whoever watches it live, and when a queue did, for whoever starts what waits.

A Redis channel for each job and for each cluster's queue. A hint only; the rows are the truth.
"""

from __future__ import annotations

import contextlib
import logging
from functools import cache
from types import TracebackType
from typing import Self

import redis
from django.conf import settings
from django.db import transaction

from console.operations import store

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0


PREFIX = "job:"


def channel(job_pk: int) -> str:
    """The name of a job's channel."""
    return f"{PREFIX}{job_pk}"


def queue_channel(cluster: str) -> str:
    """The name of a cluster's queue's channel."""
    return store.key(f"queue:{cluster}")


class _Listener:
    """Hears bells from when the block is entered. All of it raises RedisError."""

    _channel: str
    """A pattern, as Redis has them."""

    def __enter__(self) -> Self:
        self._client = redis.Redis.from_url(settings.REDIS_URL)
        self._bells = self._client.pubsub()  # type: ignore[no-untyped-call]  # redis types only a part of itself
        try:
            self._bells.psubscribe(self._channel)
            self._bells.get_message(timeout=ANSWER_SECONDS)  # the answer: from here on nothing is missed
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._hang_up()
        self._close()

    def _hang_up(self) -> None:
        """Once this returns, Redis counts this listener no more: whoever rings is not told that somebody heard."""
        self._bells.punsubscribe()
        message = self._bells.get_message(timeout=ANSWER_SECONDS)
        while message is not None and message["type"] != "punsubscribe":
            message = self._bells.get_message(timeout=ANSWER_SECONDS)

    def _rang(self, seconds: float) -> set[str]:
        """The channels that rang: at least one, or none in so many seconds."""
        rang = set()
        message = self._bells.get_message(ignore_subscribe_messages=True, timeout=seconds)
        while message is not None:
            rang.add(message["channel"].decode())
            message = self._bells.get_message(ignore_subscribe_messages=True, timeout=0)
        return rang

    def _close(self) -> None:
        self._bells.close()
        self._client.close()


class Listener(_Listener):
    """Hears every job's bell."""

    _channel = f"{PREFIX}*"

    def wait(self, seconds: float) -> set[int]:
        """The jobs that rang: at least one, or none in so many seconds."""
        numbers = (name.removeprefix(PREFIX) for name in self._rang(seconds))
        return {int(number) for number in numbers if number.isdecimal()}


class QueueListener(_Listener):
    """Hears the bell of a cluster's queue."""

    def __init__(self, cluster: str) -> None:
        self._channel = queue_channel(cluster)

    def wait(self, seconds: float) -> bool:
        """Whether it rang, be it once or often, before so many seconds were over."""
        return bool(self._rang(seconds))


def publish_state(job_pk: int) -> None:
    """Ring once the current transaction is committed. Redis being away loses the ring, never the change."""
    transaction.on_commit(lambda: _ring(job_pk))


def ring_queue(cluster: str) -> bool:
    """Ring, now, for whoever starts what waits for a cluster. Gives whether anybody heard it."""
    try:
        return bool(_client().publish(queue_channel(cluster), "changed"))
    except redis.RedisError:
        return False


def _ring(job_pk: int) -> None:
    try:
        _client().publish(channel(job_pk), "changed")
    except redis.RedisError:
        logger.warning("Redis is away: watchers of job %s see its change at their next look.", job_pk)


@cache
def _client() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL)

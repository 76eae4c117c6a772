"""Rings when a job changed, for whoever watches it live: a Redis channel for each job.

A hint only; the rows are the truth.
"""

from __future__ import annotations

import logging
from functools import cache
from types import TracebackType

import redis
from django.conf import settings
from django.db import transaction

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0


PREFIX = "job:"


def channel(job_pk: int) -> str:
    """The name of a job's channel."""
    return f"{PREFIX}{job_pk}"


class Listener:
    """Hears every job's bell, from when the block is entered; `wait` gives which rang. All of it raises RedisError."""

    def __enter__(self) -> Listener:
        self._client = redis.Redis.from_url(settings.REDIS_URL)
        self._bells = self._client.pubsub()  # type: ignore[no-untyped-call]  # redis types only a part of itself
        try:
            self._bells.psubscribe(f"{PREFIX}*")
            self._bells.get_message(timeout=ANSWER_SECONDS)  # the answer: from here on nothing is missed
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def wait(self, seconds: float) -> set[int]:
        """The jobs that rang: at least one, or none in so many seconds."""
        rang = set()
        message = self._bells.get_message(ignore_subscribe_messages=True, timeout=seconds)
        while message is not None:
            number = message["channel"].decode().removeprefix(PREFIX)
            if number.isdecimal():
                rang.add(int(number))
            message = self._bells.get_message(ignore_subscribe_messages=True, timeout=0)
        return rang

    def _close(self) -> None:
        self._bells.close()
        self._client.close()


def publish_state(job_pk: int) -> None:
    """Ring once the current transaction is committed. Redis being away loses the ring, never the change."""
    transaction.on_commit(lambda: _ring(job_pk))


def _ring(job_pk: int) -> None:
    try:
        _client().publish(channel(job_pk), "changed")
    except redis.RedisError:
        logger.warning("Redis is away: watchers of job %s see its change at their next look.", job_pk)


@cache
def _client() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL)

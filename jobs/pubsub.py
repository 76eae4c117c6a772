"""Redis channels, one per job: a message means that the job's rows have changed.

Live views (`streams`) subscribe. Messages may be lost, so they also read the rows from time to time.
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

logger = logging.getLogger(__name__)

REPLY_SECONDS = 5.0
"""How long to wait for Redis to confirm a subscription. A Redis that runs answers within milliseconds."""
PREFIX = "job:"
"""The names of all channels begin with this; the job's id follows."""


def channel(job_pk: int) -> str:
    """Return the name of a job's channel."""
    return f"{PREFIX}{job_pk}"


def publish_state(job_pk: int) -> None:
    """Publish that a job changed, after the current transaction commits. Without Redis the message is lost."""
    transaction.on_commit(lambda: _publish(job_pk))


class Subscriber:
    """Receives the messages of all jobs inside a `with` block. Any method may raise RedisError."""

    def __enter__(self) -> Self:
        self._client = redis.Redis.from_url(settings.REDIS_URL)
        self._subscription = self._client.pubsub()  # type: ignore[no-untyped-call]  # redis types only a part of itself
        try:
            self._subscription.psubscribe(f"{PREFIX}*")
            # Wait for the confirmation of the subscription. From then on no message is missed.
            self._subscription.get_message(timeout=REPLY_SECONDS)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def wait(self, seconds: float) -> set[int]:
        """Wait until a job changes, at most `seconds`. Return the ids of the jobs that changed; empty if none did."""
        names = set()
        message = self._subscription.get_message(ignore_subscribe_messages=True, timeout=seconds)
        while message is not None:
            names.add(message["channel"].decode().removeprefix(PREFIX))
            message = self._subscription.get_message(ignore_subscribe_messages=True, timeout=0)
        return {int(name) for name in names if name.isdecimal()}

    def _close(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):  # the connection may be broken, which is why it is closed
            self._subscription.close()
        self._client.close()


def _publish(job_pk: int) -> None:
    try:
        _client().publish(channel(job_pk), "changed")
    except redis.RedisError:
        # 25 seconds: up to 1.5 times `streams.ROW_POLL_SECONDS`, and the time of the read.
        logger.warning("Redis does not answer: live views of job %s show its change up to 25 seconds later.", job_pk)


@cache
def _client() -> redis.Redis:
    return redis.Redis.from_url(settings.REDIS_URL)

"""Rings when a job changed, for whoever watches it live: a Redis channel for each job.

A hint only; the rows are the truth.
"""

from __future__ import annotations

import logging
from functools import cache

import redis
from django.conf import settings
from django.db import transaction

logger = logging.getLogger(__name__)


def channel(job_pk: int) -> str:
    """The name of a job's channel."""
    return f"job:{job_pk}"


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

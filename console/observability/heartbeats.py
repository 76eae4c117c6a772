"""Heartbeats of processes, in Redis: when each last worked, and figures such as open streams or free capacity.

The loop that does the work sends them: beat's tick, the worker's loop, the watcher's loop. A separate thread would send
them even while the work hangs.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import redis

from console.observability import liveness, redis_client

logger = logging.getLogger(__name__)

BEAT, WORKER, WATCHER, WEB, CLUSTER, BOOKS = "beat", "worker", "watcher", "web", "cluster", "books"
PROCESS_KINDS = (BEAT, WORKER, WATCHER, WEB)
KINDS = (*PROCESS_KINDS, CLUSTER, BOOKS)
"""CLUSTER and BOOKS are reports: the watcher's on a cluster's capacity, and the last check of the ledger."""
DISPATCH = "dispatch"
"""The part of the workers that starts jobs; the other workers' part is empty."""
INTERVAL_SECONDS = 1.0
"""The shortest time between two heartbeats of a process."""
RETRY_SECONDS = 5.0
"""How long a process sends no heartbeat after Redis did not answer."""
EXPIRY_SECONDS = 600.0
"""A process without a heartbeat for this long is removed, except the latest of its kind."""
_KEY = "signs"


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of one process.

    `part` names the cluster or queue that the process works on, if there are several; `at` is the Unix time of the
    sender's machine.
    """

    kind: str
    part: str
    process: str
    at: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def age_seconds(self) -> float:
        """Return how long ago the heartbeat was sent."""
        return max(0.0, time.time() - self.at)


_next_at: dict[tuple[str, str], float] = {}
"""When the next heartbeat of a kind and part is due, on the monotonic clock."""


def is_due(kind: str, part: str = "") -> bool:
    """Return whether `send` would send a heartbeat now."""
    return time.monotonic() >= _next_at.get((kind, part), 0.0)


def send(
    kind: str, part: str = "", *, interval_seconds: float = INTERVAL_SECONDS, liveness_file: str = "", **details: Any
) -> None:
    """Send a heartbeat of this process, at most once per `interval_seconds`. An unavailable Redis raises no error.

    `details` are stored with it. `liveness_file` is the name of the process's liveness file; empty: `kind`.
    """
    if not is_due(kind, part):
        return
    now = time.monotonic()
    _next_at[kind, part] = now + interval_seconds
    liveness.touch(liveness_file or kind)
    name = json.dumps([kind, part, f"{socket.gethostname()}:{os.getpid()}"])
    try:
        redis_client.client().hset(redis_client.key(_KEY), name, json.dumps({"at": time.time(), **details}))
    except redis.RedisError as error:
        logger.debug("heartbeat of %s was not stored: %s", kind, error)
        _next_at[kind, part] = now + RETRY_SECONDS


def recent() -> list[Heartbeat]:
    """Return the last heartbeat of each live process, and the latest of each kind and part; newest first.

    Also removes expired heartbeats (EXPIRY_SECONDS) from Redis. Raises redis.RedisError.
    """
    heartbeats = []
    for name, value in redis_client.client().hgetall(redis_client.key(_KEY)).items():
        details = json.loads(value)
        kind, part, process = json.loads(name)
        heartbeats.append(Heartbeat(kind, part, process, details.pop("at"), details))
    heartbeats.sort(key=lambda heartbeat: -heartbeat.at)
    newest_by_part: dict[tuple[str, str], Heartbeat] = {}
    expired = []
    for heartbeat in heartbeats:
        newest = newest_by_part.setdefault((heartbeat.kind, heartbeat.part), heartbeat)
        if heartbeat is not newest and heartbeat.age_seconds > EXPIRY_SECONDS:
            expired.append(heartbeat)
    if expired:
        names = [json.dumps([heartbeat.kind, heartbeat.part, heartbeat.process]) for heartbeat in expired]
        redis_client.client().hdel(redis_client.key(_KEY), *names)
    return [heartbeat for heartbeat in heartbeats if heartbeat not in expired]


def latest(heartbeats: list[Heartbeat], kind: str) -> dict[str, Heartbeat]:
    """Return the latest heartbeat of a kind for each part, from a list that is newest first."""
    by_part: dict[str, Heartbeat] = {}
    for heartbeat in heartbeats:
        if heartbeat.kind == kind:
            by_part.setdefault(heartbeat.part, heartbeat)
    return by_part

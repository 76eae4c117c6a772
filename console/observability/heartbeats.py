"""Heartbeats in Redis: when each process last worked, and details such as its open streams or a cluster's capacity.

A process sends them from the loop that does its work: Celery beat, a Celery worker's event loop, the watcher's loop. A
separate thread would send them even while the work hangs.
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

BEAT, WORKER, WATCHER, WEB, CLUSTER, LEDGER = "beat", "worker", "watcher", "web", "cluster", "books"
"""The values of `Heartbeat.kind`."""
PROCESS_KINDS = (BEAT, WORKER, WATCHER, WEB)
"""The kinds of heartbeats that tell that a process works."""
KINDS = (*PROCESS_KINDS, CLUSTER, LEDGER)
"""All kinds of heartbeats. Tasks of workers send the last two: CLUSTER with a cluster's capacity, and LEDGER with the
findings of a check of the ledger."""
DISPATCH = "dispatch"
"""The `part` of heartbeats of the dispatcher, whose kind is WORKER. The `part` of all other workers is empty."""
INTERVAL_SECONDS = 1.0
"""The shortest time between two heartbeats of a process: its loop may run many times a second."""
RETRY_SECONDS = 5.0
"""How long a process sends no heartbeat after Redis did not answer, so that its loop seldom waits for Redis."""
EXPIRY_SECONDS = 600.0
"""After this long the heartbeat of a process is removed, unless it is the latest of its kind and part. A process that
was silent for so long has ended: monitoring reports a late one after a minute at most."""
_KEY = "signs"
"""The name of the Redis hash. It is older than the term heartbeat; the processes of two versions must agree on it."""


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of one process.

    `part` names the cluster that the process watches or reports on, or is DISPATCH, or empty. `process` is the sender's
    host name and process id. `at` is the Unix time of the sender's machine.
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
"""When this process may send its next heartbeat, by kind and part, on the monotonic clock."""


def is_due(kind: str, part: str = "") -> bool:
    """Return whether `send` would send a heartbeat now."""
    return time.monotonic() >= _next_at.get((kind, part), 0.0)


def send(
    kind: str, part: str = "", *, interval_seconds: float = INTERVAL_SECONDS, liveness_file: str = "", **details: Any
) -> None:
    """Send a heartbeat of this process, unless the last was sent less than `interval_seconds` ago.

    Also touch the file `liveness_file`, by default named as `kind` (`console.observability.liveness`). `details` are
    JSON values that the heartbeat carries. An unavailable Redis raises no error.
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
    """Return the last heartbeat of each process, newest first. Remove expired ones (EXPIRY_SECONDS) from Redis.

    The latest of each kind and part never expires. Raises redis.RedisError.
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
    """Return the latest heartbeat of a kind by its part. `heartbeats` must be newest first, as from `recent`."""
    by_part: dict[str, Heartbeat] = {}
    for heartbeat in heartbeats:
        if heartbeat.kind == kind:
            by_part.setdefault(heartbeat.part, heartbeat)
    return by_part

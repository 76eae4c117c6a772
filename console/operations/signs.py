"""Signs of life: each process says now and then that it works, and what it sees. Kept in Redis.

The one rule: a sign is given by the work itself (a tick of beat's that was sent, a heartbeat of the worker's loop, a
look of the watcher's), never by a thread of its own that would go on while the work stands still.
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

from console import pulse
from console.operations import store

logger = logging.getLogger(__name__)

BEAT, WORKER, WATCHER, LIVE, CLUSTER, BOOKS = "beat", "worker", "watcher", "live", "cluster", "books"
EVERY_SECONDS = 1.0
PAUSE_SECONDS = 5.0
"""After Redis did not answer: the work goes on without."""
FORGOTTEN_SECONDS = 600.0
"""A process that has said nothing for so long is gone; the last sign of each kind is kept."""


@dataclass(frozen=True)
class Sign:
    """What one process said last. `part`: of what (a cluster); `at`: Unix seconds by that machine's clock."""

    kind: str
    part: str
    process: str
    at: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def age_seconds(self) -> float:
        """How long ago."""
        return max(0.0, time.time() - self.at)


_not_before: dict[tuple[str, str], float] = {}


def is_due(kind: str, part: str = "") -> bool:
    """Whether the next sign would be taken."""
    return time.monotonic() >= _not_before.get((kind, part), 0.0)


def give(kind: str, part: str = "", *, every_seconds: float = EVERY_SECONDS, **facts: Any) -> None:
    """Say that this process works on `kind`: at most once a second, and without a word where Redis is away."""
    if not is_due(kind, part):
        return
    now = time.monotonic()
    _not_before[kind, part] = now + every_seconds
    pulse.beat(kind)
    name = json.dumps([kind, part, f"{socket.gethostname()}:{os.getpid()}"])
    try:
        store.client().hset(store.key("signs"), name, json.dumps({"at": time.time(), **facts}))
    except redis.RedisError as error:
        logger.debug("no sign of %s: %s", kind, error)
        _not_before[kind, part] = now + PAUSE_SECONDS


def seen() -> list[Sign]:
    """The last sign of each process that gave one of late, and the newest of each kind and part. Newest first.

    Raises redis.RedisError.
    """
    signs = []
    for name, value in store.client().hgetall(store.key("signs")).items():
        facts = json.loads(value)
        kind, part, process = json.loads(name)
        signs.append(Sign(kind, part, process, facts.pop("at"), facts))
    signs.sort(key=lambda sign: -sign.at)
    kept: dict[tuple[str, str], Sign] = {}
    gone = []
    for sign in signs:
        newest = kept.setdefault((sign.kind, sign.part), sign)
        if sign is not newest and sign.age_seconds > FORGOTTEN_SECONDS:
            gone.append(sign)
    if gone:
        names = [json.dumps([sign.kind, sign.part, sign.process]) for sign in gone]
        store.client().hdel(store.key("signs"), *names)
    return [sign for sign in signs if sign not in gone]


def newest(signs: list[Sign], kind: str) -> dict[str, Sign]:
    """The newest sign of a kind for each part."""
    found: dict[str, Sign] = {}
    for sign in signs:
        if sign.kind == kind:
            found.setdefault(sign.part, sign)
    return found

"""A cluster behind a circuit: one that doesn't answer is left alone for a while, and so slows nobody else.

Hides how all processes know at once: the circuit is a key in the cache, open for as long as it lives there. The one
rule: an open circuit is told as BackendUnavailable, which callers are ready for; without a cache every call is made.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import redis
from django.core.cache import cache

from runtime.backends.base import Backend
from runtime.errors import BackendUnavailable

logger = logging.getLogger(__name__)

GUARDED = frozenset(
    {
        "submit", "describe", "logs", "samples", "stacks", "stop", "delete", "delete_checkpoints", "names", "capacity",
        "check_image", "isolation_gaps",
    }
)  # fmt: skip
"""What asks the cluster's API. The watcher's `changes` reconnects by itself."""
PAUSES = (5, 10, 20, 40, 60)
"""Seconds that a cluster is left alone after each failure in a row."""
SLOW_SECONDS = 20.0
"""A call that took as long, though it was answered, counts as a failure: others can't wait for such a cluster."""


def guarded(name: str, backend: Backend) -> Backend:
    """`backend` with its calls behind the circuit of the cluster `name`."""
    return cast("Backend", _Guarded(name, backend))


def circuit_is_open(name: str) -> bool:
    """Whether the cluster is left alone now."""
    return why_open(name) is not None


def why_open(name: str) -> str | None:
    """What the cluster said, or that it was slow, while it is left alone; else None."""
    return _cached(cache.get, _open(name))  # type: ignore[no-any-return]  # what `_fail` has put there


class _Guarded:
    """Passes everything on; see GUARDED."""

    def __init__(self, name: str, backend: Backend) -> None:
        self._name = name
        self._backend = backend

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._backend, method)
        return functools.partial(self._ask, call) if method in GUARDED else call

    def _ask(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if (reason := why_open(self._name)) is not None:
            raise BackendUnavailable(reason)
        begun = time.monotonic()
        try:
            answer = call(*arguments, **options)
        except BackendUnavailable as error:
            self._fail(str(error))
            raise
        if (took := time.monotonic() - begun) > SLOW_SECONDS:
            self._fail(f"It took {took:.0f} s to answer.")
        elif _cached(cache.get, _failures(self._name)):
            _cached(cache.delete, _failures(self._name))
        return answer

    def _fail(self, reason: str) -> None:
        failures = int(_cached(cache.get, _failures(self._name)) or 0)
        pause = PAUSES[min(failures, len(PAUSES) - 1)]
        _cached(cache.set, _failures(self._name), failures + 1, 10 * PAUSES[-1])
        if _cached(cache.add, _open(self._name), reason, pause):
            logger.warning("The cluster %s is left alone for %d s: %s", self._name, pause, reason)


def _open(name: str) -> str:
    return f"cluster-open:{name}"


def _failures(name: str) -> str:
    return f"cluster-failures:{name}"


def _cached(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except redis.RedisError:
        return None

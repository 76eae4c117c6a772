"""A circuit breaker per cluster: after a failed call, no process calls the cluster for a while.

An open circuit is a key in the Django cache (Redis), which all processes share. While the key exists, every call raises
BackendUnavailable. The key expires after a pause, or is deleted when the cluster answers. If Redis does not answer,
every call is made. RunUnreadable concerns one run, so it is no failure of the cluster.
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
from runtime.errors import BackendUnavailable, RunUnreadable

logger = logging.getLogger(__name__)

GUARDED = frozenset(
    {
        "submit", "describe", "logs", "samples", "stacks", "stop", "extend", "kill", "delete", "delete_shared",
        "names", "capacity", "check_image", "isolation_gaps",
    }
)  # fmt: skip
"""Methods of a backend that call the cluster's API. `changes` is left out: the watcher has pauses of its own before it
reconnects. `is_reachable` is left out too, because `close_if_reachable` calls it while the circuit is open."""
PAUSES = (5, 10, 20, 40, 60)
"""Seconds without calls after the first, second, … failure in a row, unless `close_if_reachable` ends the pause. The
first pause is one reconciliation interval. The last one is a minute, so that a cluster that recovered is soon used
again."""
MEMORY_SECONDS = 10 * PAUSES[-1]
"""How long the cache keeps the number of failures and the mark of a slow cluster. It is longer than any pause, because
failures in a row are counted over several pauses."""
SLOW_SECONDS = 20.0
"""A successful call that took longer counts as a failure: it kept a worker process busy for as long as a whole
reconciliation may take (`reconciliation.RECONCILE_SECONDS`)."""


def with_circuit_breaker(name: str, backend: Backend) -> Backend:
    """Return `backend` with a circuit breaker around its API calls. The cluster `name` has one circuit."""
    return cast("Backend", _GuardedBackend(name, backend))


def circuit_is_open(name: str) -> bool:
    """Whether the cluster is not called at the moment."""
    return why_open(name) is not None


def why_open(name: str) -> str | None:
    """Return the error that opened the circuit; None while it is closed."""
    return _call_cache(cache.get, _open_key(name))  # type: ignore[no-any-return]  # `_fail` stores a str


def close_if_reachable(name: str, backend: Backend) -> None:
    """Close the circuit of a cluster that did not answer, if it does now.

    Reconciliation calls this before it stops cancelled runs, which would otherwise wait for the end of the pause. A
    cluster that was too slow keeps its pause, because it would be slow again. `is_reachable` takes at most two seconds.
    """
    was_unreachable = circuit_is_open(name) and not _call_cache(cache.get, _slow_key(name))
    if was_unreachable and backend.is_reachable():
        _call_cache(cache.delete, _open_key(name))
        logger.info("The cluster %s answers again.", name)


class _GuardedBackend:
    """Passes attributes on to the backend, and wraps the methods in GUARDED."""

    def __init__(self, name: str, backend: Backend) -> None:
        self._name = name
        self._backend = backend

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._backend, method)
        return functools.partial(self._guard, call) if method in GUARDED else call

    def _guard(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the backend unless the circuit is open. Open it if the call fails or takes too long."""
        if (reason := why_open(self._name)) is not None:
            raise BackendUnavailable(reason)
        started = time.monotonic()
        try:
            result = call(*arguments, **options)
        except RunUnreadable:
            # One run's files cannot be read, which must not stop the calls for other runs, unless the storage hangs.
            self._fail_if_slow(started)
            raise
        except BackendUnavailable as error:
            # The last failure was no slow call, so `close_if_reachable` may end the pause.
            _call_cache(cache.delete, _slow_key(self._name))
            self._fail(str(error))
            raise
        if not self._fail_if_slow(started) and _call_cache(cache.get, _failures_key(self._name)):
            _call_cache(cache.delete, _failures_key(self._name))
        return result

    def _fail_if_slow(self, started: float) -> bool:
        """Count a failure if a call since `started` (monotonic) took too long. Return whether it did."""
        seconds = time.monotonic() - started
        if seconds <= SLOW_SECONDS:
            return False
        _call_cache(cache.set, _slow_key(self._name), True, MEMORY_SECONDS)
        self._fail(f"It took {seconds:.0f} s to answer.")
        return True

    def _fail(self, reason: str) -> None:
        """Count a failure and open the circuit for the pause that follows from the number of failures in a row."""
        failures = int(_call_cache(cache.get, _failures_key(self._name)) or 0)
        pause = PAUSES[min(failures, len(PAUSES) - 1)]
        # If the circuit is open already, `add` changes nothing: calls that fail together count once.
        if _call_cache(cache.add, _open_key(self._name), reason, pause):
            _call_cache(cache.set, _failures_key(self._name), failures + 1, MEMORY_SECONDS)
            logger.warning("The cluster %s is not called for %d s: %s", self._name, pause, reason)


def _open_key(name: str) -> str:
    return f"cluster-open:{name}"


def _slow_key(name: str) -> str:
    """Return the key that marks a cluster whose circuit is open because it was too slow."""
    return f"cluster-slow:{name}"


def _failures_key(name: str) -> str:
    return f"cluster-failures:{name}"


def _call_cache(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return `call(*arguments)`; None if Redis does not answer."""
    try:
        return call(*arguments)
    except redis.RedisError:
        return None

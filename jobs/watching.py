"""Follows the clusters: what a run writes and how it goes reaches its job's row as it happens; and starts what waits.

Hides reconnecting. The one rule: each cluster has threads of its own, so that one that is away, or slow, holds up no
other; whatever is missed, the sweep makes up for.
"""

from __future__ import annotations

import logging
import threading
import time

import redis
from django.db import close_old_connections, connections

from console.operations import signs
from jobs import bell, dispatch
from jobs.backend import cluster, cluster_names
from runtime.errors import BackendUnavailable, RuntimeFault
from runtime.specs import RunPhase

logger = logging.getLogger(__name__)

READ_EVERY_SECONDS = 0.25
"""A run that writes without pause is read this often, not at each write; its end is taken in at once."""
PAUSES = (1, 2, 5, 10, 30)
"""Seconds before a cluster whose changes could not be followed is asked again, after each failure in a row."""
STEADY_SECONDS = 60.0
"""Followed as long as this, a cluster's failures are forgotten."""
STOP_SECONDS = 3.0
HEARTBEAT_SECONDS = 1.0
"""How long a thread that hears nothing takes to see that it is to stop."""


def follow_all(stop: threading.Event) -> None:
    """Follow every cluster, and start what waits for it, until `stop` is set."""
    threads = [
        threading.Thread(target=work, name=f"{what}-{name}", daemon=True)
        for name in cluster_names()
        for what, work in (("watch", Follower(name, stop).follow), ("start", Starter(name, stop).work))
    ]
    for thread in threads:
        thread.start()
    stop.wait()
    for thread in threads:
        thread.join(STOP_SECONDS)


class Follower:
    """Follows one cluster."""

    def __init__(self, name: str, stop: threading.Event) -> None:
        self.name = name
        self._stop = stop
        self._read_at: dict[str, float] = {}
        self._waiting: set[str] = set()

    def follow(self) -> None:
        """Follow until told to stop, again whenever it breaks off."""
        failures = 0
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                self.follow_once()
            except BackendUnavailable as error:
                logger.warning("The cluster %s can't be followed: %s", self.name, error)
            except Exception:
                logger.exception("The cluster %s can't be followed.", self.name)
            finally:
                connections.close_all()
            failures = 0 if time.monotonic() - begun > STEADY_SECONDS else failures
            self._stop.wait(PAUSES[min(failures, len(PAUSES) - 1)])
            failures += 1

    def follow_once(self) -> None:
        """Follow until the cluster breaks off, or there is a word to stop. Raises what the cluster raises."""
        for gap in cluster(self.name).isolation_gaps():
            logger.warning("Isolation: %s (cluster %s)", gap, self.name)
        for changed in cluster(self.name).changes():
            if self._stop.is_set():
                return
            signs.give(signs.WATCHER, self.name)
            self._take_in(changed)

    def _take_in(self, changed: set[str]) -> None:
        self._waiting |= changed
        now = time.monotonic()
        due = {name for name in self._waiting if self._is_due(name, now)}
        self._waiting -= due
        for name in due:
            self._read_at[name] = now
            self._look(name)
        self._read_at = {name: at for name, at in self._read_at.items() if now - at < 60 or name in self._waiting}

    def _is_due(self, name: str, now: float) -> bool:
        if now - self._read_at.get(name, 0.0) >= READ_EVERY_SECONDS:
            return True
        try:
            return cluster(self.name).describe(name).phase is RunPhase.ENDED
        except RuntimeFault:
            return True  # nothing to wait for: the look at it will say what became of it

    def _look(self, name: str) -> None:
        """Bring one run's job up to date; a fault is logged, and the sweep makes up for it."""
        try:
            close_old_connections()
            dispatch.follow(run_name=name)
        except Exception:
            logger.exception("The change of %s could not be taken in; the sweep will.", name)


class Starter:
    """Starts what waits for one cluster, whenever its queue's bell rings: what rang meanwhile is one more pass."""

    def __init__(self, name: str, stop: threading.Event) -> None:
        self.name = name
        self._stop = stop

    def work(self) -> None:
        """Work until told to stop, again whenever it breaks off."""
        while not self._stop.is_set():
            try:
                self.work_once()
            except (redis.RedisError, OSError) as error:
                logger.warning("Nobody hears of the queue of %s: %s. The sweep starts what waits.", self.name, error)
            except Exception:
                logger.exception("Nobody hears of the queue of %s. The sweep starts what waits.", self.name)
            finally:
                connections.close_all()
            self._stop.wait(PAUSES[0])

    def work_once(self) -> None:
        """Work until Redis breaks off, or there is a word to stop. Raises what Redis raises."""
        with bell.QueueListener(self.name) as queue:
            self._start_what_waits()  # what rang before anybody listened was missed
            while not self._stop.is_set():
                if queue.wait(HEARTBEAT_SECONDS):
                    self._start_what_waits()

    def _start_what_waits(self) -> None:
        """One pass; a fault is logged, and the sweep makes up for it."""
        try:
            close_old_connections()
            dispatch.dispatch_queue(self.name)
        except Exception:
            logger.exception("What waits for %s could not be started; the sweep tries again.", self.name)

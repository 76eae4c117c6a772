"""Follow the clusters: update a job's row at each change of its run.

To read a run is to read its status and new output, and to update its job (`reconciliation.follow`). To describe it is
to read its status only (`Backend.describe`).

Each cluster has a thread of its own, so that a slow or unavailable cluster delays no other. `reconciliation` applies
changes that the watcher missed.
"""

from __future__ import annotations

import logging
import threading
import time

from django.db import close_old_connections, connections

from console.observability import heartbeats
from jobs import reconciliation
from jobs.clusters import cluster, cluster_names
from runtime.errors import BackendUnavailable
from runtime.specs import RunPhase

logger = logging.getLogger(__name__)

READ_INTERVAL_SECONDS = 0.25
"""Minimum interval between two reads of one run's output, so that a run that writes without pause is not read at every
write. The end of a run does not wait for it."""
PAUSE_FACTOR = 10.0
"""After a read, a run is not read again for this many times as long as the read took. Meanwhile the run may be
described, so that its end is seen soon; descriptions pause in the same way. So even a run that reports without end
takes at most a tenth of its cluster's thread for reads, and a tenth for descriptions."""
RECONNECT_PAUSES = (1, 2, 5, 10, 30)
"""Seconds before reconnecting to a cluster after the first, second, … failure in a row. The last one repeats."""
STABLE_SECONDS = 60.0
"""After a connection that lasted this long, longer than any pause, earlier failures no longer count."""
STOP_SECONDS = 3.0
"""How long to wait for each thread at shutdown. After that, threads end with the process. The next reconciliation
applies the changes that they had not processed."""


def follow_all(stop: threading.Event) -> None:
    """Follow every cluster until `stop` is set."""
    threads = [
        threading.Thread(target=ClusterFollower(name, stop).run, name=f"watch-{name}", daemon=True)
        for name in cluster_names()
    ]
    for thread in threads:
        thread.start()
    stop.wait()
    for thread in threads:
        thread.join(STOP_SECONDS)


class ClusterFollower:
    """Follows one cluster."""

    def __init__(self, name: str, stop: threading.Event) -> None:
        self.name = name
        self._stop = stop
        self._next_read_at: dict[str, float] = {}  # when each run may be read again, by the monotonic clock
        self._next_describe_at: dict[str, float] = {}  # when each run may be described again, while it may not be read
        self._unread: set[str] = set()  # runs that have changed since they were last read

    def run(self) -> None:
        """Follow the cluster until stopped; reconnect whenever the connection breaks."""
        failures = 0
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                self.follow_once()
            except BackendUnavailable as error:
                logger.warning("The cluster %s can't be followed: %s", self.name, error)
            except Exception:
                logger.exception("The cluster %s can't be followed.", self.name)
            finally:
                connections.close_all()  # this thread has no database connection open during the pause
            failures = 0 if time.monotonic() - started > STABLE_SECONDS else failures
            self._stop.wait(RECONNECT_PAUSES[min(failures, len(RECONNECT_PAUSES) - 1)])
            failures += 1

    def follow_once(self) -> None:
        """Follow the cluster until the connection breaks or the watcher stops. Raises the cluster's errors.

        First log what the cluster cannot isolate or limit, to remind the operator of it at each connection.
        """
        for gap in cluster(self.name).isolation_gaps():
            logger.warning("Isolation: %s (cluster %s)", gap, self.name)
        for changed in cluster(self.name).changes():
            if self._stop.is_set():
                return
            heartbeats.send(heartbeats.WATCHER, self.name)
            self._process(changed)

    def _process(self, changed: set[str]) -> None:
        """Read the changed runs that are due. The next call, at most a second later, reads others once they are due."""
        self._unread |= changed
        started_at = time.monotonic()
        due = {name for name in self._unread if self._is_due(name)}
        self._unread -= due
        for name in due:
            read_started_at = time.monotonic()
            self._read(name)
            self._next_read_at[name] = _pause_end(read_started_at, READ_INTERVAL_SECONDS)
        # Times in the past no longer delay anything.
        for times in (self._next_read_at, self._next_describe_at):
            for name in [name for name, at in times.items() if at <= started_at]:
                del times[name]

    def _is_due(self, name: str) -> bool:
        """Whether to read a run now: its pause after the last read is over, or a description says that it has ended."""
        now = time.monotonic()
        if now >= self._next_read_at.get(name, 0.0):
            return True
        if now < self._next_describe_at.get(name, 0.0):
            return False
        try:
            return cluster(self.name).describe(name).phase is RunPhase.ENDED
        except Exception:
            return True  # `_read` then meets and logs the error, so that the other runs are read
        finally:
            self._next_describe_at[name] = _pause_end(now)

    def _read(self, name: str) -> None:
        """Update one run's job. An error is logged, and the next reconciliation tries again."""
        try:
            close_old_connections()
            reconciliation.follow(run_name=name)
        except Exception:
            logger.exception("The change of %s could not be processed; the next reconciliation tries again.", name)


def _pause_end(started_at: float, min_seconds: float = 0.0) -> float:
    """Return when the pause ends after something that began at `started_at` and ends now, by the monotonic clock."""
    now = time.monotonic()
    return now + max(min_seconds, PAUSE_FACTOR * (now - started_at))

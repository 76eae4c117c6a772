"""Inject faults between a client and the fake API server, at the request that a test names.

Every request is recorded, so a test can count the requests of an action, and then break each of them by its number.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field


class Fault(enum.StrEnum):
    """A fault that a request meets."""

    TIMEOUT_BEFORE = "no response, not carried out"
    TIMEOUT_AFTER = "no response, carried out"
    BROKEN_BEFORE = "connection broken, not carried out"
    BROKEN_AFTER = "connection broken, carried out"
    TOO_MANY = "429"
    INTERNAL = "500"
    STALE = "a read returns an earlier state"


BEFORE = {Fault.TIMEOUT_BEFORE, Fault.BROKEN_BEFORE}
AFTER = {Fault.TIMEOUT_AFTER, Fault.BROKEN_AFTER}
TIMEOUTS = {Fault.TIMEOUT_BEFORE, Fault.TIMEOUT_AFTER}
REFUSALS = {
    Fault.TOO_MANY: (429, "TooManyRequests", "the server has received too many requests and has asked us to try later"),
    Fault.INTERNAL: (500, "InternalError", "Internal error occurred: etcdserver: leader changed"),
}


@dataclass
class Faults:
    """The faults of one server. Thread-safe."""

    calls: list[str] = field(default_factory=list)
    """All requests so far, such as `create jobs`."""
    hold_seconds: float = 30.0
    """How long a request that times out is held."""
    retry_after_seconds: int = 1
    """The Retry-After header of a 429."""
    watch_drops_after: int | None = None
    """The number of events after which a watch breaks."""
    watch_repeats: bool = False
    """Whether a watch sends every event twice."""
    watch_lag_seconds: float = 0.0
    """How late a watch sends events."""
    down: bool = False
    """Whether every connection breaks."""
    stale_version: int = 0
    """The resource version whose state a read with Fault.STALE returns."""
    _armed: dict[int, Fault] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)
    """Once it is set, the requests that are held break. `disarm` sets it, and replaces it for later ones."""

    def arm(self, nth: int, fault: Fault, *, version: int, times: int = 1) -> None:
        """Inject a fault into the nth request from now on (0 is the next), and into the following `times - 1`.

        `version` is the `stale_version`.
        """
        with self.lock:
            first = len(self.calls) + nth
            self._armed = dict.fromkeys(range(first, first + times), fault)
            self.stale_version = version

    def disarm(self) -> None:
        """Remove all faults, and release the requests that are held."""
        with self.lock:
            self._armed = {}
            self.down = self.watch_repeats = False
            self.watch_drops_after, self.watch_lag_seconds = None, 0.0
        self.released.set()
        self.released = threading.Event()

    def next_fault(self, call: str) -> Fault | None:
        """Count a request and return its fault."""
        with self.lock:
            self.calls.append(call)
            return Fault.BROKEN_BEFORE if self.down else self._armed.get(len(self.calls) - 1)

"""Faults on the way between a client and the fake API server, each at the call that a test names.

The one rule: every call over HTTP is counted, in order, whether it is hurt or not; what a test hurts it has counted
before.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field


class Fault(enum.StrEnum):
    """What can happen to a call."""

    TIMEOUT_BEFORE = "timeout before"
    """No answer, and nothing was done."""
    TIMEOUT_AFTER = "timeout after"
    """No answer, though it was done."""
    BROKEN_BEFORE = "broken before"
    """The connection broke before it was done."""
    BROKEN_AFTER = "broken after"
    """The connection broke after it was done."""
    TOO_MANY = "429"
    INTERNAL = "500"
    UNAVAILABLE = "503"
    STALE = "stale"
    """A read shows the cluster as it was when the fault was armed."""


DONE = {Fault.TIMEOUT_AFTER, Fault.BROKEN_AFTER}
HELD = {Fault.TIMEOUT_BEFORE, Fault.TIMEOUT_AFTER}
ANSWERS = {
    Fault.TOO_MANY: (429, "TooManyRequests", "the server has received too many requests and has asked us to try later"),
    Fault.INTERNAL: (500, "InternalError", "Internal error occurred: etcdserver: leader changed"),
    Fault.UNAVAILABLE: (503, "ServiceUnavailable", "apiserver is shutting down"),
}


@dataclass(frozen=True)
class Call:
    """One request: `create jobs`, `get pods/log`, `watch pods`."""

    verb: str
    what: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.what}"


@dataclass
class Faults:
    """What is armed. Thread-safe."""

    calls: list[Call] = field(default_factory=list)
    hold_seconds: float = 30.0
    retry_after_seconds: int = 1
    """What a 429 tells."""
    watch_drops_after: int | None = None
    """A watch is closed after so many events."""
    watch_repeats: bool = False
    """Every event of a watch comes twice."""
    watch_lag_seconds: float = 0.0
    """Events come so much later."""
    down: bool = False
    """Nothing is answered: every connection breaks."""
    _armed: dict[int, Fault] = field(default_factory=dict)
    stale_version: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)

    def arm(self, nth: int, fault: Fault, *, version: int, times: int = 1) -> None:
        """Hurt the nth call from now on (0 is the next), and as many after it as `times` says."""
        with self.lock:
            first = len(self.calls) + nth
            self._armed = dict.fromkeys(range(first, first + times), fault)
            self.stale_version = version

    def disarm(self) -> None:
        """No more of it; whoever is held is let go."""
        with self.lock:
            self._armed = {}
            self.down = self.watch_repeats = False
            self.watch_drops_after, self.watch_lag_seconds = None, 0.0
        self.released.set()
        self.released = threading.Event()

    @property
    def pending(self) -> bool:
        """Whether a fault is armed that has not happened."""
        with self.lock:
            return any(number >= len(self.calls) for number in self._armed)

    def meet(self, call: Call) -> Fault | None:
        """Count the call; what happens to it."""
        with self.lock:
            number = len(self.calls)
            self.calls.append(call)
            return Fault.BROKEN_BEFORE if self.down else self._armed.get(number)

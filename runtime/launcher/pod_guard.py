"""What keeps a pod's time where its first process cannot: shared storage that stands still may hold a write for ever.

The one rule: a thread of its own, which does nothing at all as long as the other one is not late.
"""

from __future__ import annotations

import threading
import time
from typing import Callable, Optional

LATE_SECONDS = 3.0
_LOOK_SECONDS = 1.0


class Guard:
    """`kill` ends what runs, `leave` says the last word and ends this process.

    `kill_at` is when the other thread would have done the one, `leave_at` when it would have done the other (monotonic;
    None: never).
    """

    def __init__(self, kill: Callable[[], None], leave: Callable[[], None]) -> None:
        self._kill = kill
        self._leave = leave
        self._over = threading.Event()
        self.kill_at: Optional[float] = None
        self.leave_at: Optional[float] = None

    def watch(self) -> None:
        """Begin. This process must not fork any more."""
        threading.Thread(target=self._look_on, name="guard", daemon=True).start()

    def stop(self) -> None:
        """The other thread has said the last word."""
        self._over.set()

    def _look_on(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if self.kill_at is not None and now > self.kill_at + LATE_SECONDS:
                self.kill_at = None
                self._kill()
                self.leave_at = now + LATE_SECONDS
            if self.leave_at is not None and now > self.leave_at:
                self._leave()
                return

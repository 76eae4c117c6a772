"""Enforce a pod's deadline even if the main thread is blocked: a write to stalled storage may never return.

A second thread of the pod's first process acts only if the main thread is late.
"""

from __future__ import annotations

import threading
import time
from typing import Callable, Optional

MAX_LATE_SECONDS = 3.0
"""How late the main thread may be before this thread acts. On a loaded node the main thread may be a second late."""
_CHECK_SECONDS = 1.0
"""Interval at which the thread looks at the clock: several times within `MAX_LATE_SECONDS`."""


class DeadlineThread:
    """Calls `kill` and `exit_process` if the main thread has not done their work in time.

    `kill` ends all other processes. `exit_process` writes the last record and ends this process. `kill_at` is when the
    main thread should kill; it may be `MAX_LATE_SECONDS` late. `exit_at` is when it must have ended this process at the
    latest. Both are monotonic; None: never.
    """

    def __init__(self, kill: Callable[[], None], exit_process: Callable[[], None]) -> None:
        self._kill = kill
        self._exit_process = exit_process
        self.kill_at: Optional[float] = None
        self.exit_at: Optional[float] = None

    def start(self) -> None:
        """Start the thread. This process must not fork afterwards, since forking with threads is unsafe."""
        threading.Thread(target=self._run, name="deadline", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_CHECK_SECONDS)  # nothing could wake this thread: a main thread that hangs sends no event
            now = time.monotonic()
            if self.kill_at is not None and now > self.kill_at + MAX_LATE_SECONDS:
                self.kill_at = None
                self._kill()
                self.exit_at = now + MAX_LATE_SECONDS
            if self.exit_at is not None and now > self.exit_at:
                self._exit_process()
                return

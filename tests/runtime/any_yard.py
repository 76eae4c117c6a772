"""The words in which tests speak of runs, whatever the backend.

The one rule: nobody looks again and again; a change wakes who waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.backends.base import Backend
from runtime.specs import RunPhase, RunSpec, RunStatus


class AnyYard:
    """A backend with a workspace and a data set. A yard of its own kind says what is not said here."""

    backend: Backend
    keeps_output: bool
    """Whether what a run wrote outlives its pods: not where storage is not shared and a stop removes them."""
    late_seconds = 0.0
    """How long after its start a run's deadline may begin, and how exact its times are."""
    patience = 60.0
    """Seconds in which anything that is waited for has to have happened."""

    def another(self) -> Backend:
        """One more backend for the same cluster, as another process of the console would have it."""
        raise NotImplementedError

    def spec(self, source: str = "print('hello')", /, **changes: Any) -> RunSpec:
        """A spec whose workspace holds the script as `train.py`."""
        raise NotImplementedError

    def all_logs(self, name: str) -> str:
        """What there is to know of a run, for a failed test's message."""
        raise NotImplementedError

    def lose_node(self, node: int, name: str = "job-1-1") -> None:
        """One node of the run goes away, without the code's doing."""
        raise NotImplementedError

    def left_behind(self) -> list[str]:
        """What is still there of runs that were deleted."""
        raise NotImplementedError

    def wait(self, name: str, until: Callable[[RunStatus], bool], seconds: float = 0.0) -> RunStatus:
        """The run's first status for which `until` holds; fails when there is none in time."""
        seconds = seconds or self.patience
        status = self.backend.describe(name)
        if until(status):
            return status
        for _names in self.backend.changes(stop_after=seconds):
            status = self.backend.describe(name)
            if until(status):
                return status
        raise AssertionError(f"not in {seconds} s: {status}\n{self.all_logs(name)}")

    def wait_for_end(self, name: str = "job-1-1") -> RunStatus:
        """The run's last status."""
        return self.wait(name, lambda status: status.phase is RunPhase.ENDED)

    def wait_for_text(self, text: str, name: str = "job-1-1", rank: int = 0) -> RunStatus:
        """The run's status once a rank has printed the text."""
        return self.wait(name, lambda _status: text in self.log(rank, name))

    def run(self, source: str, /, **changes: Any) -> RunStatus:
        """Submit and wait for the end."""
        spec = self.spec(source, **changes)
        self.backend.submit(spec)
        return self.wait_for_end(spec.name)

    def log(self, rank: int = 0, name: str = "job-1-1") -> str:
        """Everything that a rank printed."""
        return self.backend.logs(name, rank, limit=1 << 24).text

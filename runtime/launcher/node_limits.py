"""What every node of a run is held to, wherever it runs: its deadline, that its launcher speaks, its memory.

The one rule: limits say what is wrong and act on nothing; who keeps the node (`node`) asks a few times a second, and
does. All moments are this process's own monotonic clock.
"""

from __future__ import annotations

import time

from .kernel import Counter
from .record import Record, Verdict

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, Mapping, Optional

SILENCE_SECONDS = 12.0
KILL_MARGIN_SECONDS = 0.25
"""SIGKILL goes out this long before the deadline, so that nothing is left when it is there."""
TICK_SECONDS = 0.25
AFTERMATH_SECONDS = 30.0
"""A rank that fails this soon after the kernel has killed for want of memory fails of it: a killed helper, an echo."""


class NodeLimits:
    """The node's limits, as its order gives them.

    `term_at` is when the ranks are to be asked to end, `kill_at` when nothing may run any more; None: not known yet.
    """

    def __init__(self, order: Mapping[str, Any], record: Record) -> None:
        self._order = order
        self._record = record
        self._begun = self._heard = time.monotonic()
        self._looked_at = float("-inf")
        self._oom = Counter()
        self.term_at: Optional[float] = None
        self.kill_at: Optional[float] = None

    # Time

    def running(self, ranks_by_pid: Mapping[int, int]) -> None:
        """These ranks run, perhaps again; with the first time the deadline is set."""
        del ranks_by_pid  # for those who look at single processes
        deadline = float(self._order["deadline_seconds"])
        if self._record.started or not deadline:
            return
        now = time.monotonic()
        grace = min(float(self._order["grace_seconds"]), deadline / 2)
        self.term_at = now + max(0.0, deadline - grace)
        self.kill_by(now + max(0.0, deadline - KILL_MARGIN_SECONDS))

    def heard(self) -> None:
        """The launcher has spoken."""
        self._heard = time.monotonic()

    def silent(self, now: float) -> bool:
        """Whether the launcher has not spoken for too long."""
        return now - self._heard > SILENCE_SECONDS

    def kill_by(self, moment: float) -> None:
        """Nothing may run past this moment; an earlier one stays."""
        if self.kill_at is None or moment < self.kill_at:
            self.kill_at = moment

    @property
    def tick_seconds(self) -> float:
        """How long after a look the next one is due."""
        return TICK_SECONDS

    def patience(self, now: float) -> float:
        """Seconds until something has to be looked at."""
        look_at = self._looked_at + self.tick_seconds
        moments = [moment for moment in (self.term_at, self.kill_at, look_at) if moment is not None]
        return max(0.0, min([self.tick_seconds, *(moment - now for moment in moments)]))

    def due(self, now: float) -> bool:
        """Whether it is time for another `look`."""
        if now < self._looked_at + self.tick_seconds:
            return False
        self._looked_at = now
        return True

    def time_is_up(self) -> Verdict:
        """What the deadline says."""
        data = {"limit_seconds": self._order["deadline_seconds"]}
        return Verdict("time_limit", "time_limit", "The run reached its time limit.", data=data)

    # What is wrong

    def look(self, now: float) -> Optional[Verdict]:
        """What is wrong now, if anything."""
        raise NotImplementedError

    def explain(self, found: Mapping[str, Any], now: float) -> Optional[Verdict]:
        """What the kernel's limits have to do with a rank that failed; None where nothing."""
        raise NotImplementedError

    @staticmethod
    def recent(counted: Counter, now: float) -> bool:
        """Whether the kernel did that so lately that a rank which fails now may fail of it."""
        return counted.at is not None and now - counted.at <= AFTERMATH_SECONDS

    def out_of_memory(self, rank: Optional[int], used_bytes: Optional[int] = None) -> Verdict:
        """The node, and where it is known which of its ranks, used more than there is."""
        node, limit = self._record.node, int(self._order.get("memory_bytes", 0)) >> 20
        data: Dict[str, Any] = {"limit_mib": limit}
        message = "Node {} used more than the {} MiB of memory it has.".format(node, limit)
        if used_bytes is not None:
            data["used_mib"] = used_bytes >> 20
            message = "Node {} used {} MiB of memory, more than the {} MiB it has.".format(
                node, data["used_mib"], limit
            )
        return Verdict("out_of_memory", "out_of_memory", message, rank=rank, data=data)

    def too_many_processes(self, rank: Optional[int], limit: Optional[int]) -> Verdict:
        """The node was refused a process or thread; `limit` is how many it may have, where that is known."""
        message = "Node {} was refused another process.".format(self._record.node)
        if limit:
            message = "Node {} ran more than {} processes at once.".format(self._record.node, limit)
        data = {"limit": limit} if limit else {}
        return Verdict("code_failed", "too_many_processes", message, rank=rank, data=data)

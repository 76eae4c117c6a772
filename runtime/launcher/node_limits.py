"""Limits of every node: its deadline, whether its launcher answers, and its memory.

This module only detects violations. The supervisor (`node`) checks several times a second and acts. Times are of this
process's monotonic clock.

If the launcher dies or stops answering, who pays depends on whether customer code has started. If it has, the customer
pays: the code shares the launcher's user and node, and the supervisor still runs, so the machine works. Otherwise the
platform pays. Two observations override this rule. If the supervisor was itself stopped for a while, the launcher's
silence does not count. If the kernel has counted OOM kills, they may explain why the launcher died.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Mapping, Optional, TypedDict

from .cgroup_events import EventCounter
from .record import Record, Verdict

SILENCE_SECONDS = 12.0
"""How long a launcher may send no message. It sends a heartbeat every second, and under load ten may be late. A message
to another launcher may block it for 10 s (`rendezvous.peers.SILENCE_SECONDS`)."""
KILL_MARGIN_SECONDS = 0.25
"""SIGKILL is sent this long before the deadline, so that no process is left at the deadline. The kernel ends killed
processes within milliseconds, unless they release much memory."""
CHECK_SECONDS = 0.25
"""Interval of checks if the kernel does not enforce the limits. Between two checks a process may exceed them, so the
interval is short; a check takes milliseconds."""
STOPPED_SECONDS = 5.0
"""If two checks are further apart than this, this process was stopped, perhaps with the whole machine. Normally they
are 0.25 to 1 s apart."""
EVENT_EFFECT_SECONDS = 30.0
"""How long after an event (an OOM kill, a refused process, a starved launcher) a failure may be its effect. A rank may
fail late, because it lost a helper process or waited for a killed peer."""


class NodePlan(TypedDict, total=False):
    """The limits of a node that all backends share."""

    deadline_seconds: float
    """Counted from the start of the ranks; 0: no deadline."""
    grace_seconds: float
    """How long before the deadline the ranks get SIGTERM."""
    log_limit_bytes: int
    """The limit of each rank's log."""
    memory_bytes: int
    """How much memory the node's processes may use together."""
    disk_bytes: int
    """The disk limit: how much the run may add to its folders."""
    disk_by_quota: bool
    """Whether the organization's storage quota, not the run's own limit, sets `disk_bytes`."""
    written: Dict[str, str]
    """The folders that the run may write to, by name. The key keeps its old name, since launchers of earlier versions
    may read this plan."""


class NodeLimits:
    """The limits of one node.

    `term_at` is when the ranks get SIGTERM, `kill_at` when everything is killed; None while no such time is set.
    """

    def __init__(self, plan: NodePlan, record: Record) -> None:
        self._plan = plan
        self._record = record
        self._created_at = self._last_message_at = self._silence_checked_at = time.monotonic()
        self._is_code_starting = False  # the launcher has sent `starting`: the code may run from then on
        self._checked_at = float("-inf")  # so that the first check is due at once
        self._oom_counter = EventCounter()
        self.term_at: Optional[float] = None
        self.kill_at: Optional[float] = None

    # Time

    def note_running(self, ranks_by_pid: Mapping[int, int]) -> None:
        """Note that these ranks run; the first call starts the deadline."""
        del ranks_by_pid  # for subclasses that measure each process
        deadline_seconds = float(self._plan["deadline_seconds"])
        if self._record.has_started or not deadline_seconds:
            return
        now = time.monotonic()
        # At most half of the time, since a short run must not spend most of its time in the grace period.
        grace_seconds = min(float(self._plan["grace_seconds"]), deadline_seconds / 2)
        self.term_at = now + max(0.0, deadline_seconds - grace_seconds)
        self.kill_by(now + max(0.0, deadline_seconds - KILL_MARGIN_SECONDS))

    def extend(self, deadline_seconds: float) -> None:
        """Move the deadline to `deadline_seconds` after the start of the ranks, if that is later and they still run.

        Once SIGTERM is sent, the deadline stays, because the run is ending.
        """
        added_seconds = deadline_seconds - float(self._plan["deadline_seconds"])
        if added_seconds <= 0 or self.term_at is None or self.kill_at is None:
            return
        self._plan["deadline_seconds"] = deadline_seconds
        self.term_at += added_seconds
        self.kill_at += added_seconds

    def note_code_started(self) -> None:
        """Note that customer code may run from now on."""
        self._is_code_starting = True

    @property
    def code_has_started(self) -> bool:
        """Whether customer code may have run."""
        return self._is_code_starting or self._record.has_started

    def note_message(self) -> None:
        """Note that the launcher has sent a message."""
        self._last_message_at = time.monotonic()

    def is_silent(self, now: float) -> bool:
        """Whether the launcher has sent no message for too long. Must be called at every check.

        The time between two calls shows whether this process itself was stopped.
        """
        previous_check_at, self._silence_checked_at = self._silence_checked_at, now
        if now - previous_check_at > STOPPED_SECONDS:
            # The launcher was stopped together with this process.
            self._last_message_at = now
        return now - self._last_message_at > SILENCE_SECONDS

    def kill_by(self, at: float) -> None:
        """Set `kill_at` to this time, unless `kill_at` is earlier already."""
        if self.kill_at is None or at < self.kill_at:
            self.kill_at = at

    @property
    def check_interval(self) -> float:
        """How many seconds to wait between two checks."""
        return CHECK_SECONDS

    def timeout(self, now: float) -> float:
        """Return the seconds until the next timer is due."""
        check_at = self._checked_at + self.check_interval
        timers = [at for at in (self.term_at, self.kill_at, check_at) if at is not None]
        return max(0.0, min([self.check_interval, *(at - now for at in timers)]))

    def is_due(self, now: float) -> bool:
        """Whether the next `check` is due. The caller must then call `check`, because the next interval has begun."""
        if now < self._checked_at + self.check_interval:
            return False
        self._checked_at = now
        return True

    def time_limit_verdict(self) -> Verdict:
        """Return the verdict for a run that has reached its deadline."""
        data = {"limit_seconds": self._plan["deadline_seconds"]}
        return Verdict(kind="time_limit", code="time_limit", message="The run reached its time limit.", data=data)

    # Verdicts

    def check(self, now: float) -> Optional[Verdict]:
        """Return a verdict if a limit is exceeded, else None."""
        raise NotImplementedError

    def explain_failure(self, failure: Mapping[str, Any], now: float) -> Optional[Verdict]:
        """Return the limit that explains a failed rank or a lost node; None if none does."""
        raise NotImplementedError

    def launcher_killed_verdict(self, event: str) -> Verdict:
        """Return the verdict for a launcher that died or fell silent; `event` completes "The launcher of node 0"."""
        node = self._record.node
        message = "The launcher of node {} {}: the run's own processes stopped it or kept it from its work.".format(
            node, event
        )
        return Verdict(kind="code_failed", code="launcher_killed", message=message)

    @staticmethod
    def is_recent(counter: EventCounter, now: float) -> bool:
        """Whether this counter increased so recently that its event explains a rank that fails now."""
        return counter.increased_at is not None and now - counter.increased_at <= EVENT_EFFECT_SECONDS

    def out_of_memory_verdict(self, rank: Optional[int], used_bytes: Optional[int] = None) -> Verdict:
        """Return the verdict for a node that used too much memory; `rank` where one can be blamed."""
        node, limit = self._record.node, int(self._plan.get("memory_bytes", 0)) >> 20
        data: Dict[str, Any] = {"limit_mib": limit}
        message = "Node {} used more than the {} MiB of memory it has.".format(node, limit)
        if used_bytes is not None:
            data["used_mib"] = used_bytes >> 20
            message = "Node {} used {} MiB of memory, more than the {} MiB it has.".format(
                node, data["used_mib"], limit
            )
        return Verdict(kind="out_of_memory", code="out_of_memory", message=message, rank=rank, data=data)

    def too_many_processes_verdict(self, rank: Optional[int], limit: Optional[int]) -> Verdict:
        """Return the verdict for a refused process or thread; `limit` where it is known."""
        message = "Node {} was refused another process.".format(self._record.node)
        if limit:
            message = "Node {} ran more than {} processes at once.".format(self._record.node, limit)
        data = {"limit": limit} if limit else {}
        return Verdict(kind="code_failed", code="too_many_processes", message=message, rank=rank, data=data)

"""What a pod's node is held to, as its first process can see it: its time, that its launcher answers, memory, disk.

The one rule: limits say what is wrong and act on nothing. What is wrong after the code has begun is the code's doing as
far as anybody in here can tell: it can kill and stop the launcher, and no word from inside makes a run free.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Mapping, Optional

from . import disk, kernel
from .processes import Exit
from .record import Record, Verdict

SILENCE_SECONDS = 12.0
START_MARGIN_SECONDS = 15.0
KILL_MARGIN_SECONDS = 0.25
"""SIGKILL goes out this long before the deadline, so that nothing is left when it is there."""
TICK_SECONDS = 0.25
_FROZEN_SECONDS = 5.0
_AFTERMATH_SECONDS = 30.0
"""A rank that fails this soon after the kernel has killed for want of memory fails of it: a killed helper, an echo."""


class PodLimits:
    """The node's limits, as its order gives them."""

    silence_seconds = SILENCE_SECONDS

    def __init__(self, order: Mapping[str, Any], record: Record) -> None:
        self._order = order
        self._record = record
        self._begun = self._heard = self._looked = time.monotonic()
        self._launched = False
        self._watch_at = 0.0
        self._oom = kernel.Counter(kernel.oom_kills())
        self._disk: Optional[disk.Gauge] = None
        if order.get("disk_bytes") and record.node == 0:
            self._disk = disk.Gauge(int(order["disk_bytes"]), order["written"])
        self.term_at: Optional[float] = None
        self.kill_at: Optional[float] = None

    @property
    def start_seconds(self) -> float:
        """What is left of the time in which the nodes must find each other. The launcher's first word is due now."""
        now = time.monotonic()
        self._launched = True
        self._heard = now
        return max(1.0, self._begun + float(self._order["start_seconds"]) - now)

    def running(self) -> None:
        """The ranks run, perhaps again; with the first time the deadline is set."""
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

    def kill_by(self, moment: float) -> None:
        """Nothing may run past this moment; an earlier one stays."""
        if self.kill_at is None or moment < self.kill_at:
            self.kill_at = moment

    def patience(self, now: float) -> float:
        """Seconds until something has to be looked at."""
        moments = [moment for moment in (self.term_at, self.kill_at, self._watch_at) if moment is not None]
        return max(0.0, min([TICK_SECONDS, *(moment - now for moment in moments)]))

    def due(self, now: float) -> bool:
        """Whether it is time for another `look`."""
        if now < self._watch_at:
            return False
        self._watch_at = now + TICK_SECONDS
        return True

    def look(self, now: float) -> Optional[Verdict]:
        """What is wrong now, if anything."""
        looked, self._looked = self._looked, now
        if now - looked > _FROZEN_SECONDS:
            # This process stood still itself, and the launcher with it.
            self._heard = now
        self._oom.count(kernel.oom_kills(), now)
        if not self._record.started:
            return self._look_at_start(now)
        if now - self._heard > SILENCE_SECONDS:
            return self._fell("stopped answering")
        return None if self._disk is None else self._disk.look(now, self._record)

    def _look_at_start(self, now: float) -> Optional[Verdict]:
        node, seconds = self._record.node, float(self._order["start_seconds"])
        if not self._launched and now - self._begun > seconds:
            names = "The names of the run's nodes were not known within {:.0f} seconds.".format(seconds)
            return Verdict("platform_error", "nodes_not_met", names)
        if self._launched and now - self._heard > SILENCE_SECONDS:
            return Verdict("platform_error", "node_silent", "Node {} stopped answering.".format(node))
        if now - self._begun > seconds + START_MARGIN_SECONDS:
            return Verdict("platform_error", "node_not_started", "Node {} did not start in time.".format(node))
        return None

    def time_is_up(self) -> Verdict:
        """What the deadline says."""
        data = {"limit_seconds": self._order["deadline_seconds"]}
        return Verdict("time_limit", "time_limit", "The run reached its time limit.", data=data)

    def explain(self, found: Mapping[str, Any], now: float) -> Optional[Verdict]:
        """What the kernel's limits have to do with a rank that failed; None where nothing."""
        self._oom.count(kernel.oom_kills(), now)
        if found["kind"] != "code_failed" or self._oom.at is None or now - self._oom.at > _AFTERMATH_SECONDS:
            return None
        return self._out_of_memory(found.get("rank"))

    def why(self, ended: Exit) -> Verdict:
        """Why the launcher ended without a word."""
        self._oom.count(kernel.oom_kills(), time.monotonic())
        if ended.signal == "SIGKILL" and self._oom.at is not None:
            return self._out_of_memory(None)
        if self._record.started:
            return self._fell("was ended ({})".format(ended.signal or "code {}".format(ended.exit_code)))
        message = "Node {} could not be started or broke down.".format(self._record.node)
        return Verdict("platform_error", "node_not_started", message)

    def last_look(self) -> None:
        """When everything has ended: the newest checkpoint, and whether the disk is full."""
        if self._disk is not None:
            self._disk.finish(self._record)
        free = disk.free_bytes(self._record.folder)
        if free is not None and free < disk.RESERVE_BYTES and self._record.causes:
            self._record.add_detail("The storage of the run is full: {} MiB are free.".format(free >> 20))

    def _fell(self, how: str) -> Verdict:
        message = "The launcher of node {} {}: the code of the run stopped or killed it.".format(self._record.node, how)
        return Verdict("code_failed", "launcher_killed", message)

    def _out_of_memory(self, rank: Optional[int]) -> Verdict:
        node, limit = self._record.node, int(self._order.get("memory_bytes", 0)) >> 20
        message = "Node {} used more than the {} MiB of memory it has.".format(node, limit)
        data: Dict[str, Any] = {"limit_mib": limit}
        return Verdict("out_of_memory", "out_of_memory", message, rank=rank, data=data)

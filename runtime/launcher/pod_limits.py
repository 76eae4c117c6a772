"""What a pod's node is held to, as its first process can see it: its time, that its launcher answers, memory, disk.

The one rule: limits say what is wrong and act on nothing. What is wrong after the code has begun is the code's doing as
far as anybody in here can tell: it can kill and stop the launcher, and no word from inside makes a run free.
"""

from __future__ import annotations

import time
from typing import Any, Mapping, Optional

from . import disk, kernel
from .node_limits import NodeLimits
from .processes import Exit
from .record import Record, Verdict

START_MARGIN_SECONDS = 15.0
_FROZEN_SECONDS = 5.0


class PodLimits(NodeLimits):
    """The node's limits, as its order gives them."""

    def __init__(self, order: Mapping[str, Any], record: Record) -> None:
        super().__init__(order, record)
        self._looked = self._begun
        self._launched = False
        self._oom = kernel.Counter(kernel.oom_kills())
        self._refused = kernel.Counter(kernel.refusals())
        self._disk: Optional[disk.Gauge] = None
        if order.get("disk_bytes") and record.node == 0:
            self._disk = disk.Gauge(int(order["disk_bytes"]), order["written"])

    @property
    def start_seconds(self) -> float:
        """What is left of the time in which the nodes must find each other. The launcher's first word is due now."""
        now = time.monotonic()
        self._launched = True
        self._heard = now
        return max(1.0, self._begun + float(self._order["start_seconds"]) - now)

    def look(self, now: float) -> Optional[Verdict]:
        """What is wrong now, if anything."""
        looked, self._looked = self._looked, now
        if now - looked > _FROZEN_SECONDS:
            # This process stood still itself, and the launcher with it.
            self._heard = now
        self._count(now)
        if not self._record.started:
            return self._look_at_start(now)
        if self.silent(now):
            return self._fell("stopped answering")
        return None if self._disk is None else self._disk.look(now, self._record)

    def _look_at_start(self, now: float) -> Optional[Verdict]:
        node, seconds = self._record.node, float(self._order["start_seconds"])
        if not self._launched and now - self._begun > seconds:
            names = "The names of the run's nodes were not known within {:.0f} seconds.".format(seconds)
            return Verdict("platform_error", "nodes_not_met", names)
        if self._launched and self.silent(now):
            return Verdict("platform_error", "node_silent", "Node {} stopped answering.".format(node))
        if now - self._begun > seconds + START_MARGIN_SECONDS:
            return Verdict("platform_error", "node_not_started", "Node {} did not start in time.".format(node))
        return None

    def explain(self, found: Mapping[str, Any], now: float) -> Optional[Verdict]:
        """What the kernel's limits have to do with a rank that failed; None where nothing."""
        self._count(now)
        if found["kind"] != "code_failed":
            return None
        if self.recent(self._oom, now):
            return self.out_of_memory(found.get("rank"))
        if self.recent(self._refused, now):
            return self.too_many_processes(found.get("rank"), kernel.process_limit())
        return None

    def why(self, ended: Exit) -> Verdict:
        """Why the launcher ended without a word."""
        self._count(time.monotonic())
        if ended.signal == "SIGKILL" and self._oom.at is not None:
            return self.out_of_memory(None)
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

    def _count(self, now: float) -> None:
        self._oom.count(kernel.oom_kills(), now)
        self._refused.count(kernel.refusals(), now)

    def _fell(self, how: str) -> Verdict:
        message = "The launcher of node {} {}: the code of the run stopped or killed it.".format(self._record.node, how)
        return Verdict("code_failed", "launcher_killed", message)

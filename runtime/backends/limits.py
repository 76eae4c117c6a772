"""What a node of a local run is held to: its time, memory, processes and disk, and that it answers.

The one rule: limits say what is wrong and act on nothing; the supervisor, which asks a few times a second, does. Clocks
are this process's own. Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import time
from typing import Any

from runtime.backends import watchdog
from runtime.backends.siblings import Siblings
from runtime.backends.tree import Tree
from runtime.launcher import disk
from runtime.launcher.kernel import Counter
from runtime.launcher.record import Record, Verdict

START_SECONDS = 90.0
SILENCE_SECONDS = 12.0
KILL_MARGIN_SECONDS = 0.25
"""SIGKILL goes out this long before the deadline, so that nothing is left when it is there."""
TICK_SECONDS = 0.25
_AFTERMATH_SECONDS = 30.0
"""A rank that fails this soon after the kernel has killed for want of memory fails of it: a killed helper, an echo."""


class Limits:
    """The node's limits, as its order gives them."""

    def __init__(self, order: dict[str, Any], record: Record, tree: Tree) -> None:
        self._order = order
        self._tree = tree
        self._record = record
        self._siblings = Siblings(record.folder, record.node, order["nodes"])
        self._disk = disk.Gauge(int(order["disk_bytes"]), order["written"]) if record.node == 0 else None
        self._folder = record.folder
        self._begun = self._heard = time.monotonic()
        self._ranks_by_pid: dict[int, int] = {}
        self._watch_at = 0.0
        self._oom = Counter()
        self._refused = Counter()
        self.term_at: float | None = None
        self.kill_at: float | None = None

    def running(self, ranks_by_pid: dict[int, int]) -> None:
        """The ranks run, perhaps again; with the first time the deadline is set."""
        self._ranks_by_pid = ranks_by_pid
        if self._record.started:
            return
        now = time.monotonic()
        deadline = float(self._order["deadline_seconds"])
        grace = min(float(self._order["grace_seconds"]), deadline / 2)
        self.term_at = now + max(0.0, deadline - grace)
        self.kill_at = now + max(0.0, deadline - KILL_MARGIN_SECONDS)

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

    def look(self, now: float) -> Verdict | None:
        """What is wrong now, if anything."""
        self._siblings.end_silent_ones(now)
        node = self._record.node
        if not self._record.started and now - self._begun > START_SECONDS:
            return Verdict("platform_error", "node_not_started", "The node did not start in time.")
        if now - self._heard > SILENCE_SECONDS:
            return Verdict("node_lost", "node_silent", f"Node {node} stopped answering.")
        if not self._record.started and not self._order["elastic"]:
            lost = self._siblings.lost_one()
            if lost is not None:
                return Verdict("node_lost", "node_lost", f"Node {lost} was lost.", node=lost)
        verdict = self._weigh(now)
        if verdict is None and self._disk is not None:
            verdict = self._disk.look(now, self._record)
        return verdict

    def last_look(self) -> Verdict | None:
        """When everything has ended: whether a full disk, which the run did not fill, is to blame for its failure."""
        if self._disk is not None:
            self._disk.finish(self._record)
        free = disk.free_bytes(self._folder)
        if free is None or free >= disk.RESERVE_BYTES:
            return None
        return Verdict(
            "platform_error",
            "disk_full",
            f"The disk of the machine is full: {free >> 20} MiB are free. This run did not fill it.",
            data={"free_mib": free >> 20},
        )

    def explain(self, cause: dict[str, Any], now: float) -> Verdict | None:
        """What the kernel's limits have to do with a rank that failed; None where nothing."""
        if cause["kind"] != "code_failed" or self._tree.group is None:
            return None
        self._count(now)
        for counted, verdict in ((self._oom, self._out_of_memory), (self._refused, self._too_many)):
            if counted.at is not None and now - counted.at < _AFTERMATH_SECONDS:
                return verdict(cause.get("rank"))
        return None

    def killed_for_memory(self) -> Verdict | None:
        """Whether it was for want of memory that the node was killed as a whole."""
        self._count(time.monotonic())
        return None if self._oom.at is None else self._out_of_memory(None)

    def _count(self, now: float) -> None:
        group = self._tree.group
        if group is not None:
            self._oom.count(group.oom_kills(), now)
            self._refused.count(group.refusals(), now)

    def _weigh(self, now: float) -> Verdict | None:
        """With a control group the kernel holds the limits, and only what it did about them is counted."""
        if self._tree.group is not None:
            self._count(now)
            return None
        if not self._tree.init:
            return None
        memory, processes = int(self._order["memory_bytes"]), int(self._order["process_limit"])
        # Until the launcher speaks, bubblewrap may still be at work in there, with the host's own /tmp in sight.
        enough = memory if self._record.started else None
        usage = watchdog.look(self._tree.init, enough_bytes=enough, enough_processes=processes)
        if usage.processes > processes:
            return self._too_many(None)
        if usage.memory_bytes > memory:
            return self._out_of_memory(self._ranks_by_pid.get(usage.heaviest or 0), usage.memory_bytes)
        return None

    def _out_of_memory(self, rank: int | None, used_bytes: int | None = None) -> Verdict:
        node, limit = self._record.node, int(self._order["memory_bytes"]) >> 20
        data = {"limit_mib": limit}
        message = f"Node {node} used more than the {limit} MiB of memory it has."
        if used_bytes is not None:
            data["used_mib"] = used_bytes >> 20
            message = f"Node {node} used {data['used_mib']} MiB of memory, more than the {limit} MiB it has."
        return Verdict("out_of_memory", "out_of_memory", message, rank=rank, data=data)

    def _too_many(self, rank: int | None) -> Verdict:
        limit = int(self._order["process_limit"])
        message = f"Node {self._record.node} ran more than {limit} processes at once."
        return Verdict("code_failed", "too_many_processes", message, rank=rank, data={"limit": limit})

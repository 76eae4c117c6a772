"""What a node of a local run is held to: its time, memory, processes and disk, and that it answers.

The one rule: limits say what is wrong and act on nothing; the supervisor, which asks a few times a second, does. Clocks
are this process's own. Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.backends import cgroups, watchdog
from runtime.backends.siblings import Siblings
from runtime.backends.tree import Tree, noted_groups
from runtime.launcher import disk
from runtime.launcher.kernel import Counter
from runtime.launcher.node_limits import AFTERMATH_SECONDS, TICK_SECONDS, NodeLimits
from runtime.launcher.progress import TOTAL_SHARE
from runtime.launcher.record import Record, Verdict

START_SECONDS = 90.0
CALM_SECONDS = 1.0
"""Between two looks at a node whose memory and processes the kernel holds, once it runs: nothing grows past a limit."""

_CROWD = 500
"""So many processes and threads can keep the launcher beside them from its turn. Honest training has some hundred: if
its launcher gets no turn, the machine is at fault."""
_STARVED_SHARE = 0.5


class Limits(NodeLimits):
    """The node's limits, as its order gives them. `works`: whether it used CPU time of late, whoever in it."""

    def __init__(self, order: dict[str, Any], record: Record, tree: Tree) -> None:
        super().__init__(order, record)
        self._tree = tree
        self._siblings = Siblings(record.folder, record.node, order["nodes"])
        self._folder = record.folder
        self._room = (disk.free_bytes(self._folder) or 0) - disk.RESERVE_BYTES
        self._disk = disk.Gauge(
            int(order["disk_bytes"]),
            order["written"],
            room_bytes=self._room,
            held=self._held,
            again=record.node == 0,
        )
        self._ranks_by_pid: Mapping[int, int] = {}
        self._refused = Counter()
        self._tasks = 0
        self._turn: tuple[float, watchdog.Turn | None] = (self._begun, None)
        self._hungry_looks = 0
        self._used: tuple[float, float | None] = (self._begun, None)
        self.works = False
        self._starved_at: float | None = None

    def running(self, ranks_by_pid: Mapping[int, int]) -> None:
        """These ranks run, perhaps again; with the first time the deadline is set."""
        super().running(ranks_by_pid)
        self._ranks_by_pid = ranks_by_pid

    @property
    def tick_seconds(self) -> float:
        """How long after a look the next one is due."""
        held = self._tree.group is not None and self._record.started
        return CALM_SECONDS if held and not self._disk.surveying else TICK_SECONDS

    def look(self, now: float) -> Verdict | None:
        """What is wrong now, if anything."""
        self._siblings.end_silent_ones(now)
        node = self._record.node
        if not self._record.started and now - self._begun > START_SECONDS:
            return Verdict("platform_error", "node_not_started", "The node did not start in time.")
        self._see_its_turn(now)
        self._see_its_work(now)
        if self.silent(now):
            if self._starved(now):
                return self._crowded()
            return Verdict("node_lost", "node_silent", f"Node {node} stopped answering.")
        if not self._record.started and not self._order["elastic"]:
            lost = self._siblings.lost_one()
            if lost is not None:
                return Verdict("node_lost", "node_lost", f"Node {lost} was lost.", node=lost)
        verdict = self._weigh(now)
        return self._disk.look(now, self._record) if verdict is None else verdict

    def last_look(self) -> Verdict | None:
        """When everything has ended: whether a full disk, which the run did not fill, is to blame for its failure."""
        if not self._record.node:
            self._disk.finish(self._record)
        free = disk.free_bytes(self._folder)
        if free is None or free >= disk.RESERVE_BYTES:
            return None
        if self._room > 0 and self._disk.has_filled_the_disk():  # one that was full before leaves no doubt
            return None
        return Verdict(
            "platform_error",
            "disk_full",
            f"The disk of the machine is full: {free >> 20} MiB are free. This run did not fill it.",
            data={"free_mib": free >> 20},
        )

    def explain(self, found: Mapping[str, Any], now: float) -> Verdict | None:
        """What the kernel's limits have to do with a rank that failed, or a crowd with nodes that lost each other."""
        if found["kind"] == "node_lost" and self._starved(now):
            return self._crowded()
        if found["kind"] != "code_failed" or self._tree.group is None:
            return None
        self._count(now)
        for counted, verdict in ((self._oom, self.out_of_memory), (self._refused, self._too_many)):
            if self.recent(counted, now):
                return verdict(found.get("rank"))
        return None

    def killed_for_memory(self) -> Verdict | None:
        """Whether it was for want of memory that the node was killed as a whole."""
        self._count(time.monotonic())
        return None if self._oom.at is None else self.out_of_memory(None)

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
        self._tasks = usage.processes
        if usage.processes > processes:
            return self._too_many(None)
        if usage.memory_bytes > memory:
            return self.out_of_memory(self._ranks_by_pid.get(usage.heaviest or 0), usage.memory_bytes)
        return None

    def _held(self) -> Iterator[str]:
        """The descriptors of all processes of the run, of every node: any may hold open what has no name any more."""
        for pid in cgroups.processes(noted_groups(self._folder / "nodes")):
            folder = f"/proc/{pid}/fd"
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    yield entry.path

    def _see_its_turn(self, now: float) -> None:
        """Whether the launcher wants to speak and has no chance to, among all that the code has started beside it.

        While it waits, that is not counted yet: then it is seen to want a core, look after look, and to get none.
        """
        if not self._tree.init or now - self._turn[0] < CALM_SECONDS:
            return
        if self._tree.group is not None:
            self._tasks = self._tree.group.tasks()
        (before_at, before), after = self._turn, watchdog.turn(self._tree.init)
        self._turn = (now, after)
        if before is None or after is None:
            return
        seconds = now - before_at
        waited = after.waited_seconds - before.waited_seconds >= _STARVED_SHARE * seconds
        ran = after.ran_seconds - before.ran_seconds >= _STARVED_SHARE * seconds
        hungry = self._tasks >= _CROWD and (waited or (after.wanting and not ran))
        self._hungry_looks = self._hungry_looks + 1 if hungry else 0
        if self._hungry_looks > 1:
            self._starved_at = now

    def _see_its_work(self, now: float) -> None:
        """Whether all that is in the node computes: the launcher sees only what lives when it looks."""
        if self._tree.group is None or now - self._used[0] < CALM_SECONDS:
            return
        (before_at, before), after = self._used, self._tree.group.cpu_seconds()
        self._used = (now, after)
        if before is not None and after is not None:
            self.works = (after - before) / (now - before_at) >= TOTAL_SHARE

    def _starved(self, now: float) -> bool:
        return self._starved_at is not None and now - self._starved_at <= AFTERMATH_SECONDS

    def _crowded(self) -> Verdict:
        node, tasks = self._record.node, self._tasks
        message = f"Node {node} ran {tasks} processes at once, and what keeps it together did not come to its turn."
        return Verdict("code_failed", "too_many_processes", message, data={"tasks": tasks})

    def _too_many(self, rank: int | None) -> Verdict:
        return self.too_many_processes(rank, int(self._order["process_limit"]))

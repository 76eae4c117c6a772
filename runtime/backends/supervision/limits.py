"""Limits of a supervised node: time, memory, processes and disk, and whether its launcher answers.

This module only detects that a limit is exceeded: the supervisor calls it one to four times a second, and ends the
node. `now` and other times are `time.monotonic()`. No third-party packages: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.backends.supervision import cgroups, resource_limits
from runtime.backends.supervision.node_plan import SupervisorPlan
from runtime.backends.supervision.peer_liveness import PeerWatch
from runtime.backends.supervision.process_tree import ProcessTree, recorded_cgroups
from runtime.launcher import disk
from runtime.launcher.cgroup_events import EventCounter
from runtime.launcher.node_limits import CHECK_SECONDS, EVENT_EFFECT_SECONDS, NodeLimits
from runtime.launcher.record import Record, Verdict
from runtime.launcher.telemetry.hang_detector import NODE_BUSY_SHARE

START_SECONDS = 90.0
"""How long a node may take to start. A launcher waits 60 s for the launchers of the other nodes. This limit is longer,
so that the launcher first reports which nodes are late."""
SLOW_CHECK_SECONDS = 1.0
"""Interval between checks of a running node with a control group, whose limits the kernel enforces in between."""

_MANY_PROCESSES = 500
"""If a node has at least this many processes and threads, a launcher that gets no CPU time is the code's fault. Usual
training has at most a few hundred; if the launcher gets no CPU time beside those, the machine is overloaded."""
_STARVED_SHARE = 0.5
"""A launcher counts as starved if it waits for a core for at least this share of the time between two checks. A usual
launcher hardly waits."""


class Limits(NodeLimits):
    """The limits of one node. `is_using_cpu`: whether its processes used the CPU between the last two measurements."""

    _plan: SupervisorPlan

    def __init__(self, plan: SupervisorPlan, record: Record, tree: ProcessTree) -> None:
        super().__init__(plan, record)
        self._tree = tree
        # Only peers on this machine are watched: a supervisor can neither see nor end processes of other machines.
        local_nodes = plan["nodes"] if plan.get("peers_are_here", True) else 1
        self._peers = PeerWatch(record.folder, record.node, local_nodes) if local_nodes > 1 else None
        self._folder = record.folder
        # The free space at the start (0 if unknown), less the reserve below which a disk counts as full. Negative on a
        # full disk.
        self._usable_bytes_at_start = (disk.free_bytes(self._folder) or 0) - disk.RESERVE_BYTES
        self._disk = disk.DiskLimit(
            int(plan["disk_bytes"]),
            plan["written"],
            available_bytes=self._usable_bytes_at_start,
            open_files=self._open_files,
            repeats=record.node == 0,  # node 0 measures for all nodes, since they share the folders
            by_quota=bool(plan.get("disk_by_quota")),
        )
        self._ranks_by_pid: Mapping[int, int] = {}  # by the pid inside the sandbox
        self._refusal_counter = EventCounter()
        self._tasks = 0  # processes at the last check, and with a control group their threads too
        # The last measurements of the launcher's scheduling and of the node's CPU time; None before the first.
        self._launcher_schedule: resource_limits.CpuSchedule | None = None
        self._launcher_measured_at = self._created_at
        self._cpu_seconds: float | None = None
        self._cpu_measured_at = self._created_at
        self._unreported_cpu_seconds: float | None = None  # see `take_cpu_seconds`
        self.is_using_cpu = False
        self._starved_checks = 0  # checks in a row that found the launcher starved
        self._starved_at: float | None = None  # the last check that found the launcher starved

    def note_running(self, ranks_by_pid: Mapping[int, int]) -> None:
        """Note that these ranks run; the first call starts the deadline."""
        super().note_running(ranks_by_pid)
        self._ranks_by_pid = ranks_by_pid

    def measure_folders(self) -> None:
        """Measure what the run's folders contain before it; may take seconds. Call this before the launcher starts."""
        self._disk.measure_folders()

    @property
    def check_interval(self) -> float:
        """How many seconds to wait between two checks."""
        # A measurement of the disk proceeds in steps, one at each check, so it needs frequent checks.
        is_limited_by_kernel = self._tree.group is not None and self._record.has_started
        return SLOW_CHECK_SECONDS if is_limited_by_kernel and not self._disk.is_measuring else CHECK_SECONDS

    def check(self, now: float) -> Verdict | None:
        """Return the verdict if the node must end now, else None."""
        if self._peers is not None:
            self._peers.kill_silent_peers(now)
        node = self._record.node
        if not self._record.has_started and now - self._created_at > START_SECONDS:
            return Verdict(kind="platform_error", code="node_not_started", message="The node did not start in time.")
        self._check_launcher_starved(now)
        self._measure_cpu_use(now)
        if self.is_silent(now):
            if self._is_starved(now):
                return self._starved_verdict()
            if self.code_has_started:
                return self.launcher_killed_verdict("stopped answering")
            return Verdict(kind="node_lost", code="node_silent", message=f"Node {node} stopped answering.")
        # Before the run starts, a lost node ends a run that is not elastic. Afterwards, the launchers detect lost
        # nodes.
        if self._peers is not None and not self._record.has_started and not self._plan["elastic"]:
            peer = self._peers.lost_peer()
            if peer is not None:
                return Verdict(kind="node_lost", code="node_lost", message=f"Node {peer} was lost.", node=peer)
        verdict = self._check_usage(now)
        return self._disk.check(now, self._record) if verdict is None else verdict

    def check_after_end(self) -> Verdict | None:
        """Return the verdict if other runs have filled the disk, else None. Called when no process is left."""
        if not self._record.node:
            self._disk.finish(self._record)  # node 0 measures for all nodes
        free_bytes = disk.free_bytes(self._folder)
        if free_bytes is None or free_bytes >= disk.RESERVE_BYTES:
            return None
        # The run filled the disk itself. It cannot have done so if the disk was full already when it started.
        if self._usable_bytes_at_start > 0 and self._disk.has_filled_the_disk():
            return None
        return Verdict(
            kind="platform_error",
            code="disk_full",
            message=f"The disk of the machine is full: {free_bytes >> 20} MiB are free. This run did not fill it.",
            data={"free_mib": free_bytes >> 20},
        )

    def explain_failure(self, failure: Mapping[str, Any], now: float) -> Verdict | None:
        """Return the limit that explains a failed rank or a lost node; None if none does.

        An OOM kill or a refused process makes ranks fail; a starved launcher makes another node look lost.
        """
        if failure["kind"] == "node_lost" and self._is_starved(now):
            return self._starved_verdict()
        if failure["kind"] != "code_failed" or self._tree.group is None:
            return None
        self._count_kernel_events(now)
        if self.is_recent(self._oom_counter, now):
            return self._memory_verdict(failure.get("rank"))
        if self.is_recent(self._refusal_counter, now):
            return self._too_many_processes_verdict(failure.get("rank"))
        return None

    def find_memory_kill(self) -> Verdict | None:
        """Return the verdict if the kernel's OOM killer has killed a process of the node; None if it has not."""
        self._count_kernel_events(time.monotonic())
        return None if self._oom_counter.increased_at is None else self._memory_verdict(None)

    def _memory_verdict(self, rank: int | None) -> Verdict:
        """Return the verdict for an OOM kill: by the node's own limit, or because the machine had no free memory."""
        if self._tree.group is None or self._tree.group.has_reached_memory_limit():
            return self.out_of_memory_verdict(rank)
        message = f"The machine ran out of memory, and node {self._record.node} was below its limit."
        return Verdict(kind="platform_error", code="platform_error", message=message)

    def _count_kernel_events(self, now: float) -> None:
        group = self._tree.group
        if group is not None:
            self._oom_counter.update(group.oom_kills(), now)
            self._refusal_counter.update(group.process_refusals(), now)

    def _check_usage(self, now: float) -> Verdict | None:
        """Return the verdict if the node uses too much memory or too many processes, else None.

        With a control group the kernel enforces both limits, so this only counts the kernel's events.
        """
        if self._tree.group is not None:
            self._count_kernel_events(now)
            return None
        if not self._tree.init_pid:
            return None
        max_bytes, max_processes = int(self._plan["memory_bytes"]), int(self._plan["process_limit"])
        # Without a limit, memory is not measured. Before the ranks run, bubblewrap may still be preparing the sandbox,
        # and a measurement would include the host's /tmp.
        memory_limit = max_bytes if self._record.has_started else None
        usage = resource_limits.measure(self._tree.init_pid, max_bytes=memory_limit, max_processes=max_processes)
        self._tasks = usage.processes
        if usage.processes > max_processes:
            return self._too_many_processes_verdict(None)
        if usage.memory_bytes > max_bytes:
            return self.out_of_memory_verdict(self._ranks_by_pid.get(usage.heaviest_pid or 0), usage.memory_bytes)
        return None

    def _open_files(self) -> Iterator[str]:
        """Yield the /proc paths of the run's open descriptors. A deleted file takes up disk until it is closed.

        Yields none where nodes have no control groups, since only these list the processes of all nodes.
        """
        for pid in cgroups.processes(recorded_cgroups(self._folder / "nodes")):
            folder = f"/proc/{pid}/fd"
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    yield entry.path

    def _check_launcher_starved(self, now: float) -> None:
        """Set `_starved_at` if two checks in a row find that the code's many processes leave the launcher no CPU time.

        The kernel counts a wait for a core only when that wait ends. So a launcher also counts as starved if it waits
        for a core now and has hardly run since the last check.
        """
        if not self._tree.init_pid or now - self._launcher_measured_at < SLOW_CHECK_SECONDS:
            return
        if self._tree.group is not None:
            self._tasks = self._tree.group.count_tasks()
        previous, previous_at = self._launcher_schedule, self._launcher_measured_at
        current = resource_limits.cpu_schedule(self._tree.init_pid)
        self._launcher_schedule, self._launcher_measured_at = current, now
        if previous is None or current is None:
            return
        starved_seconds = _STARVED_SHARE * (now - previous_at)
        has_waited = current.waited_seconds - previous.waited_seconds >= starved_seconds
        has_run = current.ran_seconds - previous.ran_seconds >= starved_seconds
        is_starved = self._tasks >= _MANY_PROCESSES and (has_waited or (current.is_runnable and not has_run))
        self._starved_checks = self._starved_checks + 1 if is_starved else 0
        if self._starved_checks > 1:
            self._starved_at = now

    def _measure_cpu_use(self, now: float) -> None:
        """Measure the CPU time of the node's control group, since the launcher's samples miss short-lived processes."""
        if self._tree.group is None or now - self._cpu_measured_at < SLOW_CHECK_SECONDS:
            return
        previous, previous_at = self._cpu_seconds, self._cpu_measured_at
        current = self._tree.group.cpu_seconds()
        self._cpu_seconds, self._cpu_measured_at = current, now
        if previous is not None and current is not None:
            self._unreported_cpu_seconds = current - previous
            self.is_using_cpu = self._unreported_cpu_seconds / (now - previous_at) >= NODE_BUSY_SHARE

    def take_cpu_seconds(self) -> float | None:
        """Return the CPU seconds that the node used between the last two measurements.

        None if an earlier call has returned them, or nothing was measured.
        """
        cpu_seconds, self._unreported_cpu_seconds = self._unreported_cpu_seconds, None
        return cpu_seconds

    def _is_starved(self, now: float) -> bool:
        """Return whether the launcher was starved recently. Its silence is then an effect of that."""
        return self._starved_at is not None and now - self._starved_at <= EVENT_EFFECT_SECONDS

    def _starved_verdict(self) -> Verdict:
        node, tasks = self._record.node, self._tasks
        message = f"Node {node} ran {tasks} processes at once, and its launcher got no CPU time."
        return Verdict(kind="code_failed", code="too_many_processes", message=message, data={"tasks": tasks})

    def _too_many_processes_verdict(self, rank: int | None) -> Verdict:
        return self.too_many_processes_verdict(rank, int(self._plan["process_limit"]))

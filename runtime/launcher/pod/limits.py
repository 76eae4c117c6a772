"""Limits of a pod's node, as its first process can observe them: time, memory, disk, and whether the launcher answers.

This module only detects violations. Once customer code runs, the launcher's end counts as caused by the code, because
the code can kill or stop the launcher. A verdict `platform_error` is only a claim. It makes the run free only if no
customer code can have written it; `kubernetes.causes` decides that.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Mapping, Optional

from .. import cgroup_events, disk
from ..node_limits import NodeLimits, NodePlan
from ..processes import Exit
from ..record import Record, Verdict

START_MARGIN_SECONDS = 15.0
"""How much longer than its launcher this process waits for the start of the ranks. The launcher then reports first, and
can name the late nodes."""


class PodPlan(NodePlan, total=False):
    """The plan that every pod of a run reads, `order.json`; `pod.main` documents its fields."""

    run: str
    plan: Dict[str, Any]
    names: List[str]
    folder: str
    control_port: int
    start_seconds: float
    python: str
    gpus: int
    environment: Dict[str, str]
    variables: Dict[str, str]
    packages: str
    builtin_script: str
    platform_bytes: int
    local_disk_bytes: int
    local: Dict[str, str]


class PodLimits(NodeLimits):
    """The limits of one pod's node."""

    _plan: PodPlan

    def __init__(self, plan: PodPlan, record: Record) -> None:
        super().__init__(plan, record)
        self._has_launcher = False  # whether the launcher was started
        self._oom_counter = cgroup_events.EventCounter(cgroup_events.oom_kills())
        self._refusal_counter = cgroup_events.EventCounter(cgroup_events.process_refusals())
        self._disk: Optional[disk.DiskLimit] = None
        if plan.get("disk_bytes") and record.node == 0:  # one node is enough, since all write to the same folders
            writable_folders = plan["written"]
            self._disk = disk.DiskLimit(
                int(plan["disk_bytes"]),
                writable_folders,
                by_quota=bool(plan.get("disk_by_quota")),
                platform_bytes=int(plan.get("platform_bytes", 0)),
            )
        # Each node measures the folders on its own machine's disk.
        self._local_disk: Optional[disk.DiskLimit] = None
        if plan.get("local_disk_bytes"):
            self._local_disk = disk.DiskLimit(int(plan["local_disk_bytes"]), plan["local"])

    @property
    def _disks(self) -> List[disk.DiskLimit]:
        return [limit for limit in (self._disk, self._local_disk) if limit is not None]

    def measure_folders(self) -> None:
        """Measure what the folders contain before the run; may take seconds. Call this before the launcher starts."""
        for limit in self._disks:
            limit.measure_folders()

    def begin_start_wait(self) -> float:
        """Note that the launcher was started; return how many seconds the nodes may still take to meet.

        The wait for the launcher's first message begins now.
        """
        now = time.monotonic()
        self._has_launcher = True
        self._last_message_at = now
        # At least one second, because 0 would stand for the launcher's own default (`agent`).
        return max(1.0, self._created_at + float(self._plan["start_seconds"]) - now)

    def check(self, now: float) -> Optional[Verdict]:
        """Return a verdict if a limit is exceeded, else None."""
        is_silent = self.is_silent(now)  # must be called at every check, even if the result is not used
        self._count_kernel_events(now)
        if is_silent and self.code_has_started:  # also before `has_started`: code runs once the first rank starts
            return self.launcher_killed_verdict("stopped answering")
        if not self._record.has_started:
            return self._check_start(now, is_silent)
        verdicts = (limit.check(now, self._record) for limit in self._disks)
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def _check_start(self, now: float, is_silent: bool) -> Optional[Verdict]:
        """Return a verdict if the ranks do not start in time, else None. `is_silent`: the launcher does not answer."""
        node, seconds = self._record.node, float(self._plan["start_seconds"])
        if not self._has_launcher and now - self._created_at > seconds:
            message = "The names of the run's nodes were not known within {:.0f} seconds.".format(seconds)
            return Verdict(kind="platform_error", code="nodes_not_met", message=message)
        if self._has_launcher and is_silent:
            return Verdict(kind="platform_error", code="node_silent", message="Node {} stopped answering.".format(node))
        if now - self._created_at > seconds + START_MARGIN_SECONDS:
            return Verdict(
                kind="platform_error", code="node_not_started", message="Node {} did not start in time.".format(node)
            )
        return None

    def explain_failure(self, failure: Mapping[str, Any], now: float) -> Optional[Verdict]:
        """Return the limit that explains a failed rank; None if none does."""
        self._count_kernel_events(now)
        if failure["kind"] != "code_failed":
            return None
        if self.is_recent(self._oom_counter, now):
            return self.out_of_memory_verdict(failure.get("rank"))
        if self.is_recent(self._refusal_counter, now):
            return self.too_many_processes_verdict(failure.get("rank"), cgroup_events.process_limit())
        return None

    def explain_exit(self, launcher_exit: Exit) -> Verdict:
        """Return why the launcher ended without reporting its end."""
        self._count_kernel_events(time.monotonic())
        # An OOM kill of any age explains SIGKILL. Without one, only the code can have sent it. The customer pays in
        # both cases.
        if launcher_exit.signal == "SIGKILL" and self._oom_counter.increased_at is not None:
            return self.out_of_memory_verdict(rank=None)
        if self.code_has_started:
            return self.launcher_killed_verdict(
                "was ended ({})".format(launcher_exit.signal or "code {}".format(launcher_exit.exit_code))
            )
        message = "Node {} could not be started, or failed while it started.".format(self._record.node)
        return Verdict(kind="platform_error", code="node_not_started", message=message)

    def check_after_end(self) -> None:
        """After the end of all processes, record the time of the newest checkpoint, and note a full disk."""
        if self._disk is not None:
            self._disk.finish(self._record)  # records that time
        free = disk.free_bytes(self._record.folder)
        if free is not None and free < disk.RESERVE_BYTES and self._record.causes:
            self._record.add_detail("The storage of the run is full: {} MiB are free.".format(free >> 20))

    def _count_kernel_events(self, now: float) -> None:
        self._oom_counter.update(cgroup_events.oom_kills(), now)
        self._refusal_counter.update(cgroup_events.process_refusals(), now)

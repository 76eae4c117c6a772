"""Watch the ranks of one node: take samples for the console, and detect hangs together with the other nodes.

Every node reads its processes and sends its progress to the hub, which is node 0. If the hub's
`hang_detector.HangDetector` asks for an inspection, all nodes capture stacks to learn which ranks wait (`RankState`).
When the run hangs, all nodes capture stacks again, for the run's owner. The launcher's loop (`agent`) calls this
module, which never waits. It reports a hang to the agent, which then ends the run.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from ..protocol import Message, new_cause
from ..step_timer import Counts, read_counts
from ..topology import Plan
from ..worker_group import Rank
from .gpus import Gpus
from .hang_detector import (
    BUSY_SHARE,
    Activity,
    Hang,
    HangDetector,
    NodeProgress,
    ProgressTracker,
    RankState,
    describe_hang,
    is_rank_parked,
)
from .sampling import Process, Reading, Sampler, group_by_rank, read_processes, read_threads
from .stacks import ANSWER_SECONDS, CaptureTarget, StackCapture

_FAST_SAMPLE_SECONDS = 2.0
"""Interval of samples at the start of a run, when its owner watches most closely."""
_SLOW_SAMPLE_SECONDS = 10.0
"""Interval of samples afterwards, so that long runs store few."""
_FAST_PERIOD_SECONDS = 60.0
"""How long a run is sampled at the shorter interval."""
_CHECKS_PER_HANG = 20
"""How many checks for progress to make within `hang_seconds`, if the following limits of the interval allow it. With
20 checks, a hang is found at most 5 % late."""
_MIN_CHECK_SECONDS = 1.0
"""Minimum interval of checks for progress, so that they use little CPU time."""
_MAX_CHECK_SECONDS = 5.0
"""Maximum interval of checks for progress, so that idle periods are measured well enough."""
_STACKS_SECONDS = ANSWER_SECONDS + 2.0
"""How long the hub waits for the other nodes' stacks: the time that their ranks have, and 2 s for messages. A node of a
run that hangs may not answer at all."""
_MIN_BUSY_SHARE = 0.01
"""Lower limit of the share of a core at which a process counts as busy. It applies on nodes with a small fraction of a
core."""
_NO_COUNTS = Counts(0, 0, 0.0, None)


class RankCpu(NamedTuple):
    """The CPU seconds that a rank had used at one time (`at`, monotonic).

    `threads` has them for each thread of the rank's own process, by thread id; `children` for each process that the
    rank started, by pid.
    """

    at: float
    pid: int
    threads: Dict[int, float]
    children: Dict[int, float]


class NodeWatch:
    """Watches the ranks of one node.

    `plan` is the node's plan at submission; `devices` are its GPUs. `report` sends a message to the supervisor, `send`
    to the other nodes. Call `handle_timers` at least once a second while ranks run, and `handle_message` with every
    message of another node.
    """

    def __init__(
        self, plan: Plan, devices: Sequence[str], *, report: Callable[[Message], None], send: Callable[[Message], None]
    ) -> None:
        self._plan = plan
        self._report = report
        self._send = send
        self._is_hub = not plan.node
        self._gpus = Gpus(devices)
        self._gpus.start()
        self._sampler = Sampler(own_network=plan.own_network, gpus=self._gpus)
        self._metrics_path = plan.run_dir.rstrip("/") + "/metrics.jsonl"
        self._watching_since = time.monotonic()
        self._next_sample_at = 0.0  # monotonic
        self._next_reading_at = 0.0  # monotonic
        self._reported_progress_at = 0.0  # Unix seconds
        self._round: Optional[int] = None
        self._ranks: List[Rank] = []
        self._finished_nodes: Set[int] = set()
        self._start_round(-1, ())  # no round yet: the first `handle_timers` starts one

    def _start_round(self, number: int, members: Iterable[int]) -> None:
        """Begin a round with the nodes `members`: forget everything about the ranks of the previous one."""
        now = time.monotonic()
        self._min_busy_share = BUSY_SHARE
        if self._plan.cpus:
            # On a small node, a process that works may get only a small part of a core. So it counts as busy if it uses
            # a quarter of its rank's part.
            quarter_share = self._plan.cpus / max(1, self._plan.workers) / 4
            self._min_busy_share = max(_MIN_BUSY_SHARE, min(BUSY_SHARE, quarter_share))
        self._round = number
        self._tracker = ProgressTracker(now, self._plan.hang_seconds, self._min_busy_share)
        self._rank_cpu: Dict[int, RankCpu] = {}  # by rank_id; empty while the run makes progress
        self._detector = HangDetector(self._plan.hang_seconds, set(members) - self._finished_nodes)
        self._last_reading: Optional[Reading] = None
        self._interval = 0.0  # planned seconds from the last reading to the next
        # Signs of progress since the last reading. `hang_detector.Activity` documents `is_using_cpu` and
        # `counted_cpu_seconds`.
        self._has_printed = self._is_using_cpu = False
        self._counted_cpu_seconds = 0.0
        self._counts: Dict[int, Counts] = {}  # by rank_id, at the last reading
        self._metrics_state: Optional[Tuple[int, int]] = None  # modification time (ns) and size of the metrics file
        self._capture: Optional[StackCapture] = None  # in progress
        # What a capture is needed for: an inspection, or the stacks of a hang.
        self._should_inspect = False
        self._should_report_stacks = False
        # On the hub, once the run hangs.
        self._hang: Optional[Hang] = None
        self._progress_at = 0.0  # the last progress (Unix seconds)
        self._used_seconds = 0.0  # CPU time since then, divided by the run's cores
        self._nodes_without_stacks: Set[int] = set()
        self._give_up_at = 0.0  # until when to wait for their stacks (monotonic)

    # Input from the agent

    def note_output(self) -> None:
        """Note that ranks of this node wrote output."""
        self._has_printed = True

    def note_cpu_work(self) -> None:
        """Note a sign of progress: the supervisor has measured that this node works, even in processes that ended."""
        self._is_using_cpu = True

    def add_cpu_seconds(self, core_seconds: float) -> None:
        """Add this node's CPU time since the last call, as the supervisor has measured it.

        This alone is no sign of progress. A hang's bill is based on it.
        """
        self._counted_cpu_seconds += core_seconds

    def note_finished(self, node: int) -> None:
        """Note that every rank of another node has succeeded."""
        self._finished_nodes.add(node)
        self._detector.remove_node(node)
        self._nodes_without_stacks.discard(node)

    def handle_message(self, node: int, message: Message) -> None:
        """Handle a message of another node's watch; ignore all others."""
        kind = message.get("type")
        if message.get("round") != self._round:
            return  # the message is about ranks of an earlier round
        if kind == "progress":
            self._detector.add_progress(node, NodeProgress(*(message[name] for name in NodeProgress._fields)))
        elif kind == "rank_states":
            states = {int(rank_id): RankState(*state) for rank_id, state in message["states"].items()}
            self._detector.add_inspection(node, states, time.monotonic())
        elif kind == "inspect":
            self._should_inspect = True
        elif kind == "capture_stacks":
            self._should_report_stacks = True
        elif kind == "stacks_captured":
            self._nodes_without_stacks.discard(node)

    def timeout(self, max_seconds: float) -> float:
        """Return how long to wait, `max_seconds` at most, until `handle_timers` has something to do."""
        if self._capture is None:
            return max_seconds
        return max(0.0, min(max_seconds, self._capture.ends_at() - time.monotonic()))

    def handle_timers(self, number: int, members: Iterable[int], ranks: Sequence[Rank]) -> Optional[Message]:
        """Do the work that is due. On the hub, return a cause if the run hangs and the stacks have been captured.

        Otherwise return None. `number` is the round, `members` are its nodes, `ranks` this node's live ranks.
        """
        now = time.monotonic()
        if number != self._round:
            self._start_round(number, members)
        self._ranks = list(ranks)
        if now >= self._next_reading_at:
            self._take_reading(now)
        if self._is_hub and self._hang is None:
            self._detect_hang(now)
        if (self._should_inspect or self._should_report_stacks) and self._capture is None:
            self._start_capture(now)
        if self._capture is not None and self._capture.is_over(now):
            self._finish_capture(self._capture, now)
        if self._hang is None or self._capture is not None or self._should_report_stacks:
            return None
        if self._nodes_without_stacks and now < self._give_up_at:
            return None
        return self._hang_cause(self._hang)

    def finish(self, ranks: Sequence[Rank]) -> None:
        """Take a last sample at the end of the run, which includes ranks that have ended."""
        self._gpus.stop()
        self._ranks = list(ranks)
        self._report_sample(self._sampler.read(), self._read_counts())

    # Reading processes

    def _take_reading(self, now: float) -> None:
        """Take a reading; report a sample and the progress if they are due."""
        reading = self._sampler.read()
        counts = self._read_counts()
        if now >= self._next_sample_at:
            is_early = now < self._watching_since + _FAST_PERIOD_SECONDS
            self._next_sample_at = now + (_FAST_SAMPLE_SECONDS if is_early else _SLOW_SAMPLE_SECONDS)
            self._report_sample(reading, counts)
        if self._plan.hang_seconds and self._last_reading is not None:
            activity = self._measure_activity(self._last_reading, reading, counts)
            # The tracker compares the planned interval with `activity.seconds`, to recognize a late reading.
            progress = self._tracker.add_activity(now, activity, self._interval)
            self._report_progress(progress)
            # Ranks may use CPU time only to wait (spin). To detect this, an inspection compares the CPU time of each
            # thread with `_rank_cpu`. Inspections of a spinning run begin after half of `hang_seconds`
            # (`HangDetector.should_inspect`), so `_rank_cpu` is read after a quarter.
            if progress.stalled_seconds < self._plan.hang_seconds / 4:
                self._rank_cpu = {}
            elif not self._rank_cpu:
                self._rank_cpu = self._read_rank_cpu(now, reading.processes)
        self._last_reading, self._counts = reading, counts
        check_seconds = max(_MIN_CHECK_SECONDS, min(_MAX_CHECK_SECONDS, self._plan.hang_seconds / _CHECKS_PER_HANG))
        # Without hang detection only samples are needed.
        self._next_reading_at = (
            min(now + check_seconds, self._next_sample_at) if self._plan.hang_seconds else self._next_sample_at
        )
        self._interval = self._next_reading_at - now

    def _read_counts(self) -> Dict[int, Counts]:
        """Return the counts of training steps, by rank_id."""
        return {rank.rank_id: read_counts(rank.counts_fd) for rank in self._ranks if rank.counts_fd >= 0}

    @property
    def _ranks_by_pid(self) -> Dict[int, int]:
        return {rank.pid: rank.rank_id for rank in self._ranks}

    def _report_sample(self, reading: Reading, counts: Dict[int, Counts]) -> None:
        sample = self._sampler.sample(reading, self._ranks_by_pid, counts)
        if sample is not None:
            self._report({"type": "sample", **sample})

    def _measure_activity(self, before: Reading, after: Reading, counts: Dict[int, Counts]) -> Activity:
        """Return this node's activity between two readings. `counts` are as of the reading `after`."""
        seconds = max(1e-3, after.at - before.at)  # at least a millisecond, since rates are divided by it
        cpu_shares, max_runnable_share = {}, 0.0
        for pid, process in after.processes.items():
            earlier = before.processes.get(pid)
            if earlier is None or earlier.start != process.start:  # a new process, perhaps with the pid of an ended one
                earlier = process._replace(cpu_seconds=0.0, runnable_seconds=0.0)
            cpu_shares[pid] = (process.cpu_seconds - earlier.cpu_seconds) / seconds
            runnable_share = (process.runnable_seconds - earlier.runnable_seconds) / seconds
            max_runnable_share = max(max_runnable_share, runnable_share)
        network_bytes = 0
        if before.network is not None and after.network is not None:
            network_bytes = sum(after.network) - sum(before.network)
        has_stepped = any(
            rank_counts.calls != self._counts.get(rank_id, _NO_COUNTS).calls for rank_id, rank_counts in counts.items()
        )
        has_new_metrics = self._metrics_changed()  # called each time, since it stores what it has seen
        gpus = self._sampler.gpus
        activity = Activity(
            seconds=seconds,
            has_milestone=self._has_printed or has_stepped or has_new_metrics,
            cpu_shares=cpu_shares,
            max_runnable_share=max_runnable_share,
            disk_rate=(after.read_bytes + after.written_bytes - before.read_bytes - before.written_bytes) / seconds,
            network_rate=network_bytes / seconds,
            # Uninterruptible sleep: the process waits for a disk.
            is_blocked=any(process.state == "D" for process in after.processes.values()),
            gpu_percent=max((gpu.utilization or 0 for gpu in gpus), default=0),
            gpu_memory_percent=max((gpu.memory_utilization or 0 for gpu in gpus), default=0),
            is_using_cpu=self._is_using_cpu,
            counted_cpu_seconds=self._counted_cpu_seconds,
        )
        self._has_printed = self._is_using_cpu = False
        self._counted_cpu_seconds = 0.0
        return activity

    def _metrics_changed(self) -> bool:
        """Return whether METRICS_FILE has changed since the last call; False while there is none."""
        try:
            status = os.lstat(self._metrics_path)
        except OSError:
            return False
        last_state, self._metrics_state = self._metrics_state, (status.st_mtime_ns, status.st_size)
        return last_state != self._metrics_state

    def _report_progress(self, progress: NodeProgress) -> None:
        """Report progress to the supervisor, which stores its time, and to the hub, which detects hangs."""
        # `idle_seconds` is the time since the last sign of progress of any kind. Not `stalled_seconds`, which ignores
        # computing.
        at = time.time() - progress.idle_seconds
        if at >= self._reported_progress_at + _MIN_CHECK_SECONDS:
            self._reported_progress_at = at
            self._report({"type": "progress", "at": round(at, 3)})
        if self._is_hub:
            self._detector.add_progress(self._plan.node, progress)
        else:
            self._send({"type": "progress", "round": self._round, **progress._asdict()})

    # Inspecting ranks

    def _detect_hang(self, now: float) -> None:
        """On the hub, decide whether to inspect the ranks, and whether the run hangs."""
        if self._detector.should_inspect(now):
            self._should_inspect = True
            self._send({"type": "inspect", "round": self._round})
        self._hang = self._detector.find_hang(now)
        if self._hang is not None:
            other_nodes = self._detector.other_nodes(self._plan.node)
            # The bill ends at the last computing, even if that was only spinning. Only stacks could prove spinning, and
            # the code could fake stacks to be charged less.
            self._progress_at = time.time() - self._detector.idle_seconds
            # The bill counts seconds of the whole run, so the idle period's CPU seconds are divided by the run's cores.
            cores = (self._plan.cpus or 1.0) * (1 + len(other_nodes))
            self._used_seconds = min(self._detector.idle_seconds, self._detector.cpu_seconds / cores)
            self._should_report_stacks = True
            self._nodes_without_stacks = set(other_nodes)
            self._give_up_at = now + _STACKS_SECONDS
            self._send({"type": "capture_stacks", "round": self._round})

    def _start_capture(self, now: float) -> None:
        self._capture = StackCapture({rank.rank_id: CaptureTarget(rank.pid, rank.report_fd) for rank in self._ranks})
        for rank in self._ranks:  # ranks write their stacks to the pipe of their reports to this launcher
            rank.on_report_data = self._read_stacks
        self._capture.start(now)

    def _read_stacks(self, rank_id: int, data: bytes) -> None:
        if self._capture is not None:
            self._capture.add_data(rank_id, data, time.monotonic())

    def _finish_capture(self, capture: StackCapture, now: float) -> None:
        """Use a finished capture for the inspection, for the stacks of a hang, or for both."""
        self._capture = None
        for rank in self._ranks:
            rank.on_report_data = None
        if self._should_inspect:
            self._should_inspect = False
            states = self._mark_parked(capture.rank_states(), now)
            if self._is_hub:
                self._detector.add_inspection(self._plan.node, states, now)
            else:
                self._send({"type": "rank_states", "round": self._round, "states": states})
        if self._should_report_stacks:
            self._should_report_stacks = False
            processes = read_processes()
            pids_by_rank = group_by_rank(processes, self._ranks_by_pid)
            for rank_id, text in capture.describe_ranks(processes, pids_by_rank).items():
                self._report({"type": "stacks", "rank": rank_id, "text": text})
            if self._is_hub and self._hang is not None:
                # The hang has all ranks as of the last inspection; update this node's.
                self._hang = self._hang._replace(states={**self._hang.states, **capture.rank_states()})
            else:
                self._send({"type": "stacks_captured", "round": self._round})

    def _read_rank_cpu(self, now: float, processes: Dict[int, Process]) -> Dict[int, RankCpu]:
        """Return the CPU time that each rank has used, by rank_id."""
        pids_by_rank = group_by_rank(processes, self._ranks_by_pid)
        cpu_by_rank = {}
        for rank in self._ranks:
            children = [pid for pid in pids_by_rank[rank.rank_id] if pid != rank.pid]
            cpu_by_rank[rank.rank_id] = RankCpu(
                at=now,
                pid=rank.pid,
                threads=read_threads(rank.pid),
                children={pid: processes[pid].cpu_seconds for pid in children},
            )
        return cpu_by_rank

    def _mark_parked(self, states: Dict[int, RankState], now: float) -> Dict[int, RankState]:
        """Set `is_parked` for ranks that have done nothing since the last reading of their threads."""
        earlier_rank_cpu, self._rank_cpu = self._rank_cpu, self._read_rank_cpu(now, read_processes())
        for rank_id, after in self._rank_cpu.items():
            before = earlier_rank_cpu.get(rank_id)
            if before is None or before.pid != after.pid or rank_id not in states:
                continue
            seconds = max(1e-3, after.at - before.at)  # as in `_measure_activity`
            thread_shares = {
                thread: (cpu - before.threads.get(thread, 0.0)) / seconds for thread, cpu in after.threads.items()
            }
            child_shares = [(cpu - before.children.get(pid, 0.0)) / seconds for pid, cpu in after.children.items()]
            # A first thread that cannot be seen counts as busy, so its rank does not count as parked.
            first_thread_share = thread_shares.pop(after.pid, 1.0)
            is_parked = is_rank_parked(first_thread_share, thread_shares.values(), child_shares, self._min_busy_share)
            states[rank_id] = states[rank_id]._replace(is_parked=is_parked)
        return states

    def _hang_cause(self, hang: Hang) -> Message:
        """Return the hang as a cause. It names the rank for which the others wait, if there is one."""
        ranks_not_waiting = [rank_id for rank_id, state in sorted(hang.states.items()) if not state.waiting]
        data: Dict[str, Any] = {
            "seconds": int(hang.seconds),
            "progress_at": round(self._progress_at, 3),
            "used_seconds": round(self._used_seconds, 3),
        }
        node: int = self._plan.node
        rank_field: Dict[str, int] = {}  # without a rank, the cause has no such field
        if 0 < len(ranks_not_waiting) < len(hang.states):
            # Report the first rank that does not wait: the others wait for it.
            # A `rank_id` is the rank's number at submission, as is `_plan`, so this holds in all rounds.
            rank_id = ranks_not_waiting[0]
            node, rank_field = rank_id // self._plan.workers, {"rank": rank_id}
            data.update(rank=rank_id, where=hang.states[rank_id].place)
        return new_cause(kind="hung", code="hung", node=node, message=describe_hang(hang), data=data, **rank_field)

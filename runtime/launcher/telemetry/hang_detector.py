"""Decide whether a run hangs. Pure: the input is observations and their times.

Each node has a `ProgressTracker`. At every check it sends its `NodeProgress`: how long it has shown no sign of
progress. Node 0's `HangDetector` receives the progress of all nodes. There are two kinds of hang:

    idle      No process of any node computes, reads, writes or prints, and no GPU works. If this lasts for
              `hang_seconds`, the run hangs. If every rank is in a call that waits for the others, a shorter period is
              enough: four times the longest idle period from which this run has recovered. The shorter period is at
              least `MIN_HANG_SECONDS`, and applies only after the first milestone (output, metric or step).
    spinning  Something computes, but the run prints, writes and reads nothing, and takes no step. Waiting for a GPU
              or a peer can look like this. The run hangs only if several inspections, spread over `hang_seconds`, found
              every rank at the same place. At least one rank must be in a call that waits for the others. Each other
              rank must be in such a call too, or parked: its first thread does nothing, its other threads do little,
              and its other processes do not work.

An idle run still uses a little CPU time. This time is not a sign of progress, since a polling thread would hide every
hang. But the time is billed, since code could otherwise stay below the threshold and work for free. The property
`HangDetector.cpu_seconds` has the CPU time of all nodes since the last sign of progress.

If it is doubtful whether the run hangs, the run continues. Node 0 inspects ranks only when a hang is likely. Each time
that an inspection finds a rank at work, the pause before the next inspection doubles.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Set

MIN_HANG_SECONDS = 20.0
"""Minimum length of an idle period that counts as a hang (or `hang_seconds`, if that is shorter). Shorter pauses are
usual, for example while all ranks wait for storage."""
BUSY_SHARE = 0.05
"""A process that uses a smaller share of a core than this counts as idle. The limit is not 0, because background
threads run while a script waits."""
NODE_BUSY_SHARE = 0.5
"""A node works if all its processes together use at least this share of a core, even if each process is idle."""
_MAX_BACKGROUND_SHARE = 0.075
"""A process that uses more than this share of a core is at work; this is no background activity. Twice this share is
`_MAX_BUSY_SHARE`, so no process needs more than 15 % of a core to count as busy."""
_MAX_BUSY_SHARE = 2 * _MAX_BACKGROUND_SHARE
"""The highest result of `ProgressTracker.busy_share`: a process with much background activity counts as busy only at a
larger share than BUSY_SHARE."""
_STARVED_SHARE = 0.5
"""A process that is ready to run for at least this share of the time counts as working, even if it gets no core."""
_PARKED_SHARE = 0.02
"""The first thread of a parked rank uses a smaller share of a core than this. It is below BUSY_SHARE, which is for all
threads of a process together."""
_DISK_RATE = 64 << 10
"""Disk traffic of at least so many bytes per second is a sign of progress; log files cause less."""
_NETWORK_RATE = 1 << 20
"""Network traffic of at least so many bytes per second is a sign of progress; frameworks' heartbeats cause less."""
_GPU_PERCENT = 1
"""A GPU computes from this utilization on. That is no proof of progress, since a kernel that only waits for a peer
shows it too."""
_GPU_MEMORY_PERCENT = 3
"""A GPU whose memory is read or written for at least this percentage of the time makes progress; a kernel that waits
hardly uses memory."""
_BLOCKED_FACTOR = 4
"""A process that is blocked by a disk counts as progress for at most this many times `hang_seconds`: storage may stall
for minutes, but not for ever."""
_IDLE_FACTOR = 4
"""An idle period is a hang if it is this many times as long as the run's longest idle period so far."""
_MIN_IDLE_SECONDS = 1.0
"""Shorter idle periods are not recorded, since checks are at least a second apart."""
_MIN_INSPECTIONS = 4
"""How many inspections in a row must find a spinning run's ranks at the same place. A loop that works may be found at
the same place a few times by coincidence."""
_MIN_IDLE_INSPECTIONS = 2
"""How many inspections in a row must find all ranks of an idle run waiting. A single one may come at a moment when all
wait by coincidence."""
_MAX_DOUBLINGS = 6
"""How often the pause between inspections may double after inspections that found a rank at work: up to 64 times the
first pause."""
_LATE_FACTOR = 5.0
"""If a check comes after more than this many times the planned interval, this process was stopped, and the check proves
nothing."""

# Whether a rank waits for the others, by the call that it is in.
NOT_WAITING = 0
WAITING_IF_IDLE = 1  # the call may wait or compute, so it waits only if the run is idle
WAITING = 2


class NodeProgress(NamedTuple):
    """How long one node has shown no sign of progress.

    `idle_seconds`: time since the last sign of any kind. `stalled_seconds`: the same, where computing does not count as
    a sign. `has_begun`: there was a first milestone. `cpu_seconds`: the CPU time of the node's processes so far.
    """

    idle_seconds: float
    stalled_seconds: float
    has_begun: bool
    cpu_seconds: float = 0.0


class Activity(NamedTuple):
    """The activity of one node in the `seconds` since the last check."""

    seconds: float
    has_milestone: bool
    """The node's ranks printed output or took a step, or the run wrote a metric."""
    cpu_shares: Mapping[int, float]
    """The share of a core that each process used, by pid."""
    max_runnable_share: float
    """The largest share of the time that a process ran or was ready to run."""
    disk_rate: float
    """Bytes per second from and to disks."""
    network_rate: float
    """Bytes per second from and to the network."""
    is_blocked: bool
    """A process waits for a disk."""
    gpu_percent: float
    """The highest utilization of a GPU."""
    gpu_memory_percent: float
    """The highest percentage of the time for which a GPU's memory was read or written. A GPU that waits is busy, but
    its memory is not."""
    is_using_cpu: bool = False
    """The supervisor has measured that the node uses CPU time. Unlike `cpu_shares`, it counts ended processes too."""
    counted_cpu_seconds: float = 0.0
    """The CPU time that the supervisor has measured; 0 if it cannot measure it."""


class RankState(NamedTuple):
    """The state of one rank at an inspection.

    `digest` identifies its stacks. `waiting` is NOT_WAITING, WAITING_IF_IDLE or WAITING. `place` is its place in the
    customer's code, as text. `is_parked`: it has done nothing since the last inspection, except in background threads.
    """

    digest: str
    waiting: int
    place: str
    is_parked: bool = False


class Hang(NamedTuple):
    """A hang: seconds since the last sign of progress, and what each rank was doing at the last inspection."""

    seconds: float
    states: Mapping[int, RankState]


class ProgressTracker:
    """One node's signs of progress. `now` is the time of any monotonic clock.

    `min_busy_share` is the least share of a core at which a process of this node counts as busy. `NodeWatch` passes
    less than BUSY_SHARE on a node with few cores per rank.
    """

    def __init__(self, now: float, hang_seconds: float, min_busy_share: float = BUSY_SHARE) -> None:
        self._min_busy_share = min_busy_share
        self._max_blocked_seconds = _BLOCKED_FACTOR * hang_seconds
        self._blocked_since: Optional[float] = None  # since when a process has waited for a disk at every check
        self._has_begun = False  # there was a milestone
        self._computed_at = now  # when the node was last seen to compute
        self._progressed_at = now  # when it last showed a sign of any other kind
        # Shares of a core by pid.
        self._background_shares: Dict[int, float] = {}  # background activity: the lowest between the last milestones
        self._lowest_shares: Dict[int, float] = {}  # the lowest share since the last milestone
        self._cpu_seconds = 0.0

    def add_activity(self, now: float, activity: Activity, interval: float) -> NodeProgress:
        """Add one check's observations; return the node's progress. `interval`: planned seconds between checks."""
        shares = activity.cpu_shares
        # The shares lack processes that have ended, and the supervisor cannot measure CPU time everywhere.
        self._cpu_seconds += max(sum(shares.values()) * activity.seconds, activity.counted_cpu_seconds)
        if activity.has_milestone:
            self._has_begun = True
            # Between two milestones, each process waits at times. Its lowest share is therefore its background
            # activity, which continues while it waits.
            self._background_shares.update(self._lowest_shares)
            self._lowest_shares = {}
        self._lowest_shares = {pid: min(share, self._lowest_shares.get(pid, share)) for pid, share in shares.items()}
        self._background_shares = {pid: share for pid, share in self._background_shares.items() if pid in shares}
        self._blocked_since = (self._blocked_since or now) if activity.is_blocked else None
        waits_for_disk = self._blocked_since is not None and now - self._blocked_since <= self._max_blocked_seconds
        moves_data = activity.disk_rate >= _DISK_RATE or activity.network_rate >= _NETWORK_RATE
        moves_data |= activity.gpu_memory_percent >= _GPU_MEMORY_PERCENT
        is_late = activity.seconds > _LATE_FACTOR * interval
        if activity.has_milestone or moves_data or waits_for_disk or is_late:
            self._progressed_at = now
        # Many processes that each use little count as work together: else code could compute in many of them for free,
        # because it would seem to hang.
        is_busy = activity.is_using_cpu or sum(shares.values()) >= NODE_BUSY_SHARE
        is_busy |= any(share >= self.busy_share(pid) for pid, share in shares.items())
        if is_busy or activity.max_runnable_share >= _STARVED_SHARE or activity.gpu_percent >= _GPU_PERCENT:
            self._computed_at = now
        stalled_seconds = now - self._progressed_at
        return NodeProgress(
            min(stalled_seconds, now - self._computed_at), stalled_seconds, self._has_begun, self._cpu_seconds
        )

    def busy_share(self, pid: int) -> float:
        """Return the share of a core at which this process counts as busy.

        It is twice the process's background activity, or `min_busy_share` if that is higher.
        """
        background_share = self._background_shares.get(pid, 0.0)
        if background_share > _MAX_BACKGROUND_SHARE:
            return self._min_busy_share  # the process works all the time, so the share is not background activity
        return max(self._min_busy_share, 2 * background_share)


def is_rank_parked(
    first_thread_share: float,
    other_thread_shares: Iterable[float],
    other_process_shares: Iterable[float],
    min_busy_share: float,
) -> bool:
    """Whether a rank is parked. A share is the share of a core that one of its threads or processes has used.

    `min_busy_share` is as in `ProgressTracker`.
    """
    # The other threads may do no more than background threads: at `_MAX_BUSY_SHARE` every process counts as busy.
    other_threads_are_idle = all(share < _MAX_BUSY_SHARE for share in other_thread_shares)
    other_processes_are_idle = all(share < min_busy_share for share in other_process_shares)
    return first_thread_share < _PARKED_SHARE and other_threads_are_idle and other_processes_are_idle


class _Standstill(NamedTuple):
    """A rank's state, the time (`since`) of the first inspection that found it, and how many in a row have found it."""

    state: RankState
    since: float
    inspections: int


class HangDetector:
    """Decides on node 0, from the progress of all `nodes`, whether the run hangs; never, if `hang_seconds` is 0."""

    def __init__(self, hang_seconds: float, nodes: Iterable[int]) -> None:
        self._hang_seconds = float(hang_seconds)
        self._min_hang_seconds = min(MIN_HANG_SECONDS, self._hang_seconds)
        self._nodes = set(nodes)
        self._progress: Dict[int, NodeProgress] = {}  # the last one of each node
        self._cpu_seconds_at_last_sign: Dict[int, float] = {}  # of each node
        self._longest_idle_seconds = 0.0  # the longest idle period that has ended
        self._last_idle_seconds = 0.0  # the current idle period, as of the last report
        self._next_inspection_at: Optional[float] = None  # the earliest time of the next inspection; None: now
        self._inspects_idle_run = False  # the last inspection was of an idle run, not of a spinning one
        self._busy_inspections = 0  # inspections in a row that found a rank at work
        self._waiting_inspections = 0  # inspections in a row of an idle run that found all ranks waiting
        # The nodes that have not answered the current inspection, and the answers so far, by rank.
        self._unanswered_nodes: Set[int] = set()
        self._answers: Dict[int, RankState] = {}
        self._standstills: Dict[int, _Standstill] = {}  # by rank

    def remove_node(self, node: int) -> None:
        """Note that all ranks of a node have succeeded; it reports no more progress."""
        self._nodes.discard(node)
        self._progress.pop(node, None)
        self._unanswered_nodes.discard(node)

    def add_progress(self, node: int, progress: NodeProgress) -> None:
        """Add one node's progress."""
        if node not in self._nodes:
            return
        self._progress[node] = progress
        idle_seconds, last_idle_seconds = self.idle_seconds, self._last_idle_seconds
        self._last_idle_seconds = idle_seconds
        if idle_seconds < last_idle_seconds:  # an idle period has ended
            if last_idle_seconds >= _MIN_IDLE_SECONDS:
                self._longest_idle_seconds = max(self._longest_idle_seconds, last_idle_seconds)
            self._waiting_inspections = 0
        if idle_seconds < last_idle_seconds or not idle_seconds:  # there was a sign of progress
            self._cpu_seconds_at_last_sign = {reporter: last.cpu_seconds for reporter, last in self._progress.items()}
        if self.stalled_seconds < _MIN_IDLE_SECONDS:  # there was progress: earlier inspections no longer count
            self._busy_inspections = 0
            self._next_inspection_at = None
            self._standstills = {}

    def other_nodes(self, node: int) -> List[int]:
        """Return the nodes that report progress, except this one."""
        return sorted(self._nodes - {node})

    @property
    def idle_seconds(self) -> float:
        """For how many seconds no node has shown any sign of progress; 0 until every node has reported."""
        return min((progress.idle_seconds for progress in self._complete_progress), default=0.0)

    @property
    def stalled_seconds(self) -> float:
        """As `idle_seconds`, but computing does not count as a sign of progress."""
        return min((progress.stalled_seconds for progress in self._complete_progress), default=0.0)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of all nodes since the last sign of progress."""
        return sum(
            max(0.0, progress.cpu_seconds - self._cpu_seconds_at_last_sign.get(node, 0.0))
            for node, progress in self._progress.items()
        )

    @property
    def _complete_progress(self) -> List[NodeProgress]:
        """The progress of all nodes; empty until every node has reported."""
        return list(self._progress.values()) if self._nodes <= set(self._progress) else []

    @property
    def allowed_idle_seconds(self) -> float:
        """How many seconds the run may be idle while all of its ranks wait."""
        if not any(progress.has_begun for progress in self._progress.values()):
            return self._hang_seconds
        return max(self._min_hang_seconds, min(self._hang_seconds, _IDLE_FACTOR * self._longest_idle_seconds))

    def should_inspect(self, now: float) -> bool:
        """Whether to inspect every rank now. A call that returns True begins the inspection.

        The caller asks every node, and passes each answer to `add_inspection`.
        """
        if not self._hang_seconds:
            return False
        # An idle run counts as hung after `_min_hang_seconds` at the earliest. Inspections begin at half of this time,
        # which leaves room for several. A spinning run is inspected from half of `hang_seconds` on, and counts as hung
        # only after inspections over `hang_seconds`.
        is_idle = self.idle_seconds >= self._min_hang_seconds / 2
        if not is_idle and self.stalled_seconds < self._hang_seconds / 2:
            return False
        if is_idle != self._inspects_idle_run:  # the run has changed between idle and spinning, so inspect at once
            self._inspects_idle_run = is_idle
            self._busy_inspections = 0
            self._next_inspection_at = now
        if self._next_inspection_at is not None and now < self._next_inspection_at:
            return False
        # Several inspections fit into the time that is left until the run may count as hung.
        pause = (self._min_hang_seconds if is_idle else self._hang_seconds / 2) / _MIN_INSPECTIONS
        self._next_inspection_at = now + pause * 2 ** min(self._busy_inspections, _MAX_DOUBLINGS)
        self._unanswered_nodes = set(self._nodes)
        self._answers = {}
        return True

    def add_inspection(self, node: int, states: Mapping[int, RankState], now: float) -> None:
        """Add one node's answer to an inspection. `states`: what each of its ranks was doing."""
        if node not in self._unanswered_nodes:
            return
        self._unanswered_nodes.discard(node)
        self._answers.update(states)
        if self._unanswered_nodes:
            return
        standstills = {}
        for rank, state in self._answers.items():
            last = self._standstills.get(rank)
            if last is not None and (last.state.digest, last.state.is_parked) == (state.digest, state.is_parked):
                standstills[rank] = _Standstill(state, last.since, inspections=last.inspections + 1)
            else:
                standstills[rank] = _Standstill(state, since=now, inspections=1)
        self._standstills = standstills
        may_hang = self._all_wait_idly() if self._inspects_idle_run else self._all_are_stuck()
        self._busy_inspections = 0 if may_hang else self._busy_inspections + 1
        self._waiting_inspections = self._waiting_inspections + 1 if may_hang and self._inspects_idle_run else 0

    def _all_wait_idly(self) -> bool:
        return bool(self._standstills) and all(standstill.state.waiting for standstill in self._standstills.values())

    def _all_are_stuck(self) -> bool:
        states = [standstill.state for standstill in self._standstills.values()]
        some_wait = any(state.waiting == WAITING for state in states)
        return some_wait and all(state.waiting == WAITING or state.is_parked for state in states)

    def find_hang(self, now: float) -> Optional[Hang]:
        """Return the hang if the run hangs, else None."""
        if not self._hang_seconds or not self._complete_progress:
            return None
        states = {rank: standstill.state for rank, standstill in self._standstills.items()}
        # A run that is idle for `hang_seconds` hangs, wherever its ranks are.
        if self.idle_seconds >= self._hang_seconds:
            return Hang(self.idle_seconds, states)
        if self.idle_seconds >= self.allowed_idle_seconds and self._waiting_inspections >= _MIN_IDLE_INSPECTIONS:
            return Hang(self.idle_seconds, states)
        # All ranks must have stood still for `hang_seconds`, so the rank that moved last decides.
        since = max((standstill.since for standstill in self._standstills.values()), default=now)
        inspections = min((standstill.inspections for standstill in self._standstills.values()), default=0)
        is_spinning = inspections >= _MIN_INSPECTIONS and now - since >= self._hang_seconds and self._all_are_stuck()
        if is_spinning and self.stalled_seconds >= self._hang_seconds:
            return Hang(self.stalled_seconds, states)
        return None


def describe_hang(hang: Hang) -> str:
    """Return the hang as English sentences for logs."""
    text = "No sign of progress for {} seconds.".format(int(hang.seconds))
    other_ranks = [rank for rank, state in sorted(hang.states.items()) if not state.waiting]
    waiting_ranks = [rank for rank, state in sorted(hang.states.items()) if state.waiting]
    if waiting_ranks and other_ranks:
        rank = other_ranks[0]
        place = hang.states[rank].place
        text += " {} {} for the others".format(
            _format_ranks(waiting_ranks), "waits" if len(waiting_ranks) == 1 else "wait"
        )
        text += "; rank {} does not{}.".format(rank, ": it is in {}".format(place) if place else "")
    elif waiting_ranks:
        text += " Every rank waits for the others."
    return text


def _format_ranks(ranks: List[int]) -> str:
    """Return the ranks as the subject of a sentence; of many, only the first eight by number."""
    if len(ranks) == 1:
        return "Rank {}".format(ranks[0])
    return "Ranks {}{}".format(", ".join(map(str, ranks[:8])), " and others" if len(ranks) > 8 else "")

"""The node's eye on its own ranks: samples for the console, and with the other nodes the search for a hang.

It hides who looks when and who tells whom: every node reads its processes and tells the hub its pulse; the hub's
`progress.Judge` may ask all nodes where their ranks stand, and when it is certain, all of them take stacks before the
run falls. The one rule: it is called from the agent's loop and never waits; it ends nothing itself.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from .gpus import Gpus
from .progress import BUSY_SHARE, Judge, Pulse, Signs, Stand, Verdict, Work, is_parked, sentence
from .ranks import Rank
from .report import Message, cause
from .sampling import Process, Reading, Sampler, belonging, read_processes, read_threads
from .stacks import LONGEST_SECONDS, Asked, Look
from .steps import Counts, read

_OFTEN_SECONDS = 2.0
_SELDOM_SECONDS = 10.0
_EARLY_SECONDS = 60.0
_LOOKS_PER_HANG = 20
_SHORTEST_LOOK = 1.0
_LONGEST_LOOK = 5.0
_STACKS_SECONDS = LONGEST_SECONDS + 2.0
"""How long the hub waits for the other nodes' stacks: a hang can be on a node that does not answer well."""
_SMALLEST_SHARE = 0.01
_NO_COUNTS = Counts(0, 0, 0.0, None)


class Threads(NamedTuple):
    """What the threads of a rank, and its other processes, had used of CPU at a moment: {number: seconds}."""

    at: float
    pid: int
    used: Dict[int, float]
    children: Dict[int, float]


class Watch:
    """`plan` is what the node runs, `devices` its GPUs; `report` speaks to the supervisor, `tell` to the other nodes.

    `keep_time` is to be called at least once a second while ranks run, `heard` with every message of another node.
    """

    def __init__(
        self,
        plan: Any,
        devices: Sequence[str],
        *,
        report: Callable[[Message], None],
        tell: Callable[[Message], None],
    ) -> None:
        self._plan = plan
        self._report = report
        self._tell = tell
        self._hub = not plan.node
        self._gpus = Gpus(devices)
        self._gpus.watch()
        self._sampler = Sampler(own_network=plan.own_network, gpus=self._gpus)
        self._metrics = plan.run_dir.rstrip("/") + "/metrics.jsonl"
        self._begun_at = time.monotonic()
        self._sample_at = 0.0
        self._read_at = 0.0
        self._told_progress = 0.0
        self._round: Optional[int] = None
        self._ranks: List[Rank] = []
        self._gone: Set[int] = set()
        self._start_round(-1, ())

    def _start_round(self, number: int, members: Iterable[int]) -> None:
        now = time.monotonic()
        self._busy_share = BUSY_SHARE
        if self._plan.cpus:
            least = self._plan.cpus / max(1, self._plan.workers) / 4
            self._busy_share = max(_SMALLEST_SHARE, min(BUSY_SHARE, least))
        self._round = number
        self._signs = Signs(now, self._plan.hang_seconds, self._busy_share)
        self._threads: Dict[int, Threads] = {}
        self._judge = Judge(self._plan.hang_seconds, set(members) - self._gone)
        self._before: Optional[Reading] = None
        self._interval = 0.0
        self._printed = self._working = False
        self._counts: Dict[int, Counts] = {}
        self._reported: Optional[Tuple[int, int]] = None
        self._look: Optional[Look] = None
        self._asked_stands = False
        self._asked_stacks = False
        self._verdict: Optional[Verdict] = None
        self._progress_at = 0.0
        self._missing: Set[int] = set()
        self._give_up_at = 0.0

    # What the agent tells

    def printed(self) -> None:
        """Ranks of this node wrote output."""
        self._printed = True

    def worked(self) -> None:
        """This node used CPU time, whether or not any process that lives has."""
        self._working = True

    def left(self, node: int) -> None:
        """Every rank of another node has succeeded."""
        self._gone.add(node)
        self._judge.leave(node)
        self._missing.discard(node)

    def heard(self, node: int, message: Message) -> None:
        """What another node's watch says; anything else is left alone."""
        kind = message.get("type")
        if message.get("round") != self._round:
            return
        if kind == "pulse":
            self._judge.hear(node, Pulse(message["quiet"], message["silent"], message["begun"]))
        elif kind == "stands":
            stands = {int(seat): Stand(*stand) for seat, stand in message["stands"].items()}
            self._judge.stood(node, stands, time.monotonic())
        elif kind == "look":
            self._asked_stands = True
        elif kind == "hang":
            self._asked_stacks = True
        elif kind == "stacked":
            self._missing.discard(node)

    def patience(self, longest: float) -> float:
        """How long to wait, at most `longest` seconds, until `keep_time` has something to do."""
        if self._look is None:
            return longest
        return max(0.0, min(longest, self._look.ends_at() - time.monotonic()))

    def keep_time(self, number: int, members: Iterable[int], ranks: Sequence[Rank]) -> Optional[Message]:
        """Do what is due. `ranks` are those of this node that have not ended. The hub returns the cause of a hang."""
        now = time.monotonic()
        if number != self._round:
            self._start_round(number, members)
        self._ranks = list(ranks)
        if now >= self._read_at:
            self._see(now)
        if self._hub and self._verdict is None:
            self._consider(now)
        if (self._asked_stands or self._asked_stacks) and self._look is None:
            self._begin_look(now)
        if self._look is not None and self._look.is_over(now):
            self._end_look(self._look, now)
        if self._verdict is None or self._look is not None or self._asked_stacks:
            return None
        return self._cause(self._verdict) if not self._missing or now >= self._give_up_at else None

    def finish(self, ranks: Sequence[Rank]) -> None:
        """The run is over: a last sample, of ranks that have ended as well."""
        self._gpus.stop()
        self._ranks = list(ranks)
        self._sample(self._sampler.read(), self._read_counts())

    # Looking at processes

    def _see(self, now: float) -> None:
        reading = self._sampler.read()
        counts = self._read_counts()
        if now >= self._sample_at:
            self._sample_at = now + (_OFTEN_SECONDS if now < self._begun_at + _EARLY_SECONDS else _SELDOM_SECONDS)
            self._sample(reading, counts)
        if self._plan.hang_seconds and self._before is not None:
            pulse = self._signs.see(now, self._work(self._before, reading, counts), self._interval)
            self._say(pulse)
            if pulse.silent < self._plan.hang_seconds / 4:
                self._threads = {}
            elif not self._threads:
                self._threads = self._read_threads(now, reading.processes)
        self._before, self._counts = reading, counts
        look = max(_SHORTEST_LOOK, min(_LONGEST_LOOK, self._plan.hang_seconds / _LOOKS_PER_HANG))
        self._read_at = min(now + look, self._sample_at) if self._plan.hang_seconds else self._sample_at
        self._interval = self._read_at - now

    def _read_counts(self) -> Dict[int, Counts]:
        return {rank.seat: read(rank.record) for rank in self._ranks if rank.record >= 0}

    def _sample(self, reading: Reading, counts: Dict[int, Counts]) -> None:
        sample = self._sampler.sample(reading, {rank.pid: rank.seat for rank in self._ranks}, counts)
        if sample is not None:
            self._report({"type": "sample", **sample})

    def _work(self, before: Reading, after: Reading, counts: Dict[int, Counts]) -> Work:
        seconds = max(1e-3, after.at - before.at)
        shares, starving, disk, blocked = {}, 0.0, 0, False
        for pid, process in after.processes.items():
            known = before.processes.get(pid)
            fresh = known is None or known.start != process.start
            shares[pid] = (process.cpu - (0.0 if known is None or fresh else known.cpu)) / seconds
            starving = max(starving, (process.wanted - (0.0 if known is None or fresh else known.wanted)) / seconds)
            disk += process.read + process.written
            blocked |= process.state == "D"
        disk -= sum(process.read + process.written for process in before.processes.values())
        traffic = 0
        if before.network is not None and after.network is not None:
            traffic = sum(after.network) - sum(before.network)
        stepped = any(known.calls != self._counts.get(seat, _NO_COUNTS).calls for seat, known in counts.items())
        gpus = self._sampler.gpus
        work = Work(
            seconds=seconds,
            milestone=self._printed | stepped | self._metrics_changed(),
            shares=shares,
            starving=starving,
            disk=disk / seconds,
            network=traffic / seconds,
            blocked=blocked,
            gpu=max((gpu.utilization or 0 for gpu in gpus), default=0),
            gpu_memory=max((gpu.memory_utilization or 0 for gpu in gpus), default=0),
            working=self._working,
        )
        self._printed = self._working = False
        return work

    def _metrics_changed(self) -> bool:
        try:
            state = os.lstat(self._metrics)
        except OSError:
            return False
        known, self._reported = self._reported, (state.st_mtime_ns, state.st_size)
        return known != self._reported

    def _say(self, pulse: Pulse) -> None:
        at = time.time() - pulse.quiet
        if at >= self._told_progress + _SHORTEST_LOOK:
            self._told_progress = at
            self._report({"type": "progress", "at": round(at, 3)})
        if self._hub:
            self._judge.hear(self._plan.node, pulse)
        else:
            self._tell({"type": "pulse", "round": self._round, **pulse._asdict()})

    # Looking into ranks

    def _consider(self, now: float) -> None:
        """The hub's part."""
        if self._judge.wants_look(now):
            self._asked_stands = True
            self._tell({"type": "look", "round": self._round})
        verdict = self._judge.verdict(now)
        if verdict is not None:
            self._verdict = verdict
            # What computed is a sign where it comes to money: that it led nowhere is only what the code's stacks say.
            self._progress_at = time.time() - self._judge.quiet
            self._asked_stacks = True
            self._missing = set(self._judge.others(self._plan.node))
            self._give_up_at = now + _STACKS_SECONDS
            self._tell({"type": "hang", "round": self._round})

    def _begin_look(self, now: float) -> None:
        self._look = Look({rank.seat: Asked(rank.pid, rank.notes) for rank in self._ranks})
        for rank in self._ranks:
            rank.overhear = self._overhear
        self._look.begin(now)

    def _overhear(self, seat: int, data: bytes) -> None:
        if self._look is not None:
            self._look.feed(seat, data, time.monotonic())

    def _end_look(self, look: Look, now: float) -> None:
        self._look = None
        for rank in self._ranks:
            rank.overhear = None
        if self._asked_stands:
            self._asked_stands = False
            stands = self._add_parked(look.stands(), now)
            if self._hub:
                self._judge.stood(self._plan.node, stands, now)
            else:
                self._tell({"type": "stands", "round": self._round, "stands": stands})
        if self._asked_stacks:
            self._asked_stacks = False
            processes = read_processes()
            owned = belonging(processes, {rank.pid: rank.seat for rank in self._ranks})
            for seat, text in look.texts(processes, owned).items():
                self._report({"type": "stacks", "rank": seat, "text": text})
            if self._hub and self._verdict is not None:
                # What is known of all ranks, and of these as late as possible.
                self._verdict = self._verdict._replace(stands={**self._verdict.stands, **look.stands()})
            else:
                self._tell({"type": "stacked", "round": self._round})

    def _read_threads(self, now: float, processes: Dict[int, Process]) -> Dict[int, Threads]:
        owned = belonging(processes, {rank.pid: rank.seat for rank in self._ranks})
        return {
            rank.seat: Threads(
                now,
                rank.pid,
                read_threads(rank.pid),
                {pid: processes[pid].cpu for pid in owned[rank.seat] if pid != rank.pid},
            )
            for rank in self._ranks
        }

    def _add_parked(self, stands: Dict[int, Stand], now: float) -> Dict[int, Stand]:
        """Which ranks have done nothing since the look before; of those that had none, it is not known."""
        before, self._threads = self._threads, self._read_threads(now, read_processes())
        for seat, after in self._threads.items():
            known = before.get(seat)
            if known is None or known.pid != after.pid or seat not in stands:
                continue
            seconds = max(1e-3, after.at - known.at)
            used = {thread: (cpu - known.used.get(thread, 0.0)) / seconds for thread, cpu in after.used.items()}
            children = [(cpu - known.children.get(pid, 0.0)) / seconds for pid, cpu in after.children.items()]
            first = used.pop(after.pid, 1.0)
            stands[seat] = stands[seat]._replace(parked=is_parked(first, used.values(), children, self._busy_share))
        return stands

    def _cause(self, verdict: Verdict) -> Message:
        elsewhere = [seat for seat, stand in sorted(verdict.stands.items()) if not stand.waits]
        waiting = len(verdict.stands) - len(elsewhere)
        data: Dict[str, Any] = {"seconds": int(verdict.seconds), "progress_at": round(self._progress_at, 3)}
        found = cause("hung", "hung", self._plan.node, message=sentence(verdict), data=data)
        if waiting and elsewhere:
            # The one that the others wait for is the one to look at.
            found.update(rank=elsewhere[0], node=elsewhere[0] // self._plan.workers)
            data.update(rank=elsewhere[0], where=verdict.stands[elsewhere[0]].where)
        return found

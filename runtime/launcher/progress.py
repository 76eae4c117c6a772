"""Whether a run still gets anywhere. PURE: what was seen and when goes in, a verdict comes out.

Each node keeps its `Signs` and says at every look for how long there have been none (a `Pulse`); node 0's `Judge`
hears all of them. There are two suspicions:

    quiet     No process of any node computes, reads, writes or prints, and no GPU works. After `hang_seconds` of it the
              run has hung. It has sooner where, besides, every rank stands in a call that waits for the others: then
              four times the longest quiet that this run has come back from is enough, but never less than
              `SURE_SECONDS`, and not before the run has ever got anywhere.
    spinning  Something computes, but nothing is printed, written, read or stepped. What waits for a GPU or a peer can
              look like that. Only where every rank has stood at the very same place, at each of several looks over all
              of `hang_seconds`, has the run hung: some in a call that waits for the others, the rest in one too, or
              parked (its first thread does nothing, no other one does much, and it has no other process that does).

The one rule: in doubt the run goes on. A look into the ranks is only asked for when a suspicion is well under way, and
the less often the more of them found a rank at work.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

SURE_SECONDS = 20.0
"""However short the quiet times of a run have been: so long at least must one last."""
BUSY_SHARE = 0.05
"""A process that has less of a core than this is idle: background threads tick on while a script waits."""
_BUSIEST_SHARE = 0.15
TOTAL_SHARE = 0.5
"""Of a core: what all processes of a node together use from here on is work, whoever does it."""
_LEARNABLE_SHARE = 0.075
_STARVED_SHARE = 0.5
_PARKED_SHARE = 0.02
_DISK_RATE = 64 << 10
_NETWORK_RATE = 1 << 20
_GPU_PERCENT = 1
_GPU_MEMORY_PERCENT = 3
_BLOCKED_PATIENCE = 4
_GAP_FACTOR = 4
_GAP_SECONDS = 1.0
_LOOKS = 4
_MOST_DOUBLINGS = 6
_LATE = 5.0

NOT_WAITING = 0
WAITING_IF_IDLE = 1
WAITING = 2


class Pulse(NamedTuple):
    """One node's word: seconds without any sign, and without any but computing; whether it has ever come to work.

    `begun` is set by the first output, metric or step.
    """

    quiet: float
    silent: float
    begun: bool


class Work(NamedTuple):
    """What one node did since the look before. Shares are of a core, rates bytes per second, `gpu` per cent.

    `seconds` since that look; `milestone`: something was printed, reported or stepped; `shares` {process: share};
    `starving`: the largest share of the time that a process wanted a core; `blocked`: one waits for a disk; `gpu` and
    `gpu_memory`: how busy the busiest GPU and its memory are. What waits on a GPU keeps it busy, but not its memory.
    `working`: the kernel has counted more than `shares` have in them, which is of processes that live now.
    """

    seconds: float
    milestone: bool
    shares: Mapping[int, float]
    starving: float
    disk: float
    network: float
    blocked: bool
    gpu: float
    gpu_memory: float
    working: bool = False


class Stand(NamedTuple):
    """Where one rank stood: a digest of its stacks, whether that is a call that waits, and its place in words.

    `waits`: NOT_WAITING, WAITING_IF_IDLE (a call that also computes) or WAITING. `parked`: it has done nothing there
    since the look before, but for what threads in the background do.
    """

    digest: str
    waits: int
    where: str
    parked: bool = False


class Verdict(NamedTuple):
    """The run has hung: seconds since the last sign of progress, and where the ranks stood when last looked at."""

    seconds: float
    stands: Mapping[int, Stand]


class Signs:
    """One node's signs of progress. Times are of any one clock that never goes back."""

    def __init__(self, now: float, hang_seconds: float, busy_share: float = BUSY_SHARE) -> None:
        self._busy_share = busy_share
        self._blocked_patience = _BLOCKED_PATIENCE * hang_seconds
        self._blocked_since: Optional[float] = None
        self._begun = False
        self._sign_at = now
        self._milestone_at = now
        self._background: Dict[int, float] = {}
        self._lowest: Dict[int, float] = {}

    def see(self, now: float, work: Work, interval: float) -> Pulse:
        """Take in one look, due `interval` seconds after the one before; one that came much later proves nothing."""
        if work.milestone:
            self._begun = True
            # The least that a process did while the run got on is its background: whatever does not stop when it waits.
            self._background.update(self._lowest)
            self._lowest = {}
        self._lowest = {process: min(share, self._lowest.get(process, share)) for process, share in work.shares.items()}
        self._background = {
            process: self._background[process] for process in self._background if process in work.shares
        }
        self._blocked_since = (self._blocked_since or now) if work.blocked else None
        blocked = self._blocked_since is not None and now - self._blocked_since <= self._blocked_patience
        traffic = work.disk >= _DISK_RATE or work.network >= _NETWORK_RATE or work.gpu_memory >= _GPU_MEMORY_PERCENT
        if work.milestone or traffic or blocked or work.seconds > _LATE * interval:
            self._milestone_at = now
        # Many idle processes are idle; but what all of them use together is in use, and to be paid for.
        busy = any(share >= self.threshold(process) for process, share in work.shares.items())
        busy |= work.working or sum(work.shares.values()) >= TOTAL_SHARE
        if busy or work.starving >= _STARVED_SHARE or work.gpu >= _GPU_PERCENT:
            self._sign_at = now
        return self.pulse(now)

    def pulse(self, now: float) -> Pulse:
        """The pulse at this moment."""
        return Pulse(now - max(self._sign_at, self._milestone_at), now - self._milestone_at, self._begun)

    def threshold(self, process: int) -> float:
        """From which share of a core on this process counts as busy."""
        background = self._background.get(process, 0.0)
        if not _LEARNABLE_SHARE >= background > self._busy_share / 2:
            return self._busy_share
        return max(self._busy_share, min(_BUSIEST_SHARE, 2 * background))


def is_parked(first: float, others: Iterable[float], processes: Iterable[float], busy_share: float) -> bool:
    """Whether a rank only ticks on, from the shares of its first thread, its other threads and its other processes."""
    ticking = all(share < _BUSIEST_SHARE for share in others)
    return first < _PARKED_SHARE and ticking and all(share < busy_share for share in processes)


class Judge:
    """The hub's: hears every node and decides. `hang_seconds` 0: it never does."""

    def __init__(self, hang_seconds: float, nodes: Iterable[int]) -> None:
        self._hang = float(hang_seconds)
        self._sure = min(SURE_SECONDS, self._hang)
        self._nodes = set(nodes)
        self._pulses: Dict[int, Pulse] = {}
        self._longest_gap = 0.0
        self._gap = 0.0
        self._look_at: Optional[float] = None
        self._fruitless = 0
        self._looks_at_quiet = False
        self._quiet_looks = 0
        self._asked: Set[int] = set()
        self._answers: Dict[int, Stand] = {}
        # Of the ranks that stand where they stood at the look before: {rank: (stand, since when, looks)}.
        self._standing: Dict[int, Tuple[Stand, float, int]] = {}

    def leave(self, node: int) -> None:
        """A node's ranks have all succeeded: nothing is to be heard of it any more."""
        self._nodes.discard(node)
        self._pulses.pop(node, None)
        self._asked.discard(node)

    def hear(self, node: int, pulse: Pulse) -> None:
        """One node's pulse."""
        if node not in self._nodes:
            return
        self._pulses[node] = pulse
        gap = self.quiet
        if gap < self._gap:
            self._longest_gap = max(self._longest_gap, self._gap if self._gap >= _GAP_SECONDS else 0.0)
            self._quiet_looks = 0
        self._gap = gap
        if self.silent < _GAP_SECONDS:
            self._fruitless = 0
            self._look_at = None
            self._standing = {}

    def others(self, node: int) -> List[int]:
        """Every node that is heard of, but this one."""
        return sorted(self._nodes - {node})

    @property
    def quiet(self) -> float:
        """For how long there has been no sign on any node; 0 while one has not said a word."""
        return min((self._pulses[node].quiet for node in self._nodes), default=0.0) if self._complete else 0.0

    @property
    def silent(self) -> float:
        """The same for signs other than computing."""
        return min((self._pulses[node].silent for node in self._nodes), default=0.0) if self._complete else 0.0

    @property
    def _complete(self) -> bool:
        return self._nodes <= set(self._pulses)

    @property
    def patience(self) -> float:
        """How long a quiet run in which everybody waits may stay quiet."""
        if not any(pulse.begun for pulse in self._pulses.values()):
            return self._hang
        return max(self._sure, min(self._hang, _GAP_FACTOR * self._longest_gap))

    def wants_look(self, now: float) -> bool:
        """Whether every rank is to be looked at now; True once for each look, which `stood` then answers."""
        if not self._hang:
            return False
        quiet = self.quiet >= self._sure / 2
        if not quiet and self.silent < self._hang / 2:
            return False
        if quiet != self._looks_at_quiet:
            self._looks_at_quiet = quiet
            self._fruitless = 0
            self._look_at = now
        if self._look_at is not None and now < self._look_at:
            return False
        pause = self._sure / _LOOKS if quiet else self._hang / (2 * _LOOKS)
        self._look_at = now + pause * 2 ** min(self._fruitless, _MOST_DOUBLINGS)
        self._asked = set(self._nodes)
        self._answers = {}
        return True

    def stood(self, node: int, stands: Mapping[int, Stand], now: float) -> None:
        """One node's answer to a look: where each of its ranks stands."""
        if node not in self._asked:
            return
        self._asked.discard(node)
        self._answers.update(stands)
        if self._asked:
            return
        standing = {}
        for rank, stand in self._answers.items():
            known, since, looks = self._standing.get(rank, (stand, now, 0))
            same = (known.digest, known.parked) == (stand.digest, stand.parked)
            standing[rank] = (stand, since if same else now, looks + 1 if same else 1)
        self._standing = standing
        waiting = self._all_wait_idly() if self._looks_at_quiet else self._all_are_stuck()
        self._fruitless = 0 if waiting else self._fruitless + 1
        self._quiet_looks = self._quiet_looks + 1 if waiting and self._looks_at_quiet else 0

    def _all_wait_idly(self) -> bool:
        return bool(self._standing) and all(stand.waits for stand, _since, _looks in self._standing.values())

    def _all_are_stuck(self) -> bool:
        stands = [stand for stand, _since, _looks in self._standing.values()]
        some_wait = any(stand.waits == WAITING for stand in stands)
        return some_wait and all(stand.waits == WAITING or stand.parked for stand in stands)

    def verdict(self, now: float) -> Optional[Verdict]:
        """Whether the run has hung by now."""
        if not self._hang or not self._complete or not self._nodes:
            return None
        stands = {rank: stand for rank, (stand, _since, _looks) in self._standing.items()}
        looks = min((looks for _stand, _since, looks in self._standing.values()), default=0)
        since = max((since for _stand, since, _looks in self._standing.values()), default=now)
        if self.quiet >= self._hang:
            return Verdict(self.quiet, stands)
        if self.quiet >= self.patience and self._quiet_looks > 1:
            return Verdict(self.quiet, stands)
        spun = looks >= _LOOKS and now - since >= self._hang and self._all_are_stuck()
        if spun and self.silent >= self._hang:
            return Verdict(self.silent, stands)
        return None


def sentence(verdict: Verdict) -> str:
    """The verdict in words, for logs: who waits, and who does not."""
    told = "No sign of progress for {} seconds.".format(int(verdict.seconds))
    elsewhere = [rank for rank, stand in sorted(verdict.stands.items()) if not stand.waits]
    waiting = [rank for rank, stand in sorted(verdict.stands.items()) if stand.waits]
    if waiting and elsewhere:
        rank = elsewhere[0]
        place = verdict.stands[rank].where
        told += " {} {} for the others".format(_ranks(waiting), "waits" if len(waiting) == 1 else "wait")
        told += "; rank {} does not{}.".format(rank, ": it is in {}".format(place) if place else "")
    elif waiting:
        told += " Every rank waits for the others."
    return told


def _ranks(ranks: List[int]) -> str:
    if len(ranks) == 1:
        return "Rank {}".format(ranks[0])
    shown = ", ".join(map(str, ranks[:8]))
    return "Ranks {}{}".format(shown, " and others" if len(ranks) > 8 else "")

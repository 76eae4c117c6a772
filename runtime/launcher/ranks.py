"""The processes of the customer's code on one node: started together, watched, ended together.

The one rule: a rank's end is told once, and only when everything it said before is known. Ranks are kept by their
*seat*, the global rank at the run's submission: outputs and logs belong to it, whatever RANK a later round gives.
"""

from __future__ import annotations

import os
import time

from .bare import EVENT_READ, signal
from .carried import as_file
from .frameworks import rank_environment
from .processes import Exit, send_signal, spawn
from .steps import open_record
from .topology import Plan, rank_arguments
from .warm import Warm

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from selectors import BaseSelector
    from typing import Any, Callable, Dict, List, Mapping, Optional

FALL_SECONDS = 3.0
"""How long ranks get between SIGTERM and SIGKILL when the run or a round of it falls."""
LEAVE_SECONDS = 30.0
"""How long a rank whose script has failed may take to leave. Some never do: they join a worker that does not end."""
HEAD_START_SECONDS = 0.05
"""PyTorch's rank 0 serves the store that the others connect to. One that comes before it listens is refused, and tries
again only after about half a second, so the others begin a little later."""
_LONGEST_NOTE = 1 << 14


class Rank:
    """One process of the customer's code, from its start to its end.

    `notes` is the pipe it speaks through, which `overhear` is shown all of; `record` the file it counts its steps in.
    """

    def __init__(self, seat: int, pid: int, notes: int, record: int = -1) -> None:
        self.seat = seat
        self.pid = pid
        self.notes = notes
        self.record = record
        self.overhear: Optional[Callable[[int, bytes], None]] = None
        self.exit: Optional[Exit] = None
        self.finished = False
        self.raised_at: Optional[float] = None
        self.raised_since: Optional[float] = None
        self.overdue = False
        self._noted = b""

    def read_notes(self) -> bool:
        """Take what the rank's interpreter has said; False once it can say no more."""
        try:
            data = os.read(self.notes, _LONGEST_NOTE)
        except BlockingIOError:
            return True
        if not data:
            return False
        if self.overhear is not None:
            self.overhear(self.seat, data)
        *lines, rest = (self._noted + data).split(b"\n")
        self._noted = rest[-_LONGEST_NOTE:]
        for line in lines:
            word, _, moment = line.partition(b" ")
            if word == b"finished":
                self.finished = True
            elif word == b"raised" and self.raised_at is None:
                self.raised_at = _moment(moment)
                self.raised_since = time.monotonic()
        return True

    @property
    def aborted_late(self) -> bool:
        """Whether the script returned from its last line and the process aborted only then, as gloo may."""
        return self.exit is not None and self.exit.signal == "SIGABRT" and self.finished

    @property
    def succeeded(self) -> bool:
        """Whether the rank has ended, and well."""
        return self.exit is not None and (self.exit.exit_code == 0 or self.aborted_late)

    @property
    def failed_at(self) -> float:
        """When the rank failed: as it said itself where it raised, else now, when it is reaped."""
        known = self.exit is None or self.exit.signal or self.raised_at is None
        return time.time() if known else float(self.raised_at or 0.0)


def _moment(text: bytes) -> float:
    """The time that a rank gives for its own failure; the code could give any, so only a recent one is believed."""
    now = time.time()
    try:
        told = float(text)
    except ValueError:
        return now
    return told if now - 60 < told < now else now


class Ranks:
    """This node's ranks. `order` is the supervisor's, `plan` the run's as submitted."""

    def __init__(self, selector: BaseSelector, plan: Plan, order: Mapping[str, Any]) -> None:
        self._selector = selector
        self._seats = [plan.rank(local_rank) for local_rank in range(plan.workers)]
        self._outputs: List[int] = order["outputs"]
        self._python: str = order["python"]
        self._environment: Dict[str, str] = order["environment"]
        self._flag: Optional[str] = order["flag"]
        self._folder: str = order["folder"]
        self._warm: Warm = order.get("warm") or Warm(None)
        self._import_folders: List[str] = order.get("import_folders", [])
        self._again = plan.elastic
        self._alone = bool(order.get("alone"))
        self._by_pid: Dict[int, Rank] = {}
        self._kill_at: Optional[float] = None

    def start(self, plan: Plan, note: str = "") -> Dict[str, int]:
        """Start every rank of this node by this plan and return {pid: seat}; a note goes to each one's output first."""
        self.clear()
        for local_rank in range(plan.workers):
            if note:
                self._write_note(local_rank, note.format(rank=plan.rank(local_rank), size=plan.world_size))
            self.start_one(plan, local_rank)
        self.seal()
        return self.pids

    def clear(self) -> None:
        """Forget the ranks of the round before, which have all ended."""
        for rank in self._by_pid.values():
            if rank.record >= 0:
                os.close(rank.record)
        self._by_pid.clear()
        self._kill_at = None

    def seal(self) -> None:
        """Every rank has been started: what only starting needs is let go, unless it may be needed again."""
        self._warm.close()
        if not self._again:
            for output in self._outputs:
                os.close(output)

    def start_one(self, plan: Plan, local_rank: int, more: Optional[Mapping[str, str]] = None) -> Rank:
        """Start one rank; `more` is added to its environment."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        record = open_record()
        environment = dict(self._environment)
        environment.update(rank_environment(plan, local_rank))
        environment.update(more or {})
        arguments = [self._python, "-u", as_file("rank.py", "steps.py"), "{},{}".format(writing, record), plan.script]
        arguments += rank_arguments(plan, local_rank, self._flag)
        inherit = [writing, record] if record >= 0 else [writing]
        delay_seconds = HEAD_START_SECONDS if plan.framework == "pytorch" and plan.rank(local_rank) else 0.0
        pid = self._warm.start(
            arguments[4:],
            environment,
            folder=self._folder,
            descriptors=[self._outputs[local_rank], *inherit],
            delay_seconds=delay_seconds,
            import_folders=self._import_folders,
        ) or spawn(
            arguments,
            environment,
            output=self._outputs[local_rank],
            inherit=inherit,
            folder=self._folder,
            new_session=True,
            delay_seconds=delay_seconds,
        )
        os.close(writing)
        rank = Rank(self._seats[local_rank], pid, reading, record)
        self._by_pid[pid] = rank
        self._selector.register(reading, EVENT_READ, rank)
        return rank

    def _write_note(self, local_rank: int, note: str) -> None:
        try:
            os.write(self._outputs[local_rank], "[trainyard] {}\n".format(note).encode())
        except OSError:
            return

    @property
    def pids(self) -> Dict[str, int]:
        """{pid: seat}, as the supervisor is told."""
        return {str(pid): rank.seat for pid, rank in self._by_pid.items()}

    @property
    def all(self) -> List[Rank]:
        """The ranks of this round, those that have ended as well."""
        return list(self._by_pid.values())

    @property
    def living(self) -> List[Rank]:
        """The ranks that have not ended."""
        return [rank for rank in self._by_pid.values() if rank.exit is None]

    @property
    def alive(self) -> bool:
        """Whether a rank has not ended."""
        return any(rank.exit is None for rank in self._by_pid.values())

    @property
    def succeeded(self) -> bool:
        """Whether there are ranks and all of them have ended well."""
        return bool(self._by_pid) and all(rank.succeeded for rank in self._by_pid.values())

    @property
    def some_ended(self) -> bool:
        """Whether a rank has ended, or its script has failed and it is about to."""
        return any(rank.exit is not None or rank.raised_at is not None for rank in self._by_pid.values())

    def listen(self, rank: Rank) -> None:
        """Take what a rank has said; nothing where its end, found at the same moment, was taken first."""
        if rank.notes >= 0 and not rank.read_notes():
            self._selector.unregister(rank.notes)
            os.close(rank.notes)
            rank.notes = -1

    def ended(self, gone: Exit) -> Optional[Rank]:
        """The rank that this process was; None for one that the code left behind and this process adopted."""
        rank = self._by_pid.get(gone.pid)
        if rank is None or rank.exit is not None:
            return None
        rank.exit = Exit(gone.pid, 1, "") if rank.overdue and gone.signal == "SIGKILL" else gone
        if rank.notes >= 0:
            self.listen(rank)
        return rank

    def fall(self) -> None:
        """End what is left: SIGTERM now, SIGKILL a little later."""
        self.signal(signal.SIGTERM)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + FALL_SECONDS

    def patience(self, longest: float) -> float:
        """How long to wait, at most `longest` seconds, until `keep_time` has something to do."""
        if self._kill_at is None:
            return longest
        return max(0.0, min(longest, self._kill_at - time.monotonic()))

    def keep_time(self) -> None:
        """Kill what has outlived its SIGTERM, or its script's failure."""
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self.signal(signal.SIGKILL)
            self._kill_at = None
        for rank in self.living:
            if not rank.overdue and rank.raised_since is not None and now >= rank.raised_since + LEAVE_SECONDS:
                rank.overdue = True
                send_signal(rank.pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Signal every rank that has not ended."""
        for rank in self._by_pid.values():
            if rank.exit is None:
                send_signal(rank.pid, number)

    def end_one(self, pid: int) -> None:
        """SIGTERM for one rank, where it lives."""
        rank = self._by_pid.get(pid)
        if rank is not None and rank.exit is None:
            send_signal(pid, signal.SIGTERM)

    def sweep(self) -> None:
        """Kill what ranks that have ended left behind. Where nobody else is in this pid namespace: everything."""
        if os.getpid() == 1:
            send_signal(-1, signal.SIGKILL)
            return
        if self._alone:
            # The first process is out of reach, and this one is spared.
            for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
                if pid not in (1, os.getpid()):
                    send_signal(pid, signal.SIGKILL)
            return
        for rank in self._by_pid.values():
            try:
                os.killpg(rank.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

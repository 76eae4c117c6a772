"""One node of a run: starts its ranks when all nodes are there, watches them, and ends with the first failure.

The one rule: one loop, one thread. Whatever happens (a rank's end, a word from a peer or the supervisor, the clock)
is handled to its end before the next thing, so there is no state in between.
"""

from __future__ import annotations

import gc
import os
import time

from .bare import EVENT_READ, Selector, signal
from .elastic import told
from .peers import BEAT_SECONDS, Peers
from .processes import Exit, reap
from .ranks import Rank, Ranks
from .report import ConnectionLost, Link, Message, cause
from .rounds import Rounds
from .topology import Plan

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple

START_SECONDS = 60.0
VERDICT_SECONDS = 1.0
"""A rank of an elastic run may fail because a node was lost, and before that is known: so long its failure waits."""
WATCH_SECONDS = 1.0
"""So long after their start nobody looks at the ranks: starting is to cost nothing besides."""
_TICK_SECONDS = 0.5


class Agent:
    """The node's launcher. `run` returns the exit code of the node: 0 when every rank succeeded."""

    def __init__(self, plan: Plan, order: Dict[str, Any], supervisor: Link) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._selector = Selector()
        self._peers = Peers(self._selector, plan.node, plan.nodes, order["token"])
        self._hub_address = (plan.addresses[0], int(order["control_port"]))
        self._ranks = Ranks(self._selector, plan, order)
        self._rounds = Rounds(plan, self._peers, self._ranks, self._report, self._round_began)
        if plan.controller == "mpi":
            # Imported here for speed alone: few runs need it.
            from .mpi import Mpi  # noqa: PLC0415

            ready = self._rounds.all_started
            self._rounds.mpi = Mpi(self._selector, self._ranks, order, tell=self._peers.tell, ready=ready)
        visible = order["environment"].get("CUDA_VISIBLE_DEVICES", "").split(",")
        self._devices = [name for name in order.get("devices") or visible if name]
        self._start_seconds = float(order.get("start_seconds") or START_SECONDS)
        self._watch: Any = None
        self._suspects: List[Message] = []
        self._verdict_at: Optional[float] = None
        self._ending = False
        self._failed = False
        self._done_told = False
        self._released = False
        self._beat_at = 0.0
        self._wakeup: Tuple[int, int] = (-1, -1)

    @property
    def _hub(self) -> bool:
        return not self._plan.node

    def run(self, listener: Optional[int]) -> int:
        """Live from the first connection, which comes to this descriptor, to the last rank's end."""
        self._selector.register(self._supervisor, EVENT_READ, self._supervisor)
        self._wake_on_children()
        if listener is not None and self._plan.nodes > 1:
            # Imported here for speed alone: a run of one node meets nobody.
            import socket  # noqa: PLC0415

            self._peers.listen(socket.socket(fileno=listener))
        elif listener is not None:
            os.close(listener)
        elif not self._hub:
            self._peers.join(self._hub_address)
        self._give_up_at = time.monotonic() + self._start_seconds
        while not self._over():
            if self._hub and self._rounds.waiting and not self._ending and self._peers.complete:
                self._rounds.open()
            for key, _events in self._selector.select(self._patience()):
                self._handle(key.data)
            self._from_peers(None)
            self._keep_time(time.monotonic())
        if self._watch is not None:
            self._watch.finish(self._ranks.all)
        self._report({"type": "ended"})
        return 1 if self._failed or self._ending else 0

    def _patience(self) -> float:
        patience = self._ranks.patience(_TICK_SECONDS)
        if self._verdict_at is not None:
            patience = max(0.0, min(patience, self._verdict_at - time.monotonic()))
        return patience if self._watch is None else float(self._watch.patience(patience))

    def _wake_on_children(self) -> None:
        self._wakeup = os.pipe()
        for end in self._wakeup:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._selector.register(self._wakeup[0], EVENT_READ, self._children_ended)

    def _handle(self, ready: Any) -> None:
        if ready is self._supervisor:
            self._from_supervisor()
        elif isinstance(ready, Rank):
            self._ranks.listen(ready)
            if ready.raised_at is not None:
                self._rounds.rank_raised()
        elif callable(ready):
            ready()
        else:
            self._from_peers(ready)

    def _children_ended(self) -> None:
        os.read(self._wakeup[0], 4096)
        for gone in reap():
            self._rank_ended(gone)
        # Only now, so that ranks which died together all name their own cause.
        if self._suspects and not self._plan.elastic:
            self._judge()

    def _keep_time(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            self._report({"type": "beat"})
        self._ranks.keep_time()
        if self._verdict_at is not None and now >= self._verdict_at:
            self._judge()
        if self._ending:
            return
        if self._rounds.waiting and now >= self._give_up_at:
            missing = self._peers.missing if self._hub else [0]
            sentence = "Nodes {} did not come in time.".format(told(missing))
            self._fail(cause("platform_error", "nodes_not_met", self._plan.node, message=sentence))
        late = self._rounds.keep_time(now)
        if late is not None:
            self._fail(late)
        if self._rounds.started_at is not None and now >= self._rounds.started_at + WATCH_SECONDS:
            hung = self._watching().keep_time(self._rounds.number, self._rounds.members, self._ranks.living)
            if hung is not None:
                self._fail(hung)

    def _watching(self) -> Any:
        if self._watch is None:
            # Imported here for speed alone: no rank waits for it.
            from .watch import Watch  # noqa: PLC0415

            gc.freeze()
            gc.enable()
            self._watch = Watch(self._plan, self._devices, report=self._report, tell=self._peers.tell)
        return self._watch

    def _over(self) -> bool:
        """Whether nothing is left to do on this node; tells the hub when its own ranks have succeeded."""
        if self._ending:
            return not self._ranks.alive
        if self._rounds.started_at is None or self._ranks.alive or self._suspects:
            return False
        if len(self._rounds.members) == 1:
            return True
        if self._hub:
            return self._peers.have_finished(self._rounds.members)
        if not self._done_told:
            self._done_told = True
            self._peers.tell({"type": "done"})
        # mpirun would take the end of its daemon here for a failure: it goes when the hub has gone.
        return self._rounds.mpi is None or self._released

    # What others say

    def _from_supervisor(self) -> None:
        try:
            messages = self._supervisor.receive()
        except ConnectionLost:
            # Nobody enforces the limits of this run any more; with this process the whole sandbox goes.
            os._exit(1)
        for message in messages:
            kind = message.get("type")
            if kind == "end":
                self._ending = True
                self._ranks.signal(signal.SIGTERM)
            elif kind == "output":
                self._watching().printed()
            elif kind == "working":
                self._watching().worked()
            elif kind == "abort":
                self._peers.tell({"type": "abort"})
                self._report({"type": "ended"})
                self._fall()

    def _from_peers(self, ready: Any) -> None:
        for node, message in self._peers.events(ready):
            kind = message.get("type")
            if kind == "lost":
                self._lost(node, bool(message.get("silent")))
            elif kind == "abort":
                self._confess()
                self._peers.tell({"type": "abort"})
                self._fall()
            elif kind == "done":
                self._peers.finished(node)
                self._watching().left(node)
            elif self._ending or self._rounds.heard(node, message):
                continue
            elif self._watch is not None:
                self._watch.heard(node, message)

    def _lost(self, node: int, silent: bool) -> None:
        if self._ending:
            return
        if self._done_told:
            self._released = True
            return
        why = self._rounds.lose(node)
        if why is None:
            return
        sentence = "Node {} {}{}.".format(node, "stopped answering" if silent else "was lost", why)
        self._fail(cause("node_lost", "node_silent" if silent else "node_lost", node, message=sentence))

    def _round_began(self) -> None:
        """What failed in the round before follows from the node that was lost."""
        self._suspects = []
        self._verdict_at = None

    # Ending

    def _rank_ended(self, gone: Exit) -> None:
        rank = self._ranks.ended(gone)
        if rank is None or rank.exit is None:
            if self._rounds.mpi is not None:
                self._rounds.mpi.ended(gone)
            return
        gone = rank.exit
        self._report(
            {
                "type": "rank_ended",
                "rank": rank.seat,
                "exit_code": gone.exit_code,
                "signal": gone.signal,
                "aborted_late": rank.aborted_late,
                "round": self._rounds.number,
            }
        )
        if self._ending:
            return
        if not self._rounds.rank_ended(rank) and not rank.succeeded:
            self._suspect(rank, gone)

    def _suspect(self, rank: Rank, gone: Exit) -> None:
        code = "rank_killed" if gone.signal else "rank_exited"
        found = cause("code_failed", code, self._plan.node, at=rank.failed_at, rank=rank.seat)
        found.update(exit_code=gone.exit_code, signal=gone.signal)
        self._suspects.append(found)
        if self._verdict_at is None and self._plan.elastic:
            self._verdict_at = time.monotonic() + VERDICT_SECONDS

    def _judge(self) -> None:
        """Nothing else explains what ended here: the run falls by it."""
        if self._confess():
            self._peers.tell({"type": "abort"})
            self._fall()

    def _confess(self) -> bool:
        # Who has died by now died by itself, though the word of its death may be behind the one that makes us fall.
        for gone in reap():
            self._rank_ended(gone)
        for found in self._suspects:
            self._report({"type": "cause", "cause": found})
        failed = bool(self._suspects)
        self._failed |= failed
        self._suspects = []
        self._verdict_at = None
        return failed

    def _fail(self, found: Message) -> None:
        if not self._ending:
            self._confess()
            self._report({"type": "cause", "cause": found})
            self._failed = True
            self._peers.tell({"type": "abort"})
        self._fall()

    def _fall(self) -> None:
        """End what is left on this node. What ends from here on is no cause."""
        if self._ending:
            return
        self._ending = True
        self._ranks.fall()

    def _report(self, message: Message) -> None:
        try:
            self._supervisor.send(message)
        except ConnectionLost:
            os._exit(1)

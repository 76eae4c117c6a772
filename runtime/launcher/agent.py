"""One node of a run: starts its ranks when all nodes are there, watches them, and ends with the first failure.

The one rule: one loop, one thread. Whatever happens (a rank's end, a word from a peer or the supervisor, the clock)
is handled to its end before the next thing, so there is no state in between.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from typing import Any, Dict, List, Optional, Set

from .elastic import Round, can_lose, first_round, horovod_slots, plan_of, told
from .peers import BEAT_SECONDS, Peers
from .processes import Exit, reap
from .ranks import Rank, Ranks
from .report import ConnectionLost, Link, Message, cause
from .topology import Plan

START_SECONDS = 60.0
ROUND_SECONDS = 30.0
"""How long a round may take to end the ranks of the one before; killing them takes a tenth of it."""
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
        self._selector = selectors.DefaultSelector()
        self._peers = Peers(self._selector, plan.node, plan.nodes, order["token"])
        self._hub_address = (plan.addresses[0], int(order["control_port"]))
        self._ranks = Ranks(self._selector, plan, order)
        self._round = first_round(plan)
        self._rendezvous: Any = None
        self._devices = [name for name in order["environment"].get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        self._watch: Any = None
        self._watch_at = 0.0
        self._started = False
        # Between two rounds: since when, and which members have no rank left.
        self._reforming_since: Optional[float] = None
        self._fallen: Set[int] = set()
        # Ranks of a soft round that have yet to find each other.
        self._searching = False
        self._suspects: List[Message] = []
        self._verdict_at: Optional[float] = None
        self._ending = False
        self._failed = False
        self._done_told = False
        self._beat_at = 0.0

    @property
    def _hub(self) -> bool:
        return not self._plan.node

    def run(self, listener: Optional[socket.socket]) -> int:
        """Live from the first connection to the last rank's end."""
        self._selector.register(self._supervisor, selectors.EVENT_READ, self._supervisor)
        wakeup = self._wake_on_children()
        if listener is not None:
            self._peers.listen(listener)
        elif not self._hub:
            self._peers.join(self._hub_address)
        self._give_up_at = time.monotonic() + START_SECONDS
        while not self._over():
            if self._hub and not self._started and self._peers.complete:
                self._open()
            for key, _events in self._selector.select(self._patience()):
                self._handle(key.data, wakeup)
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

    def _wake_on_children(self) -> socket.socket:
        reading, writing = socket.socketpair()
        for end in (reading, writing):
            end.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._selector.register(reading, selectors.EVENT_READ, writing)
        return reading

    def _handle(self, ready: Any, wakeup: socket.socket) -> None:
        if ready is self._supervisor:
            self._from_supervisor()
        elif isinstance(ready, Rank):
            self._ranks.listen(ready)
        elif isinstance(ready, socket.socket):
            wakeup.recv(4096)
            for gone in reap():
                self._rank_ended(gone)
            # Only now, so that ranks which died together all name their own cause.
            if self._suspects and not self._plan.elastic:
                self._judge()
        else:
            self._from_peers(ready)

    def _keep_time(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            self._report({"type": "beat"})
        self._ranks.keep_time()
        if self._verdict_at is not None and now >= self._verdict_at:
            self._judge()
        if self._ending:
            return
        if not self._started and self._reforming_since is None and now >= self._give_up_at:
            missing = self._peers.missing if self._hub else [0]
            sentence = "Nodes {} did not come within a minute.".format(told(missing))
            self._fail(cause("platform_error", "nodes_not_met", self._plan.node, message=sentence))
        if self._hub and self._reforming_since is not None and now >= self._reforming_since + ROUND_SECONDS:
            slow = sorted(set(self._round.members) - self._fallen)
            sentence = "The ranks of nodes {} did not end for the next round.".format(told(slow))
            self._fail(cause("platform_error", "nodes_not_met", slow[0], message=sentence))
        if self._searching and self._rendezvous is not None and self._rendezvous.settled:
            self._peers.tell({"type": "settled", "round": self._round.number})
            self._searching = False
        if self._started and now >= self._watch_at:
            hung = self._watching().keep_time(self._round.number, self._round.members, self._ranks.living)
            if hung is not None:
                self._fail(hung)

    def _watching(self) -> Any:
        if self._watch is None:
            # Imported here for speed alone: no rank waits for it.
            from .watch import Watch  # noqa: PLC0415

            self._watch = Watch(self._plan, self._devices, report=self._report, tell=self._peers.tell)
        return self._watch

    def _over(self) -> bool:
        """Whether nothing is left to do on this node; tells the hub when its own ranks have succeeded."""
        if self._ending:
            return not self._ranks.alive
        if not self._started or self._ranks.alive or self._suspects:
            return False
        if len(self._round.members) == 1:
            return True
        if self._hub:
            return self._peers.have_finished(self._round.members)
        if not self._done_told:
            self._done_told = True
            self._peers.tell({"type": "done"})
        return True

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
            elif self._hub:
                self._from_member(node, kind, message)
            else:
                self._from_hub(kind, message)

    def _from_member(self, node: int, kind: Any, message: Message) -> None:
        if kind == "done":
            self._peers.finished(node)
            self._watching().left(node)
        elif kind == "fallen" and message.get("round") == self._round.number:
            self._member_fell(node)
        elif kind == "restart" and message.get("round") == self._round.number and self._searching:
            self._announce(self._round.again())
        elif self._watch is not None:
            self._watch.heard(node, message)

    def _from_hub(self, kind: Any, message: Message) -> None:
        if kind == "start":
            self._start(int(message["rendezvous_port"]))
        elif kind == "round":
            self._enter(Round(int(message["round"]), list(message["members"]), bool(message["soft"])))
        elif kind == "settled" and message.get("round") == self._round.number:
            self._searching = False
        elif self._watch is not None:
            self._watch.heard(0, message)

    def _lost(self, node: int, silent: bool) -> None:
        if self._ending:
            return
        going = self._started or self._reforming_since is not None
        finished = self._peers.some_finished or (self._started and not self._ranks.alive and not self._suspects)
        if self._hub and going and not finished and can_lose(self._plan, self._round, node):
            self._announce(self._round.without(self._plan, node))
            return
        how = "stopped answering" if silent else "was lost"
        sentence = "Node {} {}.".format(node, how)
        if self._plan.elastic and node:
            why = "others have finished already" if finished else "fewer than {} are left".format(self._plan.min_nodes)
            sentence = "Node {} {}, and {}.".format(node, how, why)
        self._fail(cause("node_lost", "node_silent" if silent else "node_lost", node, message=sentence))

    # Rounds

    def _open(self) -> None:
        """Every member is there, with no rank running: start."""
        port = 0
        if self._plan.framework == "horovod" and self._plan.controller == "gloo":
            if self._rendezvous is None:
                # Imported here for speed alone: only Horovod needs a server, and `http.server` is slow to import.
                from .rendezvous import RendezvousServer  # noqa: PLC0415

                self._rendezvous = RendezvousServer(self._plan.addresses[0])
            self._rendezvous.assign(horovod_slots(self._plan, self._round), anew=True)
            port = self._rendezvous.port
        self._peers.tell({"type": "start", "round": self._round.number, "rendezvous_port": port})
        self._start(port)
        if self._rendezvous is not None:
            self._rendezvous.serve()

    def _start(self, rendezvous_port: int) -> None:
        number = self._round.number
        plan = plan_of(self._plan, self._round)._replace(rendezvous_port=rendezvous_port)
        note = "A node was lost. This process starts again as rank {rank} of {size}."
        pids = self._ranks.start(plan, note if number else "")
        self._started = True
        self._watch_at = time.monotonic() + WATCH_SECONDS
        self._reforming_since = None
        self._report({"type": "running", "pids": pids, "round": number})

    def _announce(self, following: Round) -> None:
        """The hub's decision: this round is over, the following one begins."""
        number, members = following.number, following.members
        self._peers.tell({"type": "round", "round": number, "members": members, "soft": following.soft})
        self._report({"type": "members", "nodes": members, "round": number, "at": time.time()})
        self._enter(following)

    def _enter(self, following: Round) -> None:
        soft = following.soft and self._started
        self._round = following
        self._suspects = []
        self._verdict_at = None
        self._searching = soft
        if soft:
            if self._rendezvous is not None:
                self._rendezvous.assign(horovod_slots(self._plan, following))
            if self._ranks.some_ended:
                self._ask_for_restart()
            return
        self._started = False
        self._reforming_since = time.monotonic()
        self._fallen = set()
        self._ranks.fall()
        if not self._ranks.alive:
            self._all_ended()

    def _ask_for_restart(self) -> None:
        """A rank is gone that the others of a soft round would wait for."""
        if self._hub:
            self._announce(self._round.again())
        else:
            self._peers.tell({"type": "restart", "round": self._round.number})

    def _all_ended(self) -> None:
        """Between two rounds: no rank is left on this node, and nothing that one left behind."""
        self._ranks.sweep()
        if self._hub:
            self._member_fell(self._plan.node)
        else:
            self._peers.tell({"type": "fallen", "round": self._round.number})

    def _member_fell(self, node: int) -> None:
        self._fallen.add(node)
        if self._reforming_since is not None and self._fallen >= set(self._round.members):
            self._open()

    # Ending

    def _rank_ended(self, gone: Exit) -> None:
        rank = self._ranks.ended(gone)
        if rank is None:
            return
        self._report(
            {
                "type": "rank_ended",
                "rank": rank.seat,
                "exit_code": gone.exit_code,
                "signal": gone.signal,
                "aborted_late": rank.aborted_late,
                "round": self._round.number,
            }
        )
        if self._ending:
            return
        if self._reforming_since is not None:
            if not self._ranks.alive:
                self._all_ended()
        elif self._searching:
            self._ask_for_restart()
        elif not rank.succeeded:
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

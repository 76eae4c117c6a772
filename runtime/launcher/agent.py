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
from typing import Any, Dict, List, Optional

from .frameworks import rank_environment
from .peers import BEAT_SECONDS, Peers
from .processes import Exit, reap, send_signal, spawn
from .report import ConnectionLost, Link, Message
from .topology import Plan, rank_arguments

START_SECONDS = 60.0
FALL_SECONDS = 3.0
HEAD_START_SECONDS = 0.05
"""PyTorch's rank 0 serves the store that the others connect to. One that comes before it listens is refused, and tries
again only after about half a second, so the others begin a little later."""
"""How long the ranks that are left get between SIGTERM and SIGKILL when one has failed."""
_TICK_SECONDS = 0.5
_LONGEST_NOTE = 4096


class Rank:
    """One process of the customer's code, from its start to its end."""

    def __init__(self, number: int, pid: int, notes: int) -> None:
        self.number = number
        self.pid = pid
        self.notes = notes
        self.exit: Optional[Exit] = None
        self.finished = False
        self.raised_at: Optional[float] = None
        self._noted = b""

    def read_notes(self) -> bool:
        """Take what the rank's interpreter has said; False once it can say no more."""
        try:
            data = os.read(self.notes, _LONGEST_NOTE)
        except BlockingIOError:
            return True
        if not data:
            return False
        *lines, rest = (self._noted + data).split(b"\n")
        self._noted = rest[-_LONGEST_NOTE:]
        for line in lines:
            word, _, moment = line.partition(b" ")
            if word == b"finished":
                self.finished = True
            elif word == b"raised" and self.raised_at is None:
                self.raised_at = _moment(moment)
        return True


def _moment(text: bytes) -> float:
    """The time that a rank gives for its own failure; the code could give any, so only a recent one is believed."""
    now = time.time()
    try:
        told = float(text)
    except ValueError:
        return now
    return told if now - 60 < told < now else now


class Agent:
    """The node's launcher. `run` returns the exit code of the node: 0 when every rank succeeded."""

    def __init__(self, plan: Plan, order: Dict[str, Any], supervisor: Link) -> None:
        self._plan = plan
        self._outputs: List[int] = order["outputs"]
        self._python: str = order["python"]
        self._environment: Dict[str, str] = order["environment"]
        self._flag: Optional[str] = order["flag"]
        self._folder: str = order["folder"]
        self._supervisor = supervisor
        self._selector = selectors.DefaultSelector()
        self._peers = Peers(self._selector, plan.node, plan.nodes, order["token"])
        self._control_port: int = order["control_port"]
        self._ranks: Dict[int, Rank] = {}
        self._started = False
        self._ending = False
        self._failed = False
        self._kill_at: Optional[float] = None
        self._done_told = False
        self._beat_at = 0.0

    def run(self, listener: Optional[socket.socket]) -> int:
        """Live from the first connection to the last rank's end."""
        self._selector.register(self._supervisor, selectors.EVENT_READ, self._supervisor)
        wakeup = self._wake_on_children()
        if listener is not None:
            self._peers.listen(listener)
        give_up_at = time.monotonic() + START_SECONDS
        if self._plan.node and self._plan.nodes > 1:
            self._peers.connect((self._plan.addresses[0], self._control_port), START_SECONDS)
        while not self._over():
            if not self._plan.node and not self._started and self._peers.complete:
                self._start_all()
            for key, _events in self._selector.select(self._patience()):
                self._handle(key.data, wakeup)
            self._from_peers(None)
            now = time.monotonic()
            if now >= self._beat_at:
                self._beat_at = now + BEAT_SECONDS
                self._report({"type": "beat"})
            if self._kill_at is not None and now >= self._kill_at:
                self._signal_ranks(signal.SIGKILL)
                self._kill_at = None
            if not self._started and not self._ending and now >= give_up_at:
                self._fail_node("platform_error", "The nodes did not find each other within a minute.", self._plan.node)
        self._report({"type": "ended"})
        return 1 if self._failed or self._ending else 0

    def _patience(self) -> float:
        if self._kill_at is None:
            return _TICK_SECONDS
        return max(0.0, min(_TICK_SECONDS, self._kill_at - time.monotonic()))

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
            self._listen_to(ready)
        elif isinstance(ready, socket.socket):
            wakeup.recv(4096)
            for gone in reap():
                self._rank_ended(gone)
            # Only now, so that ranks which died together all name their own cause.
            if self._failed and not self._ending:
                self._peers.tell({"type": "abort"})
                self._fall()
        else:
            self._from_peers(ready)

    def _over(self) -> bool:
        """Whether nothing is left to do on this node; tells the hub when its own ranks have succeeded."""
        if not self._started:
            return self._ending
        if any(rank.exit is None for rank in self._ranks.values()):
            return False
        if self._ending or self._plan.nodes == 1:
            return True
        if self._plan.node:
            if not self._done_told:
                self._done_told = True
                self._peers.tell({"type": "done"})
            return True
        return self._peers.all_finished

    # What others say

    def _from_supervisor(self) -> None:
        try:
            messages = self._supervisor.receive()
        except ConnectionLost:
            # Nobody enforces the limits of this run any more; with this process the whole sandbox goes.
            os._exit(1)
        for message in messages:
            if message.get("type") == "end":
                self._ending = True
                self._signal_ranks(signal.SIGTERM)

    def _from_peers(self, ready: Any) -> None:
        for node, message in self._peers.events(ready):
            kind = message.get("type")
            if kind == "start" and not self._plan.node:
                continue
            if kind == "start":
                self._start(int(message["rendezvous_port"]))
            elif kind == "done":
                self._peers.finished(node)
            elif kind == "abort" and not self._ending:
                self._peers.tell({"type": "abort"})
                self._fall()
            elif kind == "lost":
                self._fail_node("node_lost", "Node {} was lost.".format(node), node)

    # Starting

    def _start_all(self) -> None:
        port = 0
        serve = None
        if self._plan.framework == "horovod":
            # Imported here for speed alone: only Horovod needs a server, and `http.server` is slow to import.
            from .rendezvous import RendezvousServer  # noqa: PLC0415

            server = RendezvousServer(self._plan.addresses[0])
            port, serve = server.port, server.serve
        self._peers.tell({"type": "start", "rendezvous_port": port})
        self._start(port)
        if serve is not None:
            serve()

    def _start(self, rendezvous_port: int) -> None:
        plan = self._plan._replace(rendezvous_port=rendezvous_port)
        wrapper = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank.py")
        for local_rank, output in enumerate(self._outputs):
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            environment = dict(self._environment)
            environment.update(rank_environment(plan, local_rank))
            arguments = [self._python, "-u", wrapper, str(writing), plan.script]
            arguments += rank_arguments(plan, local_rank, self._flag)
            pid = spawn(
                arguments,
                environment,
                output=output,
                inherit=[writing],
                folder=self._folder,
                new_session=True,
                delay_seconds=HEAD_START_SECONDS if plan.framework == "pytorch" and plan.rank(local_rank) else 0.0,
            )
            os.close(writing)
            os.close(output)
            rank = Rank(plan.rank(local_rank), pid, reading)
            self._ranks[pid] = rank
            self._selector.register(reading, selectors.EVENT_READ, rank)
        self._started = True
        self._report({"type": "running", "pids": {str(pid): rank.number for pid, rank in self._ranks.items()}})

    # Ending

    def _listen_to(self, rank: Rank) -> None:
        if not rank.read_notes():
            self._selector.unregister(rank.notes)
            os.close(rank.notes)
            rank.notes = -1

    def _rank_ended(self, gone: Exit) -> None:
        rank = self._ranks.get(gone.pid)
        if rank is None:
            return  # A process that the code left behind; it was adopted by this one.
        rank.exit = gone
        if rank.notes >= 0:
            self._listen_to(rank)
        aborted_late = gone.signal == "SIGABRT" and rank.finished
        self._report(
            {
                "type": "rank_ended",
                "rank": rank.number,
                "exit_code": gone.exit_code,
                "signal": gone.signal,
                "aborted_late": aborted_late,
            }
        )
        if gone.exit_code == 0 or aborted_late or self._ending:
            return
        cause = {
            "kind": "code_failed",
            "at": time.time() if gone.signal or rank.raised_at is None else rank.raised_at,
            "node": self._plan.node,
            "rank": rank.number,
            "exit_code": gone.exit_code,
            "signal": gone.signal,
        }
        self._report({"type": "cause", "cause": cause})
        self._failed = True

    def _fail_node(self, kind: str, message: str, node: int) -> None:
        if not self._ending:
            cause = {"kind": kind, "at": time.time(), "node": node, "message": message}
            self._report({"type": "cause", "cause": cause})
            self._failed = True
            self._peers.tell({"type": "abort"})
        self._fall()

    def _fall(self) -> None:
        """End what is left on this node: SIGTERM now, SIGKILL a little later. What ends from here on is no cause."""
        if self._ending:
            return
        self._ending = True
        self._signal_ranks(signal.SIGTERM)
        self._kill_at = time.monotonic() + FALL_SECONDS

    def _signal_ranks(self, number: int) -> None:
        for rank in self._ranks.values():
            if rank.exit is None:
                send_signal(rank.pid, number)

    def _report(self, message: Message) -> None:
        try:
            self._supervisor.send(message)
        except ConnectionLost:
            os._exit(1)

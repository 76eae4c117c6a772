"""The rounds of a run on one node: when ranks start, and when they restart because a node was lost.

A round after the first is hard or soft. The ranks of a hard round are new: they start once the ranks of the previous
round have ended on all participating nodes. In a soft round (Horovod) the ranks of the previous round stay alive and
reconnect. If one of them ends meanwhile, the hub announces another round, a hard one.

The hub, node 0's launcher, decides when a round begins and which nodes take part. `elastic` describes what a round
changes. A run that is not elastic has one round.
"""

from __future__ import annotations

import time
from typing import Any, Callable, List, Optional, Set

from ..elastic import Round, can_lose, first_round, horovod_places, node_list, round_plan
from ..protocol import Message, new_cause
from ..topology import Plan
from ..worker_group import Rank, WorkerGroup
from .peers import Peers

END_SECONDS = 30.0
"""How long ending the ranks of the previous round may take on all nodes. The ranks are killed after a tenth of this
(TERMINATE_SECONDS); the rest is for slow nodes."""
_RESTART_ANNOUNCEMENT = "A node was lost. This process starts again as rank {rank} of {size}."


class Rounds:
    """This node's state in the rounds of its run.

    `report` sends a message to the supervisor. `on_round_began` is called when a round after the first begins.
    `started_at` is when the ranks of this round were started (monotonic; None: not yet). `mpi` is the `mpi.Mpi` that
    starts the ranks; None if this launcher starts them. `Agent` sets `mpi` later, because `Mpi` calls
    `report_running` and `note_all_started`. `awaits_restart` is whether this node has asked the hub for another round.
    It must not end before the answer.
    """

    def __init__(
        self,
        plan: Plan,
        peers: Peers,
        worker_group: WorkerGroup,
        report: Callable[[Message], None],
        on_round_began: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._peers = peers
        self._worker_group = worker_group
        self._report = report
        self._on_round_began = on_round_began
        self._horovod_store: Any = None  # on the hub, with Horovod: a `horovod_store.RendezvousServer`
        self.mpi: Any = None
        self._has_started = False  # ranks were started, in round 0
        self._round = first_round(plan)
        # When the ranks of the previous round were asked to end (monotonic); None while a round runs.
        self._ending_since: Optional[float] = None
        self._ended_members: Set[int] = set()  # on the hub: the nodes on which the ranks of that round have ended
        self._is_reconnecting = False  # in a soft round, until all ranks have reconnected
        self.started_at: Optional[float] = None
        self.awaits_restart = False

    @property
    def number(self) -> int:
        """The round's number; 0 at first."""
        return self._round.number

    @property
    def members(self) -> List[int]:
        """The participating nodes, by their numbers at submission."""
        return self._round.members

    @property
    def _is_hub(self) -> bool:
        return not self._plan.node

    @property
    def has_started(self) -> bool:
        """Whether any round has started ranks."""
        return self._has_started

    # Events

    def begin_round(self) -> None:
        """On the hub, start the ranks on every node. Call this only when all nodes have met and no rank runs."""
        addresses = self._peers.addresses(self._plan.addresses)
        self._plan = self._plan._replace(addresses=addresses)
        port = 0  # of Horovod's store; 0: there is none
        if self._plan.framework == "horovod" and self._plan.controller == "gloo":
            if self._horovod_store is None:
                # Imported here because only Horovod needs a server, and `http.server` is slow to import.
                from ..horovod_store import RendezvousServer  # noqa: PLC0415

                self._horovod_store = RendezvousServer(self._plan.addresses[0])
            self._horovod_store.assign(horovod_places(self._plan, self._round), new_workers=True)
            port = self._horovod_store.port
        self._peers.send({"type": "start", "round": self.number, "rendezvous_port": port, "addresses": addresses})
        self._start(port)
        if self._horovod_store is not None:
            # This starts a thread, so it comes after the first ranks are forked. Until then, requests wait.
            self._horovod_store.serve()

    def handle_message(self, node: int, message: Message) -> bool:
        """Handle another launcher's message, if it is about rounds or MPI; return whether it was."""
        kind = message.get("type")
        if self.mpi is not None and self.mpi.handle_message(message):
            return True
        if kind == "start" and not self._is_hub:
            self._plan = self._plan._replace(addresses=list(message["addresses"]))
            self._start(int(message["rendezvous_port"]))
        elif kind == "round" and not self._is_hub:
            self._enter_round(Round(int(message["round"]), list(message["members"]), bool(message["soft"])))
        elif kind == "reconnected" and message.get("round") == self.number:
            self._is_reconnecting = False
        elif kind == "ranks_ended" and message.get("round") == self.number:
            self._note_member_ended(node)
        elif kind == "restart_round" and message.get("round") == self.number:
            # Even if all ranks have reconnected by now: the node that sent this did not know, and reports no failure.
            # But a node that has finished would join no other round, and only ranks of a soft round reconnect.
            if self._round.soft and not self._peers.any_finished:
                self._announce_round(self._round.restarted())
            else:
                self._peers.send({"type": "restart_refused", "round": self.number})
        elif kind == "restart_refused" and message.get("round") == self.number:
            self.awaits_restart = False
        else:
            # Messages about an earlier round are ignored, but they are about rounds, so the result is True.
            return kind in ("start", "round", "reconnected", "ranks_ended", "restart_round", "restart_refused")
        return True

    def continue_without(self, node: int) -> Optional[str]:
        """Continue the run without a node and return None. If it cannot continue, return why not.

        The reason continues the sentence "Node 1 was lost"; "" if no reason is needed.
        """
        # Only the hub decides. To continue, a run must be elastic, keep node 0, and have started its ranks.
        if not self._is_hub or not self._plan.elastic or not node or not self._has_started:
            return ""
        # A node whose ranks have succeeded has nothing left to do in another round.
        if self._peers.any_finished or self._worker_group.succeeded:
            return ", and others have finished already"
        if not can_lose(self._plan, self._round, node):
            return ", and fewer than {} are left".format(self._plan.min_nodes)
        self._announce_round(self._round.without(self._plan, node))
        return None

    def note_script_failed(self) -> None:
        """Handle a script's failure. The rank's process may end much later, and the others must not wait for that."""
        if self._is_reconnecting:
            self._request_restart()

    def note_rank_ended(self, rank: Rank) -> bool:
        """Handle a rank's end; return whether the loss of a node explains it."""
        if self.mpi is not None:
            self.mpi.end_stub(rank)  # the process that mpirun started in place of the rank
        if self._ending_since is not None:
            if not self._worker_group.live_ranks:
                self._note_all_ended()
            return True
        if self._is_reconnecting:
            self._request_restart()
            return True
        return False

    def handle_timers(self, now: float) -> Optional[Message]:
        """Do the work that is due; return a cause if the next round cannot begin, else None."""
        if self._is_reconnecting and self._horovod_store is not None and self._horovod_store.have_all_met:
            self._peers.send({"type": "reconnected", "round": self.number})
            self._is_reconnecting = False
        mpi_cause: Optional[Message] = None if self.mpi is None else self.mpi.handle_timers(now)
        if mpi_cause is not None:
            return mpi_cause
        if not self._is_hub or self._ending_since is None or now < self._ending_since + END_SECONDS:
            return None
        slow_nodes = sorted(set(self.members) - self._ended_members)
        text = "The ranks of nodes {} did not end for the next round.".format(node_list(slow_nodes))
        # The same code as at the start: the nodes do not meet, here for the next round.
        return new_cause(kind="platform_error", code="nodes_not_met", node=slow_nodes[0], message=text)

    # From one round to the next

    def _start(self, rendezvous_port: int) -> None:
        """Start the ranks of this round on this node, or have mpirun start them.

        `rendezvous_port` is the port of Horovod's store; 0: there is none.
        """
        plan = round_plan(self._plan, self._round)._replace(rendezvous_port=rendezvous_port)
        if not self._has_started:
            # Sent before any customer code runs, which could keep this process from sending it.
            self._report({"type": "starting"})
        self._has_started = True
        self._ending_since = None
        if self.mpi is not None:
            self.mpi.begin_round(plan)
        else:
            self._worker_group.start(plan, _RESTART_ANNOUNCEMENT if self.number else "")
            self.note_all_started()

    def note_all_started(self) -> None:
        """Note that every rank of this node runs."""
        self.started_at = time.monotonic()
        self.report_running()

    def report_running(self) -> None:
        """Report which ranks of this node run. The first report starts the time that is paid.

        With MPI, it is sent before all ranks run: mpirun starts them one by one, and code of the first can keep it from
        starting the others.
        """
        self._report({"type": "running", "pids": self._worker_group.pids, "round": self.number})

    def _announce_round(self, next_round: Round) -> None:
        """On the hub, end this round and begin the next one."""
        number, members = next_round.number, next_round.members
        self._peers.send({"type": "round", "round": number, "members": members, "soft": next_round.soft})
        self._report({"type": "members", "nodes": members, "round": number, "at": time.time()})
        self._enter_round(next_round)

    def _enter_round(self, next_round: Round) -> None:
        """Begin the next round: a soft one at once, a hard one once the ranks of this round have ended."""
        self._round = next_round
        self.awaits_restart = False
        # If no ranks run, none can reconnect, so the round is a hard one.
        self._is_reconnecting = next_round.soft and self.started_at is not None
        self._on_round_began()
        if self._is_reconnecting:
            if self._horovod_store is not None:
                self._horovod_store.assign(horovod_places(self._plan, next_round))
            if self._worker_group.has_ended_ranks:
                self._request_restart()  # ended ranks cannot reconnect
            return
        self.started_at = None
        self._ending_since = time.monotonic()
        self._ended_members = set()
        self._worker_group.terminate()
        if not self._worker_group.live_ranks:
            self._note_all_ended()

    def _request_restart(self) -> None:
        """Replace a soft round by a hard one, since a rank has ended and the others would wait for it."""
        if self._is_hub:
            self._announce_round(self._round.restarted())
        else:
            self.awaits_restart = True
            self._peers.send({"type": "restart_round", "round": self.number})

    def _note_all_ended(self) -> None:
        """Between two rounds, once all ranks of this node have ended: kill their child processes and notify the hub."""
        self._worker_group.kill_leftovers()
        if self._is_hub:
            self._note_member_ended(0)
        else:
            self._peers.send({"type": "ranks_ended", "round": self.number})

    def _note_member_ended(self, node: int) -> None:
        self._ended_members.add(node)
        if self._ending_since is not None and self._ended_members >= set(self.members):
            self.begin_round()

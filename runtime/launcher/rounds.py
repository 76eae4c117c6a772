"""The rounds of a run, as one node lives through them: when ranks start, and start again because a node was lost.

The one rule: ranks of a round start only when no rank of the round before is left on any node that takes part. Node 0
says when a round begins and who is in it; what a round changes is in `elastic`. A run that is not elastic has one.
"""

from __future__ import annotations

import time

from .elastic import Round, can_lose, first_round, horovod_slots, plan_of, told
from .peers import Peers
from .ranks import Rank, Ranks
from .report import Message, cause
from .topology import Plan

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Callable, List, Optional, Set

ROUND_SECONDS = 30.0
"""How long a round may take to end the ranks of the one before; killing them takes a tenth of it."""
_NOTE = "A node was lost. This process starts again as rank {rank} of {size}."


class Rounds:
    """Where this node is in its run's rounds. `began` is called for every round after the first, when it begins.

    `started_at` is when the ranks of this round were started (monotonic); None while they are not. `mpi` starts them
    where MPI does, else it is None.
    """

    def __init__(
        self, plan: Plan, peers: Peers, ranks: Ranks, report: Callable[[Message], None], began: Callable[[], None]
    ) -> None:
        self._plan = plan
        self._peers = peers
        self._ranks = ranks
        self._report = report
        self._began = began
        self._rendezvous: Any = None
        self.mpi: Any = None
        self._opened = False
        self._round = first_round(plan)
        self._between_since: Optional[float] = None
        self._fallen: Set[int] = set()
        self._searching = False
        self.started_at: Optional[float] = None

    @property
    def number(self) -> int:
        """The round's number; 0 at first."""
        return self._round.number

    @property
    def members(self) -> List[int]:
        """The nodes that take part, by their numbers at submission."""
        return self._round.members

    @property
    def waiting(self) -> bool:
        """Whether nothing has been started yet, in any round."""
        return not self._opened

    # What happens

    def open(self) -> None:
        """Of the hub, when every member is there and no rank runs: start."""
        port = 0
        if self._plan.framework == "horovod" and self._plan.controller == "gloo":
            if self._rendezvous is None:
                # Imported here for speed alone: only Horovod needs a server, and `http.server` is slow to import.
                from .rendezvous import RendezvousServer  # noqa: PLC0415

                self._rendezvous = RendezvousServer(self._plan.addresses[0])
            self._rendezvous.assign(horovod_slots(self._plan, self._round), anew=True)
            port = self._rendezvous.port
        self._peers.tell({"type": "start", "round": self.number, "rendezvous_port": port})
        self._start(port)
        if self._rendezvous is not None:
            self._rendezvous.serve()

    def heard(self, node: int, message: Message) -> bool:
        """Take what another launcher said, if it is about rounds."""
        kind = message.get("type")
        if self.mpi is not None and self.mpi.heard(message):
            return True
        if kind == "start" and self._plan.node:
            self._start(int(message["rendezvous_port"]))
        elif kind == "round" and self._plan.node:
            self._enter(Round(int(message["round"]), list(message["members"]), bool(message["soft"])))
        elif kind == "settled" and message.get("round") == self.number:
            self._searching = False
        elif kind == "fallen" and message.get("round") == self.number:
            self._member_fell(node)
        elif kind == "restart" and message.get("round") == self.number and self._searching:
            self._announce(self._round.again())
        else:
            return kind in ("start", "round", "settled", "fallen", "restart")
        return True

    def lose(self, node: int) -> Optional[str]:
        """Go on without a node, if the run can; else why not, as the end of a sentence (empty where no run could)."""
        if self._plan.node or not self._plan.elastic or not node or self.waiting:
            return ""
        if self._peers.some_finished or self._ranks.succeeded:
            return ", and others have finished already"
        if not can_lose(self._plan, self._round, node):
            return ", and fewer than {} are left".format(self._plan.min_nodes)
        self._announce(self._round.without(self._plan, node))
        return None

    def rank_raised(self) -> None:
        """Take a script's failure, long before its process may have ended."""
        if self._searching:
            self._ask_for_restart()

    def rank_ended(self, rank: Rank) -> bool:
        """Take a rank's end, if it follows from the loss of a node."""
        if self.mpi is not None:
            self.mpi.rank_ended(rank)
        if self._between_since is not None:
            if not self._ranks.alive:
                self._all_ended()
            return True
        if self._searching:
            self._ask_for_restart()
            return True
        return False

    def keep_time(self, now: float) -> Optional[Message]:
        """What follows from the time that has passed; a cause where a round does not come about."""
        if self._searching and self._rendezvous is not None and self._rendezvous.settled:
            self._peers.tell({"type": "settled", "round": self.number})
            self._searching = False
        missing: Optional[Message] = None if self.mpi is None else self.mpi.keep_time(now)
        if missing is not None:
            return missing
        if self._plan.node or self._between_since is None or now < self._between_since + ROUND_SECONDS:
            return None
        slow = sorted(set(self.members) - self._fallen)
        sentence = "The ranks of nodes {} did not end for the next round.".format(told(slow))
        return cause("platform_error", "nodes_not_met", slow[0], message=sentence)

    # From one round to the next

    def _start(self, rendezvous_port: int) -> None:
        plan = plan_of(self._plan, self._round)._replace(rendezvous_port=rendezvous_port)
        self._opened = True
        self._between_since = None
        if self.mpi is not None:
            self.mpi.open(plan)
        else:
            self._ranks.start(plan, _NOTE if self.number else "")
            self.all_started()

    def all_started(self) -> None:
        """Every rank of this node runs."""
        self.started_at = time.monotonic()
        self._report({"type": "running", "pids": self._ranks.pids, "round": self.number})

    def _announce(self, following: Round) -> None:
        """The hub's decision: this round is over, the following one begins."""
        number, members = following.number, following.members
        self._peers.tell({"type": "round", "round": number, "members": members, "soft": following.soft})
        self._report({"type": "members", "nodes": members, "round": number, "at": time.time()})
        self._enter(following)

    def _enter(self, following: Round) -> None:
        self._round = following
        self._searching = following.soft and self.started_at is not None
        self._began()
        if self._searching:
            if self._rendezvous is not None:
                self._rendezvous.assign(horovod_slots(self._plan, following))
            if self._ranks.some_ended:
                self._ask_for_restart()
            return
        self.started_at = None
        self._between_since = time.monotonic()
        self._fallen = set()
        self._ranks.fall()
        if not self._ranks.alive:
            self._all_ended()

    def _ask_for_restart(self) -> None:
        """A rank is gone that the others of a soft round would wait for."""
        if self._plan.node:
            self._peers.tell({"type": "restart", "round": self.number})
        else:
            self._announce(self._round.again())

    def _all_ended(self) -> None:
        """Between two rounds: no rank is left on this node, and nothing that one left behind."""
        self._ranks.sweep()
        if self._plan.node:
            self._peers.tell({"type": "fallen", "round": self.number})
        else:
            self._member_fell(0)

    def _member_fell(self, node: int) -> None:
        self._fallen.add(node)
        if self._between_since is not None and self._fallen >= set(self.members):
            self.open()

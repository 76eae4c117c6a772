"""Elastic runs: who takes part in which round, and what a round changes in the plan. PURE.

The one rule: node 0 decides. A *round* is a stretch of the run with one set of nodes; the first is 0 and has them all.
Nodes go by their number at submission everywhere but in the plan of a round, where numbers are dense again.
"""

from __future__ import annotations

from .topology import Plan

TYPE_CHECKING = False  # as `typing` has it, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Dict, List, NamedTuple, Sequence
else:
    from .plain import NamedTuple


class Round(NamedTuple):
    """Who takes part, in order; a soft round leaves the ranks alive, and they find each other again (Horovod)."""

    number: int
    members: List[int]
    soft: bool = False

    def without(self, plan: Plan, node: int) -> "Round":
        """The round that follows when this node is lost."""
        return Round(self.number + 1, [member for member in self.members if member != node], reforms(plan))

    def again(self) -> "Round":
        """The round that follows when ranks could not find each other softly: the same nodes, from the start."""
        return Round(self.number + 1, self.members)


def first_round(plan: Plan) -> Round:
    """Every node."""
    return Round(0, list(range(plan.nodes)))


def reforms(plan: Plan) -> bool:
    """Whether ranks of such a run can find each other anew while they live."""
    return plan.elastic and plan.framework == "horovod" and plan.controller == "gloo"


def can_lose(plan: Plan, current: Round, node: int) -> bool:
    """Whether the run goes on without this node. Node 0 holds it together and cannot be spared."""
    left = len(current.members) - (node in current.members)
    return plan.elastic and bool(node) and left >= plan.min_nodes


def plan_of(plan: Plan, current: Round) -> Plan:
    """What the launcher's plan is in this round; `plan` is the one of the submission."""
    if not current.number:
        return plan._replace(homes=current.members)
    per_round = max(1, len(plan.worker_ports))
    spare = [plan.spare_ports[at : at + per_round] for at in range(0, len(plan.spare_ports), per_round)]
    ports = list(spare[(current.number - 1) % len(spare)]) if spare else [plan.master_port]
    return plan._replace(
        node=current.members.index(plan.node),
        nodes=len(current.members),
        addresses=[plan.addresses[member] for member in current.members],
        master_port=ports[0],
        worker_ports=ports[: len(current.members) * plan.workers] if plan.worker_ports else [],
        restart_count=plan.restart_count + current.number,
        home=plan.node,
        homes=current.members,
    )


def horovod_slots(plan: Plan, current: Round) -> Dict[str, str]:
    """What each Horovod worker is told when it asks for its new place: {"<host>:<local rank>": "rank,size,..."}."""
    size = len(current.members) * plan.workers
    slots = {}
    for cross_rank, member in enumerate(current.members):
        for local_rank in range(plan.workers):
            place = (
                cross_rank * plan.workers + local_rank,
                size,
                local_rank,
                plan.workers,
                cross_rank,
                len(current.members),
            )
            slots["{}:{}".format(plan.host(member), local_rank)] = ",".join(map(str, place))
    return slots


def told(nodes: Sequence[int]) -> str:
    """Nodes by number, for a sentence."""
    return ", ".join(map(str, nodes))

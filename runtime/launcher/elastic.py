"""The rounds of an elastic run: which nodes take part, and how a round changes the plan. Pure.

A *round* is a period of the run with one set of nodes. A new round begins when nodes are lost, and when ranks must be
started again because they could not reconnect. Round 0 has all nodes. Node 0 decides on rounds. Nodes are
identified by their number at submission, except in a round's plan, where the numbers are consecutive.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Sequence

from .topology import Plan


class Round(NamedTuple):
    """One round and its nodes, `members`. In a `soft` round, ranks stay alive and reconnect by themselves (Horovod)."""

    number: int
    members: List[int]
    soft: bool = False

    def without(self, plan: Plan, node: int) -> "Round":
        """Return the round that follows the loss of this node."""
        remaining_members = [member for member in self.members if member != node]
        return Round(self.number + 1, remaining_members, soft=can_reconnect(plan))

    def restarted(self) -> "Round":
        """Return the round that follows if ranks could not reconnect: the same nodes, with new ranks."""
        return Round(self.number + 1, self.members)


def first_round(plan: Plan) -> Round:
    """Return round 0, with every node."""
    return Round(0, list(range(plan.nodes)))


def can_reconnect(plan: Plan) -> bool:
    """Whether the ranks of this run can reconnect without being restarted."""
    return plan.elastic and plan.framework == "horovod" and plan.controller == "gloo"


def can_lose(plan: Plan, current_round: Round, node: int) -> bool:
    """Whether the run can go on without this node. It can never go on without node 0, which coordinates it."""
    remaining_members = [member for member in current_round.members if member != node]
    return plan.elastic and node != 0 and len(remaining_members) >= plan.min_nodes


def round_plan(plan: Plan, current_round: Round) -> Plan:
    """Return the launcher's plan in this round; `plan` is the one at submission."""
    members = current_round.members
    if not current_round.number:
        return plan._replace(original_nodes=members)
    ports_per_round = max(1, len(plan.worker_ports))  # one for `master_port` if workers have no ports
    ports_by_round = [
        plan.spare_ports[start : start + ports_per_round] for start in range(0, len(plan.spare_ports), ports_per_round)
    ]
    # There is one set of spare ports for each node that the run can lose. A lost node uses one set. A soft round that
    # must be restarted uses one more, so there may be more rounds than sets; then begin again with the first.
    ports = list(ports_by_round[(current_round.number - 1) % len(ports_by_round)])
    return plan._replace(
        node=members.index(plan.node),
        nodes=len(members),
        addresses=[plan.addresses[member] for member in members],
        master_port=ports[0],  # also the first worker's port, if workers have ports: TensorFlow's chief listens there
        worker_ports=ports[: len(members) * plan.workers] if plan.worker_ports else [],
        restart_count=plan.restart_count + current_round.number,
        original_node=plan.node,
        original_nodes=members,
    )


def horovod_places(plan: Plan, current_round: Round) -> Dict[str, str]:
    """Return each Horovod worker's place in the round.

    The result is {"<host>:<local rank>": "rank,size,local rank,local size,cross rank,cross size"}. Horovod calls the
    node's number in the round cross rank, and the number of nodes cross size.
    """
    members = current_round.members
    size = len(members) * plan.workers
    places = {}
    for cross_rank, member in enumerate(members):
        for local_rank in range(plan.workers):
            fields = (
                cross_rank * plan.workers + local_rank,
                size,
                local_rank,
                plan.workers,
                cross_rank,
                len(members),
            )
            places["{}:{}".format(plan.host(member), local_rank)] = ",".join(map(str, fields))
    return places


def node_list(nodes: Sequence[int]) -> str:
    """Return the numbers of nodes as text, separated by commas."""
    return ", ".join(map(str, nodes))

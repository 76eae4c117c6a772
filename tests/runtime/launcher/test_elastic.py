"""Rounds of elastic runs: which nodes a run can lose, and what its ranks get in the next round."""

from types import SimpleNamespace

import pytest

from runtime.launcher.elastic import Round, can_lose, can_reconnect, first_round, horovod_places, round_plan
from runtime.launcher.frameworks import rank_environment
from runtime.launcher.rendezvous.rounds import Rounds
from tests.runtime.launcher.test_topology import PLAN

ELASTIC = PLAN._replace(
    node=2, nodes=3, min_nodes=2, addresses=["10.0.0.1", "10.0.0.2", "10.0.0.3"], spare_ports=[29501, 29502]
)


def test_tensorflow_moves_to_other_ports_together():
    plan = ELASTIC._replace(
        framework="tensorflow", worker_ports=[1, 2, 3, 4, 5, 6], spare_ports=[11, 12, 13, 14, 15, 16]
    )
    # Round 1 has the first set of spare ports, for two nodes of two processes each.
    assert round_plan(plan, Round(1, [0, 2])).worker_ports == [11, 12, 13, 14]


@pytest.mark.parametrize(
    ("plan", "members", "node", "expected"),
    [
        (ELASTIC, [0, 1, 2], 1, True),
        (ELASTIC, [0, 1, 2], 0, False),  # node 0 coordinates the run
        (ELASTIC, [0, 2], 2, False),  # fewer than two nodes would remain
        (ELASTIC, [0, 2], 1, True),  # it is lost already
        (ELASTIC._replace(min_nodes=0), [0, 1, 2], 1, False),  # not elastic
        (ELASTIC._replace(min_nodes=3), [0, 1, 2], 1, False),  # fewer than three would remain
    ],
)
def test_an_elastic_run_can_lose_nodes_down_to_its_minimum_but_never_node_0(plan, members, node, expected):
    assert can_lose(plan, Round(1, members), node) is expected


def test_only_horovod_over_gloo_reconnects():
    """Its ranks live on in the next round, which is `soft`. If they fail to reconnect, a hard round restarts them."""
    assert not can_reconnect(ELASTIC)
    assert can_reconnect(ELASTIC._replace(framework="horovod"))
    assert not can_reconnect(ELASTIC._replace(framework="horovod", controller="mpi"))
    assert not can_reconnect(PLAN._replace(framework="horovod")), "the run is not elastic"
    after_loss = first_round(ELASTIC).without(ELASTIC._replace(framework="horovod"), 1)
    assert after_loss == Round(1, [0, 2], soft=True)
    assert after_loss.restarted() == Round(2, [0, 2])


def test_a_rank_that_ends_before_its_node_knows_that_all_have_reconnected_restarts_the_run():
    """Its node reports no failure, but asks the hub for a hard round. So the hub must not ignore the request."""
    group = SimpleNamespace(
        live_ranks=["a rank"], has_ended_ranks=False, succeeded=False, pids={}, terminate=lambda: None
    )
    sent = []
    peers = SimpleNamespace(send=sent.append, any_finished=False)
    rounds = Rounds(ELASTIC._replace(node=0, framework="horovod"), peers, group, lambda _report: None, lambda: None)
    rounds._has_started = True
    rounds._horovod_store = SimpleNamespace(assign=lambda _places: None, have_all_met=True)
    rounds.note_all_started()
    rounds.handle_message(2, {"type": "restart_round", "round": 0})
    assert rounds.number == 0, "no rank reconnects in round 0"
    rounds.continue_without(1)
    rounds.handle_timers(now=0.0)  # the hub knows that all have reconnected
    peers.any_finished = True
    rounds.handle_message(2, {"type": "restart_round", "round": 1})
    assert rounds.number == 1, "a node that has finished joins no other round"
    assert sent[-1] == {"type": "restart_refused", "round": 1}
    peers.any_finished = False
    rounds.handle_message(2, {"type": "restart_round", "round": 1})
    assert (rounds.number, rounds.members) == (2, [0, 2])


def test_horovod_workers_keep_their_host_and_get_new_ranks():
    plan = ELASTIC._replace(framework="horovod")
    soft_round = Round(1, [0, 2], soft=True)
    # Rank and size: of all workers, on the host, and of the workers with the same local rank.
    assert horovod_places(plan, soft_round) == {
        "job-1-1-0:0": "0,4,0,2,0,2",
        "job-1-1-0:1": "1,4,1,2,0,2",
        "job-1-1-2:0": "2,4,0,2,1,2",
        "job-1-1-2:1": "3,4,1,2,1,2",
    }
    # The same after a hard round, because a soft one may follow, in which workers are known by their hosts.
    hard_plan = round_plan(plan, soft_round.restarted())
    assert rank_environment(hard_plan, 0)["HOROVOD_HOSTNAME"] == "job-1-1-2"

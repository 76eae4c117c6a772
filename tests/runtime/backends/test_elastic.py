"""Runs that go on without a node: on real processes, with the node's supervisor killed or its launcher stopped."""

import json
import os
import re
import shutil
import signal

import pytest

from runtime.specs import FailureCode, Framework, Outcome, Resources
from tests.console.processes import children
from tests.runtime.backends import hostile
from tests.runtime.conftest import LocalHarness
from tests.runtime.images_of_ours import EXAMPLES, use_image

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")

TRAINS = """
    import json, os, pathlib, signal, socket, sys, time
    variables = {name: os.environ[name] for name in (
        "RANK", "WORLD_SIZE", "NODE_RANK", "RESTART_COUNT", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS")}
    print("variables", json.dumps(variables), flush=True)
    checkpoint = pathlib.Path(os.environ["CHECKPOINT_DIR"]) / "epoch"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    epoch = int(checkpoint.read_text()) if checkpoint.exists() else 0
    if rank == 0:
        # As PyTorch's store: the others connect to rank 0, at this round's own port.
        server = socket.create_server(address)
        peers = [server.accept()[0] for _ in range(size - 1)]
        for peer in peers: peer.sendall(b"!")
    else:
        until = time.time() + 20
        while True:
            try:
                peer = socket.create_connection(address)
                break
            except ConnectionRefusedError:
                if time.time() > until: raise
                time.sleep(0.05)
        assert peer.recv(1) == b"!"
    if rank == 0 and not epoch:
        checkpoint.write_text("3")
    print("met at epoch", epoch, flush=True)
    if os.environ["RESTART_COUNT"] == "4":
        while True: signal.pause()
    print("trained", flush=True)
"""
"""Waits for ever in its first round, whose RESTART_COUNT is 4. In the next round it resumes from the checkpoint of the
first."""


def start(harness, script=TRAINS, **changes):
    """Start a run whose earlier attempts were restarted four times, and return once every rank has met the others."""
    harness.start(script, text="met at epoch", **{"nodes": 3, "restart_count": 4, **changes})


def stop_launcher(harness, node):
    """Freeze the launcher of a node, so that it sends no heartbeat."""
    pid = next(record["pid"] for record in harness.records() if record["node"] == node)
    for _generation in range(2):  # bubblewrap, then the launcher
        pid = children(pid)[0]
    os.kill(pid, signal.SIGSTOP)


def variables_of(harness, first_rank):
    """Return the variables of a process in each round. Its log has the number of its first rank."""
    lines = [line.partition(" ") for line in harness.log(first_rank).splitlines()]
    return [json.loads(rest) for word, _space, rest in lines if word == "variables"]


@pytest.mark.parametrize("lose", [LocalHarness.lose_node, pytest.param(stop_launcher, marks=pytest.mark.slow)])
def test_a_run_goes_on_without_a_node(harness, lose, left_running):
    start(harness, workers_per_node=2, min_nodes=2)
    lose(harness, 1)
    status = harness.wait_for_outcome(Outcome.COMPLETED)
    assert [span.nodes for span in status.spans] == [3, 2]
    assert status.spans[0].finished_at == status.spans[1].started_at
    assert status.restarts == 1
    # Each process keeps its log. The ranks of the third node are numbered anew.
    for first_rank, rank in ((0, 0), (1, 1), (4, 2), (5, 3)):
        first, second = variables_of(harness, first_rank)
        assert (first["RANK"], first["WORLD_SIZE"], first["RESTART_COUNT"]) == (str(first_rank), "6", "4")
        assert (second["RANK"], second["WORLD_SIZE"], second["RESTART_COUNT"]) == (str(rank), "4", "5")
        assert second["NODE_RANK"] == str(rank // 2)
        assert second["TORCHELASTIC_RESTART_COUNT"] == "5"
        # Four earlier restarts, and one for the one node that the run may lose.
        assert first["TORCHELASTIC_MAX_RESTARTS"] == second["TORCHELASTIC_MAX_RESTARTS"] == "5"
        assert first["MASTER_PORT"] != second["MASTER_PORT"]
        log = harness.log(first_rank)
        assert f"[trainyard] A node was lost. This process starts again as rank {rank} of 4." in log
        assert "met at epoch 3" in log
        assert log.endswith("trained\n")
    assert left_running() == []


@pytest.mark.parametrize(("min_nodes", "lost"), [(2, (1, 2)), (1, (0,))], ids=["below the minimum", "node 0"])
def test_a_run_is_lost_below_its_minimum_nodes_and_with_node_0(harness, min_nodes, lost):
    start(harness, min_nodes=min_nodes)
    for node in lost:
        harness.lose_node(node)
    failure = harness.wait_for_failure(Outcome.NODE_LOST)
    assert (failure.code, failure.node in lost) == (FailureCode.NODE_LOST, True)
    if min_nodes == 2:
        assert [cause["message"] for record in harness.records() for cause in record["causes"]] == [
            f"Node {failure.node} was lost, and fewer than 2 are left."
        ]


def test_a_run_may_lose_one_node_after_another(harness):
    # The ranks wait in the first round and in the second; each ends with the loss of a node.
    start(harness, TRAINS.replace('== "4"', 'in "45"'), min_nodes=1)
    harness.lose_node(2)
    for rank in (0, 1):
        harness.wait("job-1-1", lambda _status, rank=rank: harness.log(rank).count("met at epoch") == 2)
    harness.lose_node(1)
    status = harness.wait_for_outcome(Outcome.COMPLETED)
    assert ([span.nodes for span in status.spans], status.restarts) == ([3, 2, 1], 2)
    assert [each["WORLD_SIZE"] for each in variables_of(harness, 0)] == ["3", "2", "1"]
    assert len({each["MASTER_PORT"] for each in variables_of(harness, 0)}) == 3


def test_a_failed_rank_is_no_lost_node(harness):
    # In the first round, rank 1 fails where TRAINS waits.
    script = TRAINS.replace("    while True: signal.pause()", "    sys.exit(7 if rank == 1 else signal.pause())")
    failure = harness.run_to_failure(Outcome.CODE_FAILED, script, nodes=3, min_nodes=1, restart_count=4)
    assert (failure.rank, failure.exit_code, failure.code) == (1, 7, FailureCode.RANK_EXITED)
    assert harness.backend.describe("job-1-1").restarts == 0


def test_ranks_that_fail_because_a_node_is_lost_are_no_first_cause(harness):
    # As with gloo: the other ranks' collectives fail at once, before a launcher can report the loss.
    script = TRAINS.replace(
        "    while True: signal.pause()", "    sys.exit(9 if (peer if rank else peers[0]).recv(1) == b'' else 0)"
    )
    start(harness, script, min_nodes=2)
    harness.lose_node(1)
    status = harness.wait_for_outcome(Outcome.COMPLETED)
    assert status.restarts == 1


SETTINGS = {"resources": Resources(cpus=1.5, memory_mib=2048), "lr": "0.02", "deadline_seconds": 240}
"""The changes to the spec of a run that trains with a real framework."""


def heavy(test):
    """Mark a test that trains with a real framework."""
    return pytest.mark.slow(pytest.mark.cores(2)(pytest.mark.torch(test)))


def use_example(harness, image, script, digits):
    """Use a built image, an example and the digits."""
    shutil.unpack_archive(digits, harness.dataset, filter="data")
    shutil.copy(EXAMPLES / script, harness.workspace)
    harness.patience = 200  # Horovod may notice a lost peer only after its own 30 seconds
    use_image(harness, image)


@heavy
def test_horovod_goes_on_without_a_node_and_resumes_at_another_size(harness, digits):
    use_example(harness, "horovod", "horovod_elastic.py", digits)
    settings = {**SETTINGS, "framework": Framework.HOROVOD, "checkpoint_key": "elastic"}
    # "": the script is an example, not `train.py`.
    harness.submit("", script="horovod_elastic.py", nodes=3, min_nodes=2, epochs=3, **settings)
    harness.wait_for_text("epoch 1 ")
    harness.lose_node(1)
    status = harness.wait_for_outcome(Outcome.COMPLETED)
    assert [span.nodes for span in status.spans] == [3, 2]
    assert status.restarts == 0, "nothing was started again"
    log = harness.log(0)
    assert "a node was lost: going on as rank 0 of 2" in log
    assert "a node was lost: going on as rank 1 of 2" in harness.log(2), "the third node is the second now"
    assert "resumed" not in log
    epochs = re.findall(r"^epoch (\d+) .* on (\d)$", log, re.MULTILINE)
    assert [int(epoch) for epoch, _size in epochs] == list(range(1, 4)), "no epoch twice, none left out"
    assert {size for _epoch, size in epochs} == {"3", "2"}
    assert "result: 3 epochs, rank 1 of 2" in harness.log(2)
    assert float(re.findall(r"accuracy ([\d.]+)", log)[-1]) > 0.8
    # If a node is lost after all images of an epoch were seen, the others go on with an epoch without images. Here
    # that is epoch 4: the sampler counts from 0.
    script = """
    import runpy
    import horovod.torch as hvd
    class NothingLeft(hvd.elastic.ElasticSampler):
        def __iter__(self):
            return iter(()) if self.epoch == 3 else super().__iter__()
    hvd.elastic.ElasticSampler = NothingLeft
    runpy.run_path("horovod_elastic.py", run_name="__main__")
    """
    log = harness.log(name=harness.complete(script, name="job-1-2", epochs=5, **settings).name)
    assert "resumed after epoch 3" in log
    assert re.findall(r"^epoch (\d) .* lr ([\d.]+) on 1$", log, re.MULTILINE) == [("4", "0.02"), ("5", "0.02")], log


@heavy
def test_ddp_resumes_on_the_nodes_that_are_left(harness, digits):
    use_example(harness, "pytorch", "mnist_ddp.py", digits)
    hostile.warm(harness)  # so that one process imports torch, not each of the ranks
    harness.submit("", script="mnist_ddp.py", nodes=3, min_nodes=2, epochs=4, **SETTINGS)
    harness.wait_for_text("epoch 1/4")
    harness.lose_node(1)
    status = harness.wait_for_outcome(Outcome.COMPLETED)
    assert ([span.nodes for span in status.spans], status.restarts) == ([3, 2], 1)
    log = harness.log(0)
    assert "This process starts again as rank 0 of 2." in log
    assert re.search(r"resumed after epoch [1-3]", log), log
    assert "epoch 4/4" in log

"""Runs that go on without a node: on real processes, with the node's supervisor killed or its launcher stopped."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime.backends import identity
from runtime.specs import FailureCode, Framework, Outcome, Resources, RunPhase, RunStatus
from tests.runtime.images_of_ours import HOUSE, use_image

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

TRAINS = """
    import json, os, pathlib, signal, socket, sys, time
    told = {name: os.environ[name] for name in (
        "RANK", "WORLD_SIZE", "NODE_RANK", "RESTART_COUNT", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS")}
    print("told", json.dumps(told), flush=True)
    checkpoint = pathlib.Path(os.environ["CHECKPOINT_DIR"]) / "epoch"
    rank, size = int(told["RANK"]), int(told["WORLD_SIZE"])
    epoch = int(checkpoint.read_text()) if checkpoint.exists() else 0
    if rank == 0:
        # As PyTorch's store: the others come to rank 0, at a port of this round's own.
        server = socket.create_server(("127.0.0.1", int(told["MASTER_PORT"])))
        met = [server.accept()[0] for _ in range(size - 1)]
        for peer in met: peer.sendall(b"!")
    else:
        until = time.time() + 20
        while True:
            try:
                peer = socket.create_connection(("127.0.0.1", int(told["MASTER_PORT"])))
                break
            except ConnectionRefusedError:
                if time.time() > until: raise
                time.sleep(0.05)
        assert peer.recv(1) == b"!"
    if rank == 0 and not epoch:
        checkpoint.write_text("3")
    print("met at epoch", epoch, flush=True)
    if told["RESTART_COUNT"] == "4":
        while True: signal.pause()
    print("trained", flush=True)
"""
"""Waits for ever in its first round, and in the next goes on from the checkpoint of the first."""


def supervisor(yard: Yard, node: int) -> dict[str, Any]:
    record = next(record for record in yard.records() if record["node"] == node)
    assert isinstance(record, dict)
    return record


def launcher(yard: Yard, node: int) -> int:
    pid = supervisor(yard, node)["pid"]
    for _generation in range(2):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return int(pid)


def kill_supervisor(yard: Yard, node: int) -> None:
    record = supervisor(yard, node)
    assert identity.send(record["pid"], record["start_time"], signal.SIGKILL)


def stop_launcher(yard: Yard, node: int) -> None:
    os.kill(launcher(yard, node), signal.SIGSTOP)


def told(yard: Yard, rank: int) -> list[dict[str, str]]:
    return [json.loads(line.partition(" ")[2]) for line in yard.log(rank).splitlines() if line.startswith("told ")]


@pytest.mark.parametrize("lose", [kill_supervisor, stop_launcher])
def test_a_run_goes_on_without_a_node(
    yard: Yard, lose: Callable[[Yard, int], None], left_running: Callable[[], list[str]]
) -> None:
    yard.backend.submit(yard.spec(TRAINS, nodes=3, workers_per_node=2, min_nodes=2, restart_count=4))
    for rank in range(6):
        yard.wait_for_text("met at epoch", rank=rank)
    lose(yard, 1)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    assert [span.nodes for span in status.spans] == [3, 2]
    assert status.spans[0].finished_at == status.spans[1].started_at
    assert status.restarts == 1
    # Logs stay one process's own; what the processes of the third node are told is numbered anew.
    for seat, rank in ((0, 0), (1, 1), (4, 2), (5, 3)):
        first, second = told(yard, seat)
        assert (first["RANK"], first["WORLD_SIZE"], first["RESTART_COUNT"]) == (str(seat), "6", "4")
        assert (second["RANK"], second["WORLD_SIZE"], second["RESTART_COUNT"]) == (str(rank), "4", "5")
        assert second["NODE_RANK"] == str(rank // 2)
        assert second["TORCHELASTIC_RESTART_COUNT"] == "5"
        assert first["TORCHELASTIC_MAX_RESTARTS"] == second["TORCHELASTIC_MAX_RESTARTS"] == "5"
        assert first["MASTER_PORT"] != second["MASTER_PORT"]
        log = yard.log(seat)
        assert f"[trainyard] A node was lost. This process starts again as rank {rank} of 4." in log
        assert "met at epoch 3" in log
        assert log.endswith("trained\n")
    assert left_running() == []


def test_below_its_least_nodes_a_run_is_lost(yard: Yard) -> None:
    yard.backend.submit(yard.spec(TRAINS, nodes=3, min_nodes=2, restart_count=4))
    for rank in range(3):
        yard.wait_for_text("met at epoch", rank=rank)
    kill_supervisor(yard, 1)
    kill_supervisor(yard, 2)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure is not None
    assert status.failure.code is FailureCode.NODE_LOST
    assert status.failure.node in {1, 2}
    assert [cause["message"] for record in yard.records() for cause in record["causes"]] == [
        f"Node {status.failure.node} was lost, and fewer than 2 are left."
    ]


def test_node_0_cannot_be_spared(yard: Yard) -> None:
    yard.backend.submit(yard.spec(TRAINS, nodes=3, min_nodes=1, restart_count=4))
    for rank in range(3):
        yard.wait_for_text("met at epoch", rank=rank)
    kill_supervisor(yard, 0)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.NODE_LOST
    assert status.failure is not None
    assert status.failure.node == 0


def test_losses_may_follow_each_other_down_to_one_node(yard: Yard) -> None:
    script = TRAINS.replace('== "4"', 'in "45"')
    yard.backend.submit(yard.spec(script, nodes=3, min_nodes=1, restart_count=4))
    for rank in range(3):
        yard.wait_for_text("met at epoch", rank=rank)
    kill_supervisor(yard, 2)
    yard.wait("job-1-1", lambda _status: yard.log(1).count("met at epoch") == 2)
    yard.wait("job-1-1", lambda _status: yard.log(0).count("met at epoch") == 2)
    kill_supervisor(yard, 1)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.COMPLETED
    assert [span.nodes for span in status.spans] == [3, 2, 1]
    assert status.restarts == 2
    assert [one["WORLD_SIZE"] for one in told(yard, 0)] == ["3", "2", "1"]
    assert len({one["MASTER_PORT"] for one in told(yard, 0)}) == 3


def test_a_rank_that_fails_is_no_lost_node(yard: Yard) -> None:
    script = TRAINS.replace("    while True: signal.pause()", "    sys.exit(7 if rank == 1 else signal.pause())")
    status = yard.run(script, nodes=3, min_nodes=1, restart_count=4)
    assert status.outcome is Outcome.CODE_FAILED
    assert status.failure is not None
    assert (status.failure.rank, status.failure.exit_code, status.failure.code) == (1, 7, FailureCode.RANK_EXITED)
    assert status.restarts == 0


def test_ranks_that_fail_because_a_node_is_lost_are_no_first_cause(yard: Yard) -> None:
    # As with gloo: the others' collectives break at the very moment, and sooner than a launcher can tell.
    script = TRAINS.replace(
        "    while True: signal.pause()", "    sys.exit(9 if (peer if rank else met[0]).recv(1) == b'' else 0)"
    )
    yard.backend.submit(yard.spec(script, nodes=3, min_nodes=2, restart_count=4))
    for rank in range(3):
        yard.wait_for_text("met at epoch", rank=rank)
    kill_supervisor(yard, 1)
    status = yard.wait_for_end()
    assert status.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    assert status.restarts == 1


def test_nothing_of_a_round_reaches_the_next(yard: Yard) -> None:
    script = """
    import os, pathlib, signal, subprocess, sys
    run = pathlib.Path(os.environ["RUN_DIR"])
    if os.environ["RESTART_COUNT"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "left-behind"], start_new_session=True)
        print("ready", flush=True)
        while True: signal.pause()
    seen = [path for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if b"left-behi" + b"nd" in path.read_bytes()]
    print("left:", seen)
    """
    yard.backend.submit(yard.spec(script, nodes=2, min_nodes=1))
    for rank in range(2):
        yard.wait_for_text("ready", rank=rank)
    kill_supervisor(yard, 1)
    assert yard.wait_for_end().outcome is Outcome.COMPLETED
    assert "left: []" in yard.log(0)


ELASTIC_NODE = Resources(cpus=0.5, memory_mib=2048)


@pytest.fixture
def horovod_yard(yard: Yard, tmp_path: Path) -> Yard:
    """The horovod image, its elastic example, and the digits."""
    spec = importlib.util.spec_from_file_location("make_digits", HOUSE / "examples" / "make_digits.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    maker.write_archive(tmp_path / "digits.tar.gz")
    with tarfile.open(tmp_path / "digits.tar.gz") as archive:
        archive.extractall(yard.dataset, filter="data")
    shutil.copy(HOUSE / "examples" / "horovod_elastic.py", yard.workspace)
    return use_image(yard, "horovod")


def wait_for_end(yard: Yard) -> RunStatus:
    """Horovod may notice a lost peer only after its own 30 seconds."""
    return yard.wait("job-1-1", lambda status: status.phase is RunPhase.ENDED, 200)


def submit_horovod(yard: Yard, **changes: Any) -> None:
    settings = {
        "script": "horovod_elastic.py",
        "framework": Framework.HOROVOD,
        "resources": ELASTIC_NODE,
        "lr": "0.02",
        "epochs": 12,
        "deadline_seconds": 240,
        **changes,
    }
    yard.backend.submit(yard.spec("", **settings))


@pytest.mark.torch
def test_horovod_goes_on_without_a_node_and_without_a_restart(horovod_yard: Yard) -> None:
    yard = horovod_yard
    submit_horovod(yard, nodes=3, workers_per_node=1, min_nodes=2)
    yard.wait_for_text("epoch 2 ")
    kill_supervisor(yard, 1)
    status = wait_for_end(yard)
    assert status.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    assert [span.nodes for span in status.spans] == [3, 2]
    assert status.restarts == 0, "nothing was started again"
    log = yard.log(0)
    assert "a node was lost: going on as rank 0 of 2" in log
    assert "a node was lost: going on as rank 1 of 2" in yard.log(2), "the third node is the second now"
    assert "resumed" not in log
    epochs = re.findall(r"^epoch (\d+) .* on (\d)$", log, re.MULTILINE)
    assert [int(epoch) for epoch, _size in epochs] == list(range(1, 13)), "no epoch twice, none left out"
    assert {size for _epoch, size in epochs} == {"3", "2"}
    assert "result: 12 epochs, rank 1 of 2" in yard.log(2)
    assert float(re.findall(r"accuracy ([\d.]+)", log)[-1]) > 0.9


@pytest.mark.torch
def test_horovod_below_its_least_nodes_is_lost(horovod_yard: Yard) -> None:
    yard = horovod_yard
    submit_horovod(yard, nodes=3, min_nodes=3, epochs=500)
    yard.wait_for_text("epoch 1 ")
    kill_supervisor(yard, 1)
    status = wait_for_end(yard)
    assert status.outcome is Outcome.NODE_LOST, yard.all_logs("job-1-1")


@pytest.mark.torch
def test_a_horovod_script_that_is_not_elastic_starts_again_from_its_checkpoint(horovod_yard: Yard) -> None:
    yard = horovod_yard
    shutil.copy(HOUSE / "examples" / "mnist_horovod.py", yard.workspace)
    submit_horovod(yard, script="mnist_horovod.py", nodes=3, min_nodes=2, epochs=6)
    yard.wait_for_text("epoch 2/")
    kill_supervisor(yard, 2)
    status = wait_for_end(yard)
    assert status.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    assert [span.nodes for span in status.spans] == [3, 2]
    assert status.restarts >= 1
    assert re.search(r"resumed after epoch \d", yard.log(0)), yard.log(0)


@pytest.mark.torch
def test_ddp_resumes_on_the_nodes_that_are_left(horovod_yard: Yard) -> None:
    # The horovod image has all that the pytorch image has.
    yard = horovod_yard
    shutil.copy(HOUSE / "examples" / "mnist_ddp.py", yard.workspace)
    submit_horovod(yard, script="mnist_ddp.py", framework=Framework.PYTORCH, nodes=3, min_nodes=2, epochs=8)
    yard.wait("job-1-1", lambda _status: "epoch 2/8" in yard.log(), 120)
    kill_supervisor(yard, 1)
    status = wait_for_end(yard)
    assert status.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    assert [span.nodes for span in status.spans] == [3, 2]
    assert status.restarts == 1
    log = yard.log(0)
    assert "This process starts again as rank 0 of 2." in log
    assert re.search(r"resumed after epoch [1-7]", log), log
    assert "epoch 8/8" in log


ELASTIC_OF_HOROVOD = HOUSE / "var" / "compat" / "horovod-elastic-mnist" / "pytorch_mnist_elastic.py"


@pytest.mark.torch
@pytest.mark.skipif(not ELASTIC_OF_HOROVOD.exists(), reason="python -m tests.compat.scripts fetches Horovod's example")
def test_horovods_own_elastic_example_goes_on_unchanged(horovod_yard: Yard) -> None:
    yard = horovod_yard
    shutil.copy(ELASTIC_OF_HOROVOD, yard.workspace)
    arguments = ("--data-dir", "/datasets/digits", "--epochs", "6", "--batch-size", "16", "--log-interval", "1")
    submit_horovod(yard, script=ELASTIC_OF_HOROVOD.name, nodes=3, min_nodes=1, arguments=arguments)
    yard.wait("job-1-1", lambda _status: "Train Epoch: 2" in yard.log(), 120)
    kill_supervisor(yard, 2)
    status = wait_for_end(yard)
    assert status.outcome is Outcome.COMPLETED, yard.all_logs("job-1-1")
    assert [span.nodes for span in status.spans] == [3, 2]
    assert status.restarts == 0
    assert "Train Epoch: 6" in yard.log()
    assert "Test set: Average loss" in yard.log()

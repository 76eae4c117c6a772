"""What every backend keeps (`runtime.backends.base.Backend`), from real runs: one suite over local and Kubernetes.

On Kubernetes it runs on the fake cluster of `tests.kubernetes`, or on the one of KUBECONFIG.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from runtime.backends.base import Backend
from runtime.errors import InvalidSpec, RunNotFound
from runtime.specs import FailureCode, Image, Mount, Outcome, Resources, RunPhase, RunSpec, RunStatus, WaitingCode
from tests.kubernetes.fixtures import site  # noqa: F401 - a fixture
from tests.kubernetes.yard import ClusterYard
from tests.runtime.conftest import Yard

BACKENDS = ("local", "kubernetes")
SHOW = """
    import argparse, json, os, sys
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    print("SEEN " + json.dumps({
        "environment": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0],
        "local_rank": parser.parse_args().local_rank,
        "dataset": open(os.path.join(os.environ["DATASETS_PATH"], "digits", "three.txt")).read(),
        "writable": [name for name in ("WORKSPACE", "RUN_DIR", "CHECKPOINT_DIR", "TENSORBOARD_LOGDIR", "DATASETS_PATH")
                     if os.access(os.environ[name], os.W_OK)],
    }))
"""
WAIT = """
    import signal
    print("ready", flush=True)
    while True:
        signal.pause()
"""
POLITE = """
    import signal, sys, time
    def leave(*_):
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    print("ready", flush=True)
    while True:
        signal.pause()
"""
STUBBORN = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        signal.pause()
"""
MEET = """
    import os, socket
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        server = socket.create_server(address)
        total, peers = 1, []
        for _ in range(size - 1):
            peer, _ = server.accept()
            total += int(peer.recv(16))
            peers.append(peer)
        for peer in peers:
            peer.sendall(b"%d" % total)
    else:
        import time
        while True:
            try:
                peer = socket.create_connection(address, timeout=20)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        peer.sendall(b"%d" % (rank + 1))
        total = int(peer.recv(16))
    print("total", total, flush=True)
"""


class AnyYard(Protocol):
    """What the yards of all backends have."""

    backend: Backend

    def another(self) -> Backend: ...
    def spec(self, source: str = ..., /, **changes: Any) -> RunSpec: ...
    def wait(self, name: str, until: Any, seconds: float = ...) -> RunStatus: ...
    def wait_for_end(self, name: str = ...) -> RunStatus: ...
    def wait_for_text(self, text: str, name: str = ..., rank: int = ...) -> RunStatus: ...
    def run(self, source: str, /, **changes: Any) -> RunStatus: ...
    def log(self, rank: int = ..., name: str = ...) -> str: ...
    def all_logs(self, name: str) -> str: ...
    def lose_node(self, node: int, name: str = ...) -> None: ...
    def left_behind(self) -> list[str]: ...


class LocalYard(Yard):
    """The local yard, with what only a backend's own tests know: how to take a node away, what is left of runs."""

    def spec(self, source: str = "print('hello')", /, **changes: Any) -> RunSpec:
        (self.dataset / "three.txt").write_text("3")
        return super().spec(source, **changes)

    def lose_node(self, node: int, name: str = "job-1-1") -> None:
        os.kill(self.records(name)[node]["pid"], signal.SIGKILL)

    def left_behind(self) -> list[str]:
        runs = self.folder / "runs"
        return [path.name for path in runs.iterdir() if not path.name.startswith(".")]


@pytest.fixture(params=BACKENDS)
def any_yard(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[AnyYard]:
    """A yard of each backend in turn, that has left nothing behind."""
    if request.param == "local":
        yard = request.getfixturevalue("yard")
        yard.__class__ = LocalYard  # the fixture's own, with its own cleaning
        yield yard
        return
    made = ClusterYard(request.getfixturevalue("site"))
    yield made
    made.close()


def seen(yard: AnyYard, rank: int) -> dict[str, Any]:
    line = next(line for line in yard.log(rank).splitlines() if line.startswith("SEEN "))
    found: dict[str, Any] = json.loads(line.removeprefix("SEEN "))
    return found


# The life of a run


@pytest.mark.parametrize(("nodes", "workers"), [(1, 1), (2, 2)])
def test_every_rank_sees_the_environment_contract(any_yard: AnyYard, nodes: int, workers: int) -> None:
    spec = any_yard.spec(
        SHOW, nodes=nodes, workers_per_node=workers, epochs=7, lr="0.05", batch_size=48, restart_count=2
    )
    any_yard.backend.submit(spec)
    assert any_yard.wait_for_end().outcome is Outcome.COMPLETED, any_yard.all_logs(spec.name)
    everyone = [seen(any_yard, rank) for rank in range(nodes * workers)]
    for rank, found in enumerate(everyone):
        node, local_rank = divmod(rank, workers)
        environment = found["environment"]
        expected = {
            "DATASETS_PATH": "/datasets", "DATASETS": "digits", "WORKSPACE": "/workspace",
            "EPOCHS": "7", "LR": "0.05", "BATCH_SIZE": "48", "BACKEND": "gloo",
            "WORLD_SIZE": str(nodes * workers), "RANK": str(rank), "LOCAL_RANK": str(local_rank),
            "NODE_RANK": str(node), "WORKER_PER_NODE": str(workers),
            "LOCAL_WORLD_SIZE": str(workers), "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(nodes),
            "TORCHELASTIC_RUN_ID": "job-1-1", "RESTART_COUNT": "2",
            "RUN_DIR": "/trainyard/run", "METRICS_FILE": "/trainyard/run/metrics.jsonl",
            "TENSORBOARD_LOGDIR": "/trainyard/run/tensorboard", "CHECKPOINT_DIR": "/trainyard/checkpoints",
        }  # fmt: skip
        assert {name: environment.get(name) for name in expected} == expected
        assert found["argv"] == ["/workspace/train.py", f"--local_rank={local_rank}"]
        assert found["local_rank"] == local_rank
        assert found["cwd"] == found["path"] == "/workspace"
        assert found["dataset"] == "3"
        assert found["writable"] == ["WORKSPACE", "RUN_DIR", "CHECKPOINT_DIR", "TENSORBOARD_LOGDIR"]
        assert not [name for name in environment if name.startswith(("TRAINYARD", "KUBERNETES", "DJANGO"))]
        told = any_yard.backend.environment(spec, rank)
        varies = {"MASTER_ADDR", "MASTER_PORT"}
        assert {name: environment.get(name) for name in told if name not in varies} == {
            name: value for name, value in told.items() if name not in varies
        }
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        assert len({found["environment"][name] for found in everyone}) == 1
    assert everyone[0]["environment"]["MASTER_ADDR"].count(".") == 3, "an IP, not a name"


@pytest.mark.parametrize(("nodes", "workers"), [(2, 1), (3, 2)])
def test_the_ranks_meet_at_the_masters_address(any_yard: AnyYard, nodes: int, workers: int) -> None:
    status = any_yard.run(MEET, nodes=nodes, workers_per_node=workers)
    assert status.outcome is Outcome.COMPLETED, any_yard.all_logs("job-1-1")
    size = nodes * workers
    for rank in range(size):
        assert any_yard.log(rank) == f"total {size * (size + 1) // 2}\n"


def test_phases_and_times(any_yard: AnyYard) -> None:
    before = time.time()
    any_yard.backend.submit(any_yard.spec(POLITE, nodes=2))
    first = any_yard.backend.describe("job-1-1")
    assert first.phase in {RunPhase.STARTING, RunPhase.RUNNING}
    assert first.submitted_at is not None
    assert first.submitted_at == pytest.approx(before, abs=30)
    any_yard.wait_for_text("ready", rank=0)
    any_yard.wait_for_text("ready", rank=1)
    running = any_yard.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    assert (running.finished_at, running.outcome, running.waiting_for) == (None, None, "")
    assert [node.phase for node in running.nodes] == [RunPhase.RUNNING] * 2
    assert running.started_at is not None
    assert running.started_at >= int(first.submitted_at)
    any_yard.backend.stop("job-1-1", 20)
    ended = any_yard.wait_for_end()
    assert ended.outcome is Outcome.STOPPED
    assert ended.started_at == running.started_at
    assert ended.finished_at is not None
    assert ended.finished_at >= ended.started_at
    assert [node.phase for node in ended.nodes] == [RunPhase.ENDED] * 2
    assert [(span.nodes, span.started_at, span.finished_at) for span in ended.spans] == [
        (2, ended.started_at, ended.finished_at)
    ]
    assert any_yard.backend.describe("job-1-1") == ended, "an end is final"


def test_a_run_that_is_not_all_there_says_what_it_waits_for(any_yard: AnyYard) -> None:
    any_yard.backend.submit(any_yard.spec(WAIT, nodes=2))
    status = any_yard.backend.describe("job-1-1")
    while status.phase is RunPhase.STARTING:
        assert status.waiting_for
        assert status.started_at is None
        status = any_yard.backend.describe("job-1-1")
    assert status.phase is RunPhase.RUNNING


def test_submits_at_once_start_one_run(any_yard: AnyYard) -> None:
    spec = any_yard.spec("import os\nprint('start', os.environ['RANK'])", nodes=2)
    failures: list[BaseException] = []

    def submit() -> None:
        try:
            any_yard.another().submit(spec)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert any_yard.backend.names() == ["job-1-1"]
    ended = any_yard.wait_for_end()
    any_yard.backend.submit(spec)
    assert any_yard.backend.describe("job-1-1") == ended, "a submit adopts, whatever the phase"
    assert ended.outcome is Outcome.COMPLETED
    assert (any_yard.log(0), any_yard.log(1)) == ("start 0\n", "start 1\n")


def test_names_of_all_and_of_the_living(any_yard: AnyYard) -> None:
    any_yard.run("", name="job-1-1")
    any_yard.backend.submit(any_yard.spec(WAIT, name="job-2-1"))
    any_yard.wait_for_text("ready", "job-2-1")
    assert any_yard.backend.names() == ["job-1-1", "job-2-1"]
    assert any_yard.another().names() == ["job-1-1", "job-2-1"]
    assert any_yard.backend.names(live=True) == ["job-2-1"]
    any_yard.backend.delete("job-2-1")
    assert any_yard.backend.names() == ["job-1-1"]
    assert any_yard.backend.names(live=True) == []


def test_a_name_can_be_used_again_once_it_was_deleted(any_yard: AnyYard) -> None:
    for word in ("first", "second"):
        any_yard.run(f"print({word!r})")
        assert any_yard.log() == f"{word}\n"
        any_yard.backend.delete("job-1-1")


# Logs


def test_logs_come_in_pieces_at_character_boundaries(any_yard: AnyYard) -> None:
    text = "é€😀" * 20
    any_yard.run(f"import sys\nsys.stdout.buffer.write('{text}\\n'.encode())\nprint('second')")
    pieces, offset = [], 0
    while True:
        chunk = any_yard.backend.logs("job-1-1", 0, offset, limit=7)
        assert len(chunk.text.encode()) <= 7
        pieces.append(chunk.text)
        offset = chunk.next_offset
        if chunk.eof:
            break
    assert "".join(pieces) == f"{text}\nsecond\n"
    assert any_yard.backend.logs("job-1-1", 0, offset).text == ""


def test_lines_are_there_while_they_are_written_and_eof_comes_with_the_end(any_yard: AnyYard) -> None:
    any_yard.backend.submit(any_yard.spec(POLITE))
    any_yard.wait_for_text("ready\n")
    chunk = any_yard.backend.logs("job-1-1", 0, 0)
    assert (chunk.text, chunk.next_offset, chunk.eof) == ("ready\n", 6, False)
    any_yard.backend.stop("job-1-1", 20)
    any_yard.wait_for_end()
    rest = any_yard.backend.logs("job-1-1", 0, chunk.next_offset)
    assert (rest.text, rest.eof) == ("saved\n", True)


def test_a_log_is_capped_and_the_run_goes_on(any_yard: AnyYard) -> None:
    status = any_yard.run("for _ in range(300): print('x' * 1000)\nprint('done')", log_limit_bytes=10_000)
    assert status.outcome is Outcome.COMPLETED
    log = any_yard.log()
    assert len(log) < 10_500
    assert "has reached its limit of 10000 bytes" in log


# Ends


def test_a_stopped_run_has_its_grace(any_yard: AnyYard) -> None:
    any_yard.backend.submit(any_yard.spec(POLITE, nodes=2))
    for rank in range(2):
        any_yard.wait_for_text("ready", rank=rank)
    any_yard.backend.stop("job-1-1", 20)
    any_yard.backend.stop("job-1-1", 30)
    ended = any_yard.wait_for_end()
    assert ended.outcome is Outcome.STOPPED
    assert ended.failure is not None
    assert ended.failure.code is FailureCode.STOPPED
    for rank in range(2):
        assert any_yard.log(rank) == "ready\nsaved\n"


def test_a_sooner_end_counts(any_yard: AnyYard) -> None:
    any_yard.backend.submit(any_yard.spec(STUBBORN, grace_seconds=600, deadline_seconds=3600))
    any_yard.wait_for_text("ready")
    any_yard.backend.stop("job-1-1", 600)
    status = any_yard.wait("job-1-1", lambda status: status.phase is not RunPhase.RUNNING)
    assert status.phase is RunPhase.STOPPING
    any_yard.backend.stop("job-1-1", 0)
    assert any_yard.wait_for_end().outcome is Outcome.STOPPED


def test_a_run_that_is_stopped_at_once_never_ran_or_was_stopped(any_yard: AnyYard) -> None:
    any_yard.backend.submit(any_yard.spec(WAIT, nodes=2))
    any_yard.backend.stop("job-1-1", 5)
    try:
        ended = any_yard.wait_for_end()
    except RunNotFound:
        return
    assert ended.outcome is Outcome.STOPPED


def test_a_run_ends_at_its_deadline_after_its_grace(any_yard: AnyYard) -> None:
    ended = any_yard.run(POLITE, nodes=2, deadline_seconds=6, grace_seconds=4)
    assert ended.outcome is Outcome.TIME_LIMIT, any_yard.all_logs("job-1-1")
    assert any_yard.log(0) == "ready\nsaved\n"
    assert ended.started_at is not None
    assert ended.finished_at is not None
    assert ended.finished_at - ended.started_at <= 6 + 1  # a cluster's clock counts whole seconds


def test_the_deadline_kills_whoever_does_not_leave(any_yard: AnyYard) -> None:
    ended = any_yard.run(STUBBORN, deadline_seconds=4, grace_seconds=2)
    assert ended.outcome is Outcome.TIME_LIMIT
    assert ended.started_at is not None
    assert ended.finished_at is not None
    assert 3 <= ended.finished_at - ended.started_at <= 4 + 2


def test_the_first_failure_is_told_with_its_rank_and_last_lines(any_yard: AnyYard) -> None:
    script = """
    import os, signal, sys, time
    if os.environ["RANK"] == "3":
        print("about to fail", flush=True)
        sys.exit(7)
    while True:
        signal.pause()
    """
    ended = any_yard.run(script, nodes=2, workers_per_node=2)
    assert ended.outcome is Outcome.CODE_FAILED, any_yard.all_logs("job-1-1")
    assert ended.failure is not None
    told = ended.failure
    assert (told.code, told.node, told.rank, told.exit_code) == (FailureCode.RANK_EXITED, 1, 3, 7)
    assert told.last_lines == ("about to fail",)


def test_a_rank_that_is_killed_is_told_by_its_signal(any_yard: AnyYard) -> None:
    ended = any_yard.run("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert ended.outcome is Outcome.CODE_FAILED
    assert ended.failure is not None
    assert (ended.failure.code, ended.failure.signal) == (FailureCode.RANK_KILLED, "SIGSEGV")


def test_code_that_takes_too_much_memory_is_ended_for_that(any_yard: AnyYard) -> None:
    script = """
    import time
    taken = []
    while True:
        taken.append(bytearray(b"x") * (8 << 20))
        time.sleep(0.02)
    """
    ended = any_yard.run(script, resources=Resources(cpus=0.1, memory_mib=192))
    assert ended.outcome is Outcome.OUT_OF_MEMORY, any_yard.all_logs("job-1-1")
    assert ended.failure is not None
    assert ended.failure.code is FailureCode.OUT_OF_MEMORY


def test_a_node_that_is_taken_away_is_lost_and_no_fault_of_the_code(any_yard: AnyYard) -> None:
    any_yard.backend.submit(any_yard.spec(WAIT, nodes=2))
    for rank in range(2):
        any_yard.wait_for_text("ready", rank=rank)
    any_yard.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    any_yard.lose_node(1)
    ended = any_yard.wait_for_end()
    assert ended.outcome is Outcome.NODE_LOST, any_yard.all_logs("job-1-1")
    assert ended.failure is not None
    assert ended.failure.node == 1
    assert ended.finished_at is not None


def test_an_elastic_run_goes_on_without_a_node_that_is_lost(any_yard: AnyYard) -> None:
    script = """
    import os, signal, time
    if os.environ["WORLD_SIZE"] == "2":
        print("both", flush=True)
        while True:
            signal.pause()
    print("alone after", os.environ["RESTART_COUNT"], flush=True)
    time.sleep(3)  # a cluster's clock counts whole seconds
    """
    any_yard.backend.submit(any_yard.spec(script, nodes=2, min_nodes=1))
    for rank in range(2):
        any_yard.wait_for_text("both", rank=rank)
    any_yard.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    any_yard.lose_node(1)
    ended = any_yard.wait_for_end()
    assert ended.outcome is Outcome.COMPLETED, any_yard.all_logs("job-1-1")
    assert [span.nodes for span in ended.spans] == [2, 1]
    assert ended.restarts == 1
    assert "alone after 1\n" in any_yard.log(0)


# What is refused, and what is nobody's


def test_nothing_is_left_of_what_is_refused(any_yard: AnyYard) -> None:
    good = any_yard.spec()
    outside = Mount("/etc", "/workspace", read_only=False)
    for changes in (
        {"nodes": 0},
        {"resources": Resources(cpus=0, memory_mib=1024)},
        {"image": Image(builtin="unheard-of")},
        {"mounts": (outside,)} if isinstance(any_yard, ClusterYard) else {"script": ""},
        {"name": "Job_1"},
    ):
        spec = RunSpec(**{**{name: getattr(good, name) for name in good.__dataclass_fields__}, **changes})
        with pytest.raises(InvalidSpec) as caught:
            any_yard.backend.submit(spec)
        assert caught.value.field
        assert any_yard.backend.names() == []
        assert any_yard.left_behind() == []


def test_what_can_never_fit_is_refused_or_says_why_it_waits(any_yard: AnyYard) -> None:
    spec = any_yard.spec(nodes=2, resources=Resources(cpus=100_000, memory_mib=256))
    try:
        any_yard.backend.submit(spec)
    except InvalidSpec as refused:
        assert refused.field == "nodes"
        assert any_yard.backend.names() == []
        return
    # A cluster may grow: there it waits.
    status = any_yard.wait(spec.name, lambda status: status.waiting_code == WaitingCode.CPUS)
    assert (status.phase, status.started_at) == (RunPhase.STARTING, None)
    assert status.waiting_data["wanted"] == 100_000
    assert "CPU" in status.waiting_for
    any_yard.backend.stop(spec.name, 5)
    ended = any_yard.wait_for_end()
    assert (ended.outcome, ended.started_at, ended.spans) == (Outcome.STOPPED, None, ())


def test_nobody_knows_a_run_that_never_was(any_yard: AnyYard) -> None:
    for call in (any_yard.backend.describe, any_yard.backend.stacks):
        with pytest.raises(RunNotFound):
            call("job-9-1")
    for read in (any_yard.backend.logs, any_yard.backend.samples):
        with pytest.raises(RunNotFound):
            read("job-9-1", 0)
    any_yard.backend.stop("job-9-1", 5)
    any_yard.backend.delete("job-9-1")
    any_yard.backend.delete_checkpoints("job-9")
    any_yard.run("")
    for rank in (-1, 1):
        with pytest.raises(RunNotFound):
            any_yard.backend.logs("job-1-1", rank)


# The cluster


def test_a_run_holds_its_room_until_it_ends(any_yard: AnyYard) -> None:
    def free() -> float:
        return sum(machine.free.cpus for machine in any_yard.backend.capacity().machines)

    before = free()
    any_yard.backend.submit(any_yard.spec(WAIT, nodes=2))
    any_yard.wait_for_text("ready", rank=1)
    held = 2 * any_yard.spec().resources.cpus
    assert free() == pytest.approx(before - held)
    any_yard.backend.stop("job-1-1", 0)
    any_yard.wait_for_end()
    any_yard.wait("job-1-1", lambda _status: free() == pytest.approx(before))


def test_deleting_a_run_that_goes_leaves_nothing(any_yard: AnyYard) -> None:
    any_yard.backend.submit(any_yard.spec(STUBBORN, nodes=2, deadline_seconds=3600, grace_seconds=600))
    any_yard.wait_for_text("ready", rank=1)
    any_yard.backend.delete("job-1-1")
    any_yard.backend.delete("job-1-1")
    with pytest.raises(RunNotFound):
        any_yard.backend.describe("job-1-1")
    assert any_yard.left_behind() == []
    assert any_yard.backend.names() == []


def test_changes_are_told_within_a_second(any_yard: AnyYard) -> None:
    told: list[tuple[float, set[str]]] = []
    begun, done = threading.Event(), threading.Event()

    def listen() -> None:
        for names in any_yard.another().changes(stop_after=120):
            begun.set()
            told.append((time.monotonic(), names))
            if done.is_set():
                return

    listener = threading.Thread(target=listen)
    listener.start()
    assert begun.wait(30)
    any_yard.backend.submit(any_yard.spec(POLITE))
    any_yard.wait_for_text("ready")
    stopped = time.monotonic()
    any_yard.backend.stop("job-1-1", 20)
    any_yard.wait_for_end()
    ended = time.monotonic()
    any_yard.wait("job-1-1", lambda _status: any(at >= stopped and "job-1-1" in names for at, names in told), 5)
    done.set()
    listener.join(30)
    beats = [at for at, _names in told]
    assert max(late - early for early, late in itertools.pairwise(beats)) < 3, "a heartbeat every second"
    assert any("job-1-1" in names and stopped <= at < ended + 1 for at, names in told)

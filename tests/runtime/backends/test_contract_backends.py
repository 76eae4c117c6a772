"""What every backend keeps (`runtime.backends.base.Backend`), from real runs: one suite over local and Kubernetes.

On Kubernetes it runs on the fake cluster of `tests.kubernetes`, or on the one of KUBECONFIG. How runs end is in
`test_contract_ends.py`.
"""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from runtime.errors import InvalidSpec, RunNotFound
from runtime.specs import Image, Mount, Outcome, Resources, RunPhase, RunSpec, WaitingCode
from tests.kubernetes.yard import ClusterYard
from tests.runtime.any_yard import AnyYard
from tests.runtime.backends.contract import MEET, POLITE, SHOW, STUBBORN, WAIT, seen

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
            "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(nodes * workers), "OMP_NUM_THREADS": "1",
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
    assert (rest.text, rest.eof) == ("saved\n" if any_yard.keeps_output else "", True)


def test_a_log_is_capped_and_the_run_goes_on(any_yard: AnyYard) -> None:
    status = any_yard.run("for _ in range(300): print('x' * 1000)\nprint('done')", log_limit_bytes=10_000)
    assert status.outcome is Outcome.COMPLETED
    log = any_yard.log()
    assert len(log) < 10_500
    assert "has reached its limit of 10000 bytes" in log


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
    if not isinstance(any_yard, ClusterYard):
        with pytest.raises(InvalidSpec) as caught:
            any_yard.backend.submit(spec)
        assert caught.value.field == "nodes"
        assert any_yard.backend.names() == []
        return
    # A cluster may grow: there it waits.
    any_yard.backend.submit(spec)
    status = any_yard.wait(spec.name, lambda status: status.waiting_code == WaitingCode.TOO_LARGE)
    assert (status.phase, status.started_at) == (RunPhase.STARTING, None)
    assert "Insufficient cpu" in status.waiting_for
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

"""The contract of every backend (`runtime.backends.base.Backend`), with real runs on each.

On Kubernetes, the tests use the fake cluster of `tests.kubernetes`, or the cluster of KUBECONFIG. Slurm is a real one.
"""

import contextlib
import dataclasses
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.errors import InvalidSpec, RunNotFound
from runtime.specs import FailureCode, Image, Mount, Outcome, Resources, RunPhase
from tests.console.processes import wait_for
from tests.kubernetes.harness import KubernetesHarness
from tests.runtime.backends.contract import MEET, POLITE, SHOW, STUBBORN, WAIT, seen

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")

# The life of a run


def test_every_rank_sees_the_environment_contract_and_meets_the_others(any_harness):
    nodes, workers = 2, 2
    spec = any_harness.spec(
        SHOW + MEET, nodes=nodes, workers_per_node=workers, epochs=7, lr="0.05", batch_size=48, restart_count=2
    )
    # The dataset is mounted a second time, as the model `net`.
    model = dataclasses.replace(next(mount for mount in spec.mounts if mount.read_only), target="/models/net")
    spec = dataclasses.replace(spec, models=("net",), mounts=(*spec.mounts, model))
    any_harness.backend.submit(spec)
    any_harness.wait_for_outcome(Outcome.COMPLETED)
    ranks = [seen(any_harness, rank) for rank in range(nodes * workers)]
    for rank, view in enumerate(ranks):
        local_rank, environment = rank % workers, view["environment"]
        assert view["argv"] == ["/workspace/train.py", f"--local_rank={local_rank}"]
        assert view["local_rank"] == local_rank
        assert view["cwd"] == view["path"] == "/workspace"
        assert (view["dataset"], view["models"]) == ("3", ["net"])
        assert view["writable"] == ["WORKSPACE", "RUN_DIR", "CHECKPOINT_DIR", "OUTPUT_DIR", "TENSORBOARD_LOGDIR"]
        assert not [name for name in environment if name.startswith(("TRAINYARD", "KUBERNETES", "DJANGO"))]
        # What the variables should be is in tests/runtime/test_contract.py.
        promised = any_harness.backend.environment(spec, rank)
        fixed = promised.keys() - {"MASTER_ADDR", "MASTER_PORT"}  # which are known only once the run has started
        assert {name: environment.get(name) for name in fixed} == {name: promised[name] for name in fixed}
        assert any_harness.log(rank).endswith("total 10\n")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        assert len({view["environment"][name] for view in ranks}) == 1
    assert ranks[0]["environment"]["MASTER_ADDR"].count(".") == 3, "an IP, not a name"


def test_a_run_starts_with_filled_checkpoints_and_reads_but_cannot_write_another_jobs_outputs(any_harness):
    def copy(folder):
        (folder / "epoch-3").mkdir()
        (folder / "epoch-3" / "weights.pt").write_text("three")

    def fail(folder):
        copy(folder)
        raise OSError("full")

    backend = any_harness.backend
    with pytest.raises(OSError, match="full"):
        backend.fill_checkpoints("job-5", fail)
    assert not backend.checkpoint_folder("job-5").exists()
    for _ in range(2):  # the console repeats a call that was interrupted
        backend.fill_checkpoints("job-5", copy)
    code = """
        import os
        path = os.path.join(os.environ["CHECKPOINT_DIR"], "epoch-3", "weights.pt")
        print(open(path).read(), open("/jobs/7/outputs/three").read())
        open(path, "w").write("four")
        open(os.path.join(os.environ["CHECKPOINT_DIR"], "last"), "w").write("4")
        try: open("/jobs/7/outputs/new", "w")
        except OSError: print("refused")
    """
    spec = any_harness.spec(code, checkpoint_key="job-5")
    # The dataset takes the place of the outputs of job 7.
    outputs = dataclasses.replace(spec.mounts[1], target="/jobs/7/outputs")
    backend.submit(dataclasses.replace(spec, mounts=(*spec.mounts, outputs)))
    any_harness.wait_for_outcome(Outcome.COMPLETED)
    assert any_harness.log(0) == "three 3\nrefused\n"
    folder = backend.checkpoint_folder("job-5")
    assert ((folder / "epoch-3" / "weights.pt").read_text(), (folder / "last").read_text()) == ("four", "4")


def test_the_life_of_a_run_that_is_stopped(any_harness):
    """Its phases and times, what it reserves and uses, its output while it runs, and its grace period."""
    backend = any_harness.backend

    def free():
        return sum(machine.free.cpus for machine in backend.capacity().machines)

    before, free_before = time.time(), free()
    spec = any_harness.spec(POLITE, nodes=2)
    backend.submit(spec)
    first = backend.describe("job-1-1")
    assert first.phase in {RunPhase.STARTING, RunPhase.RUNNING}
    assert first.submitted_at == pytest.approx(before, abs=30), "in Unix seconds; a cluster's clock may differ"
    for rank in range(2):
        any_harness.wait_for_text("ready\n", rank=rank)
    running = any_harness.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    assert (running.finished_at, running.outcome, running.waiting_for) == (None, None, "")
    assert [node.phase for node in running.nodes] == [RunPhase.RUNNING] * 2
    assert running.started_at >= int(first.submitted_at), "a cluster's times are whole seconds"
    assert free() == pytest.approx(free_before - 2 * spec.resources.cpus)
    assert backend.names() == backend.names(live=True) == any_harness.new_backend().names() == ["job-1-1"]
    chunk = backend.logs("job-1-1", 0, 0)
    assert (chunk.text, chunk.next_offset, chunk.eof) == ("ready\n", 6, False), "it can be read while the run goes on"
    if any_harness.keeps_output:  # without shared storage there are no samples
        sample = json.loads(wait_for(lambda: backend.samples("job-1-1", 0).text, 60).splitlines()[0])
        # The memory that the node's code uses: not the machine's, and without the files in /tmp if that is on a disk.
        assert 1 << 20 < sample["memory"] < spec.resources.memory_mib << 20
        assert [rank["rank"] for rank in sample["ranks"]] == [0]
        assert abs(sample["at"] - time.time()) < 600
    for seconds in (20, 30):  # the second stop would end the run later, so it changes nothing
        backend.stop("job-1-1", seconds)
    ended = any_harness.wait_for_end()
    assert (ended.outcome, ended.failure.code) == (Outcome.STOPPED, FailureCode.STOPPED)
    assert ended.started_at == running.started_at
    assert ended.finished_at >= ended.started_at
    assert [node.phase for node in ended.nodes] == [RunPhase.ENDED] * 2
    assert [(span.nodes, span.started_at, span.finished_at) for span in ended.spans] == [
        (2, ended.started_at, ended.finished_at)
    ]
    # Without shared storage, the API server has a log only while its pod exists.
    for rank in range(2) if any_harness.keeps_output else ():
        assert any_harness.log(rank) == "ready\nsaved\n"
    assert backend.logs("job-1-1", 0, chunk.next_offset).eof
    any_harness.wait("job-1-1", lambda _status: free() == pytest.approx(free_before))
    backend.stop("job-1-1", 20)
    assert backend.describe("job-1-1") == ended, "an end is final"
    assert (backend.names(), backend.names(live=True)) == (["job-1-1"], [])


def test_concurrent_submissions_start_one_run_whose_name_can_be_used_again(any_harness):
    spec = any_harness.spec("import os\nprint('start', os.environ['RANK'])", nodes=2)
    with ThreadPoolExecutor() as pool:  # each submits as another process of the console would
        for submission in [pool.submit(any_harness.new_backend().submit, spec) for _ in range(4)]:
            submission.result()
    assert any_harness.backend.names() == ["job-1-1"]
    ended = any_harness.wait_for_end()
    any_harness.backend.submit(spec)
    assert any_harness.backend.describe("job-1-1") == ended, "a submission adopts the run in every phase"
    assert ended.outcome is Outcome.COMPLETED
    assert (any_harness.log(0), any_harness.log(1)) == ("start 0\n", "start 1\n")
    any_harness.backend.delete("job-1-1")
    any_harness.complete("print('second')")
    assert any_harness.log() == "second\n"


# Logs


def test_logs_come_in_pieces_at_character_boundaries_and_with_the_time_of_each_line(any_harness):
    text = "é€😀" * 20
    status = any_harness.run(
        f"import sys, time\nsys.stdout.buffer.write('{text}\\n'.encode())\nsys.stdout.flush()\n"
        "time.sleep(1)\nprint('second')"
    )
    logs = any_harness.backend.logs
    pieces, offset = [], 0
    while True:
        chunk = logs("job-1-1", 0, offset, limit=7)
        assert len(chunk.text.encode()) <= 7
        pieces.append(chunk.text)
        offset = chunk.next_offset
        if chunk.eof:
            break
    assert "".join(pieces) == f"{text}\nsecond\n"
    assert logs("job-1-1", 0, offset).text == ""
    # Times are pairs of a line's number in the text and its time.
    first, second = dict(logs("job-1-1", 0, with_times=True).times).values()
    assert second - first == pytest.approx(1, abs=0.5)
    assert status.submitted_at - 1 <= first <= second <= status.finished_at + 1
    assert logs("job-1-1", 0, len(f"{text}\n".encode()), with_times=True).times == ((0, second),)
    assert logs("job-1-1", 0).times is None
    for rank in (-1, 1):
        with pytest.raises(RunNotFound):
            logs("job-1-1", rank)


# Refusals


def test_a_refused_submission_leaves_nothing(any_harness):
    spec = any_harness.spec()
    too_large = ({"resources": Resources(cpus=100_000, memory_mib=256)}, "nodes")
    outside = ({"mounts": (*spec.mounts, Mount("/etc", "/datasets/etc"))}, "mounts")
    for changes, field in (
        ({"nodes": 0}, "nodes"),
        ({"resources": Resources(cpus=0, memory_mib=1024)}, "resources"),
        ({"image": Image(builtin="unheard-of")}, "image"),
        ({"name": "Job_1"}, "name"),
        # A Kubernetes cluster may grow, so it lets a large run wait. It refuses mounts from outside its volume.
        outside if isinstance(any_harness, KubernetesHarness) else too_large,
    ):
        with pytest.raises(InvalidSpec) as caught:
            any_harness.backend.submit(dataclasses.replace(spec, **changes))
        assert caught.value.field == field
        assert any_harness.backend.names() == []
        assert any_harness.left_behind() == []


def test_an_unknown_run_is_not_found(any_harness):
    for call in (any_harness.backend.describe, any_harness.backend.stacks):
        with pytest.raises(RunNotFound):
            call("job-9-1")
    for read in (any_harness.backend.logs, any_harness.backend.samples):
        with pytest.raises(RunNotFound):
            read("job-9-1", 0)
    # These calls have nothing to do, which is no error.
    any_harness.backend.stop("job-9-1", 5)
    any_harness.backend.delete("job-9-1")
    any_harness.backend.delete_shared("job-9")
    # A backend that cannot extend runs refuses to extend any, and names the field.
    with pytest.raises(RunNotFound if any_harness.backend.extends_runs else InvalidSpec) as refused:
        any_harness.backend.extend("job-9-1", 60)
    assert any_harness.backend.extends_runs or refused.value.field == "deadline_seconds"


# The cluster


def test_a_run_can_be_stopped_at_once_and_deleting_a_live_run_leaves_nothing(any_harness):
    any_harness.submit(WAIT, nodes=2)
    any_harness.backend.stop("job-1-1", 5)
    with contextlib.suppress(RunNotFound):  # a stop during the submission removes the run
        assert any_harness.wait_for_end().outcome is Outcome.STOPPED
    any_harness.start(STUBBORN, name="job-2-1", nodes=2, deadline_seconds=3600, grace_seconds=600)
    any_harness.start(STUBBORN, name="job-3-1", deadline_seconds=3600, grace_seconds=600)
    for name in ("job-3-1", "job-3-1", "job-4-1"):  # again, and unknown
        any_harness.backend.kill(name)
        assert name not in any_harness.backend.names(live=True)
    for name in ("job-1-1", "job-2-1", "job-2-1", "job-3-1"):  # the console repeats a deletion that was interrupted
        any_harness.backend.delete(name)
        with pytest.raises(RunNotFound):
            any_harness.backend.describe(name)
    assert any_harness.left_behind() == []
    assert any_harness.backend.names() == []


def test_changes_are_reported_within_a_second(any_harness):
    reports = []
    listening, done = threading.Event(), threading.Event()

    def listen():
        for names in any_harness.new_backend().changes(stop_after_seconds=120):
            listening.set()
            reports.append((time.monotonic(), names))
            if done.is_set():
                return

    listener = threading.Thread(target=listen)
    listener.start()
    assert listening.wait(30)
    any_harness.start(POLITE)
    stopped_at = time.monotonic()
    any_harness.backend.stop("job-1-1", 20)
    any_harness.wait_for_end()
    ended_at = time.monotonic()
    any_harness.wait(
        "job-1-1", lambda _status: any(at >= stopped_at and "job-1-1" in names for at, names in reports), 5
    )
    done.set()
    listener.join(30)
    assert max(late[0] - early[0] for early, late in itertools.pairwise(reports)) < 3, (
        "a heartbeat every second, with room for a busy machine"
    )
    assert any("job-1-1" in names and stopped_at <= at < ended_at + 1 for at, names in reports)


# Ends


UNHURRIED = """
    import signal
    signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
    print("ready", flush=True)
    while True: signal.pause()
"""
"""Reports SIGTERM, and goes on until the end of its grace period."""


def test_the_earlier_of_two_stops_counts(any_harness):
    # Without shared storage, a pod keeps its first grace period, and the test waits for that too.
    grace = 600 if any_harness.keeps_output else 60
    any_harness.start(UNHURRIED, nodes=2, grace_seconds=grace, deadline_seconds=3600)
    any_harness.backend.stop("job-1-1", grace)
    for rank in range(2):
        any_harness.wait_for_text("asked to end", rank=rank)
    assert any_harness.backend.describe("job-1-1").phase is RunPhase.STOPPING
    any_harness.backend.stop("job-1-1", 0)
    any_harness.wait_for_outcome(Outcome.STOPPED)


def test_a_run_ends_at_its_deadline_after_a_grace_period(any_harness):
    """Rank 0 saves when it is asked to end; rank 1 ignores SIGTERM."""
    script = """
    import os, signal, sys
    def leave(*_): sys.exit(print("saved", flush=True))
    signal.signal(signal.SIGTERM, signal.SIG_IGN if int(os.environ["RANK"]) else leave)
    print("ready", flush=True)
    while True: signal.pause()
    """
    ended = any_harness.run(script, nodes=2, deadline_seconds=6, grace_seconds=3)
    assert ended.outcome is Outcome.TIME_LIMIT, any_harness.all_logs("job-1-1")
    assert [any_harness.log(rank) for rank in range(2)] == ["ready\nsaved\n", "ready\n"]
    # SIGTERM comes after 3 s, and SIGKILL at the deadline, which counts from the moment all nodes know each other.
    # A cluster's times are whole seconds.
    assert 2 <= ended.finished_at - ended.started_at <= 7 + any_harness.late_seconds


def test_the_first_failure_is_reported_with_its_rank_and_last_lines(any_harness):
    script = """
    import os, signal, sys
    if os.environ["RANK"] == "3":
        print("about to fail", flush=True)
        sys.exit(7)
    while True:
        signal.pause()
    """
    failure = any_harness.run_to_failure(Outcome.CODE_FAILED, script, nodes=2, workers_per_node=2)
    assert (failure.code, failure.node, failure.rank, failure.exit_code) == (FailureCode.RANK_EXITED, 1, 3, 7)
    assert failure.last_lines == ("about to fail",)
    assert failure.message == "Rank 3 on node 1 exited with code 7."


def test_a_run_that_exceeds_its_memory_is_out_of_memory(any_harness):
    script = """
    import time
    taken = []
    while True:
        taken.append(bytearray(b"x") * (8 << 20))
        time.sleep(0.02)
    """
    failure = any_harness.run_to_failure(Outcome.OUT_OF_MEMORY, script, resources=Resources(cpus=0.25, memory_mib=192))
    assert failure.code is FailureCode.OUT_OF_MEMORY


def test_a_node_that_is_removed_is_lost(any_harness):
    any_harness.start(WAIT, nodes=2)
    any_harness.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    any_harness.lose_node(1)
    assert any_harness.wait_for_failure(Outcome.NODE_LOST).node == 1
    assert any_harness.backend.describe("job-1-1").finished_at is not None


def test_an_elastic_run_goes_on_without_a_lost_node(any_harness):
    script = """
    import os, signal, time
    # A cluster's times are whole seconds, and neither the span of two nodes nor that of one may be empty.
    if os.environ["WORLD_SIZE"] == "2":
        time.sleep(2)
        print("both", flush=True)
        while True:
            signal.pause()
    print("alone after", os.environ["RESTART_COUNT"], flush=True)
    time.sleep(3)
    """
    any_harness.start(script, text="both", nodes=2, min_nodes=1)
    any_harness.wait("job-1-1", lambda status: status.phase is RunPhase.RUNNING)
    any_harness.lose_node(1)
    ended = any_harness.wait_for_outcome(Outcome.COMPLETED)
    assert [span.nodes for span in ended.spans] == [2, 1]
    assert ended.restarts == 1
    assert "alone after 1\n" in any_harness.log(0)

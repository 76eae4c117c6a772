"""The first process of a Pod: how nodes connect, how a run ends, where output goes, and which images it needs."""

import json
import math
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from runtime import launcher
from runtime.backends.kubernetes import launcher_archive
from runtime.backends.kubernetes.logs import extract_rank
from runtime.backends.kubernetes.names import RUN_ROOT_PATH
from runtime.specs import Controller, FailureCode, Framework, Outcome, Resources
from tests.console.processes import children, wait_for
from tests.kubernetes import kubelet
from tests.kubernetes.container import Bind
from tests.kubernetes.images import python_image
from tests.runtime.backends.cluster_runs import NAME
from tests.runtime.backends.contract import MEET, STUBBORN
from tests.runtime.images_of_ours import image_folder

pytestmark = [
    pytest.mark.rerun_if_late("its pods are real processes, with time limits of seconds"),
    pytest.mark.usefixtures("shared_fake"),  # which skips tests on a real cluster
]


def last_record(harness, node=0):
    """Return a node's last record, as its kubelet reports it."""
    (status,) = harness.site.pods(NAME)[node].status.container_statuses
    return json.loads(status.state.terminated.message)


def run_folder(harness):
    return harness.site.root / "runs" / NAME


# How nodes connect


@pytest.fixture
def start_without_names(cluster_harness, shared_fake, monkeypatch):
    """Return a function that starts a run of two nodes whose names do not resolve, and returns once node 1 waits."""
    monkeypatch.setattr(shared_fake, "dns_delay_seconds", math.inf)

    def start(source, **changes):
        cluster_harness.submit(source, nodes=2, **changes)
        wait_for((run_folder(cluster_harness) / "nodes" / "1.json").exists)

    return start


def test_nodes_connect_though_their_names_resolve_late(cluster_harness, shared_fake, start_without_names):
    start_without_names(MEET + "    open('made', 'w').close()")
    assert [cluster_harness.log(rank) for rank in range(2)] == ["", ""]
    shared_fake.dns_delay_seconds = 0
    cluster_harness.wait_for_outcome(Outcome.COMPLETED)
    assert [cluster_harness.log(rank) for rank in range(2)] == ["total 3\n"] * 2
    of_the_run = (run_folder(cluster_harness) / name for name in ("logs/rank-0.log", "nodes/0.json"))
    for path in (*of_the_run, cluster_harness.site.root / "workspace" / "made"):
        assert path.stat().st_mode & 0o060 == 0o060, f"{path} can be read and written by the group"


def test_names_that_never_resolve_end_the_start(cluster_harness, start_without_names):
    # The limits for Pods to be scheduled and to start. The nodes have their sum, 2 s, to meet.
    cluster_harness.backend = cluster_harness.new_backend(gang_seconds=1, start_seconds=1)
    start_without_names(MEET)
    assert cluster_harness.wait_for_failure(Outcome.PLATFORM_ERROR).code is FailureCode.NODES_NOT_MET


def test_a_run_is_stopped_while_its_nodes_connect(cluster_harness, start_without_names):
    start_without_names(STUBBORN)
    cluster_harness.backend.stop(NAME, 5)
    cluster_harness.wait_for_failure(Outcome.STOPPED)
    assert cluster_harness.log() == "", "no rank has started"


# How a run ends


def test_a_hang_in_a_pod_is_reported_with_stacks(cluster_harness):
    source = """
    import threading
    print("before the lock", flush=True)
    threading.Lock().acquire() and threading.Event().wait()
    """
    failure = cluster_harness.run_to_failure(Outcome.HUNG, source, nodes=2, hang_seconds=3)
    assert failure.data["seconds"] >= 3
    stacks = cluster_harness.backend.stacks(NAME)
    assert ["train.py" in stacks[rank] for rank in range(2)] == [True, True]


def test_an_elastic_run_continues_without_a_lost_pod(cluster_harness, shared_fake):
    source = """
    import os, signal, subprocess, sys
    mine = [os.getpid(), os.getppid(), 1]
    print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["RESTART_COUNT"], os.environ["MASTER_ADDR"])
    if os.environ["RESTART_COUNT"] == "0":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("ready", flush=True)
        while True: signal.pause()
    print("others", [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in mine])
    """
    cluster_harness.start(source, nodes=3, min_nodes=2)
    shared_fake.containers()[1].kill()
    status = cluster_harness.wait_for_end()
    assert (status.outcome, status.restarts) == (Outcome.COMPLETED, 1), cluster_harness.all_logs(NAME)
    # Node 2 now has rank 1 of 2, after one restart.
    assert f"1 2 1 {cluster_harness.site.pods(NAME)[0].status.pod_ip}" in cluster_harness.log(2)
    assert "others []" in cluster_harness.log(2), "no process of the earlier round is left"


WRITE_A_LARGE_FILE = """
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/large", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 400 << 20)  # more than the logs and samples of 3 nodes may have
"""
WRITE_MANY_FILES = """
    for number in range(300):
        open(f"{folder}/{number}", "wb").close()
"""


@pytest.mark.parametrize(
    ("rank", "folder", "write"),
    [
        (0, "/trainyard/run", WRITE_A_LARGE_FILE),
        (0, "/trainyard/run-root/new", WRITE_A_LARGE_FILE),
        (1, "/tmp", WRITE_MANY_FILES),  # the disk of its machine
    ],
    ids=["RUN_DIR", "beside RUN_DIR", "many files in /tmp"],
)
def test_a_pod_that_exceeds_its_disk_limit_is_ended(cluster_harness, rank, folder, write):
    """The other nodes of the elastic run must not take it for lost: they would continue without it."""
    source = f"import os, time\nfolder = {folder!r}\nif os.environ['RANK'] == '{rank}':{write}\ntime.sleep(600)\n"
    resources = Resources(cpus=0.25, memory_mib=256, disk_mib=1)
    failure = cluster_harness.run_to_failure(Outcome.DISK_FULL, source, nodes=3, min_nodes=1, resources=resources)
    assert failure.code is FailureCode.DISK_FULL
    assert cluster_harness.backend.describe(NAME).restarts == 0


def test_two_ranks_that_die_at_once_are_both_reported(own_harness, fake):
    """Node 1's launcher is paused until both ranks are dead. It still reports that rank 1 died."""
    source = """
    import os, pathlib, signal, time
    print("ready", flush=True)
    while os.environ["RANK"] == "1": signal.pause()
    while not pathlib.Path("go").exists(): time.sleep(0.01)
    raise SystemExit(1)
    """
    own_harness.start(source, nodes=2)
    fake.controllers.paused.set()  # the Job's controller would stop the other Pod
    first, second = fake.containers()
    (launcher,) = children(second.pid)
    (rank,) = children(launcher)
    os.kill(launcher, signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    (own_harness.site.root / "workspace" / "go").touch()
    assert first.ended.wait(60)
    os.kill(launcher, signal.SIGCONT)
    wait_for(lambda: {pod.status.phase for pod in own_harness.site.pods(NAME)} == {"Failed"})
    causes = [last_record(own_harness, node)["causes"] for node in range(2)]
    assert [(cause["rank"], cause["exit_code"]) for cause in causes[0]] == [(0, 1)]
    assert [(cause["rank"], cause["signal"]) for cause in causes[1]] == [(1, "SIGKILL")]
    fake.controllers.paused.clear()


# Where output goes


def test_the_log_file_and_stdout_get_the_same_bytes_up_to_the_limit(cluster_harness, shared_fake):
    """Rank 0 prints random pieces, and rank 1 more than the limit."""
    chance = random.Random(0)
    pieces = [
        chance.randbytes(chance.choice([1, 30, 4000, 20000])).replace(b"\n", b"\r")  # so that some lines are long
        + chance.choice([b"", b"\n", b"\n\n"])
        for _ in range(300)
    ]
    pieces.append(b"no end")
    cluster_harness.write({"workspace/pieces.json": json.dumps([piece.decode("latin-1") for piece in pieces])})
    source = """
    import json, os, sys
    if os.environ["RANK"] == "1":
        for number in range(200_000): print("a line that is one of very many", number)
        sys.exit()
    for piece in json.load(open("pieces.json")):
        sys.stdout.buffer.write(piece.encode("latin-1"))
        sys.stdout.buffer.flush()
    """
    limit = 4 << 20
    cluster_harness.complete(source, workers_per_node=2, log_limit_bytes=limit)
    stored, cut = ((run_folder(cluster_harness) / "logs" / f"rank-{rank}.log").read_bytes() for rank in range(2))
    assert stored == b"".join(pieces)
    assert len(cut) < limit + 1000  # the launcher's own line, of at most 1000 bytes, comes on top of the limit
    assert b"[trainyard] This rank's log has reached its limit" in cut
    (container,) = shared_fake.containers()
    for rank, content in enumerate((stored, cut)):
        assert extract_rank([container.output()], rank, offset=0, limit=2 * limit)[0] == content


@pytest.mark.slow
def test_unwritable_storage_is_reported_and_not_fatal(cluster_harness, shared_fake, monkeypatch):
    def binds(*arguments):
        """Give the Pod 64 KiB of memory for its run's folder, which the output exceeds."""
        return tuple(
            Bind(bind.target, tmpfs_bytes=1 << 16) if bind.target == RUN_ROOT_PATH else bind
            for bind in kubelet_binds(*arguments)
        )

    kubelet_binds = kubelet.binds
    monkeypatch.setattr(kubelet, "binds", binds)
    cluster_harness.complete("for number in range(10_000): print('a line', number)")
    assert "No space left on device" in last_record(cluster_harness)["detail"]
    (container,) = shared_fake.containers()
    assert extract_rank([container.output()], rank=0, offset=0, limit=1 << 20)[0].endswith(b"a line 9999\n")


# Sources for the launcher's `__main__.py` in the Pod: writes that never return, as on storage that does not respond.
HELD_OUTPUT = "from launcher.ranklog import RankLog; RankLog._append = lambda self, data: time.sleep(1000)"
HELD_RECORD = """
from launcher.record import Record
write = Record._write
Record._write = lambda self: time.sleep(1000) if self.phase == "ended" else write(self)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held", "source", "outcome"),
    [
        (HELD_OUTPUT, "print('held', flush=True); import time; time.sleep(600)", Outcome.TIME_LIMIT),
        (HELD_RECORD, "print('fine')", Outcome.COMPLETED),
    ],
    ids=["while it runs", "at its last record"],
)
def test_blocked_storage_does_not_delay_the_end_of_a_run(cluster_harness, monkeypatch, held, source, outcome):
    # `build` caches the launcher's archive. So pack another one, whose `__main__.py` begins with `held`.
    monkeypatch.setattr(launcher_archive, "_MAIN", f"import time\n{held}\n{launcher_archive._MAIN}")
    archive = launcher_archive.pack(Path(launcher.__file__).parent)
    monkeypatch.setattr(launcher_archive, "build", lambda: archive)
    assert cluster_harness.run(source, deadline_seconds=3).outcome is outcome, cluster_harness.all_logs(NAME)
    # In the second case, the kubelet has the whole record before the write to storage blocks.
    assert ("did not respond" in last_record(cluster_harness)["detail"]) is (outcome is Outcome.TIME_LIMIT)


# Images with other interpreters and real frameworks

INTERPRETERS = {
    minor: path
    for pattern in (".pyenv/versions/3.*", ".local/share/uv/python/*")
    for path in Path.home().glob(pattern)
    if (minor := int(path.name.removeprefix("cpython-").split(".")[1])) >= 8
}
"""The folders of this user's interpreters, by their minor version."""


@pytest.fixture
def use_folder(cluster_harness, shared_fake):
    """Return a function that lets runs use an image with this folder in place of the image `bare`."""

    def use(folder):
        shared_fake.registry.images["r.example.com/folder:1"] = python_image(folder)
        cluster_harness.backend = cluster_harness.new_backend(images={"bare": "r.example.com/folder:1"})

    return use


def test_horovod_reaches_the_store_of_the_first_pod_from_the_oldest_python(cluster_harness, use_folder):
    """Horovod's store and the samples need modules of the archive that other runs do not import."""
    if INTERPRETERS:  # otherwise, this is the interpreter of the tests
        use_folder(INTERPRETERS[min(INTERPRETERS)])
    source = """
    import os, sys, time, urllib.request
    place = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}/scope/key".format(**os.environ)
    urllib.request.urlopen(urllib.request.Request(place, data=b"value", method="PUT"))
    print(os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], urllib.request.urlopen(place).read(), sys.version_info[1])
    while not os.path.exists("/trainyard/run-root/nodes/0.samples.jsonl"): time.sleep(0.05)
    """
    cluster_harness.complete(source, nodes=2, framework=Framework.HOROVOD)
    minor = min(INTERPRETERS, default=sys.version_info.minor)
    address = cluster_harness.site.pods(NAME)[0].status.pod_ip
    assert cluster_harness.log(1) == f"{address} b'value' {minor}\n"


@pytest.mark.slow
@pytest.mark.cores(2)
@pytest.mark.torch
def test_mpi_starts_ranks_in_other_pods_without_ssh(cluster_harness, use_folder):
    use_folder(image_folder("horovod"))
    source = """
    import os
    import horovod.torch as hvd, torch
    NAMES = ("OMPI_COMM_WORLD_RANK", "NODE_RANK")
    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
    print("total", total.item(), hvd.rank(), hvd.size(), *map(os.environ.get, NAMES))
    """
    mpi = {"framework": Framework.HOROVOD, "controller": Controller.MPI}
    cluster_harness.complete(source, nodes=2, resources=Resources(cpus=0.5, memory_mib=2048), **mpi)
    for rank in range(2):
        assert f"total 3.0 {rank} 2 {rank} {rank}\n" in cluster_harness.log(rank)

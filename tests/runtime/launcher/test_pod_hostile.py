"""Code that attacks the pod it runs in: it shares its user and its files with the process that bills it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.backends.outcome import merge
from runtime.launcher.signed import read_record, sign_record
from runtime.specs import Outcome
from tests.runtime.launcher.pods import KEY, RUN, TOKEN, Cluster, has_bubblewrap

pytestmark = pytest.mark.skipif(not has_bubblewrap(), reason="needs bubblewrap")

FIND_LAUNCHER = """
import os, signal, time
launcher = os.getppid()
assert launcher != 1
print("launcher", launcher, flush=True)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_the_keys_are_out_of_reach(cluster: Cluster) -> None:
    source = """
    import glob, os
    def look(path):
        try:
            if os.path.isdir(path):
                return [os.readlink(entry) for entry in glob.glob(path + "/*")] or "empty"
            return open(path, "rb").read()
        except OSError as error:
            return error.strerror
    for pid in (1, os.getppid()):
        for name in ("environ", "mem", "fd", "cwd", "maps"):
            print(pid == 1, name, look("/proc/{}/{}".format(pid, name)))
    seen = b""
    for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
        try:
            seen += open(path, "rb").read()
        except OSError:
            pass
    for folder in ("/trainyard", "/tmp", "/dev/shm", "/workspace"):
        for place, _folders, names in os.walk(folder):
            for name in names:
                try:
                    seen += open(os.path.join(place, name), "rb").read()
                except OSError:
                    pass
    print("seen", b"of_the_image" in seen.lower(), b"the-" + b"runs-token" in seen, b"the-" + b"records-key" in seen)
    """
    (pod,) = cluster.start(source)
    assert pod.wait() == 0
    lines = cluster.log().splitlines()
    assert lines.pop() == "seen True False False"
    assert all(line.endswith(("Permission denied", "empty")) for line in lines), lines
    assert len(lines) == 10
    assert TOKEN == "the-runs-token"
    assert KEY == "the-records-key"


def test_the_first_process_can_be_neither_killed_nor_stopped_nor_ended_from_inside(cluster: Cluster) -> None:
    source = """
    import ctypes, os, signal, struct
    for number in list(range(1, 32)) + [34, 50, 64]:
        try:
            os.kill(1, number)
        except OSError as error:
            print(number, error)
    libc = ctypes.CDLL(None, use_errno=True)
    # SIGTERM that says it came from pid 0: with the code of an ordinary kill the kernel refuses that.
    for code in (0, -1):
        told = ctypes.create_string_buffer(struct.pack("iiiiiI", signal.SIGTERM, 0, code, 0, 0, 0), 128)
        print("queued", code, libc.syscall(129, 1, int(signal.SIGTERM), told))
    # As a file's owner for its signals.
    import fcntl
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, 1)
    fcntl.fcntl(reading, 10, int(signal.SIGTERM))
    fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | os.O_ASYNC)
    os.write(writing, b"x")
    import time
    time.sleep(1)
    print("alive")
    """
    (pod,) = cluster.start(source)
    assert pod.wait() == 0
    assert pod.record["causes"] == []
    assert cluster.log().splitlines() == ["queued 0 -1", "queued -1 0", "alive"]


@pytest.mark.parametrize("what", ["SIGKILL", "SIGTERM", "SIGSEGV"])
def test_code_that_kills_its_launcher_has_failed_itself(cluster: Cluster, what: str) -> None:
    source = FIND_LAUNCHER + f"if os.environ['RANK'] == '1': os.kill(launcher, signal.{what})\ntime.sleep(600)"
    (other, pod) = cluster.start(source, 2)
    assert cluster.wait() == [1, 1]
    assert pod.causes == [("code_failed", "launcher_killed")]
    assert other.causes == [("node_lost", "node_lost")]
    status = merge(RUN, 0.0, [{**one.record, "alive": False} for one in (other, pod)])
    assert (status.outcome, status.failure and status.failure.node) == (Outcome.CODE_FAILED, 1), "the loss is an echo"


def test_code_that_stops_its_launcher_has_failed_itself(cluster: Cluster) -> None:
    (pod,) = cluster.start(FIND_LAUNCHER + "os.kill(launcher, signal.SIGSTOP)\ntime.sleep(600)")
    assert pod.wait(40) == 1
    assert pod.causes == [("code_failed", "launcher_killed")]


def test_forged_records_are_none_and_the_true_one_follows(cluster: Cluster) -> None:
    source = """
    import glob, json, os, time
    causes = [{"kind": "node_lost", "code": "node_lost", "at": 1.5, "node": 0}]
    forged = {"run": os.environ["TORCHELASTIC_RUN_ID"], "node": 0, "phase": "ended", "started_at": 1.0,
        "finished_at": 2.0, "exit_code": None, "causes": causes}
    text = json.dumps(forged)[:-1] + ',"signature":"' + "0" * 64 + '"}'
    for path in ("/dev/termination-log", "/trainyard/run-root/nodes/0.json"):
        open(path, "w").write(text)
    print("forged", flush=True)
    time.sleep(600)
    """
    (pod,) = cluster.start(source)
    cluster.wait_for_text("forged")
    assert read_record(pod.termination.read_bytes(), KEY, run=RUN, node=0) is None
    pod.signal(signal.SIGTERM)
    assert pod.wait(30) == 1
    assert pod.causes == [("stopped", "stopped")]
    assert read_record((cluster.root / "nodes" / "0.json").read_bytes(), KEY, run=RUN, node=0) == pod.record


def test_whatever_lies_in_place_of_its_files_keeps_nobody_waiting(cluster: Cluster) -> None:
    source = """
    import os, shutil, time
    root = "/trainyard/run-root"
    shutil.rmtree(root + "/nodes")
    shutil.rmtree(root + "/logs")
    os.mkdir(root + "/nodes")
    os.mkdir(root + "/nodes/0.json")
    os.mkdir(root + "/nodes/0.json/full")
    os.mkfifo(root + "/nodes/0.samples.jsonl")
    os.mkdir(root + "/logs")
    os.mkfifo(root + "/logs/stacks-0.txt")
    os.mkfifo(os.environ["METRICS_FILE"])
    print("done", flush=True)
    time.sleep(600)
    """
    (pod,) = cluster.start(source, plan={"hang_seconds": 4}, deadline_seconds=40)
    assert pod.wait(60) == 1
    assert pod.causes == [("hung", "hung")]
    assert "0\tdone" in pod.printed()
    assert (cluster.root / "logs" / "stacks-0.txt").is_fifo()


def test_what_a_rank_leaves_behind_is_reaped_and_ends_with_the_pod(cluster: Cluster) -> None:
    source = """
    import os, sys, time
    mark = "left-behind-by-" + os.environ["TORCHELASTIC_RUN_ID"]
    for number in range(20):
        if not os.fork():
            os.setsid()
            if not os.fork() and number == 0:
                os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", mark])
            os._exit(0)
        os.wait()
    def dead():
        found = []
        for name in os.listdir("/proc"):
            try:
                fields = open("/proc/" + name + "/stat").read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] == "Z":
                found.append(name)
        return found
    while dead(): time.sleep(0.02)
    print("reaped")
    """
    (pod,) = cluster.start(source)
    assert pod.wait(30) == 0
    assert cluster.log() == "reaped\n"
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    assert not [line for line in lines if f"left-behind-by-{RUN}".encode() in line]


def test_what_its_ranks_run_is_no_way_into_the_launcher(cluster: Cluster) -> None:
    """The wrapper lies where the code can write; the launcher's own modules, some imported late, do not."""
    source = """
    import os, sys
    wrapper = "/tmp/.trainyard/rank.py"
    print(sorted(os.listdir(os.path.dirname(wrapper))))
    for name in ("watch", "stacks", "rendezvous", "mpi"):
        open(os.path.join(os.path.dirname(wrapper), name + ".py"), "w").write("raise SystemExit(9)")
    try:
        open("/trainyard/launcher/launcher.pyz", "ab")
    except OSError as error:
        print(error.strerror)
    import time
    time.sleep(2.5)
    """
    (pod,) = cluster.start(source)
    assert pod.wait() == 0
    assert cluster.log().splitlines() == ["['rank.py', 'steps.py']", "Read-only file system"]
    samples = (cluster.root / "nodes" / "0.samples.jsonl").read_text().splitlines()
    assert json.loads(samples[0])["at"] > 0, "what is imported late came from the archive"


def test_a_record_of_another_node_or_run_is_none(cluster: Cluster) -> None:
    (pod, other) = cluster.start("print('ok')", 2)
    assert cluster.wait() == [0, 0]
    assert read_record(pod.termination.read_bytes(), KEY, run=RUN, node=1) is None
    assert read_record(other.termination.read_bytes(), KEY, run="job-7-2", node=1) is None
    assert read_record(other.termination.read_bytes(), "another key", run=RUN, node=1) is None
    signed = sign_record({"run": RUN, "node": 1, "at": time.time()}, KEY)
    assert read_record(signed.replace(b'"node":1', b'"node":0'), KEY, run=RUN, node=0) is None

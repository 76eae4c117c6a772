"""Code that attacks its own Pod. It shares its user and its files with the process that bills it."""

import json
import os
import signal
from pathlib import Path

import pytest

from runtime.backends.supervision.outcome import merge
from runtime.launcher.signed_record import read_record
from runtime.specs import Outcome
from tests.runtime.launcher.pods import KEY, RUN, TOKEN

pytestmark = pytest.mark.late("its pods are real processes, with time limits of seconds")

WAIT = """
import os, signal
assert os.getppid() != 1
print("ready", flush=True)
while True: signal.pause()
"""


def test_code_cannot_read_the_keys(cluster):
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


def test_code_cannot_signal_the_first_process(cluster):
    source = """
    import ctypes, os, signal, struct
    refused = 0
    for target in (1, os.getppid(), -os.getppid(), -1):
        for number in list(range(1, 32)) + [34, 50, 64]:
            try:
                os.kill(target, number)
            except OSError:
                refused += 1
    print("refused", refused)
    libc = ctypes.CDLL(None, use_errno=True)
    # SIGTERM that says it came from pid 0.
    for code in (0, -1):
        told = ctypes.create_string_buffer(struct.pack("iiiiiI", signal.SIGTERM, 0, code, 0, 0, 0), 128)
        print("queued", code, libc.syscall(129, 1, int(signal.SIGTERM), told))
    # As a file's owner for its signals.
    import fcntl
    reading, writing = os.pipe()
    try:
        fcntl.fcntl(reading, fcntl.F_SETOWN, 1)
    except OSError as error:
        print(error.strerror)
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
    reported = cluster.log().splitlines()
    assert reported == ["refused 136", "queued 0 -1", "queued -1 -1", "Operation not permitted", "alive"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_launcher_is_a_code_failure(cluster, number):
    """The signal comes from outside, because the system call filter stops code from sending it."""
    (other, pod) = cluster.start(WAIT, 2)
    for rank in range(2):
        cluster.wait_for_text("ready", rank=rank)
    os.kill(pod.launcher, number)
    assert cluster.wait() == [1, 1]
    assert pod.causes == [("code_failed", "launcher_killed")]
    assert other.causes == [("node_lost", "node_lost")]
    status = merge(RUN, 0.0, [{**one.record, "alive": False} for one in (other, pod)])
    assert (status.outcome, status.failure and status.failure.node) == (Outcome.CODE_FAILED, 1), "the loss is an echo"


@pytest.mark.slow
def test_a_stopped_launcher_in_a_pod_is_a_code_failure(cluster):
    (pod,) = cluster.start(WAIT)
    cluster.wait_for_text("ready")
    os.kill(pod.launcher, signal.SIGSTOP)
    assert pod.wait(40) == 1
    assert pod.causes == [("code_failed", "launcher_killed")]


def test_forged_records_are_ignored(cluster):
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
    assert read_record(pod.termination.read_bytes(), KEY, run_name=RUN, node=0) is None
    pod.signal(signal.SIGTERM)
    assert pod.wait(30) == 1
    assert pod.causes == [("stopped", "stopped")]
    assert read_record((cluster.root / "nodes" / "0.json").read_bytes(), KEY, run_name=RUN, node=0) == pod.record


@pytest.mark.slow
def test_special_files_in_place_of_records_block_nothing(cluster):
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


def test_orphaned_processes_are_reaped_and_end_with_the_pod(cluster):
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


def test_code_cannot_replace_the_launchers_modules(cluster):
    """Code can write to the wrapper's folder, but not to the launcher's modules, of which some are imported late."""
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
    assert cluster.log().splitlines() == ["['rank.py', 'step_timer.py']", "Read-only file system"]
    samples = (cluster.root / "nodes" / "0.samples.jsonl").read_text().splitlines()
    assert json.loads(samples[0])["at"] > 0, "what is imported late came from the archive"

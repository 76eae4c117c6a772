"""Code that attacks its own Pod. It shares its user and its files with the process that bills it."""

import base64
import json
import os
import signal
from pathlib import Path

import pytest

from runtime.specs import FailureCode, Outcome, RunPhase
from tests.console.processes import children
from tests.runtime.backends.cluster_runs import NAME
from tests.runtime.backends.contract import WAIT

pytestmark = [
    pytest.mark.rerun_if_late("its pods are real processes, with time limits of seconds"),
    pytest.mark.usefixtures("shared_fake"),  # which skips tests on a real cluster
]


def test_code_cannot_read_the_keys_signal_the_first_process_or_replace_the_launchers_modules(
    cluster_harness, shared_fake
):
    """Code can write to the folder of `rank.py`, the wrapper that runs its script.

    It cannot write to the archive with the launcher's modules, of which the launcher imports some only later.
    """
    source = """
    import ctypes, fcntl, glob, json, os, re, signal, struct, time
    def look(path):
        try:
            if os.path.isdir(path):
                return [os.readlink(entry) for entry in glob.glob(path + "/*")] or "empty"
            return open(path, "rb").read()
        except OSError as error:
            return error.strerror
    found = {"looked": [
        str(look("/proc/{}/{}".format(pid, name)))
        for pid in (1, os.getppid()) for name in ("environ", "mem", "fd", "cwd", "maps")
    ]}
    seen = b""
    paths = glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline")
    for folder in ("/trainyard", "/tmp", "/dev/shm", "/workspace"):
        paths += [os.path.join(place, name) for place, _folders, names in os.walk(folder) for name in names]
    for path in paths:
        try:
            seen += open(path, "rb").read()
        except OSError:
            pass
    found["digests"] = re.findall("[0-9a-f]{64}", seen.decode("latin-1"))
    found["refused"] = 0
    for target in (1, os.getppid(), -os.getppid(), -1):
        for number in list(range(1, 32)) + [34, 50, 64]:
            try:
                os.kill(target, number)
            except OSError:
                found["refused"] += 1
    libc = ctypes.CDLL(None, use_errno=True)
    # SIGTERM that claims to come from pid 0, as a kubelet's does. The codes are SI_USER and SI_QUEUE.
    infos = [struct.pack("iiiiiI", signal.SIGTERM, 0, code, 0, 0, 0) for code in (0, -1)]
    infos = [ctypes.create_string_buffer(each, 128) for each in infos]
    found["queued"] = [libc.syscall(129, 1, int(signal.SIGTERM), each) for each in infos]  # rt_sigqueueinfo
    # The kernel signals a file's owner.
    reading, writing = os.pipe()
    try:
        fcntl.fcntl(reading, fcntl.F_SETOWN, 1)
    except OSError as error:
        found["owner"] = error.strerror
    fcntl.fcntl(reading, 10, int(signal.SIGTERM))  # F_SETSIG
    fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | os.O_ASYNC)
    os.write(writing, b"x")
    wrapper = "/tmp/.trainyard/rank.py"
    found["beside"] = sorted(os.listdir(os.path.dirname(wrapper)))
    for name in ("watch", "stacks", "rendezvous", "mpi"):
        open(os.path.join(os.path.dirname(wrapper), name + ".py"), "w").write("raise SystemExit(9)")
    try:
        open("/trainyard/launcher/launcher.pyz", "ab")
    except OSError as error:
        found["archive"] = error.strerror
    time.sleep(2.5)  # meanwhile the launcher takes a sample, for which it imports modules
    print(json.dumps(found))
    """
    cluster_harness.complete(source)
    found = json.loads(cluster_harness.log())
    looked = found.pop("looked")
    assert len(looked) == 10, "five files of each of two processes"
    # "empty", because `glob` finds nothing in a folder that it cannot read.
    assert set(looked) <= {"Permission denied", "empty"}
    secret = shared_fake.store.get("secrets", cluster_harness.site.namespace, NAME)["data"]
    assert found["digests"], "at least the record's signature, which is public and as long as a key"
    assert not {base64.b64decode(key).decode() for key in secret.values()} & set(found.pop("digests"))
    assert found.pop("archive") in {"Permission denied", "Read-only file system"}
    assert found == {
        "refused": 136,  # all: 34 signals to each of 4 targets
        "queued": [-1, -1],
        "owner": "Operation not permitted",
        "beside": ["rank.py", "step_timer.py"],
    }
    sample = cluster_harness.backend.samples(NAME, 0).text.splitlines()[0]
    assert json.loads(sample)["at"] > 0, "the launcher imports what takes samples late, and from the archive"


def test_a_killed_launcher_is_a_code_failure(cluster_harness, shared_fake):
    """The signal comes from outside, because the system call filter stops code from sending it."""
    cluster_harness.start(WAIT, nodes=2)
    (launcher,) = children(shared_fake.containers()[1].pid)
    os.kill(launcher, signal.SIGKILL)
    failure = cluster_harness.wait_for_failure(Outcome.CODE_FAILED)
    assert (failure.code, failure.node) == (FailureCode.LAUNCHER_KILLED, 1), "the lost connection on node 0 is an echo"


def test_forged_records_are_ignored(cluster_harness):
    """The forged record says that the node was lost, which would make the run free."""
    source = """
    import json, os, time
    causes = [{"kind": "node_lost", "code": "node_lost", "at": 1.5, "node": 0}]
    forged = {"run": os.environ["TORCHELASTIC_RUN_ID"], "node": 0, "phase": "ended", "started_at": 1.0,
        "finished_at": 2.0, "exit_code": None, "causes": causes}
    text = json.dumps(forged)[:-1] + ',"signature":"' + "0" * 64 + '"}'
    for path in ("/dev/termination-log", "/trainyard/run-root/nodes/0.json"):
        open(path, "w").write(text)
    print("forged", flush=True)
    time.sleep(600)
    """
    cluster_harness.start(source, text="forged")
    assert cluster_harness.new_backend().describe(NAME).phase is RunPhase.RUNNING
    cluster_harness.backend.stop(NAME, 1)
    cluster_harness.wait_for_failure(Outcome.STOPPED)


@pytest.mark.slow
def test_special_files_in_place_of_records_block_nothing(cluster_harness, shared_fake):
    """Opening a FIFO could block the platform for ever, and no file can replace a folder that is not empty."""
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
    cluster_harness.run_to_failure(Outcome.HUNG, source, hang_seconds=4, deadline_seconds=40)
    (container,) = shared_fake.containers()
    assert b"0\tdone\n" in container.output()  # a line of rank 0
    assert (cluster_harness.site.root / "runs" / NAME / "logs" / "stacks-0.txt").is_fifo()


def test_orphaned_processes_are_reaped_and_end_with_the_pod(cluster_harness):
    source = """
    import os, sys, time
    for number in range(20):
        if not os.fork():
            os.setsid()
            if not os.fork() and number == 0:
                os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "left behind"])
            os._exit(0)
        os.wait()
    def zombies():
        found = []
        for name in os.listdir("/proc"):
            try:
                fields = open("/proc/" + name + "/stat").read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] == "Z":
                found.append(name)
        return found
    while zombies(): time.sleep(0.02)
    print("reaped")
    """
    cluster_harness.complete(source)
    assert cluster_harness.log() == "reaped\n"
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    assert not [line for line in lines if b"left behind" in line]

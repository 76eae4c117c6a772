"""Hostile scripts: a run uses no more than was bought, and leaves nothing that keeps others from running."""

import json
import resource
import threading
from pathlib import Path

import pytest

from runtime.backends.supervision import cgroups
from runtime.specs import FailureCode, Outcome, Resources
from runtime.trash import Trash, remove_tree

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")


def with_disk(disk_mib):
    return Resources(cpus=1, memory_mib=512, disk_mib=disk_mib)


def test_limits_can_be_lowered_and_hold_for_one_file_too(harness):
    script = """
    import os, resource
    with open(os.environ["RANK"], "wb", buffering=0) as file:
        file.seek((512 << 20) - 1)  # a gap, which takes no space
        for _ in range(2):  # the first write ends exactly at the limit
            try: print(file.write(b"x"))
            except OSError as error: print(error.strerror)
    for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE"):
        hard = resource.getrlimit(getattr(resource, name))[1]
        try:
            resource.setrlimit(getattr(resource, name), (hard, hard + 1))
            print("raised", name)
        except (OSError, ValueError):
            resource.setrlimit(getattr(resource, name), (0, hard))
    print("lowered")
    """
    harness.complete(script, workers_per_node=2, resources=with_disk(disk_mib=512))
    assert harness.log(1) == "1\nFile too large\nlowered\n"


WRITES = {
    "bytes": """
    for number in range(10 ** 6):
        with open(os.path.join(os.environ["RUN_DIR"], str(number)), "wb") as file: file.write(bytes(1 << 20))
        time.sleep(0.02)
    """,
    "files without a name": """
    held = []
    for number in range(64):
        file = open(os.path.join(os.environ["CHECKPOINT_DIR"], "file"), "wb")
        os.unlink(file.name)
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        held.append(file)
    """,
    # Each file counts as at least 4 KiB.
    "names": """
    for number in range(20_000): open(os.path.join(os.environ["OUTPUT_DIR"], str(number)), "wb").close()
    """,
    # Folders that are too deep to be measured.
    "deep folders": """
    os.chdir(os.environ["WORKSPACE"])
    for _ in range(300):
        os.mkdir("d")
        os.chdir("d")
    """,
}
"""Scripts that write too much, each to another folder that a run may write to."""


@pytest.mark.parametrize(
    "what", [name if name == "bytes" else pytest.param(name, marks=pytest.mark.slow) for name in WRITES]
)
def test_a_run_that_writes_too_much_is_ended(harness, what):
    script = "    import os, signal, time" + WRITES[what] + "while True: signal.pause()\n"
    failure = harness.run_to_failure(Outcome.DISK_FULL, script, resources=with_disk(disk_mib=20))
    assert (failure.code, failure.data["limit_mib"]) == (FailureCode.DISK_FULL, 20)
    assert (failure.data["used_mib"] > 20) is ("deep" not in what), "the depth alone ends a run"
    remove_tree(harness.workspace / "d")  # it is too deep for the cleanup of pytest


@pytest.mark.slow
def test_a_run_writes_no_more_than_the_storage_quota_has_left(harness):
    script = "import time\nopen('big', 'wb').write(bytes(40 << 20))\ntime.sleep(60)"
    failure = harness.run_to_failure(Outcome.DISK_FULL, script, storage_left_mib=4)
    assert (failure.data["limit_mib"], failure.data["by_quota"]) == (4, True)
    harness.complete("print('nothing is written')", name="job-2-1", storage_left_mib=0)


def test_data_in_sockets_is_limited_like_memory(harness):
    """Version 1 of control groups does not count it as memory, so a run could store more there than it bought."""
    if cgroups.unavailable_reason():
        pytest.fail("the tests need control groups: run them as root")
    script = """
    import socket, threading
    held, kept = 0, []
    server = socket.create_server(("127.0.0.1", 0), backlog=128)
    for _ in range(48):
        one = socket.create_connection(server.getsockname())
        other, _address = server.accept()
        one.setblocking(False)
        kept += [one, other]
        try:
            while True: held += one.send(bytes(1 << 16))
        except BlockingIOError: pass
    print(held >> 20, flush=True)
    del kept[2:]  # closes all connections but the first, which gives their memory back
    kept[0].setblocking(True)
    threading.Thread(target=lambda: kept[0].sendall(bytes(4 << 20)), daemon=True).start()
    got = 0
    while got < 4 << 20: got += len(kept[1].recv(1 << 16))
    print("given back")
    """
    harness.complete(script, resources=Resources(cpus=1, memory_mib=256))
    held, rest = harness.log().splitlines()
    assert int(held) <= 64, "16 MiB (a sixteenth of its memory), and about 1 MiB for each of the 48 connections"
    assert rest == "given back"


def test_the_kernel_limits_cpu_memory_and_processes(harness):
    if cgroups.unavailable_reason():
        pytest.fail("the tests need control groups: run them as root")
    harness.start("import signal\nprint('ready')\nsignal.pause()", resources=Resources(cpus=0.5, memory_mib=300))
    note = harness.backend.run_folder("job-1-1") / "nodes" / "0.cgroups"
    folders = [Path(folder) for folder in json.loads(note.read_bytes())]
    names = {
        "memory.limit_in_bytes",
        "memory.max",
        "pids.max",
        "cpu.cfs_quota_us",
        "cpu.max",
        "cpu.shares",
        "cpu.weight",
    }
    limits = {
        path.name: path.read_text().strip() for folder in folders for path in folder.iterdir() if path.name in names
    }
    assert str(300 << 20) in limits.values()
    assert limits["pids.max"] == "2048", "1024 for the node, and 1024 for its rank"
    assert {"52000", "52000 100000"} & set(limits.values()), "half of the period of 100000, and 2 % for the launcher"
    # For each core, v1 has 1024 shares, and v2 a weight of 100.
    assert limits.get("cpu.shares") == "512" or limits.get("cpu.weight") == "50"
    inside = {pid for folder in folders for pid in (folder / "cgroup.procs").read_text().split()}
    assert len(inside) == 3, "bubblewrap, the launcher and the rank, all in every group"
    outside = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most_processes = [resource.prlimit(int(pid), resource.RLIMIT_NPROC)[1] for pid in inside]
    # bubblewrap creates the user namespace. With a limit of its own, processes of all runs would count against it.
    assert sorted(most_processes) == sorted([4096, 4096, outside])
    harness.backend.stop("job-1-1", 0)
    harness.wait_for_end()
    assert not any(folder.exists() for folder in folders)


def test_endless_folders_are_removed_and_stop_no_other_run(harness):
    """Python's own `rmtree` is recursive: it would fail, and so would every later start on the machine."""
    deep = """
    import os
    for place in ("RUN_DIR", "CHECKPOINT_DIR", "OUTPUT_DIR"):
        os.chdir(os.environ[place])
        for _ in range(1200):  # Python's limit of recursion is 1000, and a path has at most 4096 bytes
            os.mkdir("d" * 20)
            os.chdir("d" * 20)
    """
    harness.run(deep, checkpoint_key="job-1")
    harness.backend.delete("job-1-1")
    harness.backend.delete_shared("job-1")
    for place in (".checkpoints", ".outputs"):
        assert list((harness.folder / "runs" / place).iterdir()) == []
    harness.complete("print('other')", name="job-2-1")
    assert list((harness.folder / "runs" / ".trash").iterdir()) == []


def test_a_removal_that_takes_long_holds_up_no_submission(harness, monkeypatch):
    removing, may_go_on = threading.Event(), threading.Event()
    empty = Trash.empty

    def wait(self):
        removing.set()
        assert may_go_on.wait(60)
        empty(self)

    harness.run("print('first')")
    monkeypatch.setattr(Trash, "empty", wait)
    deletion = threading.Thread(target=harness.backend.delete, args=("job-1-1",))
    deletion.start()
    assert removing.wait(60)
    try:
        harness.complete("print('second')", name="job-2-1")
    finally:
        may_go_on.set()
        deletion.join()

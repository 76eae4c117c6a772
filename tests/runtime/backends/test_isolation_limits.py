"""Hostile scripts: a run uses what was bought, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.backends import cgroups
from runtime.backends.trash import remove_tree
from runtime.launcher import disk
from runtime.specs import FailureCode, Outcome, Resources
from tests.runtime.backends import hostile
from tests.runtime.conftest import Yard


@pytest.fixture(params=["cold", "warm"])
def yard(yard: Yard, request: pytest.FixtureRequest) -> Yard:
    """Both ways in which ranks are started."""
    return hostile.started(yard, request.param)


def test_limits_are_lowered_and_never_raised(yard: Yard) -> None:
    script = """
    import resource
    for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE"):
        hard = resource.getrlimit(getattr(resource, name))[1]
        try:
            resource.setrlimit(getattr(resource, name), (hard, hard + 1))
            print("raised", name)
        except (OSError, ValueError):
            resource.setrlimit(getattr(resource, name), (0, hard))
    print("lowered")
    """
    assert yard.run(script, workers_per_node=2).outcome is Outcome.COMPLETED
    assert yard.log(1) == "lowered\n"


def test_a_run_that_writes_too_much_is_ended(yard: Yard) -> None:
    script = """
    import os, time
    for number in range(10 ** 6):
        with open(os.path.join(os.environ["RUN_DIR"], str(number)), "wb") as file: file.write(bytes(1 << 20))
        time.sleep(0.02)
    """
    status = yard.run(script, resources=Resources(cpus=1, memory_mib=512, disk_mib=20))
    assert status.outcome is Outcome.DISK_FULL
    assert status.failure is not None
    assert status.failure.code is FailureCode.DISK_FULL
    assert status.failure.data["limit_mib"] == 20
    assert status.failure.data["used_mib"] > 20


def test_one_file_cannot_outgrow_the_limit(yard: Yard) -> None:
    script = """
    import os
    try:
        with open("big", "wb") as file:
            for _ in range(600): file.write(bytes(1 << 20))
    except OSError as error:
        print(error.strerror)
    os.unlink("big")
    """
    yard.run(script, resources=Resources(cpus=1, memory_mib=512, disk_mib=512))
    assert yard.log() == "File too large\n"


def test_the_kernel_holds_cpu_memory_and_processes(yard: Yard) -> None:
    if cgroups.why_not():
        pytest.fail("the tests need control groups: run them as root")
    yard.backend.submit(yard.spec("import signal\nprint('ready')\nsignal.pause()", resources=Resources(0.5, 300)))
    yard.wait_for_text("ready")
    note = yard.backend.run_folder("job-1-1") / "nodes" / "0.cgroups"
    folders = [Path(folder) for folder in json.loads(note.read_bytes())]
    limits = {
        path.name: path.read_text().strip()
        for folder in folders
        for path in folder.iterdir()
        if path.name in {"memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max"}
    }
    assert str(300 << 20) in limits.values()
    assert limits["pids.max"] == "2048"
    assert {"52000", "52000 100000"} & set(limits.values())
    inside = {pid for folder in folders for pid in (folder / "cgroup.procs").read_text().split()}
    assert len(inside) == 3, "bubblewrap, the launcher and the rank, all in every group"
    yard.backend.stop("job-1-1", 0)
    yard.wait_for_end()
    assert not any(folder.exists() for folder in folders)


def test_files_without_a_name_count_as_well(yard: Yard) -> None:
    script = """
    import os, signal
    held = []
    for number in range(64):
        file = open(os.path.join(os.environ["CHECKPOINT_DIR"], "file"), "wb")
        os.unlink(file.name)
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        held.append(file)
    while True: signal.pause()
    """
    status = yard.run(script, resources=Resources(cpus=1, memory_mib=512, disk_mib=20))
    assert status.outcome is Outcome.DISK_FULL
    assert status.failure is not None
    assert status.failure.data["used_mib"] >= 64


def test_names_are_limited_as_the_disk_has_only_so_many(yard: Yard) -> None:
    if disk.entry_bytes(yard.folder) < 4096:
        pytest.skip("this disk does not say how many names it has")
    script = """
    import os, signal
    for number in range(20_000): open(os.path.join(os.environ["RUN_DIR"], str(number)), "wb").close()
    while True: signal.pause()
    """
    status = yard.run(script, resources=Resources(cpus=1, memory_mib=512, disk_mib=60))
    assert status.outcome is Outcome.DISK_FULL, status.failure


@pytest.mark.parametrize("place", ["RUN_DIR", "CHECKPOINT_DIR", "WORKSPACE"])
def test_nothing_can_be_hidden_where_nobody_measures(yard: Yard, place: str) -> None:
    script = f"""
    import os, signal
    os.chdir(os.environ["{place}"])
    for _ in range(300):
        os.mkdir("d")
        os.chdir("d")
    while True: signal.pause()
    """
    assert yard.run(script).outcome is Outcome.DISK_FULL
    remove_tree(yard.workspace / "d")

"""Any process of the warm pool may die at any moment: runs go on, and new ones start cold."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from runtime import pids
from runtime.backends import launch_plan
from runtime.backends.supervision.rank_fork import connect
from runtime.specs import Outcome
from tests.console.processes import children, wait_for
from tests.runtime.backends import hostile
from tests.runtime.conftest import MAY_IMPORT_ANYTHING

pytestmark = pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds")

SHOW_PROGRAM = (
    MAY_IMPORT_ANYTHING + "print(open('/proc/self/cmdline').read().split(chr(0))[2].rsplit('/', 1)[-1], flush=True)\n"
)
"""Prints the program that runs the rank: `rank.py` after a cold start, `forkserver.py` after a warm one."""
SHOW_PROGRAM_AND_WAIT = SHOW_PROGRAM + "import signal\nsignal.pause()\n"


@pytest.fixture
def warm_harness(harness):
    """A harness whose warm pool has a daemon and a fork server of its image."""
    hostile.warm(harness)
    harness.preface = ""  # scripts here say themselves that they may import anything
    return harness


def daemon_pid(harness):
    return int(json.loads((harness.folder / "runs" / ".warm_pool" / "daemon.json").read_bytes())["pid"])


def fork_servers(harness):
    return children(daemon_pid(harness))


def kill(pid):
    """Kill a process and wait for its end."""
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pids.start_time(pid) is None, 10)


def test_the_first_run_starts_cold_and_prepares_the_ranks_of_the_next_ones(harness):
    harness.backend = harness.new_backend(warm_seconds=600)
    harness.run(SHOW_PROGRAM)
    assert harness.log() == "rank.py\n"
    wait_for(lambda: hostile.is_warm(harness), 30)
    harness.complete(SHOW_PROGRAM, name="job-2-1", nodes=2, workers_per_node=2)
    assert [harness.log(rank, "job-2-1") for rank in range(4)] == ["forkserver.py\n"] * 4


def test_a_pool_without_a_folder_costs_no_open_socket(tmp_path):
    def sockets():
        return [path for path in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if "socket:" in path]

    before = sockets()
    with pytest.raises(FileNotFoundError) as caught:
        connect(tmp_path / "missing", "socket")
    assert sockets() == before, caught.value  # `caught` keeps the frames of `connect`, and what they hold


def test_tracebacks_show_the_customers_frames_and_the_images_own_paths(harness):
    (packages,) = (harness.images_root / "bare").glob("lib/python3*/site-packages")
    script = """
    import importlib, faulty, os  # `importlib` lets it start warm
    def fail(): raise KeyError("inner")
    def train():
        try: faulty.apply(fail)
        except KeyError as error: raise ValueError("outer") from error
    train()
    """
    library = f"/opt/trainyard/images/bare/{packages.relative_to(harness.images_root / 'bare')}/faulty.py"
    here = "/workspace/train.py"
    frames = [(here, "train"), (library, "apply"), (here, "fail"), (here, "<module>"), (here, "train")]
    (packages / "faulty.py").write_text("def apply(call):\n    return call()\n")
    try:
        for name in ("cold", "warm"):
            if name == "warm":
                hostile.warm(harness)
                harness.preface = ""  # it would move the lines of the script, which the failure names
            status = harness.run(script, name=name)
            log = harness.log(name=name)
            shown = re.findall(r'File "(.*)", line \d+, in (\w+|<module>)', log)
            assert shown == frames, log
            assert status.failure.data == {
                "exception": "ValueError", "message": "outer", "file": "train.py", "line": "6", "function": "train",
            }  # fmt: skip
    finally:
        (packages / "faulty.py").unlink()


def test_a_killed_daemon_takes_its_fork_servers_along_and_no_run(warm_harness):
    warm_harness.submit(SHOW_PROGRAM_AND_WAIT, name="job-2-1")
    warm_harness.wait_for_text("forkserver.py", "job-2-1")
    servers = fork_servers(warm_harness)
    assert servers
    kill(daemon_pid(warm_harness))
    for pid in servers:
        wait_for(lambda pid=pid: pids.start_time(pid) is None, 10)
    warm_harness.complete(SHOW_PROGRAM)
    assert warm_harness.log() == "rank.py\n"
    assert warm_harness.backend.describe("job-2-1").outcome is None, "it goes on"
    wait_for(lambda: hostile.is_warm(warm_harness), 30)  # by a new daemon


@pytest.mark.slow
def test_a_stopped_process_is_not_waited_for(warm_harness):
    # The fork server works without the daemon. Without the fork server, a run starts cold.
    stopped = (  # the run, the process that is stopped before it, and the program that then runs the rank
        ("job-1-1", daemon_pid(warm_harness), "forkserver.py"),
        ("job-2-1", fork_servers(warm_harness)[0], "rank.py"),
    )
    for name, pid, program in stopped:
        os.kill(pid, signal.SIGSTOP)
        try:
            warm_harness.complete(SHOW_PROGRAM, name=name)
            assert warm_harness.log(name=name) == f"{program}\n"
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_another_version_of_the_code_replaces_the_daemon(warm_harness, monkeypatch):
    before = daemon_pid(warm_harness)
    monkeypatch.setattr("runtime.backends.local.warm_pool.client.code_version", lambda: "another")
    warm_harness.backend = warm_harness.new_backend(warm_seconds=600)
    warm_harness.run(SHOW_PROGRAM)
    assert warm_harness.log() == "rank.py\n"
    wait_for(lambda: hostile.is_warm(warm_harness) and daemon_pid(warm_harness) != before, 30)
    warm_harness.run(SHOW_PROGRAM, name="job-2-1")
    assert warm_harness.log(name="job-2-1") == "forkserver.py\n"


def test_a_start_that_fails_tells_why_in_the_log_of_the_run(harness, monkeypatch):
    hostile.warm(harness)
    monkeypatch.setattr(launch_plan, "ports_needed", lambda _spec: {"worker_ports": None, "spare_ports": 0})
    for name, warm_seconds in (("job-8-1", 600), ("job-9-1", 0)):
        harness.backend = harness.new_backend(warm_seconds=warm_seconds)
        assert harness.run(SHOW_PROGRAM, name=name).outcome is Outcome.NODE_LOST
        log = (harness.folder / "runs" / name / "logs" / "supervisor-0.log").read_text()
        assert "Traceback" in log, name
        assert "TypeError" in log, name


def test_an_idle_daemon_ends(harness):
    harness.backend = harness.new_backend(warm_seconds=1.5)
    harness.run(SHOW_PROGRAM)
    folder = harness.folder / "runs" / ".warm_pool"
    wait_for((folder / "daemon.json").exists, 20)
    pid = daemon_pid(harness)
    wait_for(lambda: pids.start_time(pid) is None, 20)
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "log"], "no `daemon.json`"


def test_an_image_whose_modules_fail_to_import_starts_cold(harness, monkeypatch):
    monkeypatch.setattr("runtime.images.recipes.preloads", lambda _name: ["no_such_module"])
    harness.backend = harness.new_backend(warm_seconds=600)
    harness.complete(SHOW_PROGRAM)
    log = harness.folder / "runs" / ".warm_pool" / "log"
    wait_for(lambda: log.exists() and "no_such_module" in log.read_text(), 30)
    assert not hostile.is_warm(harness)
    harness.run(SHOW_PROGRAM, name="job-2-1")
    assert harness.log(name="job-2-1") == "rank.py\n"


def test_modules_of_the_run_are_imported_and_come_before_those_of_the_image(warm_harness, tmp_path):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "alpha.py").write_text("VERSION = 1\n")
    script = SHOW_PROGRAM + "import alpha, sys\nprint(alpha.__file__, sys.path[1])\n"
    warm_harness.complete(script, packages=str(packages))
    assert warm_harness.log() == "forkserver.py\n/opt/trainyard/site-packages/alpha.py /opt/trainyard/site-packages\n"
    # The fork server has imported the image's module `json`, which would be the wrong one: such a run starts cold.
    (packages / "json.py").write_text("WHOSE = 'of a package'\n")
    show_json = SHOW_PROGRAM + "import json\nprint(json.WHOSE)\n"
    warm_harness.complete(show_json, name="job-1-2", packages=str(packages))
    assert warm_harness.log(name="job-1-2") == "rank.py\nof a package\n"
    (warm_harness.workspace / "json").mkdir()
    (warm_harness.workspace / "json" / "__init__.py").write_text("WHOSE = 'of the script'\n")
    warm_harness.complete(show_json, name="job-1-3")
    assert warm_harness.log(name="job-1-3") == "rank.py\nof the script\n"

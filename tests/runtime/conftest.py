"""Runs on this machine: a local backend, a bare image and a workspace for scripts."""

import json
import signal
import venv
from pathlib import Path

import pytest

from runtime import pids
from runtime.backends.local.backend import LocalBackend
from runtime.images import venvs
from tests.runtime.images_of_ours import load_example
from tests.runtime.run_harness import RunHarness


@pytest.fixture(scope="session")
def bare_images(tmp_path_factory):
    """An images root with one image, `bare`, that has only an interpreter."""
    root = tmp_path_factory.mktemp("images")
    venv.create(root / "bare", with_pip=False, symlinks=True)
    venvs.mark_ready(root / "bare", "bare")
    return root


MAY_IMPORT_ANYTHING = "import importlib\n"
"""Prepended to a script so that it starts warm: `importlib` may import any package. Scripts that can import only the
standard library start cold."""


class LocalHarness(RunHarness):
    """A local backend with a workspace and a dataset."""

    keeps_output = True
    preface = ""
    """The beginning of each script. `hostile.warm` sets it, so that every script starts warm."""

    def __init__(self, folder, images_root):
        self.folder = folder
        self.images_root = images_root
        self.workspace = folder / "workspace"
        self.dataset = folder / "digits"
        self.workspace.mkdir()
        self.dataset.mkdir()
        (self.dataset / "three").write_text("3")
        self.backend = self.new_backend()

    def new_backend(self, **options):
        """Return a backend with the same root, as another process of the console would have it."""
        return LocalBackend(
            root=self.folder / "runs", images_root=self.images_root, **{"cpus": 64, "memory_mib": 65536, **options}
        )

    def write_script(self, source):
        super().write_script(self.preface + source)

    def all_logs(self, name):
        """Return all logs of a run, for the message of a failed test."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted((self.backend.run_folder(name) / "logs").glob("*"))
        )

    def lose_node(self, node, name="job-1-1"):
        """Kill the supervisor of a node."""
        record = next(record for record in self.records(name) if record["node"] == node)
        assert pids.send(record["pid"], record["start_time"], signal.SIGKILL)

    def left_behind(self):
        return [path.name for path in (self.folder / "runs").iterdir() if not path.name.startswith(".")]

    def records(self, name="job-1-1"):
        """Return the records of all nodes."""
        folder = self.backend.run_folder(name) / "nodes"
        return [json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))]


def processes_below(folder):
    """Return the command lines that name this folder. Sandboxes of its runs have such a line, supervisors do not."""
    result = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            result.append(line)
    return result


def remains_of_runs(runs, mounts_before, nonces, supervisors):
    """Return what deleted runs have left: processes (which hold network namespaces), mounts, cgroups, hidden files.

    `nonces`: the first 8 characters of their submissions' nonces, with which names of cgroups end. `supervisors`: pid
    and start time of their nodes' supervisors.
    """
    mounts = set(Path("/proc/self/mounts").read_text().splitlines()) - mounts_before
    groups = [group for group in Path("/sys/fs/cgroup").glob("**/trainyard-*") if group.name[-8:] in nonces]
    result = {
        "processes": processes_below(runs),
        "supervisors": [pid for pid, started in supervisors if pids.is_alive(pid, started)],
        "mounts": [mount for mount in mounts if str(runs) in mount],
        "groups": groups,
        "files": [
            path for path in runs.glob(".*/*") if path.parent.name not in {".warm_pool", ".checkpoints", ".outputs"}
        ],  # all attempts of a job share its checkpoints and outputs, and all runs the warm pool
    }
    return {name: what for name, what in result.items() if what}


@pytest.fixture
def harness(tmp_path, bare_images):
    """A harness whose runs are deleted after the test, and must leave nothing behind."""
    mounts = set(Path("/proc/self/mounts").read_text().splitlines())
    created = LocalHarness(tmp_path, bare_images)
    yield created
    runs = created.folder / "runs"
    nonces = {json.loads(path.read_bytes())["nonce"][:8] for path in runs.glob("*/submission.json")}
    supervisors = [
        (record["pid"], record["start_time"]) for name in created.backend.names() for record in created.records(name)
    ]
    for name in created.backend.names():
        created.backend.delete(name)
    created.backend.stop_prepared_processes()
    assert created.backend.names() == []
    assert remains_of_runs(runs, mounts, nonces, supervisors) == {}


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The dataset of the examples, as an archive."""
    archive = tmp_path_factory.mktemp("digits") / "digits.tar.gz"
    load_example("make_digits").write_archive(archive)
    return archive


@pytest.fixture
def left_running(tmp_path):
    """Return a function that returns the processes of this test's runs."""
    return lambda: processes_below(tmp_path / "runs")

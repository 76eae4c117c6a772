"""Runs on this very machine: a local backend of its own, a bare image, and a workspace to put scripts in."""

from __future__ import annotations

import dataclasses
import json
import textwrap
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.backends import identity, images
from runtime.backends.local import LocalBackend
from runtime.specs import Framework, Image, Mount, Resources, RunSpec
from tests.runtime.any_yard import AnyYard


@pytest.fixture(scope="session")
def bare_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An images root with one image, `bare`: an interpreter and nothing else."""
    root = tmp_path_factory.mktemp("images")
    venv.create(root / "bare", with_pip=False, symlinks=True)
    images.mark_ready(root / "bare", "bare")
    return root


MAY_IMPORT_ANYTHING = "import importlib\n"
"""With it a script counts as one that ranks with frameworks in them are of use to: else it is started cold."""


class Yard(AnyYard):
    """A backend with a workspace and a data set, and short words for what tests do with them."""

    def __init__(self, folder: Path, images_root: Path, image: str = "bare") -> None:
        self.folder = folder
        self.images_root = images_root
        self.image = image
        self.preface = ""
        self.workspace = folder / "workspace"
        self.dataset = folder / "digits"
        self.workspace.mkdir()
        self.dataset.mkdir()
        self.backend: LocalBackend = self.another()

    def another(self, **options: Any) -> LocalBackend:
        """One more backend over the same root, as another process of the console would have it."""
        return LocalBackend(
            root=self.folder / "runs", images_root=self.images_root, **{"cpus": 64, "memory_mib": 65536, **options}
        )

    def spec(self, source: str = "print('hello')", /, **changes: Any) -> RunSpec:
        """A spec whose workspace holds the script, after the yard's preface, as `train.py`."""
        (self.workspace / "train.py").write_text(self.preface + textwrap.dedent(source))
        spec = RunSpec(
            name="job-1-1",
            framework=Framework.PYTORCH,
            image=Image(builtin=self.image),
            nodes=1,
            workers_per_node=1,
            resources=Resources(cpus=1, memory_mib=1024),
            script="train.py",
            deadline_seconds=60,
            datasets=("digits",),
            mounts=(Mount(str(self.workspace), "/workspace", False), Mount(str(self.dataset), "/datasets/digits")),
        )
        return dataclasses.replace(spec, **changes)

    def all_logs(self, name: str) -> str:
        """Every log file of a run, the platform's own too, for a failed test's message."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted((self.backend.run_folder(name) / "logs").glob("*"))
        )

    def records(self, name: str = "job-1-1") -> list[dict[str, Any]]:
        """What each node's supervisor wrote."""
        folder = self.backend.run_folder(name) / "nodes"
        return [json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))]


def processes_below(folder: Path) -> list[str]:
    """Command lines of processes that name this folder: supervisors do not, sandboxes do."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def left_behind(runs: Path, before: set[str], nonces: set[str], supervisors: list[tuple[int, int]]) -> dict[str, Any]:
    """What is still there of runs that were deleted: processes (which alone hold a network namespace), mounts, groups.

    `before` are the mounts before them, `nonces` their submissions', `supervisors` (pid, start time) of their nodes.
    """
    mounts = set(Path("/proc/self/mounts").read_text().splitlines()) - before
    groups = [group for group in Path("/sys/fs/cgroup").glob("**/trainyard-*") if group.name[-8:] in nonces]
    found = {
        "processes": processes_below(runs),
        "supervisors": [pid for pid, started in supervisors if identity.is_alive(pid, started)],
        "mounts": [mount for mount in mounts if str(runs) in mount],
        "groups": groups,
        "files": [path for path in runs.glob(".*/*") if path.parent.name not in {".nursery", ".checkpoints"}],
    }
    return {name: what for name, what in found.items() if what}


@pytest.fixture
def yard(tmp_path: Path, bare_images: Path) -> Iterator[Yard]:
    """A yard that is cleaned up, and that has left nothing behind."""
    mounts = set(Path("/proc/self/mounts").read_text().splitlines())
    made = Yard(tmp_path, bare_images)
    yield made
    runs = made.folder / "runs"
    nonces = {json.loads(path.read_bytes())["nonce"][:8] for path in runs.glob("*/submission.json")}
    supervisors = [
        (record["pid"], record["start_time"]) for name in made.backend.names() for record in made.records(name)
    ]
    for name in made.backend.names():
        made.backend.delete(name)
    made.backend.retire()
    assert made.backend.names() == []
    assert left_behind(runs, mounts, nonces, supervisors) == {}


@pytest.fixture
def left_running(tmp_path: Path) -> Callable[[], list[str]]:
    """What still runs of this test's runs."""
    return lambda: processes_below(tmp_path / "runs")

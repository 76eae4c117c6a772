"""Scripts that we did not write run unchanged (docs/compatibility.md says what each needed)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.backends import machine
from runtime.specs import Resources
from tests.compat.conftest import Stage
from tests.compat.scripts import SCRIPTS, Foreign, written_by
from tests.runtime.images_of_ours import IMAGES

HERE = Path(__file__).resolve().parent
CASES = [
    pytest.param(foreign, nodes, workers, id=f"{foreign.name}-{nodes}-{workers}")
    for foreign in SCRIPTS
    for nodes, workers in foreign.shapes
]
ACCELERATE = {
    "test_script.py": "Backend: gloo\nNum processes: 2\n",
    "test_sync.py": "**Test Distributed `no_sync` context manager**",
}
"""What Hugging Face checks Accelerate with, under torchrun (collectives, samplers, training; when gradients are
synchronized), and what each says only where it is one of several processes."""


def of_rank(pattern: str, rank: int, world_size: int) -> str:
    """The pattern, with what it names of the rank."""
    return pattern.replace("{rank}", str(rank)).replace("{world_size}", str(world_size))


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The published packages, installed as a customer would into a workspace."""
    folder = tmp_path_factory.mktemp("packages")
    python = IMAGES / "pytorch" / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, "--requirement", str(HERE / "requirements.txt")], check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.torch
@pytest.mark.parametrize("script", ACCELERATE)
def test_what_accelerate_is_checked_with(stage: Stage, packages: Path, node: Resources, script: str) -> None:
    shutil.copytree(packages, stage.workspace, dirs_exist_ok=True)
    published = packages / "accelerate" / "test_utils" / "scripts" / script
    for path in (published, HERE / "with_environment.py"):
        shutil.copy(path, stage.workspace)
    outputs = stage.run(
        "pytorch",
        "with_environment.py",
        # What `accelerate launch --cpu` sets; without it Accelerate takes one process for all there is.
        arguments=("ACCELERATE_USE_CPU=true", script),
        nodes=2,
        resources=node,
    )
    assert ACCELERATE[script] in outputs[0], outputs[0]


def put(foreign: Foreign, stage: Stage) -> None:
    """Put the script into the workspace, with what it needs beside it; the test is skipped where it is not here."""
    if not foreign.folder.is_dir():
        pytest.skip(f"{foreign.name} is not here: python -m tests.compat.scripts fetches it")
    for path in (*foreign.folder.iterdir(), *(HERE / name for name in foreign.beside)):
        shutil.copy(path, stage.workspace)


@pytest.mark.torch
@pytest.mark.parametrize(("foreign", "nodes", "workers"), CASES)
def test_a_fetched_script(stage: Stage, node: Resources, foreign: Foreign, nodes: int, workers: int) -> None:
    put(foreign, stage)
    gpus = workers if foreign.needs_gpu else 0
    if gpus and len(machine.gpus()) < nodes * gpus:
        pytest.skip(f"{foreign.name} needs {nodes * gpus} GPUs")
    outputs = stage.run(
        foreign.framework,
        foreign.script,
        arguments=foreign.arguments,
        nodes=nodes,
        workers_per_node=workers,
        resources=Resources(node.cpus, node.memory_mib, gpus),
    )
    assert re.search(of_rank(foreign.says, 0, nodes * workers), outputs[0]), outputs[0]
    if foreign.nodes_say:
        said = [
            bool(re.search(of_rank(foreign.nodes_say, rank, len(outputs)), outputs[rank]))
            for rank in range(len(outputs))
        ]
        assert said == [rank % workers == 0 for rank in range(len(outputs))], outputs


@pytest.mark.torch
def test_the_ddp_tutorial_goes_on_from_its_snapshot(stage: Stage, node: Resources) -> None:
    foreign = next(foreign for foreign in SCRIPTS if foreign.name == "pytorch-ddp-series-on-cpu")
    put(foreign, stage)
    for name, epochs in (("job-1-1", "4"), ("job-2-1", "6")):
        arguments = ("multinode.py", epochs, "2")
        outputs = stage.run("pytorch", foreign.script, name=name, arguments=arguments, nodes=2, resources=node)
    for rank, output in enumerate(outputs):
        assert "Resuming training from snapshot at Epoch 2" in output
        assert re.findall(rf"\[GPU{rank}\] Epoch (\d)", output) == ["2", "3", "4", "5"]


def test_a_notebook_is_taken_apart_as_jupyter_would_write_it() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["%%writefile no.py\n", "text"]},
        {"cell_type": "code", "source": ["%%writefile one.py\n", "\n", "a = 1\n", "b = 2"]},
        {"cell_type": "code", "source": ["print('nothing to write')"]},
        {"cell_type": "code", "source": ["%%writefile two.py\n", "c = 3\n"]},
    ]
    files = written_by(json.dumps({"cells": cells}).encode())
    assert files == {"one.py": b"\na = 1\nb = 2\n", "two.py": b"c = 3\n"}


def test_every_foreign_script_is_explained() -> None:
    told = (HERE.parents[1] / "docs" / "compatibility.md").read_text()
    for foreign in SCRIPTS:
        assert foreign.repository in told
        assert foreign.script in told
        assert foreign.licence in told
    for script in ACCELERATE:
        assert script in told

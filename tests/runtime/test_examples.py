"""The examples, trained for real: torch, gloo, sandboxes, on the digits."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import struct
import tarfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from runtime.specs import Outcome, Resources

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

HOUSE = Path(__file__).resolve().parents[2]
EXAMPLES = HOUSE / "examples"
IMAGES = Path(os.environ.get("TRAINYARD_IMAGES_ROOT", HOUSE / "var" / "images"))
SMALL_NODE = Resources(cpus=0.5, memory_mib=1024)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = tmp_path_factory.mktemp("digits") / "digits.tar.gz"
    load("make_digits").write_archive(archive)
    return archive


@pytest.fixture
def torch_yard(yard: Yard, digits: Path) -> Yard:
    """The yard with the pytorch image, the examples in the workspace, and the digits as data set."""
    if not (IMAGES / "pytorch" / "ready.json").exists():
        pytest.fail(f"There is no pytorch image in {IMAGES}: run 'python manage.py build_image pytorch' first.")
    yard.images_root = IMAGES
    yard.image = "pytorch"
    yard.backend = yard.another()
    for script in EXAMPLES.glob("*.py"):
        shutil.copy(script, yard.workspace)
    with tarfile.open(digits) as archive:
        archive.extractall(yard.dataset, filter="data")
    return yard


def train(yard: Yard, script: str, **changes: Any) -> str:
    status = yard.run("", script=script, **{"resources": SMALL_NODE, "lr": "0.02", "epochs": 4, **changes})
    assert status.outcome is Outcome.COMPLETED, f"{status}\n{yard.all_logs(status.name)}"
    return yard.log(name=status.name)


def test_the_digits_are_laid_out_as_mnist(digits: Path) -> None:
    with tarfile.open(digits) as archive:
        members = {Path(member.name).name: member for member in archive}
        for part, count in (("train", 1437), ("t10k", 360)):
            images = archive.extractfile(members[f"{part}-images-idx3-ubyte"])
            labels = archive.extractfile(members[f"{part}-labels-idx1-ubyte"])
            assert images is not None
            assert labels is not None
            assert struct.unpack(">4I", images.read(16)) == (2051, count, 28, 28)
            assert len(images.read()) == count * 28 * 28
            assert struct.unpack(">2I", labels.read(8)) == (2049, count)
            assert set(labels.read()) == set(range(10))
        assert all(member.name.startswith("MNIST/raw/") for member in members.values())


@pytest.mark.torch
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_mnist_ddp_learns(torch_yard: Yard, nodes: int) -> None:
    log = train(torch_yard, "mnist_ddp.py", nodes=nodes)
    assert re.search(r"^epoch 4/4 step \d+ loss \d\.\d+ accuracy 0\.\d+$", log, re.MULTILINE)
    result = re.search(r"^result: test accuracy (\S+), loss (\S+) -> (\S+)$", log, re.MULTILINE)
    assert result is not None, log
    accuracy, first, last = map(float, result.groups())
    assert accuracy > 0.7
    assert last < first / 2
    lines = (torch_yard.backend.run_folder("job-1-1") / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.torch
def test_mnist_ddp_goes_on_from_its_checkpoint(torch_yard: Yard) -> None:
    train(torch_yard, "mnist_ddp.py", epochs=1, checkpoint_key="job-1")
    log = train(torch_yard, "mnist_ddp.py", epochs=2, checkpoint_key="job-1", name="job-1-2", restart_count=1)
    assert log.splitlines()[0] == "resumed after epoch 1"
    assert "epoch 2/2" in log
    assert "epoch 1/2" not in log


@pytest.mark.torch
def test_mnist_ddp_saves_when_it_is_asked_to_end(torch_yard: Yard) -> None:
    yard = torch_yard
    spec = yard.spec("", script="mnist_ddp.py", nodes=2, epochs=500, lr="0.01", resources=SMALL_NODE)
    yard.backend.submit(spec)
    yard.wait_for_text("epoch 1/500")
    yard.backend.stop("job-1-1", 30)
    assert yard.wait_for_end().outcome is Outcome.STOPPED
    assert yard.log().splitlines()[-1].startswith("result: ")
    assert (yard.backend.run_folder("job-1-1") / "checkpoints" / "mnist.pt").exists()


@pytest.mark.torch
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_script_of_2019_runs_unchanged(torch_yard: Yard, nodes: int) -> None:
    log = train(torch_yard, "legacy_mnist.py", nodes=nodes, lr="0.05")
    result = re.search(r"Test Accuracy: (\S+)", log)
    assert result is not None
    assert float(result.group(1)) > 0.3


@pytest.mark.torch
def test_two_processes_on_one_node(torch_yard: Yard) -> None:
    assert "result: " in train(torch_yard, "mnist_ddp.py", workers_per_node=2, epochs=1)

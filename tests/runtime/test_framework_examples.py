"""The examples of Horovod and TensorFlow, trained for real on the digits, in the images they are for."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime.specs import Controller, Framework, Outcome, Resources
from tests.runtime.images_of_ours import HOUSE, use_image
from tests.runtime.test_examples import load

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

pytestmark = pytest.mark.torch

EXAMPLES = HOUSE / "examples"
NODE = Resources(cpus=1.5, memory_mib=3072)
FRAMEWORKS = {
    "mnist_horovod.py": Framework.HOROVOD,
    "mnist_tensorflow.py": Framework.TENSORFLOW,
    "mnist_keras.py": Framework.TENSORFLOW,
}
Train = Callable[..., str]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = tmp_path_factory.mktemp("digits") / "digits.tar.gz"
    load("make_digits").write_archive(archive)
    return archive


@pytest.fixture
def train(yard: Yard, digits: Path) -> Train:
    """Runs an example on the digits; gives rank 0's output."""
    with tarfile.open(digits) as archive:
        archive.extractall(yard.dataset, filter="data")

    def run(script: str, *, end: Outcome = Outcome.COMPLETED, stop_at: str = "", **changes: Any) -> str:
        framework = FRAMEWORKS[script]
        use_image(yard, framework.value)
        spec = yard.spec(
            "",
            script=script,
            framework=framework,
            **{"resources": NODE, "lr": "0.02", "deadline_seconds": 300, "checkpoint_key": "job-1", **changes},
        )
        shutil.copy(EXAMPLES / script, yard.workspace)
        yard.backend.submit(spec)
        if stop_at:
            yard.wait_for_text(stop_at, spec.name)
            yard.backend.stop(spec.name, 60)
        status = yard.wait(spec.name, lambda status: status.outcome is not None, seconds=300)
        assert status.outcome is end, f"{status}\n{yard.all_logs(spec.name)}"
        return yard.log(name=spec.name)

    return run


def result(log: str) -> tuple[float, float, float]:
    found = re.search(r"^result: test accuracy (\S+), loss (\S+) -> (\S+)$", log, re.MULTILINE)
    assert found is not None, log
    accuracy, first, last = map(float, found.groups())
    return accuracy, first, last


@pytest.mark.parametrize(
    ("script", "shape", "controller"),
    [
        ("mnist_horovod.py", (1, 1), Controller.GLOO),
        ("mnist_horovod.py", (2, 2), Controller.GLOO),
        ("mnist_horovod.py", (2, 1), Controller.MPI),
        ("mnist_tensorflow.py", (2, 2), Controller.GLOO),
        ("mnist_keras.py", (2, 1), Controller.GLOO),
    ],
)
def test_it_learns(train: Train, yard: Yard, script: str, shape: tuple[int, int], controller: Controller) -> None:
    nodes, workers = shape
    log = train(script, controller=controller, nodes=nodes, workers_per_node=workers, epochs=4)
    assert re.search(r"^epoch 4/4 step \d+ loss \d\.\d+ accuracy 0\.\d+$", log, re.MULTILINE), log
    accuracy, first, last = result(log)
    assert accuracy > 0.7
    assert last < first / 2
    lines = (yard.backend.run_folder("job-1-1") / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [line["epoch"] for line in metrics] == [1, 2, 3, 4]
    steps = -(-1437 // (32 * nodes * workers))
    assert [line["step"] for line in metrics] == [steps * epoch for epoch in (1, 2, 3, 4)], "each rank takes its share"


@pytest.mark.parametrize("script", FRAMEWORKS)
def test_it_goes_on_from_its_checkpoint_on_other_nodes(train: Train, yard: Yard, script: str) -> None:
    first = train(script, epochs=2, nodes=2)
    log = train(script, epochs=3, nodes=1, name="job-1-2", restart_count=1)
    assert re.search(r"^epoch 3/3 ", log, re.MULTILINE), log
    assert "epoch 2/3" not in log
    assert result(log)[0] > 0.6
    if script != "mnist_keras.py":
        assert "resumed after epoch 2, image 0; restart 1" in log
        # What the second run began with is what the first one ended with.
        assert result(log)[1] == pytest.approx(result(first)[2], abs=0.011)


@pytest.mark.parametrize("script", ["mnist_horovod.py", "mnist_tensorflow.py"])
def test_it_saves_in_the_middle_of_an_epoch_when_it_is_told_to_end(train: Train, yard: Yard, script: str) -> None:
    log = train(script, epochs=500, nodes=2, end=Outcome.STOPPED, stop_at="epoch 1/500")
    told = re.search(r"^told to end: saved after epoch (\d+), image (\d+)$", log, re.MULTILINE)
    assert told is not None, log
    done, seen = map(int, told.groups())
    log = train(script, epochs=done + 1, nodes=2, name="job-1-2", restart_count=1)
    assert f"resumed after epoch {done}, image {seen}; restart 1" in log
    assert f"epoch {done + 1}/{done + 1}" in log

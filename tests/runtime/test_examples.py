"""The PyTorch examples, trained for real: torch, gloo, sandboxes, on digits and on prose."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tarfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from jobs.telemetry import parse_line
from runtime.specs import Outcome, Resources

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

HOUSE = Path(__file__).resolve().parents[2]
EXAMPLES = HOUSE / "examples"
IMAGES = Path(os.environ.get("TRAINYARD_IMAGES_ROOT", HOUSE / "var" / "images"))
SMALL_NODE = Resources(cpus=1.5, memory_mib=1024)
"""More than one core: importing torch takes twice as long on half of one. Less than two: one thread for each rank."""
TEXT_KILOBYTES = 30
"""The small text of these tests: 14 steps of 32 pieces in an epoch."""
SPLIT = ["fsdp2.py", "tensor_parallel.py", "pipeline_parallel.py"]
WHOLE = """
import charlm

device = charlm.start()
model = charlm.build().to(device)

def step(inputs, targets):
    loss = charlm.loss_of(model(inputs), targets)
    loss.backward()
    return loss

charlm.train(model, step, lambda inputs, _targets: model(inputs), (0, 1), device)
"""


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


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def text_yard(torch_yard: Yard) -> Yard:
    """The same, with a little prose as data set."""
    shutil.rmtree(torch_yard.dataset / "MNIST")
    load("make_text").write_text(torch_yard.dataset / "python.txt", TEXT_KILOBYTES)
    return torch_yard


def train(yard: Yard, script: str, source: str = "", **changes: Any) -> str:
    """A run of one of the examples, or of the source, to its good end. Gives rank 0's output."""
    status = yard.run(source, script=script, **{"resources": SMALL_NODE, "lr": "0.02", "epochs": 4, **changes})
    assert status.outcome is Outcome.COMPLETED, f"{status}\n{yard.all_logs(status.name)}"
    return yard.log(name=status.name)


def stop_after_an_epoch(yard: Yard, script: str, **changes: Any) -> tuple[int, str]:
    """Run `job-1-1`, end it at some moment after its first epoch. Gives the epochs done, and where it was saved."""
    spec = yard.spec("", script=script, checkpoint_key="job-1", epochs=500, **{"resources": SMALL_NODE, **changes})
    yard.backend.submit(spec)
    yard.wait_for_text("epoch 1/500")
    yard.backend.stop("job-1-1", 30)
    assert yard.wait_for_end().outcome is Outcome.STOPPED
    told = re.fullmatch(r"told to end: saved (after epoch (\d+), \w+ \d+)", yard.log().splitlines()[-1])
    assert told is not None, yard.all_logs("job-1-1")
    assert len(curve(yard)) == int(told[2])
    return int(told[2]), told[1]


def curve(yard: Yard, name: str = "job-1-1") -> list[tuple[float | None, int | None, dict[str, float]]]:
    """Epoch, step and values of each epoch, as the console reads them from the output; the metrics file says the same.

    A run that took up another's checkpoint has its own output and its own metrics file.
    """
    parsed = [parse_line(line) for line in yard.log(name=name).splitlines() if line.startswith("epoch ")]
    assert all(set(values) == {"loss", "accuracy"} for _epoch, _step, values in parsed)
    lines = (yard.backend.run_folder(name) / "run" / "metrics.jsonl").read_text().splitlines()
    for (epoch, step, values), record in zip(parsed, map(json.loads, lines), strict=True):
        assert (record["epoch"], record["step"]) == (epoch, step)
        assert values == {key: pytest.approx(record[key], abs=1e-4) for key in values}
    return parsed


FAILING = """
import atexit
atexit.register(print, "left by itself")
import mnist_ddp

def save(*_arguments):
    raise RuntimeError("no space left")

mnist_ddp.save = save
mnist_ddp.main()
"""
"""What is registered first is called last, after Python has waited for its workers."""


@pytest.mark.torch
def test_a_failure_is_not_held_up_by_the_worker_that_loads(torch_yard: Yard) -> None:
    status = torch_yard.run(FAILING, resources=SMALL_NODE, lr="0.02", epochs=2)
    assert status.failure is not None
    assert (status.outcome, status.failure.exit_code) == (Outcome.CODE_FAILED, 1)
    assert "RuntimeError: no space left" in torch_yard.log()
    assert torch_yard.log().splitlines()[-1] == "left by itself"


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


def test_the_text_is_prose_of_the_size_asked_for(tmp_path: Path) -> None:
    load("make_text").write_text(tmp_path / "small.txt", 3)
    load("make_text").write_text(tmp_path / "whole.txt")
    small, whole = (tmp_path / "small.txt").read_bytes(), (tmp_path / "whole.txt").read_bytes()
    assert len(small) == 3000
    assert len(whole) > 300_000
    assert whole.startswith(small)
    assert b"statement" in small


@pytest.mark.torch
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_mnist_ddp_learns(torch_yard: Yard, nodes: int) -> None:
    log = train(torch_yard, "mnist_ddp.py", nodes=nodes)
    result = re.search(r"^result: test accuracy (\S+), loss (\S+) -> (\S+)$", log, re.MULTILINE)
    assert result is not None, log
    accuracy, first, last = map(float, result.groups())
    assert accuracy > 0.7
    assert last < first / 2
    epochs = curve(torch_yard)
    assert [epoch for epoch, _step, _values in epochs] == [1, 2, 3, 4]
    assert epochs[-1][2]["accuracy"] == accuracy


@pytest.mark.torch
def test_mnist_ddp_goes_on_from_its_checkpoint(torch_yard: Yard) -> None:
    train(torch_yard, "mnist_ddp.py", epochs=1, checkpoint_key="job-1")
    log = train(torch_yard, "mnist_ddp.py", epochs=2, checkpoint_key="job-1", name="job-1-2", restart_count=1)
    assert "resumed after epoch 1, image 0; restart 1" in log.splitlines()
    assert [epoch for epoch, _step, _values in curve(torch_yard, "job-1-2")] == [2]


@pytest.mark.torch
@pytest.mark.parametrize(("script", "workers"), [("mnist_ddp.py", 1), ("local_sgd.py", 2)])
def test_training_that_was_ended_goes_on_in_the_middle_of_its_epoch(
    torch_yard: Yard, script: str, workers: int
) -> None:
    shape = {"nodes": 2, "workers_per_node": workers, "batch_size": 8, "lr": "0.01"}
    done, saved = stop_after_an_epoch(torch_yard, script, **shape)
    shape["epochs"] = done + 2
    log = train(torch_yard, script, checkpoint_key="job-1", name="job-1-2", restart_count=1, **shape)
    assert f"resumed {saved}; restart 1" in log.splitlines()
    went_on = curve(torch_yard, "job-1-2")
    assert [epoch for epoch, _step, _values in went_on] == [done + 1, done + 2]
    # Every image was seen once in each epoch, by the count of steps.
    steps = -(-1437 // (16 * workers))
    assert [step for _epoch, step, _values in went_on] == [(done + 1) * steps, (done + 2) * steps]
    if script == "mnist_ddp.py":
        # And the training that nobody ended comes to the very same. (Averaging once more is a little different.)
        train(torch_yard, script, name="job-2-1", **shape)
        assert curve(torch_yard, "job-2-1")[-1] == went_on[-1]


@pytest.mark.torch
def test_local_sgd_learns_and_says_less_between_nodes(torch_yard: Yard) -> None:
    log = train(torch_yard, "local_sgd.py", nodes=2, epochs=6)
    sent = re.search(r"^sent between nodes: ([\d,]+) numbers, (\d+)% of the ([\d,]+) of DDP$", log, re.MULTILINE)
    assert sent is not None, log
    assert int(sent[2]) < 40
    epochs = curve(torch_yard)
    assert epochs[-1][2]["accuracy"] > 0.8
    # While the nodes average after every step, it is DDP.
    train(torch_yard, "mnist_ddp.py", nodes=2, epochs=2, name="job-2-1")
    together, apart = curve(torch_yard, "job-2-1")
    assert epochs[0] == together
    assert epochs[1] != apart


@pytest.mark.torch
@pytest.mark.parametrize("script", ["mnist_ddp.py", "local_sgd.py", "fsdp2.py"])
def test_the_exit_code_tells_that_it_was_ended(torch_yard: Yard, script: str, free_port: int) -> None:
    load("make_text").write_text(torch_yard.dataset / "python.txt", TEXT_KILOBYTES)
    folder = torch_yard.folder
    place = {
        "WORLD_SIZE": 1,
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORKER_PER_NODE": 1,
        "RESTART_COUNT": 0,
        "OMP_NUM_THREADS": 1,
    }
    bought = {"EPOCHS": 500, "LR": 0.01, "BATCH_SIZE": 8, "BACKEND": "gloo"}
    paths = {
        "DATASETS_PATH": folder,
        "DATASETS": "digits",
        "CHECKPOINT_DIR": folder,
        "METRICS_FILE": folder / "metrics",
    }
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port, "PYTHONUNBUFFERED": 1}
    environment = {name: str(value) for name, value in {**place, **bought, **paths, **meeting}.items()}
    command = [IMAGES / "pytorch" / "bin" / "python", torch_yard.workspace / script]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch 1/500"):
                break
        process.terminate()
        assert process.stdout.read().splitlines()[-1].startswith("told to end: saved after epoch ")
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.torch
@pytest.mark.parametrize(("script", "next_script"), list(zip(SPLIT, [*SPLIT[1:], SPLIT[0]], strict=True)))
def test_a_split_model_trains_as_the_whole_one_and_goes_on_in_another_shape(
    text_yard: Yard, script: str, next_script: str
) -> None:
    yard, lr = text_yard, "0.003"
    done, saved = stop_after_an_epoch(yard, script, workers_per_node=2, batch_size=16, lr=lr)
    # One checkpoint is kept, and that is whole.
    assert len(list(yard.folder.rglob("step-*"))) == len(list(yard.folder.rglob("step-*/.metadata"))) == 1
    on_four = {"nodes": 2, "workers_per_node": 2, "batch_size": 8, "lr": lr, "epochs": done + 2}
    log = train(yard, next_script, checkpoint_key="job-1", name="job-1-2", restart_count=1, **on_four)
    assert f"resumed {saved}; restart 1" in log.splitlines()
    assert {
        "fsdp2.py": "each rank holds 59,104 of 236,416 parameters",
        "tensor_parallel.py": "mesh of 2 x 2: data x tensor",
        "pipeline_parallel.py": "blocks of each stage: [[0], [1], [2], [3]]",
    }[next_script] in log
    for output in (yard.log(), log):
        gap = re.search(r"^equal to the whole model: loss and gradients differ by (\S+) at most$", output, re.MULTILINE)
        assert gap is not None, output
        assert 0 < float(gap[1]) < 1e-6

    # The whole model, which nobody ended, in one process: all comes to the same, up to the order of sums.
    train(yard, "train.py", WHOLE, name="job-2-1", batch_size=32, lr=lr, epochs=done + 2)
    whole, begun, went_on = curve(yard, "job-2-1"), curve(yard), curve(yard, "job-1-2")
    assert [epoch for epoch, _step, _values in begun + went_on] == list(range(1, done + 3))
    for place, (epoch, step, expected) in enumerate(whole):
        split_epoch, split_step, values = (begun + went_on)[place]
        assert (split_epoch, split_step) == (epoch, step)
        names = {"accuracy"} if place == done else {"accuracy", "loss"}  # the loss told is of what an attempt trained
        assert {name: values[name] for name in names} == {
            name: pytest.approx(expected[name], abs=2e-3) for name in names
        }
    assert whole[-1][2]["loss"] < whole[0][2]["loss"] < 5.5
    assert whole[-1][2]["accuracy"] > 0.15


@pytest.mark.torch
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": 6}, "The batch size must be a multiple of 4: it is cut into microbatches."),
        ({"batch_size": 400}, "The test text has 46 pieces, less than a batch of 400: bring more text"),
    ],
)
def test_what_cannot_be_split_is_said(text_yard: Yard, changes: dict[str, Any], sentence: str) -> None:
    status = text_yard.run("", script="pipeline_parallel.py", resources=SMALL_NODE, **changes)
    assert status.outcome is Outcome.CODE_FAILED
    assert sentence in text_yard.log()


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

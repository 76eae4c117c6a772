"""The PyTorch examples, trained on digits and on text."""

import json
import re
import shutil

import pytest

from jobs.telemetry import parse_line
from runtime.specs import Outcome, Resources
from tests.runtime.images_of_ours import EXAMPLES, load_example, use_image

pytestmark = [
    pytest.mark.cores(2),
    pytest.mark.late("its runs are real processes, with time limits of seconds"),
    pytest.mark.torch,
]

SMALL_NODE = Resources(cpus=1.5, memory_mib=1024)
"""More than one core, because importing torch is slow; less than two, for one thread per rank."""
RUN_SECONDS = 240
"""How long a run may take on a busy machine."""
NODE = {"resources": SMALL_NODE, "deadline_seconds": RUN_SECONDS}
TEXT_KILOBYTES = 30
"""The small text of these tests: 14 steps of 32 pieces in an epoch."""
SPLIT = ["fsdp2.py", "tensor_parallel.py", "pipeline_parallel.py"]
WHOLE = """
import charlm

device = charlm.start()
model = charlm.build_model().to(device)

def step(inputs, targets):
    loss = charlm.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss

charlm.train(model, step, lambda inputs, _targets: model(inputs), (0, 1), device)
"""


@pytest.fixture
def torch_harness(harness, digits):
    """A harness with the PyTorch image, the examples in the workspace and the digits as dataset."""
    use_image(harness, "pytorch")
    harness.patience = RUN_SECONDS
    for script in EXAMPLES.glob("*.py"):
        shutil.copy(script, harness.workspace)
    shutil.unpack_archive(digits, harness.dataset)
    return harness


@pytest.fixture
def text_harness(torch_harness):
    """The same with a short text as dataset."""
    shutil.rmtree(torch_harness.dataset / "MNIST")
    load_example("make_text").write_text(torch_harness.dataset / "python.txt", TEXT_KILOBYTES)
    return torch_harness


def train(harness, script, source="", **changes):
    """Run an example, or the source, until it completes; return the output of rank 0."""
    return harness.log(
        name=harness.complete(source, script=script, **{**NODE, "lr": "0.02", "epochs": 4, **changes}).name
    )


def stop_after_an_epoch(harness, script, **changes):
    """Run `job-1-1` and stop it after its first epoch; return the epochs done and the place of its checkpoint."""
    spec = harness.spec("", script=script, checkpoint_key="job-1", epochs=500, **{**NODE, **changes})
    harness.backend.submit(spec)
    harness.wait_for_text("epoch 1/500")
    harness.backend.stop("job-1-1", 30)
    assert harness.wait_for_end().outcome is Outcome.STOPPED
    reported = re.fullmatch(r"stopped by SIGTERM: saved (after epoch (\d+), \w+ \d+)", harness.log().splitlines()[-1])
    assert len(curve(harness)) == int(reported[2])
    return int(reported[2]), reported[1]


def curve(harness, name="job-1-1"):
    """Return epoch, step and values of each epoch from the output, and check that the metrics file agrees.

    A run that took up another's checkpoint has its own output and its own metrics file.
    """
    parsed = [parse_line(line) for line in harness.log(name=name).splitlines() if line.startswith("epoch ")]
    assert all(set(values) == {"loss", "accuracy"} for _epoch, _step, values in parsed)
    lines = (harness.backend.run_folder(name) / "run" / "metrics.jsonl").read_text().splitlines()
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
"""Functions registered first are called last, after Python has waited for its workers."""


def test_a_failure_does_not_wait_for_the_data_loader(torch_harness):
    status = torch_harness.run(FAILING, **NODE, lr="0.02", epochs=2)
    assert (status.outcome, status.failure.exit_code) == (Outcome.CODE_FAILED, 1)
    assert "RuntimeError: no space left" in torch_harness.log()
    assert torch_harness.log().splitlines()[-1] == "left by itself"


def test_mnist_ddp_learns(torch_harness):
    log = train(torch_harness, "mnist_ddp.py", nodes=2)
    result = re.search(r"^result: test accuracy (\S+), loss (\S+) -> (\S+)$", log, re.MULTILINE)
    accuracy, first, last = map(float, result.groups())
    assert accuracy > 0.7
    assert last < first / 2
    epochs = curve(torch_harness)
    assert [epoch for epoch, _step, _values in epochs] == [1, 2, 3, 4]
    assert epochs[-1][2]["accuracy"] == accuracy
    (model,) = torch_harness.backend.run_folder("job-1-1").glob("outputs/*")
    assert model.name == "model.pt"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "workers"), [("mnist_ddp.py", 1), ("local_sgd.py", 2)])
def test_stopped_training_resumes_within_its_epoch(torch_harness, script, workers):
    shape = {"nodes": 2, "workers_per_node": workers, "batch_size": 8, "lr": "0.01"}
    done, saved = stop_after_an_epoch(torch_harness, script, **shape)
    shape["epochs"] = done + 2
    log = train(torch_harness, script, checkpoint_key="job-1", name="job-1-2", restart_count=1, **shape)
    assert f"resumed {saved}; restart 1" in log.splitlines()
    went_on = curve(torch_harness, "job-1-2")
    assert [epoch for epoch, _step, _values in went_on] == [done + 1, done + 2]
    # Every image was seen once in each epoch, by the count of steps.
    steps = -(-1437 // (16 * workers))
    assert [step for _epoch, step, _values in went_on] == [(done + 1) * steps, (done + 2) * steps]
    if script == "mnist_ddp.py":
        # And the training that nobody ended comes to the very same. (Averaging once more is a little different.)
        train(torch_harness, script, name="job-2-1", **shape)
        assert curve(torch_harness, "job-2-1")[-1] == went_on[-1]


@pytest.mark.slow
def test_local_sgd_learns_with_less_traffic_between_nodes(torch_harness):
    log = train(torch_harness, "local_sgd.py", nodes=2, epochs=6)
    sent = re.search(r"^sent between nodes: ([\d,]+) numbers, (\d+)% of the ([\d,]+) of DDP$", log, re.MULTILINE)
    assert int(sent[2]) < 40
    epochs = curve(torch_harness)
    assert epochs[-1][2]["accuracy"] > 0.8
    # While the nodes average after every step, it is DDP.
    train(torch_harness, "mnist_ddp.py", nodes=2, epochs=2, name="job-2-1")
    together, apart = curve(torch_harness, "job-2-1")
    assert epochs[0] == together
    assert epochs[1] != apart


@pytest.mark.slow
@pytest.mark.parametrize(("script", "next_script"), list(zip(SPLIT, [*SPLIT[1:], SPLIT[0]], strict=True)))
def test_a_split_model_trains_like_the_whole_one_and_resumes_in_another_shape(text_harness, script, next_script):
    harness, lr = text_harness, "0.003"
    done, saved = stop_after_an_epoch(harness, script, workers_per_node=2, batch_size=16, lr=lr)
    # One checkpoint is kept, and that is whole.
    assert len(list(harness.folder.rglob("step-*"))) == len(list(harness.folder.rglob("step-*/.metadata"))) == 1
    on_four = {"nodes": 2, "workers_per_node": 2, "batch_size": 8, "lr": lr, "epochs": done + 2}
    log = train(harness, next_script, checkpoint_key="job-1", name="job-1-2", restart_count=1, **on_four)
    assert f"resumed {saved}; restart 1" in log.splitlines()
    assert (harness.backend.output_folder("job-1") / "model" / ".metadata").exists()
    assert {
        "fsdp2.py": "each rank holds 59,104 of 236,416 parameters",
        "tensor_parallel.py": "mesh of 2 x 2: data x tensor",
        "pipeline_parallel.py": "blocks of each stage: [[0], [1], [2], [3]]",
    }[next_script] in log
    for output in (harness.log(), log):
        gap = re.search(r"^equal to the whole model: loss and gradients differ by (\S+) at most$", output, re.MULTILINE)
        assert 0 < float(gap[1]) < 1e-6

    # The whole model, which nobody ended, in one process: all comes to the same, up to the order of sums.
    train(harness, "train.py", WHOLE, name="job-2-1", batch_size=32, lr=lr, epochs=done + 2)
    whole, begun, went_on = curve(harness, "job-2-1"), curve(harness), curve(harness, "job-1-2")
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


@pytest.mark.slow
def test_a_script_of_2019_runs_unchanged(torch_harness):
    log = train(torch_harness, "legacy_mnist.py", nodes=4, lr="0.05")
    assert float(re.search(r"Test Accuracy: (\S+)", log)[1]) > 0.3


@pytest.mark.slow
def test_local_sgd_trains_in_two_processes_of_a_node(torch_harness):
    train(torch_harness, "local_sgd.py", workers_per_node=2, batch_size=16, epochs=1)
    assert [epoch for epoch, _step, _values in curve(torch_harness)] == [1]

"""The PyTorch examples, trained on digits and on text."""

import json
import re
import shutil

import pytest

from jobs.telemetry import parse_line
from runtime.specs import Outcome, Resources
from tests.runtime.backends import hostile
from tests.runtime.images_of_ours import EXAMPLES, load_example, use_image

pytestmark = [
    pytest.mark.cores(2),
    pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds"),
    pytest.mark.torch,
]

SMALL_NODE = Resources(cpus=1.5, memory_mib=1024)
"""More than one core, because importing torch is slow; less than two, so that each rank gets one thread."""
RUN_SECONDS = 240
"""How long a run may take on a busy machine."""
NODE = {"resources": SMALL_NODE, "deadline_seconds": RUN_SECONDS}
TRAINING_IMAGES = 1437
"""Images of digits that `mnist_ddp.py` and `local_sgd.py` train on in an epoch."""
ONE_BATCH = 2000
"""A batch size with which one rank sees all these images in one step."""
TEXT_KILOBYTES = 30
"""The small text of these tests: 14 steps of 32 pieces in an epoch."""
SPLIT = {
    "tensor_parallel.py": "mesh of 2 x 2: data x tensor",
    "pipeline_parallel.py": "blocks of each stage: [[0], [1], [2], [3]]",
    "fsdp2.py": "each rank holds 59,104 of 236,416 parameters",
}
"""The ways to split a model, and what rank 0 of four says of it."""
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
"""A script that trains the model of these examples as a whole, in one process."""


@pytest.fixture
def torch_harness(harness, digits):
    """A harness with the PyTorch image, the examples in the workspace and the digits as dataset.

    As in a console, ranks are forked from an interpreter that has imported torch: a test starts up to fifteen
    ranks.
    """
    use_image(harness, "pytorch")
    harness.patience = RUN_SECONDS
    hostile.warm(harness)  # every run from here on starts warm
    for script in EXAMPLES.glob("*.py"):
        shutil.copy(script, harness.workspace)
    shutil.unpack_archive(digits, harness.dataset, filter="data")
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


def stop_after_an_epoch(harness, script, job="job-1", **changes):
    """Run a job's first attempt and stop it after an epoch; return the epochs done and the place of its checkpoint."""
    name = f"{job}-1"
    harness.submit("", script=script, name=name, checkpoint_key=job, epochs=500, **{**NODE, **changes})
    harness.wait_for_text("epoch 1/500", name)
    harness.backend.stop(name, grace_seconds=30)
    harness.wait_for_outcome(Outcome.STOPPED, name)
    last_line = harness.log(name=name).splitlines()[-1]
    reported = re.fullmatch(r"stopped by SIGTERM: saved (after epoch (\d+), \w+ \d+)", last_line)
    assert len(curve(harness, name)) == int(reported[2])
    return int(reported[2]), reported[1]


def stop_and_resume(harness, script, job, epochs, **shape):
    """Stop a job of 16 images in a step, and train for more epochs; return the last output and the whole curve."""
    done, saved = stop_after_an_epoch(harness, script, job, **shape)
    epochs += done
    log = train(harness, script, checkpoint_key=job, name=f"{job}-2", restart_count=1, epochs=epochs, **shape)
    assert f"resumed {saved}; restart 1" in log.splitlines()
    points = curve(harness, f"{job}-1") + curve(harness, f"{job}-2")
    every_image_once = [(epoch, epoch * -(-TRAINING_IMAGES // 16)) for epoch in range(1, epochs + 1)]
    assert [(epoch, step) for epoch, step, _values in points] == every_image_once
    return log, points


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
def test_ddp_and_local_sgd_resume_within_an_epoch_and_agree_in_their_first_epoch(torch_harness):
    shape = {"nodes": 2, "workers_per_node": 2, "batch_size": 4, "lr": "0.005"}
    _log, resumed = stop_and_resume(torch_harness, "mnist_ddp.py", "job-1", 2, **shape)
    # A training without an interruption gives the same values up to rounding, which may change two of 360 answers. It
    # is rounding: in float64 both end with the same weights up to 1e-15, and with one rank bit by bit. In float32 a
    # change of the weights by 1e-7 in the middle changes as many answers.
    train(torch_harness, "mnist_ddp.py", name="job-2-1", epochs=len(resumed), **shape)
    whole = curve(torch_harness, "job-2-1")
    assert (whole[-1].epoch, whole[-1].step) == (resumed[-1].epoch, resumed[-1].step)
    assert whole[-1].values == {name: pytest.approx(value, abs=0.006) for name, value in resumed[-1].values.items()}
    # Local SGD is DDP while the nodes average after every step, in its first epoch. Later they average rarely.
    log, local = stop_and_resume(torch_harness, "local_sgd.py", "job-3", 4, **shape)
    sent = re.search(r"^sent between nodes: ([\d,]+) numbers, (\d+)% of the ([\d,]+) of DDP$", log, re.MULTILINE)
    assert int(sent[2]) < 40
    assert local[0][2] == {name: pytest.approx(value, abs=1e-3) for name, value in whole[0][2].items()}
    assert local[-1][2]["accuracy"] > 0.8


def test_a_text_without_a_batch_is_refused_with_advice(text_harness):
    (text_harness.dataset / "python.txt").write_text("short")
    text_harness.submit("", script="fsdp2.py", batch_size=32, lr="0.02", **NODE)
    text_harness.wait_for_outcome(Outcome.CODE_FAILED)
    assert "The test set has 0 sequences, fewer than a batch of 32. Use more text" in text_harness.all_logs("job-1-1")


@pytest.mark.slow
def test_an_example_stops_after_an_epoch_of_one_batch(torch_harness):
    for job, script in (("job-1", "mnist_ddp.py"), ("job-2", "local_sgd.py")):
        stop_after_an_epoch(torch_harness, script, job, batch_size=ONE_BATCH, lr="0.02")


@pytest.mark.slow
def test_a_split_model_trains_like_the_whole_one_and_resumes_in_another_shape(text_harness):
    """FSDP on two ranks is stopped, and resumed on four ranks by each way to split the model in turn."""
    harness, lr = text_harness, "0.003"
    done, saved = stop_after_an_epoch(harness, "fsdp2.py", workers_per_node=2, batch_size=16, lr=lr)
    # One checkpoint is kept, and it is complete.
    assert len(list(harness.folder.rglob("step-*"))) == len(list(harness.folder.rglob("step-*/.metadata"))) == 1
    on_four = {"nodes": 2, "workers_per_node": 2, "batch_size": 8, "lr": lr, "checkpoint_key": "job-1"}
    logs, attempts = [harness.log()], [curve(harness)]
    for number, (script, says) in enumerate(SPLIT.items(), 1):
        name = f"job-1-{number + 1}"
        logs.append(train(harness, script, name=name, restart_count=number, epochs=done + number, **on_four))
        assert f"resumed {saved}; restart {number}" in logs[-1].splitlines()
        assert says in logs[-1]
        assert (harness.backend.output_folder("job-1") / "model" / ".metadata").exists()
        attempts.append(curve(harness, name))
        saved = f"after epoch {done + number}, batch 0"
    for log in logs:
        gap = re.search(r"^equal to the whole model: loss and gradients differ by (\S+) at most$", log, re.MULTILINE)
        assert 0 < float(gap[1]) < 1e-6  # 0 would mean that a model was compared with itself

    # The whole model, in one process and without interruption, gives the same values up to rounding.
    train(harness, "train.py", WHOLE, name="job-2-1", batch_size=32, lr=lr, epochs=done + len(SPLIT))
    whole, split = curve(harness, "job-2-1"), [point for attempt in attempts for point in attempt]
    assert [(epoch, step) for epoch, step, _values in split] == [(epoch, step) for epoch, step, _values in whole]
    for place, ((_epoch, _step, values), (_same, _place, expected)) in enumerate(zip(split, whole, strict=True)):
        # The epoch at `done` was interrupted: its loss covers only the steps since the resumption.
        names = {"accuracy"} if place == done else {"accuracy", "loss"}
        assert {name: values[name] for name in names} == {
            name: pytest.approx(expected[name], abs=2e-3) for name in names
        }
    assert whole[-1][2]["loss"] < whole[0][2]["loss"] < 5.5  # the loss of a guess among 256 bytes is 5.55
    assert whole[-1][2]["accuracy"] > 0.15


@pytest.mark.slow
def test_a_script_of_2019_runs_unchanged(torch_harness):
    log = train(torch_harness, "legacy_mnist.py", nodes=2, lr="0.05")
    assert float(re.search(r"Test Accuracy: (\S+)", log)[1]) > 0.3

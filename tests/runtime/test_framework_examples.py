"""The Horovod and TensorFlow examples, trained on digits in their images."""

import json
import re
import shutil

import pytest

from runtime.specs import Controller, Framework, Outcome, Resources
from tests.runtime.images_of_ours import EXAMPLES, use_image

pytestmark = [
    pytest.mark.torch,
    pytest.mark.late("its runs are real processes, with time limits of seconds"),
    pytest.mark.cores(2),
    pytest.mark.slow,
]

NODE = Resources(cpus=1.5, memory_mib=3072)
RUN_SECONDS = 300
"""How long a run may take on a busy machine."""
FRAMEWORKS = {
    "mnist_horovod.py": Framework.HOROVOD,
    "mnist_tensorflow.py": Framework.TENSORFLOW,
    "mnist_keras.py": Framework.TENSORFLOW,
}


@pytest.fixture
def train(harness, digits):
    """A function that runs an example on the digits and returns the output of rank 0."""
    shutil.unpack_archive(digits, harness.dataset)
    harness.patience = RUN_SECONDS

    def run(script, *, end=Outcome.COMPLETED, stop_at="", **changes):
        framework = FRAMEWORKS[script]
        use_image(harness, framework.value)
        spec = harness.spec(
            "",
            script=script,
            framework=framework,
            **{"resources": NODE, "lr": "0.02", "deadline_seconds": RUN_SECONDS, "checkpoint_key": "job-1", **changes},
        )
        shutil.copy(EXAMPLES / script, harness.workspace)
        harness.backend.submit(spec)
        if stop_at:
            harness.wait_for_text(stop_at, spec.name)
            harness.backend.stop(spec.name, 60)
        status = harness.wait_for_end(spec.name)
        assert status.outcome is end, f"{status}\n{harness.all_logs(spec.name)}"
        return harness.log(name=spec.name)

    return run


def result(log):
    match = re.search(r"^result: test accuracy (\S+), loss (\S+) -> (\S+)$", log, re.MULTILINE)
    accuracy, first, last = map(float, match.groups())
    return accuracy, first, last


@pytest.mark.parametrize(
    ("script", "shape", "controller"),
    [
        ("mnist_horovod.py", (2, 2), Controller.GLOO),
        ("mnist_horovod.py", (2, 1), Controller.MPI),
        ("mnist_tensorflow.py", (2, 2), Controller.GLOO),
        ("mnist_keras.py", (2, 1), Controller.GLOO),
    ],
)
def test_an_example_learns(train, harness, script, shape, controller):
    nodes, workers = shape
    log = train(script, controller=controller, nodes=nodes, workers_per_node=workers, epochs=4)
    assert re.search(r"^epoch 4/4 step \d+ loss \d\.\d+ accuracy 0\.\d+$", log, re.MULTILINE), log
    accuracy, first, last = result(log)
    assert accuracy > 0.7
    assert last < first / 2
    assert [path.stem for path in harness.backend.output_folder("job-1").iterdir()] in (["model"], ["model.weights"])
    lines = (harness.backend.run_folder("job-1-1") / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [line["epoch"] for line in metrics] == [1, 2, 3, 4]
    steps = -(-1437 // (32 * nodes * workers))
    assert [line["step"] for line in metrics] == [steps * epoch for epoch in (1, 2, 3, 4)], "each rank takes its share"


@pytest.mark.parametrize("script", FRAMEWORKS)
def test_an_example_resumes_on_another_number_of_nodes(train, harness, script):
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
def test_an_example_saves_within_an_epoch_when_it_is_stopped(train, harness, script):
    log = train(script, epochs=500, nodes=2, end=Outcome.STOPPED, stop_at="epoch 1/500")
    reported = re.search(r"^stopped by SIGTERM: saved after epoch (\d+), image (\d+)$", log, re.MULTILINE)
    done, seen = map(int, reported.groups())
    log = train(script, epochs=done + 1, nodes=2, name="job-1-2", restart_count=1)
    assert f"resumed after epoch {done}, image {seen}; restart 1" in log
    assert f"epoch {done + 1}/{done + 1}" in log


def test_a_horovod_script_for_keras_2_runs_unchanged(harness):
    use_image(harness, "horovod-tensorflow")
    harness.patience = RUN_SECONDS
    harness.complete(
        """
        import tensorflow as tf, horovod.tensorflow as hvd
        hvd.init()
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
        optimizer = tf.optimizers.SGD(0.01)
        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.ones((2, 4))) ** 2)
            tape = hvd.DistributedGradientTape(tape)
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)
        step()
        print("trained on", hvd.size())
        """,
        framework=Framework.HOROVOD,
        resources=NODE,
        nodes=2,
        deadline_seconds=RUN_SECONDS,
    )
    assert "trained on 2" in harness.log()

"""The Horovod and TensorFlow examples, trained on digits in their images."""

import re
import shutil

import pytest

from runtime.specs import Controller, Framework, Outcome, Resources
from tests.runtime.images_of_ours import EXAMPLES, use_image
from tests.runtime.test_examples import ONE_BATCH, curve, stop_after_an_epoch, train

pytestmark = [
    pytest.mark.torch,  # real training in a built image, also in one without PyTorch
    pytest.mark.rerun_if_late("its runs are real processes, with time limits of seconds"),
    pytest.mark.cores(2),
    pytest.mark.slow,
]

NODE = {"resources": Resources(cpus=1.5, memory_mib=3072), "deadline_seconds": 300}


@pytest.fixture
def examples(harness, digits):
    """A harness with the examples in the workspace and the digits as dataset."""
    for script in EXAMPLES.glob("*.py"):
        shutil.copy(script, harness.workspace)
    shutil.unpack_archive(digits, harness.dataset, filter="data")
    harness.patience = 300
    return harness


def assert_learned(harness, log, first):
    """The run `job-1-2` has trained from this epoch on, and its model is there."""
    match = re.search(r"^result: test accuracy (\S+), loss (\S+) -> (\S+)$", log, re.MULTILINE)
    accuracy, loss_before, loss_after = map(float, match.groups())
    assert accuracy > 0.7
    assert loss_after < loss_before
    (model,) = harness.backend.output_folder("job-1").iterdir()
    assert model.name in {"model.pt", "model.weights.h5"}  # of Horovod with PyTorch, and of TensorFlow
    epochs = [epoch for epoch, _step, _values in curve(harness, "job-1-2")]
    assert epochs == list(range(first, first + len(epochs)))


@pytest.mark.parametrize(
    ("script", "framework", "controller"),
    [
        ("mnist_horovod.py", Framework.HOROVOD, Controller.MPI),
        ("mnist_tensorflow.py", Framework.TENSORFLOW, Controller.GLOO),
    ],
)
def test_an_example_resumes_in_another_shape_after_a_stop_and_learns(examples, script, framework, controller):
    """Horovod is stopped with its Gloo controller, and goes on with MPI."""
    use_image(examples, framework.value)
    settings = {**NODE, "framework": framework, "nodes": 2, "lr": "0.02"}
    done, saved = stop_after_an_epoch(examples, script, workers_per_node=2, **settings)
    settings |= {"controller": controller, "checkpoint_key": "job-1", "epochs": done + 4}
    log = train(examples, script, name="job-1-2", restart_count=1, **settings)
    assert f"resumed {saved}; restart 1" in log
    assert_learned(examples, log, done + 1)


@pytest.mark.parametrize(
    ("script", "framework"),
    [("mnist_horovod.py", Framework.HOROVOD), ("mnist_tensorflow.py", Framework.TENSORFLOW)],
)
def test_an_example_stops_after_an_epoch_of_one_batch(examples, script, framework):
    """The scripts look for SIGTERM after every fourth batch. After an epoch of at most four they must look too."""
    use_image(examples, framework.value)
    stop_after_an_epoch(examples, script, batch_size=ONE_BATCH, lr="0.02", framework=framework, **NODE)


def test_the_tensorflow_example_resumes_after_it_was_killed_while_it_replaced_a_checkpoint(examples):
    use_image(examples, "tensorflow")
    settings = {**NODE, "framework": Framework.TENSORFLOW, "checkpoint_key": "job-1"}
    # For each checkpoint, TensorFlow updates twice the file that names the last one. At the third update the files of
    # the second checkpoint exist, but that file still names the first.
    source = """
    import os, runpy, signal
    from tensorflow.python.checkpoint import checkpoint_management
    update, updates = checkpoint_management.update_checkpoint_state_internal, []
    def count_and_update(*arguments, **options):
        updates.append(1)
        if len(updates) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        update(*arguments, **options)
    checkpoint_management.update_checkpoint_state_internal = count_and_update
    runpy.run_path("mnist_tensorflow.py", run_name="__main__")
    """
    examples.run_to_failure(Outcome.CODE_FAILED, source, epochs=3, lr="0.02", **settings)
    assert [epoch for epoch, _step, _values in curve(examples)] == [1]
    log = train(examples, "mnist_tensorflow.py", epochs=3, name="job-1-2", restart_count=1, **settings)
    assert "resumed after epoch 1, image 0; restart 1" in log
    assert [epoch for epoch, _step, _values in curve(examples, "job-1-2")] == [2, 3]


def test_the_keras_example_resumes_on_another_number_of_nodes_and_learns(examples):
    use_image(examples, "tensorflow")
    settings = {**NODE, "framework": Framework.TENSORFLOW, "checkpoint_key": "job-1"}
    train(examples, "mnist_keras.py", epochs=2, nodes=2, **settings)
    log = train(examples, "mnist_keras.py", epochs=5, name="job-1-2", restart_count=1, **settings)
    assert_learned(examples, log, 3)


def test_a_horovod_script_for_keras_2_runs_unchanged(harness):
    use_image(harness, "horovod-tensorflow")
    harness.patience = 300
    source = """
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
    """
    harness.complete(source, framework=Framework.HOROVOD, nodes=2, **NODE)
    assert "trained on 2" in harness.log()

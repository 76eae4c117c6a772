"""Train a small convolutional network on digits in MNIST's file format with MultiWorkerMirroredStrategy.

This is a custom training loop; mnist_keras.py uses `model.fit`. It runs on any number of nodes, which TF_CONFIG lists,
and

- scales the learning rate with the number of processes, and warms it up over the first epoch;
- reads only this rank's share of the images, and prefetches a few batches;
- evaluates on all ranks and reduces the result, so that every test image counts once;
- writes a checkpoint after each epoch on rank 0, and resumes from it in a later attempt;
- on SIGTERM writes a checkpoint in the middle of the epoch, and exits with code 143.

Order: the image `tensorflow`, a dataset from make_digits.py, learning rate 0.02, batch size 32, 1 node or more.
"""

import json
import math
import os
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path

# Before the import: hides TensorFlow's start-up messages and warnings, but no errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

EPOCHS = int(os.environ["EPOCHS"])
LEARNING_RATE = float(os.environ["LR"])
BATCH_SIZE = int(os.environ["BATCH_SIZE"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CHECKPOINTS = Path(os.environ["CHECKPOINT_DIR"]) / "mnist"
"""The folder of the last checkpoint."""
OUTPUT = Path(os.environ["OUTPUT_DIR"]) / "model.weights.h5"
"""The trained model."""
STOP_CHECK_STEPS = 4
"""Steps between two small all-reduces by which the ranks find out whether any rank has received SIGTERM.

An all-reduce after each step would slow the training down. A few steps take much less than the grace period (10
seconds).
"""


def read_idx(path):
    """Return the array in a file of MNIST's idx format: a magic number, the sizes of the dimensions, bytes."""
    data = path.read_bytes()
    dimensions = data[3]  # the last byte of the magic number
    sizes = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    return np.frombuffer(data[4 + 4 * dimensions :], np.uint8).reshape(sizes)


def read_digits(part):
    """Return the images, with a channel dimension and values around 0, and their labels."""
    folder = Path(os.environ["DATASETS_PATH"]) / os.environ["DATASETS"].split(",")[0] / "MNIST" / "raw"
    images = read_idx(folder / f"{part}-images-idx3-ubyte")[..., None].astype(np.float32) / 255
    images = (images - 0.15) / 0.3  # about the mean and the standard deviation of the pixels
    return images, read_idx(folder / f"{part}-labels-idx1-ubyte").astype(np.int64)


def create_loader(images, labels, epoch):
    """Return this rank's batches of one epoch. All ranks shuffle with the same seed."""
    order = np.random.default_rng((7, epoch)).permutation(len(labels))
    images_per_rank = math.ceil(len(order) / WORLD_SIZE)
    # `resize` repeats the first images, so that all ranks get equally many.
    order = np.resize(order, images_per_rank * WORLD_SIZE)[RANK::WORLD_SIZE]
    return tf.data.Dataset.from_tensor_slices((images[order], labels[order])).batch(BATCH_SIZE).prefetch(4)


def build_model():
    """Return two convolutions and a linear layer. Group normalization needs no communication between ranks."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, padding="same"),
            layers.GroupNormalization(4),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same"),
            layers.GroupNormalization(4),
            layers.ReLU(),
            layers.AveragePooling2D(3),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def learning_rate(step, steps_in_epoch):
    """Return the ordered learning rate times the number of processes, with a linear warm-up over the first epoch."""
    return LEARNING_RATE * (1 + (WORLD_SIZE - 1) * min(1, step / steps_in_epoch))


class Training:
    """The model and its optimizer, mirrored on every rank, and their collective operations."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            tf.keras.utils.set_random_seed(7)
            self.model = build_model()
            self.optimizer = tf.keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)
            # Creates the optimizer's variables now, so that they exist when `restore` reads the checkpoint.
            self.optimizer.build(self.model.trainable_variables)
        self.epochs_done, self.images_done, self.step = (tf.Variable(0, dtype=tf.int64) for _ in range(3))
        self.checkpoint = tf.train.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            epochs_done=self.epochs_done,
            images_done=self.images_done,
            step=self.step,
        )
        # All ranks must write, since writing may gather variables. The files of all ranks but 0 are deleted at exit.
        self.unused = tempfile.TemporaryDirectory()
        self.manager = tf.train.CheckpointManager(
            self.checkpoint, CHECKPOINTS if RANK == 0 else self.unused.name, max_to_keep=1
        )

    def restore(self):
        """Read rank 0's last checkpoint on every rank; return whether there is one."""
        path = tf.train.latest_checkpoint(CHECKPOINTS)
        if path is None:
            return False
        self.checkpoint.restore(path).assert_existing_objects_matched()
        return True

    def save(self):
        """Write a checkpoint, and delete the one before.

        The run may be killed at any moment. So the manager first writes new files. Then it replaces the file
        `checkpoint`, which names the newest files, and only then deletes the older files.
        """
        self.manager.save()

    @tf.function(reduce_retracing=True)
    def train(self, images, labels):
        """Take one step; return the mean loss over all ranks."""

        def train_rank(images, labels):
            with tf.GradientTape() as tape:
                output = self.model(images, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, output)
                # The optimizer sums the gradients of the ranks.
                loss = tf.reduce_mean(losses) / WORLD_SIZE
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        return self.strategy.reduce("SUM", self.strategy.run(train_rank, args=(images, labels)), axis=None)

    @tf.function
    def sum(self, value):
        """Return the value summed over all ranks."""
        return self.strategy.reduce("SUM", self.strategy.run(lambda value: value, args=(value,)), axis=None)

    @tf.function
    def count_correct(self, images, labels):
        """Return the number of correct images, the sum of the losses, and the number of images, over all ranks."""

        def count_on_rank(images, labels):
            output = self.model(images, training=False)
            correct = tf.cast(tf.argmax(output, 1) == labels, tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, output)
            return tf.stack([tf.reduce_sum(correct), tf.reduce_sum(losses), tf.cast(tf.size(labels), tf.float32)])

        return self.strategy.reduce("SUM", self.strategy.run(count_on_rank, args=(images, labels)), axis=None)

    def evaluate(self, images, labels):
        """Return accuracy and mean loss on the test set. Each rank evaluates its share of the images."""
        share = tf.constant(images[RANK::WORLD_SIZE]), tf.constant(labels[RANK::WORLD_SIZE])
        correct, loss, count = self.count_correct(*share).numpy()
        return correct / count, loss / count


def report_epoch(epoch, step, **values):
    """On rank 0, print a line and append it to METRICS_FILE, from which the console draws curves."""
    if RANK == 0:
        text = " ".join(f"{name} {value:.4f}" for name, value in values.items())
        print(f"epoch {epoch}/{EPOCHS} step {step} {text}", flush=True)
        line = {"epoch": epoch, "epochs": EPOCHS, "step": step, **values, "time": time.time()}
        with Path(os.environ["METRICS_FILE"]).open("a") as file:
            file.write(json.dumps(line, default=float) + "\n")  # `float`, because JSON has no NumPy numbers


def main():
    """Train, evaluate after each epoch, and report."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[int(os.environ["LOCAL_RANK"])], "GPU")
    training = Training(tf.distribute.MultiWorkerMirroredStrategy())
    # After the strategy, which sets a handler of its own.
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *_: stop_signals.append(True))
    images, labels = read_digits("train")
    test = read_digits("t10k")
    if training.restore() and RANK == 0:
        place = f"after epoch {int(training.epochs_done)}, image {int(training.images_done)}"
        print(f"resumed {place}; restart {os.environ['RESTART_COUNT']}", flush=True)
    # Progress within an epoch is counted in images, since a later attempt may have batches of another size.
    step, images_done, total_batch_size = int(training.step), int(training.images_done), BATCH_SIZE * WORLD_SIZE

    def must_stop():
        # All ranks must agree to stop, or the others would wait for those that have stopped.
        return training.sum(tf.constant(float(len(stop_signals)))) > 0

    accuracy, loss = training.evaluate(*test)
    first_loss, is_stopping = loss, False
    for epoch in range(int(training.epochs_done) + 1, EPOCHS + 1):
        loader = create_loader(images, labels, epoch)
        losses = []
        batches_done = images_done // total_batch_size
        for batch, (inputs, targets) in enumerate(loader.skip(batches_done), batches_done + 1):
            training.optimizer.learning_rate.assign(learning_rate(step, len(loader)))
            losses.append(training.train(inputs, targets))
            step += 1
            # No check after the last batch: the epoch is finished and saved below. A checkpoint here would leave a
            # later attempt an epoch with no batch left.
            if batch % STOP_CHECK_STEPS == 0 and batch < len(loader) and must_stop():
                is_stopping, images_done = True, batch * total_batch_size
                break
        if not is_stopping:
            training.epochs_done.assign(epoch)
            images_done = 0
        training.images_done.assign(images_done)
        training.step.assign(step)
        training.save()
        if is_stopping:
            break
        accuracy, loss = training.evaluate(*test)
        report_epoch(epoch, step, loss=np.mean(losses), accuracy=accuracy)
        # Check after each epoch too, because an epoch may have too few batches for a check within it.
        if epoch < EPOCHS and must_stop():
            is_stopping = True
            break
    if RANK == 0:
        if not is_stopping:
            # Unlike a checkpoint, this needs no other rank: Keras 3 writes rank 0's copy of each weight.
            training.model.save_weights(OUTPUT)
        print(f"result: test accuracy {accuracy:.4f}, loss {first_loss:.2f} -> {loss:.2f}", flush=True)
        if is_stopping:
            print(f"stopped by SIGTERM: saved after epoch {int(training.epochs_done)}, image {images_done}", flush=True)
    if is_stopping:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()

"""Train a small convolutional network on MNIST-layout digits with TensorFlow's MultiWorkerMirroredStrategy.

A loop of its own (for `model.fit`, see mnist_keras.py), on any number of nodes: TF_CONFIG says who the others are. It

- scales the learning rate with the number of processes, and warms it up over the first epoch;
- reads only this rank's share of the images, a few batches ahead;
- evaluates on all ranks and reduces the result, so that every test image counts once;
- writes a checkpoint after each epoch on rank 0, and goes on from it when it is started again; on SIGTERM it writes one
  at once, in the middle of the epoch, and leaves with exit code 143.

Buy: the image `tensorflow`, a dataset made by make_digits.py, learning rate 0.02, batch size 32, 1 node or more.
"""

import json
import os
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

EPOCHS = int(os.environ["EPOCHS"])
LEARNING_RATE = float(os.environ["LR"])
BATCH_SIZE = int(os.environ["BATCH_SIZE"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CHECKPOINT = str(Path(os.environ["CHECKPOINT_DIR"]) / "mnist")
ASK_EVERY = 4
"""Steps between two questions to all ranks whether one was told to end; a question is a small all-reduce."""


def read_idx(path):
    """One file of MNIST's format: a magic number that ends in the number of dimensions, their sizes, then bytes."""
    data = path.read_bytes()
    dimensions = data[3]
    sizes = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    return np.frombuffer(data[4 + 4 * dimensions :], np.uint8).reshape(sizes)


def read_digits(part):
    """The images, with a channel dimension and values around 0, and their labels."""
    folder = Path(os.environ["DATASETS_PATH"]) / os.environ["DATASETS"].split(",")[0] / "MNIST" / "raw"
    images = read_idx(folder / f"{part}-images-idx3-ubyte")[..., None].astype(np.float32) / 255
    return (images - 0.15) / 0.3, read_idx(folder / f"{part}-labels-idx1-ubyte").astype(np.int64)


def share_of(images, labels, epoch):
    """Batches of this rank's share of one epoch. Dealt by the same dice on every rank, so that all have as many."""
    order = np.random.default_rng((7, epoch)).permutation(len(labels))
    order = np.resize(order, -(-len(order) // WORLD_SIZE) * WORLD_SIZE)[RANK::WORLD_SIZE]
    return tf.data.Dataset.from_tensor_slices((images[order], labels[order])).batch(BATCH_SIZE).prefetch(4)


def build():
    """Two convolutions and a linear layer; group normalization needs no word between the ranks."""
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
    """The learning rate bought, times the number of processes; reached in a straight line over the first epoch."""
    return LEARNING_RATE * (1 + (WORLD_SIZE - 1) * min(1, step / steps_in_epoch))


class Training:
    """The model and its optimizer, mirrored on every rank, and what all ranks do together."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            tf.keras.utils.set_random_seed(7)
            self.model = build()
            self.optimizer = tf.keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)
            self.optimizer.build(self.model.trainable_variables)
        self.done, self.seen, self.step = (tf.Variable(0, dtype=tf.int64) for _ in range(3))
        self.checkpoint = tf.train.Checkpoint(
            model=self.model, optimizer=self.optimizer, done=self.done, seen=self.seen, step=self.step
        )

    def restore(self):
        """Every rank reads what rank 0 wrote. Gives whether there was anything."""
        if not Path(f"{CHECKPOINT}.index").exists():
            return False
        self.checkpoint.read(CHECKPOINT).assert_existing_objects_matched()
        return True

    def save(self):
        """Every rank writes, since variables may be gathered for it; what others than rank 0 write is thrown away."""
        with tempfile.TemporaryDirectory(dir=os.environ["CHECKPOINT_DIR"] if RANK == 0 else None) as folder:
            written = Path(self.checkpoint.write(f"{folder}/mnist"))
            if RANK == 0:
                # The index last: it names the data, and a run may be cut off at any moment.
                for path in sorted(written.parent.glob("mnist.*"), key=lambda path: path.suffix == ".index"):
                    path.replace(Path(CHECKPOINT).parent / path.name)

    @tf.function(reduce_retracing=True)
    def train(self, images, labels):
        """One step on this rank's batch. Gives the mean loss over all ranks."""

        def one(images, labels):
            with tf.GradientTape() as tape:
                output = self.model(images, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, output)
                # The optimizer adds up what the ranks found.
                loss = tf.reduce_mean(losses) / WORLD_SIZE
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        return self.strategy.reduce("SUM", self.strategy.run(one, args=(images, labels)), axis=None)

    @tf.function
    def sum(self, value):
        """The value, summed over all ranks."""
        return self.strategy.reduce("SUM", self.strategy.run(lambda value: value, args=(value,)), axis=None)

    @tf.function
    def judge(self, images, labels):
        """How many are right, the sum of their losses and how many there are, over all ranks."""

        def one(images, labels):
            output = self.model(images, training=False)
            right = tf.cast(tf.argmax(output, 1) == labels, tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, output)
            return tf.stack([tf.reduce_sum(right), tf.reduce_sum(losses), tf.cast(tf.size(labels), tf.float32)])

        return self.strategy.reduce("SUM", self.strategy.run(one, args=(images, labels)), axis=None)

    def evaluate(self, images, labels):
        """Accuracy and mean loss on the test set; every rank takes its share of the images."""
        share = tf.constant(images[RANK::WORLD_SIZE]), tf.constant(labels[RANK::WORLD_SIZE])
        right, loss, count = self.judge(*share).numpy()
        return right / count, loss / count


def tell(epoch, step, **values):
    """Rank 0 says how it goes: a line of output for people, one of METRICS_FILE for the curves."""
    if RANK == 0:
        words = " ".join(f"{name} {value:.4f}" for name, value in values.items())
        print(f"epoch {epoch}/{EPOCHS} step {step} {words}", flush=True)
        line = {"epoch": epoch, "epochs": EPOCHS, "step": step, **values, "time": time.time()}
        with Path(os.environ["METRICS_FILE"]).open("a") as file:
            file.write(json.dumps(line, default=float) + "\n")


def main():
    """Train, evaluate after each epoch, and tell how it went."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[int(os.environ["LOCAL_RANK"])], "GPU")
    training = Training(tf.distribute.MultiWorkerMirroredStrategy())
    # Not before: the strategy puts a handler of its own in its place, which only takes note.
    told_to_end = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(True))
    images, labels = read_digits("train")
    test = read_digits("t10k")
    if training.restore() and RANK == 0:
        place = f"after epoch {int(training.done)}, image {int(training.seen)}"
        print(f"resumed {place}; restart {os.environ['RESTART_COUNT']}", flush=True)
    step, seen, whole_batch = int(training.step), int(training.seen), BATCH_SIZE * WORLD_SIZE

    accuracy, loss = training.evaluate(*test)
    first_loss, ending = loss, False
    for epoch in range(int(training.done) + 1, EPOCHS + 1):
        loader = share_of(images, labels, epoch)
        losses = []
        begun = seen // whole_batch
        for batch, (inputs, targets) in enumerate(loader.skip(begun), begun + 1):
            training.optimizer.learning_rate.assign(learning_rate(step, len(loader)))
            losses.append(training.train(inputs, targets))
            step += 1
            # All ranks must agree to end, or those that go on would wait for the others.
            asked = batch % ASK_EVERY == 0 and batch < len(loader)
            if asked and training.sum(tf.constant(float(len(told_to_end)))) > 0:
                ending, seen = True, batch * whole_batch
                break
        if not ending:
            training.done.assign(epoch)
            seen = 0
        training.seen.assign(seen)
        training.step.assign(step)
        training.save()
        if ending:
            break
        accuracy, loss = training.evaluate(*test)
        tell(epoch, step, loss=float(np.mean(losses)) if losses else 0.0, accuracy=accuracy)
    if RANK == 0:
        print(f"result: test accuracy {accuracy:.4f}, loss {first_loss:.2f} -> {loss:.2f}", flush=True)
        if ending:
            print(f"told to end: saved after epoch {int(training.done)}, image {seen}", flush=True)
    if ending:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()

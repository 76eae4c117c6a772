"""Train on digits in MNIST's file format with `model.fit` over several nodes.

It uses MultiWorkerMirroredStrategy, under which Keras 3 cannot `fit`. TF_USE_LEGACY_KERAS, set before TensorFlow is
imported, selects Keras 2. The learning rate grows with the number of processes, and is warmed up. The data is sharded
and prefetched. `fit` evaluates on all ranks, and `BackupAndRestore` resumes after the last complete epoch.

Order: the image `tensorflow`, a dataset from make_digits.py, learning rate 0.02, batch size 32, 1 node or more.
"""

import json
import os
import struct
import tempfile
import time
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"
# Before the import: hides TensorFlow's start-up messages and warnings, but no errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

EPOCHS = int(os.environ["EPOCHS"])
LEARNING_RATE = float(os.environ["LR"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TOTAL_BATCH_SIZE = int(os.environ["BATCH_SIZE"]) * WORLD_SIZE
OUTPUT = Path(os.environ["OUTPUT_DIR"]) / "model.weights.h5"
"""The trained model."""


def read_idx(path):
    """Return the array in a file of MNIST's idx format: a magic number, the sizes of the dimensions, bytes."""
    data = path.read_bytes()
    dimensions = data[3]  # the last byte of the magic number
    sizes = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    return np.frombuffer(data[4 + 4 * dimensions :], np.uint8).reshape(sizes)


def read_digits(part):
    """Return batches of images, with a channel dimension and values around 0, and labels.

    Keras shards them over the ranks (`AutoShardPolicy.DATA`).
    """
    folder = Path(os.environ["DATASETS_PATH"]) / os.environ["DATASETS"].split(",")[0] / "MNIST" / "raw"
    images = read_idx(folder / f"{part}-images-idx3-ubyte")[..., None].astype(np.float32) / 255
    images = (images - 0.15) / 0.3  # about the mean and the standard deviation of the pixels
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte").astype(np.int64)
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    if part == "train":
        data = data.shuffle(len(labels), seed=7)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.batch(TOTAL_BATCH_SIZE).prefetch(4).with_options(options)


def build_model():
    """Return two convolutions and a linear layer. Group normalization needs no communication between ranks."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Conv2D(16, 3, padding="same", input_shape=(28, 28, 1)),
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


class WarmUp(tf.keras.callbacks.Callback):
    """Sets the ordered learning rate times the number of processes, with a linear warm-up over the first epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        """Set the learning rate of this step."""
        step = int(self.model.optimizer.iterations.numpy())
        warm_up = min(1, step / self.params["steps"])
        self.model.optimizer.learning_rate.assign(LEARNING_RATE * (1 + (WORLD_SIZE - 1) * warm_up))


class ReportEpoch(tf.keras.callbacks.Callback):
    """On rank 0, prints a line and appends it to METRICS_FILE, from which the console draws curves."""

    def on_epoch_end(self, epoch, logs=None):
        """Report after the evaluation of each epoch."""
        if RANK == 0:
            step = int(self.model.optimizer.iterations.numpy())
            values = {"loss": logs["loss"], "accuracy": logs["val_accuracy"]}
            text = " ".join(f"{name} {value:.4f}" for name, value in values.items())
            print(f"epoch {epoch + 1}/{EPOCHS} step {step} {text}", flush=True)
            line = {"epoch": epoch + 1, "epochs": EPOCHS, "step": step, **values, "time": time.time()}
            with Path(os.environ["METRICS_FILE"]).open("a") as file:
                file.write(json.dumps(line, default=float) + "\n")  # `float`, because JSON has no NumPy numbers


def main():
    """Fit and report."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[int(os.environ["LOCAL_RANK"])], "GPU")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    training, test = read_digits("train"), read_digits("t10k")
    with strategy.scope():
        tf.keras.utils.set_random_seed(7)
        model = build_model()
        model.compile(
            optimizer=tf.keras.optimizers.SGD(LEARNING_RATE, momentum=0.9),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    # `fit` would delete the backup at its end, but a run that is killed before it has saved the model needs the backup.
    backup = tf.keras.callbacks.BackupAndRestore(
        str(Path(os.environ["CHECKPOINT_DIR"]) / "keras"), delete_checkpoint=False
    )
    first_loss, _ = model.evaluate(test, verbose=0)
    model.fit(training, validation_data=test, epochs=EPOCHS, callbacks=[backup, WarmUp(), ReportEpoch()], verbose=0)
    loss, accuracy = model.evaluate(test, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        # All ranks must save, since saving may gather variables. The files of all ranks but 0 are deleted.
        model.save_weights(OUTPUT if RANK == 0 else Path(folder) / OUTPUT.name)
    if RANK == 0:
        print(f"result: test accuracy {accuracy:.4f}, loss {first_loss:.2f} -> {loss:.2f}", flush=True)


if __name__ == "__main__":
    main()

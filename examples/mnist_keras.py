"""Train on MNIST-layout digits with `model.fit` over several nodes: legacy Keras and MultiWorkerMirroredStrategy.

Keras 3 cannot `fit` under this strategy; TF_USE_LEGACY_KERAS, set before TensorFlow is imported, brings back Keras 2.
Everything else is Keras as usual: the learning rate grows with the number of processes and is warmed up, the data is
sharded and prefetched, `fit` evaluates on all ranks, `BackupAndRestore` goes on from the last epoch that was finished.

Buy: the image `tensorflow`, a dataset made by make_digits.py, learning rate 0.02, batch size 32, 1 node or more.
"""

import json
import os
import struct
import time
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

EPOCHS = int(os.environ["EPOCHS"])
LEARNING_RATE = float(os.environ["LR"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WHOLE_BATCH = int(os.environ["BATCH_SIZE"]) * WORLD_SIZE


def read_idx(path):
    """One file of MNIST's format: a magic number that ends in the number of dimensions, their sizes, then bytes."""
    data = path.read_bytes()
    dimensions = data[3]
    sizes = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    return np.frombuffer(data[4 + 4 * dimensions :], np.uint8).reshape(sizes)


def read_digits(part):
    """The images, with a channel dimension and values around 0, and their labels, as a dataset in batches.

    Keras deals it out to the ranks (`AutoShardPolicy.DATA`), and cuts each batch into theirs.
    """
    folder = Path(os.environ["DATASETS_PATH"]) / os.environ["DATASETS"].split(",")[0] / "MNIST" / "raw"
    images = read_idx(folder / f"{part}-images-idx3-ubyte")[..., None].astype(np.float32) / 255
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte").astype(np.int64)
    data = tf.data.Dataset.from_tensor_slices(((images - 0.15) / 0.3, labels))
    if part == "train":
        data = data.shuffle(len(labels), seed=7)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.batch(WHOLE_BATCH).prefetch(4).with_options(options)


def build():
    """Two convolutions and a linear layer; group normalization needs no word between the ranks."""
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
    """The learning rate bought, times the number of processes; reached in a straight line over the first epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        """Set it for this step."""
        step = int(self.model.optimizer.iterations.numpy())
        share = min(1, step / self.params["steps"])
        self.model.optimizer.learning_rate.assign(LEARNING_RATE * (1 + (WORLD_SIZE - 1) * share))


class Tell(tf.keras.callbacks.Callback):
    """Rank 0 says how it goes: a line of output for people, one of METRICS_FILE for the curves."""

    def on_epoch_end(self, epoch, logs=None):
        """Once for each epoch, after the evaluation."""
        if RANK == 0:
            step = int(self.model.optimizer.iterations.numpy())
            values = {"loss": logs["loss"], "accuracy": logs["val_accuracy"]}
            words = " ".join(f"{name} {value:.4f}" for name, value in values.items())
            print(f"epoch {epoch + 1}/{EPOCHS} step {step} {words}", flush=True)
            line = {"epoch": epoch + 1, "epochs": EPOCHS, "step": step, **values, "time": time.time()}
            with Path(os.environ["METRICS_FILE"]).open("a") as file:
                file.write(json.dumps(line, default=float) + "\n")


def main():
    """Fit, and tell how it went."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[int(os.environ["LOCAL_RANK"])], "GPU")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    training, test = read_digits("train"), read_digits("t10k")
    with strategy.scope():
        tf.keras.utils.set_random_seed(7)
        model = build()
        model.compile(
            optimizer=tf.keras.optimizers.SGD(LEARNING_RATE, momentum=0.9),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    backup = tf.keras.callbacks.BackupAndRestore(
        str(Path(os.environ["CHECKPOINT_DIR"]) / "keras"), delete_checkpoint=False
    )
    first_loss, _ = model.evaluate(test, verbose=0)
    model.fit(training, validation_data=test, epochs=EPOCHS, callbacks=[backup, WarmUp(), Tell()], verbose=0)
    loss, accuracy = model.evaluate(test, verbose=0)
    if RANK == 0:
        print(f"result: test accuracy {accuracy:.4f}, loss {first_loss:.2f} -> {loss:.2f}", flush=True)


if __name__ == "__main__":
    main()

"""Run a script that was written for Keras 2, unchanged: `with_legacy_keras.py SCRIPT ...`.

Legacy Keras must be requested before TensorFlow is imported. Keras downloads its own MNIST and checks the file's
digest. So `load_data` is replaced: it reads the run's first data set, in MNIST's layout, and repeats its images until
there are as many as in MNIST.
"""

import os
import runpy
import struct
import sys
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf


def read_idx(path):
    """Return the array in a file of MNIST's format."""
    data = path.read_bytes()
    dimensions = data[3]
    sizes = struct.unpack(f">{dimensions}I", data[4 : 4 + 4 * dimensions])
    return np.frombuffer(data[4 + 4 * dimensions :], np.uint8).reshape(sizes)


def load_data(path="mnist.npz"):
    """Return what `tf.keras.datasets.mnist.load_data` returns: images and labels for training, and those for tests."""
    folder = Path(os.environ["DATASETS_PATH"]) / os.environ["DATASETS"].split(",")[0] / "MNIST" / "raw"
    parts = []
    for part, size in (("train", 60000), ("t10k", 10000)):
        images = read_idx(folder / f"{part}-images-idx3-ubyte")
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte")
        order = np.resize(np.arange(len(labels)), size)  # scripts have MNIST's sizes written into them
        parts.append((images[order], labels[order]))
    return tuple(parts)


tf.keras.datasets.mnist.load_data = load_data
del sys.argv[0]  # as if the script had been started itself
runpy.run_path(sys.argv[0], run_name="__main__")

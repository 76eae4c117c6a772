"""Write scikit-learn's handwritten digits as an MNIST archive: real data, small enough to train on anywhere.

    python examples/make_digits.py digits.tar.gz

The 1,797 images of 8x8 pixels are enlarged to 28x28. They have MNIST's idx format and file names, so torchvision's
MNIST class can read them. The first 1,437 are for training and 360 for the test, in the published order of writers: no
writer is in both. Needs scikit-learn, numpy and pillow.
"""

from __future__ import annotations

import io
import struct
import sys
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

SIDE, MARGIN = 28, 4
"""MNIST's size of an image and of the empty margin around a digit, in pixels."""
TRAINING_IMAGES = 1437
"""The first images, of which no writer is in the test set."""
FOLDER = "MNIST/raw"
"""Where torchvision's class looks for the files."""
_UNSIGNED_BYTE = 0x08
"""The code of the elements' type in the idx format."""


def write_archive(path: Path) -> None:
    """Write the dataset as a .tar.gz archive."""
    digits = load_digits()
    images = np.stack([_enlarge(image) for image in digits.images])
    labels = digits.target.astype(np.uint8)
    parts = {"train": slice(0, TRAINING_IMAGES), "t10k": slice(TRAINING_IMAGES, None)}
    with tarfile.open(path, "w:gz") as archive:
        for name, part in parts.items():
            _add(archive, f"{name}-images-idx3-ubyte", images[part])
            _add(archive, f"{name}-labels-idx1-ubyte", labels[part])


def _enlarge(image: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Turn 8x8 pixels of 0 to 16 into 28x28 pixels of 0 to 255, with MNIST's margin."""
    inner_side = SIDE - 2 * MARGIN
    small = Image.fromarray((image * (255 / 16)).astype(np.uint8))
    enlarged = small.resize((inner_side, inner_side), Image.Resampling.BICUBIC)
    return np.pad(np.asarray(enlarged, dtype=np.uint8), MARGIN)


def _add(archive: tarfile.TarFile, name: str, data: NDArray[np.uint8]) -> None:
    header = struct.pack(f">BBBB{data.ndim}I", 0, 0, _UNSIGNED_BYTE, data.ndim, *data.shape)
    content = header + data.tobytes()
    entry = tarfile.TarInfo(f"{FOLDER}/{name}")
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_digits.py OUT.tar.gz")
    write_archive(Path(sys.argv[1]))

"""A harness for foreign scripts: the digits as data set, and a node with room for any framework."""

import shutil

import pytest

from runtime.specs import Resources
from tests.runtime.conftest import bare_images, digits, harness

__all__ = ["bare_images", "digits", "harness"]

SIDE = 28
"""Pixels, as in MNIST."""


def write_images(folder):
    """Write a few of the digits again, in a folder for each label, as torchvision's ImageFolder reads them."""
    raw = folder / "MNIST" / "raw"
    for part, name, count in (("train", "train", 16), ("t10k", "val", 8)):
        # MNIST's files begin with a header of 16 or 8 bytes.
        images = (raw / f"{part}-images-idx3-ubyte").read_bytes()[16:]
        labels = (raw / f"{part}-labels-idx1-ubyte").read_bytes()[8:]
        for number in range(count):
            place = folder / "images" / name / str(labels[number])
            place.mkdir(parents=True, exist_ok=True)
            pixels = images[number * SIDE * SIDE : (number + 1) * SIDE * SIDE]
            (place / f"{number}.pgm").write_bytes(b"P5 %d %d 255\n" % (SIDE, SIDE) + pixels)


@pytest.fixture
def stage(harness, digits):
    """The harness, with the digits and time for any framework."""
    shutil.unpack_archive(digits, harness.dataset, filter="data")
    write_images(harness.dataset)
    harness.patience = 300
    return harness


@pytest.fixture
def node():
    """A node with 3 GiB, enough for any framework, and two cores, because importing one is most of a run's time."""
    return Resources(cpus=2, memory_mib=3072)

"""A yard for foreign scripts: the digits as data set, and a node with room for any framework."""

import shutil

import pytest

from runtime.specs import Framework, Outcome, Resources
from tests.runtime.conftest import bare_images, yard
from tests.runtime.images_of_ours import use_image
from tests.runtime.test_examples import load

__all__ = ["bare_images", "yard"]

SIDE = 28
"""Pixels, as in MNIST."""


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The digits, as an archive."""
    archive = tmp_path_factory.mktemp("digits") / "digits.tar.gz"
    load("make_digits").write_archive(archive)
    return archive


def write_images(folder):
    """A few of the digits in `folder` once more, as torchvision's ImageFolder reads them."""
    raw = folder / "MNIST" / "raw"
    for part, name, count in (("train", "train", 16), ("t10k", "val", 8)):
        images = (raw / f"{part}-images-idx3-ubyte").read_bytes()[16:]
        labels = (raw / f"{part}-labels-idx1-ubyte").read_bytes()[8:]
        for number in range(count):
            place = folder / "images" / name / str(labels[number])
            place.mkdir(parents=True, exist_ok=True)
            pixels = images[number * SIDE * SIDE : (number + 1) * SIDE * SIDE]
            (place / f"{number}.pgm").write_bytes(b"P5 %d %d 255\n" % (SIDE, SIDE) + pixels)


class Stage:
    """Runs scripts in the built images, those that lie in the workspace already too."""

    def __init__(self, yard):
        self.workspace = yard.workspace
        self.log = yard.log
        self._yard = yard

    def end(self, framework, source="", *, image="", **changes):
        """Run the source, or the `script` in the workspace; gives the run's last status."""
        yard = use_image(self._yard, image or framework)
        spec = yard.spec(source, framework=Framework(framework), **{"deadline_seconds": 240, **changes})
        yard.backend.submit(spec)
        return yard.wait(spec.name, lambda status: status.outcome is not None, seconds=300)

    def run(self, framework, script, **changes):
        """Run a script of the workspace to its good end; gives every rank's output."""
        status = self.end(framework, script=script, **changes)
        assert status.outcome is Outcome.COMPLETED, f"{status}\n{self._yard.all_logs(status.name)}"
        size = changes.get("nodes", 1) * changes.get("workers_per_node", 1)
        return [self.log(rank, status.name) for rank in range(size)]


@pytest.fixture
def stage(yard, digits):
    """The yard, with the digits."""
    shutil.unpack_archive(digits, yard.dataset)
    write_images(yard.dataset)
    return Stage(yard)


@pytest.fixture
def node():
    """Two cores, for importing a framework is most of a run's time, and 3 GiB."""
    return Resources(cpus=2, memory_mib=3072)

"""A yard for foreign scripts: the digits as data set, and a node with room for any framework."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from runtime.specs import Framework, Outcome, Resources
from tests.runtime.conftest import Yard, bare_images, yard
from tests.runtime.images_of_ours import use_image
from tests.runtime.test_examples import load

__all__ = ["bare_images", "yard"]


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits, as an archive."""
    archive = tmp_path_factory.mktemp("digits") / "digits.tar.gz"
    load("make_digits").write_archive(archive)
    return archive


class Stage:
    """Runs scripts that lie in the workspace already."""

    def __init__(self, yard: Yard) -> None:
        self.workspace = yard.workspace
        self._yard = yard

    def run(self, framework: str, script: str, **changes: Any) -> list[str]:
        """Run it to its good end; gives every rank's output."""
        yard = use_image(self._yard, framework)
        spec = yard.spec("", script=script, framework=Framework(framework), **{"deadline_seconds": 240, **changes})
        yard.backend.submit(spec)
        status = yard.wait(spec.name, lambda status: status.outcome is not None, seconds=300)
        assert status.outcome is Outcome.COMPLETED, f"{status}\n{yard.all_logs(spec.name)}"
        return [yard.log(rank, spec.name) for rank in range(spec.world_size)]


@pytest.fixture
def stage(yard: Yard, digits: Path) -> Stage:
    """The yard, with the digits."""
    with tarfile.open(digits) as archive:
        archive.extractall(yard.dataset, filter="data")
    return Stage(yard)


@pytest.fixture
def node() -> Resources:
    """Half a core and 3 GiB."""
    return Resources(cpus=0.5, memory_mib=3072)

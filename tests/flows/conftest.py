"""Consoles that these tests share, since starting one takes seconds: one with a bare image, one with torch."""

from __future__ import annotations

import os
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.backends import images
from tests.flows.console import ROOT, Buyer, Console, served


@pytest.fixture(scope="session")
def bare_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An images root whose `pytorch` is an interpreter and nothing else."""
    root = tmp_path_factory.mktemp("images")
    venv.create(root / "pytorch", with_pip=False, symlinks=True)
    images.mark_ready(root / "pytorch", "bare")
    return root


@pytest.fixture(scope="package")
def console(bare_images: Path) -> Iterator[Console]:
    """A console on two cores, whatever the machine has, for plain Python. Short path: unix sockets need that."""
    folder = Path(tempfile.mkdtemp(prefix="ty-"))
    yield from served(Console(folder, bare_images, LOCAL_CPUS="2", LOCAL_MEMORY_MIB="8192"))


@pytest.fixture(scope="package")
def torch_console() -> Iterator[Console]:
    """A console with the built pytorch image."""
    root = Path(os.environ.get("TRAINYARD_IMAGES_ROOT", ROOT / "var" / "images"))
    if not images.is_ready(root, "pytorch"):
        pytest.fail(f"There is no pytorch image in {root}: run 'python manage.py build_image pytorch' first.")
    folder = Path(tempfile.mkdtemp(prefix="ty-"))
    yield from served(Console(folder, root, LOCAL_CPUS="2", LOCAL_MEMORY_MIB="8192"))


@pytest.fixture(scope="package")
def buyer(console: Console) -> Iterator[Buyer]:
    """A customer with money in the wallet and WAIT in the workspace."""
    made = Buyer(console)
    yield made
    made.http.close()


@pytest.fixture(autouse=True)
def _alone_on_the_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"buyer", "torch_buyer"} & set(request.fixturenames):
        request.getfixturevalue(name).cancel_what_goes_on()


@pytest.fixture(scope="package")
def torch_buyer(torch_console: Console) -> Iterator[Buyer]:
    """The same, of the console with torch."""
    made = Buyer(torch_console)
    yield made
    made.http.close()

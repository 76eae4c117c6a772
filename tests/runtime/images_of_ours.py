"""The built images and the examples, for tests with real frameworks."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from runtime.images import venvs

if TYPE_CHECKING:
    from tests.runtime.conftest import LocalHarness

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
IMAGES = Path(os.environ.get("TRAINYARD_IMAGES_ROOT", REPOSITORY / "var" / "images"))


def image_folder(name: str) -> Path:
    """Return the folder of a built image; fail the test if it is not built."""
    if not venvs.is_ready(IMAGES, name):
        pytest.fail(f"There is no image '{name}' in {IMAGES}: run 'python manage.py build_image {name}' first.")
    return (IMAGES / name).resolve()


def load_example(name: str) -> ModuleType:
    """Import a script of the examples as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def use_image(harness: LocalHarness, name: str) -> LocalHarness:
    """Let the harness's runs use this image; fail the test if it is not built."""
    image_folder(name)
    harness.images_root = IMAGES
    harness.image = name
    harness.backend = harness.new_backend()
    return harness

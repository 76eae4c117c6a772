"""The built images, for tests with real frameworks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.images import venvs

if TYPE_CHECKING:
    from tests.runtime.conftest import Yard

HOUSE = Path(__file__).resolve().parents[2]
IMAGES = Path(os.environ.get("TRAINYARD_IMAGES_ROOT", HOUSE / "var" / "images"))


def use_image(yard: Yard, name: str) -> Yard:
    """Let the yard's runs use this image; fail the test if it is not built."""
    if not venvs.is_ready(IMAGES, name):
        pytest.fail(f"There is no image '{name}' in {IMAGES}: run 'python manage.py build_image {name}' first.")
    yard.images_root = IMAGES
    yard.image = name
    yard.backend = yard.another()
    return yard

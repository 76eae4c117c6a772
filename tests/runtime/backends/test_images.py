from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.backends import identity, images
from runtime.backends.recipes import Recipe
from runtime.backends.runs import write_json

RECIPE = Recipe("small", "digest", (), (), (), "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    return folder


def states(folder: Path) -> tuple[bool, bool]:
    return images.is_ready(folder.parent, "small"), images.is_current(folder.parent, RECIPE)


def test_what_is_not_built_to_its_end_is_not_ready(folder: Path) -> None:
    assert states(folder) == (False, False)
    (folder / "ready.json").write_text("{")
    assert states(folder) == (False, False)
    (folder / "ready.json").write_text("[]")
    assert states(folder) == (False, False)


def test_ready_from_this_recipe_or_from_an_older_one(folder: Path) -> None:
    images.mark_ready(folder, "digest")
    assert states(folder) == (True, True)
    images.mark_ready(folder, "older")
    assert states(folder) == (True, False)


def test_what_is_being_tried_is_for_its_builder_alone(folder: Path) -> None:
    images.mark_candidate(folder)
    assert states(folder) == (True, False)
    parent, myself = os.getppid(), os.getpid()
    for pid, started in ((parent, identity.start_time(parent)), (myself, 1), (4194304, 7)):
        write_json(folder / "ready.json", {"builder": [pid, started]})
        assert states(folder) == (False, False)


def test_a_path_is_no_name(folder: Path) -> None:
    images.mark_ready(folder, "digest")
    assert not images.is_ready(folder, "../small")

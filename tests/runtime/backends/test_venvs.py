"""When an image is ready for runs, and when it is current."""

import os

import pytest

from runtime import pids
from runtime.files import write_json
from runtime.images import venvs
from runtime.images.recipes import Recipe
from runtime.specs import Flavour

RECIPE = Recipe(name="small", digest="digest", sections=(), checks=(), smoke_tests=(), unbuildable="")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    return folder


def states(folder):
    """Return whether the image is ready, and whether it is current."""
    return venvs.is_ready(folder.parent, "small"), venvs.is_current(folder.parent, RECIPE, Flavour.CPU)


def test_an_incomplete_build_is_not_ready(folder):
    assert states(folder) == (False, False)
    for text in ("{", "[]"):
        (folder / "ready.json").write_text(text)
        assert states(folder) == (False, False)


def test_an_image_of_an_older_recipe_is_ready_but_not_current(folder):
    venvs.mark_ready(folder, "digest")
    assert states(folder) == (True, True)
    assert not venvs.is_ready(folder, "../small"), "a path is no name"
    venvs.mark_ready(folder, "older")
    assert states(folder) == (True, False)


def test_an_image_under_test_is_for_its_builder_only(folder):
    venvs.mark_candidate(folder)
    assert states(folder) == (True, False)
    parent, myself = os.getppid(), os.getpid()
    # Another process, an earlier process with this pid, and a pid that is larger than any.
    for pid, started in ((parent, pids.start_time(parent)), (myself, 1), (4194304, 7)):
        write_json(folder / "ready.json", {"builder": [pid, started]})
        assert states(folder) == (False, False)

"""`manage.py build_image`: what it says and how it ends. The building itself is tested in tests/runtime/backends."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from pytest_django import Settings

from runtime.backends import builder, images
from runtime.backends.recipes import names, read_recipe


@pytest.fixture
def root(settings: Settings, tmp_path: Path) -> Path:
    """The folder of the images, with `pytorch` built and `horovod` built from an older recipe."""
    for name, digest in (("pytorch", read_recipe("pytorch").digest), ("horovod", "older")):
        (tmp_path / name).mkdir()
        images.mark_ready(tmp_path / name, digest)
    settings.TRAINYARD_IMAGES_ROOT = tmp_path
    return tmp_path


def said(*arguments: str, **options: bool) -> str:
    stdout = StringIO()
    call_command("build_image", *arguments, stdout=stdout, **options)
    return stdout.getvalue()


def test_without_a_name_it_lists_every_image_with_its_state(root: Path) -> None:
    lines = [line.split(maxsplit=1) for line in said().splitlines()]
    assert dict(lines) == {
        "horovod": "ready, from an older recipe",
        "horovod-tensorflow": "not built",
        "pytorch": "ready",
        "tensorflow": "not built",
    }
    assert [name for name, _state in lines] == names()


def test_a_built_image_is_left_as_it_is(root: Path) -> None:
    assert said("pytorch") == "The image 'pytorch' is ready (cached).\n"


def test_the_steps_and_the_output_are_told(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "small.txt").write_text("# check: print('hello from the image')\n")
    build = builder.build
    monkeypatch.setattr(builder, "build", lambda root, name, **given: build(root, name, recipes=recipes, **given))
    text = said("small")
    assert "s] Creating a virtual environment in" in text
    assert "    hello from the image\n" in text
    assert "The image 'small' is ready (" in text
    assert "(cached)" in said("small")
    assert "hello from the image" in said("small", force=True)


def test_an_unknown_name_ends_it(root: Path) -> None:
    with pytest.raises(CommandError, match=r"There is no built-in image 'caffe'\. There are: horovod,"):
        said("pytorch", "caffe")

"""The output and errors of `manage.py build_image`. Building is tested in tests/runtime/backends."""

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from runtime.images import builder, venvs
from runtime.images.recipes import read_recipe, recipe_names

pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture
def root(settings, tmp_path):
    """Set a folder of images in which `pytorch` is built, and `horovod` from an older recipe."""
    for name, digest in (("pytorch", read_recipe("pytorch").digest), ("horovod", "older")):
        (tmp_path / name).mkdir()
        venvs.mark_ready(tmp_path / name, digest)
    settings.TRAINYARD_IMAGES_ROOT = tmp_path


def run_command(*arguments, **options):
    stdout = StringIO()
    call_command("build_image", *arguments, stdout=stdout, **options)
    return stdout.getvalue()


def test_without_a_name_it_lists_every_image_with_its_state():
    lines = [line.split(maxsplit=1) for line in run_command().splitlines()]
    assert dict(lines) == {
        "horovod": "ready, but out of date (cpu)",
        "horovod-tensorflow": "not built",
        "pytorch": "ready (cpu)",
        "tensorflow": "not built",
    }
    assert [name for name, _state in lines] == recipe_names()


def test_steps_and_output_are_printed(monkeypatch):
    def build(folder, name, *, flavour, force, progress):
        if force:
            progress.step("Creating a virtual environment")
            progress.output("hello from the image")
        return force  # whether it has built the image

    monkeypatch.setattr(builder, "build", build)  # the real one would refuse the name `small`
    text = run_command("small", force=True)
    # Before "s]" the seconds since the start are printed.
    for line in ("s] Creating a virtual environment\n", "    hello from the image\n", "The image 'small' is ready ("):
        assert line in text
    assert run_command("small") == "The image 'small' is ready (cached).\n"


def test_an_unknown_name_fails():
    with pytest.raises(CommandError, match=r"There is no built-in image 'caffe'\. There are: horovod,"):
        run_command("pytorch", "caffe")

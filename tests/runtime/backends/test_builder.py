"""Images that are built from small recipes, with real virtual environments and sandboxes."""

import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from runtime.images import builder, venvs
from runtime.images.builder import ImageBuildFailed, ImageStatus
from runtime.images.recipes import RECIPES
from runtime.specs import Flavour
from tests.runtime.conftest import processes_below


class Progress:
    """Remembers the steps and the output of a build."""

    def __init__(self):
        self.steps = []
        self.lines = []

    def step(self, text):
        self.steps.append(text)

    def output(self, line):
        self.lines.append(line)


@pytest.fixture
def recipes(tmp_path):
    """A folder with one recipe, `small`, whose image has no packages."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "small.txt").write_text("# check: import json; print('checked')\n")
    return folder


def test_an_unbuildable_image_is_refused_with_its_reason(recipes, tmp_path):
    (recipes / "small.txt").write_text("# unbuildable: Nobody has published it.\n")
    with pytest.raises(ImageBuildFailed, match="Nobody has published it"):
        builder.build(tmp_path / "images", "small", progress=Progress(), recipes=recipes)
    assert not (tmp_path / "images").exists()
    assert builder.list_images(tmp_path / "images", recipes) == [
        ImageStatus("small", is_ready=False, is_current=False, unbuildable="Nobody has published it.", flavour=None)
    ]


def publish(folder, version):
    """Put a wheel of the package `answer` into a folder."""
    info = f"answer-{version}.dist-info"
    with zipfile.ZipFile(folder / f"answer-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("answer.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: answer\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def flavoured(recipes, tmp_path, monkeypatch):
    """The recipe `small` requires another build of `answer` in each flavour. Only published packages can be had."""
    # uv installs the packages, so the environment needs no pip, which takes seconds to install.
    create = builder.venv.create
    monkeypatch.setattr(builder.venv, "create", lambda folder, **_options: create(folder, symlinks=True))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    # Version 1.0+cpu satisfies `==1.0` too, but not `===1.0` (PEP 440).
    (recipes / "small.txt").write_text(
        "# cpu: answer==1.0 -> answer==1.0+cpu\n# cuda: answer==1.0 -> answer===1.0\nanswer==1.0\n"
    )
    return recipes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("published", "flavour", "installed"),
    [
        (["1.0", "1.0+cpu"], Flavour.CPU, "1.0+cpu"),
        (["1.0", "1.0+cpu"], Flavour.CUDA, "1.0"),
        (["1.0"], Flavour.CPU, "1.0"),
    ],
    ids=["cpu", "cuda", "a cpu build that was not published"],
)
def test_the_flavour_decides_which_build_is_installed(flavoured, tmp_path, published, flavour, installed):
    for version in published:
        publish(tmp_path, version)
    root, progress = tmp_path / "images", Progress()
    assert builder.build(root, "small", flavour=flavour, progress=progress, recipes=flavoured)
    command = [str(root / "small" / "bin" / "python"), "-c", "import answer; print(answer.VERSION)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == installed
    # PyTorch's own index is tried if no other has the CPU build.
    tries_pytorchs_index = any("PyTorch's own index" in step for step in progress.steps)
    assert tries_pytorchs_index is ("1.0+cpu" not in published)
    assert progress.steps[0] == f"Flavour: {flavour} (set)"
    assert venvs.flavour(root, "small") is flavour
    assert not builder.build(root, "small", flavour=flavour, progress=progress, recipes=flavoured)
    other = next(each for each in Flavour if each is not flavour)
    assert [image.is_current for image in builder.list_images(root, flavoured, flavour=other)] == [False]


def test_a_cuda_image_never_gets_a_cpu_build(flavoured, tmp_path):
    """GPU nodes would be sold with it, and its smoke test would pass."""
    publish(tmp_path, "1.0+cpu")
    root = tmp_path / "images"
    with pytest.raises(ImageBuildFailed, match="no version of answer"):
        builder.build(root, "small", flavour=Flavour.CUDA, progress=Progress(), recipes=flavoured)
    assert not venvs.is_ready(root, "small")


def test_an_image_is_built_once_until_its_recipe_changes(recipes, tmp_path):
    """Two builders begin at once. A run still uses the old image when the new one is built."""
    root, progress = tmp_path / "images", Progress()
    build = partial(builder.build, root, "small", progress=progress, recipes=recipes)
    with ThreadPoolExecutor() as pool:
        assert sorted(each.result() for each in [pool.submit(build) for _ in range(2)]) == [False, True]
    assert venvs.is_ready(root, "small")
    assert any("Checking: import json" in step for step in progress.steps)
    assert "checked" in progress.lines
    (root / "small" / "mark").touch()  # distinguishes this build from later ones
    (recipes / "small.txt").write_text("# variable: FAVOURITE=blue\n")
    assert builder.list_images(root, recipes) == [
        ImageStatus("small", is_ready=True, is_current=False, unbuildable="", flavour=venvs.flavour(root, "small"))
    ]
    with (root / "small" / "pyvenv.cfg").open() as held:  # as a sandbox does
        assert build()
        assert held.read()
    assert (root / ".small.before" / "mark").exists(), "the replaced image, which runs may still use"
    # A variable of the recipe is set in every interpreter of the image.
    command = [str(root / "small" / "bin" / "python"), "-c", "import os; print(os.environ['FAVOURITE'])"]
    for environment, expected in (({}, "blue"), ({"FAVOURITE": "red"}, "red")):
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert answer.stdout == f"{expected}\n"
    assert not build()
    assert build(force=True)
    assert not (root / "small" / "mark").exists()
    assert not (root / ".small.before" / "mark").exists(), "only the image of the previous build is kept"


def test_a_build_that_fails_leaves_nothing_ready_and_ends_with_the_last_lines(recipes, tmp_path):
    root = tmp_path / "images"
    (recipes / "small.txt").write_text(
        "# check: [print('line', i, flush=True) for i in range(40)]; raise SystemExit('no good')\n"
    )
    with pytest.raises(ImageBuildFailed) as failure:
        builder.build(root, "small", progress=Progress(), recipes=recipes)
    lines = str(failure.value).splitlines()
    assert "failed with code 1" in lines[0]
    assert lines[-2:] == ["    line 39", "    no good"]
    assert len(lines) < 20, "not all 40 lines"
    assert not venvs.is_ready(root, "small")
    (recipes / "small.txt").write_text("")
    assert builder.build(root, "small", progress=Progress(), recipes=recipes)


def fail_to_create(folder, **_options):
    """Replaces `venv.create`: the program that installs pip fails."""
    raise subprocess.CalledProcessError(1, ["ensurepip"], output=b"it is broken\n")


def create_broken(folder, **_options):
    """Replaces `venv.create`: the image gets an interpreter that fails."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho it is broken >&2\nexit 3\n")
    python.chmod(0o755)


@pytest.mark.parametrize("create", [fail_to_create, create_broken])
def test_a_program_that_fails_is_reported_with_its_output(recipes, tmp_path, monkeypatch, create):
    monkeypatch.setattr(builder.venv, "create", create)
    # To set a variable, the builder asks the image's interpreter for its folder.
    (recipes / "small.txt").write_text("# variable: FAVOURITE=blue\n")
    with pytest.raises(ImageBuildFailed, match="it is broken"):
        builder.install(tmp_path / "image", "small", flavour=Flavour.CPU, progress=Progress(), recipes=recipes)


def test_an_image_whose_real_run_fails_is_never_ready(recipes, tmp_path):
    """An image without torch passes every check of its recipe. Only the real run shows the fault."""
    root, progress = tmp_path / "images", Progress()
    (recipes / "small.txt").write_text("# check: import json\n# smoke: pytorch\n")
    with pytest.raises(ImageBuildFailed) as failure:
        builder.build(root, "small", progress=progress, recipes=recipes)
    assert "was built, but does not work" in str(failure.value)
    assert "ModuleNotFoundError: No module named 'torch'" in str(failure.value)
    # Either rank may be the first that cannot import its framework. The first failure ends the other rank.
    assert re.search(r"rank [01]: failed: framework$", str(failure.value), re.MULTILINE)
    assert progress.steps[-1].startswith("Testing pytorch over gloo")
    assert not venvs.is_current(root, builder.read_recipe("small", recipes), Flavour.CPU)
    assert not (root / ".small.smoke").exists()
    assert processes_below(root) == []
    # Asked in another process, since this one is the builder.
    code = (
        "import pathlib, sys; from runtime.images.venvs import is_ready;"
        "print(is_ready(pathlib.Path(sys.argv[1]), 'small'))"
    )
    command = [sys.executable, "-c", code, str(root)]
    repository = RECIPES.parents[1]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=repository)
    assert answer.stdout == "False\n", "only the builder may use an image whose test failed"


def test_the_vision_hook_costs_nothing_until_torchvision_is_imported(tmp_path):
    """The hook declares operators that torchvision needs with torch's CPU build. Both packages are stand-ins here."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "library.py").write_text(
        "class Library:\n"
        "    def __init__(self, *names): print('library', *names)\n"
        "    def define(self, schema): print(schema.split('(')[0])\n"
    )
    (tmp_path / "torchvision.py").write_text("print('torchvision')\n")
    (tmp_path / "vision_hook.py").write_text((RECIPES / "vision_hook.py").read_text())
    code = "import sys, vision_hook, json; assert 'torch' not in sys.modules; import torchvision"

    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout == "library torchvision DEF\nnms\nqnms\ntorchvision\n"

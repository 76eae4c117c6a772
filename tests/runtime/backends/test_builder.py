from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime.backends import builder, images
from runtime.backends.builder import ImageBuildFailed, Offer
from runtime.backends.recipes import RECIPES
from tests.runtime.conftest import processes_below


class Said:
    """What a build told."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.lines: list[str] = []

    def step(self, text: str) -> None:
        self.steps.append(text)

    def output(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "small.txt").write_text("# check: import json; print('checked')\n")
    return folder


def test_an_unbuildable_image_says_why(recipes: Path, tmp_path: Path) -> None:
    (recipes / "small.txt").write_text("# unbuildable: Nobody has published it.\n")
    with pytest.raises(ImageBuildFailed, match="Nobody has published it"):
        builder.build(tmp_path / "images", "small", progress=Said(), recipes=recipes)
    assert not (tmp_path / "images").exists()
    assert builder.offers(tmp_path / "images", recipes) == [
        Offer("small", ready=False, current=False, unbuildable="Nobody has published it.")
    ]


def test_an_image_is_built_once_until_its_recipe_changes(recipes: Path, tmp_path: Path) -> None:
    root, said = tmp_path / "images", Said()
    assert builder.build(root, "small", progress=said, recipes=recipes)
    assert images.is_ready(root, "small")
    assert any("Checking: import json" in step for step in said.steps)
    assert "checked" in said.lines
    assert not builder.build(root, "small", progress=said, recipes=recipes)
    (recipes / "small.txt").write_text("# check: import csv\n")
    assert builder.offers(root, recipes) == [Offer("small", ready=True, current=False, unbuildable="")]
    assert builder.build(root, "small", progress=said, recipes=recipes)
    assert builder.build(root, "small", force=True, progress=said, recipes=recipes)


def test_runs_of_the_image_before_keep_its_files(recipes: Path, tmp_path: Path) -> None:
    root = tmp_path / "images"
    builder.build(root, "small", progress=Said(), recipes=recipes)
    (root / "small" / "mark").touch()
    with (root / "small" / "pyvenv.cfg").open() as held:  # as a sandbox does
        builder.build(root, "small", force=True, progress=Said(), recipes=recipes)
        assert not (root / "small" / "mark").exists()
        assert (root / ".small.before" / "mark").exists()
        assert held.read()
    builder.build(root, "small", force=True, progress=Said(), recipes=recipes)
    assert not (root / ".small.before" / "mark").exists(), "the one before the last is gone"


def test_a_build_that_fails_leaves_nothing_ready_and_ends_with_the_last_lines(recipes: Path, tmp_path: Path) -> None:
    root = tmp_path / "images"
    (recipes / "small.txt").write_text(
        "# check: [print('line', i, flush=True) for i in range(40)]; raise SystemExit('no good')\n"
    )
    with pytest.raises(ImageBuildFailed) as failure:
        builder.build(root, "small", progress=Said(), recipes=recipes)
    lines = str(failure.value).splitlines()
    assert "failed with code 1" in lines[0]
    assert lines[-2:] == ["    line 39", "    no good"]
    assert len(lines) < 20
    assert not images.is_ready(root, "small")
    (recipes / "small.txt").write_text("")
    assert builder.build(root, "small", progress=Said(), recipes=recipes)


def test_an_image_whose_real_run_fails_is_never_ready(recipes: Path, tmp_path: Path) -> None:
    """An image without torch passes every check of its recipe; only the run tells."""
    root, said = tmp_path / "images", Said()
    (recipes / "small.txt").write_text("# check: import json\n# smoke: pytorch\n")
    with pytest.raises(ImageBuildFailed) as failure:
        builder.build(root, "small", progress=said, recipes=recipes)
    assert "was built, but does not work" in str(failure.value)
    assert "ModuleNotFoundError: No module named 'torch'" in str(failure.value)
    assert re.search(r"rank [01]: failed: framework$", str(failure.value), re.MULTILINE)  # the other may be cut short
    assert said.steps[-1].startswith("Proving it: pytorch over gloo")
    assert not images.is_current(root, builder.read_recipe("small", recipes))
    assert not (root / ".small.smoke").exists()
    assert processes_below(root) == []
    code = (
        "import pathlib, sys; from runtime.backends.images import is_ready;"
        "print(is_ready(pathlib.Path(sys.argv[1]), 'small'))"
    )
    command = [sys.executable, "-c", code, str(root)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=RECIPES.parents[1])
    assert answer.stdout == "False\n", "nobody but the builder may have used it"


def test_two_builders_build_once(recipes: Path, tmp_path: Path) -> None:
    results: list[bool] = []

    def build() -> None:
        results.append(builder.build(tmp_path / "images", "small", progress=Said(), recipes=recipes))

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True]


def test_without_a_compiler_the_image_is_not_built(
    recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipes / "small.txt").write_text("# compile: set A=1\nanything==1\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageBuildFailed, match=r"cannot be built: g\+\+ and make must be installed"):
        builder.build(tmp_path / "images", "small", progress=Said(), recipes=recipes)


def test_the_vision_hook_costs_nothing_until_torchvision_is_imported(tmp_path: Path) -> None:
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

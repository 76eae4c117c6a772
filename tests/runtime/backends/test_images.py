from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime.backends import images
from runtime.errors import InvalidSpec


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "small.txt").write_text("# check: import json\n")
    return folder


def test_the_recipes_of_the_house_are_read() -> None:
    pytorch = images.read_recipe("pytorch")
    assert pytorch.sections[0] == ((), ("torch==2.13.0",)), "torch comes first and alone"
    assert pytorch.sections[-1] == (("--no-deps",), ("torchvision==0.28.0",))
    assert pytorch.checks
    assert images.read_recipe("tensorflow").sections


@pytest.mark.parametrize("name", ["unknown", "../images/pytorch", "", "vision_hook"])
def test_an_unknown_image(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="There are: horovod, pytorch, tensorflow"):
        images.build(tmp_path, name, progress=print)


def test_an_unbuildable_image_says_why(tmp_path: Path) -> None:
    with pytest.raises(images.ImageBuildFailed, match="has no recipe to compile it yet"):
        images.build(tmp_path / "images", "horovod", progress=print)
    assert not (tmp_path / "images").exists()


def test_an_image_is_built_once_until_its_recipe_changes(recipes: Path, tmp_path: Path) -> None:
    root = tmp_path / "images"
    said: list[str] = []
    assert not images.is_ready(root, "small")
    assert images.build(root, "small", progress=said.append, recipes=recipes)
    assert images.is_ready(root, "small")
    assert any("Checking: import json" in line for line in said)
    assert not images.build(root, "small", progress=said.append, recipes=recipes)
    (recipes / "small.txt").write_text("# check: import csv\n")
    assert images.is_ready(root, "small"), "runs may go on with the old one"
    assert images.build(root, "small", progress=said.append, recipes=recipes)
    assert images.build(root, "small", force=True, progress=said.append, recipes=recipes)


def test_a_build_that_fails_leaves_nothing_ready(recipes: Path, tmp_path: Path) -> None:
    root = tmp_path / "images"
    (recipes / "small.txt").write_text("# check: raise SystemExit('no good')\n")
    with pytest.raises(images.ImageBuildFailed, match="no good"):
        images.build(root, "small", progress=lambda _line: None, recipes=recipes)
    assert not images.is_ready(root, "small")
    (recipes / "small.txt").write_text("")
    assert images.build(root, "small", progress=lambda _line: None, recipes=recipes)


def test_two_builders_build_once(recipes: Path, tmp_path: Path) -> None:
    results: list[bool] = []

    def build() -> None:
        results.append(images.build(tmp_path / "images", "small", progress=lambda _line: None, recipes=recipes))

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True]


def test_the_vision_hook_costs_nothing_until_torchvision_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "class library:\n"
        "    class Library:\n"
        "        def __init__(self, *names): print('library', *names)\n"
        "        def define(self, schema): print(schema.split('(')[0])\n"
    )
    (tmp_path / "torchvision.py").write_text("print('torchvision')\n")
    (tmp_path / "vision_hook.py").write_text((images.RECIPES / "vision_hook.py").read_text())
    code = "import sys, vision_hook, json; assert 'torch' not in sys.modules; import torchvision"

    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout == "library torchvision DEF\nnms\nqnms\ntorchvision\n"

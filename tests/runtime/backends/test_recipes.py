from __future__ import annotations

from pathlib import Path

import pytest

from runtime.backends.recipes import Compilation, Smoke, names, read_recipe
from runtime.errors import InvalidSpec
from runtime.specs import Controller, Framework


def test_the_recipes_of_the_house() -> None:
    pytorch = read_recipe("pytorch")
    assert pytorch.sections[0] == ((), ("torch==2.13.0",), None), "torch comes first and alone"
    assert pytorch.sections[-1] == (("--no-deps",), ("torchvision==0.28.0",), None)
    assert pytorch.checks
    assert pytorch.smokes == (Smoke(Framework.PYTORCH),)
    assert Smoke(Framework.TENSORFLOW) in read_recipe("tensorflow").smokes


@pytest.mark.parametrize("name", names())
def test_every_image_of_the_house_is_proven_by_a_run_and_pins_what_it_installs(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.smokes
    assert not recipe.unbuildable
    requirements = [requirement for section in recipe.sections for requirement in section.requirements]
    assert all("==" in requirement for requirement in requirements), requirements


def test_horovod_is_compiled_with_both_controllers() -> None:
    last = read_recipe("horovod").sections[-1]
    assert last.requirements == ("horovod==0.28.1",)
    assert last.compilation is not None
    environment = dict(last.compilation.environment)
    assert environment["HOROVOD_WITH_GLOO"] == environment["HOROVOD_WITH_MPI"] == "1"
    assert ("-std=c++14", "-std=c++17") in last.compilation.flags


@pytest.mark.parametrize("name", ["unknown", "../images/pytorch", "", "vision_hook"])
def test_an_unknown_image(name: str) -> None:
    with pytest.raises(InvalidSpec, match="There are: horovod, horovod-tensorflow, pytorch, tensorflow"):
        read_recipe(name)


def test_every_word_of_the_language(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text(
        "# An image. check this: prose is no directive\n"
        "first==1\n"
        "# --- --no-deps --quiet\n"
        "# compile: with cmake==4 wheel==1\n"
        "# compile: set A=1 B=x=y\n"
        "# compile: set C=\n"
        "# compile: flag -std=c++14 -> -std=c++17\n"
        "# compile: flag -g ->\n"
        "# compile: flag -> -Wl,-rpath,$ORIGIN/..\n"
        "# compile: empty a.cc b.cc\n"
        "second==2\n"
        "third==3\n"
        "# ---\n"
        "# ---\n"
        "fourth==4\n"
        "# check: import a\n"
        "# check: import b; assert b.c == {1: 2}\n"
        "# smoke: pytorch\n"
        "# smoke: horovod mpi\n"
    )
    recipe = read_recipe("all", tmp_path)
    assert recipe.sections == (
        ((), ("first==1",), None),
        (
            ("--no-deps", "--quiet"),
            ("second==2", "third==3"),
            Compilation(
                tools=("cmake==4", "wheel==1"),
                environment=(("A", "1"), ("B", "x=y"), ("C", "")),
                flags=(("-std=c++14", "-std=c++17"), ("-g", ""), ("", "-Wl,-rpath,$ORIGIN/..")),
                empty=("a.cc", "b.cc"),
            ),
        ),
        ((), ("fourth==4",), None),
    )
    assert recipe.checks == ("import a", "import b; assert b.c == {1: 2}")
    assert recipe.smokes == (Smoke(Framework.PYTORCH), Smoke(Framework.HOROVOD, Controller.MPI))


@pytest.mark.parametrize("line", ["# compile: flag -g", "# compile: faster", "# smoke: caffe", "# smoke: horovod ssh"])
def test_a_directive_that_means_nothing_is_not_passed_over(line: str, tmp_path: Path) -> None:
    (tmp_path / "odd.txt").write_text(f"{line}\nrequirement==1\n")
    with pytest.raises(ValueError, match=r"means nothing|is not a valid"):
        read_recipe("odd", tmp_path)

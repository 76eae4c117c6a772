"""The recipes of the built-in images, and every directive that a recipe may have."""

import pytest

from runtime.errors import InvalidSpec
from runtime.images.recipes import Compilation, SmokeTest, can_use_gpus, read_recipe, recipe_names
from runtime.specs import Controller, Flavour, Framework


@pytest.mark.parametrize("name", recipe_names())
def test_each_built_in_image_has_a_smoke_test_and_pinned_requirements(name):
    recipe = read_recipe(name)
    assert recipe.smoke_tests
    assert not recipe.unbuildable
    requirements = [requirement for section in recipe.sections for requirement in section.requirements]
    assert all("==" in requirement for requirement in requirements), requirements


@pytest.mark.parametrize("name", ["../images/pytorch", "vision_hook"])  # a path, and a module beside the recipes
def test_an_unknown_image_is_refused_with_the_names_of_those_that_exist(name):
    with pytest.raises(InvalidSpec, match="There are: horovod, horovod-tensorflow, pytorch, tensorflow"):
        read_recipe(name)


def test_every_directive_of_a_recipe_is_read(tmp_path):
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
        "# compile: cmake set(A ON)\n"
        '# compile: cmake file(WRITE ${CMAKE_SOURCE_DIR}/c.cc "")\n'
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
    # Of each section: options of pip, requirements, and how they are compiled.
    assert recipe.sections == (
        ((), ("first==1",), None),
        (
            ("--no-deps", "--quiet"),
            ("second==2", "third==3"),
            Compilation(
                tools=("cmake==4", "wheel==1"),
                environment=(("A", "1"), ("B", "x=y"), ("C", "")),
                flags=(("-std=c++14", "-std=c++17"), ("-g", ""), ("", "-Wl,-rpath,$ORIGIN/..")),
                emptied_files=("a.cc", "b.cc"),
                cmake_commands=("set(A ON)", 'file(WRITE ${CMAKE_SOURCE_DIR}/c.cc "")'),
            ),
        ),
        ((), ("fourth==4",), None),
    )
    assert recipe.checks == ("import a", "import b; assert b.c == {1: 2}")
    assert recipe.smoke_tests == (SmokeTest(Framework.PYTORCH), SmokeTest(Framework.HOROVOD, Controller.MPI))


@pytest.mark.parametrize("line", ["# compile: flag -g", "# compile: faster", "# smoke: caffe", "# smoke: horovod ssh"])
def test_an_unknown_directive_is_refused(line, tmp_path):
    (tmp_path / "odd.txt").write_text(f"{line}\nrequirement==1\n")
    with pytest.raises(ValueError, match=r"expected with|is not a valid"):
        read_recipe("odd", tmp_path)


@pytest.mark.parametrize(
    ("name", "cpu", "cuda", "unknown"),
    [
        ("pytorch", False, True, True),
        ("horovod", False, True, True),
        ("tensorflow", False, True, False),
        ("horovod-tensorflow", False, False, False),  # its recipe has no build for CUDA
        ("of-an-operator", True, True, True),
    ],
)
def test_only_images_for_cuda_or_without_a_recipe_use_gpus(name, cpu, cuda, unknown):
    assert [can_use_gpus(name, flavour) for flavour in (Flavour.CPU, Flavour.CUDA, None)] == [cpu, cuda, unknown]

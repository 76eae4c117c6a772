"""Read the recipes of the built-in images, `deploy/images/<name>.txt`.

A recipe is a requirements file that pip can read. Its comments hold directives that pip does not have:

    # --- <pip options>         opens a section; sections are installed in order, each with its options
    # compile: with <requirements>   the section is published as source only, and is compiled into wheels, once per
                                machine, with these build tools installed
    # compile: set NAME=VALUE ...    and with these environment variables
    # compile: flag OLD -> NEW       and with NEW for each g++ argument that matches the shell pattern OLD. Without NEW,
                                the argument is dropped; without OLD, NEW is added
    # compile: empty FILE            and with an empty file in place of each argument of g++ that ends in /FILE
    # compile: cmake COMMAND         and with this command in the toolchain file, which CMake runs first
    # cpu: OLD -> NEW           the CPU flavour installs the requirement NEW for OLD. If NEW cannot be found, it
                                installs OLD and the build reports that
    # cuda: OLD -> NEW          the CUDA flavour installs the requirement NEW for OLD. An image without such a line
                                uses no GPU in any flavour
    # check: <python>           a statement that must run in the finished image
    # variable: NAME=VALUE      an environment variable of every interpreter of the image, unless the run sets it
    # preload: <modules>        modules that the image's fork server imports for warm starts; does not change the image
    # smoke: <framework> [mpi]  the image is ready only after a test run of two processes of this framework
    # unbuildable: <reason>     the image cannot be built yet
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from runtime.errors import InvalidSpec
from runtime.specs import Controller, Flavour, Framework

RECIPES = Path(__file__).resolve().parents[2] / "deploy" / "images"
"""The folder of the recipes."""
NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9-]{0,50}\Z")
"""The name of a built-in image, which is also a folder's name."""


class Compilation(NamedTuple):
    """How a section's requirements are compiled into wheels.

    `tools` are requirements of the build itself. `flags` are pairs of a shell pattern and its replacement, for the
    compiler's arguments. `emptied_files` are shell patterns of source files that are compiled as if they were empty.
    `cmake_commands` are the lines of a toolchain file for CMake.
    """

    tools: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, str], ...] = ()
    emptied_files: tuple[str, ...] = ()
    cmake_commands: tuple[str, ...] = ()


class Section(NamedTuple):
    """Requirements that are installed together with these options of pip. `compilation` is None if wheels exist."""

    options: tuple[str, ...]
    requirements: tuple[str, ...]
    compilation: Compilation | None = None


class Replacement(NamedTuple):
    """A requirement that one flavour installs in place of another."""

    old: str
    new: str


class SmokeTest(NamedTuple):
    """A test run that the image must pass."""

    framework: Framework
    controller: Controller = Controller.GLOO
    """How the processes of Horovod find each other; only Horovod has a choice."""


class Recipe(NamedTuple):
    """A recipe, as read from its file. `digest` changes with everything in the recipe that changes the image.

    The other fields hold the directives that the module's docstring lists; `unbuildable` is empty if the image can be
    built.
    """

    name: str
    digest: str
    sections: tuple[Section, ...]
    checks: tuple[str, ...]
    smoke_tests: tuple[SmokeTest, ...]
    unbuildable: str
    preloads: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    replacements: tuple[tuple[Flavour, Replacement], ...] = ()

    def replacements_for(self, flavour: Flavour) -> dict[str, str]:
        """Return the requirements that a flavour replaces, each with its replacement."""
        return {
            replacement.old: replacement.new for for_flavour, replacement in self.replacements if for_flavour is flavour
        }


def can_use_gpus(name: str, flavour: Flavour | None) -> bool:
    """Whether a built-in image uses the GPUs of its node. `flavour`: None where it is not known.

    An image of unknown flavour was built from the recipe's own requirements. They are for CUDA if the recipe has `cpu:`
    lines, which replace them. An image without a recipe counts as using GPUs: what is in it is not known.
    """
    try:
        recipe = read_recipe(name)
    except InvalidSpec:
        return True
    if flavour is None:
        return bool(recipe.replacements_for(Flavour.CPU))
    return flavour is Flavour.CUDA and bool(recipe.replacements_for(Flavour.CUDA))


def recipe_names(recipes: Path = RECIPES) -> list[str]:
    """Return the names of all images that have a recipe."""
    return sorted(path.stem for path in recipes.glob("*.txt"))


def read_recipe(name: str, recipes: Path = RECIPES) -> Recipe:
    """Read the recipe of a built-in image from the folder `recipes`.

    Raises InvalidSpec if there is none, ValueError if it is malformed.
    """
    path = recipes / f"{name}.txt"
    if not NAME_PATTERN.match(name) or not path.is_file():
        raise InvalidSpec(
            f"There is no built-in image '{name}'. There are: {', '.join(recipe_names(recipes))}.", field="image"
        )
    text = path.read_text()
    directives: dict[str, list[str]] = {
        "check": [], "smoke": [], "unbuildable": [], "preload": [], "variable": [], "cpu": [], "cuda": [],
    }  # fmt: skip
    sections: list[Section] = []
    options: tuple[str, ...] = ()
    requirements: list[str] = []
    compile_lines: list[str] = []

    def end_section() -> None:
        if requirements:
            compilation = _parse_compilation(compile_lines) if compile_lines else None
            sections.append(Section(options, tuple(requirements), compilation))

    for line in map(str.strip, text.splitlines()):
        directive, _, value = line.removeprefix("#").strip().partition(":")
        if line.startswith("# ---"):
            end_section()
            options, requirements, compile_lines = tuple(line.removeprefix("# ---").split()), [], []
        elif line.startswith("#") and directive == "compile":
            compile_lines.append(value.strip())
        elif line.startswith("#") and directive in directives:
            directives[directive].append(value.strip())
        elif line and not line.startswith("#"):
            requirements.append(line)
    end_section()
    return Recipe(
        name=name,
        digest=_digest(text),
        sections=tuple(sections),
        checks=tuple(directives["check"]),
        smoke_tests=tuple(_parse_smoke_test(line) for line in directives["smoke"]),
        unbuildable=" ".join(directives["unbuildable"]),
        preloads=tuple(" ".join(directives["preload"]).split()),
        variables=tuple(_parse_variable(line) for line in directives["variable"]),
        replacements=tuple(
            (flavour, _parse_replacement(line)) for flavour in Flavour for line in directives[flavour.value]
        ),
    )


def preloads(name: str) -> list[str]:
    """Return the modules that a fork server of this image imports; empty for an image without a recipe."""
    try:
        return list(read_recipe(name).preloads)
    except InvalidSpec:
        return []


def _digest(text: str) -> str:
    """Return a hash of everything in a recipe that changes the image."""
    lines = (line for line in text.splitlines(keepends=True) if not line.startswith("# preload:"))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _parse_smoke_test(line: str) -> SmokeTest:
    """Parse `<framework> [<controller>]`. Raises ValueError."""
    framework, _, controller = line.partition(" ")
    return SmokeTest(Framework(framework), Controller(controller.strip() or Controller.GLOO))


def _parse_variable(line: str) -> tuple[str, str]:
    name, equals, value = line.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"A recipe says '# variable: {line}'; expected NAME=VALUE.")
    return name, value


def _parse_replacement(line: str) -> Replacement:
    old, arrow, new = line.partition(" -> ")
    if not arrow:
        raise ValueError(f"A recipe says '{line}'; expected OLD -> NEW.")
    return Replacement(old.strip(), new.strip())


def _parse_compilation(lines: list[str]) -> Compilation:
    """Parse the values of a section's `# compile:` lines. Raises ValueError."""
    tools: list[str] = []
    environment: list[tuple[str, str]] = []
    flags: list[tuple[str, str]] = []
    emptied_files: list[str] = []
    cmake_commands: list[str] = []
    for line in lines:
        kind, _, value = line.partition(" ")
        match kind:
            case "with":
                tools += value.split()
            case "set":
                for assignment in value.split():
                    name, _, variable_value = assignment.partition("=")
                    environment.append((name, variable_value))
            case "flag" if "->" in value:
                old, _, new = value.partition("->")
                flags.append((old.strip(), new.strip()))
            case "empty":
                emptied_files += value.split()
            case "cmake":
                cmake_commands.append(value)
            case _:
                raise ValueError(f"A recipe says '# compile: {line}'; expected with, set, flag, empty or cmake.")
    return Compilation(tuple(tools), tuple(environment), tuple(flags), tuple(emptied_files), tuple(cmake_commands))

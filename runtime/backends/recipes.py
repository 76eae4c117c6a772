"""The recipes of the built-in images: `deploy/images/<name>.txt`, read. Hides their small language.

The one rule: a recipe is a requirements file that pip could read; all that is ours stands in its comments:

    # --- <pip options>         opens a section: it is installed after the ones before it, with these options
    # compile: with <requirements>   this section's requirements are published as source only: they are made into
                                wheels, once on a machine, with these tools at hand
    # compile: set NAME=VALUE ...    ... in this environment
    # compile: flag OLD -> NEW       ... by a C++ compiler that is given NEW for OLD (a shell pattern); no NEW: nothing
                                in its place; no OLD: NEW is given besides
    # compile: empty FILE            ... and that takes this source file for an empty one
    # check: <python>           a statement that must run in the result
    # preload: <modules>        what nearly every script imports, kept ready for warm starts (changes no image)
    # smoke: <framework> [mpi]  the image is ready only after a real run of two processes of this framework
    # unbuildable: <why>        there is no recipe yet
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from runtime.errors import InvalidSpec
from runtime.specs import Controller, Framework

RECIPES = Path(__file__).resolve().parents[2] / "deploy" / "images"
NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9-]{0,50}$")


class Compilation(NamedTuple):
    """How a section's requirements are made into wheels. `flags` are pairs of a shell pattern and what replaces it."""

    tools: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, str], ...] = ()
    empty: tuple[str, ...] = ()


class Section(NamedTuple):
    """Requirements that are installed together."""

    options: tuple[str, ...]
    requirements: tuple[str, ...]
    compilation: Compilation | None = None


class Smoke(NamedTuple):
    """A real run that the image must carry."""

    framework: Framework
    controller: Controller = Controller.GLOO


class Recipe(NamedTuple):
    """One requirements file, read."""

    name: str
    digest: str
    sections: tuple[Section, ...]
    checks: tuple[str, ...]
    smokes: tuple[Smoke, ...]
    unbuildable: str
    preloads: tuple[str, ...] = ()


def names(recipes: Path = RECIPES) -> list[str]:
    """Every image that there is a recipe for."""
    return sorted(path.stem for path in recipes.glob("*.txt"))


def read_recipe(name: str, recipes: Path = RECIPES) -> Recipe:
    """The recipe of a built-in image. Raises InvalidSpec where there is none, ValueError where it makes no sense."""
    path = recipes / f"{name}.txt"
    if not NAME_PATTERN.match(name) or not path.is_file():
        raise InvalidSpec(
            f"There is no built-in image '{name}'. There are: {', '.join(names(recipes))}.", field="image"
        )
    text = path.read_text()
    told: dict[str, list[str]] = {"check": [], "smoke": [], "unbuildable": [], "preload": []}
    sections: list[Section] = []
    options: tuple[str, ...] = ()
    requirements: list[str] = []
    compiling: list[str] = []

    def close() -> None:
        if requirements:
            compilation = _compilation(compiling) if compiling else None
            sections.append(Section(options, tuple(requirements), compilation))

    for line in map(str.strip, text.splitlines()):
        word, _, rest = line.removeprefix("#").strip().partition(":")
        if line.startswith("# ---"):
            close()
            options, requirements, compiling = tuple(line.removeprefix("# ---").split()), [], []
        elif line.startswith("#") and word == "compile":
            compiling.append(rest.strip())
        elif line.startswith("#") and word in told:
            told[word].append(rest.strip())
        elif line and not line.startswith("#"):
            requirements.append(line)
    close()
    return Recipe(
        name,
        _digest(text),
        tuple(sections),
        tuple(told["check"]),
        tuple(_smoke(line) for line in told["smoke"]),
        " ".join(told["unbuildable"]),
        tuple(" ".join(told["preload"]).split()),
    )


def preloads(name: str) -> list[str]:
    """What an image's recipe has kept ready; nothing for an image without one."""
    try:
        return list(read_recipe(name).preloads)
    except InvalidSpec:
        return []


def _digest(text: str) -> str:
    """Of everything that changes the image."""
    lines = (line for line in text.splitlines(keepends=True) if not line.startswith("# preload:"))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _smoke(line: str) -> Smoke:
    framework, *controller = line.split()
    return Smoke(Framework(framework), *map(Controller, controller))


def _compilation(lines: list[str]) -> Compilation:
    tools: list[str] = []
    environment: list[tuple[str, str]] = []
    flags: list[tuple[str, str]] = []
    empty: list[str] = []
    for line in lines:
        verb, _, rest = line.partition(" ")
        match verb:
            case "with":
                tools += rest.split()
            case "set":
                environment += [(name, value) for name, _, value in (word.partition("=") for word in rest.split())]
            case "flag" if "->" in rest:
                old, _, new = rest.partition("->")
                flags.append((old.strip(), new.strip()))
            case "empty":
                empty += rest.split()
            case _:
                raise ValueError(f"A recipe says '# compile: {line}', which means nothing.")
    return Compilation(tuple(tools), tuple(environment), tuple(flags), tuple(empty))

"""Built-in images of the local backend: virtual environments made from `deploy/images/<name>.txt`.

The one rule: `ready.json` is written last, and holds the digest of the requirements it was built from. An image without
it, or with another digest, is built anew from nothing; so a build may be broken off anywhere and repeated.

A requirements file is installed with pip, section by section: a line `# --- <pip options>` opens a section that is
installed after the ones before it, with those options. `# check: <python>` is a statement that must run in the result,
and `# unbuildable: <why>` says that no recipe exists yet.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from runtime.backends.runs import FolderLock, write_json
from runtime.errors import InvalidSpec, RuntimeFault

RECIPES = Path(__file__).resolve().parents[2] / "deploy" / "images"
Progress = Callable[[str], None]

_NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9-]{0,50}$")
_VISION_HOOK = "trainyard_torchvision"


class ImageBuildFailed(RuntimeFault):
    """The image could not be built; the text says at which step."""

    code = "image_build_failed"


class Section(NamedTuple):
    """Requirements that are installed together."""

    options: tuple[str, ...]
    requirements: tuple[str, ...]


class Recipe(NamedTuple):
    """One requirements file, read."""

    name: str
    digest: str
    sections: tuple[Section, ...]
    checks: tuple[str, ...]
    unbuildable: str


def read_recipe(name: str, recipes: Path = RECIPES) -> Recipe:
    """The recipe of a built-in image. Raises InvalidSpec where there is none."""
    path = recipes / f"{name}.txt"
    if not _NAME_PATTERN.match(name) or not path.is_file():
        known = ", ".join(sorted(recipe.stem for recipe in recipes.glob("*.txt")))
        raise InvalidSpec(f"There is no built-in image '{name}'. There are: {known}.", field="image")
    text = path.read_text()
    sections: list[tuple[tuple[str, ...], list[str]]] = [((), [])]
    checks: list[str] = []
    unbuildable = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("# ---"):
            sections.append((tuple(line.removeprefix("# ---").split()), []))
        elif line.startswith("# check:"):
            checks.append(line.removeprefix("# check:").strip())
        elif line.startswith("# unbuildable:"):
            unbuildable = line.removeprefix("# unbuildable:").strip()
        elif line and not line.startswith("#"):
            sections[-1][1].append(line)
    return Recipe(
        name,
        hashlib.sha256(text.encode()).hexdigest(),
        tuple(Section(options, tuple(lines)) for options, lines in sections if lines),
        tuple(checks),
        unbuildable,
    )


def is_ready(images_root: Path, name: str) -> bool:
    """Whether the image can be used: built once to its end, from whatever recipe."""
    return bool(_NAME_PATTERN.match(name)) and (images_root / name / "ready.json").is_file()


def is_current(images_root: Path, recipe: Recipe) -> bool:
    """Whether the image was built from this very recipe."""
    try:
        ready = json.loads((images_root / recipe.name / "ready.json").read_bytes())
    except (OSError, ValueError):
        return False
    return bool(ready.get("digest") == recipe.digest)


def mark_ready(folder: Path, digest: str) -> None:
    """Declare a virtual environment an image that can be used."""
    write_json(folder / "ready.json", {"digest": digest})


def build(images_root: Path, name: str, *, force: bool = False, progress: Progress, recipes: Path = RECIPES) -> bool:
    """Build the image unless it is current; returns whether there was anything to do.

    `progress` is given every line of the build's output. Raises InvalidSpec, ImageBuildFailed.
    """
    recipe = read_recipe(name, recipes)
    if recipe.unbuildable:
        raise ImageBuildFailed(f"The image '{name}' cannot be built here: {recipe.unbuildable}")
    images_root.mkdir(parents=True, exist_ok=True)
    with FolderLock(images_root / f".{name}.lock"):
        if is_current(images_root, recipe) and not force:
            return False
        folder = images_root / name
        shutil.rmtree(folder, ignore_errors=True)
        progress(f"Creating a virtual environment in {folder}")
        # Built where it will stay: a virtual environment cannot be moved.
        venv.create(folder, with_pip=True, symlinks=True)
        python = folder / "bin" / "python"
        for section in recipe.sections:
            progress(f"Installing {', '.join(section.requirements)}")
            _run([str(python), "-m", "pip", "install", *section.options, *section.requirements], progress)
        requirements = [requirement for section in recipe.sections for requirement in section.requirements]
        if any(requirement.startswith("torchvision") for requirement in requirements):
            _declare_vision_operators(python, progress)
        for check in recipe.checks:
            progress(f"Checking: {check}")
            _run([str(python), "-I", "-c", check], progress)
        mark_ready(folder, recipe.digest)
    return True


def _run(command: list[str], progress: Progress) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    environment.pop("PYTHONPATH", None)
    last = ""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for line in process.stdout or ():
            last = line.strip() or last
            progress(line.rstrip())
    if process.returncode:
        raise ImageBuildFailed(f"'{' '.join(command[1:5])} ...' failed with code {process.returncode}: {last}")


def _declare_vision_operators(python: Path, progress: Progress) -> None:
    """Make torchvision's CUDA wheel importable beside a torch without CUDA.

    It registers fake versions of two operators that its own library did not bring on such a torch. The hook declares
    them when torchvision is first imported, and costs an interpreter that never does nothing.
    """
    question = "import sysconfig, torch; print(sysconfig.get_path('purelib')); print(torch.version.cuda)"
    answer = subprocess.run(
        [str(python), "-I", "-c", question],
        capture_output=True,
        text=True,
        check=True,
    )
    site, cuda = answer.stdout.split()
    if cuda != "None":
        return
    progress("This torch has no CUDA: declaring torchvision's operators for it")
    shutil.copyfile(RECIPES / "vision_hook.py", Path(site) / f"{_VISION_HOOK}.py")
    (Path(site) / f"{_VISION_HOOK}.pth").write_text(f"import {_VISION_HOOK}\n")

"""Builds the images of the local backend from their recipes, and proves that they work. Hides pip, venv and disk.

The one rule: an image is ready when two sandboxed processes have done a collective in it, in every framework its recipe
names; before that, whatever fails or is broken off, it is not. So a build may be repeated at any time.
"""

from __future__ import annotations

import collections
import os
import shutil
import subprocess
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from runtime.backends import images, smoke_run, wheels
from runtime.backends.local import LocalBackend
from runtime.backends.recipes import RECIPES, Recipe, Section, Smoke, names, read_recipe
from runtime.backends.runs import FolderLock
from runtime.backends.trash import remove_tree
from runtime.errors import RuntimeFault
from runtime.specs import Image, Mount, Outcome, Resources, RunSpec

_VISION_HOOK = "trainyard_torchvision"
_SHOWN_LINES = 15
_SMOKE_SECONDS = 120
_SMOKE_NODES = 2


class ImageBuildFailed(RuntimeFault):
    """The image could not be built; the text says at which step, and ends with the last lines of its output."""

    code = "image_build_failed"


class Progress(Protocol):
    """Whoever watches a build."""

    def step(self, text: str) -> None:
        """A new step begins."""

    def output(self, line: str) -> None:
        """A line of what the step's programs say."""


class Offer(NamedTuple):
    """An image that can be built here, and whether it is."""

    name: str
    ready: bool
    current: bool
    unbuildable: str


def offers(images_root: Path, recipes: Path = RECIPES) -> list[Offer]:
    """Every image there is a recipe for."""
    read = [read_recipe(name, recipes) for name in names(recipes)]
    return [
        Offer(
            recipe.name,
            images.is_ready(images_root, recipe.name),
            images.is_current(images_root, recipe),
            recipe.unbuildable,
        )
        for recipe in read
    ]


def build(images_root: Path, name: str, *, force: bool = False, progress: Progress, recipes: Path = RECIPES) -> bool:
    """Build the image unless it is current; returns whether there was anything to do. `force`: anew, from nothing.

    Runs that use the image of before go on with it. Raises InvalidSpec, ImageBuildFailed.
    """
    recipe = read_recipe(name, recipes)
    if recipe.unbuildable:
        raise ImageBuildFailed(f"The image '{name}' cannot be built here: {recipe.unbuildable}")
    images_root = images_root.resolve()
    images_root.mkdir(parents=True, exist_ok=True)
    with FolderLock(images_root / f".{name}.lock"):
        if images.is_current(images_root, recipe) and not force:
            return False
        folder = images_root / name
        _set_aside(folder)
        try:
            _install(folder, recipe, progress, anew=force)
            images.mark_candidate(folder)
            for smoke in recipe.smokes:
                _prove(images_root, name, smoke, progress)
        except wheels.CompilerMissing as error:
            raise ImageBuildFailed(f"The image '{name}' cannot be built: {error}") from error
        except OSError as error:
            raise ImageBuildFailed(f"The image '{name}' could not be built: {error}.") from error
        images.mark_ready(folder, recipe.digest)
    return True


def install(folder: Path, name: str, *, progress: Progress, recipes: Path = RECIPES) -> None:
    """Install a recipe into `folder`, checked and not proven by a run: for container images (deploy/docker).

    Raises InvalidSpec, ImageBuildFailed.
    """
    recipe = read_recipe(name, recipes)
    if recipe.unbuildable:
        raise ImageBuildFailed(f"The image '{name}' cannot be built here: {recipe.unbuildable}")
    try:
        _install(folder, recipe, progress, anew=False)
    except (wheels.CompilerMissing, OSError) as error:
        raise ImageBuildFailed(f"The image '{name}' cannot be built: {error}") from error


def _set_aside(folder: Path) -> None:
    """Clear the way. A sandbox holds on to the folder it began with, so that one is kept, until the next build."""
    aside = folder.with_name(f".{folder.name}.before")
    if images.is_ready(folder.parent, folder.name):
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    else:
        shutil.rmtree(folder, ignore_errors=True)


# Installing


def _install(folder: Path, recipe: Recipe, progress: Progress, *, anew: bool) -> None:
    progress.step(f"Creating a virtual environment in {folder}")
    # Built where it will stay: a virtual environment cannot be moved.
    venv.create(folder, with_pip=bool(recipe.sections), symlinks=True)
    python = folder / "bin" / "python"
    for section in recipe.sections:
        _install_section(section, python, progress, anew=anew)
    requirements = [requirement for section in recipe.sections for requirement in section.requirements]
    if any(requirement.startswith("torchvision") for requirement in requirements):
        _declare_vision_operators(python, progress)
    for check in recipe.checks:
        progress.step(f"Checking: {check}")
        _run([str(python), "-I", "-c", check], progress)


def _install_section(section: Section, python: Path, progress: Progress, *, anew: bool) -> None:
    def run(command: list[str], environment: Mapping[str, str]) -> str:
        return _run(command, progress, environment)

    things: list[str] = list(section.requirements)
    if section.compilation is not None:
        things = wheels.compiled(section, python, anew=anew, run=run, step=progress.step)
    progress.step(f"Installing {', '.join(section.requirements)}")
    _run([str(python), "-m", "pip", "install", *section.options, *things], progress)


def _run(command: list[str], progress: Progress, environment: Mapping[str, str] | None = None) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings = {
        "PYTHONUNBUFFERED": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
    }
    output: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**inherited, **settings, **(environment or {})},
        cwd="/",
    ) as process:
        for line in process.stdout or ():
            output.append(line.rstrip())
            progress.output(output[-1])
    if process.returncode:
        raise ImageBuildFailed(
            _with_lines(f"'{' '.join(command[1:5])} ...' failed with code {process.returncode}.", output)
        )
    return "\n".join(output)


def _with_lines(sentence: str, lines: list[str]) -> str:
    shown = collections.deque((line for line in lines if line.strip()), maxlen=_SHOWN_LINES)
    return "\n".join([sentence, *(f"    {line}" for line in shown)])


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
    progress.step("This torch has no CUDA: declaring torchvision's operators for it")
    shutil.copyfile(RECIPES / "vision_hook.py", Path(site) / f"{_VISION_HOOK}.py")
    (Path(site) / f"{_VISION_HOOK}.pth").write_text(f"import {_VISION_HOOK}\n")


# Proving


def _prove(images_root: Path, name: str, smoke: Smoke, progress: Progress) -> None:
    """Run two nodes of one process in the image, as a customer's run would. Raises ImageBuildFailed."""
    progress.step(f"Proving it: {smoke.framework} over {smoke.controller}, two sandboxed processes")
    place = images_root / f".{name}.smoke"
    backend = LocalBackend(root=place / "runs", images_root=images_root, cpus=_SMOKE_NODES, memory_mib=1 << 20)
    backend.delete("smoke")  # of a build that was broken off
    workspace = place / "workspace"
    workspace.mkdir(exist_ok=True)
    spec = RunSpec(
        name="smoke",
        framework=smoke.framework,
        image=Image(builtin=name),
        nodes=_SMOKE_NODES,
        workers_per_node=1,
        resources=Resources(cpus=1, memory_mib=4096),
        script="",
        builtin_script="smoke",
        deadline_seconds=_SMOKE_SECONDS,
        mounts=(Mount(str(workspace), "/workspace", read_only=False),),
        controller=smoke.controller,
    )
    try:
        backend.submit(spec)
        status = smoke_run.await_end(backend, spec.name, _SMOKE_SECONDS + 60)
        text = "".join(backend.logs(spec.name, rank).text for rank in range(spec.world_size))
        if status.outcome is not Outcome.COMPLETED:
            cause = status.failure.message if status.failure else "It did not end in time."
            raise ImageBuildFailed(
                _with_lines(f"The image '{name}' was built, but does not work: {cause}", text.splitlines())
            )
        for line in text.splitlines():
            progress.output(line)
    finally:
        backend.delete(spec.name)
        remove_tree(place)

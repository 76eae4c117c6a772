"""Build images as virtual environments from their recipes, for local runs and Slurm, and test them on this machine.

An image is ready only after two sandboxed processes have completed a collective in it, in every framework that its
recipe names. A build that fails or is interrupted leaves no ready image, and can be repeated at any time.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import subprocess
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from runtime.backends import host, smoke_run
from runtime.backends.local.backend import LocalBackend
from runtime.errors import RuntimeFault
from runtime.files import FileLock
from runtime.images import uv, venvs, wheels
from runtime.images.recipes import RECIPES, Recipe, Section, SmokeTest, read_recipe, recipe_names
from runtime.specs import Flavour, Image, Mount, Outcome, Resources, RunSpec
from runtime.trash import remove_tree

_VISION_HOOK = "trainyard_torchvision"
"""The name of the module and of the .pth file that `_declare_vision_operators` adds to an image."""
_VARIABLES_FILE = "trainyard_variables.pth"
"""The file that `_set_variables` adds to an image. Python executes .pth files in site-packages when it starts."""
# Why a flavour was chosen if the administrator has set none.
_FLAVOUR_REASONS = {Flavour.CPU: "this machine shows no NVIDIA GPU", Flavour.CUDA: "this machine has an NVIDIA GPU"}
_ERROR_LINES = 15
"""How many of the last lines of the output an error shows: enough for pip's own summary."""
_SMOKE_SECONDS = 120
"""How long a test run may take. It usually takes seconds, but importing TensorFlow from a slow disk may take a minute.
"""
_START_AND_END_SECONDS = 60
"""How much longer than `_SMOKE_SECONDS` to wait for a test run. That limit counts only from the start of its ranks."""
_SMOKE_NODES = 2
"""Nodes of a test run: the smallest number that needs a collective."""


class ImageBuildFailed(RuntimeFault):
    """The image could not be built. The text names the step and ends with the last lines of its output."""

    code = "image_build_failed"


class Progress(Protocol):
    """Receives the progress of a build."""

    def step(self, text: str) -> None:
        """Report that a new step begins."""

    def output(self, line: str) -> None:
        """Report a line of output of the step's programs."""


class ImageStatus(NamedTuple):
    """An image that has a recipe, and whether it is built."""

    name: str
    is_ready: bool
    """Whether runs of the image can start."""
    is_current: bool
    """Whether the image was built from this version of its recipe, in the requested flavour."""
    unbuildable: str
    """The reason why the image cannot be built yet, from its recipe; "" if it can be built."""
    flavour: Flavour | None
    """The flavour that the image was built in; None if it is not ready or of unknown flavour."""


def machine_flavour() -> Flavour:
    """Return the flavour that suits this machine: CUDA where NVIDIA's driver shows a GPU."""
    return Flavour.CUDA if host.gpus() else Flavour.CPU


def list_images(images_root: Path, recipes: Path = RECIPES, *, flavour: Flavour | None = None) -> list[ImageStatus]:
    """Return every image that has a recipe. `flavour` is the requested one; None: the machine's."""
    target_flavour = flavour or machine_flavour()
    return [
        ImageStatus(
            name=recipe.name,
            is_ready=venvs.is_ready(images_root, recipe.name),
            is_current=venvs.is_current(images_root, recipe, target_flavour),
            unbuildable=recipe.unbuildable,
            flavour=venvs.flavour(images_root, recipe.name),
        )
        for recipe in (read_recipe(name, recipes) for name in recipe_names(recipes))
    ]


def build(
    images_root: Path,
    name: str,
    *,
    flavour: Flavour | None = None,
    force: bool = False,
    progress: Progress,
    recipes: Path = RECIPES,
) -> bool:
    """Build the image unless it is current; return whether it was built. Raises InvalidSpec, ImageBuildFailed.

    `flavour` is the requested one; None: the machine's. `force`: build even a current image, and compile its wheels
    again. Live runs keep the image that they started with, unless it is built twice while they run (`_set_aside`).
    """
    target_flavour = flavour or machine_flavour()
    recipe = read_recipe(name, recipes)
    if recipe.unbuildable:
        raise ImageBuildFailed(f"The image '{name}' cannot be built here: {recipe.unbuildable}")
    images_root = images_root.resolve()
    images_root.mkdir(parents=True, exist_ok=True)
    with FileLock(images_root / f".{name}.lock"):
        if venvs.is_current(images_root, recipe, target_flavour) and not force:
            return False
        folder = images_root / name
        _set_aside(folder)
        with _errors_translated(name):
            flavour_reason = "set" if flavour else _FLAVOUR_REASONS[target_flavour]
            progress.step(f"Flavour: {target_flavour} ({flavour_reason})")
            _create_environment(folder, recipe, target_flavour, progress, rebuild=force)
            venvs.mark_candidate(folder)
            for smoke_test in recipe.smoke_tests:
                _test_image(images_root, name, smoke_test, progress)
        venvs.mark_ready(folder, recipe.digest, target_flavour)
    return True


def install(folder: Path, name: str, *, flavour: Flavour, progress: Progress, recipes: Path = RECIPES) -> None:
    """Install a recipe into `folder` without a test run. Raises InvalidSpec, ImageBuildFailed.

    The build of the container images (deploy/docker) calls this.
    """
    recipe = read_recipe(name, recipes)
    if recipe.unbuildable:
        raise ImageBuildFailed(f"The image '{name}' cannot be built here: {recipe.unbuildable}")
    with _errors_translated(name):
        _create_environment(folder, recipe, flavour, progress, rebuild=False)


@contextlib.contextmanager
def _errors_translated(name: str) -> Iterator[None]:
    """Raise ImageBuildFailed in place of the other errors that the steps of a build raise."""
    try:
        yield
    except wheels.CompilerMissing as error:
        raise ImageBuildFailed(f"The image '{name}' cannot be built: {error}") from error
    except OSError as error:
        raise ImageBuildFailed(f"The image '{name}' could not be built: {error}.") from error
    except subprocess.CalledProcessError as error:
        streams = (error.stdout, error.stderr)
        texts = [text.decode(errors="replace") if isinstance(text, bytes) else text for text in streams if text]
        message = f"The image '{name}' could not be built: {error}"
        raise ImageBuildFailed(_with_output(message, "\n".join(texts).splitlines())) from error


def _set_aside(folder: Path) -> None:
    """Move a ready image to a folder beside it; remove an image that is not ready.

    Live sandboxes go on with the moved image. It stays until the next build that finds a ready image. This second build
    removes it although a run that began before both builds may still use it: images take gigabytes, and two builds
    during one run are rare.
    """
    previous = folder.with_name(f".{folder.name}.before")
    if venvs.is_ready(folder.parent, folder.name):
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    else:
        shutil.rmtree(folder, ignore_errors=True)


# Installing


def _create_environment(folder: Path, recipe: Recipe, flavour: Flavour, progress: Progress, *, rebuild: bool) -> None:
    """Create a virtual environment in `folder` by this recipe. `rebuild`: compile its wheels again."""
    progress.step(f"Creating a virtual environment in {folder}")
    # Created in its final folder, since scripts of the environment contain absolute paths. An image without
    # packages is created faster without pip.
    venv.create(folder, with_pip=bool(recipe.sections), symlinks=True)
    python = folder / "bin" / "python"
    for section in recipe.sections:
        _install_section(section, recipe, flavour, python, progress, rebuild=rebuild)
    requirements = [requirement for section in recipe.sections for requirement in section.requirements]
    if any(requirement.startswith("torchvision") for requirement in requirements):
        _declare_vision_operators(python, progress)
    if recipe.variables:
        _set_variables(python, recipe.variables)
    for check in recipe.checks:
        progress.step(f"Checking: {check}")
        _run([str(python), "-I", "-c", check], progress)


def _install_section(
    section: Section, recipe: Recipe, flavour: Flavour, python: Path, progress: Progress, *, rebuild: bool
) -> None:
    """Install a section's requirements. The recipe's flavour replaces some, such as torch by its CPU build."""

    def run(command: list[str], environment: Mapping[str, str]) -> str:
        return _run(command, progress, environment)

    if section.compilation is not None:
        wheel_paths = wheels.build_wheels(section, python, rebuild=rebuild, run=run, report_step=progress.step)
        progress.step(f"Installing {', '.join(section.requirements)}")
        _uv_install(python, [*section.options, *wheel_paths], progress)
        return
    replacements = recipe.replacements_for(flavour)
    requirements = [replacements.get(requirement, requirement) for requirement in section.requirements]
    progress.step(f"Installing {', '.join(requirements)}")
    try:
        _uv_install(python, [*section.options, *requirements], progress)
    except ImageBuildFailed:
        # A CUDA image must not fall back to a CPU build: GPU nodes would be sold with it. Where nothing was replaced,
        # there is nothing to fall back to.
        if flavour is Flavour.CUDA or requirements == list(section.requirements):
            raise
        _install_fallback(section, python, progress)


def _install_fallback(section: Section, python: Path, progress: Progress) -> None:
    """Install a section from PyTorch's index, or else as published.

    Call this for the CPU flavour if none of the configured indexes and folders of packages has the section's CPU build.
    """
    packages = ", ".join(section.requirements)
    progress.step(
        f"No configured package index has the CPU build of {packages}. Trying PyTorch's own index of CPU builds"
    )
    try:
        _uv_install(python, [*section.options, "--torch-backend", "cpu", *section.requirements], progress)
    except ImageBuildFailed:
        progress.step(f"PyTorch's index cannot be reached. Installing {packages} as published: with CUDA, several GB")
        _uv_install(python, [*section.options, *section.requirements], progress)


def _uv_install(python: Path, arguments: list[str], progress: Progress) -> None:
    command = [uv.executable(), "pip", "install", "--python", str(python), *arguments]
    _run(command, progress, uv.environment())


def _run(command: list[str], progress: Progress, environment: Mapping[str, str] | None = None) -> str:
    """Run a command, with `environment` added to this process's; return its output. Raises ImageBuildFailed."""
    # PYTHONPATH would make the image's interpreter import packages from outside the image. So could the working
    # directory, which is therefore `/`.
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
        # The first words without the program's path are enough to recognize the command.
        raise ImageBuildFailed(
            _with_output(f"'{' '.join(command[1:5])} ...' failed with code {process.returncode}.", output)
        )
    return "\n".join(output)


def _with_output(message: str, lines: list[str]) -> str:
    """Return the message, followed by the last lines of a program's output."""
    last_lines = collections.deque((line for line in lines if line.strip()), maxlen=_ERROR_LINES)
    return "\n".join([message, *(f"    {line}" for line in last_lines)])


def _declare_vision_operators(python: Path, progress: Progress) -> None:
    """Make torchvision's CUDA wheel importable beside a torch without CUDA.

    The CPU flavour replaces torch by its CPU build, but not torchvision, whose wheel on PyPI is for CUDA. On such a
    torch, torchvision's library does not register two operators that its Python code needs. The hook registers them
    when torchvision is first imported, so it does not slow the start of scripts without torchvision.
    """
    if _evaluate(python, "import torch", "torch.version.cuda") != "None":
        return
    progress.step("Declaring torchvision's operators, since this build of PyTorch has no CUDA")
    site_packages = _site_packages(python)
    shutil.copyfile(RECIPES / "vision_hook.py", site_packages / f"{_VISION_HOOK}.py")
    (site_packages / f"{_VISION_HOOK}.pth").write_text(f"import {_VISION_HOOK}\n")


def _set_variables(python: Path, variables: Sequence[tuple[str, str]]) -> None:
    """Make every interpreter of the image set these environment variables when it starts, unless they are set."""
    lines = [f"import os; os.environ.setdefault({name!r}, {value!r})\n" for name, value in variables]
    (_site_packages(python) / _VARIABLES_FILE).write_text("".join(lines))


def _site_packages(python: Path) -> Path:
    return Path(_evaluate(python, "import sysconfig", "sysconfig.get_path('purelib')"))


def _evaluate(python: Path, imports: str, expression: str) -> str:
    """Evaluate an expression in the image's interpreter after these imports; return its value as text."""
    # -I: neither the environment nor the current folder changes the result.
    command = [str(python), "-I", "-c", f"{imports}; print({expression})"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# Testing


def _test_image(images_root: Path, name: str, smoke_test: SmokeTest, progress: Progress) -> None:
    """Run two nodes with one process each in the image, as a customer's run would. Raises ImageBuildFailed."""
    progress.step(f"Testing {smoke_test.framework} over {smoke_test.controller} in two sandboxed processes")
    test_folder = images_root / f".{name}.smoke"
    # 1 TiB: far more than the test run asks for, so that the backend never refuses it for lack of memory.
    backend = LocalBackend(root=test_folder / "runs", images_root=images_root, cpus=_SMOKE_NODES, memory_mib=1 << 20)
    backend.delete("smoke")  # a build that was interrupted may have left it
    workspace = test_folder / "workspace"
    workspace.mkdir(parents=True, exist_ok=True)
    spec = RunSpec(
        name="smoke",
        framework=smoke_test.framework,
        image=Image(builtin=name),
        nodes=_SMOKE_NODES,
        workers_per_node=1,
        resources=Resources(cpus=1, memory_mib=4096),
        script="",
        builtin_script="smoke",
        deadline_seconds=_SMOKE_SECONDS,
        mounts=(Mount(str(workspace), "/workspace", read_only=False),),
        controller=smoke_test.controller,
    )
    try:
        backend.submit(spec)
        status = smoke_run.await_end(backend, spec.name, _SMOKE_SECONDS + _START_AND_END_SECONDS)
        output = "".join(backend.logs(spec.name, rank).text for rank in range(spec.world_size))
        if status.outcome is not Outcome.COMPLETED:
            cause = status.failure.message if status.failure else "It did not end in time."
            raise ImageBuildFailed(
                _with_output(f"The image '{name}' was built, but does not work: {cause}", output.splitlines())
            )
        for line in output.splitlines():
            progress.output(line)
    finally:
        backend.delete(spec.name)
        remove_tree(test_folder)

"""Check whether a spec can run on a cluster, before it is submitted.

A refusal names the field at fault and says how to fix it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path, PurePosixPath

from runtime import environment
from runtime.errors import InvalidSpec
from runtime.images import venvs
from runtime.images.recipes import can_use_gpus
from runtime.specs import JOBS_TARGET, NAME_PATTERN, Controller, Flavour, Image, Mount, RunSpec

CHECKPOINT_KEY = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
"""Valid checkpoint keys. A key names a folder, so it has no '/', does not begin with '.', and is shorter than the
255 bytes that a file name may have."""
_IMAGE_REFERENCE = re.compile(r"[a-z0-9][a-z0-9._:/-]*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?\Z")
"""A registry's host and the image's path, then an optional tag and an optional digest. References become parts of
arguments of programs, so other characters are refused. `storage.images` checks more."""
_BUILTIN_SCRIPTS = frozenset({"hello", "install", "notebook", "smoke"})
"""Scripts of the platform, by the names of their modules in `runtime.launcher`."""
_RESERVED_FOLDERS = frozenset(
    ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "proc", "dev", "sys", "tmp", "opt", "trainyard"]
)
"""Folders below / that the sandbox itself fills; a mount there would hide the system, the launcher or RUN_DIR."""


def check_name(name: str) -> None:
    """Check a run's name, which is also a folder's name. Raises InvalidSpec."""
    if not NAME_PATTERN.match(name):
        raise InvalidSpec(
            f"'{name}' cannot name a run: use lower-case letters, digits and dashes, 52 at most.", field="name"
        )


def admit(spec: RunSpec, images_root: Path) -> RunSpec:
    """Check a spec for a backend that runs built-in images in sandboxes.

    Return the spec with the sources of its mounts resolved. Raises InvalidSpec.
    """
    check_values(spec)
    check_image(spec.image, images_root, spec.controller, gpus=spec.resources.gpus)
    return resolve_mounts(spec)


def check_values(spec: RunSpec) -> None:
    """Check the parts of a spec that do not depend on this machine. Raises InvalidSpec."""
    check_name(spec.name)
    _check_numbers(spec)
    if spec.checkpoint_key and not CHECKPOINT_KEY.match(spec.checkpoint_key):
        raise InvalidSpec("The checkpoint key may hold letters, digits, '.', '_' and '-'.", field="checkpoint_key")
    for target in (*_mount_roots(spec), *(mount.target for mount in spec.mounts)):
        _check_target(target)
    for name in (*spec.environment, *spec.secrets):
        if not environment.is_name(name) or environment.is_reserved(name):
            raise InvalidSpec(f"The variable '{name}' cannot be set.", field="environment")


def extension_error() -> InvalidSpec:
    """Return the error of a cluster that cannot move the deadline of a running run."""
    return InvalidSpec("This cluster cannot move the deadline of a running run.", field="deadline_seconds")


def resolve_mounts(spec: RunSpec) -> RunSpec:
    """Return the spec with the links in its mounts' sources resolved, after checking the folders and the script.

    Raises InvalidSpec.
    """
    resolved = dataclasses.replace(spec, mounts=tuple(_resolve(spec, mount) for mount in spec.mounts))
    _check_packages(spec)
    _check_script(resolved)
    return resolved


def _check_numbers(spec: RunSpec) -> None:
    """Check that no number is below its minimum. Raises InvalidSpec."""
    minimums = {
        "nodes": (spec.nodes, 1),
        "workers_per_node": (spec.workers_per_node, 1),
        "deadline_seconds": (spec.deadline_seconds, 1),
        "grace_seconds": (spec.grace_seconds, 0),
        "log_limit_bytes": (spec.log_limit_bytes, 1),
    }
    for field, (value, minimum) in minimums.items():
        if value < minimum:
            raise InvalidSpec(f"{field} is {value}, and must be at least {minimum}.", field=field)
    resources = spec.resources
    if resources.cpus <= 0 or resources.memory_mib <= 0 or resources.gpus < 0:
        raise InvalidSpec("A node needs more than 0 CPUs and more than 0 MiB of memory.", field="resources")


def check_image(image: Image, images_root: Path, controller: Controller = Controller.GLOO, *, gpus: int = 0) -> None:
    """Check that this machine can run the image now, with this controller and these GPUs. Raises InvalidSpec."""
    name = image.builtin
    if not name or image.reference:
        raise InvalidSpec(
            "This cluster runs built-in images only. Choose one of them, or ask your administrator for Kubernetes.",
            field="image",
        )
    if not venvs.is_ready(images_root, name):
        raise InvalidSpec(
            f"The image '{name}' is not built on this machine yet. Run 'python manage.py build_image {name}'.",
            field="image",
        )
    if controller is Controller.MPI and not (images_root / name / "bin" / "mpirun").exists():
        raise InvalidSpec(f"The image '{name}' has no mpirun. Choose gloo, or an image with MPI.", field="controller")
    if gpus:  # without GPUs any flavour will do, so it need not be read from the disk
        check_gpus(image, venvs.flavour(images_root, name), gpus)


def check_reference(image: Image) -> None:
    """Check the reference of a customer's own image. Raises InvalidSpec with the field `image`."""
    if not _IMAGE_REFERENCE.match(image.reference):
        raise InvalidSpec(f"'{image.reference}' is not a valid image reference.", field="image")


def check_gpus(image: Image, flavour: Flavour | None, gpus: int) -> None:
    """Check that a built-in image can use its node's `gpus` GPUs. Raises InvalidSpec with the field `gpus`."""
    if gpus and image.builtin and not can_use_gpus(image.builtin, flavour):
        raise InvalidSpec(
            f"The image '{image.builtin}' cannot use GPUs. Choose nodes without GPUs, another image, or ask your "
            "administrator for its CUDA flavour.",
            field="gpus",
        )


def _check_target(target: str) -> None:
    """Check the path of a mount in the sandbox, or of a folder for mounts. Raises InvalidSpec."""
    path = PurePosixPath(target)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or path.parts[1] in _RESERVED_FOLDERS:
        raise InvalidSpec(f"Nothing can be mounted at '{target}'.", field="mounts")


def _mount_roots(spec: RunSpec) -> tuple[str, ...]:
    """Return the folders of the sandbox in which mounts may appear."""
    return spec.workspace_target, spec.datasets_target, spec.models_target, JOBS_TARGET


def _resolve(spec: RunSpec, mount: Mount) -> Mount:
    """Return the mount with its source's links resolved, after checking both of its paths. Raises InvalidSpec."""
    _check_target(mount.target)
    target = PurePosixPath(mount.target)
    if not any(target.is_relative_to(root) for root in _mount_roots(spec)):
        raise InvalidSpec(f"Nothing can be mounted at '{mount.target}'.", field="mounts")
    source = Path(mount.source)
    try:
        resolved = source.resolve(strict=True)
    except OSError as error:
        raise InvalidSpec(f"The folder for '{mount.target}' does not exist.", field="mounts") from error
    if not source.is_absolute() or not resolved.is_dir():
        raise InvalidSpec(f"The source of '{mount.target}' is not a folder.", field="mounts")
    return dataclasses.replace(mount, source=str(resolved))


def _check_packages(spec: RunSpec) -> None:
    """Check that the run's packages, if it has any, are in a folder. Raises InvalidSpec."""
    folder = Path(spec.packages)
    # Must not be a link: installing a package runs its code, which could have replaced this folder by a link.
    if spec.packages and (not folder.is_absolute() or folder.is_symlink() or not folder.is_dir()):
        raise InvalidSpec("The packages of the run are not installed.", field="packages")


def _check_script(spec: RunSpec) -> None:
    """Check that the script is a file in the workspace, or a script of the platform. Raises InvalidSpec."""
    workspace = next((mount for mount in spec.mounts if mount.target == spec.workspace_target), None)
    if workspace is None:
        raise InvalidSpec("The run has no workspace.", field="mounts")
    if spec.builtin_script:
        if spec.builtin_script not in _BUILTIN_SCRIPTS or spec.script:
            raise InvalidSpec(f"The platform has no script '{spec.builtin_script}'.", field="script")
        return
    script = PurePosixPath(spec.script)
    if not spec.script or script.is_absolute() or ".." in script.parts or "\0" in spec.script:
        raise InvalidSpec("The script must be a path inside the workspace.", field="script")
    root = Path(workspace.source)
    try:
        path = (root / script).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: Python 3.11 and 3.12 raise it for a loop of links
        raise InvalidSpec(f"There is no file '{spec.script}' in the workspace.", field="script") from error
    if not path.is_relative_to(root):
        raise InvalidSpec(f"'{spec.script}' is a link that leaves the workspace.", field="script")
    if not path.is_file() or not os.access(path, os.R_OK):
        raise InvalidSpec(f"'{spec.script}' is not a file that can be read.", field="script")
